"""Tables for experts of measured popularity: what is exchanged, and a bound that holds for a table of its own in each layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from site_cases import random_table, small_workload, uneven_cluster

import planner
from hybridep.arrays import FloatArray, IntArray
from hybridep.commands.inputs import cluster_and_workload, load_cluster, load_workload
from hybridep.config import build
from hybridep.errors import InfeasibleError
from hybridep.gating import Gating, gating
from hybridep.homes import homes_text
from hybridep.plan import Plan, Schedule, Status
from hybridep.topology import Cluster
from hybridep.workload import DropPolicy, Workload
from planner.cost import step_cost
from planner.domains import joined
from planner.measured import plans_measured
from planner.memory import memory_use
from planner.sites.bound import Proof, prove
from planner.sites.least_hit import least_hit
from planner.sites.plans import table_plan
from planner.sites.popular import best_places, domains_in_time, plans_popular
from planner.sites.popular_bound import LEFT_OUT, as_all_s, least_s
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation

Shares = tuple[tuple[float, ...], ...]


def skewed(seed: int, layers: int, experts: int, top_k: int, concentration: float = 0.7) -> Shares:
    drawn = np.random.default_rng(seed).dirichlet(np.full(experts, concentration), size=layers) + 1e-3
    for _ in range(50):
        drawn = np.minimum(drawn / drawn.sum(axis=1, keepdims=True), 0.999 / top_k)
    return tuple(tuple(float(share) for share in row / row.sum()) for row in drawn)


def step_s(plan: Plan) -> float:
    return plan.predicted.step


def workload_of(seed: int, experts: int, layers: int, **model: object) -> Workload:
    work = small_workload(np.random.default_rng(seed), experts)
    changes = {"num_layers": layers, "top_k": min(2, experts)} | model
    return work.model_copy(update={"model": work.model.model_copy(update=changes)})


@pytest.mark.parametrize(
    "drops", [{}, {"capacity_factor": 0.8}, {"capacity_factor": 0.6, "token_drop_policy": DropPolicy.POSITION}]
)
def test_no_set_of_experts_is_needed_by_fewer_tokens(drops: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    for seed, left_out in product(range(6), (0, 1, 3)):
        work = workload_of(seed, 8, 1, **drops)
        [one] = [gating(work, shares) for shares in skewed(seed, 1, 8, 2)]
        kept = np.argsort(one.chosen)[left_out:]
        least, number = least_hit(one, kept), np.arange(1, len(kept) + 1)
        assert least[0] == 0 and (np.diff(least, n=2) <= 1e-12).all() and (np.diff(least) >= -1e-12).all()
        closest = np.inf
        for size in number:
            member = np.zeros((20, 8), dtype=bool)
            for row in member[1:]:
                row[rng.permutation(kept)[:size]] = True
            member[0, kept[:size]] = True
            hit = one.hit(member)
            assert (least[size] <= hit * (1 + 1e-9)).all()
            closest = min(closest, float((hit / least[size]).min()))
        assert drops or closest == pytest.approx(1.0)
        # As high as a line through the least popular one allows.
        coldest = one.hit(np.array([[expert in kept[:size] for expert in range(8)] for size in number]))
        under = np.logical_and.accumulate(number * least[1] <= coldest * (1 + 1e-9))
        assert drops or least[1:][under] == pytest.approx((number * least[1])[under])
    alike = gating(workload_of(0, 8, 1), (1 / 8,) * 8)
    assert least_hit(alike, np.arange(8)) == pytest.approx(gating(workload_of(0, 8, 1)).hit_by_count, abs=1e-6)


def test_the_more_popular_of_one_home_have_more_copies() -> None:
    rng = np.random.default_rng(1)
    problem = site_problem(uneven_cluster(rng, 3, 1), workload_of(1, 12, 1))
    rate = problem.slower_bytes_per_s[problem.home_site]
    for seed in range(5):
        table, shares = random_table(rng, problem), np.array(skewed(seed, 1, 12, 2)[0])
        holders = np.array([len(set(column)) for column in table.T])
        expert = best_places(problem.home_site, table, shares, rate)
        for site in range(3):
            own = np.flatnonzero(problem.home_site == site)
            assert sorted(expert[own]) == own.tolist()
            copies = holders[own][np.argsort(-shares[expert[own]])].tolist()
            assert copies == sorted(copies, reverse=True)
        # Of all sites, among equally many copies at the faster home.
        anywhere = best_places(np.zeros(12, dtype=np.int64), table, shares, rate)
        order = np.argsort(-shares[anywhere])
        places = list(zip(holders[order], rate[order], strict=True))
        assert sorted(anywhere) == list(range(12)) and places == sorted(places, reverse=True)


def best_mixture_s(problem: SiteProblem, popularity: Shares, homes: IntArray | None = None) -> float:
    """Of all tables for each layer by itself: a step's parts that no table changes, and the least of each layer. With ``homes``
    ([layers, E] ranks) in place of the problem's."""
    homes = np.tile(problem.home, (len(popularity), 1)) if homes is None else homes
    layers, fixed = [np.inf] * len(popularity), 0.0
    for entries in product(range(2), repeat=2 * problem.num_experts):
        table = np.array(entries).reshape(2, problem.num_experts)
        for configuration in problem.configurations():
            plan = table_plan(problem, table, configuration)
            for layer, (shares, home) in enumerate(zip(popularity, homes, strict=True)):
                cost = step_cost(at_home(plan, (shares,) * len(popularity), np.tile(home, (len(popularity), 1))))
                fixed = sum(cost.parts_s.get(name, 0.0) for name in FIXED)
                layers[layer] = min(layers[layer], (cost.step_s - fixed) / len(popularity))
    return fixed + sum(layers)


FIXED = ("head", "optimizer", "dense_reduce_scatter", "dense_all_gather")


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_no_mixture_of_tables_is_faster_than_the_bound(seed: int) -> None:
    cluster, work = uneven_cluster(np.random.default_rng(seed), 2, 1, pairs=bool(seed % 2)), workload_of(seed, 3, 2)
    popularity = skewed(seed, 2, 3, 2, 3.0)
    best_s = best_mixture_s(site_problem(cluster, work), popularity)
    made = planner.plan(cluster, work, popularity=popularity, time_limit_s=2)
    assert made.solver is not None and made.solver.bound <= best_s * (1 + 1e-9) <= step_s(made) * (1 + 1e-9) * (1 + 1e-9)
    assert step_s(made) <= best_s * 1.3
    planner.check(made)


def at_home(plan: Plan, popularity: Shares, homes: IntArray) -> Plan:
    """A plan that is alike in all layers, for this popularity, with experts at these homes ([layers, E] ranks)."""
    each = [
        plan.layers[0].model_copy(update={"first_layer": layer, "num_layers": 1, "homes": homes_text(plan.cluster, home)})
        for layer, home in enumerate(homes)
    ]
    return plan.model_copy(update={"layers": joined(each), "popularity": popularity, "prediction": None})


def bad_plan(problem: SiteProblem, popularity: Shares) -> Plan:
    """The longest of a few: what is known when a bound is sought, far from what is to be found."""
    rng = np.random.default_rng(0)
    found = [table_plan(problem, random_table(rng, problem), problem.configurations()[0]) for _ in range(20)]
    known = [plan.model_copy(update={"popularity": popularity, "prediction": None}) for plan in found]
    return max(known, key=lambda plan: step_cost(plan).step_s)


@pytest.mark.turns(4)
def test_a_bound_as_if_all_were_alike_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it matters that fewer tokens need the least popular; whatever is left out, no table is faster than the bound."""
    lies = 0
    monkeypatch.setattr("planner.sites.popular_bound.MOST_BOXES", 50)
    for seed in (0, 1):
        cluster = uneven_cluster(np.random.default_rng(seed), 2, 1, pairs=False)
        problem = site_problem(cluster, workload_of(seed, 3, 1, expert_ffn_size=1024))
        popularity = skewed(seed, 1, 3, 2, 0.5)
        best_s, plan = best_mixture_s(problem, popularity), bad_plan(problem, popularity)
        assert step_cost(plan).step_s > 1.5 * best_s
        for share in (0.0, 0.34):
            monkeypatch.setattr("planner.sites.popular_bound.LEFT_OUT", (share,))
            assert 0.1 * best_s < least_s(problem, plan, np.inf) <= best_s * (1 + 1e-9)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("planner.sites.popular_bound.least_hit", even_hit)
                lies += least_s(problem, plan, np.inf) > best_s * (1 + 1e-9)
    assert lies


def even_hit(chosen: Gating, kept: IntArray) -> FloatArray:
    """As if all experts that are kept were as popular as all are on average."""
    return replace(chosen, popularity=None).hit_by_count[: len(kept) + 1]


def bounded_problems(monkeypatch: pytest.MonkeyPatch, max_boxes: int) -> list[SiteProblem]:
    """Of which bounds are made from now on, each of so many boxes."""
    bounded: list[SiteProblem] = []

    def remember(relaxation: Relaxation, best_s: float, **limits: object) -> Proof:
        bounded.append(relaxation.problem)
        return prove(relaxation, best_s, max_boxes=max_boxes)

    monkeypatch.setattr("planner.sites.popular_bound.prove", remember)
    return bounded


@pytest.mark.turns(2)
def test_each_layer_is_bounded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its least popular experts, the others where they are; all together come first."""
    work = load_workload("gpt-large", ["model.num_layers=2"])
    problem, both = site_problem(load_cluster("dtfm-10"), work), skewed(0, 2, work.model.num_experts, 2, 1.0)
    bounded = bounded_problems(monkeypatch, 50)
    monkeypatch.setattr("planner.sites.popular_bound.LEFT_OUT", (0.4,))
    plan = bad_plan(problem, both)
    alone = [least_s(problem, plan.model_copy(update={"popularity": (shares,) * 2}), np.inf) for shares in both]
    bounded.clear()
    assert least_s(problem, plan, np.inf) == pytest.approx(np.mean(alone), rel=1e-9)
    assert np.ptp(alone) > 0.001 * np.mean(alone)
    for shares, one in zip(both, bounded[1::2], strict=True):
        kept = np.sort(np.argsort(shares)[13:])
        assert one.home.tolist() == problem.home[kept].tolist() and one.num_experts == 19


@pytest.mark.turns(2)
def test_leaving_the_least_popular_out_proves_more() -> None:
    """They are needed so rarely that a bound with them in it says little."""
    work = load_workload("gpt-large", ["model.num_layers=2"])
    problem, popularity = site_problem(load_cluster("dtfm-10"), work), skewed(0, 2, work.model.num_experts, 2, 1.0)
    plan, proven = bad_plan(problem, popularity), {}
    for left_out in ((0.0,), LEFT_OUT):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("planner.sites.popular_bound.LEFT_OUT", left_out)
            patch.setattr("planner.sites.popular_bound.MOST_BOXES", 40)
            proven[left_out] = least_s(problem, plan, np.inf)
    assert proven[LEFT_OUT] > 1.5 * proven[0.0,]


def test_a_step_is_the_mean_of_steps_whose_layers_are_alike() -> None:
    problem = site_problem(uneven_cluster(np.random.default_rng(6), 4, 1), workload_of(6, 8, 3))
    plan = bad_plan(problem, skewed(6, 3, 8, 2))
    alike = [as_all_s(plan, layer) for layer in range(3)]
    assert step_cost(plan).step_s == pytest.approx(np.mean(alike), rel=1e-12)
    assert np.ptp(alike) > 0.01 * np.mean(alike)


@pytest.mark.turns(4)
def test_layers_choose_by_themselves_and_never_worse_than_equal_domains() -> None:
    cluster, work = uneven_cluster(np.random.default_rng(6), 5, 1), workload_of(6, 16, 3, hidden_size=64, expert_ffn_size=256)
    popularity = skewed(6, 3, 16, 2)
    found = plans_popular(cluster, work, popularity, 3, time_limit_s=4)
    [domains] = plans_measured(cluster, work, popularity)
    unknown = planner.plan(cluster, work, time_limit_s=4).model_copy(update={"popularity": popularity})
    assert step_s(found[0]) < 0.85 * step_s(domains) and step_s(found[0]) < 0.97 * step_cost(unknown).step_s
    assert len(found[0].layers) == 3
    assert [step_s(one) for one in found] == sorted(step_s(one) for one in found)
    for one in found:
        assert one.popularity == popularity and step_cost(one).step_s == step_s(one) and memory_use(one).fits
    assert found[0].solver is not None and not any(one.solver for one in found[1:])
    planner.check(found[0])


@pytest.mark.turns(2)
@pytest.mark.parametrize(("per_s", "times"), [(1e-12, 1), (1.0, 0)])
def test_equal_domains_are_left_out_where_they_take_too_long(per_s: float, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, work = uneven_cluster(np.random.default_rng(3), 3, 1), workload_of(3, 6, 2)
    popularity, planned = skewed(4, 2, 6, 2), []

    def count(*given: object, **named: object) -> list[Plan]:
        planned.append(plans_measured(*given, **named))  # type: ignore[arg-type]
        return planned[-1]

    monkeypatch.setattr("planner.sites.popular.plans_measured", count)
    monkeypatch.setattr("planner.sites.popular.DOMAINS_S", per_s)
    [made] = plans_popular(cluster, work, popularity, time_limit_s=1)
    assert len(planned) == times
    planner.check(made)
    # Where no table fits there is nothing else.
    monkeypatch.setattr("planner.sites.popular._variants", lambda *_, **__: [])
    [made] = plans_popular(cluster, work, popularity, time_limit_s=1)
    assert made.digest == planned[-1][0].digest and len(planned) == times + 1


def test_equal_domains_take_longer_where_memory_is_short() -> None:
    cluster, work = cluster_and_workload("lab-4dc", "tiny", ())
    [shares] = skewed(6, 1, 16, 4, 5.0)

    def in_time(memory_bytes: float, limit_s: float) -> bool:
        gpu = cluster.gpu.model_copy(update={"memory": memory_bytes})
        return domains_in_time(cluster.model_copy(update={"gpu": gpu}), work, shares, Schedule(), None, limit_s)

    # With few ranks and experts, too, each configuration takes its time.
    assert not in_time(1e9, 0.1) and in_time(1e9, 60) and in_time(44e6, 60)
    assert in_time(1e9, 1) and not in_time(44e6, 1)


@pytest.mark.turns(6)
def test_tables_may_compute_again_where_memory_is_short() -> None:
    """As those do that are found for experts which are alike: without that none fits, and domains take longer."""
    cluster, work = cluster_and_workload("lab-4dc", "tiny", ("gpu.memory=44 MB",))
    sites = [{"name": "a", "up": "30 Mbps"}, {"name": "b"}, {"name": "c", "down": "20 Mbps"}, {"name": "d"}]
    uneven = build(Cluster, cluster.model_dump(mode="json") | {"sites": sites}, "uneven")
    popularity = skewed(6, 4, 16, 4, 5.0)
    made, [domains] = (
        plans_popular(uneven, work, popularity, time_limit_s=8)[0],
        plans_measured(uneven, work, popularity),
    )
    assert step_s(made) < 0.95 * step_s(domains) and all(group.serving and group.recompute for group in made.layers)
    planner.check(made)


@pytest.mark.turns(2)
def test_with_tokens_in_parts_too() -> None:
    cluster, work = uneven_cluster(np.random.default_rng(3), 3, 1), workload_of(3, 6, 2)
    popularity = skewed(4, 2, 6, 2)
    made = planner.plan(cluster, work, popularity=popularity, time_limit_s=1.5, most_chunks=2)
    plain = plans_popular(cluster, work, popularity, schedule=Schedule(), time_limit_s=0.75)[0]
    assert step_s(made) <= step_s(plain) * (1 + 5e-3) and made.solver is not None and made.solver.bound <= step_s(made)


def test_even_popularity_is_planned_as_if_none_were_known() -> None:
    cluster, work = uneven_cluster(np.random.default_rng(5), 2, 1), workload_of(5, 4, 2)
    known = planner.plan(cluster, work, popularity=((0.25,) * 4,) * 2, time_limit_s=2)
    assert step_s(known) == pytest.approx(step_s(planner.plan(cluster, work, time_limit_s=2)), rel=1e-6)
    assert known.solver is not None and known.solver.status in Status


def test_too_little_memory_is_an_error() -> None:
    cluster = uneven_cluster(np.random.default_rng(5), 2, 1, memory="1 KB")
    with pytest.raises(InfeasibleError, match="no plan"):
        planner.plan(cluster, workload_of(5, 4, 2), popularity=skewed(5, 2, 4, 2), time_limit_s=1)


def test_memory_of_one_layer_does_not_bound_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer may have what others do not need, so the bound gives each all memory."""
    monkeypatch.setattr("planner.sites.popular_bound.MOST_BOXES", 20)
    cluster, work = uneven_cluster(np.random.default_rng(7), 2, 1), workload_of(7, 4, 2)
    problem, popularity = site_problem(cluster, work), skewed(7, 2, 4, 2)
    small = replace(problem, cluster=cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"memory": 1.0})}))
    plan = bad_plan(problem, popularity)
    assert least_s(small, plan, np.inf) == pytest.approx(least_s(problem, plan, np.inf))


def test_a_plan_for_rare_experts_at_a_site_of_little_memory() -> None:
    """Where nothing has room if all experts are alike."""
    data = {
        "name": "uneven",
        "levels": [{"name": "dc", "size": 2, "bandwidth": "1 Gbps", "latency": "1 ms"}],
        "gpu": {"throughput": "30 TFLOPS", "memory": "300 MB", "memory_bandwidth": "1 TB/s"},
        "sites": [{"name": "large", "up": "2 Gbps"}, {"name": "small", "gpu": {"memory": "201.5 MB"}}],
    }
    model = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "vocab_size": 1000, "num_experts": 8, "top_k": 1}
    training = {"sequence_length": 256, "micro_batch_size": 32, "micro_batches": 1, "dtype": "bf16"}
    cluster = build(Cluster, data, "uneven")
    work = build(Workload, {"name": "w", "model": model | {"expert_ffn_size": 1024}, "training": training}, "w")
    with pytest.raises(InfeasibleError, match="no plan fits"):
        planner.plan(cluster, work, time_limit_s=1)
    made = planner.plan(cluster, work, popularity=((0.2,) * 4 + (0.05,) * 4,) * 2, time_limit_s=1)
    assert memory_use(made).fits and made.solver is not None and made.solver.bound <= made.predicted.step
    planner.check(made)
