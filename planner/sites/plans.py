"""Plans from serving tables: search, bound, and the better of this and equal domains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridep.errors import InfeasibleError, NoSolutionError
from hybridep.placement import IntArray
from hybridep.plan import LayerGroup, Plan, Prediction, Residency, Schedule, SolverReport, Status
from hybridep.provenance import provenance
from hybridep.serving import serving_groups
from hybridep.topology import Cluster
from hybridep.units import Dimension, exact, format_bytes
from hybridep.workload import Workload
from planner.plans import plan_domains, predict
from planner.sites.bound import Proof, prove
from planner.sites.cost import SiteCost, site_cost
from planner.sites.grouping import MANY
from planner.sites.oracle import best_table
from planner.sites.others import OTHERS
from planner.sites.problem import Configuration, Inside, SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.search import Found, Search, run
from planner.solve import PROVEN_GAP, gap

MOST_RANKS = 1024
"""Above, equal domains are not tried by the integer program, and predictions come from the closed form over sites."""
FEW_TABLES = 5000
"""Up to so many serving tables all are tried."""
MOST_BOXES = 500
"""Of one proof."""
ENOUGH_GAP = 0.005
"""The bound is not improved below this gap."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteSolution:
    """A serving table and what is known about it."""

    found: Found
    bound_s: float
    proof: Proof | None
    """None where every table was tried."""
    solve_s: float


def solve_sites(
    problem: SiteProblem, *, time_limit_s: float = 60.0, report: Callable[[str, float], None] | None = None
) -> SiteSolution:
    """The best serving table found and a proven bound on all. ``report`` is told ("plan" or "bound", seconds) as either
    improves. Raises NoSolutionError when the time was over before one table was tried."""
    started = time.perf_counter()
    search = Search(problem=problem, deadline_s=started + 0.6 * time_limit_s, max_evaluations=_evaluations(problem))
    if report is not None:
        search.report = lambda seconds: report("plan", seconds)
    few = problem.num_sites * problem.num_experts * np.log(problem.num_sites) <= np.log(FEW_TABLES)
    if few and (best := best_table(problem)) is not None:
        found = search.evaluate(best[0])
        return SiteSolution(found=found, bound_s=best[2], proof=None, solve_s=time.perf_counter() - started)
    if problem.num_sites <= MANY:
        # Never worse than what other planners would do.
        for other in OTHERS.values():
            for table in other(problem):
                if not search.over:
                    search.evaluate(np.ascontiguousarray(table))
    run(search)
    if search.best is None:
        raise NoSolutionError(f"no plan was looked at within {time_limit_s:g} s; give it more time (--time-limit)")
    relaxation = Relaxation(problem=problem)
    proof = prove(
        relaxation,
        search.best.rank[1],
        enough_gap=ENOUGH_GAP,
        max_boxes=MOST_BOXES,
        deadline_s=started + 0.95 * time_limit_s,
        report=None if report is None else lambda seconds: report("bound", seconds),
    )
    bound_s = min(proof.bound_s, search.best.rank[1])
    return SiteSolution(found=search.best, bound_s=bound_s, proof=proof, solve_s=time.perf_counter() - started)


def _evaluations(problem: SiteProblem) -> int:
    """Tables to try: fewer where one takes longer, which is so from about 16 sites on."""
    return int(np.clip(6000 * (16 / problem.num_sites) ** 1.5, 100, 6000))


def plan_sites(
    cluster: Cluster,
    workload: Workload,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
    report: Callable[[str, float], None] | None = None,
) -> Plan:
    """The fastest plan found for sites that differ: one serving table for all layers, or equal domains where those win.

    The bound holds for every serving table, whatever the choice inside sites, used in all layers, and for the integer
    program's mixtures of equal domains. Raises InfeasibleError, NoSolutionError and UserError.
    """
    started = time.perf_counter()
    problem = site_problem(cluster, workload, schedule)
    domains = None
    if cluster.num_gpus <= MOST_RANKS:
        try:
            domains = plan_domains(
                cluster, workload, solver=solver, time_limit_s=max(time_limit_s / 4, 0.2), schedule=problem.schedule
            )
        except (InfeasibleError, NoSolutionError):
            domains = None
    left_s = max(time_limit_s - (time.perf_counter() - started), 0.1)
    solution = solve_sites(problem, time_limit_s=left_s, report=report)
    fits = solution.found.rank[0] == 0
    if not fits and domains is None:
        raise InfeasibleError(_missing(problem, solution.found))
    if domains is not None and (not fits or _step_s(domains) <= solution.found.rank[1]):
        assert domains.solver is not None
        bound_s = min(solution.bound_s, domains.solver.bound)
        return domains.model_copy(update={"solver": _report(solver, _step_s(domains), bound_s, started)})
    made = table_plan(problem, solution.found.table, _configuration(solution.found))
    assert made.prediction is not None
    bound_s = min(solution.bound_s, made.prediction.step)
    if domains is not None and domains.solver is not None:
        bound_s = min(bound_s, domains.solver.bound)
    return made.model_copy(update={"solver": _report(solver, made.prediction.step, bound_s, started)})


def table_plan(problem: SiteProblem, table: IntArray, configuration: Configuration) -> Plan:
    """The plan with this serving table ([D, E]) in all MoE layers, with its prediction and without a solver's report."""
    choices = problem.choices(configuration.inside)
    group = LayerGroup(
        first_layer=0,
        num_layers=problem.workload.model.num_moe_layers,
        domains={name: choice.domain_size for name, choice in choices.items()},
        migration={name: 1.0 for name, choice in choices.items() if choice.domain_size > 1},
        residency=configuration.residency,
        serving=serving_groups(problem.cluster, table),
    )
    made = Plan(
        cluster=problem.cluster,
        workload=problem.workload,
        layers=(group,),
        schedule=problem.schedule,
        provenance=provenance(),
    )
    if problem.cluster.num_gpus <= MOST_RANKS:
        return made.model_copy(update={"prediction": predict(made)})
    return made.model_copy(update={"prediction": _closed_form(problem, table, configuration)})


def ep_table(problem: SiteProblem) -> IntArray:
    """[D, E]: every expert is served at home."""
    return np.tile(problem.home_site, (problem.num_sites, 1))


def full_gather_table(problem: SiteProblem) -> IntArray:
    """[D, E]: every site serves itself."""
    return np.tile(np.arange(problem.num_sites)[:, None], (1, problem.num_experts))


def _closed_form(problem: SiteProblem, table: IntArray, configuration: Configuration) -> Prediction:
    """As ``planner.predict``, without arrays over ranks; the lower bound is the computation alone."""
    cost = site_cost(problem, table, configuration)
    one = Inside.ONE if problem.num_inside > 1 else Inside.ALL
    ep = site_cost(problem, ep_table(problem), Configuration(inside=one, residency=Residency.STEP))
    full = Configuration(inside=Inside.ALL, residency=Residency.STEP)
    gather = site_cost(problem, full_gather_table(problem), full)
    return Prediction(
        step=_seconds(cost.step_s),
        bound=_seconds(cost.compute_s),
        parts={name: _seconds(value) for name, value in cost.parts_s.items()},
        wan_bytes=cost.wan_bytes,
        memory_bytes=cost.memory_bytes,
        baselines={"ep": _seconds(ep.step_s), "full_gather": _seconds(gather.step_s)},
    )


def _report(solver: str, objective_s: float, bound_s: float, started_s: float) -> SolverReport:
    found_gap = gap(objective_s, bound_s)
    return SolverReport(
        status=Status.OPTIMAL if found_gap <= PROVEN_GAP else Status.FEASIBLE,
        solver=solver,
        objective=_seconds(objective_s),
        bound=_seconds(bound_s),
        gap=found_gap,
        solve=_seconds(time.perf_counter() - started_s),
    )


def _missing(problem: SiteProblem, least: Found) -> str:
    cost = least.cost
    assert isinstance(cost, SiteCost)
    capacity = problem.cluster.gpu.memory
    return (
        f"no plan fits: the fullest rank needs {format_bytes(cost.memory_bytes)} in the plan found that needs least and has "
        f"{format_bytes(capacity)}: {format_bytes(cost.memory_bytes - capacity)} are missing. "
        f"Raise gpu.memory, add GPUs, or lower training.micro_batch_size (activations) or the model's size"
    )


def _configuration(found: Found) -> Configuration:
    assert found.configuration is not None
    return found.configuration


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step


def _seconds(value_s: float) -> Any:
    """As plan files write it; configuration models take quantities only with their unit."""
    return exact(value_s, Dimension.TIME)
