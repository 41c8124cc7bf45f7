"""Prices between uneven sites: the closed form, the cheapest table and the bound, against all tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from site_cases import as_plan, random_problem, random_table, run

import planner
from hybridep.config import build
from hybridep.errors import InfeasibleError
from hybridep.plan import Objective
from hybridep.topology import Cluster
from planner.check import check
from planner.cost import step_cost
from planner.goal import Goal
from planner.sites.cost import SiteCost, fixed_cost, site_cost
from planner.sites.egress_bound import least_egress_usd
from planner.sites.evaluate import evaluate_sites
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.search import Search
from planner.sites.solution import Wishes, least_usd, solve_sites

DOLLARS = Goal(objective=Objective.DOLLARS)


def priced(problem: SiteProblem, rng: np.random.Generator) -> SiteProblem:
    """Egress per site and for some pairs; rent of either weight."""
    data = problem.cluster.model_dump(mode="json", exclude_none=True)
    data["gpu"]["price"] = f"{rng.choice([0.0001, 0.01, 1])} $/h"
    for place in (*data["sites"], *data.get("links", [])[::3]):
        place["egress"] = f"{rng.choice([0, 0.02, 0.09, 0.15])} $/GB"
    return site_problem(build(Cluster, data, "test"), problem.workload, problem.schedule)


def all_costs(problem: SiteProblem) -> Iterator[SiteCost]:
    size, experts = problem.num_sites, problem.num_experts
    for entries in product(range(size), repeat=size * experts):
        for configuration in problem.configurations():
            yield site_cost(problem, np.array(entries).reshape(size, experts), configuration)


@pytest.mark.parametrize("seed", range(8))
def test_the_closed_form_equals_the_model_on_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = priced(random_problem(seed, sites=int(rng.integers(2, 6)), experts=int(rng.integers(1, 12))), rng)
    for configuration in problem.configurations():
        table = random_table(rng, problem)
        plan = as_plan(problem, table, configuration)
        expected, over_sites = step_cost(plan), evaluate_sites(plan)
        assert expected.egress_usd > 0 and over_sites is not None
        assert site_cost(problem, table, configuration).step_usd == pytest.approx(expected.step_usd, rel=1e-12)
        assert over_sites[0].step_usd == pytest.approx(expected.step_usd, rel=1e-12)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("seed", "inside"), [(0, 1), (1, 1), (2, 1), (0, 2), (3, 2)])
def test_cheapest_table_and_bound_against_all_tables(seed: int, inside: int) -> None:
    rng = np.random.default_rng(100 + seed)
    problem = priced(random_problem(seed, sites=2, experts=3, inside=inside), rng)
    costs = list(all_costs(problem))
    fastest, cheapest = min(costs, key=lambda one: one.step_s), min(costs, key=lambda one: one.step_usd)
    assert least_usd(problem, fastest.step_s) <= cheapest.step_usd * (1 + 1e-9)
    made = planner.plan(problem.cluster, problem.workload, goal=DOLLARS, time_limit_s=2)
    check(made)
    assert made.solver is not None and made.prediction is not None and made.prediction.cost is not None
    # Equal domains may mix configurations, which no single table does.
    assert made.prediction.cost <= cheapest.step_usd * (1 + 1e-9)
    assert made.solver.cost_bound is not None and made.solver.cost_bound <= made.prediction.cost * (1 + 1e-9)
    budget = (cheapest.step_usd + fastest.step_usd) / 2
    within = min((one.step_s for one in costs if one.step_usd <= budget), default=None)
    assert within is not None
    found = solve_sites(replace(problem, goal=Goal(budget_usd=budget)), Wishes(time_limit_s=2)).found
    assert found.cost is not None and found.cost.step_usd <= budget * (1 + 1e-5)
    assert found.cost.step_s == pytest.approx(within, rel=1e-9)


@pytest.mark.turns(2)
def test_the_bound_on_egress_is_below_all_tables_and_near_some() -> None:
    """Of expert bytes in all proportions to token bytes."""
    ratios = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        problem = priced(random_problem(seed, sites=2, experts=3, inside=1), rng)
        rent = problem.cluster.rent_usd_per_s
        least = min(one.step_usd - rent * one.step_s for one in all_costs(problem))
        bound = least_egress_usd(problem)
        assert bound <= least * (1 + 1e-9) + 1e-15
        ratios.append((bound - fixed_cost(problem).egress_usd) / max(least - fixed_cost(problem).egress_usd, 1e-300))
    assert sum(ratio > 0.999 for ratio in ratios) >= 20


@pytest.mark.parametrize("seed", [6, 11])
def test_the_search_pays_less_among_more_tables_than_can_be_tried(seed: int) -> None:
    problem = priced(random_problem(seed, sites=4, experts=8, inside=2), np.random.default_rng(seed))
    costs = []
    for goal in (DOLLARS, Goal()):
        search = Search(problem=replace(problem, goal=goal), max_evaluations=300)
        run(search)
        assert search.best is not None and search.best.cost is not None
        costs.append(search.best.cost)
    cheap, fast = costs
    assert cheap.step_usd < 0.97 * fast.step_usd and fast.step_s < 0.9 * cheap.step_s
    assert 0 < least_usd(problem, 0.0) <= cheap.step_usd


def test_a_budget_that_nothing_keeps_names_the_cheapest_plan() -> None:
    problem = priced(random_problem(6, sites=3, experts=4, inside=2), np.random.default_rng(6))
    least = least_usd(problem, 0.0)
    with pytest.raises(InfeasibleError, match=r"costs at most .* \$ per step: the cheapest (found )?costs .*raise --budget"):
        planner.plan(problem.cluster, problem.workload, goal=Goal(budget_usd=0.9 * least), time_limit_s=0.5)
