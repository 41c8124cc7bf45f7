"""The experts of one rank through the operators, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Case, make_ids, make_rows
from torch import Tensor

from hybridep.workload import Ffn
from runtime.experts import feed_forward
from runtime.kernels.local import grouped, weighted_experts

HIDDEN, WIDTH, EXPERTS = 16, 24, 6


def make_problem(ffn: Ffn, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ids = make_ids(Case(name="", rows=20, top_k=3, experts=EXPERTS, routing="gaps"))
    place = torch.tensor([2, -1, 0, 3, -1, 1], dtype=torch.int32)
    x, weights = make_rows(20, HIDDEN, dtype), make_rows(20, 3, dtype, seed=2)
    experts = make_rows(4, ffn.num_matrices * HIDDEN * WIDTH, torch.float64, seed=3) / 4
    return x, weights, ids, place, experts.to(dtype)


def by_token(x: Tensor, weights: Tensor, ids: Tensor, place: Tensor, experts: Tensor, ffn: Ffn) -> Tensor:
    out = []
    for row in range(len(x)):
        total = x[row] * 0
        for k, e in enumerate(ids[row].tolist()):
            if e >= 0 and place[e] >= 0:
                total = total + weights[row, k] * feed_forward(x[row : row + 1], experts[place[e]], ffn=ffn)[0]
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("ffn", list(Ffn))
def test_loop_equals_the_sum_over_tokens(ffn: Ffn) -> None:
    x, weights, ids, place, experts = make_problem(ffn, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, weights, experts)]
    found = weighted_experts(x, weights, ids, place, experts[:1], experts[1:], ffn=ffn)
    wanted = by_token(x, weights, ids, place, experts, ffn)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, wanted)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("ffn", list(Ffn))
def test_grouped_form_agrees_in_bf16(ffn: Ffn) -> None:
    x, weights, ids, place, experts = make_problem(ffn, torch.bfloat16)
    leaves = [tensor.requires_grad_() for tensor in (x, weights, experts)]
    found = grouped(x, weights, ids, place, experts, ffn=ffn)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    wanted = by_token(exact[0], exact[1], ids, place, exact[2], ffn)
    results = [(y, *torch.autograd.grad(y.double().sum(), given)) for y, given in ((found, leaves), (wanted, exact))]
    for a, b in zip(*results, strict=True):
        assert float((a.double() - b).detach().norm() / b.detach().norm()) < 2e-2


def test_no_experts_and_no_rows() -> None:
    nothing = torch.zeros(0, 2 * HIDDEN * WIDTH)
    place = torch.full((EXPERTS,), -1, dtype=torch.int32)
    ids = torch.zeros(0, 3, dtype=torch.int32)
    x = torch.zeros(0, HIDDEN, requires_grad=True)
    y = weighted_experts(x, torch.zeros(0, 3), ids, place, nothing, nothing, ffn=Ffn.GELU)
    assert y.shape == (0, HIDDEN)
    assert torch.autograd.grad(y.sum(), x)[0].shape == (0, HIDDEN)
    place[0] = 0
    one = torch.ones(1, 2 * HIDDEN * WIDTH, requires_grad=True)
    y = weighted_experts(x, torch.zeros(0, 3), ids, place, one, nothing, ffn=Ffn.GELU)
    # An expert that nobody chose has a gradient of zeros, not none.
    assert torch.autograd.grad(y.sum(), one)[0].count_nonzero() == 0
