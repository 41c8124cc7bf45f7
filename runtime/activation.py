"""A feed-forward's activation and its last product, which keep what enters the activation and nothing that comes out of it.

Backward makes the activation again, element by element, and no product. A row's weight, by which a routed expert's output counts,
multiplies what enters the last product in place of its output, which is the same, so that the weight's gradient needs no output
either (as Megatron-Core does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from runtime.kernels.grouped import grouped_mm, grouped_products


def activated_product(
    *entering_RF: Tensor, out: Tensor, weights_R: Tensor | None = None, offsets: Tensor | None = None
) -> Tensor:
    """[R, H]: GELU of one tensor, or SwiGLU of two (SiLU of the first, times the second), times ``weights_R`` where given, times
    ``out`` [H, F], or with ``offsets`` [E + 1] int32 rows ``offsets[e]:offsets[e + 1]`` times ``out[e]`` of [E, H, F]."""
    tensors = entering_RF if weights_R is None else (*entering_RF, weights_R)
    kept = _Kept.apply(*tensors)  # type: ignore[no-untyped-call]
    y: Tensor = _ActivatedProduct.apply(out, offsets, weights_R is not None, *kept)  # type: ignore[no-untyped-call]
    return y


class _Kept(torch.autograd.Function):
    """Its inputs, and what keeps them for the function that comes next: where all is computed again, that ends here, since
    nothing after it is kept."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class _ActivatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, offsets: Tensor | None, weighs: bool, *kept: Tensor) -> Tensor:
        ctx.out, ctx.offsets, ctx.weighs = out, offsets, weighs
        entering, weights_R = _split(kept, weighs)
        inner = _activated(*entering)
        if weights_R is not None:
            inner = inner.mul_(weights_R[:, None])
        return F.linear(inner, out) if offsets is None else grouped_mm(inner, out.transpose(1, 2), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        out, offsets = ctx.out, ctx.offsets
        # Of the function before this one, from which all but ``out`` has come.
        entering, weights_R = _split(ctx.next_functions[-1][0].saved_tensors, ctx.weighs)
        gradient, inner, weights_gradient = gradient.contiguous(), _activated(*entering), None
        # In place wherever it can be: of each of these there is as much as of one tensor that was kept.
        through = gradient @ out if offsets is None else grouped_mm(gradient, out, offsets)
        if weights_R is not None:
            weights_gradient = torch.linalg.vecdot(through, inner)
            through.mul_(weights_R[:, None])
            inner.mul_(weights_R[:, None])
        out_gradient = gradient.t() @ inner if offsets is None else grouped_products(gradient, inner, offsets)
        del gradient, inner
        of_weights = () if weights_gradient is None else (weights_gradient,)
        return out_gradient, None, None, *_entering_gradients(through, *entering), *of_weights


def _split(kept: Sequence[Tensor], weighs: bool) -> tuple[Sequence[Tensor], Tensor | None]:
    """(what enters the activation, the rows' weights)."""
    return (kept[:-1], kept[-1]) if weighs else (kept, None)


def _activated(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return F.gelu(gate) if up is None else F.silu(gate).mul_(up)


def _entering_gradients(gradient: Tensor, gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, ...]:
    """Of what enters the activation, given that of what comes out, which is overwritten."""
    if up is None:
        return (torch.ops.aten.gelu_backward.grad_input(gradient, gate, grad_input=gradient),)
    of_up = F.silu(gate).mul_(gradient)
    return torch.ops.aten.silu_backward.grad_input(gradient.mul_(up), gate, grad_input=gradient), of_up
