import json
from pathlib import Path

import pytest
from simulated_plans import PLANS, make_plan

from hybridep.baselines import Baseline
from hybridep.timeline import write_chrome_trace
from simulator.precision import Precision
from simulator.report import simulate
from simulator.step import simulate_step
from simulator.systems import System


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


def test_progress_of_the_plan_and_of_what_it_is_compared_with() -> None:
    told: dict[str, list[float]] = {}
    against = [Baseline.EP, System.TUTEL]
    simulate(PLANS["part gathered"], against, progress=lambda name, done: told.setdefault(name, []).append(done))
    assert list(told) == ["plan", "ep", "tutel"]
    for name in ("plan", "ep"):
        assert told[name] == sorted(set(told[name])) and told[name][0] < 0.5 and told[name][-1] == 1.0


def test_no_baselines_unless_asked() -> None:
    assert simulate(PLANS["ep"]).as_dict()["baselines"] == {}


@pytest.mark.parametrize("different", [False, True])
def test_a_timeline_of_many_sites_stays_small(different: bool, tmp_path: Path) -> None:
    """Browsers must open it: sites that are alike are one, and of those that differ the first are shown."""
    sites = [{"name": f"s{site}"} | ({"up": f"{1 + site / 100} Gbps"} if different else {}) for site in range(40)]
    step = simulate_step(make_plan(40, 2, num_experts=80, num_layers=4, sites=sites), precision=Precision(tolerance=0.005))
    write_chrome_trace(tmp_path / "trace.json", step.spans())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    alike = [int(name.rsplit(" ", 2)[1]) for name in names]
    assert alike == [1] * 32 if different else sum(alike) == 40 and len(names) <= 4
    assert (tmp_path / "trace.json").stat().st_size < 2e4 * len(names)


def test_a_timeline_does_not_grow_with_alike_ranks(tmp_path: Path) -> None:
    sizes = {}
    for num_sites, num_gpus in ((40, 2), (40, 8), (120, 2)):
        step = simulate_step(make_plan(num_sites, num_gpus, num_experts=num_sites * num_gpus, num_layers=4))
        write_chrome_trace(tmp_path / "trace.json", step.spans())
        sizes[num_sites, num_gpus] = (tmp_path / "trace.json").stat().st_size
    # But for the digits of numbers.
    assert max(sizes.values()) < 1.02 * min(sizes.values())
