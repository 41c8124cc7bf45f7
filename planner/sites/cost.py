"""Cost and memory of a serving table in closed form: what ``planner.cost`` and ``planner.memory`` find for the same plan,
without arrays over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Wire
from hybridep.coding import Coding, moved_coding, row_coding
from hybridep.plan import Residency
from hybridep.traffic import TOKENS, Op, OpLevel, gathers_and_returns, is_late
from planner.activations import pre_expert_bytes, routed_bytes
from planner.cost import by_op, coded_s, dense_coding_part, fixed_computation
from planner.layer_times import BlockTimes, layer_times, timed_block
from planner.memory import (
    ACTIVATIONS,
    CODECS,
    COPIES,
    Ahead,
    LayerMemory,
    dense_reduction_bytes,
    fits,
    fixed_passing_bytes,
    fixed_rank_bytes,
    kept_by_codecs,
    lasting_copy_bytes,
    narrows,
    passing_bytes,
    unsent_dense_bytes,
)
from planner.price import step_usd
from planner.sites.exchange import Exchange, LayerExchanges, layer_exchanges
from planner.sites.problem import Configuration, SiteProblem
from planner.sites.reductions import dense_exchanges, shared_exchanges


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteCost:
    """Of a plan with one configuration in all layers."""

    step_s: float
    parts_s: dict[str, float]
    memory_bytes: float
    """Of the fullest rank: the one that needs most of what it has."""
    fullest_rank: int
    capacity_bytes: float
    """What that rank has."""
    wan_bytes: float
    step_usd: float
    """What the step costs."""

    @property
    def fits(self) -> bool:
        """Every rank has room."""
        return fits(self.memory_bytes, self.capacity_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedCost:
    """What no serving table changes."""

    parts_s: dict[str, float]
    lasting_bytes: FloatArray
    """[D, n]."""
    passing_bytes: FloatArray
    """[D, n]."""
    wan_bytes: float
    egress_usd: float
    compute_s: FloatArray
    """[D, n]: computation alone."""

    @property
    def total_s(self) -> float:
        """Sum of the parts."""
        return sum(self.parts_s.values())


def wire_of(problem: SiteProblem, exchange: Exchange) -> Wire:
    """Bytes of payloads at the exchange's level."""
    return problem.wires[exchange.level]


def block_times(problem: SiteProblem, layer: LayerExchanges) -> BlockTimes:
    """Of one layer and micro-batch."""
    gpu = problem.cluster.gpu
    chunks = problem.schedule.chunks
    times = dict.fromkeys(Op, 0.0)

    def add(op: Op, exchange: Exchange, unit_bytes: float) -> None:
        latency_s, per_byte_s = exchange.line(problem)
        late = per_byte_s > 0 and is_late(OpLevel(op, exchange.level))
        often = chunks if op in TOKENS else 1
        times[op] += often * (late * gpu.jitter + latency_s) + per_byte_s * unit_bytes

    for exchange in layer.copies:
        wire = wire_of(problem, exchange)
        add(Op.EXPERT_GATHER, exchange, wire.expert_bytes)
        add(Op.GRADIENT_RETURN, exchange.reverse, wire.expert_gradient_bytes)
    for exchange in layer.rows:
        there, back, wire = exchange, exchange.reverse, wire_of(problem, exchange)
        add(Op.TOKEN_DISPATCH, there, wire.dispatch_row_bytes)
        add(Op.COMBINE_BACKWARD, there, wire.combine_row_bytes)
        add(Op.TOKEN_COMBINE, back, wire.combine_row_bytes)
        add(Op.DISPATCH_BACKWARD, back, wire.dispatch_gradient_row_bytes)
    for exchange in layer.counts:
        add(Op.TOKEN_COUNTS, exchange, float(chunks))
    for exchange in shared_exchanges(problem, layer):
        add(Op.SHARED_REDUCE_SCATTER, exchange, 1.0)
        add(Op.SHARED_ALL_GATHER, exchange.reverse, 1.0)
    # Bounds leave the overhead of held experts out: it is never negative.
    coding_s = {}
    if gpu.coding is not None and any(one.coded for one in problem.codecs):
        coding_s = by_op(coded_s(gpu, _coding(problem, layer), problem.codecs))
    held = problem.at_home + layer.copies_held
    return timed_block(problem.compute, layer.served, held, times, coding_s, chunks, problem.recompute)


def _coding(problem: SiteProblem, layer: LayerExchanges) -> Coding:
    """Of one layer and micro-batch, [D, n] each."""
    work, coding = problem.workload, Coding()
    for exchange in layer.rows:
        level = exchange.level
        if exchange.once is not None and "tokens" in problem.codecs[level].coded:
            coding |= row_coding(level, float(work.combine_row_bytes), exchange.once, exchange.out, exchange.into)
    for exchange in layer.copies:
        level = exchange.level
        if exchange.once is not None:
            coding |= moved_coding(level, work, problem.codecs[level], exchange.once, exchange.out, exchange.into)
    return coding


@lru_cache(maxsize=8)
def fixed_cost(problem: SiteProblem) -> FixedCost:
    """Head, dense all-reduce and optimizer; weights, states and the activations of the dense parts (shared experts' not)."""
    work, at_home = problem.workload, problem.at_home
    parts, compute_s = fixed_computation(problem.compute, work.model.num_moe_layers * at_home, problem.recompute)
    reduced, gathered = dense_exchanges(problem)
    moved = [(one, 1.0) for one in (*reduced, *gathered)]
    per_rank, per_home = fixed_rank_bytes(work, problem.compute.share, problem.cluster.sizes, problem.recompute)
    reduction = dense_reduction_bytes(problem.cluster.sizes, work, problem.codecs)
    passing = fixed_passing_bytes(work, problem.compute.share, reduction, problem.recompute)
    unsent_bytes = unsent_dense_bytes(problem.cluster, work, problem.codecs)
    return FixedCost(
        parts_s=parts
        | {
            Op.DENSE_REDUCE_SCATTER.value: sum(exchange.seconds(problem) for exchange in reduced),
            Op.DENSE_ALL_GATHER.value: sum(exchange.seconds(problem) for exchange in gathered),
            **dense_coding_part(problem.cluster, work, problem.codecs),
        },
        lasting_bytes=np.asarray(per_rank + unsent_bytes + at_home * per_home, dtype=np.float64),
        passing_bytes=np.broadcast_to(passing, at_home.shape),
        wan_bytes=bytes_between(moved),
        egress_usd=egress_usd(problem, moved),
        compute_s=compute_s,
    )


def site_cost(problem: SiteProblem, table: IntArray, configuration: Configuration) -> SiteCost:
    """Of ``table`` ([D, E]) in all MoE layers."""
    layer = layer_exchanges(problem, table, configuration.inside)
    return cost_of(problem, layer, configuration.residency)


def cost_of(problem: SiteProblem, layer: LayerExchanges, residency: Residency, known: BlockTimes | None = None) -> SiteCost:
    """Of exchanges that are known, and their ``block_times`` where those are too."""
    fixed, layers, batches = fixed_cost(problem), problem.num_layers, problem.workload.training.micro_batches
    times = layer_times(known or block_times(problem, layer), batches, residency, problem.schedule)
    parts = dict(fixed.parts_s)
    for name, seconds in times.parts_s.items():
        parts[name] = parts.get(name, 0.0) + layers * seconds
    step_s = sum(parts.values())
    moved = list(moved_in_a_step(problem, layer, residency))
    egress = fixed.egress_usd + layers * egress_usd(problem, moved)
    needs, has = rank_memory_bytes(problem, layer, residency), problem.compute.memory_bytes
    fullest = int((needs / has).argmax())
    return SiteCost(
        step_s=step_s,
        parts_s=parts,
        memory_bytes=float(needs.flat[fullest]),
        fullest_rank=fullest,
        capacity_bytes=float(has.flat[fullest // problem.num_inside]),
        wan_bytes=fixed.wan_bytes + layers * bytes_between(moved),
        step_usd=step_usd(problem.cluster.rent_usd_per_s, egress, step_s),
    )


def moved_in_a_step(problem: SiteProblem, layer: LayerExchanges, residency: Residency) -> Iterator[tuple[Exchange, float]]:
    """Each exchange of one layer, with the bytes of one row or expert in all its repetitions."""
    batches = problem.workload.training.micro_batches
    gathers, returns = gathers_and_returns(residency, batches)
    for exchange in layer.rows:
        wire = wire_of(problem, exchange)
        yield exchange, float(batches * wire.row_there_bytes)
        yield exchange.reverse, float(batches * wire.row_back_bytes)
    for exchange in layer.counts:
        yield exchange, float(batches * problem.schedule.chunks)
    for exchange in layer.copies:
        wire = wire_of(problem, exchange)
        yield exchange, float(gathers * wire.expert_bytes)
        yield exchange.reverse, float(returns * wire.expert_gradient_bytes)
    for exchange in shared_exchanges(problem, layer):
        yield exchange, 1.0
        yield exchange.reverse, 1.0


def bytes_between(moved: Sequence[tuple[Exchange, float]]) -> float:
    """Of (exchange, bytes per unit) pairs, between sites."""
    return sum(unit_bytes * float(exchange.out.sum()) for exchange, unit_bytes in moved if exchange.level == 0)


def egress_usd(problem: SiteProblem, moved: Sequence[tuple[Exchange, float]]) -> float:
    """What these bytes cost."""
    prices = problem.egress_usd_per_byte
    if prices is None:
        return 0.0
    return sum(unit_bytes * float((exchange.pairs * prices).sum()) for exchange, unit_bytes in moved if exchange.level == 0)


def layer_memory(problem: SiteProblem, layer: LayerExchanges, residency: Residency) -> LayerMemory:
    """``planner.memory.layer_memory`` as arrays [D, n]."""
    work = problem.workload
    largest = [exchange.both * wire_of(problem, exchange).dispatch_row_bytes for exchange in layer.rows]
    largest += [exchange.out * wire_of(problem, exchange).expert_bytes for exchange in layer.copies]
    if narrows(work.training, residency):
        largest += [exchange.into * wire_of(problem, exchange).expert_gradient_bytes for exchange in layer.copies]
    largest += [exchange.both for exchange in shared_exchanges(problem, layer)]
    routed = routed_bytes(work, layer.served, layer.arrived, problem.recompute)
    before = pre_expert_bytes(work, problem.compute.share, problem.recompute)
    lasting = {
        ACTIVATIONS: routed.kept + before.kept,
        COPIES: lasting_copy_bytes(work, layer.copies_held, residency),
    }
    if any(one.coded for one in problem.codecs) and (kept := _codec_state_bytes(problem, layer)).any():
        lasting[CODECS] = kept
    return LayerMemory(
        lasting=lasting,
        passing=passing_bytes(
            work,
            problem.compute.share,
            _largest(largest, layer.served.shape),
            _ahead(problem, layer),
            layer.served,
            layer.copies_held,
            problem.at_home,
            residency,
            (routed.again, before.again),
            problem.schedule.chunks,
        ),
    )


def _ahead(problem: SiteProblem, layer: LayerExchanges) -> Ahead:
    """[D, n] each."""
    combine, dispatch = np.zeros(layer.served.shape), np.zeros(layer.served.shape)
    for exchange in layer.rows:
        wire = wire_of(problem, exchange)
        combine += exchange.into * wire.combine_row_bytes
        dispatch += exchange.out * wire.dispatch_gradient_row_bytes
    return Ahead(combine, dispatch)


def _codec_state_bytes(problem: SiteProblem, layer: LayerExchanges) -> FloatArray:
    """[D, n]: what one layer's codecs keep between steps."""
    kept = np.zeros(layer.served.shape)
    for exchange in layer.copies:
        if exchange.out.any():
            present = problem.at_home if exchange.level == 0 else problem.at_home + layer.copies_held
            kept += kept_by_codecs(wire_of(problem, exchange), exchange.out, exchange.into, present)
    return kept + (problem.workload.expert_bytes if shared_exchanges(problem, layer) else 0.0)


def rank_memory_bytes(problem: SiteProblem, layer: LayerExchanges, residency: Residency) -> FloatArray:
    """[D, n]: what each rank needs."""
    fixed, held = fixed_cost(problem), layer_memory(problem, layer, residency)
    lasting = fixed.lasting_bytes + problem.num_layers * held.lasting_bytes
    return np.asarray(lasting + np.maximum(held.passing_bytes, fixed.passing_bytes))


def _largest(arrays: list[FloatArray], shape: tuple[int, ...]) -> FloatArray:
    return np.asarray(np.max(np.stack([np.zeros(shape), *arrays]), axis=0))
