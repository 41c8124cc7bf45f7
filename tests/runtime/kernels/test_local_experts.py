"""The experts of one rank, in plain torch and through the operators, against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import Case, make_ids, make_rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridep.workload import Ffn
from runtime.experts import feed_forward
from runtime.kernels import local
from runtime.kernels.local import in_plain_torch, weighted_experts, with_kernels

HIDDEN, WIDTH, EXPERTS = 16, 24, 6


def make_problem(ffn: Ffn, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ids = make_ids(Case(name="", rows=20, top_k=3, experts=EXPERTS, routing="gaps"))
    place = torch.tensor([2, -1, 0, 3, -1, 1], dtype=torch.int32)
    ids[(ids >= 0) & (place[ids.long().clamp(min=0)] < 0)] = -1
    x, weights = make_rows(20, HIDDEN, dtype), make_rows(20, 3, dtype, seed=2)
    experts = make_rows(4, ffn.num_matrices * HIDDEN * WIDTH, torch.float64, seed=3) / 4
    return x, weights, ids, place, experts.to(dtype)


def by_token(x: Tensor, weights: Tensor, ids: Tensor, place: Tensor, experts: Tensor, ffn: Ffn) -> Tensor:
    out = []
    for row in range(len(x)):
        total = x[row] * 0
        for k, e in enumerate(ids[row].tolist()):
            if e >= 0:
                total = total + weights[row, k] * feed_forward(x[row : row + 1], experts[place[e]], ffn=ffn)[0]
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("form", [in_plain_torch, with_kernels])
@pytest.mark.parametrize("ffn", list(Ffn))
def test_each_form_equals_the_sum_over_tokens(ffn: Ffn, form: Callable[..., Tensor]) -> None:
    x, weights, ids, place, experts = make_problem(ffn, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, weights, experts)]
    wanted = by_token(x, weights, ids, place, experts, ffn)
    for num_home in (0, 1, 4):
        found = form(x, weights, ids, place, experts[:num_home], experts[num_home:], ffn=ffn)
        torch.testing.assert_close(found, wanted)
        grads = [torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (found, wanted)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("num_home", [0, 1, 4])
@pytest.mark.parametrize("ffn", list(Ffn))
def test_grouped_products_agree_in_bf16(ffn: Ffn, num_home: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home experts and copies each in one product, without a loop over experts."""
    monkeypatch.setattr(local, "grouped_feed_forward", None)
    x, weights, ids, place, experts = make_problem(ffn, torch.bfloat16)
    leaves = [tensor.requires_grad_() for tensor in (x, weights, experts)]
    found = with_kernels(x, weights, ids, place, experts[:num_home], experts[num_home:], ffn=ffn)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    wanted = by_token(exact[0], exact[1], ids, place, exact[2], ffn)
    results = [(y, *torch.autograd.grad(y.double().sum(), given)) for y, given in ((found, leaves), (wanted, exact))]
    for a, b in zip(*results, strict=True):
        assert float((a.double() - b).detach().norm() / b.detach().norm()) < 2e-2


def test_sizes_that_the_grouped_product_does_not_take() -> None:
    """Hidden size 6 in bf16: the loop."""
    x, weights = make_rows(10, 6, torch.bfloat16), make_rows(10, 1, torch.bfloat16, seed=2)
    ids, place = torch.zeros(10, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    experts = make_rows(1, 2 * 6 * 8, torch.bfloat16, seed=3)
    found = with_kernels(x, weights, ids, place, experts, experts[:0], ffn=Ffn.GELU)
    torch.testing.assert_close(found, feed_forward(x, experts[0], ffn=Ffn.GELU, weights_N=weights[:, 0]))


def test_tensors_of_a_gpu_go_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for form in ("with_kernels", "in_plain_torch"):
        monkeypatch.setattr(local, form, lambda x, *_, name=form, **__: taken.append(name) or x)
    rows = torch.zeros(2, 8)
    weighted_experts(rows, rows, rows, rows, rows, rows, ffn=Ffn.GELU)
    with FakeTensorMode():  # a CUDA tensor without a device behind it
        rows = torch.empty(2, 8, device="cuda")
        weighted_experts(rows, rows, rows, rows, rows, rows, ffn=Ffn.GELU)
    assert taken == ["in_plain_torch", "with_kernels"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [in_plain_torch, with_kernels])
def test_no_experts_and_no_rows(form: Callable[..., Tensor], dtype: torch.dtype) -> None:
    nothing = torch.zeros(0, 2 * HIDDEN * WIDTH, dtype=dtype)
    place = torch.full((EXPERTS,), -1, dtype=torch.int32)
    ids = torch.zeros(0, 3, dtype=torch.int32)
    x, weights = (torch.zeros(0, size, dtype=dtype, requires_grad=True) for size in (HIDDEN, 3))
    y = form(x, weights, ids, place, nothing, nothing, ffn=Ffn.GELU)
    assert y.shape == (0, HIDDEN)
    [grad] = torch.autograd.grad(y.sum(), x, allow_unused=True, materialize_grads=True)
    assert grad.shape == (0, HIDDEN)
    place[0] = 0
    one = torch.ones(1, 2 * HIDDEN * WIDTH, dtype=dtype, requires_grad=True)
    y = form(x, weights, ids, place, one, nothing, ffn=Ffn.GELU)
    # An expert that nobody chose has a gradient of zeros, not none.
    assert torch.autograd.grad(y.sum(), one)[0].count_nonzero() == 0
