"""Pipelines for bandwidths that are not known exactly: the best step at a quantile of scenarios, or in the worst of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hybridep.codecs import EXACT, Codecs
from hybridep.errors import HybridEPError, UserError
from hybridep.pipeline import AnyPlan, PipelinePlan, codecs_inside
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.choose import Report
from planner.clock import elapsed_s, now_s
from planner.goal import FASTEST
from planner.robust import OverScenarios, RobustPlan, at_their_rates, plan_for_scenarios
from planner.sites.search import at_quantile
from planner.stages.bound import least_s
from planner.stages.costs import costed, expected_over
from planner.stages.fewer import without_stages
from planner.stages.inside import Store
from planner.stages.pipelines import plan_pipeline, plan_pipelines, reported, search_on
from planner.stages.wishes import StageWishes
from planner.stages.within_loss import choices, recoded
from planner.within_loss import without_useless

_CANDIDATES = 24
"""Pipelines of one search that are costed in the scenarios, at most."""
_NOMINAL, _SLOW, _LEAST = 0.45, 0.2, 0.05
"""Shares of the time limit for pipelines at the nominal rates, and at those of each of some slow scenarios; and what must be left
for the latter."""
_SCENARIOS = 2
"""Slow ones for which pipelines are planned."""
_ROUNDS, _MET = 3, 8
"""Times that the best one is searched on from, in the scenario that counts then, and pipelines of each that are costed in all."""
_TRIES, _LOOKS = 30, 6000
"""Changes that are tried in a round, and that are looked at, times sites: the more sites, the longer each look takes."""
_LOOK, _EACH = 0.1, 0.5
"""Share of the time limit for a first look at pipelines, and one at plans without stages; and of what is left then for pipelines,
where plans without stages have the rest."""
_FAR = 1.5
"""What takes over so many times as long at the quantile after the first look has no more time."""


@dataclass(frozen=True, kw_only=True)
class RobustPipeline(OverScenarios):
    """A pipeline, and how it does."""

    plan: PipelinePlan


def pipeline_for_scenarios(
    cluster: Cluster,
    workload: Workload,
    scenarios: Sequence[Cluster],
    wishes: StageWishes | None = None,
    *,
    quantile: float = 1.0,
    time_limit_s: float = 60.0,
    report: Report | None = None,
    known: PipelinePlan | None = None,
) -> RobustPipeline:
    """The pipeline whose step at ``quantile`` of the scenarios (1: in the worst) is shortest, of those found for the given rates
    and for some scenarios, and by small changes; never worse there than the one for ``cluster`` itself. Where codecs are to be
    chosen (``StageWishes.max_loss``), those with which it is shortest at the quantile, and the bound is for all that are
    permitted. By the step's time, whatever the goal. Of the scenarios count the rates between sites; all else, and with it what
    fits, is as in ``cluster``. On KeyboardInterrupt, once there is a plan, the best so far: at worst the one that is ``known``
    from a search before. ``report`` as that of ``plan_pipelines``, told of plans for the nominal rates. Raises UserError for
    scenarios with other sites, and what ``plan_pipelines`` raises."""
    wishes = replace(wishes or StageWishes(), goal=FASTEST)
    scenarios = at_their_rates(cluster, scenarios, quantile)
    began_s, asked_s = now_s(), elapsed_s()
    until_s = began_s + time_limit_s
    limit_s = _NOMINAL * time_limit_s
    try:
        starts = [] if known is None else [known]
        made = plan_pipelines(cluster, workload, wishes, _CANDIDATES, time_limit_s=limit_s, report=report, starts=starts)
    except KeyboardInterrupt:
        if known is None:
            raise
        made, until_s = [known], -math.inf
    nominal, choice = made[0], _Choice(scenarios, quantile, until_s)
    try:
        choice.begin(nominal)
    except KeyboardInterrupt:
        # Among many sites that, and what is told at the end, takes seconds.
        choice.begin(nominal)
        choice.until_s = -math.inf
    nominal_steps_s = choice.steps_s
    with suppress(KeyboardInterrupt):
        choice.consider(made[1:])
        _search(choice, workload, wishes, time_limit_s)

    def told() -> RobustPipeline:
        outer, best = wishes.shortest(cluster, workload), nominal
        if choice.plan is not nominal:
            bound_s = least_s(cluster, workload, wishes.stages or 2, outer, alike=not wishes.popularity)
            [best] = reported([costed(choice.plan.at_rates(cluster))], wishes, bound_s, elapsed_s() - asked_s)
        bounds_s = [least_s(one, workload, wishes.stages or 2, outer, alike=not wishes.popularity) for one in scenarios]
        return RobustPipeline(
            plan=best,
            quantile=quantile,
            steps_s=choice.steps_s,
            nominal_steps_s=nominal_steps_s,
            step_s=choice.step_s,
            nominal_step_s=at_quantile(nominal_steps_s, quantile),
            bound_s=min(at_quantile(bounds_s, quantile), choice.step_s),
        )

    try:
        return told()
    except KeyboardInterrupt:
        return told()


def staged_for_scenarios(
    cluster: Cluster,
    workload: Workload,
    scenarios: Sequence[Cluster],
    wishes: StageWishes,
    *,
    quantile: float = 1.0,
    time_limit_s: float = 60.0,
    free_homes: bool = False,
    report: Report | None = None,
    tell: Callable[[str], None] | None = None,
) -> RobustPipeline | RobustPlan:
    """What ``pipeline_for_scenarios`` finds, or ``planner.plan_for_scenarios``: whichever is expected to take less at the
    quantile. After a first look at both what takes far longer has no more time. ``free_homes``: of plans without stages.
    ``tell``: why there is no pipeline, if none is possible and a plan without stages is. Raises the reason of the latter where
    neither is possible, and UserError for measured popularity."""
    if wishes.popularity:
        raise UserError("plans for scenarios know no popularity of experts; leave --routing out")
    wishes, began_s, look_s = replace(wishes, goal=FASTEST), now_s(), _LOOK * time_limit_s
    scenarios = at_their_rates(cluster, scenarios, quantile)

    def left_s(share: float) -> float:
        return max(share * (time_limit_s - (now_s() - began_s)), look_s)

    def of_step_s(plan: AnyPlan) -> float:
        return at_quantile([expected_over(plan, one) for one in scenarios], quantile)

    ours_s, other_s, why_not = math.inf, math.inf, ""
    looked: PipelinePlan | None = None
    try:
        looked = plan_pipeline(cluster, workload, wishes, time_limit_s=look_s)
        ours_s = of_step_s(looked)
    except HybridEPError as error:
        why_not = str(error)
    except KeyboardInterrupt:
        if looked is None:
            raise
        ours_s = of_step_s(looked)
    try:
        other_s = of_step_s(without_stages(cluster, workload, wishes, look_s, free_homes=free_homes))
    except HybridEPError:
        pass
    except KeyboardInterrupt:
        if why_not:
            raise
    pipeline: RobustPipeline | None = None
    if ours_s < math.inf and ours_s <= _FAR * other_s:
        limit_s = left_s(1.0 if other_s > _FAR * ours_s else _EACH)
        pipeline = pipeline_for_scenarios(
            cluster, workload, scenarios, wishes, quantile=quantile, time_limit_s=limit_s, report=report, known=looked
        )
        if other_s > _FAR * ours_s:
            return pipeline
    try:
        without = plan_for_scenarios(
            cluster,
            workload,
            scenarios,
            quantile=quantile,
            time_limit_s=left_s(1.0),
            schedule=wishes.schedule,
            constraints=wishes.constraints,
            codecs=codecs_inside(wishes.codecs),
            max_loss=wishes.max_loss,
            free_homes=free_homes,
        )
    except (HybridEPError, KeyboardInterrupt):
        if pipeline is None:
            raise
        return pipeline
    if why_not and tell is not None:
        tell(why_not)
    return without if pipeline is None or of_step_s(without.plan) < pipeline.step_s else pipeline


def _search(choice: _Choice, workload: Workload, wishes: StageWishes, time_limit_s: float) -> None:
    """Pipelines for slow scenarios, of which each has a share of the time limit, and small changes of the best."""
    tried = set[int]()
    for _ in range(min(_SCENARIOS, len(choice.scenarios))):
        # Searches take somewhat longer than their limit.
        limit_s = min(_SLOW * time_limit_s, choice.until_s - now_s() - _LEAST * time_limit_s)
        if limit_s < _LEAST * time_limit_s:
            break
        place = next(one for one in choice.from_quantile if one not in tried)
        tried.add(place)
        with suppress(HybridEPError):
            scenario, starts = choice.scenarios[place], [choice.plan]
            choice.consider(plan_pipelines(scenario, workload, wishes, _CANDIDATES, time_limit_s=limit_s, starts=starts))
    looks = max(_LOOKS // choice.scenarios[0].sizes[0], 1)
    for _ in range(_ROUNDS):
        before = choice.plan
        if now_s() > choice.until_s:
            break
        if wishes.max_loss is not None:
            choice.consider(_with_other_codecs(choice, wishes.max_loss))
        start, counts = choice.plan, choice.scenarios[choice.from_quantile[0]]
        same = wishes if wishes.max_loss is None else replace(wishes, codecs=start.codecs, max_loss=None)
        met = search_on(counts, [start], same, _MET, tries=_TRIES, looks=looks, store=choice.store)
        choice.consider(one.plan for one in met)
        if choice.plan is before:
            break
    if wishes.max_loss is not None:
        choice.consider(_with_other_codecs(choice, wishes.max_loss), in_time=False)
        choice.leave_useless_out()


def _with_other_codecs(choice: _Choice, max_loss: float) -> Iterator[PipelinePlan]:
    """The best pipeline so far with all other codecs that are permitted and have room."""
    found = costed(choice.plan, store=choice.store)
    for codecs in choices(choice.plan.cluster, choice.plan.workload, max_loss):
        other = recoded(found, codecs, choice.store)
        if other is not None and other is not found:
            yield other.plan


@dataclass
class _Choice:
    """The pipeline that is best at the quantile so far."""

    scenarios: Sequence[Cluster]
    quantile: float
    until_s: float
    """When no more are costed (``planner.clock``)."""
    store: Store = field(default_factory=Store)
    plan: PipelinePlan = field(init=False)
    steps_s: tuple[float, ...] = field(init=False)
    """Of ``plan`` in each scenario."""

    @property
    def step_s(self) -> float:
        """Of ``plan`` at the quantile."""
        return at_quantile(self.steps_s, self.quantile)

    @property
    def from_quantile(self) -> list[int]:
        """Scenarios, those first in which the plan takes as long as at the quantile or less, the slowest of them first."""
        order = sorted(range(len(self.scenarios)), key=lambda place: (-self.steps_s[place], place))
        return sorted(order, key=lambda place: self.steps_s[place] > self.step_s)

    def begin(self, plan: PipelinePlan) -> None:
        """With this one."""
        self.plan, self.steps_s = plan, tuple(expected_over(plan, one, self.store) for one in self.scenarios)

    def consider(self, plans: Iterable[PipelinePlan], *, in_time: bool = True) -> None:
        """Take those that are better than the best before, while there is time, or all of them."""
        for plan in plans:
            if in_time and now_s() > self.until_s:
                return
            if (steps_s := self._steps_if_better(plan)) is not None:
                self.plan, self.steps_s = plan, steps_s

    def leave_useless_out(self) -> None:
        """Without codecs between sites that bring the best one nothing at the quantile."""
        found, name = costed(self.plan, store=self.store), self.plan.cluster.levels[0].name
        made = dict[str, tuple[PipelinePlan, tuple[float, ...]]]()

        def step_s(codecs: Codecs) -> float:
            other = recoded(found, codecs, self.store)
            if other is None:
                return math.inf
            steps_s = tuple(expected_over(other.plan, one, self.store) for one in self.scenarios)
            made[str(codecs.coded)] = other.plan, steps_s
            return at_quantile(steps_s, self.quantile)

        codecs = without_useless(self.plan.codecs.get(name, EXACT), step_s)
        self.plan, self.steps_s = made[str(codecs.coded)]

    def _steps_if_better(self, plan: PipelinePlan) -> tuple[float, ...] | None:
        """Seconds in each scenario; None, and no more are costed, once so many are no shorter that it is not better."""
        left = len(self.scenarios) - math.ceil(self.quantile * len(self.scenarios) - 1e-9)
        found = dict[int, float]()
        for place in sorted(range(len(self.scenarios)), key=lambda place: -self.steps_s[place]):
            found[place] = expected_over(plan, self.scenarios[place], self.store)
            left -= found[place] >= self.step_s
            if left < 0:
                return None
        return tuple(found[place] for place in range(len(self.scenarios)))
