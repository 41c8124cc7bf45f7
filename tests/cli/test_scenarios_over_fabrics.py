"""What scenarios plan themselves is planned over the trunks of their fabric, as `hybridep plan --fabric` does."""

from __future__ import annotations

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


@pytest.mark.turns(2)
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("stages", [False, True])
def test_a_scenario_plans_what_plan_over_the_fabric_does(small: Inputs, call: Call, stages: bool) -> None:
    path, fabric = small.folder / "plan.yaml", small.folder / "ring.yaml"
    options = ("--stages", "auto") if stages else ()
    made = call("plan", small.cluster, small.workload, "--fabric", fabric, "-o", path, "--time-limit", 5, *options)
    assert made.code == 0, made.err
    by_hand = call("simulate", path, "--fabric", fabric, "--json").json
    result = call(
        "simulate", scenario(small, f"plan: {'stages' if stages else 'auto'}", f"fabric: {fabric}", "planning_time: 5"), "--json"
    )
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


def planned_for(monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    """Clusters for which plans are made from now on; expert parallelism, whatever is asked for."""
    seen: list[Cluster] = []

    def planned(name: str, cluster: Cluster, workload: Workload, **_: Any) -> AnyPlan:
        seen.append(cluster)
        return baseline_plan(cluster, workload, Baseline.EP)

    monkeypatch.setattr("hybridep.commands.scenarios.named_plan", planned)
    return seen


def trunks(cluster: Cluster) -> dict[str, float]:
    """Name -> bits per second."""
    return {trunk.name: 8 * trunk.bandwidth for trunk in cluster.trunks}


def test_plans_of_a_run_are_for_the_ring_as_it_is(small: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = planned_for(monkeypatch)
    course = "course: {steps: 4, replan_every: 3, losses: [{site: b, at: 0 s}]}"
    slow = "conditions: {changes: [{links: 'c -> a', factor: 0.25}, {links: 'd up', factor: 0.5}]}"
    lines = (course, slow, f"fabric: {small.folder / 'ring.yaml'}")
    result = call("simulate", scenario(small, *lines), "--json")
    # Nothing is named so before the site between them is lost.
    assert result.code == 2 and "no link is named 'c -> a'" in result.err and not seen
    lines = (course, slow.replace("c -> a", "c -> d"), lines[2])
    assert call("simulate", scenario(small, *lines), "--json").code == 0
    whole, left, now = seen
    ring = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]
    closed = [("a", "c"), ("c", "d"), ("d", "a")]
    for cluster, ends in ((whole, ring), (left, closed)):
        ways = [f"trunk {src} -> {dst}" for a, b in ends for src, dst in ((a, b), (b, a))]
        assert trunks(cluster) == pytest.approx(dict.fromkeys(ways, 30e6))
    latency_s = {(link.src, link.dst): link.latency for link in whole.links}
    assert (latency_s["a", "b"], latency_s["a", "c"]) == pytest.approx((2e-3, 4e-3))
    assert [link.latency for link in left.links] == pytest.approx([2e-3] * 6)
    # A look at whether a new plan pays sees links as they are.
    assert trunks(now) == pytest.approx(trunks(left) | {"trunk c -> d": 7.5e6})
    assert [8 * bandwidth for bandwidth in now.access_bytes_per_s[0]] == pytest.approx([100e6, 90e6, 50e6])
    assert {link.src: 8 * link.bandwidth for link in now.links} == pytest.approx({"a": 100e6, "c": 90e6, "d": 50e6})


@pytest.mark.usefixtures("counted")
def test_a_plan_after_a_loss_is_that_of_plan_without_the_site(small: Inputs, call: Call) -> None:
    path, fabric = small.folder / "plan.yaml", small.folder / "ring.yaml"
    made = call("plan", small.cluster, small.workload, "--without", "b", "--fabric", fabric, "-o", path, "--time-limit", 5)
    assert made.code == 0, made.err
    by_hand = call("simulate", path, "--fabric", fabric, "--json").json
    lines = ("course: {steps: 2, losses: [{site: b, at: 0 s}]}", "planning_time: 5", f"fabric: {fabric}")
    run = call("simulate", scenario(small, *lines), "--json").json["run"]
    assert run["plans"][1] == by_hand["plan_digest"]
    assert run["step_s"]["min"] == run["step_s"]["max"] == by_hand["step_s"]


def test_each_point_plans_for_its_own_fabric(small: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = planned_for(monkeypatch)
    hub = small.write("hub.yaml", "name: hub\nwan: {hub: {bandwidth: 40 Mbps}}\n")
    switch = small.write(
        "switch.yaml", "name: switch\nwan: {mesh: {bandwidth: 20 Mbps}}\ninside: {nvlink: {domain: 2, bandwidth: 9 Gbps}}\n"
    )
    optics = small.write("optics.yaml", "name: optics\ninside: {mixnet: {}}\n")
    small.cluster.write_text(small.cluster.read_text().replace("name: gpu, size: 1", "name: gpu, size: 2"))
    grid = f"grid: {{fabric: [{small.folder / 'ring.yaml'}, {hub}, {switch}, {optics}, null]}}"
    result = call("simulate", scenario(small, grid), "--json", "--jobs", 1, "--out", small.folder / "table.csv")
    rows = result.json["rows"]
    assert [next(iter(trunks(cluster).items()), None) for cluster in seen] == [
        ("trunk a -> b", 30e6),
        ("trunk a -> hub", 40e6),
        ("trunk a -> b", 20e6),
        None,
    ]
    # A MixNet wants nodes, which is said before anything is planned.
    assert [bool(row.get("error")) for row in rows] == [False, False, False, True, False]
    notes = [line for line in result.err.splitlines() if "know nothing of" in line]
    assert notes == [
        f"hybridep simulate: plans made now know nothing of what {name} has inside sites; it is simulated"
        for name in (optics, switch)
    ]


def test_plan_files_stay_as_they_were_made(small: Inputs, call: Call) -> None:
    path = small.folder / "plan.yaml"
    assert call("plan", small.cluster, small.workload, "-o", path, "--time-limit", 1).code == 0
    made = load_any_plan(path)
    result = call("simulate", path, "--fabric", small.folder / "ring.yaml", "--json")
    assert result.json["plan_digest"] == made.digest and not made.cluster.trunks


def test_more_sites_than_plans_have_trunks_of(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, plan = inputs.write("hub.yaml", "name: hub\nwan: {hub: {bandwidth: 40 Mbps}}\n"), inputs.folder / "plan.yaml"
    inputs.cluster.write_text(inputs.cluster.read_text().replace("name: dc, size: 2", "name: dc, size: 65"))
    inputs.workload.write_text(inputs.workload.read_text().replace("num_experts: 4", "num_experts: 65"))
    refused = call("plan", inputs.cluster, inputs.workload, "--fabric", hub, "-o", plan)
    assert refused.code == 2 and "routes between 65 sites are too many for a plan file" in refused.err and not plan.exists()
    seen = planned_for(monkeypatch)
    result = call("simulate", scenario(inputs, f"fabric: {hub}"), "--json")
    assert result.code == 0 and seen[0].trunks == (), result.err
    assert f"plans made now know nothing of the trunks of {hub} between 65 sites, over 64" in result.err
    # Once one is lost, routes are few enough.
    lost = "course: {steps: 1, losses: [{site: dc3, at: 0 s}]}"
    assert call("simulate", scenario(inputs, f"fabric: {hub}", lost), "--json").code == 0 and len(seen[-1].trunks) == 128
