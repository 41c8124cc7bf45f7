"""The gate: which experts each token visits, with which weights, and how unevenly."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gated(NamedTuple):
    """Decision of the gate for [T] tokens of [B] sequences."""

    weights_TK: Tensor
    """Softmax over all experts, renormalised over the chosen ones (Mixtral, Eq. 2 of arXiv:2401.04088)."""
    ids_TK: Tensor
    """int64 expert ids, best first."""
    balance_B: Tensor
    """Load-balancing loss of each sequence, unweighted; 1 when a sequence uses all experts alike."""


class Gate(nn.Module):
    """Top-k softmax gate without capacity limit: no token is ever dropped."""

    def __init__(self, *, hidden_size: int, num_experts: int, top_k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype))
        self.top_k = top_k

    def forward(self, x_BSH: Tensor) -> Gated:
        """Scores in at least fp32: bf16 rounding would make ties, and ties would make routing arbitrary."""
        wide = torch.promote_types(x_BSH.dtype, torch.float32)
        scores_BSE = F.softmax(F.linear(x_BSH.to(wide), self.weight.to(wide)), dim=-1)
        weights_BSK, ids_BSK = scores_BSE.topk(self.top_k, dim=-1)
        weights_BSK = weights_BSK / weights_BSK.sum(dim=-1, keepdim=True)
        balance_B = balance_loss(scores_BSE, ids_BSK)
        return Gated(weights_BSK.flatten(0, 1).to(x_BSH.dtype), ids_BSK.flatten(0, 1), balance_B)


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
