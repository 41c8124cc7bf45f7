"""A plan beside what other planners would do with the same cluster and workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridep.baselines import Baseline, baseline_like
from hybridep.errors import UserError
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.plan import Plan
from hybridep.recompute import Recompute, cheapest_first
from planner.constraints import Constraints
from planner.evaluate import evaluate
from planner.sites.others import OTHERS, other_plan
from planner.sites.plans import table_plan
from planner.sites.problem import SiteProblem, site_problem


@dataclass(frozen=True, kw_only=True)
class OtherPlan:
    """What one other planner reaches."""

    step_s: float
    gain: float
    """Its step over the plan's; above 1 the plan is faster."""
    memory_bytes: float
    """Of the fullest rank."""
    fits: bool


def compare_planners(plan: AnyPlan, constraints: Constraints | None = None) -> dict[str, OtherPlan]:
    """By planner, in a fixed order, with the plan's schedule; with rules, their tables are made to keep them. All place experts
    as if they were equally popular, and are costed with the popularity that the plan has. None has stages; beside a pipeline
    their layers compute no more again than it takes to fit, else as the plan's do. Raises UserError for one site."""
    if plan.cluster.sizes[0] < 2:
        raise UserError(f"cluster {plan.cluster.name}: comparing planners between sites needs two sites")
    if isinstance(plan, PipelinePlan):
        like, again = baseline_like(plan, Baseline.EP), (Recompute.NOTHING, *cheapest_first(plan.workload))
        step_s = plan.predicted.step
    else:
        like, again = plan, (plan.recomputes,)
        step_s = plan.prediction.step if plan.prediction is not None else evaluate(plan)[0].step_s
    problems = [
        site_problem(like.cluster, like.workload, like.schedule, constraints, codecs=like.codecs, recompute=one) for one in again
    ]
    return {name: _first_that_fits(name, problems, like, step_s) for name in OTHERS}


def _first_that_fits(name: str, problems: Sequence[SiteProblem], like: Plan, step_s: float) -> OtherPlan:
    """What this planner reaches in the first of the problems in which its plan fits, or in the last one."""
    for problem in problems:
        found = other_plan(problem, name)
        assert found.cost is not None and found.configuration is not None
        other_s, memory_bytes, fits = found.cost.step_s, found.cost.memory_bytes, found.rank[0] == 0
        if like.schedule.prefetch or like.popularity:
            other = table_plan(problem, found.table, found.configuration)
            cost, memory = evaluate(other.model_copy(update={"popularity": like.popularity}))
            other_s, memory_bytes, fits = cost.step_s, memory.fullest_bytes, memory.fits
        if fits:
            break
    return OtherPlan(step_s=other_s, gain=other_s / step_s, memory_bytes=memory_bytes, fits=fits)
