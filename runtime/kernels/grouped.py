"""Products of many experts at once, on rows as the route packs them."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED_ROWS = 8
"""Multiple that a route must pad groups to: the weight gradient's ragged dimension must be whole 16-byte accesses of bf16."""


def takes_grouped_mm(x: Tensor, width: int) -> bool:
    """Whether torch's grouped product takes rows ``x`` [R, H] and experts of ``width``: bf16 in whole 16-byte accesses."""
    return x.dtype is torch.bfloat16 and x.shape[1] % 8 == 0 and width % 8 == 0


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """[R, M]: rows ``offsets[e]:offsets[e + 1]`` of ``x`` [R, H] times ``weights[e]`` [H, M]; ``offsets`` [E + 1] int32.

    bf16: one call of torch's grouped product, without waiting for the counts. Other types and odd sizes: a loop, which waits.
    Rows past ``offsets[-1]`` are undefined; padding rows of ``x`` must be zero (as ``dispatch`` leaves them).
    """
    if len(x) and takes_grouped_mm(x, weights.shape[2]):
        return F.grouped_mm(x, weights, offs=offsets[1:])
    bounds = offsets.tolist()
    parts = [x[begin:end] @ weight for begin, end, weight in zip(bounds[:-1], bounds[1:], weights.unbind(0), strict=True)]
    return torch.cat([*parts, x.new_zeros(len(x) - bounds[-1], weights.shape[2])])


def grouped_products(y: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """[E, M, H]: of each group the transpose of its rows of ``y`` [R, M] times those of ``x`` [R, H]; as ``grouped_mm``."""
    if len(x) and takes_grouped_mm(x, y.shape[1]):
        return F.grouped_mm(y.t(), x, offs=offsets[1:])
    bounds = offsets.tolist()
    return torch.stack([y[begin:end].t() @ x[begin:end] for begin, end in pairwise(bounds)])
