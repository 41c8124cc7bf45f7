import json

import pytest
from simulated_plans import PLANS

from hybridep.baselines import Baseline
from simulator.report import simulate
from simulator.step import simulate_step


def test_report_is_plain_data_with_what_the_command_line_promises() -> None:
    plan = PLANS["part gathered"]
    report = simulate(plan, against=[Baseline.EP, Baseline.FULL_GATHER])
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["step_s"] == pytest.approx(simulate_step(plan).step_s)
    assert set(data["baselines"]) == {"ep", "full_gather"}
    assert all(step_s > 0 for step_s in data["baselines"].values())
    assert data["busiest_link"]["load"] == max(link["load"] for link in data["links"])
    assert [link["name"] for link in data["links"]] == [link.name for link in plan.cluster.link_table]
    assert sum(data["parts"].values()) == pytest.approx(data["step_s"])
    assert data["wall_s"] > 0


def test_no_baselines_unless_asked() -> None:
    assert simulate(PLANS["ep"]).as_dict()["baselines"] == {}
