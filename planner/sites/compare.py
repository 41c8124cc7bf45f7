"""A plan beside what other planners would do with the same cluster and workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from hybridep.baselines import Baseline, baseline_like
from hybridep.errors import InfeasibleError, UserError
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.plan import Plan
from hybridep.recompute import cheapest_first
from planner.constraints import Constraints
from planner.evaluate import evaluate
from planner.sites.evaluate import home_of
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
    as if they were equally popular, and are costed with the popularity that the plan has. None has stages. Where memory is short
    their layers compute again what suits them best. Raises UserError for one site."""
    if plan.cluster.sizes[0] < 2:
        raise UserError(f"cluster {plan.cluster.name}: comparing planners between sites needs two sites")
    if isinstance(plan, PipelinePlan):
        like, is_short = baseline_like(plan, Baseline.EP), any(stage.recomputes for stage in plan.plans)
        step_s = plan.predicted.step
    else:
        like, is_short = plan, bool(plan.recomputes)
        step_s = plan.prediction.step if plan.prediction is not None else evaluate(plan)[0].step_s
    make = partial(site_problem, like.cluster, like.workload, like.schedule, constraints, codecs=like.codecs)
    try:
        problem = make()
    except InfeasibleError:
        # Where the rules only leave such homes as the plan's.
        problem = make(home=home_of(like))
    others = {}
    for name in OTHERS:
        found = _found(problem, name, like)
        if is_short or not found.fits:
            again = (_found(replace(problem, recompute=one), name, like) for one in cheapest_first(like.workload))
            found = min((found, *again), key=lambda one: one.rank)
        gain = found.step_s / step_s
        others[name] = OtherPlan(step_s=found.step_s, gain=gain, memory_bytes=found.memory_bytes, fits=found.fits)
    return others


class _Other(NamedTuple):
    """One planner's plan, where all layers compute the same again."""

    step_s: float
    memory_bytes: float
    capacity_bytes: float
    fits: bool

    @property
    def rank(self) -> tuple[float, float]:
        """The smaller the better: bytes that are missing, then the step."""
        return 0.0 if self.fits else self.memory_bytes - self.capacity_bytes, self.step_s


def _found(problem: SiteProblem, name: str, like: Plan) -> _Other:
    found = other_plan(problem, name)
    assert found.cost is not None and found.configuration is not None
    if like.schedule.prefetch or like.popularity:
        other = table_plan(problem, found.table, found.configuration)
        cost, memory = evaluate(other.model_copy(update={"popularity": like.popularity}))
        return _Other(cost.step_s, memory.fullest_bytes, memory.capacity_bytes, memory.fits)
    return _Other(found.cost.step_s, found.cost.memory_bytes, found.cost.capacity_bytes, found.rank[0] == 0)
