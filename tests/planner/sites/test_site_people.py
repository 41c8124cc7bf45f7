"""Top plans, two plans side by side, scenarios, upgrades, matrices, and a search that is interrupted."""

from __future__ import annotations

import time

import numpy as np
import pytest
from site_cases import small_workload, uneven_cluster

import planner
from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands.inputs import cluster_and_workload
from hybridep.config import build
from hybridep.errors import PlanMismatchError, UserError
from hybridep.homes import homes_text
from hybridep.plan import LayerGroup, Plan, Residency
from hybridep.recompute import Recompute
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import timed_by
from planner.difference import scaled, with_links, with_rates_of
from planner.evaluate import evaluate
from planner.sites.plans import plan_sites
from planner.sites.solution import Wishes


def given(seed: int = 1, sites: int = 5) -> tuple[Cluster, Workload]:
    rng = np.random.default_rng(seed)
    return uneven_cluster(rng, sites, 2), small_workload(rng, 10)


@pytest.fixture(scope="module")
def found() -> list[Plan]:
    return planner.plans(*given(), 3, time_limit_s=4)


def step_s(plan: Plan) -> float:
    return plan.predicted.step


def test_top_plans_differ_and_are_sorted(found: list[Plan]) -> None:
    assert len(found) == 3 and [step_s(one) for one in found] == sorted(step_s(one) for one in found)
    assert found[0].solver is not None
    for one in found:
        planner.check(one)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        tables = [found[i].placements[0].serve[0] for i in (a, b)]
        same_choice = found[a].layers[0].residency == found[b].layers[0].residency
        assert (
            (tables[0] != tables[1]).mean() >= 0.05 or not same_choice or found[a].layers[0].domains != found[b].layers[0].domains
        )


def test_difference_of_plans(found: list[Plan]) -> None:
    ep, gather = (planner.baseline(*given(), name) for name in ("ep", "full_gather"))
    difference = planner.compare_plans(ep, gather)
    assert difference.step_s == (pytest.approx(step_s(ep)), pytest.approx(step_s(gather)))
    changes = sum(b - a for a, b in difference.parts_s.values())
    assert changes == pytest.approx(step_s(gather) - step_s(ep), rel=1e-6)
    # Four of five sites get every expert they do not own.
    assert difference.copies_gained == 4 * 10 and difference.copies_lost == 0
    assert difference.served_elsewhere == pytest.approx(0.8)
    same = planner.compare_plans(found[0], found[0])
    assert same.switch_at == 1.0 and not same.parts_s and same.served_elsewhere == 0
    with pytest.raises(PlanMismatchError):
        planner.compare_plans(ep, planner.baseline(*given(seed=3), "ep"))
    assert difference.same_popularity and difference.moved_experts == 0


def test_plans_for_other_popularity_are_costed_with_one() -> None:
    ep, gather = (planner.baseline(*given(), name) for name in ("ep", "full_gather"))
    layers = ep.workload.model.num_moe_layers
    known = ep.with_popularity(((0.19, *[0.09] * 9),) * layers)
    expected = gather.with_popularity(known.popularity)
    for pair, places in (((known, gather), (0, 1)), ((gather, known), (1, 0))):
        difference = planner.compare_plans(*pair)
        steps_s = [difference.step_s[place] for place in places]
        assert not difference.same_popularity
        assert steps_s == [pytest.approx(planner.step_cost(one).step_s) for one in (known, expected)]
    # Two experts change homes in each layer.
    home = ep.placements[0].home.copy()
    home[[0, -1]] = home[[-1, 0]]
    group = ep.layers[0].model_copy(update={"homes": homes_text(ep.cluster, home)})
    assert planner.compare_plans(ep, ep.with_layers(group)).moved_experts == 2


def test_plans_of_other_sites_are_not_compared() -> None:
    """Though a plan for some of a cluster's sites is one for the cluster."""
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", ())
    ep, one = planner.baseline(cluster, workload, "ep"), planner.alone(cluster, workload)
    assert one is not None
    for first, second in ((ep, one), (one, ep)):
        with pytest.raises(PlanMismatchError, match="levels"):
            planner.compare_plans(first, second)


def test_plans_are_equally_fast_where_switching_pays() -> None:
    thresholds = 0
    for seed in range(4):
        ep, gather = (planner.baseline(*given(seed), name) for name in ("ep", "full_gather"))
        factor = planner.compare_plans(ep, gather).switch_at
        if factor is None or factor == 1.0:
            continue
        thresholds += 1
        cluster = scaled(ep.cluster, factor)
        steps = [evaluate(one.model_copy(update={"cluster": cluster}))[0].step_s for one in (ep, gather)]
        assert steps[0] == pytest.approx(steps[1], rel=1e-4)
    assert thresholds


@pytest.mark.turns(2)
@pytest.mark.parametrize("quantile", [1.0, 0.5])
def test_plans_for_scenarios_are_never_worse_there(quantile: float) -> None:
    cluster, workload = given(seed=6)
    scenarios = planner.interval_scenarios(cluster, 0.6, draws=3)
    robust = planner.plan_for_scenarios(cluster, workload, scenarios, quantile=quantile, time_limit_s=2)
    assert robust.bound_s <= robust.step_s <= robust.nominal_step_s * (1 + 1e-9)
    assert robust.step_s in robust.steps_s and len(robust.steps_s) == 4
    if quantile == 1.0:
        # All links at the lower end is the worst case for every plan.
        assert robust.step_s == robust.steps_s[0] == max(robust.steps_s)
    with pytest.raises(UserError, match="site s4 is not in it"):
        planner.plan_for_scenarios(cluster, workload, [given(sites=4)[0]])


def test_scenarios_are_the_given_cluster_at_other_rates() -> None:
    """By the sites' names, whatever their order and whatever else the other file says."""
    (cluster, workload), (other, _) = given(), given(seed=3)
    here = with_rates_of(cluster, other)
    roomy = other.gpu.model_copy(update={"memory": 2 * other.gpu.memory})
    turned = other.model_copy(update={"sites": other.sites[::-1], "gpu": roomy})
    plan = planner.baseline(cluster, workload, "ep")
    steps_s = [evaluate(plan.model_copy(update={"cluster": one}))[0].step_s for one in (here, with_rates_of(cluster, turned))]
    assert steps_s[0] == steps_s[1] != step_s(plan)
    assert here.site_gpus == cluster.site_gpus and (here.token_weights == cluster.token_weights).all()
    assert here.access_bytes_per_s == pytest.approx(other.access_bytes_per_s)
    with pytest.raises(UserError, match="site s5 is only in it"):
        with_rates_of(cluster, given(sites=6)[0])


def test_other_planners_meet_experts_as_popular() -> None:
    """They know nothing of it; what their plans take is told for the same step as the plan's."""
    cluster, workload = uneven_cluster(np.random.default_rng(1), 4, 1), small_workload(np.random.default_rng(1), 8)
    share = np.arange(8.0, 0.0, -1.0)
    popularity = tuple(tuple(np.roll(share / share.sum(), layer)) for layer in range(workload.model.num_moe_layers))
    for name in ("ep", "full_gather"):
        plan = baseline_plan(cluster, workload, Baseline(name), popularity=popularity)
        here, equal = planner.compare_planners(plan), planner.compare_planners(plan.model_copy(update={"popularity": ()}))
        assert here[name].step_s == pytest.approx(evaluate(plan)[0].step_s) and here[name].gain == pytest.approx(1)
        assert here["ep"].step_s != equal["ep"].step_s


@pytest.mark.parametrize("memory", ["38 MB", "41 MB", "66 MB"])
def test_other_planners_compute_again_no_more_than_suits_them(memory: str) -> None:
    """Not what the plan's layers do: of all ways the one in which they take least, of those that fit."""
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", (f"gpu.memory={memory}",))
    plan = planner.plan(cluster, workload)
    others = planner.compare_planners(plan)
    for name, inside in (("ep", {"gpu": 1}), ("ep", {"gpu": 2}), ("full_gather", {"gpu": 1}), ("full_gather", {"gpu": 2})):
        domains = {"dc": 1 if name == "ep" else 4} | inside
        for residency in Residency:
            for again in map(Recompute, range(4)):
                group = LayerGroup(first_layer=0, num_layers=4, domains=domains, migration={}, residency=residency)
                group = group.recomputing(again)
                cost, memory_use = evaluate(plan.with_layers(group))
                if memory_use.fits:
                    assert others[name].fits and others[name].step_s <= cost.step_s * (1 + 1e-9), (name, inside, again)
    assert bool(plan.recomputes) is (memory != "66 MB")
    assert all(one.gain >= 1 - 1e-9 for one in others.values() if one.fits)


def test_upgrades_gain_what_they_say(found: list[Plan]) -> None:
    upgrades = planner.upgrades(found[0], top=1)
    assert [one.gain_s for one in upgrades] == sorted((one.gain_s for one in upgrades), reverse=True)
    assert {one.name.split()[0] for one in upgrades} == {"up", "down", "link", "memory"}
    for one in upgrades:
        assert one.planned_anew_s <= one.as_it_is_s <= step_s(found[0]) * (1 + 1e-12)
        assert one.gain_s == one.present_s - one.planned_anew_s >= 0
    # From a poor plan, too: the search without an upgrade finds no less than one with it.
    poor = planner.upgrades(planner.baseline(*given(), "full_gather"), top=1)
    assert all(one.gain_s == one.present_s - one.planned_anew_s >= 0 for one in poor)


def test_upgrades_of_a_plan_with_small_domains_inside() -> None:
    """Such plans are no table with one choice inside; the nearest one is searched on from, and figures are its own."""
    rng = np.random.default_rng(2)
    cluster, workload = uneven_cluster(rng, 3, 4), small_workload(rng, 12)
    made = planner.plan_domains(cluster, workload)
    group = made.layers[0].model_copy(update={"domains": {"dc": 1, "gpu": 2}, "migration": {"gpu": 1.0}})
    small = made.model_copy(update={"layers": (group,), "prediction": None, "solver": None})
    found = planner.upgrades(small, top=1)
    assert found[0].gain_s > 0
    for one in found:
        assert one.planned_anew_s <= min(one.as_it_is_s, one.present_s) <= one.as_it_is_s <= evaluate(small)[0].step_s
    up = next(one for one in found if one.name.startswith("up "))
    sites = tuple(
        site.model_copy(update={"up": 2 * (site.up or cluster.levels[0].bandwidth)}) if up.name.endswith(site.name) else site
        for site in cluster.sites
    )
    faster = with_links(cluster, sites=sites, links=cluster.links, trunks=cluster.trunks)
    assert up.as_it_is_s == evaluate(small.model_copy(update={"cluster": faster}))[0].step_s


def test_upgrades_of_equal_sites_with_small_domains_inside() -> None:
    """Their best plan is no table either; a search from the nearest one finds none as fast."""
    cluster, workload = cluster_and_workload("h100-4dc", "llama-tiny", ("model.num_experts=64",))
    plan = planner.plan(cluster, workload, time_limit_s=3)
    assert plan.layers[0].domains["node"] == 2 < cluster.sizes[1]
    for one in planner.upgrades(plan, top=1):
        assert one.planned_anew_s <= one.present_s <= step_s(plan) and one.as_it_is_s <= step_s(plan)


def test_upgrades_have_as_many_connections_as_they_need() -> None:
    """A faster link is of no use to connections whose windows are full, and a plan made for it has more of them."""
    link = {"name": "dc", "size": 2, "bandwidth": "1 Gbps", "latency": "20 ms", "window": "256 KiB"}
    data = {
        "name": "windowed",
        "levels": [link, {"name": "gpu", "size": 1, "bandwidth": "100 Gbps", "latency": "10 us"}],
        "gpu": {"throughput": "100 TFLOPS", "memory": "80 GiB", "memory_bandwidth": "2 TB/s"},
        "sites": [{"name": "slow", "up": "50 Mbps"}, {"name": "fast"}],
    }
    cluster, workload = build(Cluster, data, "test"), cluster_and_workload("lab-4dc", "tiny", ())[1]
    plan = planner.plan(cluster, workload, time_limit_s=2)
    assert plan.schedule.streams == {"dc": 1}
    first, *_ = planner.upgrades(plan, top=1)
    sites = (cluster.sites[0].model_copy(update={"up": 2 * cluster.access_bytes_per_s[0, 0]}), cluster.sites[1])
    anew = planner.plan(with_links(cluster, sites=sites, links=(), trunks=()), workload, time_limit_s=2)
    assert first.name == "up link of slow" and anew.schedule.streams == {"dc": 2}
    assert first.planned_anew_s == pytest.approx(step_s(anew)) and first.planned_anew_s < 0.8 * first.as_it_is_s
    # Not where so many were asked for.
    asked = planner.upgrades(plan, top=1, streams=plan.schedule.streams)
    assert asked[0].planned_anew_s == pytest.approx(first.as_it_is_s)


@pytest.mark.turns(4)
@pytest.mark.parametrize("memory", ["34 MB", "36 MB"])
def test_with_more_memory_less_is_computed_again(memory: str) -> None:
    """As planned for a cluster that has it: of equal sites the integer program's plan is the best."""
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", (f"gpu.memory={memory}",))
    plan, roomy = planner.plan(cluster, workload), cluster.gpu.model_copy(update={"memory": 2 * cluster.gpu.memory})
    anew = planner.plan(cluster.model_copy(update={"gpu": roomy}), workload)
    assert plan.recomputes and not anew.recomputes and step_s(anew) < 0.95 * step_s(plan)
    more = next(one for one in planner.upgrades(plan, top=1) if one.name.startswith("memory"))
    assert more.as_it_is_s == more.present_s == pytest.approx(step_s(plan), rel=1e-9)
    assert more.planned_anew_s == pytest.approx(step_s(anew), rel=1e-9)


@pytest.mark.turns(2)
def test_of_uneven_sites_more_memory_keeps_activations() -> None:
    """Of tables the best that is found computes nothing again."""
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", ("gpu.memory=38 MB",))
    sites = [{"name": "a", "up": "30 Mbps"}, {"name": "b"}, {"name": "c", "down": "20 Mbps"}, {"name": "d"}]
    uneven = build(Cluster, cluster.model_dump(mode="json") | {"sites": sites}, "uneven")
    plan = planner.plan(uneven, workload, time_limit_s=2)
    more = next(one for one in planner.upgrades(plan, top=1) if one.name.startswith("memory"))
    assert plan.recomputes and more.gain_s > 0.01 * more.present_s


def test_matrices_count_experts(found: list[Plan]) -> None:
    matrices = planner.plan_matrices(found[0])
    assert matrices.served.sum(axis=1) == pytest.approx(np.full(5, 10.0))
    cost, _ = evaluate(found[0])
    assert matrices.copied.sum() == pytest.approx(found[0].placements[0].holds_at[0].sum() - 10)
    assert matrices.pair_s is not None
    assert max(matrices.up_s.max(), matrices.down_s.max(), matrices.pair_s.max()) <= cost.link_s.max()


@pytest.mark.turns(3)
@pytest.mark.parametrize("after", [("plan", 1), ("plan", 2), ("bound", 3)])
def test_an_interrupted_search_gives_its_best_plan(after: tuple[str, int]) -> None:
    """Ctrl-C while tables are tried, and while the bound rises."""
    told: list[str] = []

    def interrupt(what: str, _: float) -> None:
        told.append(what)
        if told.count(what) == after[1] and what == after[0]:
            raise KeyboardInterrupt

    rng = np.random.default_rng(0)
    cluster, workload = uneven_cluster(rng, 6, 2), small_workload(rng, 12)
    with timed_by(lambda: time.process_time() - 1e6):  # no clock says when it began
        plan = plan_sites(cluster, workload, wishes=Wishes(time_limit_s=60, report=interrupt))[0]
    assert told.count(after[0]) >= after[1], "was not interrupted"
    assert told[-1] == after[0], "went on"
    assert plan.solver is not None and 0 <= plan.solver.gap < 1
    planner.check(plan)
