from functools import cache

import pytest
from simulated_plans import conditions, course, make_plan

from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.shares import on_sites
from hybridep.topology import Cluster, only_sites
from simulator.errors import SimulationError, StuckError
from simulator.many_steps import Happening, cluster_at_present, simulate_run
from simulator.step import simulate_step

PLAN = make_plan(4, 2, sites=[{"name": f"s{dc}"} for dc in range(4)], num_experts=24)


@cache
def usual_s() -> float:
    """Of a step; not when this file is imported, or all workers would compile the simulator."""
    return simulate_step(PLAN).step_s


def ep(cluster: Cluster, like: Plan = PLAN) -> Plan:
    return Plan(cluster=cluster, workload=like.workload, layers=like.layers)


def gathering(cluster: Cluster) -> Plan:
    group = PLAN.layers[0].model_copy(update={"domains": {"dc": 4}, "migration": {"dc": 1.0}})
    return Plan(cluster=cluster, workload=PLAN.workload, layers=(group,))


def test_equal_steps_are_simulated_once() -> None:
    run = simulate_run(PLAN, course(steps=50, checkpoint_every=20, checkpoint="2 s"))
    assert run.simulated_steps == 1
    # The last one at the end, as in training.
    assert [stretch.step for stretch in run.stretches if stretch.what is Happening.CHECKPOINT] == [20, 40, 50]
    assert run.total_s == pytest.approx(50 * usual_s() + 3 * 2)
    assert run.as_dict()["steps_run"] == 50


def test_steps_follow_links_that_change() -> None:
    slow = conditions(changes=[{"links": "* up", "factor": 0.5, "start": f"{10.5 * usual_s()} s"}])
    run = simulate_run(PLAN, course(steps=30), slow)
    slow_s = simulate_step(PLAN, conditions=slow, start_s=1e6).step_s
    steps = [stretch.duration_s for stretch in run.stretches]
    assert steps[:10] == pytest.approx([usual_s()] * 10)
    assert usual_s() < steps[10] < slow_s
    assert steps[11:] == pytest.approx([slow_s] * 19 + [0])
    assert run.simulated_steps == 3


def test_a_lost_site_costs_the_step_and_all_since_the_checkpoint() -> None:
    loss = {"site": "s2", "at": f"{17.5 * usual_s()} s"}
    run = simulate_run(
        PLAN, course(steps=20, losses=[loss], checkpoint_every=10, restart="30 s"), conditions(goodput=1.0), planning=ep
    )
    kinds = [stretch.what for stretch in run.stretches]
    assert kinds.count(Happening.STEP) == 17 + 10
    (at,) = [stretch for stretch in run.stretches if stretch.what is Happening.LOSS]
    assert (at.step, at.sites) == (17, 3)
    assert at.duration_s == pytest.approx(30 + 0.5 * usual_s(), rel=1e-6)
    left_s = simulate_step(ep(only_sites(PLAN.cluster, {"s0", "s1", "s3"}))).step_s
    assert run.stretches[-2].duration_s == pytest.approx(left_s)
    assert run.total_s == pytest.approx(17.5 * usual_s() + 30 + 10 * left_s)


def test_ranks_that_share_processors_have_those_of_a_lost_site() -> None:
    """As where `--without` plans for the others: fewer ranks compute on the same processors."""
    data = PLAN.cluster.model_dump(mode="json", exclude_none=True)
    shared = build(Cluster, data | {"gpu": data["gpu"] | {"sharing": 2}}, "cluster")
    losses = [{"site": site, "at": "0 s"} for site in ("s1", "s2")]
    seen: list[Cluster] = []

    def planning(cluster: Cluster) -> Plan:
        seen.append(cluster)
        return ep(cluster)

    simulate_run(ep(shared), course(steps=1, losses=losses), planning=planning)
    assert [cluster.gpu.sharing for cluster in seen] == pytest.approx([1.5, 1])
    assert seen == [on_sites(shared, PLAN.workload, names)[0] for names in (("s0", "s2", "s3"), ("s0", "s3"))]
    assert seen[1].gpu.throughput == pytest.approx(2 * shared.gpu.throughput)


def test_a_loss_counts_while_a_checkpoint_is_written() -> None:
    loss = {"site": "s2", "at": f"{20 * usual_s() + 3} s"}
    run = simulate_run(PLAN, course(steps=30, losses=[loss], checkpoint_every=10, checkpoint="2 s"), planning=ep)
    (at,) = [stretch for stretch in run.stretches if stretch.what is Happening.LOSS]
    assert (at.start_s, at.duration_s) == pytest.approx((20 * usual_s() + 2, 1))
    steps = [stretch.step for stretch in run.stretches if stretch.what is Happening.STEP]
    assert steps == [*range(20), *range(10, 30)]
    assert [stretch.step for stretch in run.stretches if stretch.what is Happening.CHECKPOINT] == [10, 20, 30]


def test_a_loss_counts_while_the_last_checkpoint_is_written() -> None:
    loss = {"site": "s2", "at": f"{3.5 * usual_s()} s"}
    run = simulate_run(PLAN, course(steps=3, losses=[loss], checkpoint=f"{usual_s()} s"), planning=ep)
    assert [stretch.step for stretch in run.stretches if stretch.what is Happening.STEP] == [0, 1, 2, 0, 1, 2]


def test_a_site_that_is_back_is_taken_up_after_a_checkpoint_and_lost_again() -> None:
    again_s = 9 * usual_s() + 10 * simulate_step(ep(only_sites(PLAN.cluster, {"s0", "s1", "s3"}))).step_s
    times_s = (2.5 * usual_s(), 3.5 * usual_s(), again_s)
    losses = [{"site": "s2", "at": f"{at_s} s", "back": f"{at_s + usual_s()} s"} for at_s in times_s]
    losses.append({"site": "s3", "at": f"{again_s + 1.2 * usual_s()} s"})
    run = simulate_run(PLAN, course(steps=30, losses=losses, checkpoint_every=10, restart=f"{0.5 * usual_s()} s"), planning=ep)
    shown = [(one.what, one.step, one.sites) for one in run.stretches if one.what not in (Happening.STEP, Happening.CHECKPOINT)]
    # It was away when it was lost for the second time. When another is lost it is back, and that restart takes it up.
    lost, back = Happening.LOSS, Happening.RETURN
    assert shown == [(lost, 2, 3), (back, 10, 4), (lost, 15, 3), (lost, 10, 3)]
    assert run.seconds(back) == pytest.approx(0.5 * usual_s())
    # With all sites the first plan was in force again.
    assert run.plans[0] == next(one.plan for one in run.stretches if one.what is back) and len(run.plans) == 3


def test_a_restart_waits_for_a_site_that_is_back_before_it_ends() -> None:
    loss = {"site": "s2", "at": f"{2.5 * usual_s()} s", "back": "20 s"}
    run = simulate_run(PLAN, course(steps=5, losses=[loss], restart="30 s"), planning=ep)
    assert run.plans == (PLAN.digest,) and run.total_s == pytest.approx(2.5 * usual_s() + 30 + 5 * usual_s())


def test_a_loss_during_a_restart_begins_it_anew() -> None:
    losses = [{"site": "s2", "at": "0 s"}, {"site": "s3", "at": "20 s"}]
    run = simulate_run(PLAN, course(steps=1, losses=losses, restart="30 s"), planning=ep)
    lost = [(stretch.start_s, stretch.duration_s, stretch.sites) for stretch in run.stretches if stretch.what is Happening.LOSS]
    assert lost == [(0, 20, 3), (20, 30, 2)]
    # The first plan was in force, too, though no step of it ended.
    assert run.as_dict()["plans"] == [PLAN.digest, *(stretch.plan for stretch in run.stretches[:2])]


def test_a_loss_ends_a_step_that_waits_for_its_links() -> None:
    cut = conditions(changes=[{"links": "s2 *", "factor": 0, "start": f"{1.5 * usual_s()} s"}])
    loss = {"site": "s2", "at": "1 min"}
    run = simulate_run(PLAN, course(steps=5, losses=[loss]), cut, planning=ep)
    assert [stretch.what for stretch in run.stretches[:2]] == [Happening.STEP, Happening.LOSS]
    assert run.stretches[2].start_s == pytest.approx(60) and run.stretches[-1].step == 5
    # One of a site that is away ends nothing.
    losses = [{"site": "s3", "at": "0 s", "back": f"{usual_s()} s"}, {"site": "s3", "at": "1 min"}]
    with pytest.raises(StuckError, match="s2 up"):
        simulate_run(PLAN, course(steps=9, losses=losses, checkpoint_every=5), cut, planning=ep)
    with pytest.raises(StuckError, match=r"began .* into the run cannot end.* s2 up, s2 down.*links 's2 \*' have factor 0 from"):
        simulate_run(PLAN, course(steps=5), cut)


def test_a_new_plan_is_taken_up_where_it_pays() -> None:
    seen: list[Cluster] = []

    def planning(cluster: Cluster) -> Plan:
        seen.append(cluster)
        return ep(cluster)

    before = gathering(PLAN.cluster)
    slow = conditions(changes=[{"links": "s[0-3] *", "factor": 0.1, "start": "0 s"}, {"links": "s1 up", "factor": 0.5}])
    saves_s = simulate_step(before, conditions=slow).step_s - simulate_step(PLAN, conditions=slow).step_s
    assert saves_s > 0
    pays = course(steps=40, replan_every=10, switch=f"{25 * saves_s} s")
    run = simulate_run(before, pays, slow, planning=planning)
    assert [stretch.step for stretch in run.stretches if stretch.what is Happening.REPLAN] == [10]
    too_dear = course(steps=40, replan_every=10, switch=f"{31 * saves_s} s")
    run = simulate_run(before, too_dear, slow, planning=planning)
    assert run.seconds(Happening.REPLAN) == 0 and len(set(run.as_dict()["plans"])) == 1
    # The planner is asked about the links as they are.
    assert [site.up for site in seen[0].sites] == pytest.approx([1.25e7, 6.25e6, 1.25e7, 1.25e7])


def test_looks_at_new_plans_go_on_after_a_loss() -> None:
    """The plan made then is as old as the steps since."""
    sites: list[int] = []

    def planning(cluster: Cluster) -> Plan:
        sites.append(cluster.sizes[0])
        return ep(cluster)

    loss = {"site": "s2", "at": f"{27.5 * usual_s()} s"}
    simulate_run(PLAN, course(steps=30, losses=[loss], replan_every=10), planning=planning)
    # At steps 10 and 20; then lost, back at the beginning, and at steps 10 and 20 again.
    assert sites == [4, 4, 3, 3, 3]


def test_a_cluster_with_a_link_per_pair_loses_them_too() -> None:
    cluster = make_plan(3, 2, pairs=True, num_experts=18).cluster
    left = only_sites(cluster, {"s0", "s2"})
    assert [(link.src, link.dst) for link in left.links] == [("s0", "s2"), ("s2", "s0")]
    factor = [0.5 if link.name == "s2 -> s0" else 1.0 for link in cluster.link_table]
    now = cluster_at_present(cluster, factor)  # type: ignore[arg-type]
    pairs = zip(cluster.links, now.links, strict=True)
    assert [after.bandwidth / before.bandwidth for before, after in pairs] == pytest.approx([1, 1, 1, 1, 0.5, 1])


def test_misuse() -> None:
    with pytest.raises(SimulationError, match="needs a planner"):
        simulate_run(PLAN, course(steps=9, replan_every=2))
    for names, problem in (("tokyo", "no site 'tokyo'"), (("s1", "s1"), "no site 's1'"), (("s0", "s1", "s2", "s3"), "last site")):
        losses = [{"site": name, "at": "9 h"} for name in ([names] if isinstance(names, str) else names)]
        with pytest.raises(UserError, match=problem):
            simulate_run(PLAN, course(steps=1, losses=losses), planning=ep)
    holding = make_plan(3, 2, sites=[{"name": "s0"}, {"name": "s1", "experts": 0}, {"name": "s2", "experts": 0}])
    with pytest.raises(UserError, match="losses: s0 is the last site with experts at 0 us"):
        simulate_run(holding, course(losses=[{"site": "s0", "at": "0 s"}]), planning=ep)
    simulate_run(holding, course(losses=[{"site": "s1", "at": "0 s"}]), planning=lambda cluster: ep(cluster, holding))
    for every, problem in ((1, "no site 's1' at 5400 s; there are s0, s2, s3"), (0, "give checkpoint_every")):
        losses = [{"site": "s1", "at": "1 h", "back": "2 h"}, {"site": "s1", "at": "1.5 h"}]
        with pytest.raises(UserError, match=problem):
            simulate_run(PLAN, course(steps=1, losses=losses, checkpoint_every=every), planning=ep)
    with pytest.raises(UserError, match="no link is named 'x up'"):
        simulate_run(PLAN, course(), conditions(changes=[{"links": "x up", "factor": 1}]))
