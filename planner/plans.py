"""Plans from solutions, baselines and predictions: the planner's outer face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridep.baselines import Baseline, baseline_like, baseline_plan
from hybridep.codecs import Codecs
from hybridep.errors import HybridEPError, InfeasibleError, NoSolutionError
from hybridep.placement import LevelChoice, divisors
from hybridep.plan import LayerGroup, Objective, Plan, Prediction, Residency, Schedule, SolverReport, Status
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.units import Dimension, exact
from hybridep.workload import Workload
from planner.domains import layer_group
from planner.evaluate import evaluate, expected_s
from planner.goal import FASTEST, Goal
from planner.problem import Problem, build_problems
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
    goal: Goal = FASTEST,
) -> Plan:
    """The fastest (or cheapest) plan of equal domains per level that fits, with its prediction and how it was found.

    Raises InfeasibleError (says how much memory is missing where, or what the cheapest plan costs), NoSolutionError (time limit),
    UserError (unknown solver).
    """
    problems = build_problems(cluster, workload, schedule or Schedule(), codecs=codecs, goal=goal)
    return plan_of(*best_solution(problems, solver=solver, time_limit_s=time_limit_s))


def best_solution(problems: Sequence[Problem], *, solver: str, time_limit_s: float) -> tuple[Problem, Solution]:
    """The best of `build_problems`, with a bound that holds for all of them; errors as `plan_domains`."""
    found, errors = list[tuple[Problem, Solution]](), list[HybridEPError]()
    for problem in problems:
        try:
            found.append((problem, solve(problem, solver=solver, time_limit_s=time_limit_s / len(problems))))
        except (InfeasibleError, NoSolutionError) as error:
            errors.append(error)
    if not found:
        raise errors[-1]  # of what needs least memory
    problem, best = min(found, key=lambda one: one[0].value(one[1].counts))
    solutions = [solution for _, solution in found]
    lost = any(isinstance(error, NoSolutionError) for error in errors)
    best = replace(
        best,
        status=best.status if all(one.status is Status.OPTIMAL for one in solutions) and not lost else Status.FEASIBLE,
        bound_s=0.0 if lost else min(best.objective_s, *(one.bound_s for one in solutions)),
        bound_usd=0.0 if lost else min(one.bound_usd for one in solutions),
        solve_s=sum(one.solve_s for one in solutions),
    )
    return problem, best


def baseline(cluster: Cluster, workload: Workload, name: str) -> Plan:
    """The ``hybridep.baselines.Baseline`` of that name with its prediction, whether or not it fits the memory."""
    made = baseline_plan(cluster, workload, Baseline(name))
    return made.model_copy(update={"prediction": predict(made), "provenance": provenance() | made.provenance})


def plan_of(problem: Problem, solution: Solution) -> Plan:
    """Layers in the order of the candidates in use."""
    groups: list[LayerGroup] = []
    first = 0
    for candidate, count in zip(problem.candidates, solution.counts, strict=True):
        if count:
            groups.append(candidate.group(first, count))
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
    report = solver_report(
        solver=solution.solver,
        goal=solution.goal,
        objective_s=objective_s,
        bound_s=bound_s,
        cost_usd=solution.price_usd,
        bound_usd=solution.bound_usd,
        solve_s=solution.solve_s,
        proven=solution.status is Status.OPTIMAL,
    )
    return made.model_copy(update={"prediction": predict(made), "solver": report})


def solver_report(
    *,
    solver: str,
    goal: Goal,
    objective_s: float,
    bound_s: float,
    cost_usd: float,
    bound_usd: float,
    solve_s: float,
    proven: bool = True,
) -> SolverReport:
    """How a plan was found; optimal where ``proven`` and the gap of what was minimised is closed."""
    in_dollars = goal.objective is Objective.DOLLARS
    found_gap = gap(cost_usd, bound_usd) if in_dollars else gap(objective_s, bound_s)
    return SolverReport(
        status=Status.OPTIMAL if proven and found_gap <= PROVEN_GAP else Status.FEASIBLE,
        solver=solver,
        objective=seconds(objective_s),
        bound=seconds(bound_s),
        minimised=goal.objective,
        budget=None if goal.budget_usd is None else dollars(goal.budget_usd),
        cost_bound=dollars(bound_usd) if in_dollars else None,
        gap=found_gap,
        solve=seconds(solve_s),
    )


def goal_of(report: SolverReport | None) -> Goal:
    """What a plan's search made small; the step where there was none."""
    return FASTEST if report is None else Goal(objective=report.minimised, budget_usd=report.budget)


def reported_again(
    plan: Plan,
    reports: Sequence[SolverReport],
    *,
    bound_s: float | None = None,
    bound_usd: float | None = None,
    proven: bool = True,
) -> Plan:
    """A plan that several searches, or something after them, chose: with their least bound, or these, and the time of all."""
    step_s, cost_usd = plan.predicted.step, plan.predicted.cost_usd
    report = solver_report(
        solver=reports[0].solver,
        goal=goal_of(reports[0]),
        objective_s=step_s,
        bound_s=min(step_s, *(one.bound for one in reports)) if bound_s is None else bound_s,
        cost_usd=cost_usd,
        bound_usd=min(cost_usd, *(one.cost_bound or 0.0 for one in reports)) if bound_usd is None else bound_usd,
        solve_s=sum(one.solve for one in reports),
        proven=proven,
    )
    return plan.model_copy(update={"solver": report})


def top_domains(best: Plan, count: int) -> list[Plan]:
    """The next best plans that use one configuration in all layers and fit, with predictions; ``best`` left out."""
    if count < 1:
        return []
    goal = goal_of(best.solver)
    fitting = [
        (problem.value(counts), problem.candidates[c].group(0, problem.num_layers))
        for problem in build_problems(best.cluster, best.workload, best.schedule, codecs=best.codecs, goal=goal)
        for c, counts in enumerate(map(problem.uniform, range(len(problem.candidates))))
        if problem.fits(counts) and problem.affords(counts)
    ]
    found: list[Plan] = []
    for _, group in sorted(fitting, key=lambda one: one[0]):
        other = best.with_layers(group)
        if len(found) < count and other.digest != best.digest:
            found.append(other.model_copy(update={"prediction": predict(other)}))
    return found


def rank_order_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The same problem with domains of every size among the sites in their order, all ranks of a site copying alike."""
    outer, *inner = plan.cluster.levels
    for size in divisors(outer.size):
        choices = {outer.name: LevelChoice(domain_size=size)}
        choices |= {level.name: LevelChoice(domain_size=level.size) for level in inner}
        group = layer_group(0, plan.workload.model.num_moe_layers, choices, Residency.STEP)
        yield f"{outer.name} {size} in rank order", plan.with_layers(group)


def predict(made: Plan, baselines: Sequence[Baseline] = BASELINES) -> Prediction:
    """What the cost and memory models expect of a plan and of the baselines with the same schedule and codecs."""
    cost, memory = evaluate(made)
    others = {name.value: seconds(evaluate(baseline_like(made, name))[0].step_s) for name in baselines}
    return Prediction(
        step=seconds(cost.step_s),
        bound=seconds(cost.bound_s),
        expected=seconds(expected_s(made, cost)),
        parts={name: seconds(value) for name, value in cost.parts_s.items()},
        wan_bytes=cost.wan_bytes,
        memory_bytes=memory.fullest_bytes,
        baselines=others,
        cost=dollars(cost.step_usd) if made.cluster.has_prices else None,
    )


def seconds(value_s: float) -> Any:
    """As plan files write it; configuration models take quantities only with their unit."""
    return exact(value_s, Dimension.TIME)


def dollars(value_usd: float) -> Any:
    """Likewise."""
    return exact(value_usd, Dimension.PRICE)
