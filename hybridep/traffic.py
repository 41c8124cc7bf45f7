"""The one traffic function: (plan, routing) -> bytes per operation, source and destination.

The planner and the simulator put times on these bytes, each in its own way; the runtime counts what it sends and must
find the same numbers. An array for level l has the shape [G, SF_l]: entry [g, c] goes from rank g to the rank that
differs from it only in having coordinate c at level l. An entry with g's own coordinate stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.codecs import Codecs, ExpertCodec, Wire, wires
from hybridep.gating import Gating
from hybridep.placement import Placement
from hybridep.plan import Plan, Residency
from hybridep.topology import Cluster
from hybridep.workload import Model, Workload

COUNT_BYTES = 8
"""Before each dispatch hop a rank tells each possible destination how many rows follow (one int64)."""
_EVERYWHERE = 32
"""Up to so many places for each expert of each rank, all places are counted: beyond that sorting is faster."""
_REMEMBERED = 1 << 18
"""Up to so many pairs of a rank and an expert, or a worker, what is expected is remembered: a search for pipelines asks for the
same placements again with other layers, residencies and recomputation."""


_T = TypeVar("_T")
_Rows = tuple[FloatArray, ...]


class Op(Enum):
    """Kinds of transfer in a training step."""

    EXPERT_GATHER = "expert_gather"
    TOKEN_COUNTS = "token_counts"
    TOKEN_DISPATCH = "token_dispatch"
    TOKEN_COMBINE = "token_combine"
    COMBINE_BACKWARD = "combine_backward"
    DISPATCH_BACKWARD = "dispatch_backward"
    GRADIENT_RETURN = "gradient_return"
    SHARED_REDUCE_SCATTER = "shared_reduce_scatter"
    SHARED_ALL_GATHER = "shared_all_gather"
    DENSE_REDUCE_SCATTER = "dense_reduce_scatter"
    DENSE_ALL_GATHER = "dense_all_gather"


DENSE = (Op.DENSE_REDUCE_SCATTER, Op.DENSE_ALL_GATHER)
"""The sum of dense gradients, and the gather of sums and weights."""
DENSE_PIECE = 1 << 22
"""Elements of a part that travel at once inside sites, where latencies are short: what arrives takes memory."""
SHARED = (Op.SHARED_REDUCE_SCATTER, Op.SHARED_ALL_GATHER)
"""What keeps a layer's shared expert in step, where copies are coded against one."""
MOVES = (Op.EXPERT_GATHER, Op.GRADIENT_RETURN, *SHARED)
"""What can travel ahead of its block, or after it, beside tokens."""
TOKENS = (Op.TOKEN_COUNTS, Op.TOKEN_DISPATCH, Op.TOKEN_COMBINE, Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD)
"""What travels once for each part of a micro-batch's tokens."""


class OpLevel(NamedTuple):
    """One kind of transfer at one level of the hierarchy."""

    op: Op
    level: int


Traffic = dict[OpLevel, FloatArray]


def is_late(key: OpLevel) -> bool:
    """Whether ``Gpu.jitter`` counts: for copies at every level, for tokens below the outermost."""
    return key.op in (Op.EXPERT_GATHER, Op.GRADIENT_RETURN) or (key.level > 0 and key.op not in DENSE)


def rank_sequences(placement: Placement, gating: Gating) -> FloatArray:
    """[G]: sequences of each rank in one micro-batch."""
    of_sites = np.broadcast_to(np.array(gating.sequences, dtype=np.float64), placement.sizes[0])
    return np.repeat(of_sites, placement.num_gpus // placement.sizes[0])


def reverse(placement: Placement, level: int, sent: FloatArray) -> FloatArray:
    """[G, SF_l]: what each rank receives from whom, where ``sent`` ([G, SF_l]) is sent: out[peer(g, c), x_l(g)] = sent[g, c]."""
    shape = (*placement.sizes, placement.sizes[level])
    return np.ascontiguousarray(np.swapaxes(sent.reshape(shape), level, len(placement.sizes))).reshape(sent.shape)


def routed_rows(placement: Placement, routing: IntArray, *, per_choice: bool = False) -> list[FloatArray]:
    """Token rows of one dispatch, exactly. ``routing`` is [G, T, K], expert ids (-1 for none, and for tokens that a rank lacks);
    returns per level [G, SF_l] rows sent. A token crosses to a coordinate once, however many of its experts are served there; or
    once for each of them (``per_choice``)."""
    chosen = routing >= 0
    experts = np.where(chosen, routing, 0)
    prefix = np.zeros_like(experts)
    rows = []
    for level, size in enumerate(placement.sizes):
        own = placement.coordinates[:, level]
        prefix = prefix * size + placement.serve[level][own[:, None, None], experts]
        moves = chosen if per_choice else each_once(prefix, chosen)
        ranks = np.repeat(np.arange(len(moves)), moves.sum(axis=(1, 2)))
        rows.append(_rows_at(placement, level, ranks, prefix[moves], np.ones(ranks.size)))
    return rows


def each_once(place: IntArray, chosen: BoolArray) -> BoolArray:
    """[G, T, K]: of each token's choices that are ``chosen``, the first at each ``place``. Choices are few, and so compared: to
    find what differs among all tokens' takes fifty times as long (numpy 2.4)."""
    first = chosen.copy()
    for choice in range(1, place.shape[-1]):
        for earlier in range(choice):
            first[..., choice] &= (place[..., choice] != place[..., earlier]) | ~chosen[..., earlier]
    return first


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Serving tables and what tokens choose; equal where those say the same."""

    sizes: tuple[int, ...]
    serve: tuple[bytes, ...]
    gating: Gating
    placement: Placement = field(compare=False)


def _remembered(compute: Callable[[Placement, Gating, _T], _Rows]) -> Callable[[Placement, Gating, _T], _Rows]:
    """``compute`` with what it found for the last tables, if they are not too large; arrays to read only."""

    @lru_cache(maxsize=64)
    def known(asked: _Asked, more: _T) -> _Rows:
        found = compute(asked.placement, asked.gating, more)
        for one in found:
            one.setflags(write=False)
        return found

    def found(placement: Placement, gating: Gating, more: _T) -> _Rows:
        if placement.num_gpus * max(placement.num_experts, sum(placement.sizes)) > _REMEMBERED:
            return compute(placement, gating, more)
        serve = tuple(table.tobytes() for table in placement.serve)
        return known(_Asked(sizes=placement.sizes, serve=serve, gating=gating, placement=placement), more)

    return found


def expected_rows(placement: Placement, gating: Gating, *, per_choice: bool = False) -> list[FloatArray]:
    """Token rows of one dispatch as expected, to read only: a place is visited when one of the experts that it serves is chosen
    and takes the token; or once for each of them (``per_choice``)."""
    return list(_expected_rows(placement, gating, per_choice))


@_remembered
def _expected_rows(placement: Placement, gating: Gating, per_choice: bool) -> _Rows:
    prefix = np.zeros((placement.num_gpus, placement.num_experts), dtype=np.int64)
    sequences = rank_sequences(placement, gating)
    rows = []
    for level, size in enumerate(placement.sizes):
        prefix = prefix * size + placement.serve[level][placement.coordinates[:, level]]
        num_places = math.prod(placement.sizes[: level + 1])
        if per_choice:
            visits = _choices(prefix, num_places, np.outer(sequences, gating.travelling))
        else:
            visits = _visits(gating, sequences, prefix, num_places)
        rows.append(_rows_at(placement, level, *visits))
    return tuple(rows)


def arriving_rows(placement: Placement, gating: Gating, num_hops: int | None = None) -> FloatArray:
    """[G]: rows that end up at each rank in one dispatch as expected, or are there after its first ``num_hops``; those of its own
    tokens included. To read only."""
    return _arriving_rows(placement, gating, num_hops)[0]


@_remembered
def _arriving_rows(placement: Placement, gating: Gating, num_hops: int | None) -> _Rows:
    place = placement.serving_rank if num_hops is None else placement.reached(num_hops)
    _, rank, rows = _visits(gating, rank_sequences(placement, gating), place, placement.num_gpus)
    return (np.bincount(rank, weights=rows, minlength=placement.num_gpus).astype(np.float64),)


def _visits(gating: Gating, sequences: FloatArray, place: IntArray, num_places: int) -> tuple[IntArray, IntArray, FloatArray]:
    """(ranks, places, rows): how many tokens of each rank, with so many ``sequences`` [G], are expected to visit each place;
    ``place`` [G, E] is where each rank's tokens find each expert."""
    keys = np.arange(len(place))[:, None] * num_places + place
    if (most := len(place) * num_places) <= _EVERYWHERE * keys.size:
        counts = np.bincount(keys.ravel(), minlength=most)
        found = np.flatnonzero(counts)
        served = counts[found]
    else:
        # Counted where an expert is found, not everywhere: thousands of ranks reach few experts each.
        found, served = np.unique(keys, return_counts=True)
    if gating.counts_decide:
        hit = gating.hit_by_count[served]
    elif gating.popularity is None and gating.groups is not None:
        groups = gating.groups.groups
        which = np.searchsorted(found, keys) * groups + np.arange(gating.num_experts) // gating.groups.size
        hit = gating.hit_by_groups(np.bincount(which.ravel(), minlength=len(found) * groups).reshape(-1, groups))
    else:
        member = np.zeros((len(found), gating.num_experts), dtype=np.bool_)
        member[np.searchsorted(found, keys), np.arange(gating.num_experts)] = True
        hit = gating.hit(member)
    rank = found // num_places
    return rank, found % num_places, sequences[rank] * gating.sequence_length * hit


def _choices(place: IntArray, num_places: int, chosen: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """(ranks, places, rows): how many choices [G, E] of each rank's tokens are served at each place."""
    keys = (np.arange(len(place))[:, None] * num_places + place)[chosen > 0]
    found, where = np.unique(keys, return_inverse=True)
    rows = np.bincount(where.reshape(-1), weights=chosen[chosen > 0], minlength=found.size)
    return found // num_places, found % num_places, rows.astype(np.float64)


def _rows_at(placement: Placement, level: int, origin: IntArray, code: IntArray, weight: FloatArray) -> FloatArray:
    """Sum ``weight`` at [sending rank, coordinate]; ``code`` is the mixed-radix prefix reached after this hop."""
    size = placement.sizes[level]
    inner = math.prod(placement.sizes[level + 1 :])
    coordinate, own = code % size, placement.coordinates[origin, level]
    sender = (code // size * size + own) * inner + origin % inner
    moving = coordinate != own
    rows = np.bincount((sender * size + coordinate)[moving], weights=weight[moving], minlength=placement.num_gpus * size)
    return rows.astype(np.float64).reshape(placement.num_gpus, size)


def served_copies(placement: Placement, gating: Gating, routing: IntArray | None = None) -> FloatArray:
    """[G, E]: rows that each rank computes for each expert; as expected where there is no ``routing``. Experts padded to
    their capacity compute the same whatever the routing."""
    shape = placement.num_gpus, placement.num_experts
    if routing is None or gating.padded:
        experts, rows = np.arange(placement.num_experts), np.outer(rank_sequences(placement, gating), gating.rows).ravel()
        served = placement.serving_rank
    else:
        flat = routing.reshape(placement.num_gpus, -1)
        source, slot = np.nonzero(flat >= 0)
        experts, rows = flat[source, slot], np.ones(source.size)
        served = placement.serving_rank[source, experts]
    places = served * placement.num_experts + experts
    return np.bincount(places.ravel(), weights=rows, minlength=math.prod(shape)).reshape(shape).astype(np.float64)


class Direct(NamedTuple):
    """Bytes from ranks to other ranks, [n] each, in one hop."""

    source: IntArray
    destination: IntArray
    size_bytes: FloatArray

    def reverse(self) -> Direct:
        """The transfers that return as many bytes from each destination to its source."""
        return Direct(self.destination, self.source, self.size_bytes)

    def part(self, parts: int) -> Direct:
        """One of ``parts`` equal parts of the transfers."""
        return Direct(self.source, self.destination, self.size_bytes / parts)


def direct_traffic(
    placement: Placement, workload: Workload, gating: Gating, routing: IntArray | None = None, codecs: Sequence[Codecs] = ()
) -> dict[Op, Direct]:
    """The token exchanges of one layer and micro-batch as a plain All-to-All has them: every choice of an expert is a row that
    goes straight to the rank that serves it, and its output comes back. A row is the hidden vector alone: gate weights stay
    with the token. As expected where there is no ``routing`` ([G, T, K], -1 for none)."""
    num_gpus, num_experts = placement.num_gpus, placement.num_experts
    if routing is None:
        chosen = np.outer(rank_sequences(placement, gating), gating.travelling)
    else:
        flat = np.where(routing >= 0, routing + np.arange(num_gpus)[:, None, None] * num_experts, -1).ravel()
        chosen = np.bincount(flat[flat >= 0], minlength=num_gpus * num_experts).reshape(num_gpus, num_experts).astype(np.float64)
    source, destination, rows = _choices(placement.serving_rank, num_gpus, chosen)
    moves = source != destination
    source, destination, rows = source[moves], destination[moves], rows[moves]
    level = (placement.coordinates[source] != placement.coordinates[destination]).argmax(axis=1)
    row_bytes = np.array([wire.combine_row_bytes for wire in wires(workload, codecs, len(placement.sizes))], dtype=np.float64)
    out = Direct(source, destination, rows * row_bytes[level])
    return {
        Op.TOKEN_COUNTS: Direct(source, destination, np.full(rows.size, float(COUNT_BYTES))),
        Op.TOKEN_DISPATCH: out,
        Op.TOKEN_COMBINE: out.reverse(),
        Op.COMBINE_BACKWARD: out,
        Op.DISPATCH_BACKWARD: out.reverse(),
    }


def token_traffic(
    placement: Placement,
    workload: Workload,
    rows: Sequence[FloatArray],
    codecs: Sequence[Codecs] = (),
    *,
    per_choice: bool = False,
    chunks: int = 1,
) -> Traffic:
    """Bytes of the four token exchanges of one layer and micro-batch, given the rows of its dispatch. ``codecs`` per level;
    exact ones when left out, here and below. Where rows are ``per_choice`` gate weights stay with the token. Each of ``chunks``
    parts has counts of its own; rows are as many in any case."""
    traffic: Traffic = {}
    for level, (sent, wire) in enumerate(zip(rows, wires(workload, codecs, len(rows)), strict=True)):
        if placement.sizes[level] == 1:
            continue
        peers = placement.token_links[level][placement.coordinates[:, level]]
        traffic[OpLevel(Op.TOKEN_COUNTS, level)] = peers.astype(np.float64) * (chunks * COUNT_BYTES)
        dispatch_bytes = wire.combine_row_bytes if per_choice else wire.dispatch_row_bytes
        gradient_bytes = wire.combine_row_bytes if per_choice else wire.dispatch_gradient_row_bytes
        traffic[OpLevel(Op.TOKEN_DISPATCH, level)] = sent * dispatch_bytes
        traffic[OpLevel(Op.TOKEN_COMBINE, level)] = reverse(placement, level, sent * wire.combine_row_bytes)
        traffic[OpLevel(Op.COMBINE_BACKWARD, level)] = sent * wire.combine_row_bytes
        traffic[OpLevel(Op.DISPATCH_BACKWARD, level)] = reverse(placement, level, sent * gradient_bytes)
    return traffic


def copy_traffic(placement: Placement, workload: Workload, codecs: Sequence[Codecs] = ()) -> Traffic:
    """Bytes of one gather of copies and of one return of their gradients, one layer; and, where copies travel as the
    difference from the layer's shared expert, of the reduction that keeps that one in step."""
    traffic: Traffic = {}
    needs_shared = False
    for level, wire in enumerate(wires(workload, codecs, len(placement.sizes))):
        if placement.sizes[level] == 1:
            continue
        moved = placement.num_moved[level].astype(np.float64)
        traffic[OpLevel(Op.EXPERT_GATHER, level)] = moved * wire.expert_bytes
        traffic[OpLevel(Op.GRADIENT_RETURN, level)] = reverse(placement, level, moved * wire.expert_gradient_bytes)
        needs_shared |= wire.codecs.experts is ExpertCodec.SHARED_RESIDUAL and bool(moved.any())
    if needs_shared:
        exact = wires(workload, (), len(placement.sizes))
        traffic |= _all_reduce_traffic(placement, workload.model.expert_params, exact, exact, SHARED)
    return traffic


def split_sizes(length: int, parts: int) -> list[int]:
    """``length`` elements over ``parts`` workers: the first ``length % parts`` get one more."""
    return [length // parts + (part < length % parts) for part in range(parts)]


def split_each(lengths: IntArray, parts: int) -> IntArray:
    """[n, parts]: ``split_sizes`` of each of ``lengths`` [n]."""
    return np.asarray(lengths[:, None] // parts + (np.arange(parts) < lengths[:, None] % parts))


def dense_shard_params(model: Model, sizes: Sequence[int]) -> int:
    """Dense parameters, at most, that one rank updates and keeps the optimizer's state of: ranks of one worker of the outermost
    level share them out (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054)."""
    return -(-model.dense_params // math.prod(sizes[1:]))


def gathered_wires(workload: Workload, codecs: Sequence[Codecs], num_levels: int) -> list[Wire]:
    """How the all-gather of what is dense travels: sums of gradients at the outermost level, and then, updated, weights, which
    are exact."""
    return [*wires(workload, codecs, num_levels)[:1], *wires(workload, (), num_levels)[1:]]


def dense_traffic(placement: Placement, workload: Workload, codecs: Sequence[Codecs] = ()) -> Traffic:
    """Bytes that dense gradients and weights are, once per step: reduce-scatter of gradients innermost level first, each rank
    sending every peer that peer's part; then all-gather outermost first, as many elements in reverse."""
    num_levels = len(placement.sizes)
    by_level, gathered = wires(workload, codecs, num_levels), gathered_wires(workload, codecs, num_levels)
    return _all_reduce_traffic(placement, workload.model.dense_params, by_level, gathered, DENSE)


def _all_reduce_traffic(
    placement: Placement, length: int, by_level: Sequence[Wire], gathered: Sequence[Wire], ops: tuple[Op, Op]
) -> Traffic:
    def sent(wire: Wire) -> FloatArray:
        bytes_GC = wire.dense_bytes(parts)
        bytes_GC[np.arange(len(own)), own] = 0.0
        return bytes_GC

    traffic: Traffic = {}
    shard = np.full(placement.num_gpus, length, dtype=np.int64)
    for level in reversed(range(len(placement.sizes))):
        size, own = placement.sizes[level], placement.coordinates[:, level]
        if size == 1:
            continue
        parts = split_each(shard, size)
        traffic[OpLevel(ops[0], level)] = sent(by_level[level])
        traffic[OpLevel(ops[1], level)] = reverse(placement, level, sent(gathered[level]))
        shard = parts[np.arange(len(own)), own]
    return traffic


def gathers_and_returns(residency: Residency, micro_batches: int) -> tuple[int, int]:
    """How often per step a layer's copies are gathered and their gradients returned."""
    return (1, 1) if residency is Residency.STEP else (2 * micro_batches, micro_batches)


def step_traffic(plan: Plan, routing: Mapping[tuple[int, int], IntArray] | None = None) -> Traffic:
    """Bytes of one whole training step. ``routing`` maps (MoE layer, micro-batch) to [G, T, K] expert ids (-1: dropped);
    without it what the plan's popularity lets expect."""
    workload, codecs = plan.workload, plan.level_codecs
    total: Traffic = {}

    def add(traffic: Traffic, times: float) -> None:
        for key, sent in traffic.items():
            total[key] = total.get(key, 0.0) + sent * times

    micro_batches = workload.training.micro_batches
    if routing is None:
        for layers in plan.placed:
            rows = expected_rows(layers.placement, layers.gating)
            tokens = token_traffic(layers.placement, workload, rows, codecs, chunks=plan.schedule.chunks)
            add(tokens, layers.num_layers * micro_batches)
    for layer, group, placement in plan.each_layer():
        gathers, returns = gathers_and_returns(group.residency, micro_batches)
        times = {Op.EXPERT_GATHER: gathers, Op.GRADIENT_RETURN: returns}
        for key, sent in copy_traffic(placement, workload, codecs).items():
            add({key: sent}, times.get(key.op, 1))
        for micro_batch in range(micro_batches if routing is not None else 0):
            assert routing is not None
            rows = routed_rows(placement, routing[layer, micro_batch])
            add(token_traffic(placement, workload, rows, codecs, chunks=plan.schedule.chunks), 1)
    add(dense_traffic(plan.placements[0], workload, codecs), 1)
    return total


def link_bytes(cluster: Cluster, traffic: Mapping[OpLevel, FloatArray]) -> FloatArray:
    """[number of links]: bytes over each entry of ``cluster.link_table``."""
    loads = np.zeros(len(cluster.link_table))
    last = len(cluster.levels)
    shape = cluster.sizes
    for (_, level), sent in traffic.items():
        if shape[level] == 1:
            continue
        out = sent.sum(axis=1)
        into = np.moveaxis(sent.reshape((*shape, shape[level])).sum(axis=level), -1, level).ravel()
        for depth in range(level, last):
            inner = math.prod(shape[depth + 1 :])
            workers = math.prod(shape[: depth + 1])
            first = cluster.up_link(depth, 0)
            loads[first : first + 2 * workers : 2] += out.reshape(workers, inner).sum(axis=1)
            loads[first + 1 : first + 2 * workers : 2] += into.reshape(workers, inner).sum(axis=1)
        if level == 0 and (cluster.links or cluster.trunks):
            between = sent.reshape(shape[0], -1, shape[0]).sum(axis=1)
            add_between_sites(cluster, loads, between)
    return loads


def add_between_sites(cluster: Cluster, loads: FloatArray, between: FloatArray) -> None:
    """To the links per pair and the trunks; ``between`` is [DCs, DCs]."""
    pairs = cluster.pair_links
    if cluster.links:
        loads[pairs] += between[~np.eye(len(between), dtype=bool)]
    if cluster.trunks:
        loads[pairs.stop :] += cluster.trunk_shares @ between.ravel()


def wan_bytes(traffic: Mapping[OpLevel, FloatArray]) -> float:
    """Bytes that cross the outermost level, all ranks together."""
    return float(sum(sent.sum() for (_, level), sent in traffic.items() if level == 0))
