"""The gate: which experts each token visits, with which weights, how unevenly, and what finds no room there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridep.workload import DropPolicy, ScoreFunction

_SCORE_STEPS = 1 << 20
"""Scores, from 0 to 1, are compared in this many steps."""
_LEAST_SUM = 1e-20
"""Added to sums that scores are divided by, as transformers does: scores of sigmoids may all be next to nothing."""


class Gated(NamedTuple):
    """Decision of the gate for [T] tokens of [B] sequences."""

    weights_TK: Tensor
    """Of the scores, unless told otherwise renormalised over the chosen ones (Mixtral, Eq. 2 of arXiv:2401.04088; DeepSeek-V3,
    Eq. 13 of arXiv:2412.19437)."""
    ids_TK: Tensor
    """int64 expert ids, best first; -1 (and weight 0) where the expert had no room."""
    chosen_TK: Tensor
    """The ids before any was dropped."""
    balance_B: Tensor
    """Load-balancing loss of each sequence, unweighted; 1 when a sequence uses all experts alike."""


class Gate(nn.Module):
    """Top-k gate. With a ``capacity`` an expert takes that many tokens of each sequence, else all that choose it."""

    expert_bias: Tensor | None
    """[E], in at least fp32: added to scores where experts are chosen, not to weights. No gradient moves it
    (``runtime.expert_bias``)."""
    choices_E: Tensor | None
    """int64: how often each expert was chosen in passes that train, dropped tokens too, since this was last set to zero. None
    where no bias follows them."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        dtype: torch.dtype,
        renormalise: bool = True,
        score_function: ScoreFunction = ScoreFunction.SOFTMAX,
        scale: float = 1.0,
        groups: int = 1,
        groups_per_token: int = 1,
        rated_by: int = 1,
        bias_update_rate: float | None = None,
        capacity: int | None = None,
        policy: DropPolicy = DropPolicy.PROBS,
    ) -> None:
        """As ``hybridep.workload.Model`` has them: ``renormalise`` is ``norm_topk_prob``, ``scale`` the
        ``routed_scaling_factor``, ``groups`` are ``expert_groups``, ``rated_by`` as there; of ``bias_update_rate`` only what is
        needed is made here."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype))
        self.top_k, self.renormalise, self.capacity, self.policy = top_k, renormalise, capacity, policy
        self.score_function, self.scale = score_function, scale
        self.groups, self.groups_per_token, self.rated_by = groups, groups_per_token, rated_by
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer("expert_bias", None if bias_update_rate is None else torch.zeros(num_experts, dtype=wide))
        choices_E = torch.zeros(num_experts, dtype=torch.int64) if bias_update_rate else None
        self.register_buffer("choices_E", choices_E, persistent=False)

    def forward(self, x_BSH: Tensor, chosen_TK: Tensor | None = None, ids_TK: Tensor | None = None) -> Gated:
        """Scores in at least fp32: bf16 rounding would make ties, and ties would make routing arbitrary. ``chosen_TK`` and
        ``ids_TK``: of an earlier decision for the same tokens, which stays."""
        wide = torch.promote_types(x_BSH.dtype, torch.float32)
        logits_BSE: Tensor = _WideProduct.apply(x_BSH, self.weight, wide)  # type: ignore[no-untyped-call]
        if self.score_function is ScoreFunction.SOFTMAX:
            scores_BSE = shares_BSE = F.softmax(logits_BSE, dim=-1)
        else:
            scores_BSE = torch.sigmoid(logits_BSE)
            shares_BSE = scores_BSE / (scores_BSE.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        ids_BSK = self._choose(scores_BSE) if chosen_TK is None else chosen_TK.view(*x_BSH.shape[:-1], -1)
        weights_BSK = scores_BSE.gather(2, ids_BSK)
        if self.renormalise:
            weights_BSK = weights_BSK / (weights_BSK.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        if self.scale != 1.0:
            weights_BSK = weights_BSK * self.scale
        balance_B = balance_loss(shares_BSE, ids_BSK)
        kept_BSK = ids_BSK
        if self.capacity is not None:
            if ids_TK is None:
                fits_BSK = room(scores_BSE.detach(), ids_BSK, capacity=self.capacity, policy=self.policy)
            else:
                fits_BSK = ids_TK.view_as(ids_BSK) >= 0
            # The weights that remain are not scaled up again, as in Megatron-Core.
            weights_BSK = weights_BSK * fits_BSK
            kept_BSK = torch.where(fits_BSK, ids_BSK, -1)
        weights_TK = weights_BSK.flatten(0, 1).to(x_BSH.dtype)
        return Gated(weights_TK, kept_BSK.flatten(0, 1), ids_BSK.flatten(0, 1), balance_B)

    def count(self, chosen_TK: Tensor) -> None:
        """A pass has chosen; in a pass that trains that counts, once, however often it is computed."""
        if self.choices_E is not None and torch.is_grad_enabled():
            # On a GPU nothing waits: bincount would, for its length.
            picks = chosen_TK.flatten()
            self.choices_E.index_add_(0, picks, torch.ones_like(picks))

    @torch.no_grad()
    def _choose(self, scores_BSE: Tensor) -> Tensor:
        """int64 [B, S, K]: the best by score and bias, of the best groups only where these are limited."""
        if self.expert_bias is not None:
            scores_BSE = scores_BSE + self.expert_bias
        if self.groups_per_token < self.groups:
            grouped_BSGN = scores_BSE.view(*scores_BSE.shape[:-1], self.groups, -1)
            best_BSGM = grouped_BSGN.topk(self.rated_by, dim=-1).values
            groups_BSL = best_BSGM.sum(dim=-1).topk(self.groups_per_token, dim=-1).indices
            out_BSG = torch.ones_like(best_BSGM[..., 0], dtype=torch.bool).scatter_(-1, groups_BSL, False)
            # Not with zeros: a score with a bias may be below.
            scores_BSE = grouped_BSGN.masked_fill(out_BSG[..., None], -torch.inf).flatten(-2)
        ids_BSK = scores_BSE.topk(self.top_k, dim=-1).indices
        return ids_BSK


class _WideProduct(torch.autograd.Function):
    """Rows [..., H] times weights [E, H], in a wider type, of which backward makes them again: they are kept as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights_EH: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weights_EH)
        return F.linear(x.to(wide), weights_EH.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights_EH = ctx.saved_tensors
        flat_NE, wide = gradient.flatten(0, -2), gradient.dtype
        of_weights = flat_NE.t() @ x.flatten(0, -2).to(wide)
        of_x = flat_NE @ weights_EH.to(wide)
        return of_x.to(x.dtype).view_as(x), of_weights.to(weights_EH.dtype), None


@torch.no_grad()
def room(scores_BSE: Tensor, ids_BSK: Tensor, *, capacity: int, policy: DropPolicy) -> Tensor:
    """bool [B, S, K]: false where an expert takes the token no more, because ``capacity`` tokens of the same sequence go first:
    those of larger score, or those that come earlier in the sequence. Among equal scores the earlier token goes first."""
    num_sequences, length, top_k = ids_BSK.shape
    picks_BP = ids_BSK.flatten(1)
    if policy is DropPolicy.PROBS:
        # Tokens that see the same text have the same score up to rounding, which differs between ranks and the reference:
        # coarse scores make them equal, so that their order is that of the sequence everywhere.
        rank_BP = (scores_BSE.gather(2, ids_BSK).flatten(1) * _SCORE_STEPS).round()
        order_BP = rank_BP.argsort(dim=1, descending=True, stable=True)
    else:
        order_BP = torch.arange(length * top_k, device=ids_BSK.device).expand(num_sequences, -1)
    order_BP = order_BP.gather(1, picks_BP.gather(1, order_BP).argsort(dim=1, stable=True))
    # An expert's picks lie one after the other now: how many of its own come before each.
    expert_BP = picks_BP.gather(1, order_BP)
    place_BP = torch.arange(length * top_k, device=ids_BSK.device) - torch.searchsorted(expert_BP, expert_BP)
    return torch.zeros_like(picks_BP, dtype=torch.bool).scatter(1, order_BP, place_BP < capacity).view_as(ids_BSK)


def balance_loss(scores_BSE: Tensor, ids_BSK: Tensor) -> Tensor:
    """[B]: sum over experts of f_i * P_i per sequence (DeepSeek-V3, arXiv:2412.19437, Eq. 17-20, without its factor alpha).

    Taken per sequence, so that it is the same however sequences are spread over ranks and micro-batches.
    """
    num_sequences, length, num_experts = scores_BSE.shape
    top_k = ids_BSK.shape[-1]
    chosen_BE = torch.zeros(num_sequences, num_experts, dtype=scores_BSE.dtype, device=scores_BSE.device)
    picks_BT = ids_BSK.flatten(1)
    chosen_BE.scatter_add_(1, picks_BT, torch.ones_like(picks_BT, dtype=scores_BSE.dtype))
    fraction_BE = chosen_BE * (num_experts / (top_k * length))
    return (fraction_BE * scores_BSE.mean(dim=1)).sum(dim=1)
