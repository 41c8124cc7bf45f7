"""Live progress of planning on stderr: the best plan, the bound and the gap between them, falling."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hybridep.commands.progress import Bar
from hybridep.units import format_seconds

_LINE_EVERY_S = 2.0


class PlanProgress(Bar):
    """A context that is told ("plan" or "bound", seconds) as either improves. The bar fills as the gap closes; where stderr is no
    terminal, a line every two seconds."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self._printed_s = time.monotonic()
        if sys.stderr.isatty():
            columns = [TextColumn("planning"), BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn()]
            self._bar = Progress(*columns, TextColumn("(Ctrl-C: the best so far)"), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=1.0)

    def __call__(self, what: str, seconds: float) -> None:
        """Show what has improved."""
        self._known[what] = seconds
        if self._bar is not None or time.monotonic() - self._printed_s >= _LINE_EVERY_S:
            self._show(self.text)

    def _show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=1 - self.gap, description=text)
        else:
            print(f"planning: {text}", file=sys.stderr, flush=True)
            self._printed_s = time.monotonic()

    @property
    def gap(self) -> float:
        """(step - bound) / step; 1 while either is not known."""
        step, bound = self._known.get("plan"), self._known.get("bound")
        return 1.0 if not step or bound is None else max(0.0, 1 - bound / step)

    @property
    def text(self) -> str:
        """``step 3.2 s, bound 3 s, gap 6.2%``."""
        parts = [f"{'step' if what == 'plan' else what} {format_seconds(value)}" for what, value in self._known.items()]
        return ", ".join([*parts, f"gap {self.gap:.1%}"] if len(self._known) == 2 else parts)
