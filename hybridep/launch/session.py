"""One training run from start to summary: drives a worker group and keeps what it reports in the run's output folder."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridep.config import write_text
from hybridep.errors import HybridEPError, UserError
from hybridep.launch.controller import Controller, StepRecord
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


def train(job: Job, backend: Backend, on_step: Callable[[StepRecord], None]) -> dict[str, Any]:
    """Run ``job`` to its end and return its summary, which is also written to ``summary.json`` beside ``plan.yaml`` and
    ``steps.jsonl``. Raises UserError when the output cannot be written, and what :meth:`Controller.run` raises; the
    summary is written then, too."""
    output = job.run.output
    make_output(output)
    if not job.resume:
        _put_aside(job.run.checkpoint_folder)
    job.plan.save(output / PLAN_FILE)
    log = StepLog(output / STEPS_FILE, keep=job.resume)
    records: list[StepRecord] = []

    def take(record: StepRecord) -> None:
        records.append(record)
        log.add(record)
        on_step(record)

    error: HybridEPError | None = None
    try:
        Controller(backend.group, job.dcs, on_step=take, patience=backend.patience).run()
    except HybridEPError as problem:
        error = problem
        raise
    finally:
        log.close()
        summary = summarise(job, backend, records, error)
        write_text(output / SUMMARY_FILE, json.dumps({**summary, "provenance": provenance()}, indent=1))
    return summary


def summarise(job: Job, backend: Backend, records: list[StepRecord], error: HybridEPError | None) -> dict[str, Any]:
    """What ``hybridep train --json`` prints. The first step is left out of times where there are others: it pays for
    connections and memory that later steps reuse."""
    prediction = job.plan.prediction
    timed = records[1:] or records
    times = [record.step_s for record in timed]
    planned_bytes = prediction.wan_bytes if prediction else None
    return {
        "status": "failed" if error else ("finished" if _is_complete(job, records) else "stopped"),
        "exit": error.exit_code if error else 0,
        "error": str(error) if error else None,
        "run": job.run.name,
        "output": str(job.run.output),
        "backend": backend.name,
        "shaped": backend.shaped,
        "resumed": job.resume,
        "first_step": records[0].step if records else None,
        "steps": len(records),
        "losses": [record.loss for record in records],
        "step_s": _spread(times),
        "predicted_step_s": prediction.expected_s if prediction else None,
        "tokens_per_s": statistics.median(record.tokens_per_s for record in timed) if timed else None,
        "wan_bytes_per_step": statistics.fmean(record.wan_bytes for record in records) if records else None,
        "planned_wan_bytes_per_step": planned_bytes,
        "peak_bytes": max((record.peak_bytes for record in records), default=None),
        "plan": job.plan.digest,
    }


def _is_complete(job: Job, records: list[StepRecord]) -> bool:
    # Nothing to do after a resume from the last step is complete, too.
    return records[-1].step == job.run.steps if records else job.resume


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


def make_output(folder: Path) -> None:
    """Make a run's output folder. Raises UserError where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be made ({error.strerror})") from None


def _put_aside(folder: Path) -> None:
    """A run from the start must never be resumed from checkpoints that another one left; one generation is kept."""
    previous = folder.with_name(f"{folder.name}.previous")
    try:
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
    except OSError as error:
        raise UserError(f"checkpoints.folder: {folder} cannot be renamed ({error.strerror})") from None


class StepLog:
    """``steps.jsonl``: one line per step. A resumed run keeps the lines of the steps that it does not repeat."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """Raises UserError when the file cannot be written."""
        self._path = path
        self._old = path.read_text(encoding="utf-8").splitlines() if keep and path.exists() else []
        self._begun = False
        try:
            self._stream = path.open("a" if keep else "w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UserError(f"output: {path} cannot be written ({error.strerror})") from None

    def add(self, record: StepRecord) -> None:
        """Append a step."""
        if self._old and not self._begun:
            kept = [line for line in self._old if json.loads(line)["step"] < record.step]
            self._stream.seek(0)
            self._stream.truncate()
            self._stream.writelines(line + "\n" for line in kept)
        self._begun = True
        self._stream.write(json.dumps(record.as_dict()) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
