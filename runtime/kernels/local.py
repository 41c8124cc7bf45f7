"""A rank's own experts on the rows that arrived: the one place where the kernels meet the model.

The same operators run on CPU (plain torch) and on a GPU (kernels). bf16 on a GPU goes through the grouped product and never
waits for the device; everything else takes the loop over experts, with rows for exactly what was routed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridep.workload import Ffn
from runtime.experts import grouped_feed_forward
from runtime.kernels import ops
from runtime.kernels.grouped import ALIGNED_ROWS, grouped_mm
from runtime.kernels.launch import worst_case_rows


def weighted_experts(
    x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, place_E: Tensor, home_nP: Tensor, copies_mP: Tensor, *, ffn: Ffn
) -> Tensor:
    """[N, H]: for each row the weighted sum over its experts that are served here.

    ``ids_NK`` int32, -1 for none; ``place_E`` int32: an expert's place among the rows of ``home_nP`` and then ``copies_mP``
    (flat, as ``runtime.experts`` lays them out), -1 where it is served elsewhere.
    """
    if not len(home_nP) + len(copies_mP):
        return torch.zeros_like(x_NH) * x_NH
    if x_NH.is_cuda and x_NH.dtype is torch.bfloat16:
        parts = [part for part in (home_nP, copies_mP) if len(part)]
        # The grouped product wants its experts in one piece.
        experts_nP = parts[0] if len(parts) == 1 else torch.cat(parts)
        return grouped(x_NH, weights_NK, ids_NK, place_E, experts_nP, ffn=ffn)
    rows_P = [*home_nP.unbind(0), *copies_mP.unbind(0)]
    route = ops.route(ids_NK, place_E, len(rows_P))
    counts = route.counts.tolist()
    x = ops.dispatch(x_NH, route, sum(counts))
    return ops.combine(grouped_feed_forward(x, counts, rows_P, ffn=ffn), route, weights_NK)


def grouped(x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, place_E: Tensor, experts_nP: Tensor, *, ffn: Ffn) -> Tensor:
    """``weighted_experts`` in grouped products, on rows padded as they want them and bounded by the worst routing."""
    number, hidden = len(experts_nP), x_NH.shape[1]
    route = ops.route(ids_NK, place_E, number, multiple=ALIGNED_ROWS)
    num_rows = worst_case_rows(ids_NK.numel(), number, ALIGNED_ROWS)
    x = ops.dispatch(x_NH, route, num_rows, multiple=ALIGNED_ROWS)
    parts = experts_nP.view(number, ffn.num_matrices, -1).unbind(1)
    into = [part.reshape(number, -1, hidden).transpose(1, 2) for part in parts[:-1]]
    inner = grouped_mm(x, into[0], route.offsets)
    inner = F.gelu(inner) if ffn is Ffn.GELU else F.silu(inner) * grouped_mm(x, into[1], route.offsets)
    out_of = parts[-1].reshape(number, hidden, -1).transpose(1, 2)
    return ops.combine(grouped_mm(inner, out_of, route.offsets), route, weights_NK, multiple=ALIGNED_ROWS)
