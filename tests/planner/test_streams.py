"""How many connections plans get where one has a window."""

from __future__ import annotations

import pytest
from planner_cases import make_cluster, make_workload

import planner
from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import MOST_STREAMS, Plan, Schedule
from hybridep.topology import Cluster
from planner.goal import Goal
from planner.streams import WORTH


def long_cluster(window: str | None, **others: object) -> Cluster:
    fields = make_cluster(4, 2, latencies=("50 ms", "0.1 ms")).model_dump(mode="json", exclude_none=True)
    if window is not None:
        fields["levels"][0]["window"] = window
    return build(Cluster, fields | others, "long")


WORKLOAD = make_workload(layers=2, ffn=256)


def step_s(made: Plan) -> float:
    return made.predicted.step


def test_the_fewest_connections_that_are_as_fast() -> None:
    times, chosen = [], []
    for window in ("10 GB", "60 KB", "1 KB"):
        cluster = long_cluster(window)
        made = planner.plan(cluster, WORKLOAD)
        planner.check(made)
        number = made.schedule.streams["l0"]
        with_all = step_s(planner.plan(cluster, WORKLOAD, schedule=Schedule(streams={"l0": MOST_STREAMS})))
        assert with_all <= step_s(made) <= with_all * (1 + WORTH)
        if number > 1:
            fewer = made.model_copy(update={"schedule": Schedule(streams={"l0": number // 2})})
            assert planner.step_cost(fewer).step_s > with_all * (1 + WORTH)
        chosen.append(number)
        times.append(step_s(made))
    assert chosen[0] == 1 and chosen[-1] == MOST_STREAMS and 1 < chosen[1] < MOST_STREAMS
    assert times[0] == pytest.approx(step_s(planner.plan(long_cluster(None), WORKLOAD)), rel=1e-4)
    assert times[-1] > 1.5 * times[0]


def test_what_is_given_stays() -> None:
    cluster = long_cluster("30 KB")
    pinned = planner.plan(cluster, WORKLOAD, schedule=Schedule(streams={"l0": 1}))
    serial = planner.plan(cluster, WORKLOAD, schedule=Schedule(overlap=False))
    assert pinned.schedule == Schedule(streams={"l0": 1})
    assert not serial.schedule.overlap and serial.schedule.streams["l0"] > 1 and step_s(serial) < step_s(pinned)
    ahead = planner.plan(cluster, WORKLOAD, schedule=Schedule(streams={"l0": 2}), ahead=True)
    assert ahead.schedule.streams == {"l0": 2}
    with pytest.raises(UserError, match="given schedule"):
        planner.plan(cluster, WORKLOAD, schedule=Schedule(overlap=False), ahead=True)
    assert planner.plan(long_cluster(None), WORKLOAD).schedule == Schedule()


def test_a_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer connections make the step longer, and ranks are paid by time."""
    base = long_cluster(None)
    cluster = long_cluster("60 KB", gpu=base.gpu.model_dump(mode="json", exclude_none=True) | {"price": "3600 $/h"})
    most = planner.plan(cluster, WORKLOAD, schedule=Schedule(streams={"l0": MOST_STREAMS}))
    assert most.prediction is not None and most.prediction.cost is not None
    monkeypatch.setattr("planner.streams.WORTH", 10.0)
    assert planner.plan(cluster, WORKLOAD).schedule.streams == {"l0": 1}
    tight = planner.plan(cluster, WORKLOAD, goal=Goal(budget_usd=most.prediction.cost))
    assert tight.schedule.streams["l0"] > 1 and tight.prediction is not None and tight.prediction.cost is not None
    assert tight.prediction.cost <= most.prediction.cost * (1 + 1e-9)
