"""What each rank codes and decodes: bytes of exact payload per operation, as the runtime does it.

The counterpart of ``hybridep.traffic`` for the time that codecs take; planner and simulator divide these bytes by the speeds of
``hybridep.codecs.Speeds``, each in its own way. Levels without a codec for a payload do not appear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Codecs, Speed, Speeds, wires
from hybridep.gating import Gating
from hybridep.placement import Placement
from hybridep.traffic import Direct, Op, OpLevel, arriving_rows, each_once, rank_sequences, reverse
from hybridep.workload import Workload

_KIND = {Op.EXPERT_GATHER: "experts"} | dict.fromkeys(
    (Op.GRADIENT_RETURN, Op.DENSE_REDUCE_SCATTER, Op.DENSE_ALL_GATHER), "gradients"
)
"""Operation -> kind of payload that it carries; tokens where it is not here."""


class Coded(NamedTuple):
    """Bytes of exact payload, one array of any shape over ranks each."""

    encoded: FloatArray
    decoded: FloatArray


Coding = dict[OpLevel, Coded]


def speed_of(speeds: Speeds, codecs: Sequence[Codecs], key: OpLevel) -> Speed | None:
    """How fast the codec of an operation's payload is; None where coding takes no time."""
    return speeds.of(_KIND.get(key.op, "tokens"), codecs[key.level])


def row_coding(level: int, row_bytes: float, before: FloatArray, sent: FloatArray, received: FloatArray) -> Coding:
    """What the token exchanges at one level code, given the rows ([G] each) that a rank has ``before`` the dispatch hop, sends
    and receives. On the way out a row is coded once however many ranks it goes to, unless fewer are sent than are there; coming
    back each row goes to one rank. Rows that stay are not coded."""
    once = np.minimum(before, sent) * row_bytes
    out, into = sent * row_bytes, received * row_bytes
    forth, back = Coded(once, into), Coded(into, out)
    return {
        OpLevel(Op.TOKEN_DISPATCH, level): forth,
        OpLevel(Op.COMBINE_BACKWARD, level): forth,
        OpLevel(Op.TOKEN_COMBINE, level): back,
        OpLevel(Op.DISPATCH_BACKWARD, level): back,
    }


def token_coding(
    placement: Placement,
    workload: Workload,
    rows: Sequence[FloatArray],
    codecs: Sequence[Codecs],
    gating: Gating,
    routing: IntArray | None = None,
    *,
    per_choice: bool = False,
) -> Coding:
    """[G] each: what the four token exchanges of one layer and micro-batch code, given the rows of its dispatch (see
    ``traffic.token_traffic``), those that were routed or those to be expected."""
    coding: Coding = {}
    for level, sent in enumerate(rows):
        if "tokens" in codecs[level].coded and placement.sizes[level] > 1:
            out, into = sent.sum(axis=1), reverse(placement, level, sent).sum(axis=1)
            before = out if per_choice else _rows_before(placement, gating, level, routing)
            coding |= row_coding(level, float(workload.combine_row_bytes), before, out, into)
    return coding


def _rows_before(placement: Placement, gating: Gating, level: int, routing: IntArray | None) -> FloatArray:
    """[G]: rows at each rank before the hop at ``level``."""
    num_gpus = placement.num_gpus
    if level == 0:
        return rank_sequences(placement, gating) * gating.sequence_length
    if routing is None:
        return arriving_rows(placement, gating, level)
    chosen = routing >= 0
    origin = np.arange(num_gpus)[:, None, None]
    place = placement.reached(level)[origin, np.where(chosen, routing, 0)]
    return np.bincount(place[each_once(place, chosen)], minlength=num_gpus).astype(np.float64)


def direct_coding(direct: Mapping[Op, Direct], placement: Placement, workload: Workload, codecs: Sequence[Codecs]) -> Coding:
    """[G] each: what ``traffic.direct_traffic`` codes; every row is coded where it leaves and decoded where it arrives."""
    coding: Coding = {}
    for op, pairs in direct.items():
        apart = placement.coordinates[pairs.source] != placement.coordinates[pairs.destination]
        first = apart.argmax(axis=1)
        for level, wire in enumerate(wires(workload, codecs, len(placement.sizes))):
            if op is not Op.TOKEN_COUNTS and "tokens" in codecs[level].coded and (here := first == level).any():
                exact = pairs.size_bytes[here] * (workload.combine_row_bytes / wire.combine_row_bytes)
                ends = (pairs.source[here], pairs.destination[here])
                by_rank = (np.bincount(end, weights=exact, minlength=placement.num_gpus) for end in ends)
                coding[OpLevel(op, level)] = Coded(*(np.asarray(one, dtype=np.float64) for one in by_rank))
    return coding


def copy_coding(placement: Placement, workload: Workload, codecs: Sequence[Codecs]) -> Coding:
    """[G] each: what one gather of copies and one return of their gradients code. A rank codes an expert once for all receivers
    of a level, and decodes each gradient that comes back."""
    coding: Coding = {}
    for level, one in enumerate(codecs):
        if placement.sizes[level] == 1 or not {"experts", "gradients"} & one.coded.keys():
            continue
        sent, moved = placement.num_sent[level], placement.num_moved[level].astype(np.float64)
        coding |= moved_coding(level, workload, one, sent, moved.sum(axis=1), reverse(placement, level, moved).sum(axis=1))
    return coding


def moved_coding(
    level: int, workload: Workload, codecs: Codecs, different: FloatArray | IntArray, sent: FloatArray, received: FloatArray
) -> Coding:
    """What copies and their gradients code at one level, given the experts ([G] each): ``different`` ones that a rank sends, all
    that it sends, and those that it gets."""
    each = np.float64(workload.expert_bytes)
    coding: Coding = {}
    if "experts" in codecs.coded:
        coding[OpLevel(Op.EXPERT_GATHER, level)] = Coded(np.asarray(different * each), received * each)
    if "gradients" in codecs.coded:
        coding[OpLevel(Op.GRADIENT_RETURN, level)] = Coded(received * each, sent * each)
    return coding


def dense_coding(sizes: Sequence[int], workload: Workload, codecs: Sequence[Codecs]) -> Coding:
    """[G] each: what the sum of dense gradients codes, on the way to those who add up and, between workers of the outermost
    level, back. A sum's owner decodes it too, so that all go on with the same."""
    coding: Coding = {}
    num_gpus = math.prod(sizes)
    coordinates = np.unravel_index(np.arange(num_gpus), tuple(sizes))
    each = np.float64(workload.training.dtype.num_bytes)
    shard = np.full(num_gpus, workload.model.dense_params, dtype=np.int64)
    for level in reversed(range(len(sizes))):
        size, own = sizes[level], coordinates[level]
        if size == 1:
            continue
        mine = shard // size + (own < shard % size)
        if "gradients" in codecs[level].coded:
            coding[OpLevel(Op.DENSE_REDUCE_SCATTER, level)] = Coded((shard - mine) * each, mine * (size - 1) * each)
            if level == 0:
                coding[OpLevel(Op.DENSE_ALL_GATHER, level)] = Coded(mine * each, shard * each)
        shard = mine
    return coding
