"""The closed form over sites equals the general cost and memory models on ranks."""

from __future__ import annotations

import numpy as np
import pytest
from site_cases import as_plan, random_problem, random_table, with_shared_expert

from hybridep.recompute import Recompute
from planner.cost import step_cost
from planner.memory import memory_use
from planner.sites.cost import site_cost
from planner.sites.evaluate import evaluate_sites
from planner.sites.oracle import costs_at_once
from planner.sites.problem import Configuration, Inside

NODES = ((), (), (2,), (3,), (2, 3), (1, 2))
"""Levels between sites and ranks."""


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(36))
def test_equals_the_models_on_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = {"sites": int(rng.integers(1, 6)), "experts": int(rng.integers(1, 12 + 12 * (seed % 2)))}
    problem = random_problem(seed, **shape, nodes=NODES[seed % 6], windows=seed % 7 == 0, chunks=(1, 1, 3, 2)[seed % 4])
    problem = with_shared_expert(problem, recompute=Recompute(seed % 4))
    if not problem.cluster.links and problem.num_sites == 1:
        assert problem.latency_s.sum() == 0
    any_table = random_table(rng, problem)
    some_alike = any_table[np.arange(problem.num_sites) // 2]
    for table in (any_table, some_alike, np.tile(problem.home_site, (problem.num_sites, 1))):
        for configuration in problem.configurations():
            plan = as_plan(problem, table, configuration)
            expected, found = step_cost(plan), site_cost(problem, table, configuration)
            assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
            for name, seconds in expected.parts_s.items():
                assert found.parts_s[name] == pytest.approx(seconds, rel=1e-9, abs=1e-13 * expected.step_s), name
            assert found.wan_bytes == pytest.approx(expected.wan_bytes, rel=1e-12)
            assert found.memory_bytes == pytest.approx(memory_use(plan).fullest_bytes, rel=1e-12)


@pytest.mark.parametrize("seed", range(18))
def test_whole_plans_equal_link_by_link_and_rank_by_rank(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = {"sites": int(rng.integers(1, 6)), "experts": int(rng.integers(1, 12))}
    problem = random_problem(seed, **shape, nodes=NODES[seed % 6], chunks=(1, 1, 3, 2)[seed % 4])
    problem = with_shared_expert(problem, recompute=Recompute(seed % 4))
    for configuration in problem.configurations():
        plan = as_plan(problem, random_table(rng, problem), configuration)
        cost, memory = step_cost(plan), memory_use(plan)
        found = evaluate_sites(plan)
        assert found is not None
        np.testing.assert_allclose(found[0].link_bytes, cost.link_bytes, rtol=1e-12)
        np.testing.assert_allclose(found[1].total_bytes, memory.total_bytes, rtol=1e-12)
        assert found[0].bound_by == cost.bound_by or found[0].bound_s == pytest.approx(cost.bound_s, rel=1e-12)
        assert found[0].parts_s == pytest.approx(cost.parts_s, rel=1e-9, abs=1e-13 * cost.step_s)
        assert found[0].hidden_s == pytest.approx(cost.hidden_s, rel=1e-9, abs=1e-13 * cost.step_s)
        assert found[1].parts_bytes == pytest.approx(memory.parts_bytes, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_the_oracle_costs_tables_as_the_closed_form_does(seed: int) -> None:
    """What a probe measures (overheads, jitter, shared processors) included."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, sites=int(rng.integers(2, 6)), experts=int(rng.integers(1, 12)), inside=seed % 2)
    problem = with_shared_expert(problem, recompute=Recompute(seed % 4))
    tables = np.stack([random_table(rng, problem) for _ in range(4)])
    for residency in problem.residencies:
        configuration = Configuration(inside=problem.everywhere(Inside.ALL), residency=residency)
        expected = [site_cost(problem, table, configuration) for table in tables]
        steps_s, memory_bytes, _ = costs_at_once(problem, tables, residency)
        assert steps_s == pytest.approx([one.step_s for one in expected], rel=1e-12)
        if problem.num_inside == 1:
            assert memory_bytes.max(axis=1) == pytest.approx([one.memory_bytes for one in expected], rel=1e-12)
