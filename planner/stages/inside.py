"""How a pipeline stage places its experts, by itself: with a few placements that need no search, or as the planner does it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, product

import numpy as np

from hybridep.baselines import Baseline, baseline_group
from hybridep.codecs import Wire
from hybridep.errors import HybridEPError
from hybridep.gating import gating
from hybridep.gpus import SiteGpu
from hybridep.placement import LevelChoice, divisors
from hybridep.plan import LayerGroup, PlacedLayers, Plan, Residency
from hybridep.recompute import Recompute, all_again_flops, cheapest_first
from hybridep.serving import ServingGroup
from hybridep.sites import Level
from hybridep.topology import Cluster
from hybridep.traffic import link_bytes, step_traffic
from planner.choose import plan
from planner.constraints import Constraints, Permissions
from planner.domains import layer_group
from planner.goal import FASTEST, Goal
from planner.memory import ACTIVATIONS, LayerLoad, MemoryUse, StepMemory, memory_use, placed_load, step_memory
from planner.price import egress_usd, step_usd
from planner.stages.rules import permitted_group
from planner.staggered import Dense, PassTimes, dense_of, pass_times

_CLEARLY = 1.25
"""Times as many bytes as copies everywhere, from which on a size of domains is not asked for its time: in one of 377 random
stages it would have been less (by 5 %)."""
_LOADS = 2**12
"""Known at a time, of up to 80 kB each (1024 ranks)."""
_SHAPES = (Baseline.EP, Baseline.EP_IN_DC, Baseline.EP_IN_NODE, Baseline.FULL_GATHER)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a stage keeps beside one micro-batch."""

    in_flight: int
    """Micro-batches whose activations it keeps at a time."""
    beside_bytes: float
    """Bytes of each rank for what passes between stages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """What a stage with its placement takes, whatever room there is; each found when it is asked for, since of what takes long
    memory is not asked, nor of what has no room how long it takes."""

    stage: Plan
    layers: tuple[LayerGroup, ...]
    store: Store = field(repr=False)

    @cached_property
    def times(self) -> PassTimes:
        """Of its passes, and of what comes once a step."""
        return pass_times(self.stage.with_layers(*self.layers), self.store.dense_of(self.stage))

    @cached_property
    def egress_usd(self) -> float:
        """Dollars of a step for what leaves the stage's sites for others of them."""
        cluster = self.stage.cluster
        if not cluster.has_egress_prices or cluster.sizes[0] == 1:
            return 0.0
        return egress_usd(cluster, link_bytes(cluster, step_traffic(self.stage.with_layers(*self.layers))))

    @cached_property
    def memory(self) -> StepMemory:
        """Of its ranks."""
        return self.store.memory(self.stage, self.layers)


@dataclass(frozen=True, kw_only=True)
class Inside:
    """A stage's placement, and what it takes."""

    layers: tuple[LayerGroup, ...]
    known: Known
    room: Room

    @property
    def times(self) -> PassTimes:
        """Of its passes, and of what comes once a step."""
        return self.known.times

    @property
    def egress_usd(self) -> float:
        """Dollars of a step for what leaves the stage's sites for others of them."""
        return self.known.egress_usd

    @cached_property
    def memory(self) -> MemoryUse:
        """Of its ranks."""
        return self.known.memory.use(self.room.in_flight, self.room.beside_bytes)

    def value(self, micro_batches: int, rent_usd_per_s: float | None = None) -> float:
        """Seconds of a step; or dollars, with all ranks at that rent."""
        busy_s = self.times.busy_s(micro_batches)
        return busy_s if rent_usd_per_s is None else step_usd(rent_usd_per_s, self.egress_usd, busy_s)

    @property
    def lacking_bytes(self) -> float:
        """Of the fullest rank; none where it fits."""
        return 0.0 if self.memory.fits else self.memory.fullest_bytes - self.memory.capacity_bytes

    def rank(self, micro_batches: int, rent_usd_per_s: float | None = None) -> tuple[float, float]:
        """The smaller the better: what does not fit, then ``value``."""
        return self.lacking_bytes, self.value(micro_batches, rent_usd_per_s)


@dataclass(frozen=True)
class Store:
    """What was found of stages."""

    placed: dict[str, Known] = field(default_factory=dict)
    """By stage and placement."""
    dense: dict[str, Dense] = field(default_factory=dict)
    """By stage."""
    fewest: dict[str, tuple[LayerGroup, ...]] = field(default_factory=dict)
    """By stage, placement and room: with no more layers that compute again than it takes to fit."""
    loads: dict[str, LayerLoad] = field(default_factory=dict)
    """What one layer brings, by stage but for its number of layers, and placement: the last ones asked for."""

    def dense_of(self, stage: Plan) -> Dense:
        """How its dense gradients are reduced."""
        if stage.alike not in self.dense:
            self.dense[stage.alike] = dense_of(stage)
        return self.dense[stage.alike]

    def memory(self, stage: Plan, layers: tuple[LayerGroup, ...]) -> StepMemory:
        """Of the stage with these placements."""
        return step_memory(stage.with_layers(*layers), None if stage.popularity else partial(self._load, stage.alike_by_layer))

    def _load(self, alike: str, plan: Plan, layers: PlacedLayers) -> LayerLoad:
        one = layers.group.model_copy(update={"first_layer": 0, "num_layers": 1, "recompute": Recompute.NOTHING})
        key = f"{alike} {one}"
        if key not in self.loads:
            if len(self.loads) >= _LOADS:
                del self.loads[next(iter(self.loads))]
            self.loads[key] = placed_load(plan, layers)
        return self.loads[key]


def placed(stage: Plan, layers: tuple[LayerGroup, ...], room: Room, store: Store | None = None) -> Inside:
    """The stage with these placements in place of its own. ``store``: what was found before, and is now."""
    store, key = store or Store(), f"{stage.alike} {layers}"
    if key not in store.placed:
        store.placed[key] = Known(stage=stage, layers=layers, store=store)
    return Inside(layers=layers, known=store.placed[key], room=room)


def without_search(
    stage: Plan,
    room: Room,
    rent_usd_per_s: float | None = None,
    store: Store | None = None,
    allowed: Permissions | None = None,
) -> Inside:
    """The best of a few placements by `Inside.rank`, which compute again in backward where memory asks for that: the one that
    comes nearest to fitting, if none does. ``allowed``: what rules leave possible."""
    number, store, every = stage.workload.training.micro_batches, store or Store(), list[Inside]()

    def value(one: Inside) -> float:
        return one.value(number, rent_usd_per_s)

    choices: Iterable[list[LayerGroup]] = _placements(stage)
    if allowed is not None:
        # What rules leave of copies everywhere may let tokens travel after all.
        experts = stage.workload.model.num_experts
        choices = [[permitted_group(one, stage.cluster, experts, allowed) for groups in choices for one in groups]]
    for groups in choices:
        every += [placed(stage, (group,), room, store) for group in groups]
        best = min(every, key=value)
        if not best.memory.fits:
            every += [
                placed(stage, (group.recomputing(again),), room, store)
                for again in cheapest_first(stage.workload)
                for group in groups
            ]
            fitting = [one for one in every if one.memory.fits]
            if not fitting:
                continue
            best = min(fitting, key=value)
        return best
    for group in _further(stage):
        if allowed is not None:
            group = permitted_group(group, stage.cluster, stage.workload.model.num_experts, allowed)
        ways = ((group.recomputing(again),) for again in cheapest_first(stage.workload))
        every += [placed(stage, way, room, store) for way in islice((way for way in ways if _fits(stage, way, room, store)), 1)]
    least = min(one.lacking_bytes for one in every)
    return min((one for one in every if one.lacking_bytes == least), key=value)


def fitting(stage: Plan, layers: tuple[LayerGroup, ...], room: Room, store: Store) -> Inside:
    """With these placements, which compute again in backward only what it takes to fit."""
    for again in (Recompute.NOTHING, *cheapest_first(stage.workload)):
        found = placed(stage, tuple(group.recomputing(again) for group in layers), room, store)
        if found.memory.fits:
            break
    return found


def with_fewest_again(stage: Plan, inside: Inside, store: Store) -> Inside:
    """What was found of a stage, where all layers compute the same again, in no more of them than it takes to fit."""
    group, *others = inside.layers
    if others or not group.recompute:
        return inside
    key = f"{stage.alike} {inside.layers} {inside.room}"
    if key not in store.fewest:
        store.fewest[key] = _fewest_again(stage, group, inside.room, store)
    fewest = store.fewest[key]
    return inside if fewest == inside.layers else placed(stage, fewest, inside.room, store)


def _fewest_again(stage: Plan, group: LayerGroup, room: Room, store: Store) -> tuple[LayerGroup, ...]:
    """With as many layers as possible that compute less again: of all such mixtures of two kinds that fit the one that takes
    least; the group itself if none does. Those that compute more come first."""
    number, costs = group.num_layers, {one: all_again_flops(stage.workload, one) for one in cheapest_first(stage.workload)}
    costs = {Recompute.NOTHING: 0.0} | {one: flops for one, flops in costs.items() if flops < costs[group.recompute]}
    best: tuple[LayerGroup, ...] = (group,)
    least = number * all_again_flops(stage.workload, group.recompute)
    for less, flops in costs.items():

        def mixture(again: int, less: Recompute = less) -> tuple[LayerGroup, ...]:
            first, rest = ({"num_layers": again}, {"first_layer": again, "num_layers": number - again, "recompute": less})
            return group.model_copy(update=first), group.model_copy(update=rest)

        again = 1 + bisect_left(range(1, number), True, key=lambda again: _fits(stage, mixture(again), room, store))
        value = again * all_again_flops(stage.workload, group.recompute) + (number - again) * flops
        if again < number and value < least:
            best, least = mixture(again), value
    return best


def _fits(stage: Plan, layers: tuple[LayerGroup, ...], room: Room, store: Store) -> bool:
    return store.memory(stage, layers).use(room.in_flight, room.beside_bytes).fits


def layers_in_room(one: Plan, two: Plan, room: Room, recompute: Recompute, store: Store) -> int:
    """How many layers with experts a stage has room for, in whatever placement takes least, where all layers ``recompute`` so;
    ``one``, ``two``: with so many."""
    most = 0.0
    both = (chain(*_placements(stage), _further(stage)) for stage in (one, two))
    for first, second in zip(*both, strict=True):
        used = [
            store.memory(stage, (group.recomputing(recompute),)).use(room.in_flight, room.beside_bytes)
            for stage, group in ((one, first), (two, second))
        ]
        if used[0].fits:
            each_bytes = used[1].fullest_bytes - used[0].fullest_bytes
            most = max(most, 1 + (used[0].capacity_bytes - used[0].fullest_bytes) / each_bytes)
    return int(most)


def searched(
    stage: Plan, room: Room, *, solver: str, time_limit_s: float, goal: Goal = FASTEST, constraints: Constraints | None = None
) -> Inside | None:
    """What the planner makes of the stage; None where that ends without a plan, or with one that does not fit."""
    kept_bytes = memory_use(stage).parts_bytes.get(ACTIVATIONS, 0.0) * (room.in_flight - 1) + room.beside_bytes
    try:
        left = with_less_memory(stage.cluster, kept_bytes)
        # A stage whose ranks and bytes cost nothing has no price to make small.
        own = goal if left.has_prices else FASTEST
        made = plan(
            left,
            stage.workload,
            solver=solver,
            time_limit_s=time_limit_s,
            schedule=stage.schedule,
            popularity=stage.popularity,
            codecs=stage.codecs,
            goal=own,
            constraints=constraints,
        )
    except HybridEPError:
        return None
    found = placed(stage, made.layers, room)
    return found if found.memory.fits else None


def of_alike(inside: Inside, stage: Plan, other: Plan) -> Inside:
    """What was found of ``other`` in terms of the sites of ``stage``, which is alike (``Plan.alike``)."""
    names = dict(zip(other.cluster.site_names, stage.cluster.site_names, strict=True))
    if all(name == mine for name, mine in names.items()):
        return inside
    layers = []
    for group in inside.layers:
        serving = tuple(
            ServingGroup(
                sites=tuple(names[name] for name in part.sites),
                holders={names[name]: experts for name, experts in part.holders.items()},
            )
            for part in group.serving
        )
        layers.append(group.model_copy(update={"serving": serving}))
    return replace(inside, layers=tuple(layers))


def with_less_memory(cluster: Cluster, less_bytes: float) -> Cluster:
    """The cluster with so much less for each rank, though not less than nothing."""
    least = 1.0
    gpu = cluster.gpu.model_copy(update={"memory": max(cluster.gpu.memory - less_bytes, least)})
    sites = []
    for site in cluster.sites:
        if isinstance(site.gpu, SiteGpu) and site.gpu.memory is not None:
            own = site.gpu.model_copy(update={"memory": max(site.gpu.memory - less_bytes, least)})
            site = site.model_copy(update={"gpu": own})
        sites.append(site)
    return cluster.model_copy(update={"gpu": gpu, "sites": tuple(sites)})


def _placements(stage: Plan) -> Iterator[list[LayerGroup]]:
    """The baselines; and domains of some of the sites, with expert parallelism inside each. Between several sites those with the
    fewest bytes on a site's links, and copies of all experts everywhere, or the second fewest where those are the same: tokens
    that cross sites wait for each other in every layer, which may take longer than many more bytes. Such copies come first, by
    themselves, where they are clearly the fewest bytes, too."""
    cluster, outer, *inner = stage.cluster, *stage.cluster.levels
    sizes = sorted(divisors(outer.size), key=lambda size: (_bytes_of_site(stage, size), size))
    alone = sizes[0] == outer.size and (
        len(sizes) == 1 or _bytes_of_site(stage, sizes[1]) >= _CLEARLY * _bytes_of_site(stage, sizes[0])
    )
    sizes = sizes[:2] if outer.size in sizes[:2] else [sizes[0], outer.size]
    domains = [
        layer_group(0, stage.workload.model.num_moe_layers, _domain(outer.name, size, inner), Residency.STEP) for size in sizes
    ]
    differing = dict[str, LayerGroup]()
    for group in [*(baseline_group(cluster, stage.workload, one) for one in _SHAPES), *domains]:
        differing.setdefault(str(group.domains), group)
    for some in (sizes[:1], sizes[1:]) if alone else (sizes,):
        yield [group for group in differing.values() if group.domains.get(outer.name, 1) in some]


def _further(stage: Plan) -> Iterator[LayerGroup]:
    """For stages that nothing else fits: domains of every size inside sites, and of no or all sites, with copies of a step or of
    one micro-batch."""
    outer, *inner = stage.cluster.levels
    changes = any(one.experts.is_change for one in stage.level_codecs)  # those need copies that stay
    for residency in (Residency.STEP,) if changes else Residency:
        for sizes in product(sorted({1, outer.size}), *(divisors(level.size) for level in inner)):
            choices = {level.name: LevelChoice(domain_size=size) for level, size in zip((outer, *inner), sizes, strict=True)}
            yield layer_group(0, stage.workload.model.num_moe_layers, choices, residency)


def _bytes_of_site(stage: Plan, size: int) -> float:
    """About what a layer's copies and tokens put on a site's links in a step, in domains of so many sites."""
    model, training, cluster = stage.workload.model, stage.workload.training, stage.cluster
    wire = Wire(workload=stage.workload, codecs=stage.level_codecs[0])
    sites = cluster.sizes[0]
    held = max(round(model.num_experts * size / sites), 1)
    away = np.arange(model.num_experts) >= held
    leave = float(gating(stage.workload).hit(away[None, :])[0])
    tokens = training.tokens * training.micro_batches * cluster.num_gpus / sites
    copied = model.num_experts * (size - 1) / sites
    return copied * (wire.expert_bytes + wire.expert_gradient_bytes) + 4 * tokens * leave * wire.combine_row_bytes


def _domain(outer: str, size: int, inner: Sequence[Level]) -> dict[str, LevelChoice]:
    return {outer: LevelChoice(domain_size=size)} | {level.name: LevelChoice(domain_size=1) for level in inner}
