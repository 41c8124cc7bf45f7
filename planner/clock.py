"""What time limits and reports of solving time are read from: wall time, or a clock of the caller's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CLOCK: ContextVar[Callable[[], float]] = ContextVar("planner clock", default=time.perf_counter)


def now_s() -> float:
    """Seconds since some moment."""
    return _CLOCK.get()()


@contextmanager
def timed_by(clock: Callable[[], float]) -> Iterator[None]:
    """Time limits inside count what ``clock`` counts, in seconds; ``time.process_time`` counts computation, however busy the
    machine is. Solvers' own limits stay wall time."""
    before = _CLOCK.set(clock)
    try:
        yield
    finally:
        _CLOCK.reset(before)
