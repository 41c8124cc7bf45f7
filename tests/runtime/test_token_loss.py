"""The loss of tokens against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import runtime.token_loss
from runtime.token_loss import token_loss


def plain(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), targets_N, reduction="sum")


@pytest.mark.parametrize("part", [1, 3 * 50, 1 << 22], ids=["rows", "uneven", "whole"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_loss_and_gradient_are_those_of_cross_entropy(
    part: int, dtype: torch.dtype, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of logits that are large together, so that exp is no number; of bf16 a gradient's last place may differ."""
    monkeypatch.setattr(runtime.token_loss, "LOSS_PART", part)
    monkeypatch.setattr(runtime.token_loss, "LOSS_PARTS", 100)
    generator = torch.Generator().manual_seed(3)
    targets_N = torch.randint(50, (11,), generator=generator)
    weights_NV = torch.randn(11, 50, generator=generator, dtype=torch.float64).to(dtype) * 4
    weights_NV[2] += 1000
    found, asked = weights_NV.clone().requires_grad_(), weights_NV.clone().requires_grad_()
    loss, expected = token_loss(found * 1, targets_N), plain(asked * 1, targets_N)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=min(close, 1e-6), atol=0)
    (loss / 7).backward()
    (expected / 7).backward()
    torch.testing.assert_close(found.grad, asked.grad, rtol=close, atol=close / 100)
    assert found.grad is not None and bool(found.grad.isfinite().all())


def test_logits_are_turned_into_their_gradient_so_that_no_second_block_is_needed() -> None:
    leaf = torch.randn(6, 5, requires_grad=True)
    logits_NV = leaf * 1
    logits_NV.retain_grad()
    loss = token_loss(logits_NV, torch.arange(5).repeat(2)[:6])
    loss.backward(retain_graph=True)
    torch.testing.assert_close(logits_NV.detach().sum(dim=1), torch.zeros(6), rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
