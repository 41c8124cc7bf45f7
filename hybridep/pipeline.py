"""Pipeline plans: sites in stages that hold some of a model's layers each, with a plan of its own inside every stage.

A stage is a ``Plan`` for its sites and its layers, so whatever places experts, moves them, and puts times on that knows nothing
of other stages. Between stages a micro-batch's activations pass forward and their gradients back, exact unless the outermost
level's codecs say otherwise, from each rank straight to the ranks that go on with its sequences. All stages train on the global
batch that a plan without stages has, so the same model is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import EXACT, Codecs, Speed, TokenCodec, Wire
from hybridep.config import Strict, apply_overrides, build, read_yaml
from hybridep.errors import ConfigError
from hybridep.plan import (
    SCHEMA_VERSION,
    LayerGroup,
    Plan,
    PlanFile,
    Popularity,
    Prediction,
    Schedule,
    SolverReport,
    check_popularity,
    copies_last,
)
from hybridep.shares import batch_sequences, owners, parts, sequences_together, site_sequences
from hybridep.topology import Cluster, by_themselves
from hybridep.traffic import add_between_sites, link_bytes, step_traffic
from hybridep.workload import Model, Training, Workload

ACTIVATIONS, GRADIENTS = "activations", "activation_gradients"
"""Names of what passes between stages: forward and back."""


class StagePlan(Strict):
    """One stage: who is in it, and how it places its layers' experts."""

    sites: tuple[str, ...] = Field(min_length=1)
    num_layers: int = Field(ge=1)
    """The stage's layers, those without experts included."""
    layers: tuple[LayerGroup, ...] = Field(min_length=1)
    """Every MoE layer of the stage once, in order, counted from its own first one."""


class Ways(NamedTuple):
    """What passes from one stage to the next with every micro-batch; [n] each."""

    source: IntArray
    """The whole cluster's rank in the earlier stage."""
    destination: IntArray
    """The whole cluster's rank in the later stage."""
    first: IntArray
    """Place in the micro-batch of the first sequence that passes."""
    number: IntArray
    """Sequences that pass, from ``first`` on."""


class PipelinePlan(PlanFile):
    """Stages for one cluster and workload, and the order in which they pass micro-batches to each other."""

    micro_batches: int = Field(ge=1)
    """Micro-batches in which the global batch passes the stages."""
    ahead: int = Field(default=1, ge=1)
    """Forwards that a stage runs ahead for each stage behind it: 1 is 1F1B (PipeDream-Flush), which waits for every way there and
    back; more hide longer ways and keep more activations."""
    stages: tuple[StagePlan, ...] = Field(min_length=1)
    popularity: Popularity = ()
    """[MoE layers of the model][experts]: share of each expert in all choices (``Plan.popularity``)."""
    codecs: dict[str, Codecs] = Field(default_factory=dict)
    """Level name -> codecs inside stages; the outermost level's ``activations`` count between them."""
    schedule: Schedule = Schedule()
    """When transfers run inside stages; its streams count between them, too."""
    prediction: Prediction | None = None
    solver: SolverReport | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> PipelinePlan:
        cluster, model = self.cluster, self.workload.model
        check_stageable(model)
        names = cluster.site_names
        used = [name for stage in self.stages for name in stage.sites]
        for name in used:
            if name not in names:
                raise ValueError(f"stages: no site {name!r} in {cluster.name}; it has {', '.join(names)}")
        wrong = [name for name in names if used.count(name) != 1]
        if wrong:
            raise ValueError(f"stages: site {wrong[0]} is in {used.count(wrong[0])} stages; every site is in one")
        if (layers := sum(stage.num_layers for stage in self.stages)) != model.num_layers:
            raise ValueError(f"stages: they have {layers} layers together, the model has {model.num_layers}")
        for number, group in enumerate(self.groups):
            check_homes(cluster, number, group)
        check_popularity(self.popularity, self.workload)
        for level in cluster.levels[1:]:
            if level.name in self.codecs and "activations" in self.codecs[level.name].coded:
                raise ValueError(f"codecs.{level.name}.activations: pass between sites; give it for {cluster.levels[0].name}")
        if self.schedule.prefetch or self.schedule.chunks > 1:
            raise ValueError("schedule: stages take neither prefetch nor chunks; leave both out")
        _ = self.plans
        return self

    @classmethod
    def of_stages(cls, plans: Sequence[Plan], sites: Sequence[Sequence[str]], **fields: Any) -> PipelinePlan:
        """A pipeline of stages' own plans, each made for its ``sites`` with ``stage_workload``, without checks. ``fields``: the
        others but for ``stages``."""
        stages = tuple(
            StagePlan(sites=tuple(names), num_layers=one.workload.model.num_layers, layers=one.layers)
            for one, names in zip(plans, sites, strict=True)
        )
        made = cls.model_construct(stages=stages, **fields)
        made.__dict__["plans"] = tuple(plans)
        return made

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """[stages]: a plan for each one's sites and share of the model."""
        made, first = [], 0
        for number, stage in enumerate(self.stages):
            sites = by_themselves(self.cluster, stage.sites)
            workload = stage_workload(
                self.workload,
                self.cluster,
                number=number,
                first_layer=first,
                num_layers=stage.num_layers,
                sites=sites,
                micro_batches=self.micro_batches,
            )
            shares = of_stage(self.popularity, workload)
            data = {
                "cluster": sites,
                "workload": workload,
                "layers": stage.layers,
                "popularity": shares,
                "codecs": codecs_inside(self.codecs),
                "schedule": self.schedule,
            }
            try:
                made.append(build(Plan, data, f"stages.{number}"))
            except ConfigError as error:
                raise ValueError(str(error)) from None
            first += stage.num_layers
        return tuple(made)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """[stages]: the numbers of each one's sites, in the cluster's order, whatever the order in which they are written."""
        sites = {name: site for site, name in enumerate(self.cluster.site_names)}
        return tuple(tuple(sorted(sites[name] for name in stage.sites)) for stage in self.stages)

    @cached_property
    def ranks(self) -> tuple[IntArray, ...]:
        """[stages] [ranks of the stage]: the whole cluster's number of each, in the order of the stage's own."""
        inside = np.arange(self.cluster.ranks_per_site)
        return tuple(np.concatenate([site * len(inside) + inside for site in group]) for group in self.groups)

    def seat(self, rank: int) -> tuple[int, int]:
        """(stage, rank in the stage) of a rank of the cluster."""
        for stage, ranks in enumerate(self.ranks):
            found = np.flatnonzero(ranks == rank)
            if len(found):
                return stage, int(found[0])
        raise ValueError(f"rank {rank}: {self.cluster.name} has ranks 0 to {self.cluster.num_gpus - 1}")

    def sequences(self, stage: int) -> IntArray:
        """[ranks of the stage]: sequences of each in one micro-batch."""
        own = self.plans[stage]
        return np.repeat(np.array(site_sequences(own.cluster, own.workload)), own.cluster.ranks_per_site)

    def ways(self, stage: int) -> Ways:
        """What passes from a stage to the next. A rank passes on its own sequences, to ranks of the same place in their sites;
        where the next stage has more or fewer sites, parts of them."""
        both = []
        for number in (stage, stage + 1):
            own = self.plans[number]
            both.append(self.ranks[number][owners(own.cluster, own.workload)[0]])
        source, destination = both
        changes = np.flatnonzero(np.diff(source) | np.diff(destination)) + 1
        first = np.concatenate([[0], changes])
        return Ways(
            source=source[first],
            destination=destination[first],
            first=first,
            number=np.diff([*first, len(source)]),
        )

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence's activations, or of their gradients, between two stages."""
        wire = Wire(workload=self.workload, codecs=self.codecs.get(self.cluster.levels[0].name, EXACT))
        return self.workload.training.sequence_length * wire.activation_row_bytes

    @property
    def activation_codec(self) -> TokenCodec:
        """Codec of what passes between stages."""
        return self.codecs.get(self.cluster.levels[0].name, EXACT).activations

    @property
    def activation_speed(self) -> Speed | None:
        """How fast ranks code and decode what passes between stages; None where that takes no time."""
        coding = self.cluster.gpu.coding
        return None if coding is None else coding.tokens.get(self.activation_codec)

    def running_ahead(self, ahead: int) -> PipelinePlan:
        """The plan with its passes in another order. Raises ValueError for less than 1, where stages would wait in a circle."""
        if ahead < 1:
            raise ValueError(f"ahead {ahead} must be at least 1, or stages wait for each other in a circle")
        made = self.model_copy(update={"ahead": ahead})
        # What is inside stages takes long to make, and knows nothing of the order.
        made.__dict__["plans"] = self.plans
        return made

    def with_layers(self, layers: Sequence[tuple[LayerGroup, ...]]) -> PipelinePlan:
        """The plan with these placements inside its stages, [stages] each as ``StagePlan.layers``."""
        stages = tuple(one.model_copy(update={"layers": own}) for one, own in zip(self.stages, layers, strict=True))
        made = self.model_copy(update={"stages": stages})
        made.__dict__["plans"] = tuple(one.with_layers(*own) for one, own in zip(self.plans, layers, strict=True))
        return made

    def at_rates(self, cluster: Cluster, schedule: Schedule | None = None) -> PipelinePlan:
        """The plan over the same sites where a ``cluster`` has other links or memory, with what is predicted left out; with
        another ``schedule``, if one is given."""
        schedule, plans = schedule or self.schedule, list[Plan]()
        for stage, own in zip(self.stages, self.plans, strict=True):
            sites = by_themselves(cluster, stage.sites)
            is_same = sites == own.cluster and schedule == own.schedule
            plans.append(own if is_same else own.model_copy(update={"cluster": sites, "schedule": schedule}))
        made = self.model_copy(update={"cluster": cluster, "schedule": schedule, "prediction": None, "solver": None})
        made.__dict__["plans"] = tuple(plans)
        return made

    def coded(self, codecs: Mapping[str, Codecs]) -> PipelinePlan:
        """The plan with other codecs, by level name, with what is predicted left out. Raises ValueError where copies do not stay
        as long as they need."""
        given = {name: one for name, one in codecs.items() if one.coded}
        if not all(copies_last(stage.layers, one) for stage in self.stages for one in given.values()):
            raise ValueError("codecs that send changes of experts need copies that stay; set residency: step")
        made = self.model_copy(update={"codecs": given, "prediction": None, "solver": None})
        made.__dict__["plans"] = tuple(one.model_copy(update={"codecs": codecs_inside(given)}) for one in self.plans)
        return made

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage keeps at a time."""
        return min(1 + forwards_ahead(stage, len(self.stages), self.micro_batches, self.ahead), self.micro_batches)


AnyPlan = Plan | PipelinePlan
"""What a plan file may hold."""


def codecs_inside(codecs: Mapping[str, Codecs]) -> dict[str, Codecs]:
    """Level name -> codecs, without what is for activations between stages."""
    return {name: one.without("activations") for name, one in codecs.items()}


def is_pipeline(data: Mapping[str, Any]) -> bool:
    """Whether what a YAML file holds is a pipeline plan."""
    return "stages" in data and "schema_version" in data


def _kind_of(data: Mapping[str, Any]) -> type[AnyPlan]:
    return PipelinePlan if is_pipeline(data) else Plan


def build_plan(data: Mapping[str, Any], where: str) -> AnyPlan:
    """A plan of either kind from plain data. Raises ConfigError."""
    return build(_kind_of(data), data, where)


def load_any_plan(
    path: Path, *, cluster: Cluster | None = None, workload: Workload | None = None, overrides: Sequence[str] = ()
) -> AnyPlan:
    """Read a plan file of either kind. Raises ConfigError for a broken or truncated file and PlanMismatchError when ``cluster``
    or ``workload`` is given and the plan was made for another one. With ``overrides`` (``cluster.gpu.memory=...``) it is the same
    placement under other conditions; what was predicted for the old ones is left out."""
    data = read_yaml(path)
    lines = apply_overrides(data, path, overrides)
    if overrides:
        data = {key: value for key, value in data.items() if key not in ("prediction", "solver")}
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ConfigError(str(path), "schema_version", f"this version reads plans of schema {SCHEMA_VERSION} (found {version!r})")
    plan = build(_kind_of(data), data, str(path), lines)
    plan.require(cluster, workload, str(path))
    return plan


def pipeline_link_bytes(plan: PipelinePlan) -> FloatArray:
    """[number of links]: bytes of one step over each entry of ``cluster.link_table``, as expected: what stages exchange inside
    and what passes between them."""
    cluster = plan.cluster
    number = {link.name: place for place, link in enumerate(cluster.link_table)}
    loads = between_link_bytes(plan)
    for stage in plan.plans:
        own = link_bytes(stage.cluster, step_traffic(stage))
        for link, size_bytes in zip(stage.cluster.link_table, own, strict=True):
            loads[number[link.name]] += size_bytes
    return loads


def pipeline_link_s(plan: PipelinePlan) -> FloatArray:
    """[number of links]: seconds for which one step's bytes keep each entry of ``cluster.link_table`` busy, at its full rate."""
    return np.asarray(pipeline_link_bytes(plan) / np.array([link.bandwidth_bytes_per_s for link in plan.cluster.link_table]))


def between_link_bytes(plan: PipelinePlan) -> FloatArray:
    """[number of links]: bytes of a step that pass between stages."""
    cluster = plan.cluster
    loads = np.zeros(len(cluster.link_table))
    for source, destination, size_bytes in _passed(plan):
        for depth in range(len(cluster.sizes)):
            width = cluster.stride(depth)
            np.add.at(loads, cluster.up_link(depth, 0) + 2 * (source // width), size_bytes)
            np.add.at(loads, cluster.down_link(depth, 0) + 2 * (destination // width), size_bytes)
    if cluster.links or cluster.trunks:
        add_between_sites(cluster, loads, between_sites_bytes(plan))
    return loads


def between_sites_bytes(plan: PipelinePlan) -> FloatArray:
    """[DCs, DCs]: bytes of a step that pass between stages, from row to column."""
    inside, between = plan.cluster.ranks_per_site, np.zeros((plan.cluster.sizes[0], plan.cluster.sizes[0]))
    for source, destination, size_bytes in _passed(plan):
        np.add.at(between, (source // inside, destination // inside), size_bytes)
    return between


def _passed(plan: PipelinePlan) -> Iterator[tuple[IntArray, IntArray, FloatArray]]:
    """(Ranks from which, ranks to which, bytes of a step) [n] each, between a stage and the next, there and back."""
    for earlier in range(len(plan.stages) - 1):
        ways = plan.ways(earlier)
        size_bytes = ways.number.astype(np.float64) * plan.sequence_bytes * plan.micro_batches
        yield ways.source, ways.destination, size_bytes
        yield ways.destination, ways.source, size_bytes


def stage_workload(
    workload: Workload,
    cluster: Cluster,
    *,
    number: int,
    first_layer: int,
    num_layers: int,
    sites: Cluster,
    micro_batches: int,
) -> Workload:
    """What a stage of these ``sites`` of the cluster trains: its layers, and the global batch in ``micro_batches``. Raises
    ValueError where it has no layer with experts, or a micro-batch has no sequence for each of its ranks."""
    model, training = workload.model, workload.training
    dense = min(max(model.num_dense_layers - first_layer, 0), num_layers)
    if dense >= num_layers:
        raise ValueError(f"stages.{number}: {num_layers} layers, {dense} of them without experts; each needs one with experts")
    inside = cluster.ranks_per_site
    batch = global_sequences(workload, cluster)
    together, rest = divmod(batch, inside * micro_batches)
    num_sites, weights = sites.sizes[0], tuple(sites.token_weights.tolist())
    if rest or together < num_sites or not all(parts(together, weights)):
        shares = "as many whole ones each" if len(set(weights)) == 1 else "whole ones each, by the sites' shares (sites.*.tokens)"
        raise ValueError(
            f"stages.{number}: {batch} sequences of a step in {micro_batches} micro-batches leave {batch / micro_batches:g} for "
            f"{num_sites} x {inside} ranks, and those of a site take {shares}; choose other micro_batches"
        )
    part = {
        "first_layer": first_layer,
        "first_moe_layer": max(first_layer - model.num_dense_layers, 0),
        "of_layers": model.num_layers,
    }
    batch_of = {"micro_batches": micro_batches, "micro_batch_size": together / num_sites}
    update = {"num_layers": num_layers, "num_dense_layers": dense, "part": part}
    return Workload(
        name=f"{workload.name}, stage {number}",
        model=build(Model, model.model_dump(mode="json") | update, f"stages.{number}"),
        training=build(Training, training.model_dump(mode="json") | batch_of, f"stages.{number}"),
    )


def of_stage(popularity: Popularity, workload: Workload) -> Popularity:
    """[MoE layers of the stage][experts]: the part of the whole model's popularity for a stage that trains ``workload``."""
    part = workload.model.part
    assert part is not None
    return popularity[part.first_moe_layer : part.first_moe_layer + workload.model.num_moe_layers]


def global_sequences(workload: Workload, cluster: Cluster) -> int:
    """Sequences of a step, all ranks together."""
    return batch_sequences(cluster, workload) * workload.training.micro_batches


def possible_micro_batches(workload: Workload, cluster: Cluster, groups: Iterable[Sequence[int]]) -> list[int]:
    """In how many equal micro-batches the global batch can pass stages of these sites, fewest first."""
    together = sequences_together(sequences_of_place(workload, cluster), token_weights(cluster, groups))
    return [sequences_of_place(workload, cluster) // one for one in reversed(together)]


def token_weights(cluster: Cluster, groups: Iterable[Sequence[int]]) -> list[tuple[float, ...]]:
    """[groups] (sites): ``Site.tokens`` of the sites of each, in the cluster's order."""
    weights = cluster.token_weights
    return [tuple(weights[sorted(group)].tolist()) for group in groups]


def sequences_of_place(workload: Workload, cluster: Cluster) -> int:
    """Sequences of a step, one rank of each site together: what the sites of any stage share out."""
    return global_sequences(workload, cluster) * cluster.sizes[0] // cluster.num_gpus


def forwards_ahead(stage: int, stages: int, micro_batches: int, ahead: int) -> int:
    """Forwards that a stage makes before its first backward, beside the one that goes with it."""
    return min(ahead * (stages - 1 - stage), micro_batches)


def order_of_passes(stage: int, stages: int, micro_batches: int, ahead: int = 1) -> Iterator[tuple[bool, int]]:
    """(whether forward, micro-batch) in the order in which a stage computes: `ahead` forwards for each stage that follows, then
    one backward after each forward, then the backwards that are left."""
    warm_up = forwards_ahead(stage, stages, micro_batches, ahead)
    for number in range(micro_batches + warm_up):
        if number < micro_batches:
            yield True, number
        if number >= warm_up:
            yield False, number - warm_up


def check_stageable(model: Model) -> None:
    """Raises ValueError for what no stages can share."""
    if model.tie_embeddings:
        raise ValueError(
            "stages: tie_embeddings makes embedding and output projection one matrix, and the first and the last stage have one "
            "of them each; set it to false"
        )


def check_homes(cluster: Cluster, stage: int, group: Sequence[int]) -> None:
    """Raises ValueError for sites of a stage at which no experts live."""
    if not cluster.home_weights[list(group)].any():
        sites = ", ".join(cluster.site_name(site) for site in group)
        raise ValueError(
            f"stages.{stage}: no experts live at {sites} (sites.*.experts), and a stage holds those of its layers; it "
            "needs another site, too"
        )
