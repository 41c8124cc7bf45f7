"""One MoE layer, forward and backward, on one GPU: on the kernels, in plain torch operators, and as torchtitan has it.

The plain form is what one writes without kernels: sort the pairs, gather padded groups, the same grouped product, weigh,
``index_add``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.activation import activated_product
from runtime.kernels import ops
from runtime.kernels.grouped import ALIGNED_ROWS, grouped_mm
from runtime.kernels.launch import worst_case_rows
from runtime.kernels.local import weights_of_rows

AS_TRAINED = "kernels, as trained"
"""The form that a model's layers have."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Shapes of one layer whose experts are all on this GPU."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    ffn: int
    source: str

    @property
    def label(self) -> str:
        return f"{self.source}: {self.tokens} tokens, {self.top_k} of {self.experts} experts {self.hidden} x {self.ffn}"


LAYERS = (
    Layer(tokens=8192, top_k=8, experts=128, hidden=2048, ffn=768, source="Qwen3-30B-A3B"),
    Layer(tokens=4096, top_k=2, experts=8, hidden=4096, ffn=14336, source="Mixtral-8x7B"),
)


class LayerData:
    """Inputs and weights in bf16 (any type on CPU, for tests)."""

    def __init__(self, layer: Layer, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        make = torch.Generator(device).manual_seed(1)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device=device, generator=make) * scale).to(dtype).requires_grad_()

        self.layer = layer
        self.x = random(layer.tokens, layer.hidden)
        self.gate = random(layer.hidden, layer.experts, scale=layer.hidden**-0.5)
        self.w_gate = random(layer.experts, layer.hidden, layer.ffn, scale=layer.hidden**-0.5)
        self.w_up = random(layer.experts, layer.hidden, layer.ffn, scale=layer.hidden**-0.5)
        self.w_down = random(layer.experts, layer.ffn, layer.hidden, scale=layer.ffn**-0.5)
        self.groups = torch.arange(layer.experts, dtype=torch.int32, device=device)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gradients are taken of."""
        return self.x, self.gate, self.w_gate, self.w_up, self.w_down

    def choose(self) -> tuple[Tensor, Tensor]:
        """(weights [N, K], ids [N, K])."""
        weights, ids = (self.x @ self.gate).float().softmax(dim=1).topk(self.layer.top_k, dim=1)
        return (weights / weights.sum(dim=1, keepdim=True)).to(self.x.dtype), ids

    def compute(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """SwiGLU experts on rows sorted by expert."""
        inner = F.silu(grouped_mm(rows, self.w_gate, offsets)) * grouped_mm(rows, self.w_up, offsets)
        return grouped_mm(inner, self.w_down, offsets)


def with_kernels(data: LayerData) -> Tensor:
    """[N, H], without waiting for the device."""
    weights, ids = data.choose()
    multiple, experts = ALIGNED_ROWS, data.layer.experts
    route = ops.route(ids.int(), data.groups, experts, multiple=multiple)
    rows = ops.dispatch(data.x, route, worst_case_rows(ids.numel(), experts, multiple), multiple=multiple)
    return ops.combine(data.compute(rows, route.offsets), route, weights, multiple=multiple)


def as_trained(data: LayerData) -> Tensor:
    """[N, H]: with as little kept for backward as ``runtime.kernels.local`` keeps, but without waiting for the device."""
    weights, ids = data.choose()
    multiple, experts = ALIGNED_ROWS, data.layer.experts
    number = worst_case_rows(ids.numel(), experts, multiple)
    route = ops.route(ids.int(), data.groups, experts, multiple=multiple)
    rows, offsets = ops.dispatch(data.x, route, number, multiple=multiple), route.offsets
    entering = (grouped_mm(rows, matrix, offsets) for matrix in (data.w_gate, data.w_up))
    y = activated_product(
        *entering, out=data.w_down.transpose(1, 2), weights_R=weights_of_rows(weights, route, number), offsets=offsets
    )
    return ops.combine(y, route, multiple=multiple)


def in_plain_torch(data: LayerData) -> Tensor:
    """[N, H] with torch's own operators, on the same padded groups and without waiting for the device either."""
    weights, ids = data.choose()
    (num_tokens, top_k), experts = ids.shape, data.layer.experts
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.histc(flat.float(), bins=experts, min=0, max=experts).long()
    padded = (counts + ALIGNED_ROWS - 1) // ALIGNED_ROWS * ALIGNED_ROWS
    offsets = F.pad(padded.cumsum(0), (1, 0))
    shift = offsets[:-1] - F.pad(counts.cumsum(0), (1, 0))[:-1]  # from place among the sorted pairs to row
    row = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
    # Padding rows take the row of zeros behind the tokens.
    source = flat.new_full((worst_case_rows(len(flat), experts, ALIGNED_ROWS),), num_tokens)
    source[row] = order // top_k
    rows = F.pad(data.x, (0, 0, 0, 1)).index_select(0, source)
    y = data.compute(rows, offsets.int()).index_select(0, row) * weights.flatten()[order, None]
    return torch.zeros_like(data.x).index_add(0, order // top_k, y)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to compute the layer."""

    forward: Callable[[], Tensor]
    """[N, H]."""
    leaves: tuple[Tensor, ...]

    def forward_backward(self) -> tuple[Tensor, ...]:
        """Gradients of the leaves for a gradient of ones."""
        return torch.autograd.grad(self.forward().sum(), self.leaves)


def forms(data: LayerData) -> dict[str, Form]:
    """All forms that can run here, by name; on a device compiled, too, which takes seconds at the first run."""
    found = {
        "kernels": Form(forward=partial(with_kernels, data), leaves=data.leaves),
        "plain torch": Form(forward=partial(in_plain_torch, data), leaves=data.leaves),
    }
    if find_spec("torchtitan") is not None:
        # Where torchtitan is installed only, hence not at the top.
        from runtime.kernels.bench_torchtitan import torchtitan_form

        found["torchtitan"] = torchtitan_form(data)
    if data.x.is_cuda:
        found |= {f"{name}, compiled": replace(form, forward=torch.compile(form.forward)) for name, form in found.items()}
    # Not compiled, as it is not in training.
    return found | {AS_TRAINED: Form(forward=partial(as_trained, data), leaves=data.leaves)}


def parts(data: LayerData) -> Iterator[tuple[str, Callable[[], object]]]:
    """The layer on the kernels, one part at a time, each with its backward where it has one."""
    multiple, experts = ALIGNED_ROWS, data.layer.experts
    with torch.no_grad():
        weights, ids = data.choose()
        route = ops.route(ids.int(), data.groups, experts, multiple=multiple)
        num_rows = worst_case_rows(ids.numel(), experts, multiple)
        rows = ops.dispatch(data.x, route, num_rows, multiple=multiple)
        y = data.compute(rows, route.offsets)
    yield "route", lambda: ops.route(ids.int(), data.groups, experts, multiple=multiple)
    differentiable: tuple[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]], ...] = (
        ("gate", lambda *_: data.choose()[0], (data.x, data.gate)),
        ("dispatch", lambda x: ops.dispatch(x, route, num_rows, multiple=multiple), (data.x,)),
        ("experts", lambda x, *_: data.compute(x, route.offsets), (rows, data.w_gate, data.w_up, data.w_down)),
        ("combine", lambda y, w: ops.combine(y, route, w, multiple=multiple), (y, weights)),
    )
    for name, part, inputs in differentiable:
        leaves = tuple(tensor if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in inputs)
        result = part(*leaves)
        yield name, partial(part, *leaves)
        yield f"{name} backward", partial(torch.autograd.grad, result, leaves, torch.ones_like(result), retain_graph=True)
