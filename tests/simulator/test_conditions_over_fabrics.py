"""Traces, cuts, jitter, lost sites and drifting routing where sites share trunks."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fabric_cases import FABRICS, fabric
from simulated_plans import conditions, course, make_plan, one_by_one

import simulator.blocks
from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.topology import Cluster, only_sites
from simulator.fabric_file import FabricFile
from simulator.many_steps import Happening, simulate_run
from simulator.routing import zipf_routing
from simulator.step import simulate_step

PLAN = make_plan(6, 2, num_experts=60, num_layers=2, throughput=1e15)
TRUNKS = FABRICS["trunks"]


@cache
def usual_s() -> float:
    """Of a step; not when this file is imported, or all workers would compile the simulator."""
    return simulate_step(PLAN, fabric=TRUNKS).step_s


def ep(cluster: Cluster) -> Plan:
    return Plan(cluster=cluster, workload=PLAN.workload, layers=PLAN.layers)


def with_rate(places: set[str], bandwidth: str) -> FabricFile:
    """The trunks, with another rate between two places."""
    data = TRUNKS.model_dump(mode="json", exclude_none=True)
    for trunk in data["wan"]["graph"]["trunks"]:
        if set(trunk["ends"]) == places:
            trunk["bandwidth"] = bandwidth
    return fabric(wan=data["wan"])


def test_a_slower_trunk_is_as_if_it_was_written_so() -> None:
    slow = conditions(changes=[{"links": "dc1 -> dc2", "factor": 0.2}, {"links": "dc2 -> dc1", "factor": 0.2}])
    written = simulate_step(PLAN, fabric=with_rate({"dc1", "dc2"}, "0.1 Gbps"))
    changed = simulate_step(PLAN, fabric=TRUNKS, conditions=slow)
    assert changed.step_s == pytest.approx(written.step_s, rel=1e-9)
    assert changed.step_s > 1.2 * usual_s()


def test_a_trace_of_a_trunk_takes_effect_when_it_says(tmp_path: Path) -> None:
    trace = tmp_path / "trunk.csv"
    trace.write_text(f"seconds,links,factor\n0,dc1 -> dc2,1\n{usual_s() / 2},dc1 -> dc2,0.2\n{5 * usual_s()},dc1 -> dc2,1\n")
    always = simulate_step(PLAN, fabric=TRUNKS, conditions=conditions(changes=[{"links": "dc1 -> dc2", "factor": 0.2}])).step_s
    first, later, last = (
        simulate_step(PLAN, fabric=TRUNKS, conditions=conditions(trace=str(trace)), start_s=start_s).step_s
        for start_s in (0.0, usual_s(), 5 * usual_s())
    )
    assert usual_s() < first < later
    assert later == pytest.approx(always, rel=1e-9)
    assert last == pytest.approx(usual_s(), rel=1e-9)


def test_jitter_of_trunks_is_seeded() -> None:
    def step_s(seed: int) -> float:
        drawn = conditions(jitter=[{"links": "dc? -> dc?", "spread": 0.5, "period": "5 ms"}], seed=seed)
        return simulate_step(PLAN, fabric=TRUNKS, conditions=drawn).step_s

    assert step_s(1) == step_s(1) != step_s(2)
    assert min(step_s(1), step_s(2)) > usual_s()


@pytest.mark.parametrize("name", ["trunks", "hub", "all of it"])
def test_a_straggler_makes_everybody_wait_and_no_link_slower(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, over = make_plan(6, 2, 4, num_experts=48, num_layers=2, throughput=2e7), FABRICS[name]
    slow = conditions(stragglers=[{"worker": "dc3/node1", "slowdown": 3, "start": "5 s", "end": "1 min"}])
    plain, met = simulate_step(plan, fabric=over), simulate_step(plan, fabric=over, conditions=slow, start_s=5.0)
    # Its own computation takes three times as long, and hides some of what others send it meanwhile.
    computing_s = sum(seconds for label, seconds in plain.parts.items() if label.startswith(("pre_expert", "expert", "head")))
    computing_s += plain.parts["optimizer"]
    assert computing_s > 0.5 * plain.step_s
    assert met.step_s - plain.step_s == pytest.approx(2 * computing_s, rel=0.1)
    assert met.parts["expert"] == pytest.approx(3 * plain.parts["expert"], rel=1e-6)
    np.testing.assert_allclose(met.link_bytes, plain.link_bytes, rtol=1e-9)
    for start_s in (4.999, 60.0):
        assert simulate_step(plan, fabric=over, conditions=slow, start_s=start_s).step_s == pytest.approx(plain.step_s, rel=1e-9)
    # Ranks that are alike but for whom they wait for are told apart.
    monkeypatch.setattr(simulator.blocks, "symmetry", one_by_one)
    full = simulate_step(plan, fabric=over, conditions=slow, start_s=5.0)
    assert full.step_s == pytest.approx(met.step_s, rel=1e-8)
    np.testing.assert_allclose(met.execution.end_s[:, met.symmetry.kind], full.execution.end_s, rtol=1e-7)


def test_a_run_waits_for_a_trunk_that_is_cut() -> None:
    cut = conditions(
        changes=[{"links": "dc4 -> dc5", "factor": 0, "start": f"{2.5 * usual_s()} s", "end": f"{2.5 * usual_s() + 9} s"}]
    )
    run = simulate_run(PLAN, course(steps=6), cut, fabric=TRUNKS)
    steps = [stretch.duration_s for stretch in run.stretches[:-1]]
    assert steps[:2] + steps[3:] == pytest.approx([usual_s()] * 5)
    assert steps[2] == pytest.approx(usual_s() + 9, rel=0.01)
    with pytest.raises(UserError, match="no link is named 'dc0 -> dc2'"):
        simulate_run(PLAN, course(), conditions(changes=[{"links": "dc0 -> dc2", "factor": 1}]), fabric=TRUNKS)


@pytest.mark.parametrize("name", ["trunks", "ring", "hub"])
def test_a_lost_site_leaves_the_rest_of_the_fabric(name: str) -> None:
    before_s = simulate_step(PLAN, fabric=FABRICS[name]).step_s
    loss = {"site": "dc3", "at": f"{3.5 * before_s} s"}
    run = simulate_run(PLAN, course(steps=6, losses=[loss], checkpoint_every=2), planning=ep, fabric=FABRICS[name])
    (at,) = [stretch for stretch in run.stretches if stretch.what is Happening.LOSS]
    assert (at.step, at.sites) == (3, 5)
    left_s = simulate_step(ep(only_sites(PLAN.cluster, {"dc0", "dc1", "dc2", "dc4", "dc5"})), fabric=FABRICS[name]).step_s
    assert run.stretches[-2].duration_s == pytest.approx(left_s)
    assert run.stretches[0].duration_s == pytest.approx(before_s)


def test_a_hub_cannot_be_lost() -> None:
    lost = course(steps=6, losses=[{"site": "dc2", "at": "0 s"}])
    with pytest.raises(UserError, match=r"losses: dc2 is the fabric's hub \(wan\.hub\.at\), which must remain"):
        simulate_run(PLAN, lost, planning=ep, fabric=FABRICS["hub at a site"])


def test_a_new_plan_is_judged_over_the_fabric() -> None:
    """Copies and tokens take different times over the trunks than over the cluster's links, and only the former count."""
    group = PLAN.layers[0].model_copy(update={"domains": {"dc": 6}, "migration": {"dc": 1.0}})
    copies = Plan(cluster=PLAN.cluster, workload=PLAN.workload, layers=(group,))
    copies_s = simulate_step(copies, fabric=TRUNKS).step_s
    worse, better = (PLAN, copies) if copies_s < usual_s() else (copies, PLAN)
    gain_s = abs(copies_s - usual_s())
    assert gain_s != pytest.approx(abs(simulate_step(copies).step_s - simulate_step(PLAN).step_s), rel=0.1)
    for switch_s, taken in ((3.9 * gain_s, [2]), (4.1 * gain_s, [])):
        pays = course(steps=6, replan_every=2, switch=f"{switch_s} s")
        run = simulate_run(worse, pays, planning=lambda cluster: better, fabric=TRUNKS)
        assert [stretch.step for stretch in run.stretches if stretch.what is Happening.REPLAN] == taken
        assert run.stretches[-2].duration_s == pytest.approx(min(copies_s, usual_s()) if taken else max(copies_s, usual_s()))
    stays = simulate_run(better, course(steps=6, replan_every=2), planning=lambda cluster: worse, fabric=TRUNKS)
    assert stays.seconds(Happening.REPLAN) == 0


@pytest.mark.turns(4)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("name", ["mesh", "wide mesh", "hub", "hub at a site", "ring, both ways", "trunks"])
def test_planning_knows_the_fabric_as_it_is(name: str, pairs: bool) -> None:
    """What it gets is by itself what the cluster is over the fabric under the conditions of the moment; after a loss, too."""
    over = {**FABRICS, "wide mesh": fabric(wan={"mesh": {"bandwidth": "2 Gbps"}})}[name]
    made = make_plan(6, 2, num_experts=60, throughput=1e15, pairs=pairs)
    data = made.cluster.model_dump(mode="json", exclude_none=True)
    data["sites"] = [{"name": f"dc{site}"} for site in range(6)]
    for number, link in enumerate(data.get("links", [])):
        link |= {end: link[end].replace("s", "dc") for end in ("src", "dst")} | {"latency": f"{number} us"}
    base = Plan(cluster=build(Cluster, data, "cluster"), workload=made.workload, layers=made.layers)
    trunk = "dc0 -> dc1" if "hub" not in name else "dc0 -> hub" if name == "hub" else "dc0 -> dc2"
    changes = [{"links": trunk, "factor": 0.1}, {"links": "dc4 up", "factor": 1.5}, {"links": "dc5 down", "factor": 0.9}]
    changed = conditions(changes=changes)
    seen: list[Cluster] = []

    def planning(cluster: Cluster) -> Plan:
        seen.append(cluster)
        return Plan(cluster=cluster, workload=base.workload, layers=base.layers)

    simulate_run(base, course(steps=3, replan_every=2), changed, planning=planning, fabric=over)
    loss = {"site": "dc3", "at": "0 s"}
    simulate_run(base, course(steps=3, replan_every=2, losses=[loss]), changed, planning=planning, fabric=over)
    left = only_sites(base.cluster, set(base.cluster.site_names) - {"dc3"})
    for known, cluster, now in ((seen[0], base.cluster, changed), (seen[1], left, None), (seen[2], left, changed)):
        plan = planning(cluster)
        expected_s = simulate_step(plan, conditions=now, fabric=over).step_s
        assert simulate_step(planning(known)).step_s == pytest.approx(expected_s, rel=1e-9)
        # And the fabric on top is the same again.
        assert simulate_step(planning(seen[1]), fabric=over).step_s == pytest.approx(
            simulate_step(planning(left), fabric=over).step_s
        )


def test_routing_drifts_over_the_steps_of_a_run() -> None:
    def run(drift: float) -> list[float]:
        def routing(plan: Plan, step: int):  # type: ignore[no-untyped-def]
            return zipf_routing(plan, exponent=1.5, seed=3, step=step, drift=drift)

        both = simulate_run(PLAN, course(steps=4), conditions(goodput=0.9), routing, fabric=TRUNKS)
        assert both.simulated_steps == 4
        return [stretch.duration_s for stretch in both.stretches[:-1]]

    drifting = run(0.5)
    assert len(set(drifting)) == 4
    assert drifting[0] == run(0.0)[0]
    assert drifting[-1] != run(0.0)[-1]
