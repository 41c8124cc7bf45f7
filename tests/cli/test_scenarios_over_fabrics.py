"""What scenarios plan themselves is planned over the trunks of their fabric, as `hybridep plan --fabric` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Call, Inputs

from hybridep.baselines import Baseline, baseline_plan
from hybridep.pipeline import AnyPlan, load_any_plan
from hybridep.topology import Cluster
from hybridep.workload import Workload

RING = "name: narrow\nwan: {ring: {bandwidth: 30 Mbps, latency: 2 ms}}\n"


@pytest.fixture
def small(inputs: Inputs) -> Inputs:
    """Four sites, whose links differ, and four micro-batches of larger experts."""
    sites = "sites: [{name: a}, {name: b}, {name: c, up: 90 Mbps}, {name: d}]\n"
    inputs.cluster.write_text(inputs.cluster.read_text().replace("name: dc, size: 2", "name: dc, size: 4") + sites)
    inputs.workload.write_text(inputs.workload.read_text().replace("micro_batch_size: 1", "micro_batch_size: 8"))
    inputs.write("ring.yaml", RING)
    return inputs


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches end after so many tables and boxes, long before their time limit: with the same plan on every machine."""
    from planner.sites import solution

    monkeypatch.setattr(solution, "_evaluations", lambda problem: 200)
    monkeypatch.setattr(solution, "MOST_BOXES", 4)


def scenario(inputs: Inputs, *lines: str) -> Path:
    head = f"cluster: {inputs.cluster}\nworkload: {inputs.workload}\n"
    return inputs.write("scenario.yaml", head + "\n".join(lines) + "\n")


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("stages", [False, True])
def test_a_scenario_plans_what_plan_over_the_fabric_does(small: Inputs, call: Call, stages: bool) -> None:
    path, fabric = small.folder / "plan.yaml", small.folder / "ring.yaml"
    options = ("--stages", "auto") if stages else ()
    made = call("plan", small.cluster, small.workload, "--fabric", fabric, "-o", path, "--time-limit", 5, *options)
    assert made.code == 0, made.err
    by_hand = call("simulate", path, "--fabric", fabric, "--json").json
    result = call("simulate", scenario(small, f"plan: {'stages' if stages else 'auto'}", f"fabric: {fabric}", "planning_time: 5"), "--json")
    assert result.code == 0 and "know nothing of" not in result.err, result.err
    assert (result.json["step_s"], result.json["plan_digest"]) == (by_hand["step_s"], load_any_plan(path).digest)
    assert result.json["links"] == by_hand["links"] and "a -> b" in {link["name"] for link in result.json["links"]}


@pytest.mark.usefixtures("counted")
def test_plans_that_know_trunks_are_faster_over_them(call: Call, inputs: Inputs) -> None:
    """Four sites that send each other tokens over narrow trunks should not; with access links alone they should."""
    fabric, plan = inputs.write("ring.yaml", "name: narrow\nwan: {ring: {bandwidth: 60 Mbps}}\n"), inputs.folder / "plan.yaml"
    lines = "cluster: lab-4dc\nworkload: tiny\noverrides: [workload.model.num_layers=2]\n"
    made = call("plan", "lab-4dc", "tiny", "--set", "model.num_layers=2", "-o", plan)
    assert made.code == 0, made.err
    blind = call("simulate", plan, "--fabric", fabric, "--json").json
    aware = call("simulate", inputs.write("s.yaml", f"{lines}planning_time: 5\nfabric: {fabric}\n"), "--json")
    assert aware.code == 0, aware.err
    assert aware.json["step_s"] < 0.7 * blind["step_s"] and aware.json["plan_digest"] != blind["plan_digest"]
