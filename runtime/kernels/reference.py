"""The token kernels in plain torch: what each must compute, and the path on CPU.

Shapes: N rows, K pairs per row, G groups, R rows of the output, H hidden. A *pair* is one (row, chosen expert).
Sums run in float (double for double) in the order of a row's pairs, so a result never depends on how work was split.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

NOWHERE = -1
"""Slot of a pair without a row: no expert, dropped, or the same destination as an earlier pair of its row."""


class Route(NamedTuple):
    """Where each pair goes."""

    slot: Tensor
    """[N, K] int32."""
    counts: Tensor
    """[G] int32: rows in use per group."""
    offsets: Tensor
    """[G + 1] int32: first row of each group. Packed: groups follow each other, padded to the multiple."""
    status: Tensor
    """[2] int32: pairs dropped for want of room, and pairs found before dropping."""


def route(
    ids: Tensor,
    group_of: Tensor,
    num_groups: int,
    *,
    multiple: int = 1,
    capacity: int,
    stride: int = 0,
    first: int = 0,
    deduplicate: bool = False,
    source_counts: Tensor | None = None,
    source_rows: int = 1,
) -> Route:
    """Assign rows to pairs, stably: within a group they keep the order of their tokens.

    ``ids`` [N, K] int32, -1 for none; ``group_of`` [E] int32: an expert's group, -1 where it is not served here.
    ``stride`` 0: groups are packed into at most ``capacity`` rows, each padded to ``multiple``. Otherwise group g owns the
    rows ``first + g * stride`` and on, at most ``capacity`` of them. Pairs without room are dropped and counted in ``status``.
    ``deduplicate``: of a row's pairs with one group only the first gets a row.
    ``source_counts`` [N / source_rows]: rows came in regions of ``source_rows``, of which so many leading ones are valid.
    """
    num_rows, top_k = ids.shape
    known = (ids >= 0) & (ids < len(group_of))
    group = torch.where(known, group_of[ids.long().clamp(0, max(len(group_of) - 1, 0))].long(), -1)
    if source_counts is not None:
        row = torch.arange(num_rows)
        group[row % source_rows >= source_counts[row // source_rows]] = -1
    if deduplicate:
        same = group[:, :, None] == group[:, None, :]
        group[same.tril(-1).any(dim=2)] = -1
    flat = group.flatten()
    found = torch.bincount(flat + 1, minlength=num_groups + 1)[1:]
    if stride:
        begin = first + stride * torch.arange(num_groups + 1)
        room = torch.full((num_groups,), capacity)
    else:
        padded = (found + multiple - 1) // multiple * multiple
        begin = torch.cat([padded.new_zeros(1), padded.cumsum(0)]).clamp(max=capacity)
        room = begin[1:] - begin[:-1]
    counts = torch.minimum(found, room)
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    before = torch.cat([(flat < 0).sum()[None], (flat < 0).sum() + found.cumsum(0)[:-1]])
    rank = place - before[flat.clamp(min=0)]
    kept = (flat >= 0) & (rank < counts[flat.clamp(min=0)])
    slot = torch.where(kept, begin[flat.clamp(min=0)] + rank, NOWHERE)
    status = torch.stack([(found - counts).sum(), found.sum()])
    return Route(slot.view(num_rows, top_k).int(), counts.int(), begin.int(), status.int())


def dispatch(x: Tensor, route: Route, num_rows: int) -> Tensor:
    """[R, H]: row i of ``x`` [N, H] at each of its slots, zeros elsewhere."""
    pair, unused = _pair_of(route.slot, num_rows)
    if not route.slot.numel():
        return x.new_zeros(num_rows, x.shape[1])
    out = x.index_select(0, pair // route.slot.shape[1])
    out[unused] = 0
    return out


def combine(y: Tensor, slot: Tensor, weights: Tensor | None = None) -> Tensor:
    """[N, H]: the sum over each row's slots of ``y`` [R, H], times ``weights`` [N, K] where given."""
    wide = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros(slot.shape[0], y.shape[1], dtype=wide)
    for k, (row, at) in enumerate(_pairs_by_place(slot)):
        part = y.index_select(0, at).to(wide)
        if weights is not None:
            part.mul_(weights[row, k, None])  # a copy: index_select made it
        total.index_add_(0, row, part)
    return total.to(y.dtype)


def combine_backward(grad: Tensor, y: Tensor, route: Route, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the weighted combine: of ``y`` [R, H] (zeros in rows without a pair) and of ``weights`` [N, K]."""
    pair, unused = _pair_of(route.slot, len(y))
    grad_weights = torch.zeros_like(weights)
    if not route.slot.numel():
        return torch.zeros_like(y), grad_weights
    wide = torch.promote_types(y.dtype, torch.float32)
    rows = grad.index_select(0, pair // weights.shape[1]).to(wide)
    products = (rows * y).sum(dim=1)
    rows.mul_(weights.flatten()[pair, None])[unused] = 0
    used = torch.ones(len(y), dtype=torch.bool).index_fill_(0, unused, False)
    grad_weights.view(-1)[pair[used]] = products[used].to(weights.dtype)
    return rows.to(y.dtype), grad_weights


def _pair_of(slot: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """([R] the pair, numbered row by row, that has each row, 0 for none; the rows without one)."""
    [pair] = (slot.flatten() >= 0).nonzero(as_tuple=True)
    pair_of = torch.full((num_rows,), -1)
    pair_of[slot.flatten()[pair].long()] = pair
    return pair_of.clamp(min=0), (pair_of < 0).nonzero().squeeze(1)


def _pairs_by_place(slot: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each k: the rows whose k-th pair has a row of its own, and that row."""
    for k in range(slot.shape[1]):
        [row] = (slot[:, k] >= 0).nonzero(as_tuple=True)
        yield row, slot[row, k].long()


def _groups(ids: Tensor, group_of: Tensor) -> Tensor:
    """[N, K] int64 group of each pair, -1 for none."""
    known = (ids >= 0) & (ids < len(group_of))
    return torch.where(known, group_of[ids.long().clamp(0, max(len(group_of) - 1, 0))].long(), -1)


def carry(ids: Tensor, weights: Tensor, group_of: Tensor, slot: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Ids [R, K] and weights [R, K] that travel with deduplicated rows; -1 and 0 where another destination serves."""
    group = _groups(ids, group_of)
    row, k = (slot >= 0).nonzero(as_tuple=True)
    same = group[row] == group[row, k, None]
    out_ids = ids.new_full((num_rows, ids.shape[1]), -1)
    out_weights = weights.new_zeros(num_rows, ids.shape[1])
    at = slot[row, k].long()
    out_ids[at] = torch.where(same, ids[row], -1)
    out_weights[at] = torch.where(same, weights[row], 0)
    return out_ids, out_weights


def carry_back(grads: Tensor, ids: Tensor, group_of: Tensor, slot: Tensor) -> Tensor:
    """[N, K]: each weight's gradient from ``grads`` [R, K], where the copy of the row that carried it went."""
    group = _groups(ids, group_of)
    first = (group[:, :, None] == group[:, None, :]).int().argmax(dim=2)
    carrier = torch.where(group >= 0, slot.gather(1, first), NOWHERE)
    row, k = (carrier >= 0).nonzero(as_tuple=True)
    out = grads.new_zeros(ids.shape)
    out[row, k] = grads[carrier[row, k].long(), k]
    return out
