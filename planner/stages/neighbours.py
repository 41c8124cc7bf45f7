"""Pipelines that are one change away from a plan, placed and costed as the search does it: what else could have been.

Each is a plan by itself. What takes long is to cost them, so of many changes of one kind only those are costed that are sketched
to be the fastest, and among many sites only what has been come to after so many; nothing goes by the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

from hybridep.baselines import Baseline, baseline_group
from hybridep.codecs import codecs_for_others
from hybridep.pipeline import PipelinePlan
from hybridep.plan import LayerGroup, Plan
from hybridep.recompute import Recompute
from hybridep.topology import by_themselves
from hybridep.units import counted
from planner.constraints import Constraints
from planner.evaluate import MOST_RANKS
from planner.goal import Worth
from planner.plans import goal_of
from planner.sites.grouping import Groups
from planner.stages.batches import number_about, unevenness
from planner.stages.candidates import AHEAD, Candidates
from planner.stages.costs import Costed, costed, is_better, least_again, rooms
from planner.stages.inside import Inside, Room, fitting
from planner.stages.order import groupings
from planner.stages.rules import StageRules
from planner.stages.schedule import stage_sites
from planner.stages.wishes import StageWishes

_LIKELIEST = 3
"""Of the changes of one kind: as many are costed, those that are sketched to take least."""
_WALKS = 30_000
"""Steps that are walked through, times stages and sites, with which the time for each grows: where there are many what comes last
is left out. For 27 sites in as many stages all takes 1.3 seconds, for 60 2.2."""
_INSIDE = {
    Baseline.EP: "tokens travel inside stages",
    Baseline.EP_IN_DC: "experts copied between a stage's sites only",
    Baseline.FULL_GATHER: "all experts copied inside stages",
}


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A pipeline that differs from a plan in one respect, and in what follows from it."""

    name: str
    """What differs, as in ``3 forwards ahead`` or ``stages 1 and 2 exchanged``."""
    costed: Costed
    allowed: bool
    """Keeps the rules that the plan was made with."""

    @property
    def plan(self) -> PipelinePlan:
        """The pipeline, without a prediction."""
        return self.costed.plan

    @property
    def possible(self) -> bool:
        """Fits, and keeps the rules."""
        return self.costed.fits and self.allowed


class _Change(NamedTuple):
    """Other sites or layers of stages, in so many micro-batches."""

    name: str
    path: Groups
    layers: tuple[int, ...]
    micro_batches: int


@dataclass
class Neighbours:
    """Finds them, for a plan and the rules that it was made with. Raises InfeasibleError for rules that no stages can keep, and
    what ``planner.constraints`` raises."""

    plan: PipelinePlan
    constraints: Constraints | None = None
    itself: Neighbour = field(init=False)
    """The plan."""

    def __post_init__(self) -> None:
        made = self.plan
        # What was told of the plan does not hold for others.
        self.plan = made.coded(codecs_for_others(made.codecs)).model_copy(update={"provenance": {}})
        wishes = StageWishes(
            schedule=made.schedule,
            popularity=made.popularity,
            codecs=self.plan.codecs,
            goal=goal_of(made.solver),
            constraints=self.constraints,
        )
        self._rules = StageRules(made.cluster, made.workload.model.num_experts, self.constraints)
        self._candidates = Candidates(made.cluster, made.workload, made.schedule, wishes, self._rules)
        self._path: Groups = tuple(tuple(own.tolist()) for own in stage_sites(made))
        self._layers = tuple(stage.num_layers for stage in made.stages)
        self._walks_left = _WALKS // (len(self._path) * sum(map(len, self._path)))
        self.itself = self._of("plan", costed(self.plan))

    def found(self) -> list[Neighbour]:
        """Of each kind of change the best that is possible, and where one that is not would be better than the plan, the best of
        those; all of them where nothing of a kind is possible, but for the best left out."""
        kinds: list[Iterator[Neighbour]] = [
            *(self._running_ahead(ahead) for ahead in (self.plan.ahead - 1, self.plan.ahead + 1)),
            *(self._in_batches(times) for times in (0.5, 2.0)),
            self._kept(),
            *(self._placed_as(baseline) for baseline in _INSIDE),
            self._changed(self._moved()),
            self._likeliest(self._split()),
            self._likeliest(self._exchanged()),
            self._likeliest(self._joined()),
        ]
        found = list[Neighbour]()
        for kind in kinds:
            found += self._told(list(kind) if self._walks_left > 0 else [])
        return found

    def worth(self, one: Neighbour) -> Worth:
        """By what the plan's search made small."""
        return self._candidates.wishes.goal.worth(one.costed.times.step_s, one.costed.step_usd)

    def is_better(self, one: Neighbour) -> bool:
        """Whether it is better than the plan by more than ``WORTH``."""
        return is_better(self.worth(one), self.worth(self.itself))

    def _told(self, options: Sequence[Neighbour]) -> Iterator[Neighbour]:
        possible = [one for one in options if one.possible]
        others = [one for one in options if not one.possible]
        if possible:
            yield min(possible, key=self.worth)
            others = [one for one in others if self.is_better(one)]
        if others:
            yield min(others, key=self.worth)

    def _of(self, name: str, found: Costed) -> Neighbour:
        # Its step, and its bubble.
        self._walks_left -= 2
        return Neighbour(name=name, costed=found, allowed=self._rules.kept(found.plan))

    # --- the same stages -------------------------------------------------------------------------------------------

    def _running_ahead(self, ahead: int) -> Iterator[Neighbour]:
        if ahead < 1:
            return
        plan, own = self.plan.running_ahead(ahead), self.plan
        if any(plan.in_flight(stage) != own.in_flight(stage) for stage in range(len(plan.stages))):
            inside = [self._refitted(stage, stage.layers, room) for stage, room in zip(plan.plans, rooms(plan), strict=True)]
            yield self._of(counted(ahead, "forward") + " ahead", self._with(plan, inside))

    def _in_batches(self, times: float) -> Iterator[Neighbour]:
        """With about so many times as many micro-batches, fewer or more."""
        own = self.plan.micro_batches
        possible = {number: crowded for number, crowded in self._possible(self._path).items() if (number - own) * (times - 1) > 0}
        if possible:
            number = number_about(possible, times * own)
            yield from self._changed([_Change(counted(number, "micro-batch"), self._path, self._layers, number)])

    def _kept(self) -> Iterator[Neighbour]:
        """What computes again does not."""
        if any(stage.recomputes for stage in self.plan.plans):
            layers = [tuple(group.recomputing(Recompute.NOTHING) for group in stage.layers) for stage in self.plan.stages]
            yield self._of("activations kept", costed(self.plan.with_layers(layers)))

    def _placed_as(self, baseline: Baseline) -> Iterator[Neighbour]:
        """The baseline inside all stages."""
        if baseline is Baseline.EP_IN_DC and (len(self.plan.cluster.levels) == 1 or max(map(len, self._path)) == 1):
            return
        inside, same = [], True
        for stage, room in zip(self.plan.plans, rooms(self.plan), strict=True):
            group = baseline_group(stage.cluster, stage.workload, baseline)
            same &= all(one.choices == group.choices and not one.serving for one in stage.layers)
            inside.append(self._refitted(stage, (group,), room))
        if not same:
            yield self._of(_INSIDE[baseline], self._with(self.plan, inside))

    # --- other stages ----------------------------------------------------------------------------------------------

    def _moved(self) -> Iterator[_Change]:
        """A layer of the busiest stage goes to one beside it."""
        giver = self.itself.costed.times.busiest_stage
        if self.plan.plans[giver].workload.model.num_moe_layers == 1:
            return
        for taker in (giver - 1, giver + 1):
            if 0 <= taker < len(self._path):
                layers = [number - (stage == giver) + (stage == taker) for stage, number in enumerate(self._layers)]
                yield self._change(f"a layer of stage {giver} to stage {taker}", self._path, layers)

    def _exchanged(self) -> Iterator[_Change]:
        """Two stages next to each other change places."""
        for one, other in self._pairs():
            places = list(range(len(self._path)))
            places[one], places[other] = other, one
            name = f"stages {one} and {other} exchanged"
            yield self._change(name, [self._path[place] for place in places], [self._layers[place] for place in places])

    def _joined(self) -> Iterator[_Change]:
        """Two stages next to each other become one."""
        for one, other in self._pairs():
            sites = tuple(sorted((*self._path[one], *self._path[other])))
            if len(sites) * self.plan.cluster.ranks_per_site <= MOST_RANKS:
                path = (*self._path[:one], sites, *self._path[other + 1 :])
                layers = (*self._layers[:one], self._layers[one] + self._layers[other], *self._layers[other + 1 :])
                yield self._change(f"stages {one} and {other} joined", path, layers)

    def _split(self) -> Iterator[_Change]:
        """The stage of most sites becomes two, its layers shared out in proportion to what their sites compute."""
        sites = max(map(len, self._path))
        number = max(range(len(self._path)), key=lambda stage: (len(self._path[stage]) == sites, self._busy_s(stage)))
        group, model = self._path[number], self.plan.plans[number].workload.model
        if sites == 1 or model.num_moe_layers == 1:
            return
        cluster, gpus = self.plan.cluster, self.plan.cluster.site_gpus
        own = by_themselves(cluster, [cluster.site_name(site) for site in group])
        batch_bytes = float(self.plan.sequences(number).sum() * self.plan.sequence_bytes)
        for halves in groupings(own, 2, batch_bytes):
            for places in (halves, halves[::-1]):
                first, second = (tuple(sorted(group[place] for place in half)) for half in places)
                speed = [sum(gpus[site].throughput for site in half) for half in (first, second)]
                share = round(model.num_layers * speed[0] / sum(speed))
                layers = min(max(share, model.num_dense_layers + 1), model.num_layers - 1)
                yield self._change(
                    f"stage {number} split in two",
                    (*self._path[:number], first, second, *self._path[number + 1 :]),
                    (*self._layers[:number], layers, model.num_layers - layers, *self._layers[number + 1 :]),
                )

    def _pairs(self) -> list[tuple[int, int]]:
        """Stages next to each other, those with least to do first."""
        return sorted(pairwise(range(len(self._path))), key=lambda pair: sum(map(self._busy_s, pair)))

    def _change(self, name: str, path: Sequence[tuple[int, ...]], layers: Sequence[int]) -> _Change:
        """In as many micro-batches as the plan where its sites can share those out, else about as many."""
        possible, own = self._possible(path), self.plan.micro_batches
        number = own if own in possible or not possible else number_about(possible, own)
        return _Change(
            name + (f", {counted(number, 'micro-batch')}" if number != own else ""), tuple(path), tuple(layers), number
        )

    def _possible(self, path: Sequence[tuple[int, ...]]) -> dict[int, float]:
        return unevenness(self.plan.workload, self.plan.cluster, path)

    def _likeliest(self, changes: Iterable[_Change]) -> Iterator[Neighbour]:
        """Those of the changes that are sketched to take least."""
        possible = (one for one in changes if self._possible(one.path) and all(map(self._rules.possible, one.path)))
        some = list(islice(possible, max(self._walks_left // 2, 0)))
        if len(some) > _LIKELIEST:
            self._walks_left -= len(some)
            ahead, sketch_s = self.plan.ahead, self._candidates.sketch_s
            some.sort(key=lambda one: sketch_s(one.path, one.layers, one.micro_batches, ahead))
        yield from self._changed(some[:_LIKELIEST])

    def _changed(self, changes: Iterable[_Change]) -> Iterator[Neighbour]:
        """As far ahead as the plan; where that does not fit, also as far ahead as does."""
        for change in changes:
            for ahead in (self.plan.ahead, *(one for one in reversed(AHEAD) if one < self.plan.ahead)):
                made = self._candidates.whole(change.path, change.layers, change.micro_batches, ahead)
                if made is None:
                    break
                plan, inside = made
                inside = [self._as_before(stage, one) for stage, one in zip(plan.plans, inside, strict=True)]
                fits = all(one.memory.fits for one in inside)
                if fits or ahead == self.plan.ahead:
                    name = change.name + (f", {counted(ahead, 'forward')} ahead" if ahead != self.plan.ahead else "")
                    yield self._of(name, self._with(plan, inside))
                if fits:
                    break

    def _as_before(self, stage: Plan, found: Inside) -> Inside:
        """``found``, or the plan's own placements of a stage of the same sites where these are better."""
        for own in self.plan.plans:
            if own.cluster.site_names == stage.cluster.site_names:
                layers = resized(own.layers, stage.workload.model.num_moe_layers)
                number, rent = stage.workload.training.micro_batches, self._candidates.rent_usd_per_s
                return min(self._refitted(stage, layers, found.room), found, key=lambda one: one.rank(number, rent))
        return found

    def _refitted(self, stage: Plan, layers: tuple[LayerGroup, ...], room: Room) -> Inside:
        return fitting(stage, merged(layers), room, self._candidates.store)

    def _with(self, plan: PipelinePlan, inside: Sequence[Inside]) -> Costed:
        """With no more layers that compute again than it takes to fit, where that is no slower."""
        found = costed(plan.with_layers([one.layers for one in inside]), inside)
        if not any(group.recompute for one in inside for group in one.layers):
            return found
        self._walks_left -= 1
        return min(least_again(found, self._candidates.store), found, key=lambda one: one.times.step_s)

    def _busy_s(self, stage: int) -> float:
        return self.itself.costed.times.stages[stage].busy_s(self.plan.micro_batches)


def merged(layers: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """The groups, with neighbours as one that differ in nothing but what computes again; nothing does."""
    made = list[LayerGroup]()
    for group in layers:
        kept = group.recomputing(Recompute.NOTHING)
        if made:
            last = made[-1]
            after = {"first_layer": kept.first_layer, "num_layers": kept.num_layers}
            if last.model_copy(update=after) == kept:
                made[-1] = last.model_copy(update={"num_layers": last.num_layers + kept.num_layers})
                continue
        made.append(kept)
    return tuple(made)


def resized(layers: Sequence[LayerGroup], number: int) -> tuple[LayerGroup, ...]:
    """The groups for so many layers in all: the largest group has more, or the last ones are left out."""
    more = number - sum(group.num_layers for group in layers)
    largest = max(range(len(layers)), key=lambda place: layers[place].num_layers)
    made, first = list[LayerGroup](), 0
    for place, group in enumerate(layers):
        wanted = group.num_layers + (more if place == largest and more > 0 else 0)
        mine = min(wanted, number - first)
        if mine > 0:
            made.append(group.model_copy(update={"first_layer": first, "num_layers": mine}))
            first += mine
    return tuple(made)
