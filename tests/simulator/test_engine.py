import math

import pytest

from simulator.engine import LATE, Engine
from simulator.errors import SimulationError


def test_timeline_orders_by_time_priority_and_arrival() -> None:
    engine = Engine()
    seen: list[tuple[float, str]] = []

    def note(name: str, *, then: str | None = None) -> None:
        seen.append((engine.now_s, name))
        if then is not None:
            engine.after(0.0, lambda: note(then))

    engine.at(2.0, lambda: note("second"))
    engine.at(1.0, lambda: note("late"), LATE)
    engine.at(1.0, lambda: note("first", then="added while running, before late"))
    engine.at(1.0, lambda: note("tie keeps its order"))
    assert engine.run() == 2.0
    assert seen == [
        (1.0, "first"),
        (1.0, "tie keeps its order"),
        (1.0, "added while running, before late"),
        (1.0, "late"),
        (2.0, "second"),
    ]


def test_cancelled_event_neither_runs_nor_moves_the_clock() -> None:
    engine = Engine()
    seen: list[str] = []
    doomed = engine.at(5.0, lambda: seen.append("doomed"))
    engine.at(1.0, lambda: engine.cancel(doomed))
    assert engine.run() == 1.0
    assert seen == []


def test_run_until_stops_and_goes_on() -> None:
    engine = Engine()
    seen: list[float] = []
    for time_s in (1.0, 2.0, 3.0):
        engine.at(time_s, lambda: seen.append(engine.now_s))
    assert engine.run(until_s=2.0) == 2.0
    assert seen == [1.0, 2.0]
    assert engine.run() == 3.0


@pytest.mark.parametrize("time_s", [0.5, -1.0, math.nan, math.inf])
def test_time_runs_forward(time_s: float) -> None:
    engine = Engine()
    engine.at(1.0, lambda: None)
    engine.run()
    with pytest.raises(SimulationError, match="only runs forward"):
        engine.at(time_s, lambda: None)
