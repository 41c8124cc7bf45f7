"""Bytes that each rank needs, by what they are for.

Counted: weights, gradients and optimizer state of the dense parts and of the experts at home; copies with their gradients;
the activations of one micro-batch, which all layers keep until backward; and the largest exchange, in and out. Not
counted: the framework's own memory and fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hybridep.gating import Gating
from hybridep.placement import IntArray, Placement
from hybridep.plan import Plan, Residency
from hybridep.topology import Cluster
from hybridep.traffic import FloatArray, Op, Traffic, dense_traffic, reverse, served_copies
from hybridep.workload import Ffn, Workload
from planner.cost import layer_traffic

DENSE = "dense"
HOME_EXPERTS = "home_experts"
COPIES = "copies"
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

    @property
    def fullest_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return float(self.total_bytes[self.fullest_rank])

    @property
    def fits(self) -> bool:
        """Every rank has room."""
        return fits(self.fullest_bytes, self.capacity_bytes)


def fits(used_bytes: float, capacity_bytes: float) -> bool:
    """Whether a rank has room, up to ``TOLERANCE``."""
    return used_bytes <= capacity_bytes * (1 + TOLERANCE)


def fixed_rank_bytes(workload: Workload) -> tuple[float, float]:
    """What every rank keeps whatever the placement, and what each expert at home adds, for all layers together."""
    return workload.model.dense_params * _state_bytes(workload) + _dense_activations(workload), (
        workload.model.num_moe_layers * workload.model.expert_params * _state_bytes(workload)
    )


def served_row_bytes(workload: Workload) -> float:
    """Kept for backward of each row that an expert computes: its input, its inner widths and its output."""
    model = workload.model
    return float((2 * model.hidden_size + _inner_width(workload, model.expert_ffn_size)) * workload.training.dtype.num_bytes)


def _state_bytes(workload: Workload) -> int:
    """Weight, gradient and optimizer state of one parameter."""
    return 2 * workload.training.dtype.num_bytes + workload.training.dtype.state_bytes


def _dense_activations(workload: Workload) -> float:
    """Of one rank and micro-batch, without the routed experts."""
    model, training = workload.model, workload.training
    # Block input and its norm, the attention's projections and output, the second norm's output.
    kv_width = model.attention_width // model.num_heads * (model.num_kv_heads or model.num_heads)
    attention = 4 * model.hidden_size + 2 * model.attention_width + 2 * kv_width
    dense_layer = attention + _inner_width(workload, model.dense_ffn_size)
    moe_layer = attention + _inner_width(workload, model.shared_ffn_size) + 2 * model.num_experts
    # Logits and their gradient, in fp32 at least.
    logits = 2 * model.vocab_size * max(training.dtype.num_bytes, 4)
    widths = model.num_dense_layers * dense_layer + model.num_moe_layers * moe_layer
    return float(training.tokens * (widths * training.dtype.num_bytes + logits))


def fixed_memory(cluster: Cluster, workload: Workload, placement: Placement, home_experts: IntArray) -> LayerMemory:
    """What does not depend on the placement of copies, for all layers together. ``home_experts`` [G]: experts at home on
    each rank, all layers together."""
    every_rank = np.ones(cluster.num_gpus)
    return LayerMemory(
        lasting={
            DENSE: every_rank * workload.model.dense_params * _state_bytes(workload),
            HOME_EXPERTS: home_experts.astype(np.float64) * (workload.model.expert_params * _state_bytes(workload)),
            ACTIVATIONS: every_rank * _dense_activations(workload),
        },
        passing={BUFFERS: exchange_bytes(placement, dense_traffic(placement, workload))},
    )


def layer_memory(placement: Placement, workload: Workload, gating: Gating, traffic: Traffic, residency: Residency) -> LayerMemory:
    """What one MoE layer's copies, routed tokens and exchanges take, given ``planner.cost.layer_traffic``."""
    copies = (placement.holds.sum(axis=1) - placement.num_at_home) * float(2 * workload.expert_bytes)
    served = served_copies(placement, gating).sum(axis=1)
    # Each arrived row is kept for backward too.
    activations = served * served_row_bytes(workload)
    for key, sent in traffic.items():
        if key.op is Op.TOKEN_DISPATCH:
            activations = activations + reverse(placement, key.level, sent).sum(axis=1)
    lasting, passing = {ACTIVATIONS: activations}, {BUFFERS: exchange_bytes(placement, traffic)}
    (lasting if residency is Residency.STEP else passing)[COPIES] = copies
    return LayerMemory(lasting=lasting, passing=passing)


def exchange_bytes(placement: Placement, traffic: Traffic) -> FloatArray:
    """[G]: bytes out and in of each rank's largest exchange."""
    largest = np.zeros(placement.num_gpus)
    for key, sent in traffic.items():
        if key.op is Op.TOKEN_COUNTS:
            continue
        both = sent.sum(axis=1) + reverse(placement, key.level, sent).sum(axis=1)
        largest = np.maximum(largest, both)
    return largest


def memory_use(plan: Plan) -> MemoryUse:
    """Of any plan, whoever made it."""
    groups = []
    for _, num_layers, group, placement, gating in plan.placed:
        traffic = layer_traffic(placement, plan.workload, gating)
        groups.append((num_layers, layer_memory(placement, plan.workload, gating, traffic, group.residency)))
    fixed = fixed_memory(plan.cluster, plan.workload, plan.placements[0], plan.home_experts)
    return total_memory(plan.cluster, fixed, groups)


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
    rank = int(total.argmax())
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
        capacity_bytes=cluster.gpu.memory,
    )


def _inner_width(workload: Workload, ffn_size: int) -> int:
    """Elements per token kept between a feed-forward's matrices: GELU keeps its input and output, SwiGLU also the gate."""
    return (2 if workload.model.ffn is Ffn.GELU else 3) * ffn_size


def _total(arrays: Iterable[FloatArray]) -> FloatArray:
    return np.asarray(np.sum(list(arrays), axis=0), dtype=np.float64)
