"""Ranks that share processors, as an emulation of many sites on one machine makes them: their computations take turns.

First come, first served, each to its end, and a rank that goes on computing keeps its processor. Ranks that are alike fall out
of step so: the first ones send while others compute, which fills links that would idle, and the last one lets copies set out
when the others have computed what was to hide them. An operating system deals out slices of time, but what a rank computes
between two exchanges is about as short as they are; equal shares of the processors at every moment would keep ranks in step,
and predict steps less well (experiments/prediction-grid).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from simulator.engine import Engine


class Turns:
    """A queue of computations before some processors."""

    def __init__(self, engine: Engine, processors: int) -> None:
        self._engine, self._free = engine, processors
        self._queue: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._done: int | None = None
        """The rank whose computation has just ended: its processor is still its own."""

    def compute(self, rank: int, seconds: float, then: Callable[[], None], *, beside: bool = False) -> None:
        """Let a rank have a processor for as long, then call ``then``. What is computed ``beside`` its own chain queues like
        another rank's."""
        if rank == self._done and not beside:
            self._done = None
            self._begin(rank, seconds, then)
        elif not seconds:
            self._engine.after(0.0, then)
        else:
            self._queue.append((seconds, rank, then))
            self._next()

    def _next(self) -> None:
        while self._free and self._queue:
            seconds, rank, then = self._queue.popleft()
            self._free -= 1
            self._begin(rank, seconds, then)

    def _begin(self, rank: int, seconds: float, then: Callable[[], None]) -> None:
        self._engine.after(seconds, partial(self._end, rank, then))

    def _end(self, rank: int, then: Callable[[], None]) -> None:
        self._done = rank
        then()
        if self._done is not None:
            self._done = None
            self._free += 1
        self._next()
