"""The planner chooses codecs: those whose measured loss is permitted, on the links between sites."""

from __future__ import annotations

from collections.abc import Callable

from hybridep.codec_losses import permitted
from hybridep.codecs import Codecs
from hybridep.errors import InfeasibleError, UserError
from hybridep.plan import Plan
from planner.goal import Goal
from planner.plans import goal_of, solver_report

Make = Callable[[dict[str, Codecs], float], Plan]
"""(codecs by level name, time limit) -> the best plan with these."""


def plan_within_loss(make: Make, outermost: str, max_loss: float, time_limit_s: float) -> Plan:
    """The best of the plans that ``make`` finds with codecs of level ``outermost`` whose measured losses add up to at most
    ``max_loss`` (0.005 for half a percent); exact ones are always among them. Its bound holds for all of them. Raises what
    ``make`` raises."""
    if max_loss < 0:
        raise UserError(f"a permitted loss must be at least zero (found {max_loss:g})")
    choices = permitted(max_loss)
    made: list[Plan] = []
    missing: InfeasibleError | None = None
    for codecs in choices:
        try:
            made.append(make({outermost: codecs} if codecs.lossy else {}, time_limit_s / len(choices)))
        except InfeasibleError as error:  # what a codec keeps may not fit
            missing = missing or error
    if not made:
        assert missing is not None
        raise missing
    goal = _goal(made[0])
    best = min(made, key=lambda plan: _value(plan, goal))
    assert best.solver is not None and best.prediction is not None
    reports = [plan.solver for plan in made if plan.solver is not None]
    report = solver_report(
        solver=best.solver.solver,
        goal=goal,
        objective_s=best.prediction.step,
        bound_s=min(one.bound for one in reports),
        cost_usd=best.prediction.cost or 0.0,
        bound_usd=min(one.cost_bound or 0.0 for one in reports),
        solve_s=sum(one.solve for one in reports),
    )
    return best.model_copy(update={"solver": report})


def _goal(plan: Plan) -> Goal:
    assert plan.solver is not None
    return goal_of(plan.solver)


def _value(plan: Plan, goal: Goal) -> float:
    assert plan.prediction is not None
    return goal.value(plan.prediction.step, plan.prediction.cost or 0.0)
