"""One MoE layer, forward and backward, on one GPU: on the kernels, and in plain torch operators.

The plain form is what frameworks without kernels of their own do (torchtitan's MoE among them): sort the pairs, gather padded
groups, the same grouped product, weigh, ``index_add``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels import ops
from runtime.kernels.grouped import ALIGNED_ROWS, grouped_mm
from runtime.kernels.launch import worst_case_rows


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


FORMS: dict[str, Callable[[LayerData], Tensor]] = {"kernels": with_kernels, "plain torch": in_plain_torch}


def forward_backward(data: LayerData, form: Callable[[LayerData], Tensor]) -> tuple[Tensor, ...]:
    """Gradients of all leaves for a gradient of ones."""
    return torch.autograd.grad(form(data).sum(), data.leaves)
