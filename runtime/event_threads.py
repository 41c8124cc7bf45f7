"""Threads that gloo starts, kept from spinning on a sender's lock.

Gloo serves a group's connections from one thread, which only tries to lock a connection and asks again at once when somebody
has it; a sender has it while the kernel takes its bytes. Where processors are scarce, a thread that slept long is let in before
those at work, the sender among them, and then spins until its time slice ends. A batch thread (sched(7)) waits for its turn.
With four ranks on two processors an exchange takes a third of the processor time; where processors are free it changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


@contextmanager
def waiting_their_turn() -> Iterator[None]:
    """Of all threads that this process starts meanwhile; without effect where the system has no such scheduling, and on threads
    that are scheduled in a way of their own."""
    before = _threads()
    yield
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in _threads() - before:
        # It may have ended.
        with suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    return {int(entry.name) for entry in _THREADS.iterdir()} if _THREADS.is_dir() else set()
