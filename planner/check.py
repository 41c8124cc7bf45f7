"""Is a plan what it claims to be? Recomputed without any solver, for plans of any origin."""

from __future__ import annotations

from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import Objective, Plan, Prediction, SolverReport, Status
from hybridep.units import format_bytes, format_dollars, format_seconds
from planner.constraints import Constraints, keeps, permissions
from planner.evaluate import MOST_RANKS, evaluate
from planner.goal import Goal
from planner.memory import memory_knob
from planner.plans import BASELINES, goal_of, predict, rank_order_plans
from planner.problem import TIE, build_problem
from planner.solve import PROVEN_GAP, gap

RELATIVE = 1e-9
"""Numbers that differ by less are equal: files keep them exactly, sums may be taken in another order."""


class CheckError(UserError):
    """A plan breaks a rule or claims a number that is not so; ``what`` is the field."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what, self.problem = what, problem

    def __str__(self) -> str:
        return f"plan.{self.what}: {self.problem}"


def check(plan: Plan, constraints: Constraints | None = None) -> None:
    """Raises CheckError (or ConfigError, where a field is not valid at all) naming what is wrong; returns when nothing is.

    Checked: fields, domains and layers; memory of every rank; the prediction and the baselines; the solver's objective,
    bound, gap and status, where the bound must not exceed what some configuration used for all layers reaches. ``constraints``:
    rules that the plan was made with, which it must keep; no configuration is known that does, too, and so none is held against
    its bound.
    """
    # Read anew, as from a file: copies of a plan with changed fields are not validated.
    plan = build(Plan, plan.model_dump(mode="json"), "plan")
    _, memory = evaluate(plan)
    if not memory.fits:
        missing = memory.fullest_bytes - memory.capacity_bytes
        raise CheckError(
            "layers",
            f"{memory.fullest_name} needs {format_bytes(memory.fullest_bytes)} and has "
            f"{format_bytes(memory.capacity_bytes)}: {format_bytes(missing)} are missing; raise "
            f"{memory_knob(plan.cluster, memory.fullest_rank)} or plan again",
        )
    if not keeps(plan, constraints):
        raise CheckError("layers", "some expert is computed or held where a rule forbids it; plan again with the rules")
    rules = () if constraints is None else constraints.rules
    has_rules = not permissions(plan.cluster, plan.workload.model.num_experts, rules).forbid_nothing
    if plan.prediction is None:
        raise CheckError("prediction", "is missing; a planner's plan has one")
    _check_prediction(
        plan.prediction, predict(plan, tuple(name for name in BASELINES if name.value in plan.prediction.baselines))
    )
    if plan.solver is not None:
        _check_solver(plan, plan.solver, plan.prediction, has_rules=has_rules)


def _check_prediction(claimed: Prediction, actual: Prediction) -> None:
    flat_claimed, flat_actual = _numbers(claimed), _numbers(actual)
    for name in {**flat_actual, **flat_claimed}:
        if name not in flat_actual or name not in flat_claimed:
            raise CheckError(
                f"prediction.{name}", "is missing" if name in flat_actual else "is nothing that the cost model knows"
            )
        if not _equal(flat_claimed[name], flat_actual[name]):
            raise CheckError(f"prediction.{name}", f"claims {flat_claimed[name]:.9g}, recomputed {flat_actual[name]:.9g}")


def _check_solver(plan: Plan, report: SolverReport, prediction: Prediction, *, has_rules: bool) -> None:
    if report.status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise CheckError("solver.status", f"is {report.status.value}, yet there is a plan")
    if not _equal(report.objective, prediction.step):
        raise CheckError(
            "solver.objective", f"claims {format_seconds(report.objective)}, the plan takes {format_seconds(prediction.step)}"
        )
    if report.bound > report.objective * (1 + RELATIVE):
        raise CheckError("solver.bound", f"{report.bound:.9g} s exceeds the objective {report.objective:.9g} s")
    found_gap = gap(report.objective, report.bound)
    if report.minimised is Objective.DOLLARS:
        found_gap = _cost_gap(report, prediction)
    if abs(report.gap - found_gap) > RELATIVE:
        raise CheckError("solver.gap", f"claims {report.gap:.3g}, bound and objective give {found_gap:.3g}")
    if report.budget is not None and goal_of(report).overdraft(prediction.cost_usd) > 0:
        raise CheckError(
            "solver.budget", f"is {format_dollars(report.budget)}, the step costs {format_dollars(prediction.cost_usd)}"
        )
    if report.status is Status.OPTIMAL and report.gap > PROVEN_GAP:
        raise CheckError("solver.status", f"claims optimal with a gap of {report.gap:.3g}")
    if plan.popularity or has_rules:
        return  # no configuration below is costed for layers that differ, nor keeps rules
    goal = goal_of(report)
    name, value = _best_known(plan, goal)
    bound = goal.value(report.bound, report.cost_bound or 0.0)
    if value * (1 + PROVEN_GAP + TIE) < bound:
        if goal.objective is Objective.DOLLARS:
            raise CheckError(
                "solver.cost_bound",
                f"claims that no plan costs less than {bound:.9g} $, yet {name} in all layers costs {value:.9g} $",
            )
        raise CheckError(
            "solver.bound", f"claims that no plan is faster than {bound:.9g} s, yet {name} in all layers takes {value:.9g} s"
        )


def _cost_gap(report: SolverReport, prediction: Prediction) -> float:
    if report.cost_bound is None or prediction.cost is None:
        raise CheckError("solver.cost_bound", "is missing, or the cluster has no prices, yet dollars were minimised")
    if report.cost_bound > prediction.cost * (1 + RELATIVE):
        raise CheckError("solver.cost_bound", f"{report.cost_bound:.9g} $ exceeds the cost {prediction.cost:.9g} $")
    return gap(prediction.cost, report.cost_bound)


def _best_known(plan: Plan, goal: Goal) -> tuple[str, float]:
    """A plan that fits, is within the budget and needs no search, and its seconds or dollars; infinite when there is none."""
    if plan.cluster.num_gpus <= MOST_RANKS:
        problem = build_problem(plan.cluster, plan.workload, plan.schedule, codecs=plan.codecs, goal=goal)
        best = problem.best_uniform()
        return ("", float("inf")) if best is None else (problem.candidates[best].label, problem.value(problem.uniform(best)))
    found = [(name, *evaluate(other)) for name, other in rank_order_plans(plan)]
    fitting = [
        (name, goal.value(cost.step_s, cost.step_usd))
        for name, cost, memory in found
        if memory.fits and not goal.overdraft(cost.step_usd)
    ]
    return min(fitting, key=lambda one: one[1], default=("", float("inf")))


def _numbers(prediction: Prediction) -> dict[str, float]:
    """Every number of a prediction by dotted name."""
    return {
        "step": prediction.step,
        "bound": prediction.bound,
        "wan_bytes": prediction.wan_bytes,
        "memory_bytes": prediction.memory_bytes,
        **{f"parts.{name}": value for name, value in prediction.parts.items()},
        **{f"baselines.{name}": value for name, value in prediction.baselines.items()},
        **({} if prediction.expected is None else {"expected": prediction.expected}),
        **({} if prediction.cost is None else {"cost": prediction.cost}),
    }


def _equal(a: float, b: float) -> bool:
    return abs(a - b) <= RELATIVE * max(abs(a), abs(b))
