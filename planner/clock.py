"""What time limits and reports of solving time are read from: wall time, or a clock of the caller's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hybridep.compiled import seconds_compiling

_Clock = Callable[[], float]

_CLOCKS: ContextVar[tuple[_Clock, _Clock]] = ContextVar("planner clocks", default=(time.perf_counter, time.perf_counter))


_compiling_s = seconds_compiling(lambda: _CLOCKS.get()[0]())


def now_s() -> float:
    """Seconds since some moment, for time limits. They stand still while functions are compiled: that is once on a machine, and
    what is found must not depend on it."""
    return _CLOCKS.get()[0]() - _compiling_s()


def elapsed_s() -> float:
    """Seconds since some moment, for reports; without compiling, too."""
    return _CLOCKS.get()[1]() - _compiling_s()


@contextmanager
def timed_by(clock: _Clock, reported: _Clock | None = None) -> Iterator[None]:
    """Time limits inside count what ``clock`` counts, in seconds; ``time.process_time`` counts computation, however busy the
    machine is. Solvers' own limits stay wall time. Reports count what ``reported`` does, where that is another one."""
    before = _CLOCKS.set((clock, reported or clock))
    try:
        yield
    finally:
        _CLOCKS.reset(before)
