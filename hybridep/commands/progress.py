"""Live progress on stderr: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from hybridep.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hybridep.launch.controller import StepRecord

_Item = TypeVar("_Item")

_LINE_EVERY_S = 2.0
_SHARE_LINE_EVERY_S = 10.0


class Bar:
    """A context with a bar, where stderr is a terminal."""

    _bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


class TrainingProgress(Bar):
    """A context that shows each step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._printed_s = float("-inf")
        if sys.stderr.isatty():
            columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}")]
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task("starting the ranks", total=steps)

    def __call__(self, record: StepRecord) -> None:
        """Show one step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, description=_text(record))
            return
        now = time.monotonic()
        if record.step == self._steps or record.validation_loss is not None or now - self._printed_s >= _LINE_EVERY_S:
            print(f"step {record.step}/{self._steps}  {_text(record)}", file=sys.stderr, flush=True)
            self._printed_s = now


class ShareProgress(Bar):
    """A context that is told what something is done to, for example simulating, and how much of it is done. Where stderr is no
    terminal, a line every ten seconds."""

    def __init__(self, doing: str) -> None:
        self._doing, self._printed_s = doing, time.monotonic()
        if sys.stderr.isatty():
            columns = [TextColumn(f"{doing} {{task.description}}"), BarColumn(bar_width=20), TaskProgressColumn()]
            self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=1.0, visible=False)

    def __call__(self, what: str, done: float) -> None:
        """Show how far it is."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=what, visible=True)
        elif time.monotonic() - self._printed_s >= _SHARE_LINE_EVERY_S:
            print(f"{self._doing} {what}: {done:.1%}", file=sys.stderr, flush=True)
            self._printed_s = time.monotonic()


def one_by_one(items: Sequence[_Item], what: str) -> Iterable[_Item]:
    """The items in turn; where stderr is a terminal, with a bar that says ``what`` is done to them and goes away in the end."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


def _text(record: StepRecord) -> str:
    held_out = "" if record.validation_loss is None else f" (validation {record.validation_loss:.4f})"
    return (
        f"loss {record.loss:.4f}{held_out}  {format_seconds(record.step_s)}/step  {record.tokens_per_s:.0f} tokens/s  "
        f"WAN {format_bytes(record.wan_bytes)}/step"
    )
