"""The feed-forward half of a transformer layer: a plain network, or gate + routed experts + shared expert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridep.recompute import Recompute
from hybridep.workload import Ffn, Workload
from runtime.experts import feed_forward
from runtime.gate import Gate, Gated

RoutingHook = Callable[[int, Gated], None]
"""Called with (MoE layer, the gate's decision) in every forward."""

Made = TypeVar("Made")


def keeping_input(compute: Callable[[Tensor], Made], x: Tensor, *, again: bool) -> Made:
    """``compute(x)``. Where ``again``, nothing but ``x`` is kept: backward begins by computing what it needs a second time."""
    if not again:
        return compute(x)
    made: Made = checkpoint(compute, x, use_reentrant=False, preserve_rng_state=False)
    return made


class RoutedExperts(nn.Module, ABC):
    """y_t = sum over the chosen experts of weight * expert(x_t), wherever the experts are."""

    recompute = Recompute.NOTHING
    """As ``LayerGroup.recompute``, of the whole layer."""

    def prepare(self) -> None:
        """The block's forward starts: what the experts need may begin to travel."""

    @abstractmethod
    def forward(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """[T, H]; id -1 marks a choice that was dropped."""


class FeedForward(nn.Module):
    """A plain feed-forward network: of a layer without experts, and the shared expert."""

    recompute = Recompute.NOTHING
    """As ``Plan.dense_recompute``, of a layer without experts."""

    def __init__(self, *, hidden_size: int, ffn_size: int, ffn: Ffn, dtype: torch.dtype) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(ffn.num_matrices * hidden_size * ffn_size, dtype=dtype))
        self.ffn = ffn

    def prepare(self) -> None:
        """Nothing to prepare."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H]."""
        return feed_forward(x_BSH.flatten(0, 1), self.row, ffn=self.ffn).view_as(x_BSH)

    def begin(self, x_BSH: Tensor, decided: list[Tensor]) -> Tensor:
        """All of it; as ``MoeBlock.begin``."""
        y_BSH: Tensor = self(x_BSH)
        return y_BSH

    def finish(self, y_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """(output, load-balancing loss of each sequence: none)."""
        return y_BSH, y_BSH.new_zeros(y_BSH.shape[0])


class Begun(NamedTuple):
    """What a MoE block makes of its input before the routed experts."""

    x_BSH: Tensor
    """The input."""
    gated: Gated
    shared_BSH: Tensor | None
    """What the shared expert makes of it."""


class MoeBlock(nn.Module):
    """Gate, routed experts, and the shared expert that every token passes."""

    def __init__(self, workload: Workload, routed: RoutedExperts, *, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        model = workload.model
        self.gate = Gate(
            hidden_size=model.hidden_size,
            num_experts=model.num_experts,
            top_k=model.top_k,
            dtype=dtype,
            renormalise=model.norm_topk_prob,
            score_function=model.score_function,
            scale=model.routed_scaling_factor,
            groups=model.expert_groups,
            groups_per_token=model.groups_per_token,
            rated_by=model.rated_by,
            bias_update_rate=model.expert_bias_update_rate,
            capacity=workload.expert_capacity,
            policy=model.token_drop_policy,
        )
        self.shared: FeedForward | None = None
        if model.shared_ffn_size:
            self.shared = FeedForward(hidden_size=model.hidden_size, ffn_size=model.shared_ffn_size, ffn=model.ffn, dtype=dtype)
        self.shared_gate: nn.Linear | None = None
        if model.shared_expert_gate:
            self.shared_gate = nn.Linear(model.hidden_size, 1, bias=False, dtype=dtype)
        self.routed = routed
        self.routing_hook: RoutingHook | None = None

    def prepare(self) -> None:
        """The layer's forward starts."""
        self.routed.prepare()

    @property
    def recompute(self) -> Recompute:
        """As ``LayerGroup.recompute``."""
        return self.routed.recompute

    def begin(self, x_BSH: Tensor, decided: list[Tensor]) -> Begun:
        """What needs no other rank, and nothing but the result of which is seen, so that it may be computed again: ``decided``
        has the gate's choices then, and gets them the first time."""
        gated: Gated = self.gate(x_BSH, *decided)
        decided[:] = gated.chosen_TK, gated.ids_TK
        # The shared expert runs before the exchange: it is part of what hides the arrival of copies.
        shared_BSH = None
        if self.shared is not None:
            shared_BSH = keeping_input(self._pass_shared, x_BSH, again=self.recompute is Recompute.EXPERTS)
        return Begun(x_BSH, gated, shared_BSH)

    def finish(self, begun: Begun) -> tuple[Tensor, Tensor]:
        """(output, load-balancing loss of each sequence)."""
        x_BSH, gated, shared_BSH = begun
        self.gate.count(gated.chosen_TK)
        if self.routing_hook is not None:
            self.routing_hook(self.layer, gated)
        y_BSH = self.routed(x_BSH.flatten(0, 1), gated.weights_TK, gated.ids_TK).view_as(x_BSH)
        return (y_BSH if shared_BSH is None else y_BSH + shared_BSH), gated.balance_B

    def _pass_shared(self, x_BSH: Tensor) -> Tensor:
        assert self.shared is not None
        y_BSH: Tensor = self.shared(x_BSH)
        return y_BSH if self.shared_gate is None else y_BSH * torch.sigmoid(self.shared_gate(x_BSH))
