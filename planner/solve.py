"""Solve the integer program and say honestly how it ended.

PuLP's ``LpStatus`` calls a search that ran into its time limit optimal, and variables without a value read back as 0.0; so
outcomes come from ``sol_status``, bounds from the solver itself, and values are read only when there is a solution.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import highspy
import pulp

from hybridep.errors import HybridEPError, InfeasibleError, NoSolutionError, UserError
from hybridep.plan import Objective, Status
from hybridep.topology import Cluster
from hybridep.units import format_bytes, format_dollars, format_seconds
from planner.clock import elapsed_s
from planner.goal import FASTEST, Goal
from planner.ilp import Program, build_program
from planner.memory import memory_knob
from planner.problem import TIE, Problem

PROVEN_GAP = 1e-6
"""Relative gap that still counts as optimal; the solvers' own tolerances are of this size."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Number of layers per candidate, and what is known about it."""

    counts: tuple[int, ...]
    status: Status
    """OPTIMAL or FEASIBLE; other outcomes are raised."""
    goal: Goal = FASTEST
    objective_s: float
    bound_s: float
    """Proven by the solver: no choice of candidates (that the budget allows) is faster."""
    bound_usd: float = 0.0
    """Likewise, where dollars were minimised: none costs less."""
    solve_s: float
    solver: str
    price_usd: float = 0.0
    """Of the step."""


def gap(objective_s: float, bound_s: float) -> float:
    """(objective - bound) / objective, at least 0."""
    return max(0.0, (objective_s - bound_s) / objective_s) if objective_s > 0 else 0.0


def solve(problem: Problem, *, solver: str = "highs", time_limit_s: float = 60.0) -> Solution:
    """The best numbers of layers. When the time is over first, the best found, or one configuration for all layers.

    Raises InfeasibleError when no choice fits the memory, or the budget allows none (then with the cheapest one's price),
    NoSolutionError when the time was over and none was known to, UserError for an unknown solver.
    """
    if solver not in _SOLVERS:
        raise UserError(f"solver {solver!r} is unknown; use {' or '.join(_SOLVERS)}")
    program = build_program(problem)
    started_s = elapsed_s()
    sol_status, dual_bound = _SOLVERS[solver](program, time_limit_s)
    solve_s = elapsed_s() - started_s
    status = outcome(sol_status)
    if status is Status.INFEASIBLE:
        raise InfeasibleError(_why_none(problem, solver, time_limit_s))
    found = None if status is Status.NO_SOLUTION else _counts(problem, program, solver)
    best = problem.best_uniform()
    uniform = None if best is None else problem.uniform(best)
    if found is None and uniform is None:
        raise NoSolutionError(f"{solver} found no plan within {time_limit_s:g} s; give it more time (--time-limit)")
    if found is None or (uniform is not None and problem.value(uniform) <= problem.value(found) * (1 + TIE)):
        # One configuration for all layers: where a mixture gains nothing, or the search ended before it had one.
        assert uniform is not None
        found, status = uniform, Status.FEASIBLE if found is None else status
    objective_s = problem.objective_s(found)
    # Without a bound of its own: every layer in its fastest configuration, whatever the memory.
    weakest = problem.num_layers * float(problem.layer_value.min())
    proven = problem.fixed_value + (weakest if dual_bound is None else max(weakest, dual_bound * program.scale))
    in_dollars = problem.goal.objective is Objective.DOLLARS
    bound_s = problem.fixed_s + problem.num_layers * float(problem.layer_s.min()) if in_dollars else proven
    return Solution(
        counts=found,
        status=status,
        goal=problem.goal,
        objective_s=objective_s,
        bound_s=min(bound_s, objective_s),
        bound_usd=min(proven, problem.price_usd(found)) if in_dollars else 0.0,
        solve_s=solve_s,
        solver=solver,
        price_usd=problem.price_usd(found),
    )


def _why_none(problem: Problem, solver: str, time_limit_s: float) -> str:
    """Memory, or a budget that the cheapest choice oversteps."""
    if problem.goal.budget_usd is None:
        return missing_memory(problem)
    cheapest = replace(problem, goal=Goal(objective=Objective.DOLLARS))
    found = solve(cheapest, solver=solver, time_limit_s=time_limit_s)
    return over_budget(problem.goal.budget_usd, cheapest.price_usd(found.counts), found.objective_s, found.bound_usd)


def over_budget(budget_usd: float, cheapest_usd: float, step_s: float, bound_usd: float) -> str:
    """That a budget allows no plan, with the price and the step of the cheapest one found and a proven bound on all."""
    proven = gap(cheapest_usd, bound_usd) <= PROVEN_GAP
    return (
        f"no plan {'' if proven else 'was found that '}costs at most {format_dollars(budget_usd)} per step: the cheapest "
        f"{'' if proven else 'found '}costs {format_dollars(cheapest_usd)} (a step of {format_seconds(step_s)})"
        f"{'' if proven else f', and none costs less than {format_dollars(bound_usd)}'}; raise --budget"
    )


def _counts(problem: Problem, program: Program, solver: str) -> tuple[int, ...]:
    """The solver's numbers of layers, which must be what was asked for."""
    counts = [0] * len(problem.candidates)
    for candidate, variable in program.numbers.items():
        counts[candidate] = round(variable.value())
    if sum(counts) != problem.num_layers or not problem.fits(counts) or not problem.affords(counts):
        raise HybridEPError(f"{solver} returned a plan that breaks its constraints: {counts}")
    return tuple(counts)


def outcome(sol_status: int) -> Status:
    """Of a PuLP ``sol_status``."""
    statuses = {
        pulp.LpSolutionOptimal: Status.OPTIMAL,
        pulp.LpSolutionIntegerFeasible: Status.FEASIBLE,
        pulp.LpSolutionInfeasible: Status.INFEASIBLE,
        pulp.LpSolutionNoSolutionFound: Status.NO_SOLUTION,
    }
    if sol_status not in statuses:
        raise HybridEPError(f"solver ended with the unexpected status {pulp.LpSolution.get(sol_status, sol_status)!r}")
    return statuses[sol_status]


def missing_memory(problem: Problem) -> str:
    """How much is missing where, in the configuration whose fullest rank needs least of what it has."""
    needs = [problem.memory_bytes(problem.uniform(c)) for c in range(len(problem.candidates))]
    least = min(range(len(needs)), key=lambda c: float((needs[c] / problem.capacity_bytes).max()))
    rank = int((needs[least] / problem.capacity_bytes).argmax())
    label = problem.candidates[least].label
    return too_small(problem.cluster, rank, float(needs[least][rank]), f"with the configuration that needs least ({label})")


def too_small(cluster: Cluster, rank: int, need_bytes: float, when: str, more_knobs: str = "") -> str:
    """That a rank lacks memory, and what helps."""
    capacity_bytes = cluster.of_ranks(lambda gpu: gpu.memory)[rank]
    site = cluster.datacenters[rank // cluster.ranks_per_site]
    less = f"sites.{site}.experts, sites.{site}.tokens, " if len(cluster.sites) > 1 else ""
    return (
        f"no plan fits: {cluster.worker_name(cluster.location(rank))} needs {format_bytes(need_bytes)} {when} and has "
        f"{format_bytes(capacity_bytes)}: {format_bytes(need_bytes - capacity_bytes)} are missing. "
        f"Raise {memory_knob(cluster, rank)}, add GPUs, {more_knobs}or lower {less}training.micro_batch_size "
        f"(activations) or the model's size"
    )


def _highs(program: Program, time_limit_s: float) -> tuple[int, float | None]:
    model = program.model
    model.solve(pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=0.0, gapAbs=0.0, threads=1, random_seed=0))
    info = model.solverModel.getInfo()
    bound = float(info.mip_dual_bound)
    return int(model.sol_status), bound if abs(bound) < highspy.kHighsInf else None


def _cbc(program: Program, time_limit_s: float) -> tuple[int, float | None]:
    model = program.model
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "cbc.log"
        solver: Any = pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,  # the program that PuLP brings along
            msg=False,
            timeLimit=time_limit_s,
            gapRel=0.0,
            gapAbs=0.0,
            threads=1,
            logPath=str(log),
        )
        solver.tmpDir = folder
        model.solve(solver)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    status = int(model.sol_status)
    if status == pulp.LpSolutionOptimal:
        return status, float(pulp.value(model.objective))
    if status == pulp.LpSolutionNoSolutionFound and model.status == pulp.LpStatusInfeasible:
        # PuLP knows CBC's "infeasible" but files its "integer infeasible" under no solution found.
        return pulp.LpSolutionInfeasible, None
    found = re.search(r"^Lower bound:\s+([-+.\deE]+)", text, flags=re.MULTILINE)
    return status, float(found[1]) if found else None


_SOLVERS: dict[str, Callable[[Program, float], tuple[int, float | None]]] = {"highs": _highs, "cbc": _cbc}
