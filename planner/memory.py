"""Bytes that each rank needs, by what they are for.

Counted: weights, gradients and optimizer state of the dense parts and of the experts at home, which stay; copies; the
activations of one micro-batch, which all layers keep until backward; and the largest of what is held for a moment, beside the
receives that are posted an exchange ahead. Not counted: the framework's own memory and fragmentation, and
what the optimizer holds for a moment (17 MB at most). Ranks measure within 10 % of it (experiments/memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Codecs, ExpertCodec, GradientCodec, Wire, wires
from hybridep.gating import Gating
from hybridep.placement import Placement
from hybridep.plan import PlacedLayers, Plan, Residency
from hybridep.recompute import Recompute
from hybridep.topology import Cluster
from hybridep.traffic import DENSE_PIECE, Op, Traffic, arriving_rows, dense_shard_params, rank_sequences, reverse, served_copies
from hybridep.workload import Training, Workload
from planner.activations import (
    dense_layer_again_bytes,
    dense_layers_bytes,
    head_bytes,
    pre_expert_bytes,
    routed_backward_bytes,
    routed_bytes,
)
from planner.compute import compute_of_ranks
from planner.cost import layer_traffic

DENSE = "dense"
HOME_EXPERTS = "home_experts"
COPIES = "copies"
CODECS = "codec_state"
ACTIVATIONS = "activations"
BUFFERS = "buffers"

TOLERANCE = 1e-5
"""Relative; a plan fits when it needs at most this much more than there is. Above the solvers' tolerances, so that what
they find feasible is."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """What one MoE layer adds on each rank ([G] bytes by kind)."""

    lasting: dict[str, FloatArray]
    """Held at the same time for all layers."""
    passing: dict[str, FloatArray]
    """Held while this layer is computed; of all layers only the largest counts."""

    @property
    def lasting_bytes(self) -> FloatArray:
        """[G], all kinds."""
        return _total(self.lasting.values())

    @property
    def passing_bytes(self) -> FloatArray:
        """[G], all kinds."""
        return _total(self.passing.values())


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Of a whole plan."""

    total_bytes: FloatArray
    """[G]."""
    parts_bytes: dict[str, float]
    """Of the fullest rank; they add up to ``fullest_bytes``."""
    fullest_rank: int
    fullest_name: str
    """Site and worker, for example ``us-east/gpu3``."""
    capacity_bytes: float
    """What that rank has."""

    @property
    def fullest_bytes(self) -> float:
        """Bytes of the fullest rank: the one that needs most of what it has."""
        return float(self.total_bytes[self.fullest_rank])

    @property
    def fits(self) -> bool:
        """Every rank has room."""
        return fits(self.fullest_bytes, self.capacity_bytes)


def fits(used_bytes: float, capacity_bytes: float) -> bool:
    """Whether a rank has room, up to ``TOLERANCE``."""
    return used_bytes <= capacity_bytes * (1 + TOLERANCE)


def memory_knob(cluster: Cluster, rank: int) -> str:
    """The key that gives a rank its memory."""
    dc = rank // cluster.ranks_per_site
    gpu = cluster.sites[dc].gpu if cluster.sites else None
    return "gpu.memory" if gpu is None or gpu.memory is None else f"sites.{cluster.datacenters[dc]}.gpu.memory"


def fixed_rank_bytes(
    workload: Workload, share: FloatArray, sizes: Sequence[int], recompute: Recompute
) -> tuple[FloatArray, float]:
    """What ranks keep whatever the placement, but for what layers with experts keep of tokens, and what each expert at home adds,
    for all layers together; ``share``: each rank's tokens as a multiple of the mean, ``sizes``: of the cluster's levels, here and
    below."""
    return _dense_bytes(workload, sizes) + share * dense_layers_bytes(workload, recompute), (
        workload.model.num_moe_layers * workload.model.expert_params * _state_bytes(workload)
    )


def _state_bytes(workload: Workload) -> int:
    """Weight, gradient and optimizer state of one parameter."""
    return _held_bytes(workload.training) + workload.training.dtype.state_bytes


def _held_bytes(training: Training) -> int:
    """Weight and gradient of one parameter."""
    return training.dtype.num_bytes + training.gradient_dtype.num_bytes


def _dense_bytes(workload: Workload, sizes: Sequence[int]) -> float:
    """Weights and gradients of all dense parameters, and the optimizer's state of a rank's share of them."""
    model, training = workload.model, workload.training
    states = dense_shard_params(model, sizes) * training.dtype.state_bytes
    return float(model.dense_params * _held_bytes(training) + states)


def lasting_copy_bytes(workload: Workload, copies: FloatArray, residency: Residency) -> FloatArray:
    """Of one layer's copies as long as a step lasts: their weights, and, where micro-batches accumulate, their gradient."""
    if residency is Residency.MICROBATCH:
        return np.zeros_like(copies)
    training = workload.training
    width = _held_bytes(training) if training.micro_batches > 1 else training.dtype.num_bytes
    return copies * float(workload.model.expert_params * width)


def narrows(training: Training, residency: Residency) -> bool:
    """Whether what the gradients of copies add up to is wider than what leaves of it."""
    return residency is Residency.STEP and training.gradient_dtype is not training.dtype


class Ahead(NamedTuple):
    """Bytes of one layer's receives, over all levels, that are posted when the layer above runs backward; in its own forward if
    it is the topmost."""

    combine: FloatArray
    """Of the gradients of its combine: until its experts run backward."""
    dispatch: FloatArray
    """Of those of its dispatch: until these have come."""


def passing_bytes(
    workload: Workload,
    share: FloatArray,
    largest_exchange: FloatArray,
    ahead: Ahead,
    served: FloatArray,
    copies: FloatArray,
    at_home: IntArray,
    residency: Residency,
    again: tuple[FloatArray, FloatArray],
    chunks: int = 1,
) -> dict[str, FloatArray]:
    """By kind, while one layer is computed: its largest exchange, what its experts' backward makes, or that of what comes before
    them where that computes again, or what the head holds if it is the topmost; receives that are posted ahead; and copies that
    live for one micro-batch. ``served`` rows are computed, in ``chunks`` parts; ``again``: ``Held.again`` of routed experts, and
    of what comes before them."""
    model, width = workload.model, workload.training.dtype.num_bytes
    held, (routed_again, pre_expert_again) = copies + at_home, again
    gradients, row = float(workload.expert_bytes) * held, served * float(model.hidden_size * width)
    # First of all rows; then the experts' gradients become one piece.
    of_rows = served * routed_backward_bytes(workload)
    backward = routed_again / chunks + gradients + np.maximum(of_rows / chunks, gradients + row / chunks)
    if chunks > 1:
        # To which those of further parts are added; and what earlier ones have computed is on its way.
        backward = backward + gradients + row * (1 - 1 / chunks)
    own_copies = copies * float(workload.expert_bytes if residency is Residency.MICROBATCH else 0)
    computed = np.maximum(ahead.dispatch + backward, pre_expert_again)
    # Meanwhile the layer below awaits its gradients; it is taken to be like this one. At the head, where there are no copies of
    # one micro-batch, the topmost layer does.
    largest = np.maximum.reduce([largest_exchange, computed, head_bytes(workload, share) - own_copies])
    passing = {BUFFERS: ahead.combine + ahead.dispatch + largest}
    if residency is Residency.MICROBATCH:
        passing[COPIES] = own_copies
    return passing


def dense_reduction_bytes(sizes: Sequence[int], workload: Workload, codecs: Sequence[Codecs]) -> float:
    """Most that a rank holds beside all gradients while they are reduced (``runtime.dense_reduce``): what arrives of a part, or
    of a piece of it; where that is coded, messages both ways, the sum, and one that is decoded."""
    most, shard = 0.0, workload.model.dense_params
    for level, wire in reversed(list(enumerate(wires(workload, codecs, len(sizes))))):
        part = -(-shard // sizes[level])
        width, others = workload.training.dtype.num_bytes, sizes[level] - 1
        held = float(others * (min(part, DENSE_PIECE) if level > 0 else part) * width)
        if workload.training.gradient_dtype is not workload.training.dtype:
            held *= 2  # what leaves is made narrow
        if others and "gradients" in wire.codecs.coded:
            held = 2 * others * float(wire.dense_bytes(np.array([part]))[0]) + 2 * part * max(width, 4)
        most, shard = max(most, held), part
    return most


def fixed_passing_bytes(
    workload: Workload, share: FloatArray, largest_reduction: float, recompute: Recompute, gone_bytes: FloatArray | float = 0.0
) -> FloatArray:
    """Held by the head when backward begins; by a layer without experts, when those with experts have been through; or after
    backward, when no activations are left, by the reduction of the dense gradients. ``recompute``: what some layers do; all are
    taken to. ``gone_bytes``: activations of all layers with experts, where they are known."""
    kept = workload.model.num_moe_layers * pre_expert_bytes(workload, share, recompute).kept
    reduction = largest_reduction - share * dense_layers_bytes(workload, recompute) - kept
    again = share * dense_layer_again_bytes(workload, recompute) - np.maximum(gone_bytes, kept)
    return np.asarray(np.maximum.reduce([head_bytes(workload, share), again, reduction]))


def fixed_memory(
    cluster: Cluster,
    workload: Workload,
    home_experts: IntArray,
    codecs: Sequence[Codecs] = (),
    *,
    dense: Recompute = Recompute.NOTHING,
    some: Recompute = Recompute.NOTHING,
    gone_bytes: FloatArray | float = 0.0,
) -> LayerMemory:
    """What does not depend on the placement of copies, for all layers together. ``home_experts`` [G]: experts at home on
    each rank, all layers together. ``dense``: what layers without experts compute again, ``some``: what any layers do;
    ``gone_bytes``: as `fixed_passing_bytes`."""
    reduction = dense_reduction_bytes(cluster.sizes, workload, codecs)
    share = compute_of_ranks(cluster, workload).share
    lasting = fixed_lasting(workload, share, home_experts, cluster.sizes, dense)
    lasting[DENSE] = lasting[DENSE] + unsent_dense_bytes(cluster, workload, codecs)
    passing = fixed_passing_bytes(workload, share, reduction, some, gone_bytes)
    return LayerMemory(lasting=lasting, passing={BUFFERS: passing})


def fixed_lasting(
    workload: Workload, share: FloatArray, home_experts: IntArray, sizes: Sequence[int], recompute: Recompute
) -> dict[str, FloatArray]:
    """Bytes by kind of ranks ([G]) without copies and what layers with experts keep of tokens."""
    return {
        DENSE: np.full(len(home_experts), _dense_bytes(workload, sizes)),
        HOME_EXPERTS: home_experts.astype(np.float64) * (workload.model.expert_params * _state_bytes(workload)),
        ACTIVATIONS: share * dense_layers_bytes(workload, recompute),
    }


class LayerLoad(NamedTuple):
    """What one MoE layer brings to each rank ([G]), whatever of it is computed again."""

    residency: Residency
    copies: FloatArray
    at_home: IntArray
    share: FloatArray
    """Of tokens, as a multiple of the mean."""
    served: FloatArray
    """Rows that its experts compute."""
    arrived: FloatArray
    """Rows that come to it."""
    largest_exchange: FloatArray
    ahead: Ahead
    codec_bytes: FloatArray
    """What codecs keep."""


def layer_load(
    placement: Placement,
    workload: Workload,
    gating: Gating,
    traffic: Traffic,
    residency: Residency,
    codecs: Sequence[Codecs] = (),
) -> LayerLoad:
    """Given ``planner.cost.layer_traffic``."""
    narrowed = narrows(workload.training, residency)
    return LayerLoad(
        residency=residency,
        copies=(placement.holds.sum(axis=1) - placement.num_at_home).astype(np.float64),
        at_home=placement.num_at_home,
        share=rank_sequences(placement, gating) / workload.training.micro_batch_size,
        served=served_copies(placement, gating).sum(axis=1),
        arrived=arriving_rows(placement, gating),
        largest_exchange=exchange_bytes(placement, traffic, narrowed=narrowed),
        ahead=Ahead(*(arriving_bytes(placement, traffic, op) for op in (Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD))),
        codec_bytes=_codec_state_bytes(placement, workload, wires(workload, codecs, len(placement.sizes))),
    )


def layer_memory(
    load: LayerLoad, workload: Workload, *, prefetch: int = 0, chunks: int = 1, recompute: Recompute = Recompute.NOTHING
) -> LayerMemory:
    """What one MoE layer takes. With ``prefetch``, copies' gradients wait their turn to return, and copies per micro-batch of so
    many more layers are there or on their way."""
    residency, copies, at_home, share, served, arrived, largest, ahead, codec_bytes = load
    kept_copies = lasting_copy_bytes(workload, copies, residency)
    routed = routed_bytes(workload, served, arrived, recompute)
    before = pre_expert_bytes(workload, share, recompute)
    again = routed.again, before.again
    passing = passing_bytes(workload, share, largest, ahead, served, copies, at_home, residency, again, chunks)
    both = copies * float(2 * workload.expert_bytes)
    if prefetch and residency is Residency.STEP:
        # Gradients of the last micro-batch wait where all of the layer's activations have been.
        kept_copies = np.maximum(kept_copies, both - routed.kept - before.kept)
    elif prefetch:
        passing[COPIES] = passing.get(COPIES, 0.0) + both * min(prefetch, workload.model.num_moe_layers - 1)
    lasting: dict[str, FloatArray] = {
        ACTIVATIONS: routed.kept + before.kept,
        COPIES: kept_copies,
    }
    if codec_bytes.any():
        lasting[CODECS] = codec_bytes
    return LayerMemory(
        lasting=lasting,
        passing=passing,
    )


def _codec_state_bytes(placement: Placement, workload: Workload, by_level: Sequence[Wire]) -> FloatArray:
    """[G]: what one layer's codecs keep between steps: senders' copies, the shared expert, and gradients not sent yet."""
    kept = np.zeros(placement.num_gpus)
    shared = 0
    for level, wire in enumerate(by_level):
        moved = placement.num_moved[level].astype(np.float64)
        if not moved.any():
            continue
        if wire.codecs.experts is ExpertCodec.SHARED_RESIDUAL:
            shared = workload.expert_bytes
        present = placement.num_at_home if level == 0 else placement.holds.sum(axis=1)
        kept += kept_by_codecs(wire, moved.sum(axis=1), reverse(placement, level, moved).sum(axis=1), present)
    return kept + shared


def kept_by_codecs(wire: Wire, sent: FloatArray, received: FloatArray, present: IntArray | FloatArray) -> FloatArray:
    """Of one layer at one level, by rank, without the shared expert: ``sent`` and ``received`` copies, of ``present`` experts."""
    workload, kept = wire.workload, np.zeros(sent.shape)
    if wire.codecs.experts.is_change:
        kept += np.minimum(sent, present) * workload.expert_bytes
    if wire.codecs.gradients is GradientCodec.TOP_K:
        kept += received * float(workload.model.expert_params * _wide(workload))
    return kept


def unsent_dense_bytes(cluster: Cluster, workload: Workload, codecs: Sequence[Codecs]) -> float:
    """Dense gradients that error feedback keeps, of one rank: of parts that it sends, and of the sums that it sends back, in
    place of which weights travel inside a worker of the outermost level."""
    kept = 0.0
    for level, one in enumerate(codecs):
        if one.gradients is GradientCodec.TOP_K:
            kept += workload.model.dense_params / cluster.stride(level) * (1 - (level > 0) / cluster.sizes[level])
    return kept * _wide(workload)


def _wide(workload: Workload) -> int:
    """Error feedback is kept in fp32 at least."""
    return max(workload.training.dtype.num_bytes, 4)


def exchange_bytes(placement: Placement, traffic: Traffic, *, narrowed: bool) -> FloatArray:
    """[G]: what each rank's largest exchange takes beside what stays: bytes out and in; copies arrive where they stay, and their
    gradients leave from where they are, unless sums are ``narrowed`` for links."""
    largest = np.zeros(placement.num_gpus)
    for key, sent in traffic.items():
        if key.op is Op.TOKEN_COUNTS or (key.op is Op.GRADIENT_RETURN and not narrowed):
            continue
        held = sent.sum(axis=1)
        if key.op not in (Op.EXPERT_GATHER, Op.GRADIENT_RETURN):
            held = held + reverse(placement, key.level, sent).sum(axis=1)
        largest = np.maximum(largest, held)
    return largest


def arriving_bytes(placement: Placement, traffic: Traffic, op: Op) -> FloatArray:
    """[G]: what one kind of exchange brings to each rank, over all levels."""
    coming = [reverse(placement, key.level, sent).sum(axis=1) for key, sent in traffic.items() if key.op is op]
    return np.asarray(sum(coming, start=np.zeros(placement.num_gpus)))


def memory_use(plan: Plan, in_flight: int = 1, beside_bytes: float = 0.0) -> MemoryUse:
    """Of any plan, whoever made it; as a pipeline's stage with the activations of so many micro-batches ``in_flight``, and
    ``beside_bytes`` of each rank for what passes between stages."""
    return step_memory(plan).use(in_flight, beside_bytes)


class StepMemory(NamedTuple):
    """What a plan's ranks keep, of which `memory_use` makes a whole."""

    cluster: Cluster
    fixed: LayerMemory
    groups: tuple[tuple[int, LayerMemory], ...]
    """(Number of layers, what each keeps)."""

    def use(self, in_flight: int = 1, beside_bytes: float = 0.0) -> MemoryUse:
        """Arguments as `memory_use`."""
        fixed = _in_flight(self.fixed, in_flight)
        fixed.lasting[ACTIVATIONS] = fixed.lasting[ACTIVATIONS] + beside_bytes
        return total_memory(self.cluster, fixed, [(count, _in_flight(memory, in_flight)) for count, memory in self.groups])


def _in_flight(memory: LayerMemory, number: int) -> LayerMemory:
    return replace(memory, lasting=memory.lasting | {ACTIVATIONS: memory.lasting[ACTIVATIONS] * number})


def step_memory(plan: Plan, load_of: Callable[[Plan, PlacedLayers], LayerLoad] | None = None) -> StepMemory:
    """Of any plan. ``load_of``: `placed_load`, or what knows it."""
    workload, prefetch, chunks = plan.workload, plan.schedule.prefetch, plan.schedule.chunks
    groups = []
    for layers in plan.placed:
        load, again = (load_of or placed_load)(plan, layers), layers.group.recompute
        memory = layer_memory(load, workload, prefetch=prefetch, chunks=chunks, recompute=again)
        groups.append((layers.num_layers, memory))
    gone = _less_above(groups) if plan.popularity else 0.0
    home, codecs = plan.home_experts, plan.level_codecs
    dense, some = plan.dense_recompute, plan.recomputes
    fixed = fixed_memory(plan.cluster, plan.workload, home, codecs, dense=dense, some=some, gone_bytes=gone)
    return StepMemory(plan.cluster, fixed, tuple(groups))


def placed_load(plan: Plan, layers: PlacedLayers) -> LayerLoad:
    """Of one of these layers."""
    _, _, group, placement, gating = layers
    traffic = layer_traffic(placement, plan.workload, gating, plan.level_codecs)
    return layer_load(placement, plan.workload, gating, traffic, group.residency, plan.level_codecs)


def _less_above(groups: Sequence[tuple[int, LayerMemory]]) -> FloatArray:
    """When a layer runs backward, activations of one micro-batch of the layers above it are gone: all of them are returned. Not
    counted where experts are alike, since the integer program, whose layers have no order, does not either."""
    gone = np.zeros_like(groups[0][1].lasting[ACTIVATIONS])
    for count, memory in reversed(groups):
        memory.passing[BUFFERS] = memory.passing[BUFFERS] - gone
        gone = gone + count * memory.lasting[ACTIVATIONS]
    return gone


def total_memory(cluster: Cluster, fixed: LayerMemory, groups: Iterable[tuple[int, LayerMemory]]) -> MemoryUse:
    """Of (number of layers, their memory) groups and the fixed part."""
    lasting = dict(fixed.lasting)
    largest = fixed
    groups = list(groups)
    for count, memory in groups:
        for name, value in memory.lasting.items():
            lasting[name] = lasting.get(name, np.zeros(cluster.num_gpus)) + count * value
    passing = np.maximum.reduce([fixed.passing_bytes, *(memory.passing_bytes for _, memory in groups)])
    total = _total(lasting.values()) + passing
    capacity = cluster.of_ranks(lambda gpu: gpu.memory)
    rank = int((total / capacity).argmax())
    for _, memory in groups:
        if memory.passing_bytes[rank] > largest.passing_bytes[rank]:
            largest = memory
    parts = {name: float(value[rank]) for name, value in lasting.items()}
    for name, value in largest.passing.items():
        parts[name] = parts.get(name, 0.0) + float(value[rank])
    return MemoryUse(
        total_bytes=total,
        parts_bytes=parts,
        fullest_rank=rank,
        fullest_name=cluster.worker_name(cluster.location(rank)),
        capacity_bytes=float(capacity[rank]),
    )


def _total(arrays: Iterable[FloatArray]) -> FloatArray:
    return np.asarray(np.sum(list(arrays), axis=0), dtype=np.float64)
