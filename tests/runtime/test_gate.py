"""The gate against definitions written out with loops."""

from __future__ import annotations

import pytest
import torch

from hybridep.workload import DropPolicy
from runtime.gate import Gate, balance_loss, room


def gate(top_k: int = 2, dtype: torch.dtype = torch.float64) -> Gate:
    module = Gate(hidden_size=6, num_experts=5, top_k=top_k, dtype=dtype)
    with torch.no_grad():
        module.weight.normal_()
    return module


def test_weights_are_renormalised_over_the_chosen() -> None:
    module = gate()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    weights, ids, *_ = module(x)
    for token, row in enumerate(x.view(6, 6)):
        exponentials = (module.weight @ row).exp().detach()
        chosen = sorted(range(5), key=lambda e: -float(exponentials[e]))[:2]
        assert ids[token].tolist() == chosen
        expected = exponentials[chosen] / exponentials[chosen].sum()
        torch.testing.assert_close(weights[token], expected)


def test_balance_loss_is_the_definition() -> None:
    scores = torch.rand(2, 4, 5, dtype=torch.float64).softmax(dim=-1)
    ids = scores.topk(2, dim=-1).indices
    for sequence in range(2):
        expected = 0.0
        for expert in range(5):
            times = sum(expert in ids[sequence, token].tolist() for token in range(4))
            fraction = 5 / (2 * 4) * times
            expected += fraction * sum(float(scores[sequence, token, expert]) for token in range(4)) / 4
        torch.testing.assert_close(float(balance_loss(scores, ids)[sequence]), expected)


def test_even_use_costs_one() -> None:
    scores = torch.full((1, 10, 5), 0.2, dtype=torch.float64)
    ids = (torch.arange(20).view(1, 10, 2)) % 5
    torch.testing.assert_close(balance_loss(scores, ids), torch.ones(1, dtype=torch.float64))


def test_sequences_do_not_see_each_other() -> None:
    """So the loss is the same however sequences are spread over ranks and micro-batches."""
    module = gate()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    together = module(x).balance_B
    apart = torch.cat([module(x[i : i + 1]).balance_B for i in range(3)])
    torch.testing.assert_close(together, apart)


def test_bf16_scores_are_computed_in_fp32() -> None:
    """In bf16 many scores would tie, and the choice among equals is arbitrary."""
    module = gate(dtype=torch.bfloat16)
    x = torch.randn(1, 64, 6, dtype=torch.bfloat16)
    weights, ids, _, balance = module(x)
    assert weights.dtype is torch.bfloat16
    assert balance.dtype is torch.float32
    wide = (x.float() @ module.weight.float().T).view(64, 5)
    assert torch.equal(ids, wide.softmax(dim=-1).topk(2, dim=-1).indices)


@pytest.mark.parametrize("policy", list(DropPolicy))
@pytest.mark.parametrize("capacity", [1, 3, 40])
def test_an_expert_takes_the_first_tokens_of_each_sequence(policy: DropPolicy, capacity: int) -> None:
    scores = torch.randn(3, 20, 5, generator=torch.Generator().manual_seed(capacity), dtype=torch.float64).softmax(dim=-1)
    scores[:, 10:] = scores[:, :10]  # Equal scores: the earlier token goes first.
    ids = scores.topk(2, dim=-1).indices
    fits = room(scores, ids, capacity=capacity, policy=policy)
    for sequence in range(3):
        for expert in range(5):
            wants = [(token, slot) for token in range(20) for slot in range(2) if int(ids[sequence, token, slot]) == expert]
            if policy is DropPolicy.PROBS:
                wants.sort(key=lambda want: (-round(float(scores[sequence, want[0], expert]) * 2**20), want[0]))
            taken = [want for want in wants if fits[sequence][want]]
            assert sorted(taken) == sorted(wants[:capacity])
