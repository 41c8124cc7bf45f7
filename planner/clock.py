"""What time limits and reports of solving time are read from: wall time, or a clock of the caller's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CLOCK: ContextVar[Callable[[], float]] = ContextVar("planner clock", default=time.perf_counter)
_PASSED: ContextVar[Callable[[float], float]] = ContextVar("time that passed", default=float)


def now_s() -> float:
    """Seconds since some moment."""
    return _CLOCK.get()()


def lasted_s(began_s: float) -> float:
    """Seconds since ``now_s`` was this, for reports: those that passed, however much faster a clock ran to end time limits."""
    passed_s = _PASSED.get()
    return passed_s(now_s()) - passed_s(began_s)


@contextmanager
def timed_by(clock: Callable[[], float], passed_s: Callable[[float], float] = float) -> Iterator[None]:
    """Time limits inside count what ``clock`` counts, in seconds; ``time.process_time`` counts computation, however busy the
    machine is. Solvers' own limits stay wall time. ``passed_s``: what the clock shows -> what it would show at its usual pace."""
    before, passed_before = _CLOCK.set(clock), _PASSED.set(passed_s)
    try:
        yield
    finally:
        _CLOCK.reset(before)
        _PASSED.reset(passed_before)
