"""A decoder-only language model: RMSNorm, rotary (grouped-query) causal attention, dense and MoE feed-forward parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridep.workload import Model, Workload
from runtime.initial_weights import InitialWeights
from runtime.moe import FeedForward, MoeBlock, RoutedExperts
from runtime.norm import RmsNorm
from runtime.token_loss import token_loss

MakeRouted = Callable[[int], RoutedExperts]
"""MoE layer index -> its routed experts."""


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = model.num_heads, model.num_kv_heads or model.num_heads
        self.head_dim = model.attention_width // model.num_heads
        self.rope_theta = model.rope_theta
        width, bias = model.attention_width, model.attention_bias
        self.query = nn.Linear(model.hidden_size, width, bias=bias, dtype=dtype)
        self.key = nn.Linear(model.hidden_size, model.kv_width, bias=bias, dtype=dtype)
        self.value = nn.Linear(model.hidden_size, model.kv_width, bias=bias, dtype=dtype)
        self.output = nn.Linear(width, model.hidden_size, bias=False, dtype=dtype)
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if model.qk_norm:
            self.query_norm, self.key_norm = (RmsNorm(self.head_dim, eps=model.norm_eps, dtype=dtype) for _ in range(2))

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H]."""
        num_sequences, length, _ = x_BSH.shape

        def heads(projected: Tensor, number: int) -> Tensor:
            return projected.view(num_sequences, length, number, self.head_dim).transpose(1, 2)

        query = rotate(self.query_norm(heads(self.query(x_BSH), self.num_heads)), self.rope_theta)
        key = rotate(self.key_norm(heads(self.key(x_BSH), self.num_kv_heads)), self.rope_theta)
        value = heads(self.value(x_BSH), self.num_kv_heads)
        if self.num_kv_heads != self.num_heads:
            repeats = self.num_heads // self.num_kv_heads
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return projected


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of [..., S, D]: element i turns with element i + D/2 (Su et al., arXiv:2104.09864)."""
    length, width = x.shape[-2:]
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(0, width, 2, dtype=wide, device=x.device) / width)
    angle = torch.arange(length, dtype=wide, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Layer(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a residual path."""

    def __init__(self, model: Model, feed_forward: FeedForward | MoeBlock, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(model.hidden_size, eps=model.norm_eps, dtype=dtype)
        self.attention = Attention(model, dtype)
        self.feed_forward_norm = RmsNorm(model.hidden_size, eps=model.norm_eps, dtype=dtype)
        self.feed_forward = feed_forward

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """(output, load-balancing loss of each sequence)."""
        self.feed_forward.prepare()
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        y_BSH, balance_B = self.feed_forward(self.feed_forward_norm(x_BSH))
        return x_BSH + y_BSH, balance_B


class Transformer(nn.Module):
    """The whole model, or a pipeline stage's part of it, whose layers keep the names that they have in the whole;
    ``make_routed`` supplies each MoE layer's experts, local or spread over ranks."""

    def __init__(self, workload: Workload, make_routed: MakeRouted, *, dtype: torch.dtype) -> None:
        super().__init__()
        model = workload.model
        first, first_moe = (model.part.first_layer, model.part.first_moe_layer) if model.part else (0, 0)
        if model.has_embedding:
            self.embedding = nn.Embedding(model.vocab_size, model.hidden_size, dtype=dtype)
        layers: dict[str, Layer] = {}
        for index in range(model.num_layers):
            layer = index - model.num_dense_layers
            part: FeedForward | MoeBlock
            if layer < 0:
                part = FeedForward(hidden_size=model.hidden_size, ffn_size=model.dense_ffn_size, ffn=model.ffn, dtype=dtype)
            else:
                part = MoeBlock(workload, make_routed(layer), layer=first_moe + layer, dtype=dtype)
            layers[str(first + index)] = Layer(model, part, dtype)
        self.layers = nn.ModuleDict(layers)
        if model.has_head:
            self.norm = RmsNorm(model.hidden_size, eps=model.norm_eps, dtype=dtype)
            self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False, dtype=dtype)
            if model.tie_embeddings:
                self.head.weight = self.embedding.weight
        self.has_embedding, self.has_head = model.has_embedding, model.has_head

    def forward(self, x: Tensor, targets_BS: Tensor | None) -> tuple[Tensor, Tensor]:
        """(sum of the token losses, sum over layers and sequences of the unweighted load-balancing loss). ``x`` are tokens
        [B, S], or, without an embedding, hidden vectors [B, S, H]; without a head hidden vectors stand in place of the losses."""
        x_BSH = self.embedding(x) if self.has_embedding else x
        balance = x_BSH.new_zeros((), dtype=torch.promote_types(x_BSH.dtype, torch.float32))
        for layer in self.layers.values():
            x_BSH, balance_B = layer(x_BSH)
            balance = balance + balance_B.sum()
        if not self.has_head:
            return x_BSH, balance
        assert targets_BS is not None
        return token_loss(self.head(self.norm(x_BSH)).flatten(0, 1), targets_BS.flatten()), balance

    def moe_blocks(self) -> Iterator[MoeBlock]:
        """The MoE blocks, in order."""
        for layer in self.layers.values():
            assert isinstance(layer, Layer)
            if isinstance(layer.feed_forward, MoeBlock):
                yield layer.feed_forward

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Everything outside the routed experts, by name: what all ranks hold alike."""
        routed = {id(parameter) for block in self.moe_blocks() for parameter in block.routed.parameters()}
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) not in routed}

    def expert_biases(self) -> dict[str, Tensor]:
        """What gates add to scores where experts are chosen, by name, where they do. No parameters: no gradient moves them."""
        return {name: value for name, value in self.named_buffers() if name.endswith(".expert_bias")}

    @torch.no_grad()
    def initialise(self, weights: InitialWeights) -> None:
        """The dense parameters, and experts' biases."""
        for name, value in (self.dense_parameters() | self.expert_biases()).items():
            value.copy_(weights.dense(name, value.shape))
