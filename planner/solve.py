"""Solve the integer program and say honestly how it ended.

PuLP's ``LpStatus`` calls a search that ran into its time limit optimal, and variables without a value read back as 0.0; so
outcomes come from ``sol_status``, bounds from the solver itself, and values are read only when there is a solution.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import highspy
import pulp

from hybridep.errors import HybridEPError, InfeasibleError, NoSolutionError, UserError
from hybridep.plan import Status
from hybridep.units import format_bytes
from planner.ilp import Program, build_program
from planner.problem import TIE, Problem

PROVEN_GAP = 1e-6
"""Relative gap that still counts as optimal; the solvers' own tolerances are of this size."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Number of layers per candidate, and what is known about it."""

    counts: tuple[int, ...]
    status: Status
    """OPTIMAL or FEASIBLE; other outcomes are raised."""
    objective_s: float
    bound_s: float
    """Proven by the solver: no choice of candidates is faster."""
    solve_s: float
    solver: str

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        return gap(self.objective_s, self.bound_s)


def gap(objective_s: float, bound_s: float) -> float:
    """(objective - bound) / objective, at least 0."""
    return max(0.0, (objective_s - bound_s) / objective_s) if objective_s > 0 else 0.0


def solve(problem: Problem, *, solver: str = "highs", time_limit_s: float = 60.0) -> Solution:
    """The best numbers of layers. When the time is over first, the best found, or one configuration for all layers.

    Raises InfeasibleError when no choice fits the memory, NoSolutionError when the time was over and none was known to,
    UserError for an unknown solver.
    """
    if solver not in _SOLVERS:
        raise UserError(f"solver {solver!r} is unknown; use {' or '.join(_SOLVERS)}")
    program = build_program(problem)
    started = time.perf_counter()
    sol_status, dual_bound = _SOLVERS[solver](program, time_limit_s)
    solve_s = time.perf_counter() - started
    status = outcome(sol_status)
    if status is Status.INFEASIBLE:
        raise InfeasibleError(missing_memory(problem))
    found = None if status is Status.NO_SOLUTION else _counts(problem, program, solver)
    best = problem.best_uniform()
    uniform = None if best is None else problem.uniform(best)
    if found is None and uniform is None:
        raise NoSolutionError(f"{solver} found no plan within {time_limit_s:g} s; give it more time (--time-limit)")
    if found is None or (uniform is not None and problem.objective_s(uniform) <= problem.objective_s(found) * (1 + TIE)):
        # One configuration for all layers: where a mixture gains nothing, or the search ended before it had one.
        assert uniform is not None
        found, status = uniform, Status.FEASIBLE if found is None else status
    objective_s = problem.objective_s(found)
    # Without a bound of its own: every layer in its fastest configuration, whatever the memory.
    weakest = problem.num_layers * float(problem.layer_s.min())
    bound_s = problem.fixed_s + (weakest if dual_bound is None else max(weakest, dual_bound * program.scale_s))
    return Solution(
        counts=found,
        status=status,
        objective_s=objective_s,
        bound_s=min(bound_s, objective_s),
        solve_s=solve_s,
        solver=solver,
    )


def _counts(problem: Problem, program: Program, solver: str) -> tuple[int, ...]:
    """The solver's numbers of layers, which must be what was asked for."""
    counts = [0] * len(problem.candidates)
    for candidate, variable in program.numbers.items():
        counts[candidate] = round(variable.value())
    if sum(counts) != problem.num_layers or not problem.fits(counts):
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
    """How much is missing where, in the configuration whose fullest rank needs least."""
    needs = [problem.memory_bytes(problem.uniform(c)) for c in range(len(problem.candidates))]
    least = min(range(len(needs)), key=lambda c: float(needs[c].max()))
    rank = int(needs[least].argmax())
    need = float(needs[least][rank])
    cluster, candidate = problem.cluster, problem.candidates[least]
    return (
        f"no plan fits: {cluster.worker_name(cluster.location(rank))} needs {format_bytes(need)} with the configuration that "
        f"needs least ({candidate.label}) and has {format_bytes(problem.capacity_bytes)}: "
        f"{format_bytes(need - problem.capacity_bytes)} are missing. "
        f"Raise gpu.memory, add GPUs, or lower training.micro_batch_size (activations) or the model's size"
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
