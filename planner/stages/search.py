"""The search for a pipeline plan: how many stages, which sites in each and in what order, which layers, how many micro-batches,
how far ahead, and a plan inside each stage.

Stages are first costed with placements that need no search inside; those of the best few are then planned as any cluster is. What
is compared is the whole step, walked through (``planner.stages.schedule``), within the memory of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from hybridep.baselines import Baseline, baseline_group
from hybridep.codecs import EXACT, Codecs, Wire
from hybridep.errors import InfeasibleError, UserError
from hybridep.pipeline import (
    PipelinePlan,
    Popularity,
    StagePlan,
    alike,
    check_stageable,
    codecs_inside,
    of_stage,
    possible_micro_batches,
    stage_cluster,
    stage_workload,
)
from hybridep.plan import LayerGroup, Objective, Plan, Schedule
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.units import format_bytes, format_dollars, format_seconds
from hybridep.workload import Workload
from planner.choose import Report
from planner.clock import now_s
from planner.evaluate import MOST_RANKS
from planner.goal import FASTEST, Goal
from planner.memory import MemoryUse
from planner.plans import solver_report
from planner.price import step_usd
from planner.sites.grouping import Groups
from planner.stages.bound import least_s, least_usd
from planner.stages.costs import Costed, costed, pipeline_egress_usd, predicted, rooms, with_layers
from planner.stages.inside import Inside, Known, Room, placed, searched, without_search
from planner.stages.order import groupings, ordered
from planner.stages.schedule import balanced_layers, least_step_s
from planner.streams import with_most

AHEAD = (1, 2, 3, 4, 6, 8)
"""Forwards that a stage runs ahead for each one behind it: the more, the longer the ways that it does not wait for."""
_OFTEN = 2
"""Of these the one with which every pipeline is walked through, beside the most that memory allows; further ahead is not always
faster, since activations then share links with more gradients."""
_WORTH = 1e-3
"""Share of the step that running less far ahead may add."""
_FAR_APART = 4
"""Numbers of stages that are tried first."""
_BATCHES = (1, 2, 4, 8, 16)
"""Micro-batches as a multiple of the stages, about."""
_MOST_BATCHES = 1024
_KEPT = 3
"""Pipelines whose stages are planned by a search."""
_CHANGES = 100
"""Tries to make a pipeline better by sites that change stages, for each of the ``_KEPT`` best numbers of stages."""
_FOUND_BY, _WALKED_BY, _VARIED_BY, _CHANGED_BY = 0.35, 0.5, 0.6, 0.8
"""Shares of the time limit after which no more pipelines are made, walked through, given other micro-batches, and changed."""


def plan_pipeline(
    cluster: Cluster,
    workload: Workload,
    *,
    stages: int | None = None,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
    popularity: Popularity = (),
    codecs: Mapping[str, Codecs] | None = None,
    goal: Goal = FASTEST,
    report: Report | None = None,
) -> PipelinePlan:
    """The best pipeline found, as expected. Arguments and errors as `plan_pipelines`."""
    return plan_pipelines(
        cluster,
        workload,
        stages=stages,
        solver=solver,
        time_limit_s=time_limit_s,
        schedule=schedule,
        popularity=popularity,
        codecs=codecs,
        goal=goal,
        report=report,
    )[0]


def plan_pipelines(
    cluster: Cluster,
    workload: Workload,
    number: int = 1,
    *,
    stages: int | None = None,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
    popularity: Popularity = (),
    codecs: Mapping[str, Codecs] | None = None,
    goal: Goal = FASTEST,
    report: Report | None = None,
) -> list[PipelinePlan]:
    """The best pipelines found in ``stages`` stages, or in any number from 2, with their predictions, the best first: at most
    ``number``, which differ in more than how far ahead they run. Exact but for ``codecs``; for experts that are chosen alike, or
    with this ``popularity``. The best one is the fastest, or what ``goal`` says. The bound is below every pipeline, and says
    little. ``report``: told ("bound" or "plan", seconds) as either is known or improves. On KeyboardInterrupt, once there is a
    plan, the best so far.

    Raises UserError for what stages cannot share, and InfeasibleError where no number of stages is possible, or none fits the
    memory or the budget, and says why.
    """
    goal.require_prices(cluster)
    if popularity and goal.needs_prices:
        raise UserError("prices with measured popularity: searches inside stages know time only; leave one of them out")
    begun_s = now_s()
    try:
        check_stageable(cluster, workload.model)
    except ValueError as error:
        raise UserError(str(error)) from None
    outer = codecs.get(cluster.levels[0].name, EXACT) if codecs else EXACT
    bound_s = least_s(cluster, workload, stages or 2, outer, alike=not popularity)
    told: Report = report or (lambda what, seconds: None)
    told("bound", bound_s)
    schedule = with_most(cluster, schedule)[0] or Schedule()
    codecs = dict(codecs or {})
    search = _Search(cluster, workload, solver, schedule, popularity, codecs, goal, begun_s, time_limit_s, told)
    found = search.run(range(2, cluster.sizes[0] + 1) if stages is None else (stages,), number)
    if goal.overdraft(found[0].step_usd):
        assert goal.budget_usd is not None
        cheapest = f"{format_dollars(found[0].step_usd)} (a step of {format_seconds(found[0].times.step_s)})"
        raise InfeasibleError(
            f"pipeline over {cluster.name}: none was found that costs at most {format_dollars(goal.budget_usd)} per step: the "
            f"cheapest costs {cheapest}; raise --budget"
        )
    took_s, made = now_s() - begun_s, []
    for one in found:
        how = solver_report(
            solver=solver,
            goal=goal,
            objective_s=one.times.step_s,
            bound_s=bound_s,
            cost_usd=one.step_usd,
            bound_usd=least_usd(cluster, workload, bound_s, outer),
            solve_s=took_s,
            proven=False,
        )
        made.append(one.plan.model_copy(update={"prediction": predicted(one), "solver": how, "provenance": provenance()}))
    return made


Worth = tuple[float, float]
"""By what share a step is over the budget, and its seconds or dollars: the smaller the better."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A pipeline whose stages are placed without a search, as far ahead as memory allows."""

    plan: PipelinePlan
    inside: tuple[Inside, ...]
    least: Worth
    """It is no better than that."""


@dataclass
class _Search:
    cluster: Cluster
    workload: Workload
    solver: str
    schedule: Schedule
    popularity: Popularity
    codecs: dict[str, Codecs]
    goal: Goal
    begun_s: float
    time_limit_s: float
    report: Report
    why: str = ""
    """Why the last of what was not possible was not."""
    _lack: float = math.inf
    _lacking: str = ""
    _found: list[Costed] = field(default_factory=list)
    _best_inside: dict[str, Inside] = field(default_factory=dict)
    _known: dict[str, Known] = field(default_factory=dict)
    _searched: dict[str, Inside | None] = field(default_factory=dict)

    def run(self, numbers: Sequence[int], number: int) -> list[Costed]:
        """The best pipelines of so many stages, the fastest first."""
        try:
            self._search(numbers)
        except KeyboardInterrupt:
            if not self._found:
                raise
        every = self._best(len(self._found))
        # What is expected of them errs more between numbers of stages than between pipelines of one.
        of_each = list({len(one.plan.stages): one for one in reversed(every)}.values())
        first = sorted(of_each, key=self._worth)[: max(number // 2, 1)]
        rest = [one for one in every if one not in first][: number - len(first)]
        return [self._least_ahead(one) for one in sorted([*first, *rest], key=self._worth)]

    def _search(self, numbers: Sequence[int]) -> None:
        candidates = self._candidates(numbers)
        if not candidates:
            raise InfeasibleError(
                f"pipeline over {self.cluster.name}: no number of stages is possible; {self._lacking or self.why}"
            )
        for candidate in sorted(candidates, key=lambda one: one.least):
            if self._found and (candidate.least >= min(map(self._worth, self._found)) or self._left_s(_WALKED_BY) < 0):
                break
            self._walk(candidate)
        for candidate in _first_by_number(candidates)[:_KEPT]:
            if all(len(one.plan.stages) != len(candidate.plan.stages) for one in self._found):
                # It cannot be the best, but what sites that change stages make of it can.
                self._walk(candidate)
        for one in self._best():
            self._with_other_batches(one)
        for place, one in enumerate(self._best_by_number()):
            self._improve(one, self.time_limit_s * (_VARIED_BY + (place + 1) / _KEPT * (_CHANGED_BY - _VARIED_BY)))
        for place, one in enumerate(self._best()):
            self._keep(self._refined(one, self._left_s(1.0) / (_KEPT - place)))
        for one in self._best():
            for ahead in AHEAD:
                if ahead != one.plan.ahead:
                    self._keep(self._ahead(one, ahead))

    def _least_ahead(self, best: Costed) -> Costed:
        """The same pipeline as little ahead as is about as fast."""
        same = [one for one in self._found if _but_for_ahead(one.plan) == _but_for_ahead(best.plan)]
        good = [one for one in same if not self._is_better(best, one)]
        return min(good, key=lambda one: (one.plan.ahead, self._worth(one)))

    def _worth(self, one: Costed) -> Worth:
        return self.goal.overdraft(one.step_usd), self.goal.value(one.times.step_s, one.step_usd)

    def _is_better(self, one: Costed, other: Costed) -> bool:
        """By more than ``_WORTH``."""
        (over, value), (others_over, others_value) = self._worth(one), self._worth(other)
        return over < others_over or (over == others_over and value < others_value * (1 - _WORTH))

    @property
    def _rent_usd_per_s(self) -> float | None:
        """Of all ranks, where dollars are to be few."""
        return self.cluster.rent_usd_per_s if self.goal.objective is Objective.DOLLARS else None

    def _with_other_batches(self, found: Costed) -> None:
        """The same stages in other numbers of micro-batches."""
        plan = found.plan
        choices = possible_micro_batches(self.workload, self.cluster, [len(stage.sites) for stage in plan.stages])
        layers = [stage.num_layers for stage in plan.stages]
        for micro_batches in _about(choices, len(plan.stages)):
            if micro_batches == plan.micro_batches or self._left_s(_VARIED_BY) < 0:
                continue
            candidate = self._candidate(self._groups(plan), layers, micro_batches)
            if candidate is not None and candidate.least < min(map(self._worth, self._found)):
                self._walk(candidate)

    def _walk(self, candidate: _Candidate) -> None:
        """As far ahead as memory allows, and less far."""
        self._keep(found := costed(candidate.plan, candidate.inside))
        if candidate.plan.ahead > _OFTEN:
            self._keep(self._ahead(found, _OFTEN))

    def _improve(self, best: Costed, limit_s: float) -> None:
        """Sites and stages change places while that makes the pipeline faster, a number of times, until a time from the start."""
        rng, left, improved = np.random.default_rng(0), _CHANGES, True
        while improved:
            changes = list(_changed(self._groups(best.plan)))
            improved = False
            for place in rng.permutation(len(changes)):
                if not left or now_s() - self.begun_s > limit_s:
                    return
                left -= 1
                found = self._with_change(best, changes[place])
                if found is not None and found.fits and self._is_better(found, best):
                    self._keep(found)
                    best, improved = found, True
                    break

    def _best_by_number(self) -> list[Costed]:
        """Of the best numbers of stages the best pipeline each."""
        kept: dict[int, Costed] = {}
        for one in sorted(self._found, key=self._worth):
            kept.setdefault(len(one.plan.stages), one)
        return list(kept.values())[:_KEPT]

    def _with_change(self, best: Costed, path: Groups) -> Costed | None:
        """The pipeline with other sites in its stages, as far ahead; None where that is not possible or cannot be faster."""
        choices = possible_micro_batches(self.workload, self.cluster, [len(group) for group in path])
        if not choices:
            return None
        micro_batches = min(choices, key=lambda number: (abs(number - best.plan.micro_batches), number))
        try:
            layer_s = [self._layer_s(group, micro_batches) for group in path]
            layers = self._layers(layer_s, self._head_s(path[-1], micro_batches))
        except ValueError:
            return None
        candidate = self._candidate(path, layers, micro_batches)
        if candidate is None or candidate.least >= self._worth(best):
            return None
        found = Costed(plan=candidate.plan, inside=candidate.inside, times=best.times, egress_usd=0.0)
        return self._ahead(found, min(best.plan.ahead, candidate.plan.ahead))

    def _groups(self, plan: PipelinePlan) -> Groups:
        """Sites of each stage by number."""
        number = {self.cluster.site_name(site): site for site in range(self.cluster.sizes[0])}
        return tuple(tuple(sorted(number[name] for name in stage.sites)) for stage in plan.stages)

    def _best(self, number: int = _KEPT) -> list[Costed]:
        """Pipelines that differ in more than how far ahead they run."""
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

    def _ahead(self, found: Costed, ahead: int) -> Costed:
        """The same pipeline in another order."""
        plan = found.plan.model_copy(update={"ahead": ahead})
        inside = []
        for stage, room in zip(plan.plans, rooms(plan), strict=True):
            inside.append(placed(stage, stage.layers, room, self._known))
        return costed(plan, inside)

    def _left_s(self, share: float) -> float:
        """Of such a share of the time limit."""
        return self.begun_s + share * self.time_limit_s - now_s()

    # --- candidates --------------------------------------------------------------------------------------------------

    def _candidates(self, numbers: Sequence[int]) -> list[_Candidate]:
        """Of a few numbers of stages that are far apart by factors, then of those between the best and its neighbours, while
        there is time."""
        largest = min(self.cluster.sizes[0], self.workload.model.num_moe_layers)
        left, tried, found = [number for number in numbers if 1 <= number <= largest], list[int](), list[_Candidate]()
        if not left:
            layers = self.workload.model.num_moe_layers
            self.why = f"{min(numbers, default=2)} stages for {self.cluster.sizes[0]} sites and {layers} layers with experts"
        while left and (not found or self._left_s(_FOUND_BY) > 0):
            near = left
            if len(tried) >= _FAR_APART:
                best = len(min(found, key=lambda one: one.least).plan.stages)
                least = max([number for number in tried if number < best], default=0)
                most = min([number for number in tried if number > best], default=math.inf)
                near = [number for number in left if least < number < most] or left
            number = _farthest(near, tried)
            left.remove(number)
            before = len(found)
            for candidate in self._of_number(number):
                found.append(candidate)
                if self._left_s(_FOUND_BY) < 0:
                    break
            if len(found) > before:
                tried.append(number)
        return found

    def _of_number(self, stages: int) -> Iterator[_Candidate]:
        """With one number of micro-batches each."""
        cluster, training = self.cluster, self.workload.training
        inside = cluster.num_gpus // cluster.sizes[0]
        wire = Wire(workload=self.workload, codecs=self.codecs.get(cluster.levels[0].name, EXACT))
        step_bytes = float(training.tokens * training.micro_batches * cluster.num_gpus * wire.activation_row_bytes)
        for groups in groupings(cluster, stages, step_bytes / (training.micro_batches * stages)):
            ranks = inside * max(len(group) for group in groups)
            if ranks > MOST_RANKS:
                self.why = f"in {stages} stages one has {ranks} ranks, and at most {MOST_RANKS} are planned together"
                continue
            choices = _about(possible_micro_batches(self.workload, cluster, [len(group) for group in groups]), stages)
            if not choices:
                sizes = ", ".join(str(size) for size in sorted({len(group) for group in groups}))
                self.why = f"stages of {sizes} sites cannot share the sequences of a step evenly"
                continue
            middle = choices[len(choices) // 2]
            layer_s = {group: self._layer_s(group, middle) for group in groups}
            pace_s = max(layer_s.values()) * self.workload.model.num_layers / stages
            for path in ordered(cluster, groups, step_bytes / middle, middle, pace_s):
                try:
                    layers = self._layers([layer_s[group] for group in path], self._head_s(path[-1], middle))
                except ValueError as error:
                    self.why = str(error)
                    continue
                # Where that does not fit, the smallest micro-batches may.
                for micro_batches in (middle, *(number for number in choices[::-1] if number != middle)):
                    if (candidate := self._candidate(path, layers, micro_batches)) is not None:
                        yield candidate
                        break

    def _layers(self, layer_s: Sequence[float], head_s: float) -> list[int]:
        """Of each stage; ValueError where there are too few."""
        model, last = self.workload.model, len(layer_s) - 1
        least = [1 + model.num_dense_layers * (stage == 0) for stage in range(len(layer_s))]
        return balanced_layers(layer_s, [head_s * (stage == last) for stage in range(len(layer_s))], model.num_layers, least)

    def _layer_s(self, group: Sequence[int], micro_batches: int) -> float:
        """Of one layer with experts on these sites for a micro-batch, with its share of what the layer takes once a step."""
        return self._one_layer(group, micro_batches).times.busy_s(micro_batches) / micro_batches

    def _one_layer(self, group: Sequence[int], micro_batches: int) -> Inside:
        plan = self._stage(group, (1, self.workload.model.num_dense_layers, 1), micro_batches)
        return self._without_search(plan, Room(in_flight=1, beside_bytes=0.0))

    def _head_s(self, group: Sequence[int], micro_batches: int) -> float:
        """Of the output projection for a micro-batch, likewise."""
        model, training = self.workload.model, self.workload.training
        tokens = training.tokens * training.micro_batches * self.cluster.num_gpus / micro_batches
        inside = self.cluster.num_gpus // self.cluster.sizes[0]
        per_s = sum(self.cluster.site_gpus[site].throughput for site in group) * inside
        return float(3 * 2 * tokens * model.vocab_size * model.hidden_size / per_s)

    def _candidate(self, path: Groups, layers: Sequence[int], micro_batches: int) -> _Candidate | None:
        """None where it is not possible or does not fit."""
        stages = []
        for number, (group, mine) in enumerate(zip(path, layers, strict=True)):
            ep = self._stage(group, (number, sum(layers[:number]), mine), micro_batches)
            names = tuple(self.cluster.site_name(site) for site in sorted(group))
            stages.append(StagePlan(sites=names, num_layers=mine, layers=ep.layers))
        try:
            plan = PipelinePlan(
                cluster=self.cluster,
                workload=self.workload,
                micro_batches=micro_batches,
                stages=tuple(stages),
                popularity=self.popularity,
                codecs=self.codecs,
                schedule=self.schedule,
            )
        except ValueError as error:
            self.why = str(error)
            return None
        inside: list[Inside] = []
        alone = [self._one_layer(group, micro_batches) for group in path]
        for ahead in reversed(AHEAD):
            plan = plan.model_copy(update={"ahead": ahead})
            both = list(zip(plan.plans, rooms(plan), strict=True))
            # What suits one layer suits all of a stage, unless memory is short.
            inside = [
                placed(stage, (_of_all_layers(one, stage),), room, self._known)
                for (stage, room), one in zip(both, alone, strict=True)
            ]
            if not all(one.memory.fits for one in inside):
                inside = [self._without_search(stage, room) for stage, room in both]
            if all(one.memory.fits for one in inside):
                step_s = least_step_s(plan, [one.times for one in inside])
                usd = step_usd(self.cluster.rent_usd_per_s, pipeline_egress_usd(plan, inside), step_s)
                least = self.goal.overdraft(usd), self.goal.value(step_s, usd)
                return _Candidate(plan=with_layers(plan, inside), inside=tuple(inside), least=least)
        fullest = max((one.memory for one in inside), key=_fullness)
        if _fullness(fullest) < self._lack:
            self._lack = _fullness(fullest)
            self._lacking = (
                f"in {len(inside)} stages rank {fullest.fullest_name} of one needs {format_bytes(fullest.fullest_bytes)} and has "
                f"{format_bytes(fullest.capacity_bytes)}; raise gpu.memory, or lower training.micro_batch_size or sequence_length"
            )
        return None

    # --- stages ------------------------------------------------------------------------------------------------------

    def _stage(self, group: Sequence[int], place: tuple[int, int, int], micro_batches: int) -> Plan:
        """Number, first layer and layers of a stage, with every token at its experts' homes."""
        number, first_layer, num_layers = place
        sites = stage_cluster(self.cluster, [self.cluster.site_name(site) for site in group])
        workload = stage_workload(
            self.workload,
            self.cluster,
            number=number,
            first_layer=first_layer,
            num_layers=num_layers,
            num_sites=len(group),
            micro_batches=micro_batches,
        )
        layers = (baseline_group(sites, workload, Baseline.EP),)
        return Plan(
            cluster=sites,
            workload=workload,
            layers=layers,
            popularity=of_stage(self.popularity, workload),
            schedule=self.schedule,
            codecs=codecs_inside(self.codecs),
        )

    def _without_search(self, stage: Plan, room: Room) -> Inside:
        key = f"{alike(stage)} {room}"
        if key not in self._best_inside:
            self._best_inside[key] = without_search(stage, room, self._rent_usd_per_s, self._known)
        return self._best_inside[key]

    def _refined(self, found: Costed, time_limit_s: float) -> Costed:
        """The same with every stage as the planner does it, where that is faster and fits."""
        plan, inside = found.plan, list(found.inside)
        both = list(zip(plan.plans, rooms(plan), strict=True))
        until_s, different = now_s() + time_limit_s, {f"{alike(stage)} {room}" for stage, room in both}
        for number, (stage, room) in enumerate(both):
            key = f"{alike(stage)} {room}"
            if key not in self._searched and now_s() < until_s:
                limit_s = time_limit_s / len(different)
                goal = Goal(objective=self.goal.objective)
                self._searched[key] = searched(stage, room, solver=self.solver, time_limit_s=limit_s, goal=goal)
            other, batches, rent = self._searched.get(key), plan.micro_batches, self._rent_usd_per_s
            if other is not None and other.rank(batches, rent) < inside[number].rank(batches, rent):
                inside[number] = other
        return costed(with_layers(plan, inside), inside)


def _of_all_layers(one: Inside, stage: Plan) -> LayerGroup:
    """The placement of a single layer, for all of a stage's."""
    return one.layers[0].model_copy(update={"num_layers": stage.workload.model.num_moe_layers})


def _but_for_ahead(plan: PipelinePlan) -> str:
    """The same for pipelines of one search that differ in nothing else."""
    return f"{plan.micro_batches} {plan.stages}"


def _first_by_number(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Of each number of stages the one that could take least, the best first."""
    kept: dict[int, _Candidate] = {}
    for one in sorted(candidates, key=lambda one: one.least):
        kept.setdefault(len(one.plan.stages), one)
    return list(kept.values())


def _changed(groups: Groups) -> Iterator[Groups]:
    """Two sites of different stages change places, or one goes to another stage; stages in a row are turned round."""
    sites = [(stage, site) for stage, group in enumerate(groups) for site in group]

    def with_sites(of: dict[int, tuple[int, ...]]) -> Groups:
        return tuple(tuple(sorted(of.get(stage, group))) for stage, group in enumerate(groups))

    for (stage, site), (other, another) in combinations(sites, 2):
        if stage != other:
            yield with_sites(
                {
                    stage: (*(one for one in groups[stage] if one != site), another),
                    other: (*(one for one in groups[other] if one != another), site),
                }
            )
    for stage, site in sites:
        for other in range(len(groups)):
            if other != stage and len(groups[stage]) > 1:
                yield with_sites({stage: tuple(one for one in groups[stage] if one != site), other: (*groups[other], site)})
    for first, last in combinations(range(len(groups)), 2):
        yield (*groups[:first], *groups[first : last + 1][::-1], *groups[last + 1 :])


def _farthest(left: Sequence[int], tried: Sequence[int]) -> int:
    """The number in the middle, by factors, then the farthest from all before."""
    if not tried:
        middle = math.sqrt(min(left) * max(left))
        return min(left, key=lambda number: (abs(math.log(number / middle)), number))
    return max(left, key=lambda number: (min(abs(math.log(number / one)) for one in tried), number))


def _fullness(use: MemoryUse) -> float:
    return use.fullest_bytes / use.capacity_bytes


def _about(choices: Sequence[int], stages: int) -> list[int]:
    """Of the possible numbers of micro-batches those nearest to ``_BATCHES`` times the stages."""
    possible = [number for number in choices if number <= _MOST_BATCHES]
    return sorted({min(possible, key=lambda number: (abs(number - times * stages), number)) for times in _BATCHES if possible})
