"""Feed-forward networks: single ones, and many experts stored as flat rows.

An expert is one row of P = num_matrices * hidden * ffn elements: ``w_in [F, H], w_out [H, F]`` for GELU,
``w_gate [F, H], w_up [F, H], w_down [H, F]`` for SwiGLU. A flat row travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridep.workload import Ffn
from runtime.activation import activated_product


def split_row(row_P: Tensor, *, ffn: Ffn, hidden_size: int) -> tuple[Tensor, ...]:
    """The matrices of one expert, as views of its row."""
    size = row_P.numel() // ffn.num_matrices
    width = size // hidden_size
    parts = torch.split(row_P, size)
    return (*(part.view(width, hidden_size) for part in parts[:-1]), parts[-1].view(hidden_size, width))


def feed_forward(x_NH: Tensor, row_P: Tensor, *, ffn: Ffn, weights_N: Tensor | None = None) -> Tensor:
    """One feed-forward network on [N, H] rows, times ``weights_N`` where given."""
    *into, out = split_row(row_P, ffn=ffn, hidden_size=x_NH.shape[-1])
    return activated_product(*(F.linear(x_NH, matrix) for matrix in into), out=out, weights_R=weights_N)


def grouped_feed_forward(
    x_NH: Tensor, counts: Sequence[int], rows: Sequence[Tensor], *, ffn: Ffn, weights_N: Tensor | None = None
) -> Tensor:
    """Experts on rows sorted by expert: the first ``counts[0]`` rows pass ``rows[0]``, and so on; times ``weights_N`` where
    given."""
    if not rows:
        return x_NH[:0]
    parts = torch.split(x_NH, list(counts))
    weights = [None] * len(rows) if weights_N is None else torch.split(weights_N, list(counts))
    # No early exit for an expert without tokens: a product with zero rows keeps its gradient in the graph, as zeros.
    every = zip(parts, rows, weights, strict=True)
    return torch.cat([feed_forward(part, row, ffn=ffn, weights_N=some) for part, row, some in every])
