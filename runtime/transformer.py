"""A decoder-only language model: RMSNorm, causal attention with rotary embeddings, dense and MoE feed-forward parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridep.recompute import Recompute
from hybridep.workload import Model, Workload
from runtime.attention import Attention, LatentAttention
from runtime.initial_weights import InitialWeights
from runtime.moe import FeedForward, MoeBlock, RoutedExperts, keeping_input
from runtime.norm import RmsNorm
from runtime.token_loss import token_loss

MakeRouted = Callable[[int], RoutedExperts]
"""MoE layer index -> its routed experts."""


class Layer(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a residual path."""

    def __init__(self, model: Model, feed_forward: FeedForward | MoeBlock, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(model.hidden_size, eps=model.norm_eps, dtype=dtype)
        self.attention = Attention(model, dtype) if model.latent_attention is None else LatentAttention(model, dtype)
        self.feed_forward_norm = RmsNorm(model.hidden_size, eps=model.norm_eps, dtype=dtype)
        self.feed_forward = feed_forward

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """(output, load-balancing loss of each sequence)."""
        self.feed_forward.prepare()
        again = Recompute.ATTENTION in self.feed_forward.recompute
        x_BSH, begun = keeping_input(partial(self._begin, decided=[]), x_BSH, again=again)
        y_BSH, balance_B = self.feed_forward.finish(begun)
        return x_BSH + y_BSH, balance_B

    def _begin(self, x_BSH: Tensor, decided: list[Tensor]) -> tuple[Tensor, Any]:
        """Attention beside the residual path, and what the feed-forward part begins with it."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        return x_BSH, self.feed_forward.begin(self.feed_forward_norm(x_BSH), decided)


class Transformer(nn.Module):
    """The whole model, or a pipeline stage's part of it, whose layers keep the names that they have in the whole;
    ``make_routed`` supplies each MoE layer's experts, local or spread over ranks."""

    def __init__(
        self,
        workload: Workload,
        make_routed: MakeRouted,
        *,
        dtype: torch.dtype,
        dense_recompute: Recompute = Recompute.NOTHING,
    ) -> None:
        """``dense_recompute``: as ``Plan.dense_recompute``; layers with experts do as these say."""
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
                part.recompute = dense_recompute
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
