"""The Plan: what the planner writes and the simulator and the runtime read. Nothing passes between them but plans, and
pipelines of them (``hybridep.pipeline``).

A plan file carries the cluster and the workload it was made for, so that it can be simulated and trained by itself, and
so that using it with another cluster is an error that names the differences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from hybridep.arrays import IntArray
from hybridep.codecs import Codecs, level_codecs
from hybridep.config import Duration, Price, Strict, build, write_yaml
from hybridep.errors import PlacementError, PlanMismatchError
from hybridep.gating import Gating, gating
from hybridep.homes import home_table
from hybridep.placement import LevelChoice, Placement, place
from hybridep.recompute import Recompute, RecomputeNames
from hybridep.serving import ServingGroup, serving_table
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.workload import Workload

SCHEMA_VERSION = 1

MOST_STREAMS = 8
"""Connections per pair of ranks that a planner chooses at most, and a probe tries. The transport opens as many between any two
ranks, whatever their levels."""
STREAMS_ALLOWED, CHUNKS_ALLOWED = 64, 1024
"""Connections and parts that a plan may ask for: more are a slip, of which ranks would run out of sockets or time."""


class Status(Enum):
    """How the search for the plan ended; a closed list."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NO_SOLUTION = "no_solution"


class Objective(Enum):
    """What a plan makes small."""

    TIME = "time"
    DOLLARS = "dollars"


class Residency(Enum):
    """How long copies of experts live."""

    STEP = "step"
    """Gathered once per optimizer step; their gradients are returned once."""
    MICROBATCH = "microbatch"
    """Gathered for a block's forward, freed, gathered again for its backward; gradients returned at once. Least memory."""


class LayerGroup(Strict):
    """The placement of consecutive MoE layers."""

    first_layer: int = Field(ge=0)
    num_layers: int = Field(ge=1)
    domains: dict[str, int]
    """Level name -> expert-domain size."""
    migration: dict[str, float]
    """Level name -> share of each home's experts that the domain's members copy."""
    residency: Residency = Residency.STEP
    recompute: RecomputeNames = Recompute.NOTHING
    serving: tuple[ServingGroup, ...] = ()
    """In place of a domain size for the outermost level: which site computes which experts for tokens of which sites."""
    homes: dict[str, str] = Field(default_factory=dict)
    """Site or worker -> experts that live there (see ``hybridep.homes``); blocks as the cluster's sites have them when empty."""

    def placement(self, cluster: Cluster, num_experts: int, popularity: Sequence[float] | None = None) -> Placement:
        """Its serving tables on a cluster; partial migration copies each home's most popular experts. Raises PlacementError."""
        outer = serving_table(cluster, num_experts, self.serving) if self.serving else None
        home = home_table(cluster, num_experts, self.homes)
        return place(cluster, num_experts, self.choices, hotness=popularity, outer=outer, home=home)

    def recomputing(self, recompute: Recompute) -> LayerGroup:
        """The same placement, of which this computes again."""
        return self.model_copy(update={"recompute": recompute})

    @property
    def choices(self) -> dict[str, LevelChoice]:
        """Domain size and ratio by level, as ``placement.place`` takes them."""
        return {
            name: LevelChoice(domain_size=size, migration_ratio=self.migration.get(name, 1.0))
            for name, size in self.domains.items()
        }


class Schedule(Strict):
    """When transfers run."""

    overlap: bool = True
    """Copies travel beside computation; if not, computation waits for them."""
    prefetch: int = Field(default=0, ge=0)
    """0: a block's gather runs beside its pre-expert forward, its gradient return beside its pre-expert backward, and neither
    beside tokens. d > 0: a block's gather may set out with the block d before it and must be there before its experts
    compute; gradients return until the end of the step; copies give way to tokens."""

    chunks: int = Field(default=1, ge=1, le=CHUNKS_ALLOWED)
    """Parts in which a rank's tokens of a micro-batch travel: what has come is computed while others are on their way."""

    streams: dict[str, int] = Field(default_factory=dict)
    """Level name -> connections per pair of ranks, each of which has at most a window of bytes under way; one where absent."""

    @model_validator(mode="after")
    def _consistent(self) -> Schedule:
        for name, number in self.streams.items():
            if number < 1:
                raise ValueError(f"streams.{name}: {number} must be at least 1")
            if number > STREAMS_ALLOWED:
                raise ValueError(f"streams.{name}: {number} connections per pair of ranks; at most {STREAMS_ALLOWED} are opened")
        if self.prefetch and not self.overlap:
            raise ValueError(f"prefetch: {self.prefetch} needs overlap, which is off")
        if self.prefetch and self.chunks > 1:
            raise ValueError(f"chunks: {self.chunks} with prefetch {self.prefetch}; only one of them can be")
        return self


class Prediction(Strict):
    """What the cost model expects of one optimizer step."""

    step: Duration
    """Seconds of a step in which every exchange waits for the slowest: what was minimised."""
    bound: Duration
    """Lower bound: the busiest link's bytes over its bandwidth, or the computation alone."""
    expected: Duration | None = None
    """Seconds of a step in which ranks that are done go on: what simulations and runs are compared with."""
    parts: dict[str, Duration]
    """Seconds by kind of operation; hidden transfers are counted only as far as they show."""
    wan_bytes: float
    """Bytes of a step between sites, all ranks together."""
    memory_bytes: float
    """Bytes that the fullest rank needs."""
    baselines: dict[str, Duration]
    """Step time of the alternatives, and of nothing else."""
    cost: Price | None = None
    """Dollars of one step: what leaves sites, and all ranks for as long as it takes; absent where nothing has a price."""

    @property
    def expected_s(self) -> float:
        """Seconds of the expected step; of ``step`` in a file that lacks it."""
        return self.step if self.expected is None else self.expected

    @property
    def cost_usd(self) -> float:
        """Dollars of one step, zero where nothing has a price."""
        return self.cost or 0.0


class SolverReport(Strict):
    """How the plan was found."""

    status: Status
    solver: str
    objective: Duration
    bound: Duration
    """Proven: no plan in the searched space is faster, with experts' homes where this one has them."""
    minimised: Objective = Objective.TIME
    budget: Price | None = None
    """Plans were to cost at most this per step; the bound holds for dearer ones, too, where sites differ."""
    cost_bound: Price | None = None
    """Where dollars were minimised. Proven: no plan in the searched space costs less."""
    gap: float = Field(ge=0)
    """(objective - bound) / objective, or the same of the step's cost where dollars were minimised."""
    solve: Duration
    """Wall time of the search."""
    seed: int = 0


class PlacedLayers(NamedTuple):
    """Consecutive MoE layers that are alike."""

    first_layer: int
    num_layers: int
    group: LayerGroup
    placement: Placement
    gating: Gating
    """What their tokens are expected to choose."""


Popularity = tuple[tuple[float, ...], ...]
"""For each MoE layer the share of each expert in all choices of the gate."""


class PlanFile(Strict):
    """What both kinds of plans have first in their files, and what both can do."""

    schema_version: Literal[1] = 1
    cluster: Cluster
    workload: Workload
    """Its batch is what all ranks together train on in a step, in stages, too."""
    if TYPE_CHECKING:
        # Each kind's own field, which its files have after what they decide.
        prediction: Prediction | None

    @property
    def predicted(self) -> Prediction:
        """``prediction``. Raises ValueError where there is none."""
        if self.prediction is None:
            raise ValueError(f"a plan for {self.workload.name} on {self.cluster.name} without a prediction")
        return self.prediction

    @property
    def digest(self) -> str:
        """Identifies what the plan makes ranks do; prediction and provenance are left out."""
        decided = self.model_dump(mode="json", exclude={"prediction", "solver", "provenance"})
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    def require(self, cluster: Cluster | None, workload: Workload | None, where: str) -> None:
        """Raises PlanMismatchError, which names what differs, when the plan was made for another cluster or workload. It may
        leave sites out: then the others are to be what remains of these (``hybridep.shares.on_sites``)."""
        found: list[str] = []
        if cluster is not None and (names := set(self.cluster.site_names)) < set(cluster.site_names):
            try:
                cluster, workload = on_sites(cluster, workload or self.workload, names)
            except PlacementError as error:
                found.append(f"cluster: plan is for {len(names)} of its sites; {error}")
        for name, mine, other in (("cluster", self.cluster, cluster), ("workload", self.workload, workload)):
            if other is not None:
                found += _differences(name, mine.model_dump(mode="json"), other.model_dump(mode="json"))
        if found:
            raise PlanMismatchError(where, found)

    def with_popularity(self, popularity: Popularity) -> Self:
        """The plan for experts chosen as measured: partial migration then copies the most popular. What was predicted is left
        out. Raises ConfigError for shares that are none."""
        decided = self.model_dump(mode="json", exclude={"prediction", "solver"})
        return build(type(self), decided | {"popularity": popularity}, "plan")

    def save(self, path: Path) -> None:
        """Write as YAML, atomically."""
        write_yaml(path, self.model_dump(mode="json", exclude_none=True))


class Plan(PlanFile):
    """Placement, codecs, schedule and prediction for one cluster and workload."""

    layers: tuple[LayerGroup, ...] = Field(min_length=1)
    """Every MoE layer once, in order."""
    popularity: Popularity = ()
    """How often each expert was measured to be chosen; empty: all alike."""
    codecs: dict[str, Codecs] = Field(default_factory=dict)
    """Level name -> codecs; exact where absent."""
    schedule: Schedule = Schedule()
    prediction: Prediction | None = None
    solver: SolverReport | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        covered = 0
        for group in self.layers:
            if group.first_layer != covered:
                raise ValueError(f"layers: first_layer {group.first_layer} should be {covered}")
            covered += group.num_layers
        if covered != self.workload.model.num_moe_layers:
            raise ValueError(f"layers: {covered} layers are placed, the model has {self.workload.model.num_moe_layers}")
        check_popularity(self.popularity, self.workload)
        if self.schedule.chunks > 1 and self.workload.model.pad_expert_input_to_capacity:
            chunks = self.schedule.chunks
            raise ValueError(
                f"schedule.chunks: {chunks} with pad_expert_input_to_capacity, which pads whole micro-batches; set it to 1"
            )
        levels = [level.name for level in self.cluster.levels]
        for name in self.schedule.streams:
            if name not in levels:
                raise ValueError(f"schedule.streams.{name}: no such level; the cluster has {', '.join(levels)}")
        for name, codecs in self.codecs.items():
            if name not in levels:
                raise ValueError(f"codecs.{name}: no such level; the cluster has {', '.join(levels)}")
            if "activations" in codecs.coded:
                raise ValueError(f"codecs.{name}.activations: pass between pipeline stages, and this plan has none; leave it out")
            if name != levels[0] and (kinds := codecs.lossless):
                raise ValueError(f"codecs.{name}.{kinds[0]}: lossless is for links between sites; give it for {levels[0]}")
            if not copies_last(self.layers, codecs):
                raise ValueError(f"codecs.{name}.experts: {codecs.experts.value} needs copies that stay; set residency: step")
        try:
            _ = self.placements
        except PlacementError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def recomputes(self) -> Recompute:
        """What some layers compute again in backward."""
        return reduce(or_, (group.recompute for group in self.layers))

    @property
    def dense_recompute(self) -> Recompute:
        """What layers without experts do: as the first one with experts."""
        return self.layers[0].recompute

    def with_layers(self, *layers: LayerGroup, workload: Workload | None = None) -> Plan:
        """The plan with other layers, and of another ``workload`` where it is given; without a prediction."""
        return Plan(
            cluster=self.cluster,
            workload=workload or self.workload,
            layers=layers,
            popularity=self.popularity,
            codecs=self.codecs,
            schedule=self.schedule,
            provenance=self.provenance,
        )

    def with_schedule(self, **changes: Any) -> Plan:
        """The plan with another schedule in these respects, unchecked; with the prediction that it had."""
        return self.model_copy(update={"schedule": self.schedule.model_copy(update=changes)})

    @cached_property
    def placed(self) -> tuple[PlacedLayers, ...]:
        """The layer groups with their placement; with measured popularity every layer by itself, since which experts are hot
        differs between layers."""
        experts, found = self.workload.model.num_experts, []
        for number, group in enumerate(self.layers):
            step = 1 if self.popularity else group.num_layers
            for first in range(group.first_layer, group.first_layer + group.num_layers, step):
                popularity = self.popularity[first] if self.popularity else None
                try:
                    placement = group.placement(self.cluster, experts, popularity)
                except PlacementError as error:
                    raise PlacementError(f"layers.{number}.{error}") from None
                found.append(PlacedLayers(first, step, group, placement, gating(self.workload, popularity, self.cluster)))
        return tuple(found)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement of each of ``placed``."""
        return tuple(layers.placement for layers in self.placed)

    @cached_property
    def level_codecs(self) -> tuple[Codecs, ...]:
        """[levels]: codecs, outermost first."""
        return level_codecs([level.name for level in self.cluster.levels], self.codecs)

    @cached_property
    def alike(self) -> str:
        """A text that is equal for pipeline stages' plans that must take the same time, whatever their sites are called."""
        model = self.workload.model
        parts = model.model_copy(update={"part": None}), model.has_embedding, model.has_head
        return repr((self._alike_parts, parts, self.layers))

    @cached_property
    def alike_by_layer(self) -> str:
        """The same for stages of which each layer with experts is alike if placed alike: they may have other numbers of layers,
        and other placements."""
        one_layer = self.workload.model.model_copy(update={"part": None, "num_layers": 1, "num_dense_layers": 0})
        return repr((self._alike_parts, one_layer))

    @property
    def _alike_parts(self) -> tuple[object, ...]:
        cluster, sites = self.cluster, self.cluster.sites
        if len(sites) == 1:
            sites = (
                sites[0].model_copy(
                    update=dict.fromkeys(("part_of", "up", "down", "egress", "tokens", "experts")) | {"name": ""}
                ),
            )
        elif not (cluster.links or cluster.trunks):
            sites = tuple(site.model_copy(update={"name": ""}) for site in sites)
        return (
            (cluster.levels, cluster.gpu, sites, cluster.links, cluster.trunks),
            (self.workload.training, self.popularity, self.codecs, self.schedule),
        )

    def each_layer(self) -> Iterator[tuple[int, LayerGroup, Placement]]:
        """(MoE layer index, its group, its placement), in order."""
        for layers in self.placed:
            for layer in range(layers.first_layer, layers.first_layer + layers.num_layers):
                yield layer, layers.group, layers.placement

    @cached_property
    def home_experts(self) -> IntArray:
        """[G]: experts that live on each rank, all MoE layers together."""
        return sum(
            (layers.num_layers * layers.placement.num_at_home for layers in self.placed),
            start=np.zeros(self.cluster.num_gpus, dtype=np.int64),
        )


def copies_last(layers: Iterable[LayerGroup], codecs: Codecs) -> bool:
    """Whether copies stay as long as these codecs need."""
    return not codecs.experts.is_change or all(group.residency is Residency.STEP for group in layers)


def check_popularity(popularity: Popularity, workload: Workload) -> None:
    """Raises ValueError for shares that are not those of the model's experts, layer by layer."""
    model = workload.model
    if popularity and len(popularity) != model.num_moe_layers:
        raise ValueError(f"popularity: {len(popularity)} layers, the model has {model.num_moe_layers} MoE layers")
    for layer, shares in enumerate(popularity):
        if len(shares) != model.num_experts:
            raise ValueError(f"popularity.{layer}: {len(shares)} experts, the model has {model.num_experts}")
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6 or max(shares) * model.top_k > 1 + 1e-6:
            raise ValueError(
                f"popularity.{layer}: shares must be at least 0, add up to 1, and be at most 1 / top_k, since a token "
                "chooses an expert once"
            )


def _differences(prefix: str, mine: Any, other: Any) -> list[str]:
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        keys = [*mine, *(key for key in other if key not in mine)]
        return [d for key in keys for d in _differences(f"{prefix}.{key}", mine.get(key), other.get(key))]
    if isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        return [d for i, (a, b) in enumerate(zip(mine, other, strict=True)) for d in _differences(f"{prefix}.{i}", a, b)]
    return [] if mine == other else [f"{prefix}: plan has {_short(mine)}, here it is {_short(other)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
