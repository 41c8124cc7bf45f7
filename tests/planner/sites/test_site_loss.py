"""Codecs chosen by what they were measured to cost, between sites that differ: several plans, and plans for scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from site_cases import random_access_cluster, small_workload, uneven_cluster

import planner
from hybridep.codec_losses import permitted, worthwhile
from hybridep.codecs import Codecs, TokenCodec
from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import Plan, copies_last
from hybridep.recompute import ALL, Recompute
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import robust
from planner.check import check
from planner.evaluate import evaluate
from planner.plans import predict
from planner.sites.plans import table_plan
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.search import at_quantile
from planner.sites.solution import SiteSolution, Wishes, solve_sites
from planner.stages.bound import least_s

LOSSES = (0.0001, 0.0011)
"""A permitted loss, and one that lets in what is measured to lose something, too."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """What is compiled counts to no search's time."""
    cluster, workload = given(1)
    planner.plan_for_scenarios(cluster, workload, [cluster], time_limit_s=0.1)


def given(seed: int, sites: int = 2, experts: int = 2) -> tuple[Cluster, Workload]:
    rng = np.random.default_rng(seed)
    return uneven_cluster(rng, sites, 1), small_workload(rng, experts)


def every_plan(cluster: Cluster, workload: Workload, max_loss: float) -> Iterator[Plan]:
    """Every serving table with every choice of codecs that is permitted, unless it has no room."""
    problem = site_problem(cluster, workload, None)
    sites, experts = problem.num_sites, problem.num_experts
    for entries in product(range(sites), repeat=sites * experts):
        for configuration in problem.configurations():
            exact = table_plan(problem, np.array(entries).reshape(sites, experts), configuration)
            for codecs in permitted(max_loss):
                if copies_last(exact.layers, codecs):
                    plan = exact.model_copy(update={"codecs": {"dc": codecs} if codecs.coded else {}})
                    if evaluate(plan)[1].fits:
                        yield plan


def at(plan: Plan, scenarios: list[Cluster], quantile: float) -> float:
    return at_quantile([evaluate(plan.model_copy(update={"cluster": one}))[0].step_s for one in scenarios], quantile)


def losses(plan: Plan) -> float:
    return sum(max(gate.relative, 0.0) for codecs in plan.codecs.values() for gate in codecs.gates.values())


@pytest.mark.turns(6)
@pytest.mark.parametrize(("seed", "quantile", "max_loss"), [(1, 0.5, LOSSES[0]), (2, 1.0, LOSSES[0]), (3, 1.0, LOSSES[1])])
def test_scenarios_against_every_plan_with_every_codec(seed: int, quantile: float, max_loss: float) -> None:
    cluster, workload = given(seed)
    scenarios = planner.interval_scenarios(cluster, 0.6, draws=1)
    made = planner.plan_for_scenarios(cluster, workload, scenarios, quantile=quantile, max_loss=max_loss, time_limit_s=2)
    best_s = min(at(plan, scenarios, quantile) for plan in every_plan(cluster, workload, max_loss))
    assert made.step_s == pytest.approx(best_s, rel=1e-9)
    assert made.bound_s <= best_s * (1 + 1e-12)
    assert made.step_s <= made.nominal_step_s * (1 + 1e-9)
    check(made.plan)
    assert losses(made.plan) <= max_loss and made.plan.cluster == cluster
    assert made.plan.predicted.step == pytest.approx(evaluate(made.plan)[0].step_s, rel=1e-12)


@pytest.mark.turns(4)
def test_scenarios_within_a_loss_beside_those_with_each_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, workload = given(1, 3, 4)
    scenarios = planner.interval_scenarios(cluster, 0.5, draws=1)
    bounds_s = list[float]()

    def solved(problem: SiteProblem, wishes: Wishes) -> SiteSolution:
        solution = solve_sites(problem, wishes)
        bounds_s.append(solution.bound_s)
        return solution

    monkeypatch.setattr("planner.robust.solve_sites", solved)
    made = planner.plan_for_scenarios(cluster, workload, scenarios, max_loss=0.002, time_limit_s=2)
    # What is proven with each of the codecs, the least of it with all.
    assert made.bound_s == min(bounds_s) < max(bounds_s)
    each = []
    for codecs in worthwhile(permitted(0.002), workload, cluster.gpu.coding):
        coded = {"dc": codecs} if codecs.coded else {}
        each.append(planner.plan_for_scenarios(cluster, workload, scenarios, codecs=coded, time_limit_s=0.5))
    assert len(each) > 1 and made.step_s <= min(one.step_s for one in each) * (1 + 1e-9)
    exact = planner.plan_for_scenarios(cluster, workload, scenarios, time_limit_s=0.5)
    assert made.step_s < exact.step_s
    # The plan for the rates as they are is what is planned within the loss without scenarios.
    nominal = planner.plan(cluster, workload, max_loss=0.002, time_limit_s=1)
    assert made.nominal_step_s == pytest.approx(at(nominal, scenarios, 1.0), rel=1e-9)
    # Each codec brings something.
    for kind in (codecs := made.plan.codecs["dc"]).coded:
        fewer = made.plan.model_copy(update={"codecs": {"dc": codecs.without(kind)}})
        assert at(fewer, scenarios, 1.0) > made.step_s * (1 + 1e-9)
    # Over before another codec is looked at: what suits the first plan, and a bound that holds for all.
    short = planner.plan_for_scenarios(cluster, workload, scenarios, max_loss=0.002, time_limit_s=1e-3)
    check(short.plan)
    assert losses(short.plan) <= 0.002 and short.bound_s <= least_s(cluster, workload, 1) < made.bound_s
    assert short.step_s <= at(planner.plan(cluster, workload, time_limit_s=0.5), scenarios, 1.0) * (1 + 1e-9)
    with pytest.raises(UserError, match="leave one of them out"):
        int8 = {"dc": Codecs(tokens=TokenCodec.INT8)}
        planner.plan_for_scenarios(cluster, workload, scenarios, max_loss=0.1, codecs=int8)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("seed", "max_loss"), [(1, LOSSES[0]), (4, LOSSES[1])])
def test_the_next_best_against_every_plan_with_every_codec(seed: int, max_loss: float) -> None:
    cluster, workload = given(seed)
    made = planner.plans(cluster, workload, 5, max_loss=max_loss, time_limit_s=2)
    steps_s = [one.predicted.step for one in made]
    assert len(made) == 5 and steps_s == sorted(steps_s) and len({one.digest for one in made}) == 5
    every: dict[str, float] = {}
    for plan in every_plan(cluster, workload, max_loss):
        step_s = evaluate(plan)[0].step_s
        placed = str(plan.layers)
        every[placed] = min(step_s, every.get(placed, np.inf))
    # With the best codecs of each placement; others of a placement may come in between.
    best_s = sorted(every.values())
    assert steps_s[0] == pytest.approx(best_s[0], rel=1e-9)
    assert all(step_s <= other_s * (1 + 1e-9) for step_s, other_s in zip(steps_s, best_s, strict=False))
    assert made[0].solver is not None and made[0].solver.bound <= best_s[0] * (1 + 1e-12)
    assert all(one.solver is None for one in made[1:])
    for one in made:
        check(one)
        assert losses(one) <= max_loss
        assert one.predicted.step == predict(one).step


def test_bounds_over_scenarios_hold_for_what_computes_less_again() -> None:
    """Which a search that computes more again takes for too large without having tried all."""
    cluster, workload = random_access_cluster(3, 3), given(3, 3, 3)[1]
    cluster = cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"throughput": 1e9})})
    problems = [site_problem(cluster, workload, None, recompute=again) for again in (ALL, Recompute.NOTHING)]
    again, nothing = (solve_sites(one, Wishes(time_limit_s=2, scenarios=(one,))) for one in problems)
    assert again.bound_s <= nothing.found.rank[1] < again.found.rank[1]
    assert again.bound_s > 0.5 * nothing.found.rank[1]


def test_what_serves_nothing_at_the_quantile_is_left_out() -> None:
    """Where no experts are copied nothing is won by coding them, however they come to be coded."""
    cluster, workload = given(1)
    nominal, tokens_travel = planner.plan(cluster, workload, time_limit_s=1), planner.baseline(cluster, workload, "ep")

    def make(codecs: dict[str, Codecs], time_limit_s: float) -> robust._Made:
        data = tokens_travel.model_dump(mode="json") | {"codecs": codecs}
        return robust._Made(plan=build(Plan, data, "plan"), nominal=nominal, bound_s=0.0)

    def at_any_rate(plan: Plan) -> float:
        """As if no other plan were as fast."""
        return evaluate(plan)[0].step_s + float(plan.layers == nominal.layers)

    found = robust._within_loss(make, at_any_rate, cluster, workload, 0.0011, 5.0)
    assert found.plan.layers == tokens_travel.layers and set(found.plan.codecs["dc"].coded) == {"tokens", "gradients"}
    assert found.plan.solver is None and found.plan.predicted.step == evaluate(found.plan)[0].step_s
