"""Seconds of one MoE layer: of its single operations, and its share of a step.

A block's gather of copies runs beside its pre-expert computation (and the block's fixed overhead), its gradient return beside
the backward of its pre-expert part.
Forward of a block: max(pre-expert, gather), dispatch hops, expert computation, combine hops. Backward: combine-backward
hops, a second gather when copies live for one micro-batch, expert backward, dispatch-backward hops, max(pre-expert
backward, gradient return). The second gather is started when the block's backward starts and waited for before the expert
backward; it shares the links with the combine-backward hops, so nothing of it is hidden.

Coding and decoding occupy the rank: tokens are coded before a hop and decoded after it, and what copies and their gradients take
is added to the computation that they travel beside, so only their transfers can hide.

Where tokens travel in several parts (``Schedule.chunks``), the experts compute one while others are on the links: ``piped_s``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.plan import Residency, Schedule
from hybridep.recompute import Recompute
from hybridep.traffic import MOVES, SHARED, Op, gathers_and_returns
from planner.compute import Compute

PRE_EXPERT = "pre_expert"
EXPERTS = "experts"
BLOCK_OVERHEAD = "block_overhead"
HEAD = "head"
OPTIMIZER = "optimizer"
CODING = "coding"


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds that one layer, or what lies outside the layers, takes of a step; they add up."""

    parts_s: dict[str, float]
    """By kind. A transfer that runs beside computation counts only as far as it shows, so the parts add up to the time."""
    hidden_s: dict[str, float]
    """By kind, seconds of transfers that computation hides; of experts' computation, what their tokens' transfers hide."""

    @property
    def total_s(self) -> float:
        """Sum of the parts."""
        return sum(self.parts_s.values())

    @property
    def chain_s(self) -> float:
        """Without what copies travel for: what no schedule hides."""
        moves = {op.value for op in MOVES}
        return sum(seconds for name, seconds in self.parts_s.items() if name not in moves)


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of single operations of one MoE layer and micro-batch, on the slowest rank or the busiest link; all parts together
    where tokens travel in parts."""

    compute: Compute
    """Of ranks, without experts."""
    expert_s: float
    """Forward; backward takes ``backward_cost`` times that."""
    exchanges_s: dict[Op, float]
    """Each kind's hops over all levels; the gather and the return of copies once."""
    coding_s: dict[Op, float] = field(default_factory=dict)
    """Of their payloads, before and after; absent where it takes no time."""
    experts_s: FloatArray
    """Forward of each rank's experts by itself (any shape)."""
    chunks: int = 1
    """Parts in which tokens travel."""
    recompute: Recompute = Recompute.NOTHING

    @property
    def pre_expert_s(self) -> float:
        """Forward; backward takes twice that, and ``again_s``."""
        return float(self.compute.pre_expert_s.flat[self.compute.slowest])

    @property
    def overhead_s(self) -> float:
        """Of that rank."""
        return float(self.compute.overhead_s.flat[self.compute.slowest])

    @property
    def backward_cost(self) -> int:
        """What the experts' backward takes, in forwards of theirs."""
        return self.recompute.backward_cost

    @property
    def again_s(self) -> float:
        """Backward of all but routed experts on the slowest rank, beyond twice its forward."""
        others_s = self.compute.others_s
        return float((2 * others_s + self.compute.again_s(self.recompute)).max() - 2 * others_s.max())

    @property
    def compute_s(self) -> FloatArray:
        """Forward and backward of each rank: computation alone."""
        others_s = 3 * self.compute.others_s + self.compute.again_s(self.recompute)
        return np.asarray(others_s + (1 + self.backward_cost) * self.experts_s)


def timed_block(
    compute: Compute,
    served: FloatArray,
    held: FloatArray | IntArray,
    exchanges_s: dict[Op, float],
    coding_s: dict[Op, float],
    chunks: int = 1,
    recompute: Recompute = Recompute.NOTHING,
) -> BlockTimes:
    """Of ranks that compute ``served`` rows with ``held`` experts each, whose fixed cost each of ``chunks`` parts has."""
    expert_s = compute.expert_s(served, held * chunks)
    return BlockTimes(
        compute=compute,
        expert_s=float(expert_s.max()),
        exchanges_s=exchanges_s,
        experts_s=expert_s,
        coding_s=coding_s,
        chunks=chunks,
        recompute=recompute,
    )


def piped_s(out_s: float, expert_s: float, back_s: float, chunks: int) -> float:
    """Tokens to the experts and back in ``chunks`` equal parts; arguments are those of all parts together. A rank's exchanges
    keep one order, all dispatches before all combines, and so do its parts' computations. The longest chain goes over to the
    experts, and back, with the first part or the last."""
    part = 1 / chunks
    return max(
        out_s + back_s,
        out_s + part * expert_s + part * back_s,
        part * out_s + expert_s + part * back_s,
        part * out_s + part * expert_s + back_s,
    )


def layer_times(times: BlockTimes, batches: int, residency: Residency, schedule: Schedule) -> LayerTimes:
    """One MoE layer's share of an optimizer step: ``batches`` micro-batches, forward and backward, without prefetch."""
    gathers, returns = gathers_and_returns(residency, batches)
    forward_gathers = min(gathers, batches)
    gather, gradient_return = times.exchanges_s[Op.EXPERT_GATHER], times.exchanges_s[Op.GRADIENT_RETURN]
    beside_s = times.pre_expert_s + times.overhead_s if schedule.overlap else 0.0
    beside_backward_s = 2 * beside_s + times.again_s if schedule.overlap else 0.0
    hidden_gather = min(gather, beside_s)
    hidden_return = min(gradient_return, beside_backward_s)
    hidden_experts = batches * _hidden_experts_s(times)
    parts = {
        PRE_EXPERT: 3 * batches * times.pre_expert_s + batches * times.again_s,
        EXPERTS: max((1 + times.backward_cost) * batches * times.expert_s - hidden_experts, 0.0),
        BLOCK_OVERHEAD: 3 * batches * times.overhead_s,
        Op.EXPERT_GATHER.value: gathers * gather - forward_gathers * hidden_gather,
        Op.GRADIENT_RETURN.value: returns * (gradient_return - hidden_return),
    }
    for op in (Op.TOKEN_COUNTS, Op.TOKEN_DISPATCH, Op.TOKEN_COMBINE, Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD):
        parts[op.value] = batches * times.exchanges_s[op]
    if times.coding_s:
        often = {Op.EXPERT_GATHER: gathers, Op.GRADIENT_RETURN: returns}
        parts[CODING] = sum(often.get(op, batches) * seconds for op, seconds in times.coding_s.items())
    hidden = {
        Op.EXPERT_GATHER.value: forward_gathers * hidden_gather,
        Op.GRADIENT_RETURN.value: returns * hidden_return,
    }
    if hidden_experts:
        hidden[EXPERTS] = hidden_experts
    # The layer's shared expert is renewed once per step, behind the last return and beside the same computation.
    left_s = beside_backward_s - hidden_return
    for op in SHARED:
        hidden[op.value] = min(times.exchanges_s[op], left_s)
        parts[op.value] = times.exchanges_s[op] - hidden[op.value]
        left_s -= hidden[op.value]
    return LayerTimes(parts_s=parts, hidden_s=hidden)


_FORWARDS = (Op.TOKEN_COUNTS, Op.TOKEN_DISPATCH), (Op.TOKEN_COMBINE,)
_BACKWARDS = (Op.COMBINE_BACKWARD,), (Op.DISPATCH_BACKWARD,)


def _hidden_experts_s(times: BlockTimes) -> float:
    """Of one micro-batch's computation, forward and backward."""
    if times.chunks == 1:
        return 0.0

    def hidden_s(ways: tuple[tuple[Op, ...], tuple[Op, ...]], expert_s: float) -> float:
        out_s, back_s = (sum(times.exchanges_s[op] + times.coding_s.get(op, 0.0) for op in way) for way in ways)
        return out_s + expert_s + back_s - piped_s(out_s, expert_s, back_s, times.chunks)

    return hidden_s(_FORWARDS, times.expert_s) + hidden_s(_BACKWARDS, times.backward_cost * times.expert_s)
