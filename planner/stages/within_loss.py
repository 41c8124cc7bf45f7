"""Codecs of a pipeline chosen by what they were measured to cost: of what passes between its stages, and inside them between
sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce

from hybridep.codec_losses import permitted, times_exact, worthwhile
from hybridep.codecs import EXACT, KINDS, PAYLOADS, Codecs
from hybridep.errors import InfeasibleError
from hybridep.pipeline import PipelinePlan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import now_s
from planner.goal import Worth
from planner.stages.costs import Costed, costed, rooms
from planner.stages.inside import Store, fitting
from planner.stages.wishes import StageWishes
from planner.within_loss import without_useless

Make = Callable[[StageWishes, float, float, Sequence[PipelinePlan]], list[Costed]]
"""(wishes with codecs, when it begins, time limit, some that are known) -> the best pipelines with these."""
_LOOK = 0.2
"""Share of the time limit for a look at pipelines, after which codecs are chosen for the search."""
_PLAIN = 16
"""Pipelines, the best ones, in which useless codecs are looked for one by one. A count, because what a deadline cuts off differs
from run to run."""
_RATED = 3
"""Pipelines of a search that are costed with other codecs."""


def pipelines_within_loss(
    make: Make, cluster: Cluster, workload: Workload, wishes: StageWishes, time_limit_s: float
) -> list[Costed]:
    """The best pipelines that ``make`` finds with codecs between sites whose measured losses add up to at most
    ``wishes.max_loss``: of all those with which the best one is best, each without what brings it nothing. After a short look
    with the first codecs that have room it searches with those that suit what was found, and costs what that finds with all
    others again. On KeyboardInterrupt, once ``make`` found some, those that are better. Raises what ``make`` raises where it
    finds nothing."""
    assert wishes.max_loss is not None
    begun_s, choice = now_s(), _Choice(cluster, workload, wishes)
    every = choices(cluster, workload, wishes.max_loss)
    looked = _first(choice, make, every, time_limit_s)
    searched: list[Costed] = []
    try:
        with suppress(InfeasibleError):  # what is known has room, maybe with codecs that need less of it
            suited = choice.best(looked[:_RATED], every)
            known = [one.plan for one in choice.coded(looked[:_RATED], suited)]
            searched = make(choice.wishes_with(suited), now_s(), max(time_limit_s - (now_s() - begun_s), 0.0), known)
        near = [*looked[:_RATED], *searched[:_RATED]]
        found = choice.coded([*looked[:_RATED], *searched], choice.best(near, every))
        return choice.plain(found, _PLAIN)
    except KeyboardInterrupt:
        return min((one for one in (searched, looked) if one), key=lambda found: choice.worth(found[0]))


def choices(cluster: Cluster, workload: Workload, max_loss: float) -> list[Codecs]:
    """Codecs between sites whose measured losses add up to at most ``max_loss``, of which no other is better in everything."""
    return worthwhile(permitted(max_loss, PAYLOADS), workload, cluster.gpu.coding)


def recoded(found: Costed, codecs: Codecs, store: Store) -> Costed | None:
    """The pipeline with these codecs between sites, and layers that compute again where it takes that to fit; None where nothing
    does. ``store``: what was found of stages before, and is now."""
    by_level = {found.plan.cluster.levels[0].name: codecs} if codecs.coded else {}
    if found.plan.codecs == by_level:
        return found
    try:
        plan = found.plan.coded(by_level)
    except ValueError:
        return None
    made = costed(plan, store=store)
    if not made.fits:
        stages = zip(plan.plans, rooms(plan), strict=True)
        inside = [fitting(stage, stage.layers, room, store) for stage, room in stages]
        made = costed(plan.with_layers([one.layers for one in inside]), inside)
    return made if made.fits else None


def _first(choice: _Choice, make: Make, every: Sequence[Codecs], time_limit_s: float) -> list[Costed]:
    """The best pipelines of a look with the first codecs with which there are any. Where others might have room, these are tried
    while there is time: it may take seconds to be sure that nothing fits."""
    begun_s, missing = now_s(), None
    # What has room with any has room with one of those that are best where coding takes no time.
    small = worthwhile(every, choice.workload, None)
    for codecs in (every[0], *(one for one in small if one != every[0])):
        try:
            return make(choice.wishes_with(codecs), now_s(), _LOOK * time_limit_s, ())
        except InfeasibleError as error:  # what a codec keeps may not fit
            missing = missing or error
        if now_s() - begun_s > time_limit_s:
            break
    assert missing is not None
    raise missing


@dataclass(frozen=True)
class _Choice:
    cluster: Cluster
    workload: Workload
    wishes: StageWishes
    _store: Store = field(default_factory=Store)

    def wishes_with(self, codecs: Codecs) -> StageWishes:
        """Wishes with these codecs between sites."""
        by_level = {self.cluster.levels[0].name: codecs} if codecs.coded else {}
        return replace(self.wishes, codecs=by_level, max_loss=None)

    def best(self, found: Sequence[Costed], every: Sequence[Codecs]) -> Codecs:
        """Of ``every`` codecs those with which one of the pipelines is best; of equally good ones those with which messages of
        all kinds are fastest, since other pipelines may have use for what these have none for."""
        rate, coding = self.cluster.levels[0].bandwidth, self.cluster.gpu.coding
        worth = [(*self._best_worth(found, one), times_exact(one, self.workload, coding, rate)) for one in every]
        return every[min(range(len(every)), key=worth.__getitem__)]

    def coded(self, found: Sequence[Costed], codecs: Codecs) -> list[Costed]:
        """All of them that have room with these codecs, the best first."""
        made = [coded for one in found if (coded := recoded(one, codecs, self._store)) is not None]
        return sorted({one.plan.digest: one for one in made}.values(), key=self.worth)

    def plain(self, found: Sequence[Costed], most: int) -> list[Costed]:
        """Each without codecs that bring it nothing, the best first; behind the first ``most`` only without such as code nothing,
        since all stages have one site."""
        made = list[Costed]()
        for one in found:
            codecs = one.plan.codecs.get(self.cluster.levels[0].name, EXACT)
            if all(len(stage.sites) == 1 for stage in one.plan.stages):
                codecs = reduce(Codecs.without, KINDS, codecs)
            if len(made) < most:
                codecs = without_useless(codecs, partial(self._value, one))
            made.append(recoded(one, codecs, self._store) or one)
        return sorted({one.plan.digest: one for one in made}.values(), key=self.worth)

    def _value(self, found: Costed, codecs: Codecs) -> float:
        """Seconds or dollars with these codecs; infinite where it has no room, or the budget none for it."""
        over, value = self._best_worth([found], codecs)
        return math.inf if over else value

    def worth(self, one: Costed) -> Worth:
        """What one of them is worth; less is better."""
        return self.wishes.goal.worth(one.times.step_s, one.step_usd)

    def _best_worth(self, found: Sequence[Costed], codecs: Codecs) -> Worth:
        """Of the best of them with these codecs; infinite where none has room."""
        return min((self.worth(one) for one in self.coded(found, codecs)), default=(math.inf, math.inf))
