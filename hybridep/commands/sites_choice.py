"""In stages or without, for all sites or for those that pay: what ``hybridep plan --stages`` plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hybridep.commands.plan_choice import MOST_SITES, planned
from hybridep.commands.stage_choice import StageChoice, in_stages, simulated_s, simulating_s
from hybridep.errors import HybridEPError, UserError
from hybridep.pipeline import PipelinePlan
from planner.clock import now_s

if TYPE_CHECKING:
    from hybridep.pipeline import AnyPlan
    from hybridep.plan import Plan
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from planner import StageWishes
    from planner.goal import Worth

_CHOOSING = 1 / 3
"""Share of the time limit in which it is found which sites pay."""
_LOOK = 0.1
"""Share of the time limit for a first look at pipelines, and one at plans without stages."""
_UNSURE = 0.05
"""By how much a pipeline that was not simulated must be expected to be better than one that was."""
_NEAR = 1.5
"""After the first look what takes over so many times as long as the other has no more time."""
_EACH = 0.5
"""Share of the time left that pipelines have where plans without stages have the rest."""
_LEFT = 0.2
"""Share of the time limit that must be left for another look at other sites, once it is planned for some."""

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plan is made for."""

    cluster: Cluster
    workload: Workload
    wishes: StageWishes

    @property
    def sites(self) -> tuple[str, ...]:
        """Names, in the cluster's order."""
        return self.cluster.site_names

    def among(self, sites: tuple[str, ...]) -> Asked:
        """What is asked of the plan for some of the sites alone; itself for all of them."""
        from planner.stages.fewer import among

        if sites == self.sites:
            return self
        cluster, workload, wishes = among(self.cluster, self.workload, self.wishes, sites)
        return Asked(cluster=cluster, workload=workload, wishes=wishes)

    def worth(self, plan: AnyPlan) -> Worth:
        """What a plan is worth, as expected."""
        return self.wishes.goal.worth(plan.predicted.expected_s, plan.predicted.cost_usd)

    def worth_in_stages(self, choice: StageChoice) -> Worth:
        """What a pipeline is worth, simulated where it was, else as expected."""
        from planner.stages.costs import simulated_usd

        goal = self.wishes.goal
        usd = simulated_usd(choice.plan, choice.step_s) if goal.needs_prices else 0.0
        return goal.worth(choice.step_s, usd)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What was planned."""

    asked: Asked
    """What it was planned for: the cluster of its own sites."""
    choice: StageChoice | None
    without: Plan | None
    """The plan without stages; there is one, or ``choice``, or both."""
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> AnyPlan:
        """The pipeline, or the plan without stages where that is as good."""
        if self.choice is None:
            assert self.without is not None
            return self.without
        without = self.without
        if without is not None and self.asked.worth(without) <= self.asked.worth_in_stages(self.choice):
            return without
        return self.choice.plan

    @property
    def worth(self) -> Worth:
        """What the best plan is worth: simulated where it was, else as expected."""
        best = self.best
        if isinstance(best, PipelinePlan):
            assert self.choice is not None
            return self.asked.worth_in_stages(self.choice)
        return self.asked.worth(best)

    @property
    def step_s(self) -> float:
        """Seconds of the best plan's step, simulated where it was, else as expected."""
        best = self.best
        return self.choice.step_s if self.choice is not None and best is self.choice.plan else best.predicted.expected_s


def plan_sites(
    asked: Asked,
    *,
    or_without: bool = True,
    fewer: bool = False,
    time_limit_s: float = 60.0,
    tell: Tell | None = None,
    shown: bool = False,
) -> Staged:
    """The best that was found in stages, or without where they may be left out. ``fewer``: for the sites that pay only. ``tell``:
    what is decided on the way, in words. ``shown``: with searches' progress on stderr. Of interrupted searches the best so far.
    Raises what the planner raises, where nothing is possible."""
    return _Choice(asked, or_without, tell or (lambda text: None), shown, time_limit_s).run(fewer and len(asked.sites) > 1)


@dataclass
class _Choice:
    every: Asked
    or_without: bool
    tell: Tell
    shown: bool
    time_limit_s: float
    _began_s: float = field(default_factory=now_s)

    def run(self, fewer: bool) -> Staged:
        sites, found = self._paying() if fewer else (self.every.sites, None)
        left_s = max(self._left_s(), (1 - _CHOOSING) * self.time_limit_s) if fewer else self.time_limit_s
        try:
            made = self._planned(sites, left_s)
        except KeyboardInterrupt:
            if found is None:
                raise
            return self._of_plan(found)
        if not fewer or self.every.wishes.goal.needs_prices:
            return made
        # Which sites pay was found in short searches, and the more sites, the less those find.
        other = self._again(made, self.every.sites) if made.left_out else self._for_fewer(made, found)
        if other is None:
            return made
        self.tell(f"after all, {self._for(other)}")
        return other

    def _paying(self) -> tuple[tuple[str, ...], AnyPlan | None]:
        """The sites that pay, and the best plan for fewer than all that was found on the way."""
        from hybridep.commands.plan_progress import PlanProgress
        from planner import sites_that_pay

        every, limit_s = self.every, _CHOOSING * self.time_limit_s
        try:
            with PlanProgress() if self.shown else nullcontext() as progress:
                paying = sites_that_pay(every.cluster, every.workload, every.wishes, time_limit_s=limit_s, report=progress)
        except HybridEPError as error:
            if not self.or_without:
                raise
            self.tell(f"for all sites, since no others were found: {error}")
            return every.sites, None
        return paying.sites, paying.fewer

    def _planned(self, sites: tuple[str, ...], limit_s: float) -> Staged:
        made = self._of(sites)
        if made.left_out:
            self.tell(self._for(made))
        choice, without = _with_and_without(made.asked, limit_s, self.tell, self.or_without, self.shown)
        return replace(made, choice=choice, without=without)

    def _again(self, made: Staged, sites: tuple[str, ...]) -> Staged | None:
        """In stages on other sites, where what is left of the time limit is enough to find that those take less; None where they
        do not, or after a KeyboardInterrupt."""
        asked, left_s = self.every.among(sites), self._left_s()
        if left_s < _LEFT * self.time_limit_s:
            return None
        try:
            choice = in_stages(asked.cluster, asked.workload, asked.wishes, time_limit_s=left_s, shown=self.shown)
        except (HybridEPError, KeyboardInterrupt):
            return None
        return self._of(sites, choice=choice) if choice.step_s < made.step_s else None

    def _for_fewer(self, made: Staged, found: AnyPlan | None) -> Staged | None:
        """Fewer sites, where the plan that was found for them takes less: simulated, since what is expected of many sites is
        often too little."""
        if found is None:
            return None
        try:
            step_s = _simulated_if_worth_s(found, max(self._left_s(), _LEFT * self.time_limit_s))
        except KeyboardInterrupt:
            return None
        if (found.predicted.expected_s if step_s is None else step_s) >= made.step_s:
            return None
        short = self._of_plan(found, step_s)
        return short if short.choice is None else self._again(short, short.asked.sites) or short

    def _of_plan(self, found: AnyPlan, simulated_s: float | None = None) -> Staged:
        sites = found.cluster.site_names
        if not isinstance(found, PipelinePlan):
            return self._of(sites, without=found)
        return self._of(sites, choice=StageChoice(plan=found, simulated_s=simulated_s, simulated=int(simulated_s is not None)))

    def _of(self, sites: tuple[str, ...], choice: StageChoice | None = None, without: Plan | None = None) -> Staged:
        left_out = tuple(site for site in self.every.sites if site not in sites)
        return Staged(asked=self.every.among(sites), choice=choice, without=without, left_out=left_out)

    def _for(self, made: Staged) -> str:
        from hybridep.commands.plan_text import few

        return f"for {few(made.asked.sites)}; without {few(made.left_out)}" if made.left_out else "for all sites"

    def _left_s(self) -> float:
        return self.time_limit_s - (now_s() - self._began_s)


def _with_and_without(
    asked: Asked, time_limit_s: float, tell: Tell, or_without: bool, shown: bool
) -> tuple[StageChoice | None, Plan | None]:
    """(A pipeline, a plan without stages if it may be): a short look at each, and the rest of the time for what is better, or
    for both. Raises the reason of the latter where neither is possible."""
    began_s = now_s()

    def staged(limit_s: float, known: PipelinePlan | None = None) -> StageChoice:
        return in_stages(asked.cluster, asked.workload, asked.wishes, time_limit_s=limit_s, shown=shown, known=known)

    def left_s(share: float = 1.0) -> float:
        return max(share * (time_limit_s - (now_s() - began_s)), _LOOK * time_limit_s)

    if not or_without:
        return staged(time_limit_s), None
    if len(asked.sites) == 1:
        return None, in_one(asked, time_limit_s)
    pipeline: StageChoice | None = None
    try:
        pipeline = staged(_LOOK * time_limit_s)
    except HybridEPError as error:
        if asked.wishes.goal.budget_usd is not None:
            # A short look may find none that is cheap enough.
            with suppress(HybridEPError):
                pipeline = staged(left_s(_EACH))
        if pipeline is None:
            only = in_one(asked, left_s())
            # Where that is not possible either its own reason is all that is told.
            tell(str(error))
            return None, only
    without: Plan | None = None
    try:
        without = in_one(asked, _LOOK * time_limit_s)
    except (HybridEPError, KeyboardInterrupt) as error:
        tell(f"without stages: {str(error) or 'interrupted'}")
    ours, other = asked.worth_in_stages(pipeline), None if without is None else asked.worth(without)
    try:
        if other is None or not _is_far(ours, other):
            share = 1.0 if other is None or _is_far(other, ours) else _EACH
            pipeline = _better(asked, pipeline, staged(left_s(share), pipeline.plan))
        if without is not None and other is not None and not _is_far(other, ours):
            without = min(without, in_one(asked, left_s()), key=asked.worth)
    except (HybridEPError, KeyboardInterrupt):
        pass
    return pipeline, without


def _better(asked: Asked, one: StageChoice, other: StageChoice) -> StageChoice:
    """Of one that is simulated and one that is not the former, unless ``_UNSURE`` more is expected of the other."""
    if (one.simulated_s is None) == (other.simulated_s is None):
        return min(one, other, key=asked.worth_in_stages)
    known, guess = (other, one) if one.simulated_s is None else (one, other)
    (over, value), (guess_over, guess_value) = (asked.worth(choice.plan) for choice in (known, guess))
    return guess if (guess_over, guess_value) < (over, value * (1 - _UNSURE)) else known


def _is_far(one: Worth, other: Worth) -> bool:
    """Over ``_NEAR`` times as much as the other."""
    return one[0] > other[0] or (one[0] == other[0] and one[1] > _NEAR * other[1])


def in_one(asked: Asked, time_limit_s: float) -> Plan:
    """The best plan found without stages. Raises what the planner raises."""
    import planner
    from planner.stages.fewer import without_stages

    wishes = asked.wishes
    if wishes == planner.StageWishes(stages=wishes.stages):
        return planned(asked.cluster, asked.workload, time_limit_s=time_limit_s)
    return without_stages(asked.cluster, asked.workload, wishes, time_limit_s)


def _simulated_if_worth_s(plan: AnyPlan, within_s: float) -> float | None:
    """Seconds of a plan's simulated step; None where ranks share processors, of which simulations know less, of more than
    ``MOST_SITES`` sites, for which they take long, of a pipeline that takes longer to simulate than ``within_s``, and where it
    cannot be simulated."""
    from simulator.pipeline import simulate_any

    if plan.cluster.gpu.sharing == 1 and plan.cluster.sizes[0] <= MOST_SITES:
        with suppress(UserError):
            if not isinstance(plan, PipelinePlan):
                return simulate_any(plan).step_s
            return simulated_s(plan) if simulating_s(plan) <= within_s else None
    return None
