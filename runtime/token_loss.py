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

from hybridep.workload import LOSS_PART


def token_loss(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """[]: sum over tokens of the cross entropy, in fp32 at least. The logits are gone when it has run backward."""
    loss: Tensor = _TokenLoss.apply(logits_NV, targets_N)  # type: ignore[no-untyped-call]
    return loss


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        # The largest apart from the sum: what all logits have in common, which may be large, costs no digits.
        largest_N = logits_NV.amax(dim=1).to(wide)
        parts = _parts(logits_NV, largest_N)
        log_sums_N = torch.cat([(part - largest[:, None]).exp_().sum(dim=1) for part, largest in parts]).log_()
        ctx.save_for_backward(logits_NV, targets_N, largest_N, log_sums_N)
        chosen_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1)
        return (log_sums_N - (chosen_N - largest_N)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits_NV, *others = ctx.saved_tensors
        for part, targets, largest, log_sums in _parts(logits_NV, *others):
            shares = (part - largest[:, None]).sub_(log_sums[:, None]).exp_()
            shares[torch.arange(len(part), device=part.device), targets] -= 1
            part.copy_(shares.mul_(gradient))
            del shares  # before those of the next part are made
        return logits_NV, None


def _parts(logits_NV: Tensor, *others_N: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(LOSS_PART // logits_NV.shape[1], 1)
    return zip(*(torch.split(one, rows) for one in (logits_NV, *others_N)), strict=True)
