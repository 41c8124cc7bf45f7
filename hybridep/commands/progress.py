"""Live progress of training on stderr: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybridep.launch.controller import StepRecord
from hybridep.units import format_bytes, format_seconds

_LINE_EVERY_S = 2.0


class TrainingProgress:
    """A context that shows each step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._printed_s = float("-inf")
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}")]
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task("starting the ranks", total=steps)

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, record: StepRecord) -> None:
        """Show one step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, description=_text(record))
            return
        now = time.monotonic()
        if record.step == self._steps or now - self._printed_s >= _LINE_EVERY_S:
            print(f"step {record.step}/{self._steps}  {_text(record)}", file=sys.stderr, flush=True)
            self._printed_s = now


def _text(record: StepRecord) -> str:
    return (
        f"loss {record.loss:.4f}  {format_seconds(record.step_s)}/step  {record.tokens_per_s:.0f} tokens/s  "
        f"WAN {format_bytes(record.wan_bytes)}/step"
    )
