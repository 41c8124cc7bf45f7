"""A discrete-event engine: a clock and an ordered queue of actions, with no notion of what they model."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from simulator.errors import SimulationError

Action = Callable[[], None]

NORMAL = 0
LATE = 1
"""Runs after every NORMAL action of the same instant, including those that such actions add."""


class Event(NamedTuple):
    """A place in the queue. Events compare by (time, priority, sequence), so ties keep their order of arrival."""

    time_s: float
    priority: int
    sequence: int


class Engine:
    """Runs actions in the total order (time, priority, sequence): equal inputs give equal timelines."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._queue: list[Event] = []
        self._actions: dict[int, Action] = {}
        """Of events that have neither run nor been cancelled, by their sequence."""
        self._sequence = 0

    @property
    def now_s(self) -> float:
        """Simulated seconds since the start."""
        return self._now_s

    @property
    def next_s(self) -> float:
        """When the next event is due; infinite without one."""
        queue, actions = self._queue, self._actions
        while queue and queue[0][2] not in actions:
            heapq.heappop(queue)
        return queue[0][0] if queue else math.inf

    def at(self, time_s: float, action: Action, priority: int = NORMAL) -> Event:
        """Queue an action for an absolute time.

        Raises SimulationError for a time that is in the past or not finite.
        """
        if not (math.isfinite(time_s) and time_s >= self._now_s):
            raise SimulationError(f"event at {time_s!r} s, but the clock is at {self._now_s!r} s and only runs forward")
        event = Event(time_s, priority, self._sequence)
        self._actions[self._sequence] = action
        self._sequence += 1
        heapq.heappush(self._queue, event)
        return event

    def after(self, delay_s: float, action: Action) -> Event:
        """Queue an action `delay_s` seconds from now; errors as `at`."""
        return self.at(self._now_s + delay_s, action)

    def cancel(self, event: Event) -> None:
        """Keep a queued event from running; nothing happens if it has run already."""
        self._actions.pop(event.sequence, None)

    def run(self, until_s: float = math.inf) -> float:
        """Run events up to and including `until_s`, or until none is left; return the clock.

        The clock then stands at the last event that ran: waiting for nothing takes no time.
        """
        queue, actions = self._queue, self._actions
        while queue and queue[0][0] <= until_s:
            time_s, _, sequence = heapq.heappop(queue)
            action = actions.pop(sequence, None)
            if action is not None:
                self._now_s = time_s
                action()
        return self._now_s
