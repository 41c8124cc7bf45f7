"""The search for pipelines that keep the stages of one: the same sites have the same layers in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridep.codecs import EXACT
from hybridep.errors import InfeasibleError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import copies_last
from hybridep.topology import Cluster
from planner.clock import now_s
from planner.stages.batches import BATCHES, FEW_BATCHES, numbers_about, unevenness
from planner.stages.candidates import AHEAD
from planner.stages.changes import layers_of
from planner.stages.costs import Costed, costed, rooms
from planner.stages.inside import Store, fitting
from planner.stages.neighbours import merged
from planner.stages.pipelines import candidates_of
from planner.stages.search import KEPT, UNSURE, Search
from planner.stages.wishes import StageWishes
from planner.stages.within_loss import pipelines_within_loss, recoded


def search_kept(held: PipelinePlan, cluster: Cluster, wishes: StageWishes, *, time_limit_s: float, store: Store) -> list[Costed]:
    """The best pipelines over ``cluster`` with the stages of the one that is ``held``: this one at its rates, and what becomes of
    it in other micro-batches, with other placements inside stages, at other depths, with what it takes computed again, and with
    other codecs where these are to be chosen. ``store``: what was found of stages before, and is now."""

    def make(asked: StageWishes, since_s: float, limit_s: float, known: Sequence[PipelinePlan] = ()) -> list[Costed]:
        candidates = candidates_of(cluster, held.workload, asked, store)
        return _Kept(candidates, since_s, limit_s, lambda what, seconds: None).of(held, known)

    if wishes.max_loss is None:
        return make(wishes, now_s(), time_limit_s)
    return pipelines_within_loss(make, cluster, held.workload, wishes, time_limit_s)


@dataclass
class _Kept(Search):
    def of(self, held: PipelinePlan, known: Sequence[PipelinePlan]) -> list[Costed]:
        """The best ones, of those that are ``known``, too. Raises InfeasibleError where none fits."""
        self._begin(known)
        candidates, codecs = self.candidates, dict(self.candidates.wishes.codecs)
        found = costed(held.at_rates(candidates.cluster, candidates.schedule), store=candidates.store)
        outer = codecs.get(candidates.cluster.levels[0].name, EXACT)
        self._keep(found if found.plan.codecs == codecs else recoded(found, outer, candidates.store))
        self._in_batches(held)
        if not self._found:
            why = candidates.lacking or candidates.barred or candidates.why
            raise InfeasibleError(f"pipeline over {candidates.cluster.name}: none with the same stages is possible; {why}")
        for one in self._best():
            self._at_each_depth(one.plan, held)
        self._plan_inside(self._best(1))
        for one in self._best():
            self._at_other_depths(one)
        self._plan_inside(self._best())
        return self.best(KEPT)

    def _in_batches(self, held: PipelinePlan) -> None:
        """Walk through the stages, placed anew, in all numbers of micro-batches that are sketched to be about best, as far as
        there is time, and in one at least."""
        path, layers, stages = held.groups, layers_of(held), len(held.stages)
        possible = unevenness(held.workload, held.cluster, held.groups)
        numbers = {*numbers_about(possible, stages, (*FEW_BATCHES, *BATCHES)), held.micro_batches}
        about_s = {number: self.candidates.soonest_s(path, layers, number) for number in numbers}
        longest_s, walked = math.inf, set[int]()

        def walk(number: int) -> None:
            walked.add(number)
            candidate = self.candidates.of(path, layers, number)
            if candidate is not None:
                self._walk(candidate)

        for number in sorted(numbers, key=lambda number: (about_s[number], -number)):
            if walked and self._found and (about_s[number] > longest_s or self._left_s(1.0) < 0):
                break
            walk(number)
            longest_s = min(longest_s, (1 + UNSURE) * about_s[number])
        every = sorted(possible)
        while self._found and self._left_s(1.0) >= 0:
            # Those next to the best one, while that helps.
            place = every.index(self._best(1)[0].plan.micro_batches)
            beside = [number for number in every[max(place - 1, 0) : place + 2] if number not in walked]
            if not beside:
                break
            for number in beside:
                walk(number)

    def _at_each_depth(self, plan: PipelinePlan, held: PipelinePlan) -> None:
        """In the same micro-batches at each depth, placed for the room that it leaves, and as the held one."""
        store = self.candidates.store
        lasting = all(copies_last(one.layers, codecs) for one in held.plans for codecs in plan.codecs.values())
        for ahead in AHEAD:
            made = self.candidates.whole(plan.groups, layers_of(plan), plan.micro_batches, ahead)
            if made is None:
                continue
            whole, anew = made
            both = zip(whole.plans, held.plans, rooms(whole), strict=True)
            as_held = [fitting(stage, merged(own.layers), room, store) for stage, own, room in both] if lasting else anew
            for inside in (anew, as_held):
                if all(one.memory.fits for one in inside):
                    self._keep(self._least_again(costed(whole.with_layers([one.layers for one in inside]), inside)))
