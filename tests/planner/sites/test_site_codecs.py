"""Coded bytes between uneven sites: closed form against the models on ranks, search and bound against all tables, and `check`."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from site_cases import as_plan, box_of, random_problem, random_table

import planner
from hybridep.codecs import Codecs, ExpertCodec, GradientCodec, Speed, Speeds, TokenCodec
from hybridep.plan import Residency
from planner.check import check
from planner.cost import step_cost
from planner.memory import memory_use
from planner.sites.bound import Corner, prove, proven_s
from planner.sites.cost import site_cost
from planner.sites.evaluate import evaluate_sites
from planner.sites.lp import box_program
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation

CODECS = {
    "change": Codecs(experts=ExpertCodec.CHANGE_INT4, gradients=GradientCodec.INT8),
    "sr": Codecs(experts=ExpertCodec.SHARED_RESIDUAL, experts_keep=0.1, gradients=GradientCodec.TOP_K),
    "tokens": Codecs(tokens=TokenCodec.FP8, experts=ExpertCodec.BF16),
}


SPEED = Speed(encode="3 GB/s", decode="5 GB/s")
SPEEDS = Speeds(
    tokens=dict.fromkeys((TokenCodec.FP8,), SPEED),
    experts=dict.fromkeys((ExpertCodec.CHANGE_INT4, ExpertCodec.SHARED_RESIDUAL, ExpertCodec.BF16), SPEED),
    gradients=dict.fromkeys((GradientCodec.INT8, GradientCodec.TOP_K), SPEED),
)


def coded(problem: SiteProblem, name: str, *, inside: bool = False) -> SiteProblem:
    """The outermost level coded, which takes time; ``inside`` all below it, too."""
    levels = problem.cluster.levels[: None if inside else 1]
    codecs = {level.name: CODECS[name] for level in levels}
    gpu = problem.cluster.gpu.model_copy(update={"coding": SPEEDS})
    cluster = problem.cluster.model_copy(update={"gpu": gpu})
    return site_problem(cluster, problem.workload, problem.schedule, codecs=codecs)


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in CODECS for seed in range(6)])
def test_the_closed_form_equals_the_models_on_ranks(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = {"sites": int(rng.integers(2, 6)), "experts": int(rng.integers(1, 12))}
    problem = random_problem(seed, **shape, nodes=(2,) if seed >= 4 else ())
    problem = coded(problem, name, inside=seed % 2 == 1)
    for configuration in problem.configurations():
        table = random_table(rng, problem)
        plan = as_plan(problem, table, configuration)
        expected, memory = step_cost(plan), memory_use(plan)
        found, over_sites = site_cost(problem, table, configuration), evaluate_sites(plan)
        assert found.parts_s == pytest.approx(expected.parts_s, rel=1e-9, abs=1e-15)
        assert found.parts_s["coding"] > 0
        assert found.wan_bytes == pytest.approx(expected.wan_bytes, rel=1e-12)
        assert found.memory_bytes == pytest.approx(memory.fullest_bytes, rel=1e-12)
        assert over_sites is not None
        np.testing.assert_allclose(over_sites[0].link_bytes, expected.link_bytes, rtol=1e-12)
        assert over_sites[0].hidden_s == pytest.approx(expected.hidden_s, rel=1e-9, abs=1e-15)
        assert over_sites[1].parts_bytes == pytest.approx(memory.parts_bytes, rel=1e-12)


@pytest.mark.turns(4)
@pytest.mark.parametrize(("name", "inside", "seed"), [(name, inside, inside) for name in CODECS for inside in (1, 2)])
def test_search_bound_and_check_agree_with_all_tables(name: str, inside: int, seed: int) -> None:
    problem = coded(random_problem(seed, sites=2, experts=3, inside=inside), name)
    costs = [
        site_cost(problem, np.array(entries).reshape(2, 3), configuration)
        for entries in product(range(2), repeat=6)
        for configuration in problem.configurations()
    ]
    optimum_s = min(cost.step_s for cost in costs)
    assert prove(Relaxation(problem=problem), optimum_s, max_boxes=20).bound_s <= optimum_s * (1 + 1e-9)
    made = planner.plan(problem.cluster, problem.workload, codecs=problem.codecs_by_level, time_limit_s=2)
    check(made)
    assert made.codecs == problem.codecs_by_level and made.prediction is not None and made.solver is not None
    # Equal domains may mix configurations, which no single table does.
    assert made.solver.bound <= made.prediction.step <= optimum_s * (1 + 1e-9)
    exact_s = min(
        site_cost(site_problem(problem.cluster, problem.workload), np.array(entries).reshape(2, 3), configuration).step_s
        for entries in product(range(2), repeat=6)
        for configuration in problem.configurations()
    )
    assert name == "sr" or optimum_s < exact_s


@pytest.mark.parametrize("name", CODECS)
def test_no_table_beats_the_bound_of_its_own_box(name: str) -> None:
    """The box that holds only plans whose gathers and returns take as long as the table's: there copies count most."""
    with_copies = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        problem = coded(random_problem(seed, sites=3, experts=6), name)
        relaxation, table = Relaxation(problem=problem), random_table(rng, problem)
        for configuration in problem.configurations():
            box = box_of(relaxation, table, configuration)
            step_s = site_cost(problem, table, configuration).step_s
            program = box_program(relaxation, box)
            assert program is not None
            duals = program.solve()
            for evidence in (Corner(), *([] if duals is None else [duals])):
                assert proven_s(relaxation, box, evidence) <= step_s * (1 + 1e-9)
            with_copies += duals is not None and box.copy_reach[0] > 0
    assert with_copies > 8


def test_change_coding_between_sites_needs_copies_that_stay() -> None:
    problem = coded(random_problem(3, sites=4, experts=8, inside=2), "change")
    assert {one.residency for one in problem.configurations()} == {Residency.STEP}
    made = planner.plan(problem.cluster, problem.workload, codecs=problem.codecs_by_level, time_limit_s=1)
    assert {group.residency for group in made.layers} == {Residency.STEP}
    assert planner.explain(made).plan.step_s == pytest.approx(step_cost(made).step_s, rel=1e-12)
