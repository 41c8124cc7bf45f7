"""Cross entropy of tokens that holds the logits once, in their own type: they are turned into their gradient in place.

torch's own holds log-probabilities in fp32 beside the logits, and their gradient beside both when it runs backward: three blocks
of tokens x vocabulary, gigabytes with vocabularies of 150,000. (Torch 2.13 has ``linear_cross_entropy``, 2.11 does not.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridep.workload import LOSS_PART, LOSS_PARTS


def token_loss(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """[]: sum over tokens of the cross entropy, in fp32 at least. The logits are gone when it has run backward."""
    loss: Tensor = _TokenLoss.apply(logits_NV, targets_N)  # type: ignore[no-untyped-call]
    return loss


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        # The largest apart from the sum: what all logits have in common, which may be large, costs no digits.
        largest_N = logits_NV.amax(dim=1).to(torch.promote_types(logits_NV.dtype, torch.float32))
        sums_N = torch.cat([_exponentials(*part).sum(dim=1) for part in _parts(logits_NV, largest_N)])
        chosen_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1)
        log_shares_N = chosen_N - largest_N - sums_N.log()
        ctx.save_for_backward(logits_NV, targets_N, largest_N, sums_N, log_shares_N)
        return -log_shares_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits_NV, targets_N, largest_N, sums_N, log_shares_N = ctx.saved_tensors
        for part, largest, scale in _parts(logits_NV, largest_N, gradient / sums_N):
            torch.mul(_exponentials(part, largest), scale[:, None], out=part)
        chosen_N = log_shares_N.expm1_().mul_(gradient)
        logits_NV[torch.arange(len(targets_N), device=targets_N.device), targets_N] = chosen_N.to(logits_NV.dtype)
        return logits_NV, None


def _exponentials(part_NV: Tensor, largest_N: Tensor) -> Tensor:
    return (part_NV - largest_N[:, None]).exp_()


def _parts(logits_NV: Tensor, *others_N: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Of some rows each."""
    number, width = logits_NV.shape
    rows = max(LOSS_PART // width, -(-number // LOSS_PARTS), 1)
    return zip(*(torch.split(one, rows) for one in (logits_NV, *others_N)), strict=True)
