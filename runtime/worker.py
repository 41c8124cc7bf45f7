"""A thread that does what it is given, in the order given, beside the thread that computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
_Item = tuple[Callable[[], Any], Future[Any]]


class Worker:
    """Exchanges that all ranks submit in the same order never wait for each other in a circle."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        # A daemon: a rank that ends after an error does not wait for what the thread waits for.
        threading.Thread(target=_work_off, args=(self._queue,), name=name, daemon=True).start()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue ``work`` behind everything submitted before."""
        done: Future[Result] = Future()
        self._queue.put((work, done))
        return done

    def close(self) -> None:
        """End the thread after the work that it has."""
        self._queue.put(None)


def _work_off(queue: SimpleQueue[_Item | None]) -> None:
    failed: BaseException | None = None
    while (item := queue.get()) is not None:
        work, done = item
        try:
            # After an error nothing fits together any more: what was to follow has failed for the same reason.
            if failed is not None:
                raise failed
            done.set_result(work())
        except BaseException as error:
            failed = error
            done.set_exception(error)
        # What it worked on may be large, and the next item may be long in coming.
        del item, work, done
