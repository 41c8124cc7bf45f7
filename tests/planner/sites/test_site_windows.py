"""Connections with windows between sites: the same closed form as on ranks, and bounds that hold."""

from __future__ import annotations

import numpy as np
import pytest
from site_cases import as_plan, random_problem, random_table

from hybridep.plan import Residency
from hybridep.traffic import Op
from planner.cost import step_cost
from planner.sites.bound import prove
from planner.sites.cost import block_times, site_cost
from planner.sites.exchange import layer_exchanges
from planner.sites.oracle import best_table, costs_at_once
from planner.sites.problem import Configuration, Inside, SiteProblem, site_problem
from planner.sites.relaxation import Relaxation


def without_windows(problem: SiteProblem) -> SiteProblem:
    levels = tuple(level.model_copy(update={"window": None}) for level in problem.cluster.levels)
    return site_problem(problem.cluster.model_copy(update={"levels": levels}), problem.workload, problem.schedule)


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_model_on_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, sites=int(rng.integers(2, 6)), experts=int(rng.integers(1, 12)), windows=True)
    roomy, table = without_windows(problem), random_table(rng, problem)
    for configuration in problem.configurations():
        expected, found = step_cost(as_plan(problem, table, configuration)), site_cost(problem, table, configuration)
        assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
        for name, seconds in expected.parts_s.items():
            assert found.parts_s[name] == pytest.approx(seconds, rel=1e-9, abs=1e-15), name
        bare = site_cost(roomy, table, configuration)
        assert bare.wan_bytes == found.wan_bytes and bare.memory_bytes == found.memory_bytes
        assert found.step_s > bare.step_s * 1.01


@pytest.mark.parametrize("seed", range(4))
def test_the_oracle_costs_tables_as_the_closed_form_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, sites=3, experts=5, inside=seed % 2, windows=True)
    tables = np.stack([random_table(rng, problem) for _ in range(4)])
    configuration = Configuration(inside=problem.everywhere(Inside.ALL), residency=Residency.STEP)
    expected_s = [site_cost(problem, table, configuration).step_s for table in tables]
    assert costs_at_once(problem, tables, Residency.STEP)[0] == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    problem = random_problem(seed, *[(2, 2), (3, 1), (2, 3)][seed % 3], windows=True)
    relaxation, best = Relaxation(problem=problem), best_table(problem)
    assert best is not None
    assert prove(relaxation, best[2], max_boxes=20).bound_s <= best[2] * (1 + 1e-9)
    # Boxes hold every plan only if none gathers for longer than they reach.
    everything = np.repeat(np.arange(problem.num_sites)[:, None], problem.num_experts, axis=1)
    for table in (best[0], everything):
        times = block_times(problem, layer_exchanges(problem, table, problem.everywhere(Inside.ONE))).exchanges_s
        longest_s = [seconds + problem.cluster.gpu.jitter for seconds in relaxation.full_gather_s]
        assert times[Op.EXPERT_GATHER] <= longest_s[0] and times[Op.GRADIENT_RETURN] <= longest_s[1]


def test_windows_make_the_bound_tighter_where_pairs_have_links(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(2, 2, 3, inside=2, windows=True)
    assert problem.path_bytes_per_s is not None and problem.pair_bytes_per_s is not None
    assert (problem.path_bytes_per_s < problem.pair_bytes_per_s).any()
    found = prove(Relaxation(problem=problem), 100.0, max_boxes=20).bound_s
    monkeypatch.setattr(SiteProblem, "path_bytes_per_s", property(lambda self: self.pair_bytes_per_s))
    assert found > prove(Relaxation(problem=problem), 100.0, max_boxes=20).bound_s * 1.01
