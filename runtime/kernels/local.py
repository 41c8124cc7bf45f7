"""A rank's own experts on the rows that arrived: the one place where the kernels meet the model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridep.workload import Ffn
from runtime.activation import activated_product
from runtime.experts import grouped_feed_forward
from runtime.kernels import ops
from runtime.kernels.grouped import ALIGNED_ROWS, grouped_mm, takes_grouped_mm
from runtime.kernels.reference import Route


def weighted_experts(
    x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, place_E: Tensor, home_nP: Tensor, copies_mP: Tensor, *, ffn: Ffn
) -> Tensor:
    """[N, H]: for each row the weighted sum over its experts that are served here.

    ``ids_NK`` int32, -1 for none and for an expert that is served elsewhere; ``place_E`` int32: an expert's place among the
    rows of ``home_nP`` and then ``copies_mP`` (flat, as ``runtime.experts`` lays them out), -1 for one without.
    """
    form = with_kernels if x_NH.is_cuda else in_plain_torch
    return form(x_NH, weights_NK, ids_NK, place_E, home_nP, copies_mP, ffn=ffn)


def in_plain_torch(
    x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, place_E: Tensor, home_nP: Tensor, copies_mP: Tensor, *, ffn: Ffn
) -> Tensor:
    """``weighted_experts`` on CPU. Not through the operators, although they run there too: on small batches their calls would
    cost more than the experts."""
    row, slot = (ids_NK >= 0).nonzero(as_tuple=True)
    place = place_E[ids_NK[row, slot].long()]
    order = place.argsort(stable=True)
    row, slot = row[order], slot[order]
    experts = [*home_nP.unbind(0), *copies_mP.unbind(0)]
    counts = torch.bincount(place, minlength=len(experts)).tolist()
    y = grouped_feed_forward(x_NH[row], counts, experts, ffn=ffn, weights_N=weights_NK[row, slot])
    added: Tensor = _AddedRows.apply(y, row, len(x_NH))  # type: ignore[no-untyped-call]
    return added


class _AddedRows(torch.autograd.Function):
    """[N, H]: row r of ``y`` [R, H] added to row ``row[r]``. torch's own keeps ``y`` until backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, row: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(row)
        return y.new_zeros(number, y.shape[1]).index_add_(0, row, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [row] = ctx.saved_tensors
        return gradient[row], None, None


def with_kernels(
    x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, place_E: Tensor, home_nP: Tensor, copies_mP: Tensor, *, ffn: Ffn
) -> Tensor:
    """``weighted_experts`` on a GPU: the kernels around grouped products in bf16, around a loop over experts in other types.

    Waits for the device once, for the number of rows: with room for any routing instead, K times the memory would be held
    until backward, and the exchange between ranks has waited for its counts anyway.
    """
    num_home, number = len(home_nP), len(home_nP) + len(copies_mP)
    if not number:
        return torch.zeros_like(x_NH) * x_NH
    in_groups = takes_grouped_mm(x_NH, home_nP.shape[1] // (ffn.num_matrices * x_NH.shape[1]))
    multiple = ALIGNED_ROWS if in_groups else 1
    route = ops.route(ids_NK, place_E, number, multiple=multiple)
    bounds = route.offsets.tolist()
    x, weights = ops.dispatch(x_NH, route, bounds[-1], multiple=multiple), weights_of_rows(weights_NK, route, bounds[-1])
    if in_groups:
        # Each store by itself: experts in one piece would be one more copy of them, held until backward.
        first = bounds[num_home]
        stores = (
            (x[:first], home_nP, route.offsets[: num_home + 1], weights[:first]),
            (x[first:], copies_mP, route.offsets[num_home:] - first, weights[first:]),
        )
        parts = [grouped_experts(*store, ffn=ffn) for store in stores if len(store[1])]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        counts = [end - begin for begin, end in pairwise(bounds)]
        y = grouped_feed_forward(x, counts, [*home_nP.unbind(0), *copies_mP.unbind(0)], ffn=ffn, weights_N=weights)
    return ops.combine(y, route, multiple=multiple)


def weights_of_rows(weights_NK: Tensor, route: Route, number: int) -> Tensor:
    """[R]: the weight of the pair that has each row; zero of padding."""
    # Pairs without a row share one behind the others: where there are none is known on the device only.
    slot = torch.where(route.slot < 0, number, route.slot).flatten().long()
    return weights_NK.new_zeros(number + 1).scatter(0, slot, weights_NK.flatten())[:number]


def grouped_experts(x_RH: Tensor, experts_nP: Tensor, offsets: Tensor, weights_R: Tensor | None = None, *, ffn: Ffn) -> Tensor:
    """[R, H]: rows ``offsets[e]:offsets[e + 1]`` through expert e, times ``weights_R`` where given, in grouped products;
    ``offsets`` [n + 1] int32."""
    number, hidden = len(experts_nP), x_RH.shape[1]
    *into, out = experts_nP.view(number, ffn.num_matrices, -1).unbind(1)
    entering = [grouped_mm(x_RH, part.view(number, -1, hidden).transpose(1, 2), offsets) for part in into]
    return activated_product(*entering, out=out.view(number, hidden, -1), weights_R=weights_R, offsets=offsets)
