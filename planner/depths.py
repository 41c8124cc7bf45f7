"""Which prefetch depth a plan gets: how many blocks ahead copies set out (``plan.Schedule.prefetch``).

The search for a placement needs times that add up over layers, so it runs without prefetch. Then the step with copies ahead is
computed for the plan found, and for one configuration in all layers wherever that could still be faster: never below its
computation and tokens, nor below its busiest link. Between sites that differ it is computed for the best plans found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridep.plan import Plan, Schedule
from hybridep.topology import Cluster
from hybridep.traffic import DENSE
from hybridep.workload import Workload
from planner.compute import compute_of_ranks
from planner.cost import StepCost, step_costs
from planner.layer_times import HEAD, OPTIMIZER
from planner.memory import memory_use
from planner.plans import best_solution, plan_of, predict, reported, reported_again
from planner.problem import TIE, Problem, build_problems
from planner.solve import Solution

MOST_TRIED = 32
"""Configurations for all layers; those that are left lower the bound."""

BETWEEN_SITES = 48
"""Plans between sites that differ, of which copies ahead (or tokens in parts) are costed: they suit some far better than others
that cost the same."""


def depths(num_layers: int) -> tuple[int, ...]:
    """1, 2, 4 and so on; at last all layers at once."""
    powers = [2**power for power in range(num_layers.bit_length()) if 2**power < num_layers]
    return tuple(sorted({1, *powers, max(num_layers - 1, 1)}))


def plan_ahead(
    cluster: Cluster,
    workload: Workload,
    *,
    solver: str,
    time_limit_s: float,
    schedule: Schedule | None,
) -> Plan:
    """The fastest plan of equal domains per level that fits, with or without prefetch; errors as ``planner.plan``."""
    problems = build_problems(cluster, workload, schedule or Schedule())
    problem, solution = best_solution(problems, solver=solver, time_limit_s=time_limit_s)
    return send_ahead(problems, solution, plan_of(problem, solution))


def send_ahead(problems: Sequence[Problem], solution: Solution, made: Plan) -> Plan:
    """The faster of ``made``, which is the best without prefetch, and plans with it; its bound holds for the search's mixtures of
    configurations without prefetch, and for every configuration in all layers with any of ``depths``."""
    best, best_s, bound_s = made, made.predicted.step, solution.bound_s
    num_layers = made.workload.model.num_moe_layers

    def consider(plain: Plan) -> None:
        nonlocal best, best_s
        tried = depths(num_layers)
        for depth, cost in zip(tried, step_costs(plain, tried), strict=True):
            if cost.step_s < best_s * (1 - TIE):
                ahead = plain.with_schedule(prefetch=depth)
                if memory_use(ahead).fits:
                    best, best_s = ahead, cost.step_s

    consider(made)
    floors_s = np.concatenate([problem.floors_s for problem in problems])
    candidates = [candidate for problem in problems for candidate in problem.candidates]
    for number, c in enumerate(np.argsort(floors_s, kind="stable").tolist()):
        if floors_s[c] >= best_s * (1 - TIE):
            break
        if number == MOST_TRIED:
            bound_s = min(bound_s, float(floors_s[c]))
            break
        candidate = candidates[c]
        if candidate.num_copies:
            consider(made.with_layers(candidate.group(0, num_layers)))
    if best is made and bound_s >= solution.bound_s:
        return made
    return reported(best, solution, best_s, min(bound_s, best_s))


def tables_ahead(found: Sequence[Plan], count: int) -> list[Plan]:
    """Of plans between sites, the first with a solver's report, each with the depth (or none) that makes its step the shortest
    and fits; at most ``count``, the fastest first, with a bound for all tables used in all layers and all depths."""
    tried = (0, *depths(found[0].workload.model.num_moe_layers))
    best: list[tuple[float, Plan]] = []
    for plain in found:
        costs = step_costs(plain, tried)
        order = sorted(range(len(tried)), key=lambda number: (costs[number].step_s * (1 + TIE * number), number))
        ahead = (plain.with_schedule(prefetch=tried[number]) for number in order)
        # Without copies ahead it fits.
        number, one = next((number, one) for number, one in zip(order, ahead, strict=True) if not number or memory_use(one).fits)
        best.append((costs[number].step_s, one))
    best.sort(key=lambda one: one[0])
    made = [one.model_copy(update={"prediction": predict(one), "solver": None}) for _, one in best[:count]]
    report = found[0].solver
    if report is None:
        return made
    step_s = best[0][0]
    bound_s = min(_any_depth_s(found[0], step_costs(found[0], (0,))[0], report.bound), step_s)
    return [reported_again(made[0], [report], bound_s=bound_s), *made[1:]]


def _any_depth_s(plan: Plan, cost: StepCost, bound_s: float) -> float:
    """Where no plan of some kind has a shorter step than ``bound_s`` without copies ahead, none has a shorter one than this with
    them: their layers take at least what the chain of computation and tokens takes, and with the heads' computation what copies
    take one after the other, so half of both together. ``cost`` is that of any such plan, without copies ahead."""
    fixed_s = sum(cost.parts_s.get(name, 0.0) for name in (HEAD, OPTIMIZER, *(op.value for op in DENSE)))
    compute = compute_of_ranks(plan.cluster, plan.workload)
    number = plan.workload.training.micro_batches
    again_s = number * float(compute.head_again_s(plan.dense_recompute).max())
    fixed_s, heads_s = fixed_s - again_s, 3 * number * float(compute.head_s.max()) + again_s
    return fixed_s + max(bound_s - fixed_s - heads_s, 0.0) / 2
