"""Ctrl-C and SIGTERM: one of them for all searches of a command."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes."""
_FASTER = 1e6
"""Seconds that pass for time limits in one second after an interrupt."""


def terminate(number: int, _frame: FrameType | None) -> None:
    """Handles SIGTERM and others that end a process: as an exception, so that whatever was started is stopped on the way out,
    which a second one must not end."""
    signal.signal(number, lambda *_: None)
    raise SystemExit(128 + number)


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Ctrl-C inside ends the command. As a KeyboardInterrupt it would end searches only, and what they found so far be used."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(INTERRUPTED)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def hurried_by_interrupts() -> Iterator[None]:
    """A search that is interrupted gives its best so far; those that follow inside this context find their time limits over, too,
    and do no more than they must. SIGTERM is an interrupt as well. Raises SystemExit where it leaves nothing to go on with."""
    from planner.clock import timed_by

    # Whoever ignores or handles a signal goes on doing so; other threads get none.
    usual = {signal.SIGINT: (signal.default_int_handler,), signal.SIGTERM: (signal.SIG_DFL, terminate)}
    ours = [number for number, handlers in usual.items() if signal.getsignal(number) in handlers]
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    taken: list[tuple[int, float]] = []

    def clock() -> float:
        now_s = time.perf_counter()
        return now_s + _FASTER * (now_s - taken[0][1]) if taken else now_s

    def interrupt(number: int, frame: FrameType | None) -> None:
        taken.append((number, time.perf_counter()))
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ours}
    try:
        with timed_by(clock, reported=time.perf_counter):
            yield
    except KeyboardInterrupt:
        if taken and taken[-1][0] == signal.SIGTERM:
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
