"""One Ctrl-C for all searches of a command."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_FASTER = 1e6
"""Seconds that pass for time limits in one second after an interrupt."""


@contextmanager
def hurried_by_interrupts() -> Iterator[None]:
    """A search that is interrupted gives its best so far; those that follow inside this context find their time limits over, too,
    and do no more than they must."""
    from planner.clock import timed_by

    # Whoever ignores or handles interrupts goes on doing so; other threads get none.
    if (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    interrupted_s: list[float] = []

    def clock() -> float:
        now_s = time.perf_counter()
        return now_s + _FASTER * (now_s - interrupted_s[0]) if interrupted_s else now_s

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted_s.append(time.perf_counter())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with timed_by(clock, reported=time.perf_counter):
            yield
    finally:
        signal.signal(signal.SIGINT, before)
