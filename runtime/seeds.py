"""Backward passes that begin with given gradients."""

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
    """A scalar (of no value) whose backward begins with these gradients of these outputs, one of each shape. ``torch.autograd``
    takes both itself, but imports sympy to compare shapes, which costs every rank 0.4 s and 33 MiB."""
    with enable_grad():  # also inside another backward
        scalar: Tensor = _Seeds.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return scalar
