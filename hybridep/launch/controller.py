"""The controller: one step at a time it takes the workers' events, adds up steps, and ends the run when it must end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from hybridep.errors import HybridEPError, UserError, WorkerLostError
from hybridep.launch.policies import Cause, Patience, first_cause, is_time_to_judge, rank_name
from hybridep.launch.worker_group import DcLost, Failed, Finished, Started, Stepped, WorkerGroup
from hybridep.run import StepReport


class Phase(Enum):
    """Where a run is."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class WorkerFailedError(HybridEPError):
    """A rank raised an error that is neither the user's nor a lost peer's: a bug; its log holds the traceback."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step of all ranks together; a line of ``steps.jsonl``."""

    step: int
    loss: float
    """Cross entropy per token over the global batch."""
    balance_loss: float
    tokens: int
    step_s: float
    """Seconds of the slowest rank's step."""
    tokens_per_s: float
    wan_bytes: int
    """Payload bytes over the outermost level, all ranks together."""
    sent_bytes: dict[str, int]
    """``operation@level`` -> payload bytes, all ranks together."""
    peak_bytes: int
    """Most memory that any rank has had in use."""
    gradient_norm: float | None = None
    """Of all parameters together, before it was scaled down; None without ``optimizer.max_gradient_norm``."""
    validation_loss: float | None = None
    """Cross entropy per token over the held-out batches, after the step; None where it was not computed."""
    checkpoint: int | None = None
    """Steps of the last checkpoint that was complete by then, of those written since the run was last started."""
    remarks: dict[str, int] = field(default_factory=dict)
    """On the checkpoints of a resumed run, before its first step -> the first rank that has them."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no number that is not finite."""
        losses = {name: finite(getattr(self, name)) for name in ("loss", "balance_loss", "validation_loss")}
        return {key: value for key, value in (asdict(self) | losses).items() if key not in {"checkpoint", "remarks"}}


def finite(value: float | None) -> float | None:
    """The number; None where it is none, or infinite."""
    return value if value is not None and math.isfinite(value) else None


def add_up(reports: Sequence[StepReport]) -> StepRecord:
    """One record from the reports of all ranks about the same step; the same to the bit in whatever order they came."""
    reports = sorted(reports, key=lambda one: one.rank)
    tokens = sum(report.tokens for report in reports)
    step_s = max(report.step_s for report in reports)
    held_out = [report.validation_loss_sum for report in reports if report.validation_loss_sum is not None]
    sent: dict[str, int] = {}
    for report in reports:
        for key, count in report.sent_bytes.items():
            sent[key] = sent.get(key, 0) + count
    return StepRecord(
        step=reports[0].step,
        loss=sum(report.loss_sum for report in reports) / tokens,
        balance_loss=sum(report.balance_loss for report in reports),
        tokens=tokens,
        step_s=step_s,
        tokens_per_s=tokens / step_s if step_s > 0 else 0.0,
        gradient_norm=reports[0].gradient_norm,
        validation_loss=sum(held_out) / sum(report.validation_tokens for report in reports) if held_out else None,
        wan_bytes=sum(report.wan_bytes for report in reports),
        sent_bytes=dict(sorted(sent.items())),
        peak_bytes=max(report.peak_bytes for report in reports),
        checkpoint=max((one.checkpoint for one in reports if one.checkpoint is not None), default=None),
        remarks={what: one.rank for one in reversed(reports) for what in one.remarks},
    )


class Controller:
    """Drives one worker group to its end. ``dcs[r]`` is the datacenter that rank r must run in."""

    def __init__(
        self,
        group: WorkerGroup,
        dcs: Sequence[str],
        *,
        on_step: Callable[[StepRecord], None],
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._dcs, self._on_step = group, tuple(dcs), on_step
        self._patience, self._clock = patience or Patience(), clock
        self._phase = Phase.STARTING
        self._began_s = clock()
        self._first_failure_s: float | None = None
        self._first_finish_s: float | None = None
        self._started: set[int] = set()
        self._finished: set[int] = set()
        self._failures: list[Failed] = []
        self._lost: list[DcLost] = []
        self._reports: dict[int, list[StepReport]] = {}
        self._cause: Cause | None = None
        self.results: dict[int, dict[str, Any]] = {}
        """Rank -> what it measured, where that was its task."""

    def run(self) -> None:
        """Start the group and step until the end. Whatever happens, no worker is left. Raises WorkerLostError (a rank or
        a datacenter), UserError (the ranks found the input wrong or are in the wrong place) or WorkerFailedError."""
        try:
            self._group.start()
            while self._phase in (Phase.STARTING, Phase.RUNNING):
                self.step(0.5)
        finally:
            self._group.abort()
        if self._cause is not None:
            raise error_of(self._cause)

    def step(self, timeout_s: float = 0.0) -> Phase:
        """Take what has happened, waiting up to ``timeout_s`` for something, and decide."""
        events = self._group.poll(timeout_s)
        now = self._clock()
        for event in events:
            match event:
                case Started():
                    self._take_started(event)
                case Stepped(report=report):
                    self._take_report(report)
                case Finished(rank=rank, result=result):
                    self._finished.add(rank)
                    self.results[rank] = result or {}
                    self._first_finish_s = now if self._first_finish_s is None else self._first_finish_s
                case Failed():
                    self._failures.append(event)
                    self._first_failure_s = now if self._first_failure_s is None else self._first_failure_s
                case DcLost():
                    self._lost.append(event)
                    self._first_failure_s = now if self._first_failure_s is None else self._first_failure_s
        self._decide()
        return self._phase

    def _take_started(self, event: Started) -> None:
        if event.dc != self._dcs[event.rank]:
            why = f"rank {event.rank} must run in {self._dcs[event.rank]} but runs in {event.dc or 'no datacenter'}"
            self._end(Cause(who="", why=f"{why} (at {event.address}): check the nodes' labels dc=...", exit_code=2))
        self._started.add(event.rank)
        if self._phase is Phase.STARTING and len(self._started) == len(self._dcs):
            self._phase = Phase.RUNNING

    def _take_report(self, report: StepReport) -> None:
        reports = self._reports.setdefault(report.step, [])
        reports.append(report)
        if len(reports) == len(self._dcs):
            self._on_step(add_up(self._reports.pop(report.step)))

    def _decide(self) -> None:
        now = self._clock()
        if self._phase not in (Phase.STARTING, Phase.RUNNING):
            return
        if self._first_failure_s is not None:
            if is_time_to_judge(self._failures, self._lost, now - self._first_failure_s, self._patience):
                self._end(first_cause(self._failures, self._lost, self._dcs))
        elif len(self._finished) == len(self._dcs):
            self._phase = Phase.FINISHED
        elif self._phase is Phase.STARTING and now - self._began_s > self._patience.start_s:
            self._end(self._missing(self._started, f"did not start within {self._patience.start_s:g} s"))
        elif self._first_finish_s is not None and now - self._first_finish_s > self._patience.finish_s:
            self._end(self._missing(self._finished, f"did not finish within {self._patience.finish_s:g} s of the first"))

    def _missing(self, present: set[int], why: str) -> Cause:
        first = min(set(range(len(self._dcs))) - present)
        return Cause(who=rank_name(first, self._dcs), why=why)

    def _end(self, cause: Cause) -> None:
        if self._cause is None:
            self._cause, self._phase = cause, Phase.FAILED
            self._group.abort()


def error_of(cause: Cause) -> HybridEPError:
    """The error that ends the command line with the cause's exit code."""
    if cause.exit_code == UserError.exit_code:
        return UserError(f"{cause.who}: {cause.why}" if cause.who else cause.why)
    if cause.exit_code == WorkerLostError.exit_code:
        return WorkerLostError(cause.who, cause.why)
    return WorkerFailedError(f"{cause.who}: {cause.why}")
