"""RMSNorm against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.norm import RmsNorm


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 4, 16)], ids=str)
def test_norm_and_gradients_are_torchs(shape: tuple[int, ...], dtype: torch.dtype, close: float) -> None:
    """Forward to the bit."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*size: int) -> Tensor:
        return (torch.randn(size, generator=generator, dtype=torch.float64) * 3).to(dtype)

    norm, data, gradient = RmsNorm(16, eps=1e-3, dtype=dtype), drawn(*shape), drawn(*shape)
    norm.weight.data.copy_(drawn(16))
    mine, theirs, weight = data.clone().requires_grad_(), data.clone().requires_grad_(), norm.weight.detach().requires_grad_()
    found, expected = norm(mine), F.rms_norm(theirs, (16,), weight, 1e-3)
    assert found.dtype == dtype and torch.equal(found, expected)
    found.backward(gradient)
    expected.backward(gradient)
    for one, other in ((mine.grad, theirs.grad), (norm.weight.grad, weight.grad)):
        assert one is not None and other is not None and one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_little_is_kept_for_backward() -> None:
    """The input itself and a number for each row."""
    x, kept = torch.randn(8, 16).bfloat16().requires_grad_(), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    norm = RmsNorm(16, eps=1e-5, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x)
    assert sorted(tensor.numel() for tensor in kept) == [8, 16, 8 * 16]
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in kept)
