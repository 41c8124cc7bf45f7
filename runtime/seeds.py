"""Backward passes that begin with given gradients, and end with those of tensors that are gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, enable_grad
from torch.autograd import Function


class _Seeds(Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.gradients)


def seeded(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A scalar (of no value) whose backward begins with these gradients of these outputs, one of each shape. A list may be filled
    until then; the outputs need not outlive this call. ``torch.autograd`` takes both itself, but imports sympy to compare shapes,
    which costs every rank 0.4 s and 33 MiB."""
    with enable_grad():  # also inside another backward
        scalar: Tensor = _Seeds.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return scalar


class _Entering(Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def entering(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(a leaf without memory that has the gradient of ``tensor``, ``tensor`` in a graph of its own): who keeps the leaf does not
    keep the tensor."""
    leaf = tensor.new_empty(()).expand(tensor.shape).requires_grad_()
    with enable_grad():
        entered: Tensor = _Entering.apply(leaf, tensor.detach())  # type: ignore[no-untyped-call]
    return leaf, entered
