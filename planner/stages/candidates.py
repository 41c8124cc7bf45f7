"""Pipelines for the search to compare: numbers of stages, sites together and in order, layers, micro-batches, each stage placed
without a search, as far ahead as memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter

import numpy as np

from hybridep.baselines import Baseline, baseline_group
from hybridep.codecs import EXACT, Codecs, Wire
from hybridep.pipeline import PipelinePlan, codecs_inside, of_stage, stage_workload
from hybridep.plan import LayerGroup, Objective, Plan, Schedule
from hybridep.recompute import ALL, Recompute
from hybridep.topology import Cluster, by_themselves
from hybridep.units import counted, format_bytes
from hybridep.workload import Workload
from planner.clock import now_s
from planner.evaluate import MOST_RANKS
from planner.exchange import ExchangeTimes
from planner.goal import Worth
from planner.memory import MemoryUse, memory_knob
from planner.price import step_usd
from planner.sites.grouping import Groups
from planner.stages.batches import BATCHES, MANY_BATCHES, number_about, numbers_about, unevenness
from planner.stages.costs import pipeline_egress_usd, rooms
from planner.stages.inside import Inside, Room, Store, layers_in_room, of_alike, placed, without_search
from planner.stages.kinds import Kinds, kinds_of
from planner.stages.order import groupings, ordered
from planner.stages.rules import StageRules
from planner.stages.schedule import balanced_layers, least_step_s, links_inside
from planner.stages.sketch import OneLayer, Sketches, head_s
from planner.stages.wishes import StageWishes

AHEAD = (1, 2, 3, 4, 6, 8)
"""Forwards that a stage runs ahead for each one behind it: the more, the longer the ways that it does not wait for."""
OFTEN = (2, 4)
"""How far ahead every pipeline is walked through, beside the most that memory allows; further is not always faster, since
activations then share links with more gradients."""
_FAR_APART = 4
"""Numbers of stages that are tried first."""
_APART = 2
"""So many numbers on either side of the best one, between the outer of which others are tried then."""
_ROOMY = Room(in_flight=1, beside_bytes=0.0)
"""For a layer by itself."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A pipeline whose stages are placed without a search, as far ahead as memory allows."""

    plan: PipelinePlan
    inside: tuple[Inside, ...]
    least: Worth
    """What it is worth at best."""

    @property
    def recomputes(self) -> bool:
        """Some stages compute something again in backward."""
        return any(stage.recomputes for stage in self.plan.plans)


@dataclass
class Candidates:
    """Makes pipelines to choose among, of one problem; what is found of a stage is kept."""

    cluster: Cluster
    workload: Workload
    schedule: Schedule
    wishes: StageWishes
    rules: StageRules
    why: str = ""
    """Why the last pipeline that was not possible was not."""
    barred: str = ""
    """Why the last pipeline that rules forbid was not possible."""
    lacking: str = ""
    """What the pipeline that came nearest to fitting lacks."""
    store: Store = field(default_factory=Store)
    """What placements take."""
    _lack: float = math.inf
    _sketches: Sketches | None = None
    _sites: dict[tuple[int, ...], Cluster] = field(default_factory=dict)
    """Sites of a stage -> these by themselves."""
    _stages: dict[tuple[tuple[int, ...], tuple[int, int, int], int], Plan] = field(default_factory=dict)
    """What ``_stage`` made."""
    _in_room: dict[str, int] = field(default_factory=dict)
    """Kind of stage with one layer with experts, its room, and what recomputes -> how many it has room for."""
    _best_inside: dict[str, tuple[Plan, Inside]] = field(default_factory=dict)
    """Kind of stage -> a stage of it, and the best placement found there."""

    def anew(self) -> Candidates:
        """For another search: with all that is known of stages, and of nothing that was not possible."""
        return replace(self, why="", barred="", lacking="", _lack=math.inf)

    @cached_property
    def kinds(self) -> Kinds:
        """Sites that may change places."""
        return kinds_of(self.cluster, ruled=self.wishes.constraints is not None)

    @property
    def reason(self) -> str:
        """Why no pipeline was possible, where none was."""
        return self.lacking or self.barred or self.why or "none was found in time"

    @property
    def rent_usd_per_s(self) -> float | None:
        """Dollars per second of all ranks, where dollars are to be few; else None."""
        return self.cluster.rent_usd_per_s if self.wishes.goal.objective is Objective.DOLLARS else None

    @property
    def _outer(self) -> Codecs:
        """Codecs between sites."""
        return self.wishes.codecs.get(self.cluster.levels[0].name, EXACT)

    @property
    def _step_bytes(self) -> float:
        """Activations of all sequences of a step, from one stage to the next."""
        wire = Wire(workload=self.workload, codecs=self._outer)
        training = self.workload.training
        return float(training.tokens * training.micro_batches * self.cluster.num_gpus * wire.activation_row_bytes)

    def made(
        self, numbers: Sequence[int], left_s: Callable[[], float], first_by_s: float = math.inf, *, tight: bool = False
    ) -> list[Candidate]:
        """While time is ``left_s``: the first of a few numbers of stages that are far apart by factors, and of those about the
        best one; then the others, of the best numbers first. Where none is found that fits with layers that balance stages,
        all again, ``tight``: those that are short of memory have fewer layers; one such is looked for until ``first_by_s``
        (``planner.clock``)."""
        largest = min(self.cluster.sizes[0], self.workload.model.num_moe_layers)
        left, tried, found = [number for number in numbers if 1 <= number <= largest], list[int](), list[Candidate]()
        if not left:
            layers, sites = counted(self.workload.model.num_moe_layers, "layer"), counted(self.cluster.sizes[0], "site")
            wanted = counted(min(numbers, default=2), "stage")
            self.why = f"{wanted} for {sites} and {layers} with experts; plan fewer stages, or none"
        begun: dict[int, Iterator[Candidate]] = {}

        def goes_on() -> bool:
            # Once one lacked memory the others' turn is over with the time: those that fit layers to it come next.
            is_first = not found and (tight or not self.lacking)
            return left_s() > 0 or (is_first and now_s() < first_by_s)

        while (left or begun) and goes_on():
            by_worth = [len(one.plan.stages) for one in sorted(found, key=lambda one: one.least)]
            between = left
            if len(tried) >= _FAR_APART:
                # Up to the second ones on either side: what is good is not all on one side of what is worse.
                below = sorted(number for number in tried if number < by_worth[0])[-_APART:]
                above = sorted(number for number in tried if number > by_worth[0])[:_APART]
                least = below[0] if len(below) == _APART else 0
                most = above[-1] if len(above) == _APART else math.inf
                between = [number for number in left if least < number < most]
            unfinished = [number for number in by_worth if number in begun]
            if unfinished and (not between or (len(tried) >= _FAR_APART and unfinished[0] == by_worth[0])):
                found.extend(begun.pop(unfinished[0]))
                continue
            # One of a number says whether more of it are worth the time.
            number = _farthest(self._even(between or left), tried)
            left.remove(number)
            candidates = self._of_number(number, goes_on, tight=tight)
            if (first := next(candidates, None)) is not None:
                begun[number] = candidates
                # The same sites with fewer layers in first stages, where these would compute again.
                found += [first, *islice(candidates, first.recomputes and not tight)]
                tried.append(number)
        if found or tight or not self.lacking:
            return found
        return self.made(numbers, left_s, first_by_s, tight=True)

    def _even(self, numbers: Sequence[int]) -> list[int]:
        """Numbers of stages that divide the sites, or all where none does: among many sites time is short, and what is even is
        seldom far from the best."""
        return [number for number in numbers if self.cluster.sizes[0] % number == 0] or list(numbers)

    def _of_number(self, stages: int, goes_on: Callable[[], bool], *, tight: bool) -> Iterator[Candidate]:
        """Pipelines of so many stages, each grouping and order of sites with one number of micro-batches, while it
        ``goes_on``. ``tight``: with layers that fit, and in more micro-batches."""
        cluster, step_bytes, seen = self.cluster, self._step_bytes, set[Groups]()
        for near in groupings(cluster, stages, step_bytes / (self.workload.training.micro_batches * stages)):
            groups = self.rules.mended(near)
            if groups is None:
                self.barred = self.rules.why_not(next(group for group in near if not self.rules.possible(group)))
                continue
            ranks = cluster.ranks_per_site * max(len(group) for group in groups)
            if ranks > MOST_RANKS:
                self.why = f"in {stages} stages one has {ranks} ranks, and at most {MOST_RANKS} are planned together"
                continue
            possible = unevenness(self.workload, cluster, groups)
            if not possible:
                self.why = f"in {stages} stages some site's share (sites.*.tokens) of every possible micro-batch is no sequence"
                continue
            choices = numbers_about(possible, stages, (*BATCHES, *(MANY_BATCHES if tight else ())))
            middle = number_about(possible, BATCHES[len(BATCHES) // 2] * stages)
            pace_s = max(self._layer_s(group, middle) for group in groups) * self.workload.model.num_layers / stages
            for way in ordered(cluster, groups, step_bytes / middle, middle, pace_s, self.rules.apart):
                if (path := self.kinds.settled(way)) in seen:
                    continue
                seen.add(path)
                after_s = head_s(cluster, self.workload, path[-1], middle)
                try:
                    layers = self._layers([self._layer_s(group, middle) for group in path], after_s)
                except ValueError as error:
                    self.why = str(error)
                    continue
                about_s = {number: self.soonest_s(path, layers, number) for number in choices}
                # Where the best one does not fit, others may.
                for micro_batches in sorted(choices, key=lambda number: (about_s[number], -number)):
                    if not goes_on():
                        return
                    mine = self._layers_that_fit(path, micro_batches, ALL) if tight else layers
                    candidate = None if mine is None else self.of(path, mine, micro_batches)
                    if candidate is not None:
                        yield candidate
                        if candidate.recomputes and not tight:
                            fewer = self._layers_that_fit(path, micro_batches, Recompute.NOTHING)
                            candidate = None if fewer is None else self.of(path, fewer, micro_batches)
                            if candidate is not None:
                                yield candidate
                        break

    def _layers(self, layer_s: Sequence[float], head_s: float, most: Sequence[int] | None = None) -> list[int]:
        """[stages]: layers of each, in proportion to how fast it is, and no more than ``most``. Raises ValueError where there are
        too few, or too many."""
        model, last = self.workload.model, len(layer_s) - 1
        least = [1 + model.num_dense_layers * (stage == 0) for stage in range(len(layer_s))]
        return balanced_layers(
            layer_s, [head_s * (stage == last) for stage in range(len(layer_s))], model.num_layers, least, most
        )

    def _layer_s(self, group: Sequence[int], micro_batches: int) -> float:
        """Seconds of one layer with experts on these sites for a micro-batch, with a share of what it takes once a step."""
        return self._one_layer(group, micro_batches).times.busy_s(micro_batches) / micro_batches

    def soonest_s(self, path: Groups, layers: Sequence[int], micro_batches: int) -> float:
        """About how long a step of this pipeline takes, little or far ahead, whichever is faster."""
        return min(self.sketch_s(path, layers, micro_batches, ahead) for ahead in (*OFTEN, AHEAD[-1]))

    def sketch_s(self, path: Groups, layers: Sequence[int], micro_batches: int, ahead: int) -> float:
        """About how long a step of this pipeline takes (``planner.stages.sketch``)."""
        if self._sketches is None:
            coding = self.cluster.gpu.coding
            self._sketches = Sketches(
                cluster=self.cluster,
                workload=self.workload,
                network=ExchangeTimes(cluster=self.cluster, streams=self.schedule.streams),
                step_bytes=self._step_bytes,
                speed=None if coding is None else coding.tokens.get(self._outer.activations),
                one_layer=self._layer_and_links,
            )
        return self._sketches.step_s(path, tuple(layers), micro_batches, ahead)

    def _layer_and_links(self, group: tuple[int, ...], micro_batches: int, like: OneLayer | None) -> OneLayer:
        if like is None:
            inside = self._one_layer(group, micro_batches)
        else:
            inside = placed(self._layer_plan(group, micro_batches), like.layers, _ROOMY, self.store)
        times = inside.times
        own = self._sites[tuple(sorted(group))]
        return OneLayer(inside.layers, times, links_inside(self.cluster, np.array(sorted(group)), own, times))

    def _one_layer(self, group: Sequence[int], micro_batches: int) -> Inside:
        return self._without_search(self._layer_plan(group, micro_batches), _ROOMY)

    def _layer_plan(self, group: Sequence[int], micro_batches: int) -> Plan:
        return self._stage(group, (1, self.workload.model.num_dense_layers, 1), micro_batches)

    def layers(self, path: Groups, micro_batches: int, most: Sequence[int] | None = None) -> list[int] | None:
        """Layers that suit these sites in the stages, no more than ``most`` in each; None where that is not possible."""
        if not all(self.rules.possible(group) for group in path):
            return None
        try:
            layer_s = [self._layer_s(group, micro_batches) for group in path]
            return self._layers(layer_s, head_s(self.cluster, self.workload, path[-1], micro_batches), most)
        except ValueError:
            return None

    def of(self, path: Groups, layers: Sequence[int], micro_batches: int) -> Candidate | None:
        """With these layers; None where it is not possible or does not fit."""
        plan = self._pipeline(path, layers, micro_batches)
        return None if plan is None else self._candidate(plan, [self._one_layer(group, micro_batches) for group in path])

    def whole(
        self, path: Groups, layers: Sequence[int], micro_batches: int, ahead: int
    ) -> tuple[PipelinePlan, list[Inside]] | None:
        """With these layers, so far ahead, and with placements for its stages, whether or not it fits and keeps the rules between
        them; None where it is not possible."""
        possible = all(self.rules.possible(group) for group in path)
        plan = self._built(path, layers, micro_batches) if possible else None
        if plan is None:
            return None
        plan = plan.running_ahead(ahead)
        return plan, self._inside(plan, [self._one_layer(group, micro_batches) for group in path])

    def _pipeline(self, path: Groups, layers: Sequence[int], micro_batches: int) -> PipelinePlan | None:
        plan = self._built(path, layers, micro_batches)
        if plan is not None and not self.rules.passes(plan):
            rules = ", ".join(map(repr, self.rules.of_links))
            self.barred = f"in {len(path)} stages no order was found in which none passes tokens where rules ({rules}) forbid it"
            return None
        return plan

    def _built(self, path: Groups, layers: Sequence[int], micro_batches: int) -> PipelinePlan | None:
        try:
            own = [
                self._stage(group, (number, sum(layers[:number]), mine), micro_batches)
                for number, (group, mine) in enumerate(zip(path, layers, strict=True))
            ]
            return PipelinePlan.of_stages(
                own,
                [stage.cluster.site_names for stage in own],
                cluster=self.cluster,
                workload=self.workload,
                micro_batches=micro_batches,
                popularity=self.wishes.popularity,
                codecs=dict(self.wishes.codecs),
                schedule=self.schedule,
            )
        except ValueError as error:
            self.why = str(error)
            return None

    def _candidate(self, plan: PipelinePlan, alone: Sequence[Inside]) -> Candidate | None:
        """As far ahead as memory allows; None where it does not fit. ``alone``: [stages] placements of one layer."""
        placed_by = dict[int, list[Inside]]()
        # Where the least takes too much memory nothing else need be asked, nor what is between where there is room for the most.
        for ahead in (AHEAD[0], AHEAD[-1], *AHEAD[1:-1]):
            inside = self._inside(plan.running_ahead(ahead), alone, all_stages=False)
            if _fit(inside):
                placed_by = {ahead: inside}
            if _fit(inside) == (ahead == AHEAD[-1]):
                break
        if not placed_by:
            self._lacks(plan.running_ahead(AHEAD[0]))
            return None
        [(ahead, inside)] = placed_by.items()
        plan = plan.running_ahead(ahead)
        step_s = least_step_s(plan, [one.times for one in inside])
        usd = step_usd(self.cluster.rent_usd_per_s, pipeline_egress_usd(plan, inside), step_s)
        made = plan.with_layers([one.layers for one in inside])
        return Candidate(plan=made, inside=tuple(inside), least=self.wishes.goal.worth(step_s, usd))

    def _layers_that_fit(self, path: Groups, micro_batches: int, recompute: Recompute) -> list[int] | None:
        """[stages]: layers that suit these sites, and take no more memory than they have, where all ``recompute`` so; None where
        there are none. The first stages keep the activations of most micro-batches, so they have fewer layers then."""
        model, last = self.workload.model, len(path) - 1
        layers = self.layers(path, micro_batches)
        plan = None if layers is None else self._pipeline(path, layers, micro_batches)
        if plan is None:
            return None
        most = list[int]()
        for number, (group, room) in enumerate(zip(path, rooms(plan.running_ahead(AHEAD[0])), strict=True)):
            one, two = (1 + more + model.num_dense_layers * (number == 0) for more in range(2))
            places = [(number, model.num_layers - mine if number == last else number * one, mine) for mine in (one, two)]
            try:
                first, second = (self._stage(group, place, micro_batches) for place in places)
            except ValueError:
                return None
            key = f"{first.alike} {room} {recompute}"
            if key not in self._in_room:
                self._in_room[key] = layers_in_room(first, second, room, recompute, self.store)
            most.append(one - 1 + self._in_room[key])
        return self.layers(path, micro_batches, most)

    def _inside(self, plan: PipelinePlan, alone: Sequence[Inside], *, all_stages: bool = True) -> list[Inside]:
        """[stages]: placements; ``alone``: of one layer of each. What suits one layer suits all of a stage, unless memory is
        short. ``all_stages``: or those up to the first that has no room."""
        both = list(zip(plan.plans, rooms(plan), strict=True))
        inside = [
            placed(stage, (_of_all_layers(one, stage),), room, self.store) for (stage, room), one in zip(both, alone, strict=True)
        ]
        if _fit(inside):
            return inside
        inside = []
        for stage, room in both:
            inside.append(self._without_search(stage, room))
            if not all_stages and not inside[-1].memory.fits:
                break
        return inside

    def _lacks(self, plan: PipelinePlan) -> None:
        """Keep what the pipeline that came nearest to fitting lacks."""
        most = list[tuple[float, Plan, MemoryUse]]()
        for stage, room in zip(plan.plans, rooms(plan), strict=True):
            used = self._without_search(stage, room).memory
            most.append((_fullness(used), stage, used))
            if most[-1][0] >= self._lack:
                return
        self._lack, stage, fullest = max(most, key=itemgetter(0))
        self.lacking = (
            f"in {len(most)} stages rank {fullest.fullest_name} needs {format_bytes(fullest.fullest_bytes)} and has "
            f"{format_bytes(fullest.capacity_bytes)}; raise {memory_knob(stage.cluster, fullest.fullest_rank)}, or lower "
            "training.micro_batch_size or sequence_length"
        )

    def _stage(self, group: Sequence[int], place: tuple[int, int, int], micro_batches: int) -> Plan:
        """Number, first layer and layers of a stage, with every token at its experts' homes."""
        sites, (number, first_layer, num_layers) = tuple(sorted(group)), place
        key = sites, place, micro_batches
        if key not in self._stages:
            if sites not in self._sites:
                self._sites[sites] = by_themselves(self.cluster, [self.cluster.site_name(site) for site in sites])
            own = self._sites[sites]
            workload = stage_workload(
                self.workload,
                self.cluster,
                number=number,
                first_layer=first_layer,
                num_layers=num_layers,
                sites=own,
                micro_batches=micro_batches,
            )
            self._stages[key] = Plan(
                cluster=own,
                workload=workload,
                layers=(baseline_group(own, workload, Baseline.EP),),
                popularity=of_stage(self.wishes.popularity, workload),
                schedule=self.schedule,
                codecs=codecs_inside(self.wishes.codecs),
            )
        return self._stages[key]

    def _without_search(self, stage: Plan, room: Room) -> Inside:
        key = f"{stage.alike} {room} {self.rules.among(stage.cluster)}"
        if key not in self._best_inside:
            allowed = self.rules.permitted(stage.cluster)
            self._best_inside[key] = stage, without_search(stage, room, self.rent_usd_per_s, self.store, allowed)
        other, found = self._best_inside[key]
        return of_alike(found, stage, other)


def _of_all_layers(one: Inside, stage: Plan) -> LayerGroup:
    """The placement of a single layer, for all of a stage's."""
    return one.layers[0].model_copy(update={"num_layers": stage.workload.model.num_moe_layers})


def _farthest(left: Sequence[int], tried: Sequence[int]) -> int:
    """The number in the middle, by factors, then the farthest from all before."""
    if not tried:
        middle = math.sqrt(min(left) * max(left))
        return min(left, key=lambda number: (abs(math.log(number / middle)), number))
    return max(left, key=lambda number: (min(abs(math.log(number / one)) for one in tried), number))


def _fit(inside: Sequence[Inside]) -> bool:
    return all(one.memory.fits for one in inside)


def _fullness(use: MemoryUse) -> float:
    return use.fullest_bytes / use.capacity_bytes
