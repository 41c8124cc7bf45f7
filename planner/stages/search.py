"""The search for a pipeline plan: how many stages, which sites in each and in what order, which layers, how many micro-batches,
how far ahead, and a plan inside each stage.

Stages are first costed with placements that need no search inside; those of the best few are then planned as any cluster is. What
is compared is the whole step, walked through (``planner.stages.schedule``), within the memory of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle

import numpy as np

from hybridep.errors import InfeasibleError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Plan
from hybridep.recompute import Recompute
from planner.choose import Report
from planner.clock import now_s
from planner.goal import Goal, Worth
from planner.sites.grouping import Groups
from planner.stages.batches import BATCHES, FEW_BATCHES, beside, number_about, numbers_about, unevenness
from planner.stages.candidates import AHEAD, OFTEN, Candidate, Candidates
from planner.stages.changes import changed, layers_of, turn
from planner.stages.costs import WORTH, Costed, costed, is_better, least_again, rooms
from planner.stages.inside import Inside, fitting, of_alike, searched
from planner.stages.wander import WARMTHS, Sketch, wander

_SHORT = 4
"""Stages up to which fewer micro-batches than stages are tried: of more most wait, whatever else."""
KEPT = 3
"""Pipelines whose stages are planned by a search."""
_CHANGES = 100
"""Tries to make a pipeline better by sites that change stages, for each of the ``KEPT`` best numbers of stages."""
_MET = 5
"""Pipelines met by random changes of one, that are costed."""
UNSURE = 0.03
"""Share by which a pipeline with other micro-batches may be sketched to take longer than the best one, and is tried."""
_TRIED_IN = 0.25
"""Share of the time left in which numbers of stages that were left out are tried."""
_FEW = 3
"""Pipelines of each of these."""
_IDLE = 4
"""Rounds without a better pipeline, after which a search ends before its time."""
_NEAR = 1.2
"""Numbers of stages whose best takes over so many times as long as the best of all are not changed at random at first."""
_FOUND_BY, _WALKED_BY, _VARIED_BY, _STEPPED_BY, _CHANGED_BY, _ENDED_BY = 0.35, 0.5, 0.6, 0.8, 0.9, 0.95
"""Shares of the time limit after which no more pipelines are made, walked through, given other micro-batches, changed in small
steps at first, changed before their stages are planned, and changed at all."""


@dataclass
class Search:
    """The pipelines that were found of one problem, and what finds more."""

    candidates: Candidates
    begun_s: float
    time_limit_s: float
    report: Report
    first_by_s: float = math.inf
    """Until when a first pipeline is looked for at most (``planner.clock``)."""
    changes: int = _CHANGES
    """Tries to make one pipeline better."""
    looks: float = math.inf
    """How many changes are looked at, to be tried."""
    _found: list[Costed] = field(default_factory=list)
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """Of random changes."""
    _searched: dict[str, tuple[Plan, Inside | None]] = field(default_factory=dict)
    """Kind of stage -> the stage for which it was planned, and what was found; None where that is nothing that fits."""

    def run(self, numbers: Sequence[int], number: int, starts: Sequence[PipelinePlan] = ()) -> list[Costed]:
        """The best pipelines of so many stages, the fastest first. ``starts``: some that are known."""
        self._begin(starts)
        try:
            self._search(numbers)
        except KeyboardInterrupt:
            if not self._found:
                raise
        return self.best(number)

    def go_on(self, starts: Sequence[PipelinePlan], fresh: int) -> None:
        """Search from these pipelines on, and from about so many fresh ones."""
        self._begin(starts)
        if fresh:
            stages = self.candidates.wishes.stages
            numbers = range(2, self.candidates.cluster.sizes[0] + 1) if stages is None else (stages,)
            self._walk_best(self.candidates.made(numbers, _counted(fresh, self.begun_s + self.time_limit_s), self.first_by_s))
        for search in (self._with_other_batches, self._in_small_steps, self._at_other_depths):
            for one in self._near():
                search(one)

    def _begin(self, starts: Sequence[PipelinePlan]) -> None:
        for start in starts:
            self._keep(costed(start, store=self.candidates.store))

    def best(self, number: int) -> list[Costed]:
        """The best pipelines that were found, at most so many, the fastest first."""
        every = self._best(len(self._found))
        # What is expected of them errs more between numbers of stages than between pipelines of one.
        of_each = list({len(one.plan.stages): one for one in reversed(every)}.values())
        first = sorted(of_each, key=self._worth)[: max(number // 2, 1)]
        rest = [one for one in every if one not in first][: number - len(first)]
        return [self._least_again(self._least_ahead(one)) for one in sorted([*first, *rest], key=self._worth)]

    def _search(self, numbers: Sequence[int]) -> None:
        first_by_s = -math.inf if self._found else self.first_by_s
        candidates = self.candidates.made(numbers, lambda: self._left_s(_FOUND_BY), first_by_s)
        if not (candidates or self._found):
            why = self.candidates.reason
            raise InfeasibleError(f"pipeline over {self.candidates.cluster.name}: no number of stages is possible; {why}")
        self._walk_best(candidates)
        for one in self._best():
            self._with_other_batches(one, _VARIED_BY)
        if self._is_sketched:
            self._try_each_number(numbers)
            self._improve_each(list(self._of_each_number().values()), _STEPPED_BY, sketched=True)
            self._wander_each(self._near(), _CHANGED_BY)
        self._improve_each(self._near(), _CHANGED_BY, sketched=False)
        self._plan_inside(self._best(1))
        for one in self._best():
            self._at_other_depths(one)
        if self._is_sketched:
            self._go_round()
            self._go_farther()
        # Mostly the next ones have the same stages.
        self._plan_inside(self._best())

    def _plan_inside(self, every: Sequence[Costed]) -> None:
        """Plan inside the stages of each, as far as there is time."""
        for place, one in enumerate(every):
            self._keep(self._refined(one, self._left_s(1.0) / (len(every) - place)))

    def _go_round(self) -> None:
        """Change the best one in what is left of the time, until a round brings nothing."""
        improved = True
        while improved and self._left_s(_ENDED_BY) > 0:
            [before] = self._best(1)
            self._improve_each(self._best(1), _ENDED_BY, sketched=True)
            self._wander_each(self._best(1), _ENDED_BY)
            [after] = self._best(1)
            self._with_other_batches(after, _ENDED_BY)
            [after] = self._best(1)
            improved = self._is_better(after, before)
            if improved:
                self._improve_each([after], _ENDED_BY, sketched=False)

    def _try_each_number(self, numbers: Sequence[int]) -> None:
        """A few pipelines of each number of stages of which none was found, those near the best one's first, in up to a share of
        the time that is left."""
        [best], until_s = self._best(1), now_s() + _TRIED_IN * self._left_s(_ENDED_BY)
        missing = set(numbers) - self._of_each_number().keys()
        for number in sorted(missing, key=lambda number: (abs(math.log(number / len(best.plan.stages))), number)):
            if now_s() > until_s:
                break
            self._walk_best(self.candidates.made((number,), _counted(_FEW, until_s), until_s))

    def _go_farther(self) -> None:
        """Change the best one of each number of stages, then of the ``KEPT`` best numbers, in small steps and at random, in what
        is left of the time, until a few rounds of that have brought nothing. Rounds are cool and warm by turns."""
        idle, warmths, begun = 0, cycle(WARMTHS), list(self._of_each_number())
        while idle < _IDLE and self._left_s(_ENDED_BY) > 0:
            [before], warmth = self._best(1), next(warmths)
            for left, number in zip(range(len(begun), 0, -1), begun, strict=True):
                until_s = now_s() + self._left_s(_ENDED_BY) / left
                self._improve(self._of_each_number()[number], until_s, sketched=True)
                self._wander(self._of_each_number()[number], until_s, warmth)
                self._with_other_batches(self._of_each_number()[number], _ENDED_BY)
            [after], begun = self._best(1), list(self._of_each_number())[:KEPT]
            idle = 0 if self._is_better(after, before) else idle + 1

    def _walk_best(self, candidates: Sequence[Candidate]) -> None:
        """Walk through those that could still be best, and through one of each of the best numbers of stages."""
        for candidate in sorted(candidates, key=lambda one: one.least):
            if self._found and (candidate.least >= min(map(self._worth, self._found)) or self._left_s(_WALKED_BY) < 0):
                break
            self._walk(candidate)
        for candidate in _first_by_number(candidates)[:KEPT]:
            if all(len(one.plan.stages) != len(candidate.plan.stages) for one in self._found):
                # It cannot be the best, but what sites that change stages make of it can.
                self._walk(candidate)

    def _in_small_steps(self, found: Costed) -> None:
        self._improve(found, math.inf, sketched=self._is_sketched)

    def _at_other_depths(self, found: Costed) -> None:
        for ahead in AHEAD:
            if ahead != found.plan.ahead:
                self._keep(self._ahead(found.plan, ahead))

    def _least_ahead(self, best: Costed) -> Costed:
        """The pipeline that runs least far ahead of those that differ from ``best`` in nothing else and are about as fast."""
        same = [one for one in self._found if _but_for_ahead(one.plan) == _but_for_ahead(best.plan)]
        good = [one for one in same if not self._is_better(best, one)]
        return min(good, key=lambda one: (one.plan.ahead, self._worth(one)))

    def _least_again(self, found: Costed) -> Costed:
        """With no more layers that compute again than it takes to fit, unless that is slower: then, others wait."""
        return min(least_again(found, self.candidates.store), found, key=self._worth)

    def _worth(self, one: Costed) -> Worth:
        return self.candidates.wishes.goal.worth(one.times.step_s, one.step_usd)

    def _is_better(self, one: Costed, other: Costed) -> bool:
        return is_better(self._worth(one), self._worth(other))

    def _with_other_batches(self, found: Costed, share: float = 1.0) -> None:
        """Walk through the stages with other numbers of micro-batches, the best by sketches first, up to such a share of the time
        limit."""
        plan = found.plan
        possible = unevenness(plan.workload, plan.cluster, plan.groups)
        few = FEW_BATCHES if len(plan.stages) <= _SHORT else ()
        path, layers = plan.groups, layers_of(plan)
        numbers = {*numbers_about(possible, len(plan.stages), (*few, *BATCHES)), *beside(possible, plan.micro_batches)}
        about_s = {number: self.candidates.soonest_s(path, layers, number) for number in (*numbers, plan.micro_batches)}
        least_s = min(about_s.values())
        for micro_batches in sorted(numbers, key=lambda number: (about_s[number], -number)):
            if micro_batches == plan.micro_batches or self._left_s(share) < 0:
                continue
            if self._is_sketched and about_s[micro_batches] > (1 + UNSURE) * least_s:
                continue
            candidate = self.candidates.of(path, layers, micro_batches)
            if candidate is not None and candidate.least < min(map(self._worth, self._found)):
                self._walk(candidate)

    @property
    def _is_sketched(self) -> bool:
        """Whether sketches, which know no prices, say what is worth trying."""
        return not self.candidates.wishes.goal.needs_prices

    def _walk(self, candidate: Candidate) -> None:
        """Walk through a pipeline as far ahead as memory allows, and less far."""
        self._keep(found := costed(candidate.plan, candidate.inside))
        for ahead in OFTEN:
            if ahead < candidate.plan.ahead:
                self._keep(self._ahead(found.plan, ahead))

    def _wander_each(self, every: Sequence[Costed], share: float) -> None:
        """Random changes of each, and what was met on the way in full, each in as much of the time that there is for it, up to
        such a share of the limit."""
        for left, one in zip(range(len(every), 0, -1), every, strict=True):
            self._wander(one, now_s() + self._left_s(share) / left)

    def _wander(self, one: Costed, until_s: float, warmth: float = WARMTHS[0]) -> None:
        """Random changes, and what was met on the way in full, until ``until_s``."""
        start = Sketch(one.plan.groups, tuple(layers_of(one.plan)), one.plan.micro_batches, one.plan.ahead)
        for met in wander(self.candidates, start, _MET, self._rng, until_s, warmth):
            if (candidate := self.candidates.of(met.path, met.layers, met.micro_batches)) is not None:
                self._walk(candidate)
                self._keep(self._ahead(candidate.plan, min(met.ahead, candidate.plan.ahead)))

    def _improve_each(self, every: Sequence[Costed], share: float, *, sketched: bool) -> None:
        """One after the other, each in as much of the time that there is for it, up to such a share of the limit."""
        for left, one in zip(range(len(every), 0, -1), every, strict=True):
            self._improve(one, now_s() + self._left_s(share) / left, sketched=sketched)

    def _improve(self, best: Costed, until_s: float, *, sketched: bool) -> None:
        """Sites, stages and layers change places while that makes the pipeline faster, a number of times, until ``until_s``;
        then in other numbers of micro-batches. ``sketched``: only what is sketched to be faster is tried."""
        rng, left, looks, first, improved = np.random.default_rng(0), self.changes, self.looks, best, True
        # To list all changes among a thousand sites takes seconds.
        while improved and now_s() <= until_s:
            own, busy, improved = best.plan.groups, best.times.busiest_sites, False
            changes = list(changed(own, layers_of(best.plan), self.candidates.kinds))
            about_s = math.inf
            if sketched:
                plan = best.plan
                about_s = self.candidates.sketch_s(plan.groups, layers_of(plan), plan.micro_batches, plan.ahead)
            for place in sorted(rng.permutation(len(changes)), key=lambda place: turn(changes[place][0], own, busy)):
                if not left or not looks or now_s() > until_s:
                    return
                looks -= 1
                path, layers = changes[place]
                found = self._with_change(best, path, layers, about_s)
                left -= found is not None
                if found is not None and found.fits and self._is_better(found, best):
                    self._keep(found)
                    best, improved = found, True
                    break
        if best is not first:
            self._with_other_batches(best, _CHANGED_BY)

    def _near(self) -> list[Costed]:
        """The best pipeline of each of the ``KEPT`` best numbers of stages; where the step's time is all that counts, but for
        those that take far longer than the best of all."""
        every = list(self._of_each_number().values())[:KEPT]
        return [one for one in every if not self._is_sketched or one.times.step_s <= _NEAR * every[0].times.step_s]

    def _of_each_number(self) -> dict[int, Costed]:
        """Number of stages -> the best pipeline, the best number first."""
        kept: dict[int, Costed] = {}
        for one in sorted(self._found, key=self._worth):
            kept.setdefault(len(one.plan.stages), one)
        return kept

    def _with_change(self, best: Costed, path: Groups, layers: Sequence[int] | None, about_s: float) -> Costed | None:
        """The pipeline with other sites in its stages, or other layers, as far ahead; None where that is not possible or cannot
        be faster, or is sketched to be no faster than ``best``, which takes ``about_s``, if that is known."""
        possible = unevenness(best.plan.workload, best.plan.cluster, path)
        if not possible:
            return None
        micro_batches = number_about(possible, best.plan.micro_batches)
        layers = layers or self.candidates.layers(path, micro_batches)
        if layers is None:
            return None
        if about_s < math.inf:
            change_s = self.candidates.sketch_s(path, layers, micro_batches, best.plan.ahead)
            if change_s >= about_s * (1 - WORTH):
                return None
        candidate = self.candidates.of(path, layers, micro_batches)
        if candidate is None or candidate.least >= self._worth(best):
            return None
        return self._ahead(candidate.plan, min(best.plan.ahead, candidate.plan.ahead))

    def _best(self, number: int = KEPT) -> list[Costed]:
        """The best pipelines that differ in more than how far ahead they run."""
        kept: dict[str, Costed] = {}
        for one in sorted(self._found, key=self._worth):
            if len(kept) == number:
                break
            kept.setdefault(_but_for_ahead(one.plan), one)
        return list(kept.values())

    def _keep(self, found: Costed | None) -> None:
        if found is not None and found.fits:
            improves = all(self._worth(found) < self._worth(one) for one in self._found)
            self._found.append(found)
            if improves:
                self.report("plan", found.times.step_s)

    def _ahead(self, plan: PipelinePlan, ahead: int) -> Costed:
        """The pipeline with its stages running so far ahead."""
        plan, inside = plan.running_ahead(ahead), []
        for stage, room in zip(plan.plans, rooms(plan), strict=True):
            inside.append(fitting(stage, stage.layers, room, self.candidates.store))
        return costed(plan.with_layers([one.layers for one in inside]), inside)

    def _left_s(self, share: float) -> float:
        """Seconds left of such a share of the time limit; negative where it is over."""
        return self.begun_s + share * self.time_limit_s - now_s()

    def _refined(self, found: Costed, time_limit_s: float) -> Costed:
        """The pipeline with every stage as the planner plans it, where that is faster and fits."""
        plan, inside = found.plan, list(found.inside)
        both = list(zip(plan.plans, rooms(plan), strict=True))
        rules, batches, rent = self.candidates.rules, plan.micro_batches, self.candidates.rent_usd_per_s
        keys = [f"{stage.alike} {room} {rules.among(stage.cluster)}" for stage, room in both]
        until_s = now_s() + time_limit_s
        for number, (key, (stage, room)) in enumerate(zip(keys, both, strict=True)):
            if key not in self._searched:
                if now_s() >= until_s:
                    continue
                found_inside = searched(
                    stage,
                    room,
                    solver=self.candidates.wishes.solver,
                    time_limit_s=time_limit_s / len(set(keys)),
                    goal=Goal(objective=self.candidates.wishes.goal.objective),
                    constraints=rules.inside(stage.cluster),
                )
                self._searched[key] = stage, found_inside
            other, made = self._searched[key]
            if made is not None and made.rank(batches, rent) < inside[number].rank(batches, rent):
                inside[number] = of_alike(made, stage, other)
        return costed(plan.with_layers([one.layers for one in inside]), inside)


def _counted(number: int, until_s: float) -> Callable[[], float]:
    """Says ``number`` times that there is time left, until there is none."""
    left = count(number, -1)
    return lambda: min(float(next(left)), until_s - now_s())


def _but_for_ahead(plan: PipelinePlan) -> str:
    """A text that is equal for pipelines of one search which differ at most in how far ahead they run."""
    placed = [[group.recomputing(Recompute.NOTHING) for group in stage.layers] for stage in plan.stages]
    return f"{plan.micro_batches} {[(stage.sites, stage.num_layers) for stage in plan.stages]} {placed}"


def _first_by_number(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The pipeline that could take least of each number of stages, the best first."""
    kept: dict[int, Candidate] = {}
    for one in sorted(candidates, key=lambda one: one.least):
        kept.setdefault(len(one.plan.stages), one)
    return list(kept.values())
