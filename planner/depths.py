"""Which prefetch depth a plan gets: how many blocks ahead copies set out (``plan.Schedule.prefetch``).

The search for a placement needs times that add up over layers, so it runs without prefetch. Then the step with copies ahead is
computed for the plan found, and for one configuration in all layers wherever that could still be faster: never below its
computation and tokens, nor below its busiest link.
"""

from __future__ import annotations

import numpy as np

from hybridep.plan import Plan, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.cost import step_costs
from planner.memory import memory_use
from planner.plans import layer_group, plan_of, reported
from planner.problem import TIE, Problem, build_problem
from planner.solve import Solution, solve

MOST_TRIED = 32
"""Configurations for all layers; those that are left lower the bound."""


def depths(num_layers: int) -> tuple[int, ...]:
    """1, 2, 4 and so on; at last all layers at once."""
    powers = [2**power for power in range(num_layers.bit_length()) if 2**power < num_layers]
    return tuple(sorted({1, *powers, max(num_layers - 1, 1)}))


def plan_ahead(
    cluster: Cluster,
    workload: Workload,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
) -> Plan:
    """The fastest plan of equal domains per level that fits, with or without prefetch; errors as ``planner.plan``."""
    problem = build_problem(cluster, workload, schedule or Schedule())
    solution = solve(problem, solver=solver, time_limit_s=time_limit_s)
    return send_ahead(problem, solution, plan_of(problem, solution))


def send_ahead(problem: Problem, solution: Solution, made: Plan) -> Plan:
    """The faster of ``made``, which is the best without prefetch, and plans with it; its bound holds for the search's mixtures of
    configurations without prefetch, and for every configuration in all layers with any of ``depths``."""
    assert made.prediction is not None
    best, best_s, bound_s = made, made.prediction.step, solution.bound_s

    def consider(plain: Plan) -> None:
        nonlocal best, best_s
        tried = depths(problem.num_layers)
        for depth, cost in zip(tried, step_costs(plain, tried), strict=True):
            if cost.step_s < best_s * (1 - TIE):
                schedule = plain.schedule.model_copy(update={"prefetch": depth})
                ahead = plain.model_copy(update={"schedule": schedule})
                if memory_use(ahead).fits:
                    best, best_s = ahead, cost.step_s

    consider(made)
    floors_s = problem.floors_s
    for number, c in enumerate(np.argsort(floors_s, kind="stable").tolist()):
        if floors_s[c] >= best_s * (1 - TIE):
            break
        if number == MOST_TRIED:
            bound_s = min(bound_s, float(floors_s[c]))
            break
        candidate = problem.candidates[c]
        if candidate.num_copies:
            group = layer_group(0, problem.num_layers, candidate.choices, candidate.residency)
            plan = Plan(
                cluster=problem.cluster,
                workload=problem.workload,
                layers=(group,),
                schedule=problem.schedule,
                provenance=made.provenance,
            )
            consider(plan)
    if best is made and bound_s >= solution.bound_s:
        return made
    return reported(best, solution, best_s, min(bound_s, best_s))
