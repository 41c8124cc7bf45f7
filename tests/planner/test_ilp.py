"""The integer program against enumeration, for both solvers, and honest outcomes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pulp
import pytest
from brute_force import brute_force, distributions
from planner_cases import make_cluster, make_workload, random_cluster, random_problem, random_workload

from hybridep.errors import HybridEPError, InfeasibleError, NoSolutionError, UserError
from hybridep.plan import Schedule, Status
from planner.ilp import _memory_rows, build_program
from planner.problem import Problem, build_problem
from planner.solve import gap, outcome, solve


def agree(problem: Problem, solver: str) -> str:
    """The solver finds what enumeration finds; returns how it ended."""
    oracle = brute_force(problem)
    if oracle is None:
        with pytest.raises(InfeasibleError, match="missing"):
            solve(problem, solver=solver)
        return "infeasible"
    solution = solve(problem, solver=solver)
    assert solution.status is Status.OPTIMAL
    assert problem.fits(solution.counts)
    assert sum(solution.counts) == problem.num_layers
    assert solution.objective_s == pytest.approx(oracle[1], rel=1e-8)
    assert solution.objective_s == problem.objective_s(solution.counts)
    assert solution.bound_s <= oracle[1] * (1 + 1e-8)
    assert gap(solution.objective_s, solution.bound_s) <= 1e-6
    return "mixed" if sum(count > 0 for count in solution.counts) > 1 else "uniform"


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("solver", "seeds"),
    [
        ("highs", range(500)),
        ("cbc", range(500, 620)),
        pytest.param("cbc", range(620, 1000), marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
def test_random_numbers_agree_with_enumeration(solver: str, seeds: range) -> None:
    """Problems of every outcome; fewer for CBC, which is a process of its own each time."""
    outcomes = [agree(random_problem(seed), solver) for seed in seeds]
    for kind in ("infeasible", "mixed", "uniform"):
        assert outcomes.count(kind) >= len(seeds) // 50, {kind: outcomes.count(kind) for kind in set(outcomes)}


@pytest.mark.turns(2)
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_small_clusters_agree_with_enumeration(solver: str) -> None:
    """Real costs and memory, with a capacity between what the leanest and the fastest configuration need; the oracle looks
    at a random handful of the candidates so that it can enumerate."""
    rng = np.random.default_rng(7 if solver == "highs" else 8)
    outcomes = []
    for _ in range(60 if solver == "highs" else 30):
        whole = build_problem(random_cluster(rng), random_workload(rng), Schedule(overlap=bool(rng.integers(2))))
        few = sorted(rng.choice(len(whole.candidates), size=min(6, len(whole.candidates)), replace=False))
        problem = replace(whole, candidates=tuple(whole.candidates[c] for c in few))
        needs = [float(problem.memory_bytes(problem.uniform(c)).max()) for c in range(len(few))]
        capacity = rng.uniform(0.97 * min(needs), 1.03 * max(needs))
        outcomes.append(agree(replace(problem, capacity_bytes=np.full_like(problem.capacity_bytes, capacity)), solver))
    assert len(set(outcomes)) == 3, set(outcomes)


def test_solvers_agree_on_all_candidates() -> None:
    rng = np.random.default_rng(9)
    for _ in range(10):
        problem = build_problem(random_cluster(rng), random_workload(rng), Schedule())
        needs = [float(problem.memory_bytes(problem.uniform(c)).max()) for c in range(len(problem.candidates))]
        problem = replace(problem, capacity_bytes=np.full_like(problem.capacity_bytes, np.quantile(needs, 0.3)))
        highs, cbc = solve(problem, solver="highs"), solve(problem, solver="cbc")
        assert highs.objective_s == pytest.approx(cbc.objective_s, rel=1e-8)
        assert solve(problem, solver="highs").counts == highs.counts


def test_dominated_candidates_are_left_out_without_loss() -> None:
    for seed in range(50):
        problem = random_problem(seed)
        kept = problem.undominated()
        lean = replace(problem, candidates=tuple(problem.candidates[c] for c in kept))
        full, less = brute_force(problem), brute_force(lean)
        assert (full is None) == (less is None)
        if full is not None and less is not None:
            assert full[1] == pytest.approx(less[1], rel=1e-9)


def test_equal_candidates_resolve_to_the_preferred_one() -> None:
    problem = random_problem(3)
    twin = replace(problem.candidates[0], num_copies=99)
    doubled = replace(problem, candidates=(problem.candidates[0], twin), capacity_bytes=np.full(4, 1e12))
    for solver in ("highs", "cbc"):
        assert solve(doubled, solver=solver).counts == (problem.num_layers, 0)
    assert doubled.undominated() == [0]


def test_distributions_are_all_and_distinct() -> None:
    found = list(distributions(3, 4))
    assert len(found) == len(set(found)) == 20
    assert all(sum(counts) == 3 and min(counts) >= 0 for counts in found)
    assert list(distributions(2, 1)) == [(2,)]


def test_equal_problems_build_equal_programs() -> None:
    problem = build_problem(make_cluster(4, 2), make_workload(), Schedule())
    again = build_problem(make_cluster(4, 2), make_workload(), Schedule())
    assert str(build_program(problem).model) == str(build_program(again).model)


def hard_problem(capacity_bytes: float) -> Problem:
    """200 layers, 457 candidates that hardly differ, every rank with needs of its own."""
    rng = np.random.default_rng(1)
    problem = build_problem(make_cluster(4, 2, 2), make_workload(layers=4, experts=64), Schedule())
    noise = [
        replace(
            candidate,
            layer_s=float(rng.uniform(1, 2)),
            lasting_bytes=rng.uniform(1e9, 2e9, 16),
            passing_bytes=rng.uniform(0, 1e9, 16),
        )
        for candidate in problem.candidates
    ]
    return replace(problem, candidates=tuple(noise), num_layers=200, capacity_bytes=np.full(16, capacity_bytes))


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_search_without_time_says_so(solver: str) -> None:
    """No candidate fits alone, and a mixture takes minutes to find. PuLP's ``LpStatus`` may call this optimal."""
    with pytest.raises(NoSolutionError, match=f"{solver} found no plan within 0.001 s.*--time-limit") as caught:
        solve(hard_problem(320e9), solver=solver, time_limit_s=1e-3)
    assert caught.value.exit_code == 4


@pytest.mark.turns(2)
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_search_without_time_falls_back_to_one_configuration(solver: str) -> None:
    problem = hard_problem(400e9)
    solution = solve(problem, solver=solver, time_limit_s=1e-3)
    assert problem.fits(solution.counts)
    best = problem.best_uniform()
    assert best is not None
    assert solution.objective_s <= problem.objective_s(problem.uniform(best)) * (1 + 1e-9)
    assert solution.bound_s <= solution.objective_s
    assert solution.status is Status.FEASIBLE or gap(solution.objective_s, solution.bound_s) <= 1e-6


def test_outcomes_come_from_sol_status() -> None:
    assert outcome(pulp.LpSolutionOptimal) is Status.OPTIMAL
    assert outcome(pulp.LpSolutionIntegerFeasible) is Status.FEASIBLE
    assert outcome(pulp.LpSolutionInfeasible) is Status.INFEASIBLE
    assert outcome(pulp.LpSolutionNoSolutionFound) is Status.NO_SOLUTION
    with pytest.raises(HybridEPError, match="Unbounded"):
        outcome(pulp.LpSolutionUnbounded)


def test_an_unknown_solver_is_a_user_error() -> None:
    with pytest.raises(UserError, match="'gurobi' is unknown; use highs or cbc"):
        solve(random_problem(0), solver="gurobi")


def test_gap() -> None:
    assert gap(2.0, 1.0) == 0.5
    assert gap(2.0, 2.0) == 0.0
    assert gap(0.0, 0.0) == 0.0


def test_ranks_that_need_less_of_everything_are_no_rows() -> None:
    """Whatever is left out fits where what is kept does, and nothing that is kept could be left out, too."""
    fewer = 0
    for seed in range(60):
        problem = random_problem(seed)
        used = problem.undominated()
        needs = np.column_stack([problem.fixed_lasting_bytes, problem.fixed_passing_bytes])
        needs = np.column_stack([needs, *problem.lasting_bytes[used], *problem.passing_bytes[used]])
        needs /= problem.capacity_bytes[:, None]
        kept = np.array([[fixed, passing, *lasting, *more] for fixed, passing, lasting, more in _memory_rows(problem, used)])
        assert all((kept >= row - 1e-11).all(axis=1).any() for row in needs)
        assert all((np.abs(needs - row) <= 1e-11).all(axis=1).any() for row in kept)
        assert not any((np.delete(kept, place, axis=0) >= row).all(axis=1).any() for place, row in enumerate(kept))
        fewer += len(kept) < len(np.unique(needs.round(12), axis=0))
    assert fewer
