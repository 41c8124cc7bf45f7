"""One training run from start to summary: drives a worker group and keeps what it reports in the run's output folder."""

from __future__ import annotations

import json
import signal
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hybridep.checkpoint_folders import clear_partial, put_aside
from hybridep.config import require_writable, write_text
from hybridep.errors import UserError
from hybridep.launch.controller import Controller, StepRecord, finite
from hybridep.launch.folders import held
from hybridep.launch.policies import Patience
from hybridep.launch.worker import Job
from hybridep.launch.worker_group import WorkerGroup
from hybridep.provenance import provenance

STEPS_FILE = "steps.jsonl"
SUMMARY_FILE = "summary.json"
PLAN_FILE = "plan.yaml"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Where the ranks run."""

    name: str
    """``local`` or ``ray``."""
    group: WorkerGroup
    shaped: bool
    """Whether links are emulated at the cluster's rates."""
    patience: Patience = field(default_factory=Patience)


def train(
    job: Job,
    backend: Backend,
    on_step: Callable[[StepRecord], None],
    *,
    lost: Sequence[str] = (),
    made: Made | None = None,
) -> dict[str, Any]:
    """Run ``job`` to its end and return its summary, which is also written to ``summary.json`` beside ``plan.yaml`` and
    ``steps.jsonl``. ``lost``: losses before, after which it goes on now; ``made``: its steps before, to which those made now are
    added. Raises UserError when the output cannot be written or another run has it, and what :meth:`Controller.run` raises; the
    summary is written then, too."""
    output, checkpoints = job.run.output, job.run.checkpoint_folder
    require_writable("output", output)
    with ExitStack() as stack:
        stack.enter_context(held("output", output))
        require_writable("checkpoints.folder", checkpoints)
        if not checkpoints.samefile(output):
            stack.enter_context(held("checkpoints.folder", checkpoints))
        return _train(job, backend, on_step, lost, made or Made())


def _train(job: Job, backend: Backend, on_step: Callable[[StepRecord], None], lost: Sequence[str], made: Made) -> dict[str, Any]:
    output = job.run.output
    if not job.resume:
        put_aside(job.run.checkpoint_folder)
    job.plan.save(output / PLAN_FILE)
    log = StepLog(output / STEPS_FILE, keep=job.resume)

    def take(record: StepRecord) -> None:
        made.add(record)
        log.add(record)
        on_step(record)

    error: BaseException | None = None
    try:
        Controller(backend.group, job.dcs, on_step=take, patience=backend.patience).run()
    except BaseException as problem:
        error = problem
        raise
    finally:
        log.close()
        clear_partial(job.run.checkpoint_folder)
        summary = summarise(job, backend, made, error) | {"lost": list(lost)}
        # A resume that finds nothing to do leaves what the run before says of its steps.
        if error is not None or made.losses or lost or not (output / SUMMARY_FILE).exists():
            try:
                write_text(output / SUMMARY_FILE, json.dumps({**summary, "provenance": provenance()}, indent=1))
            except UserError:
                # What ended the run comes first; most likely it is the same full disk.
                if error is None:
                    raise
    return summary


class Made:
    """What a summary needs of the steps made. A step that is made again counts once, as it was made last; one whose reports a
    lost machine took along does not, though a checkpoint may have it."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[float | None, float, float, int]] = {}
        """Step -> loss, seconds, tokens a second and bytes between sites, in order of steps."""
        self.validation_loss: float | None = None
        """The last one."""
        self.peak_bytes = 0

    def add(self, record: StepRecord) -> None:
        """Count a step; those from it on that were made before no longer do."""
        while self._steps and next(reversed(self._steps)) >= record.step:
            self._steps.popitem()
        self._steps[record.step] = finite(record.loss), record.step_s, record.tokens_per_s, record.wan_bytes
        if record.validation_loss is not None:
            self.validation_loss = finite(record.validation_loss)
        self.peak_bytes = max(self.peak_bytes, record.peak_bytes)

    @property
    def first_step(self) -> int | None:
        """None before there is one."""
        return next(iter(self._steps), None)

    @property
    def losses(self) -> list[float | None]:
        """Of each step, as what follows."""
        return [loss for loss, _, _, _ in self._steps.values()]

    @property
    def times_s(self) -> list[float]:
        """Seconds."""
        return [step_s for _, step_s, _, _ in self._steps.values()]

    @property
    def tokens_per_s(self) -> list[float]:
        """Of all ranks together."""
        return [tokens_per_s for _, _, tokens_per_s, _ in self._steps.values()]

    @property
    def wan_bytes(self) -> list[int]:
        """Over the outermost level."""
        return [wan_bytes for _, _, _, wan_bytes in self._steps.values()]


def summarise(job: Job, backend: Backend, made: Made, error: BaseException | None) -> dict[str, Any]:
    """What ``hybridep train --json`` prints. The first step is left out of times where there are others: it pays for
    connections and memory that later steps reuse."""
    prediction = job.plan.prediction
    number = len(made.losses)
    rates = made.tokens_per_s[1:] or made.tokens_per_s
    tokens_per_s = statistics.median(rates) if rates else None
    gpu_flops = job.plan.workload.flops_per_token / job.plan.cluster.num_gpus
    return {
        "status": "finished" if error is None else ("failed" if isinstance(error, Exception) else "stopped"),
        "exit": _exit_code(error),
        "error": str(error) if isinstance(error, Exception) else None,
        "run": job.run.name,
        "output": str(job.run.output),
        "backend": backend.name,
        "shaped": backend.shaped,
        "resumed": job.resume,
        "first_step": made.first_step,
        "steps": number,
        "losses": made.losses,
        "validation_loss": made.validation_loss,
        "step_s": _spread(made.times_s[1:] or made.times_s),
        "predicted_step_s": prediction.expected_s if prediction else None,
        "tokens_per_s": tokens_per_s,
        "model_flops_per_s_per_gpu": None if tokens_per_s is None else tokens_per_s * gpu_flops,
        "wan_bytes_per_step": sum(made.wan_bytes) / number if number else None,
        "planned_wan_bytes_per_step": prediction.wan_bytes if prediction else None,
        "peak_bytes": made.peak_bytes if number else None,
        "plan": job.plan.digest,
    }


def _exit_code(error: BaseException | None) -> int:
    """What the command ends with."""
    if isinstance(error, SystemExit):  # of a signal that ends it
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 0 if error is None else getattr(error, "exit_code", 1)


def _spread(times_s: list[float]) -> dict[str, float] | None:
    if not times_s:
        return None
    ordered = sorted(times_s)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "stdev": statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
    }


class StepLog:
    """``steps.jsonl``: one line per step. A resumed run keeps the lines of the steps that it does not repeat."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """Raises UserError when the file cannot be written."""
        self._path, self._keep = path, keep
        self._stream = self._open("a" if keep else "w")

    def _open(self, mode: str) -> IO[str]:
        try:
            return self._path.open(mode, encoding="utf-8", buffering=1)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"output: {self._path} cannot be written ({error.strerror})")

    def add(self, record: StepRecord) -> None:
        """Append a step. Raises UserError when it cannot be written."""
        if self._keep:
            self._keep = False
            self._stream.close()
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            write_text(self._path, "".join(f"{line}\n" for line in lines if _is_before(record.step, line)))
            self._stream = self._open("a")
        try:
            self._stream.write(json.dumps(record.as_dict()) + "\n")
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # of a step that could not be written, which has been said
            self._stream.close()


def _is_before(step: int, line: str) -> bool:
    """Whether a line is of an earlier step; none that was cut off when a run ended is."""
    try:
        return bool(json.loads(line)["step"] < step)
    except (ValueError, KeyError, TypeError):
        return False
