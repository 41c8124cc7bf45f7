"""A plan beside what other planners would do with the same cluster and workload."""

from __future__ import annotations

from dataclasses import dataclass

from hybridep.errors import UserError
from hybridep.plan import Plan
from planner.constraints import Constraints
from planner.evaluate import evaluate
from planner.sites.others import OTHERS, other_plan
from planner.sites.plans import table_plan
from planner.sites.problem import site_problem


@dataclass(frozen=True, kw_only=True)
class OtherPlan:
    """What one other planner reaches."""

    step_s: float
    gain: float
    """Its step over the plan's; above 1 the plan is faster."""
    memory_bytes: float
    """Of the fullest rank."""
    fits: bool


def compare_planners(plan: Plan, constraints: Constraints | None = None) -> dict[str, OtherPlan]:
    """By planner, in a fixed order, with the plan's schedule; with rules, their tables are made to keep them. All place experts
    as if they were equally popular, and are costed with the popularity that the plan has. Raises UserError for one site."""
    if plan.cluster.sizes[0] < 2:
        raise UserError(f"cluster {plan.cluster.name}: comparing planners between sites needs two sites")
    again = plan.recomputes
    problem = site_problem(plan.cluster, plan.workload, plan.schedule, constraints, codecs=plan.codecs, recompute=again)
    step_s = plan.prediction.step if plan.prediction is not None else evaluate(plan)[0].step_s
    others = {}
    for name in OTHERS:
        found = other_plan(problem, name)
        assert found.cost is not None and found.configuration is not None
        other_s, memory_bytes, fits = found.cost.step_s, found.cost.memory_bytes, found.rank[0] == 0
        if plan.schedule.prefetch or plan.popularity:
            other = table_plan(problem, found.table, found.configuration)
            cost, memory = evaluate(other.model_copy(update={"popularity": plan.popularity}))
            other_s, memory_bytes, fits = cost.step_s, memory.fullest_bytes, memory.fits
        others[name] = OtherPlan(step_s=other_s, gain=other_s / step_s, memory_bytes=memory_bytes, fits=fits)
    return others
