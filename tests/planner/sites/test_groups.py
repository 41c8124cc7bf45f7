"""Plans between sites for tokens that choose from some groups of experts only: exact costs, and bounds that hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import comb

import numpy as np
import pytest
from site_cases import as_plan, random_problem, random_table, small_workload, uneven_cluster

import planner
from hybridep.gating import Gating, gating
from hybridep.group_choice import GroupChoice
from hybridep.plan import Plan, Schedule
from hybridep.workload import Workload
from planner.check import check
from planner.cost import step_cost
from planner.memory import memory_use
from planner.sites.bound import prove
from planner.sites.cost import site_cost
from planner.sites.evaluate import evaluate_sites
from planner.sites.least_hit import _of_any, least_hit
from planner.sites.oracle import best_table
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation

SHAPES = [(4, 2, 2, 3), (4, 2, 1, 2), (4, 4, 2, 4), (3, 3, 2, 2), (2, 4, 1, 3)]
"""Groups, experts of each, groups of a token, and experts that it chooses."""


def grouped(work: Workload, groups: int, size: int, per_token: int, top_k: int) -> Workload:
    changes = {"num_experts": groups * size, "top_k": top_k, "expert_groups": groups, "groups_per_token": per_token}
    return work.model_copy(update={"model": work.model.model_copy(update=changes)})


def grouped_problem(seed: int, sites: int, shape: tuple[int, int, int, int], inside: int | None = None) -> SiteProblem:
    problem = random_problem(seed, sites, shape[0] * shape[1], inside, nodes=((), (2,), (3,))[seed % 3])
    return replace(problem, workload=grouped(problem.workload, *shape))


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(10))
def test_costs_are_those_of_the_models_on_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = grouped_problem(seed, 1 + seed % 4, SHAPES[seed % len(SHAPES)])
    any_table = random_table(rng, problem)
    for table in (any_table, any_table[np.arange(problem.num_sites) // 2], np.tile(problem.home_site, (problem.num_sites, 1))):
        for configuration in problem.configurations():
            plan = as_plan(problem, table, configuration)
            expected, found = step_cost(plan), site_cost(problem, table, configuration)
            assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
            assert found.wan_bytes == pytest.approx(expected.wan_bytes, rel=1e-12)
            assert found.memory_bytes == pytest.approx(memory_use(plan).fullest_bytes, rel=1e-12)
            whole = evaluate_sites(plan)
            assert whole is not None
            np.testing.assert_allclose(whole[0].link_bytes, expected.link_bytes, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_set_of_experts_is_needed_by_fewer_tokens(shape: tuple[int, int, int, int]) -> None:
    experts = shape[0] * shape[1]
    work = grouped(small_workload(np.random.default_rng(0), experts), *shape)
    members = (
        (np.arange(2**experts)[:, None] >> np.arange(experts)) % 2 == 1
        if experts <= 9
        else (np.random.default_rng(1).random((20_000, experts)) < np.random.default_rng(2).random((20_000, 1)))
    )
    hit, least = gating(work).hit(members), least_hit(gating(work), np.arange(experts))
    number = members.sum(axis=1)
    assert (least[number] <= hit + 1e-12).all()
    assert least[0] == 0 and (np.diff(least) >= -1e-12).all() and (np.diff(least, n=2) <= 1e-12).all()
    # It is of use: more than one in ``top_k`` choices of each expert, which holds wherever they are.
    assert (least >= np.arange(experts + 1) / experts - 1e-12).all()
    assert least[shape[1]] > 0.75 * hit[number == shape[1]].min()


@pytest.mark.parametrize("capacity", [None, 20])
@pytest.mark.parametrize("shape", [(2, 2, 1, 2), (2, 4, 1, 3), (4, 2, 2, 3), (4, 1, 2, 2)])
def test_bounds_hold_for_popularity_that_no_groups_have(shape: tuple[int, int, int, int], capacity: int | None) -> None:
    """As one that was measured with other groups: what is expected is of one piece."""
    experts, top_k, rng = shape[0] * shape[1], shape[3], np.random.default_rng(0)
    choice = GroupChoice(groups=shape[0], size=shape[1], per_token=shape[2], top_k=top_k)
    members = (np.arange(2**experts)[:, None] >> np.arange(experts)) % 2 == 1
    for _ in range(10):
        chosen = Gating(
            num_experts=experts,
            top_k=top_k,
            sequence_length=64,
            sequences=(1,),
            popularity=tuple(rng.dirichlet(np.full(experts, 0.5)).tolist()),
            capacity=capacity,
            groups=choice,
        )
        hit, order = chosen.hit(members), np.argsort(chosen.chosen, kind="stable")
        np.testing.assert_allclose(chosen.hit(np.eye(experts, dtype=bool)), chosen.chosen * chosen.kept, atol=1e-8)
        assert chosen.chosen.sum() == pytest.approx(top_k, abs=1e-6)
        for left_out in range(experts):
            inside = ~members[:, order[:left_out]].any(axis=1)
            least = least_hit(chosen, order[left_out:])
            assert (least[members[inside].sum(axis=1)] <= hit[inside] + 1e-8).all()


@pytest.mark.parametrize("most", [0, 20, 100, 1000])
def test_bounds_hold_where_not_all_numbers_are_looked_at(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With less work they are lower, and of use as long as more than one choice counts."""
    monkeypatch.setattr("planner.sites.least_hit._MOST_WORK", most)
    _of_any.cache_clear()
    choice = GroupChoice(groups=4, size=2, per_token=2, top_k=3)
    members = (np.arange(2**8)[:, None] >> np.arange(8)) % 2 == 1
    hit = 1 - choice.missed(1.0 - members)
    least = _of_any(choice)
    _of_any.cache_clear()
    assert (least[members.sum(axis=1)] <= hit + 1e-12).all() and (least > 0)[1:].all()
    assert (least[2] > 0.3) == (most >= 100)


def test_deepseek_v3_is_bounded_closely() -> None:
    """Sets of neighbours are needed least, and by no more than a tenth more tokens than is proven of any set."""
    work = grouped(small_workload(np.random.default_rng(0), 256), 8, 32, 4, 8)
    chosen, whole = gating(work), np.arange(0, 257, 32)
    least, near = least_hit(chosen, np.arange(256)), chosen.hit(np.tri(257, 256, -1, dtype=bool))
    assert (least <= near).all() and (least[whole[1:]] > 0.89 * near[whole[1:]]).all()
    free = np.array([1 - comb(256 - number, 8) / comb(256, 8) for number in whole.tolist()])
    assert (near[whole[1:5]] < 0.99 * free[1:5]).all() and near[32] < 0.76 * free[1]


@pytest.mark.turns(4)
@pytest.mark.parametrize("case", [(0, 2, (2, 2, 1, 2), 2), (1, 2, (2, 2, 1, 2), 0), (3, 2, (4, 1, 2, 2), 0)])
def test_bounds_are_below_the_best_of_all_tables(case: tuple[int, int, tuple[int, int, int, int], int]) -> None:
    problem = grouped_problem(*case)
    found = best_table(problem)
    assert found is not None
    tables = [np.array(one).reshape(2, -1) for one in product(range(2), repeat=2 * problem.num_experts)]
    costs = [site_cost(problem, table, one) for table in tables[:: 1 + 6 * case[3]] for one in problem.configurations()]
    fitting = [cost.step_s for cost in costs if cost.fits]
    assert found[2] <= min(fitting) * (1 + 1e-12) and (case[3] or found[2] == pytest.approx(min(fitting), rel=1e-12))
    # Of any experts, not of neighbours, however it is asked for.
    assert (Relaxation(problem=problem).hit == problem.for_bounds.hit).all() and (problem.for_bounds.hit <= problem.hit).all()
    assert found[2] == pytest.approx(site_cost(problem, *found[:2]).step_s, rel=1e-12)
    assert 0.2 * found[2] < prove(Relaxation(problem=problem), found[2], max_boxes=40).bound_s <= found[2] * (1 + 1e-9)


@pytest.mark.turns(4)
def test_plans_know_of_groups() -> None:
    """A plan between uneven sites: what it claims is so, two searches find the same, and the plan that is made without knowing of
    groups is no better."""
    rng = np.random.default_rng(0)
    cluster, work = uneven_cluster(rng, 4, 2), grouped(small_workload(rng, 16), 4, 4, 1, 3)
    found = [planner.plan(cluster, work, time_limit_s=60.0, schedule=Schedule()) for _ in range(2)]
    assert found[0].digest == found[1].digest and found[0].solver is not None
    check(found[0])
    free = work.model_copy(update={"model": work.model.model_copy(update={"expert_groups": 1})})
    other = planner.plan(cluster, free, time_limit_s=60.0, schedule=Schedule()).model_copy(update={"workload": work})
    assert found[0].solver.bound <= found[0].predicted.step <= step_cost(other).step_s * (1 + 1e-9)
    assert found[0].predicted.step < free_step(other, free)


def free_step(plan: Plan, free: Workload) -> float:
    return step_cost(plan.model_copy(update={"workload": free})).step_s


@pytest.mark.turns(4)
def test_measured_popularity_in_groups() -> None:
    """No table is faster than the bound, and the plan, which is costed for both, is not far from the best."""
    cluster, work = (
        uneven_cluster(np.random.default_rng(3), 2, 1),
        grouped(small_workload(np.random.default_rng(3), 4), 2, 2, 1, 2),
    )
    work = work.model_copy(update={"model": work.model.model_copy(update={"num_layers": 1, "expert_ffn_size": 1024})})
    popularity, problem = ((0.35, 0.35, 0.15, 0.15),), site_problem(cluster, work)
    tables = [np.array(one).reshape(2, 4) for one in product(range(2), repeat=8)]
    plans = [as_plan(problem, table, one) for table in tables for one in problem.configurations()]
    best_s = min(step_cost(plan.model_copy(update={"popularity": popularity})).step_s for plan in plans)
    made = planner.plan(cluster, work, popularity=popularity, time_limit_s=4.0)
    assert made.solver is not None and 0 < made.solver.bound <= best_s * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= made.predicted.step <= 1.1 * best_s
    check(made)
