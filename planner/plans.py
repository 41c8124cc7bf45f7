"""Plans from solutions, baselines and predictions: the planner's outer face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridep.baselines import Baseline, baseline_plan
from hybridep.codecs import Codecs
from hybridep.placement import LevelChoice
from hybridep.plan import LayerGroup, Plan, Prediction, Residency, Schedule, SolverReport, Status
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.units import Dimension, exact
from hybridep.workload import Workload
from planner.cost import step_cost
from planner.memory import memory_use
from planner.problem import Problem, build_problem
from planner.solve import PROVEN_GAP, Solution, gap, solve

BASELINES = (Baseline.EP, Baseline.FULL_GATHER)
"""Those that every prediction has."""


def plan_domains(
    cluster: Cluster,
    workload: Workload,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
    codecs: Mapping[str, Codecs] | None = None,
) -> Plan:
    """The fastest plan of equal domains per level that fits, with its prediction and how it was found.

    Raises InfeasibleError (says how much memory is missing where), NoSolutionError (time limit), UserError (unknown solver).
    """
    problem = build_problem(cluster, workload, schedule or Schedule(), codecs=codecs)
    return plan_of(problem, solve(problem, solver=solver, time_limit_s=time_limit_s))


def baseline(cluster: Cluster, workload: Workload, name: str, *, schedule: Schedule | None = None) -> Plan:
    """The ``hybridep.baselines.Baseline`` of that name with its prediction, whether or not it fits the memory."""
    made = baseline_plan(cluster, workload, Baseline(name), schedule=schedule)
    return made.model_copy(update={"prediction": predict(made), "provenance": provenance() | made.provenance})


def plan_of(problem: Problem, solution: Solution) -> Plan:
    """Layers in the order of the candidates in use."""
    groups: list[LayerGroup] = []
    first = 0
    for candidate, count in zip(problem.candidates, solution.counts, strict=True):
        if count:
            groups.append(layer_group(first, count, candidate.choices, candidate.residency))
            first += count
    made = Plan(
        cluster=problem.cluster,
        workload=problem.workload,
        layers=tuple(groups),
        codecs=problem.codecs,
        schedule=problem.schedule,
        provenance=provenance(),
    )
    return reported(made, solution, solution.objective_s, solution.bound_s)


def reported(made: Plan, solution: Solution, objective_s: float, bound_s: float) -> Plan:
    """The plan with its prediction and how it was found."""
    found_gap = gap(objective_s, bound_s)
    report = SolverReport(
        status=solution.status if found_gap <= PROVEN_GAP else Status.FEASIBLE,
        solver=solution.solver,
        objective=seconds(objective_s),
        bound=seconds(bound_s),
        gap=found_gap,
        solve=seconds(solution.solve_s),
    )
    return made.model_copy(update={"prediction": predict(made), "solver": report})


def layer_group(first: int, count: int, choices: dict[str, LevelChoice], residency: Residency) -> LayerGroup:
    """Of a plan file; ratios only where something is copied."""
    return LayerGroup(
        first_layer=first,
        num_layers=count,
        domains={name: choice.domain_size for name, choice in choices.items()},
        migration={name: choice.migration_ratio for name, choice in choices.items() if choice.domain_size > 1},
        residency=residency,
    )


def predict(made: Plan, baselines: Sequence[Baseline] = BASELINES) -> Prediction:
    """What the cost and memory models expect of a plan and of the baselines with the same schedule and codecs."""
    cost = step_cost(made)
    others: dict[str, Any] = {}
    for name in baselines:
        other = baseline_plan(
            made.cluster, made.workload, name, schedule=made.schedule, codecs=made.codecs, popularity=made.popularity
        )
        others[name.value] = seconds(step_cost(other).step_s)
    return Prediction(
        step=seconds(cost.step_s),
        bound=seconds(cost.bound_s),
        parts={name: seconds(value) for name, value in cost.parts_s.items()},
        wan_bytes=cost.wan_bytes,
        memory_bytes=memory_use(made).fullest_bytes,
        baselines=others,
    )


def seconds(value_s: float) -> Any:
    """As plan files write it; configuration models take quantities only with their unit."""
    return exact(value_s, Dimension.TIME)
