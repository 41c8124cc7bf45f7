"""In stages or without, for all sites or for those that pay: what ``hybridep plan --stages`` plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hybridep.commands.plan_choice import MOST_SITES, planned
from hybridep.commands.stage_choice import StageChoice, in_stages, simulated_s, simulating_s
from hybridep.errors import HybridEPError, InfeasibleError, UserError
from hybridep.pipeline import PipelinePlan
from planner.clock import now_s

if TYPE_CHECKING:
    from hybridep.pipeline import AnyPlan
    from hybridep.plan import Plan
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from planner import SearchedOn, StageCache, StageWishes
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


def _new_cache() -> StageCache:
    from planner import StageCache

    return StageCache()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plan is made for."""

    cluster: Cluster
    workload: Workload
    wishes: StageWishes
    cache: StageCache = field(default_factory=_new_cache, compare=False)
    """Of searches for pipelines."""

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

    def worth_of(self, choice: StageChoice) -> Worth:
        """What a plan is worth, simulated where it was, else as expected."""
        from planner.stages.costs import simulated_usd

        goal = self.wishes.goal
        usd = simulated_usd(choice.plan, choice.step_s) if goal.needs_prices else 0.0
        return goal.worth(choice.step_s, usd)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What was planned."""

    asked: Asked
    """What it was planned for: the cluster of its own sites."""
    chosen: StageChoice
    """The best plan: a pipeline, or one without stages."""
    without: Plan | None
    """The plan without stages, if there is one."""
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> AnyPlan:
        """The plan that was chosen."""
        return self.chosen.plan

    @property
    def worth(self) -> Worth:
        """What the best plan is worth: simulated where it was, else as expected."""
        return self.asked.worth_of(self.chosen)

    def top(self, number: int) -> list[StageChoice]:
        """The best plan and the next ones of different plans, ``number`` at most: what was simulated, then the rest. Plans that
        differ only in which of several like sites does what are one."""
        if number == 1:
            return [self.chosen]
        others = sorted(self.chosen.others, key=lambda one: (one.simulated_s is None, self.asked.worth_of(one)))
        different = dict[str, StageChoice]()
        for one in (self.chosen, *others):
            different.setdefault(_alike(one.plan), one)
        return list(different.values())[:number]


def plan_sites(
    asked: Asked,
    *,
    or_without: bool = True,
    fewer: bool = False,
    time_limit_s: float = 60.0,
    tell: Tell | None = None,
    shown: bool = False,
    top: int = 1,
) -> Staged:
    """The best that was found in stages, or without where they may be left out. ``fewer``: for the sites that pay only. ``tell``:
    what is decided on the way, in words. ``shown``: with searches' progress on stderr. ``top``: how many plans are wanted, the
    others in ``StageChoice.others``. Of interrupted searches the best so far. Raises what the planner raises, where nothing is
    possible."""
    choice = _Choice(asked, or_without, tell or (lambda text: None), shown, time_limit_s, top)
    return choice.run(fewer and len(asked.sites) > 1)


def search_on(made: Staged, tell: Tell, within_s: float) -> tuple[Staged, SearchedOn | None]:
    """(What was made, or the pipeline that is better than its own, what the short search for one found), the latter only of a
    pipeline. Where what was made was simulated, what was found is, too, if that takes up to ``within_s``."""
    from hybridep.units import format_seconds
    from planner import searched_on

    if not isinstance(made.best, PipelinePlan):
        return made, None
    found = searched_on(made.best, made.asked.wishes)
    if found.better is None or made.asked.wishes.goal.needs_prices:
        return made, found
    best = _better(made.asked, made.chosen, StageChoice(plan=found.better), within_s)
    if best.plan is made.best:
        return made, found
    tell(f"searched on for upgrades: a step of {format_seconds(best.step_s)} in place of {format_seconds(made.chosen.step_s)}")
    return replace(made, chosen=replace(best, simulated=made.chosen.simulated + best.simulated)), found


@dataclass
class _Choice:
    every: Asked
    or_without: bool
    tell: Tell
    shown: bool
    time_limit_s: float
    top: int = 1
    _began_s: float = field(default_factory=now_s)
    _known: Mapping[tuple[str, ...], PipelinePlan] = field(default_factory=dict)
    """Pipelines for some sites, found on the way."""

    def run(self, fewer: bool) -> Staged:
        sites, found = self._paying() if fewer else (self.every.sites, None)
        left_s = max(self._left_s(), (1 - _CHOOSING) * self.time_limit_s) if fewer else self.time_limit_s
        try:
            made = self._planned(sites, left_s)
        except KeyboardInterrupt:
            if found is None:
                raise
            return self._of(found.cluster.site_names, StageChoice(plan=found))
        if not fewer or self.every.wishes.goal.needs_prices:
            return made
        # Which sites pay was found in short searches, and the more sites, the less those find.
        other = self._again(made, self.every.sites) if made.left_out else self._for_fewer(made, found)
        if other is None:
            return made
        self.tell(f"after all, {self._for(other.asked.sites)}")
        return other

    def _paying(self) -> tuple[tuple[str, ...], AnyPlan | None]:
        """The sites that pay, and the best plan for fewer than all that was found on the way."""
        from hybridep.commands.plan_progress import PlanProgress
        from planner import sites_that_pay

        every, limit_s = self.every, _CHOOSING * self.time_limit_s
        try:
            with PlanProgress() if self.shown else nullcontext() as progress:
                asked = every.cluster, every.workload, every.wishes
                paying = sites_that_pay(*asked, time_limit_s=limit_s, report=progress, cache=every.cache)
        except HybridEPError as error:
            if not self.or_without:
                raise
            self.tell(f"for all sites, since no others were found: {error}")
            return every.sites, None
        self._known = paying.pipelines
        return paying.sites, paying.fewer

    def _planned(self, sites: tuple[str, ...], limit_s: float) -> Staged:
        asked, left_out = self.every.among(sites), self._left_out(sites)
        if left_out:
            self.tell(self._for(sites))
        known = self._known.get(sites)
        chosen, without = _with_and_without(asked, limit_s, self.tell, self.or_without, self.shown, self.top, known)
        return Staged(asked=asked, chosen=chosen, without=without, left_out=left_out)

    def _again(self, made: Staged, sites: tuple[str, ...]) -> Staged | None:
        """In stages on other sites, where what is left of the time limit is enough to find that those take less; None where they
        do not, or after a KeyboardInterrupt."""
        asked, left_s = self.every.among(sites), self._left_s()
        if left_s < _LEFT * self.time_limit_s:
            return None
        try:
            choice = in_stages(
                asked.cluster,
                asked.workload,
                asked.wishes,
                time_limit_s=left_s,
                shown=self.shown,
                known=self._known.get(sites),
                cache=asked.cache,
                top=self.top,
            )
        except (HybridEPError, KeyboardInterrupt):
            return None
        return self._if_better(choice, made)

    def _for_fewer(self, made: Staged, found: AnyPlan | None) -> Staged | None:
        """Fewer sites, where the plan that was found for them takes less: simulated, since what is expected of many sites is
        often too little."""
        short = None if found is None else self._if_better(StageChoice(plan=found), made)
        if short is None or not isinstance(short.best, PipelinePlan):
            return short
        return self._again(short, short.asked.sites) or short

    def _if_better(self, choice: StageChoice, made: Staged) -> Staged | None:
        """The other choice, where it is better than what was made."""
        best = _better(self.every, made.chosen, choice, max(self._left_s(), _LEFT * self.time_limit_s))
        return None if best.plan is made.best else self._of(best.plan.cluster.site_names, best)

    def _of(self, sites: tuple[str, ...], chosen: StageChoice) -> Staged:
        return Staged(asked=self.every.among(sites), chosen=chosen, without=None, left_out=self._left_out(sites))

    def _left_out(self, sites: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(site for site in self.every.sites if site not in sites)

    def _for(self, sites: tuple[str, ...]) -> str:
        from hybridep.commands.plan_text import few

        left_out = self._left_out(sites)
        return f"for {few(sites)}; without {few(left_out)}" if left_out else "for all sites"

    def _left_s(self) -> float:
        return self.time_limit_s - (now_s() - self._began_s)


def _with_and_without(
    asked: Asked, time_limit_s: float, tell: Tell, or_without: bool, shown: bool, top: int, known: PipelinePlan | None
) -> tuple[StageChoice, Plan | None]:
    """(The best plan, the one without stages if it may be): a short look at each, the first from a pipeline that is ``known`` on,
    and the rest of the time for what is better, or for both. Raises the reason of the latter where neither is possible."""
    began_s = now_s()

    def staged(limit_s: float, known: PipelinePlan | None = known) -> StageChoice:
        of = asked.cluster, asked.workload, asked.wishes
        return in_stages(*of, time_limit_s=limit_s, shown=shown, known=known, cache=asked.cache, top=top)

    def left_s(share: float = 1.0) -> float:
        return max(share * (time_limit_s - (now_s() - began_s)), _LOOK * time_limit_s)

    if not or_without:
        return staged(time_limit_s), None
    if len(asked.sites) == 1:
        only = in_one(asked, time_limit_s)
        return StageChoice(plan=only), only
    pipeline: StageChoice | None = None
    try:
        pipeline = staged(_LOOK * time_limit_s)
    except HybridEPError as error:
        if asked.wishes.goal.budget_usd is not None:
            # A short look may find none that is cheap enough.
            with suppress(HybridEPError):
                pipeline = staged(left_s(_EACH))
        if pipeline is None:
            only = _without_either(asked, left_s(), error)
            tell(str(error))
            return StageChoice(plan=only), only
    assert isinstance(pipeline.plan, PipelinePlan)
    without: Plan | None = None
    try:
        without = in_one(asked, _LOOK * time_limit_s)
    except (HybridEPError, KeyboardInterrupt) as error:
        tell(f"without stages: {str(error) or 'interrupted'}")
    ours, other = asked.worth_of(pipeline), None if without is None else asked.worth(without)
    try:
        if other is None or not _is_far(ours, other):
            share = 1.0 if other is None or _is_far(other, ours) else _EACH
            pipeline = _better(asked, pipeline, staged(left_s(share), pipeline.plan))
        if without is not None and other is not None and not _is_far(other, ours):
            without = min(without, in_one(asked, left_s()), key=asked.worth)
    except (HybridEPError, KeyboardInterrupt):
        pass
    if without is None:
        return pipeline, None
    # Where they are far apart, by what is expected of both, that decides.
    ours, other = asked.worth(pipeline.plan), asked.worth(without)
    within_s = 0.0 if _is_far(ours, other) or _is_far(other, ours) else left_s()
    return _better(asked, StageChoice(plan=without), pipeline, within_s), without


def _without_either(asked: Asked, time_limit_s: float, why_not: HybridEPError) -> Plan:
    """The plan without stages where there is none in stages, and ``why_not``. Raises what the planner raises; of what has no room
    either way both reasons, since one may lack far less."""
    try:
        return in_one(asked, time_limit_s)
    except InfeasibleError as error:
        if isinstance(why_not, InfeasibleError):
            raise InfeasibleError(f"{error}; in stages neither: {why_not}") from None
        raise


def _better(asked: Asked, one: StageChoice, other: StageChoice, within_s: float = 0.0) -> StageChoice:
    """Like is compared with like: where one is simulated the other is, too, if that takes up to ``within_s``. Else what is
    expected of both decides, and one that is simulated is kept unless ``_UNSURE`` more is expected of the other. What is not
    chosen is one of the others of what is, if it is for the same sites."""
    if (one.simulated_s is None) != (other.simulated_s is None):
        one, other = (_simulated(choice, within_s) for choice in (one, other))
    if (one.simulated_s is None) == (other.simulated_s is None):
        best, worse = sorted((one, other), key=asked.worth_of)
    else:
        known, guess = (other, one) if one.simulated_s is None else (one, other)
        (over, value), (guess_over, guess_value) = (asked.worth(choice.plan) for choice in (known, guess))
        surely = (guess_over, guess_value) < (over, value * (1 - _UNSURE))
        best, worse = (guess, known) if surely else (known, guess)
    if best.plan.cluster.site_names != worse.plan.cluster.site_names:
        return best
    return replace(best, others=(*best.others, replace(worse, others=()), *worse.others))


def _alike(plan: AnyPlan) -> str:
    """A text that is the same for plans which differ in the names of sites that are alike."""
    if not isinstance(plan, PipelinePlan):
        return plan.digest
    said, stages = plan.predicted, [(len(stage.sites), stage.num_layers) for stage in plan.stages]
    return f"{said.expected_s:.9g} {said.memory_bytes:.9g} {plan.micro_batches} {plan.ahead} {stages}"


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
    return without_stages(asked.cluster, asked.workload, wishes, time_limit_s, free_homes=True)


def _simulated(choice: StageChoice, within_s: float) -> StageChoice:
    """With the plan's simulated step. As it is of more than ``MOST_SITES`` sites, where that takes longer than ``within_s`` or is
    not possible, and on a KeyboardInterrupt."""
    cluster = choice.plan.cluster
    if choice.simulated_s is None and cluster.sizes[0] <= MOST_SITES and simulating_s(choice.plan) <= within_s:
        with suppress(UserError, KeyboardInterrupt):
            return replace(choice, simulated_s=simulated_s(choice.plan), simulated=1)
    return choice
