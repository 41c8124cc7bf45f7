"""The token kernels as torch operators with gradients: one name, the plain torch reference on CPU, the CUDA kernels on a GPU.

Registered with torch.library (namespace ``hybridep``) including shapes for tracing, so torch.compile and torch.export see
them. Importing this module registers names; kernels are compiled when the first CUDA tensor arrives.

On a GPU rows that belong to no group and no padding are left unwritten: nothing here, and no grouped product, reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.kernels import reference
from runtime.kernels.driver import cuda_driver
from runtime.kernels.launch import worst_case_rows
from runtime.kernels.reference import Route
from runtime.kernels.tokens import TokenKernels


def route(ids: Tensor, group_of: Tensor, num_groups: int, *, multiple: int = 1) -> Route:
    """Rows for (row, expert) pairs, with room for any routing (``launch.worst_case_rows``); see ``reference.route``."""
    return Route(*_route(ids, group_of, num_groups, multiple, worst_case_rows(ids.numel(), num_groups, multiple)))


def dispatch(x: Tensor, route: Route, num_rows: int, *, multiple: int = 1) -> Tensor:
    """[num_rows, H]: row i of ``x`` [N, H] at each of its slots; padding rows are zero. Differentiable in ``x``."""
    result: Tensor = _dispatch(x, route.slot, route.counts, route.offsets, num_rows, multiple)
    return result


def combine(y: Tensor, route: Route, weights: Tensor | None = None, *, multiple: int = 1) -> Tensor:
    """[N, H]: the sum over each row's slots of ``y`` [R, H], times ``weights`` [N, K] where given. Differentiable in both."""
    result: Tensor = _combine(y, route.slot, route.counts, route.offsets, weights, multiple)
    return result


def _kernels() -> TokenKernels:
    return TokenKernels(cuda_driver())


@torch.library.custom_op("hybridep::route", mutates_args=(), device_types="cpu")
def _route(ids: Tensor, group_of: Tensor, num_groups: int, multiple: int, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(reference.route(ids, group_of, num_groups, multiple=multiple, capacity=capacity))  # type: ignore[return-value]


@_route.register_kernel("cuda")
def _route_cuda(ids: Tensor, group_of: Tensor, num_groups: int, multiple: int, capacity: int) -> tuple[Tensor, ...]:
    return tuple(_kernels().route(ids, group_of, num_groups, multiple=multiple, capacity=capacity))


@_route.register_fake
def _route_shapes(ids: Tensor, group_of: Tensor, num_groups: int, multiple: int, capacity: int) -> tuple[Tensor, ...]:
    return torch.empty_like(ids), ids.new_empty(num_groups), ids.new_empty(num_groups + 1), ids.new_empty(2)


@torch.library.custom_op("hybridep::dispatch", mutates_args=(), device_types="cpu")
def _dispatch(x: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, num_rows: int, multiple: int) -> Tensor:
    return reference.dispatch(x, Route(slot, counts, offsets, slot), num_rows)


@_dispatch.register_kernel("cuda")
def _dispatch_cuda(x: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, num_rows: int, multiple: int) -> Tensor:
    return _kernels().dispatch(x.contiguous(), Route(slot, counts, offsets, slot), num_rows, multiple=multiple)


@_dispatch.register_fake
def _dispatch_shapes(x: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, num_rows: int, multiple: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


def _save_slot(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1], inputs[2], inputs[3])


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    slot, counts, offsets = ctx.saved_tensors
    # The gradient of a row is the sum over its copies.
    return _combine(grad.contiguous(), slot, counts, offsets, None, 1), None, None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_save_slot)


@torch.library.custom_op("hybridep::combine", mutates_args=(), device_types="cpu")
def _combine(y: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, weights: Tensor | None, multiple: int) -> Tensor:
    return reference.combine(y, slot, weights)


@_combine.register_kernel("cuda")
def _combine_cuda(y: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, weights: Tensor | None, multiple: int) -> Tensor:
    return _kernels().combine(y.contiguous(), slot, None if weights is None else weights.contiguous())


@_combine.register_fake
def _combine_shapes(y: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, weights: Tensor | None, multiple: int) -> Tensor:
    return y.new_empty(slot.shape[0], y.shape[1])


@torch.library.custom_op("hybridep::combine_backward", mutates_args=(), device_types="cpu")
def _combine_backward_op(
    grad: Tensor, y: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, weights: Tensor, multiple: int
) -> tuple[Tensor, Tensor]:
    return reference.combine_backward(grad, y, Route(slot, counts, offsets, slot), weights)


@_combine_backward_op.register_kernel("cuda")
def _combine_backward_cuda(
    grad: Tensor, y: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, weights: Tensor, multiple: int
) -> tuple[Tensor, Tensor]:
    way = Route(slot, counts, offsets, slot)
    return _kernels().combine_backward(grad, y.contiguous(), way, weights.contiguous(), multiple=multiple)


@_combine_backward_op.register_fake
def _combine_backward_shapes(
    grad: Tensor, y: Tensor, slot: Tensor, counts: Tensor, offsets: Tensor, weights: Tensor, multiple: int
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y, slot, counts, offsets, weights, ctx.multiple = inputs
    ctx.num_rows = y.shape[0]
    # An unweighted sum needs no values for its gradient.
    ctx.save_for_backward(slot, counts, offsets, *(() if weights is None else (y, weights)))


def _combine_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    slot, counts, offsets, *values = ctx.saved_tensors
    grad = grad.contiguous()
    if not values:
        return _dispatch(grad, slot, counts, offsets, ctx.num_rows, ctx.multiple), None, None, None, None, None
    y, weights = values
    grad_y, grad_weights = _combine_backward_op(grad, y, slot, counts, offsets, weights, ctx.multiple)
    return grad_y, None, None, None, grad_weights, None


_combine.register_autograd(_combine_gradient, setup_context=_save_combine)
