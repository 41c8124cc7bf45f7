"""The gate against definitions written out with loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridep.workload import DropPolicy, ScoreFunction
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


SIGMOID, SOFTMAX = ScoreFunction.SIGMOID, ScoreFunction.SOFTMAX
SIZES: dict[str, Any] = {"hidden_size": 6, "num_experts": 12, "dtype": torch.float64}
SETTINGS: list[dict[str, Any]] = [
    # As DeepSeek-V3's, whose eight experts are of four groups: two of each, as two of each are here.
    {
        "top_k": 4,
        "score_function": SIGMOID,
        "groups": 4,
        "groups_per_token": 2,
        "rated_by": 2,
        "scale": 2.5,
        "bias_update_rate": 0.0,
    },
    {"top_k": 3, "score_function": SIGMOID, "groups": 6, "groups_per_token": 4, "renormalise": False, "scale": 0.5},
    {"top_k": 3, "score_function": SOFTMAX, "groups": 3, "groups_per_token": 1, "rated_by": 3, "bias_update_rate": 0.1},
    {"top_k": 4, "score_function": SOFTMAX, "groups": 4, "groups_per_token": 2, "renormalise": False, "scale": 16.0},
    {"top_k": 5, "score_function": SOFTMAX, "scale": 1.5, "renormalise": False, "bias_update_rate": 0.1},
    {"top_k": 2, "score_function": SIGMOID, "bias_update_rate": 0.1, "capacity": 2},
]


def deepseek_gate(settings: dict[str, Any]) -> Gate:
    """With random weights and, where there is one, a bias so far apart that some scores with it are below zero."""
    module, draw = Gate(**SIZES, **settings), torch.Generator().manual_seed(3)
    with torch.no_grad():
        module.weight.normal_(generator=draw)
        if module.expert_bias is not None:
            module.expert_bias.normal_(generator=draw)
    return module


def choose_in_python(
    logits: list[float], bias: list[float], settings: dict[str, Any]
) -> tuple[list[int], list[float], list[float]]:
    """(experts, best first; their weights; all experts' shares) of a token, by DeepSeek-V3's section 2.1.2."""
    if settings["score_function"] is SIGMOID:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        scores = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
    selection = [score + own for score, own in zip(scores, bias, strict=True)]
    groups, limit, top_k = settings.get("groups", 1), settings.get("groups_per_token", 1), settings["top_k"]
    size, of_each = len(logits) // groups, settings.get("rated_by", 1)
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    members.sort(key=lambda group: -sum(sorted((selection[expert] for expert in group), reverse=True)[:of_each]))
    allowed = [expert for group in members[:limit] for expert in group]
    ids = sorted(allowed, key=lambda expert: -selection[expert])[:top_k]
    total = sum(scores[expert] for expert in ids) if settings.get("renormalise", True) else 1.0
    weights = [scores[expert] / total * settings.get("scale", 1.0) for expert in ids]
    return ids, weights, [score / sum(scores) for score in scores]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "-".join(str(getattr(v, "value", v)) for v in one.values()))
def test_experts_are_chosen_as_deepseek_v3_does(settings: dict[str, Any]) -> None:
    module = deepseek_gate(settings)
    x_BSH = torch.randn(3, 30, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = module(x_BSH)
    logits = (x_BSH.flatten(0, 1) @ module.weight.T).tolist()
    bias = [0.0] * 12 if module.expert_bias is None else module.expert_bias.tolist()
    expected = [choose_in_python(row, bias, settings) for row in logits]
    assert found.chosen_TK.tolist() == [ids for ids, _, _ in expected]
    kept = found.ids_TK >= 0
    assert kept.all() == ("capacity" not in settings)
    weights = torch.tensor([weights for _, weights, _ in expected], dtype=torch.float64)
    torch.testing.assert_close(found.weights_TK, weights * kept)
    # Eq. 17-20, of each sequence.
    for sequence, balance in enumerate(found.balance_B.tolist()):
        rows = expected[sequence * 30 : sequence * 30 + 30]
        chosen = [sum(expert in ids for ids, _, _ in rows) * 12 / (settings["top_k"] * 30) for expert in range(12)]
        shares = [sum(shares[expert] for _, _, shares in rows) / 30 for expert in range(12)]
        assert balance == pytest.approx(sum(map(math.prod, zip(chosen, shares, strict=True))))
    if (groups := settings.get("groups", 1)) > 1 and settings["top_k"] > settings["groups_per_token"]:
        visited = [len({expert * groups // 12 for expert in ids}) for ids in found.chosen_TK.tolist()]
        # It would visit more: the limit matters here.
        assert max(visited) <= settings["groups_per_token"]
        module.groups_per_token = groups
        free = [len({expert * groups // 12 for expert in ids}) for ids in module(x_BSH).chosen_TK.tolist()]
        assert max(free) > settings["groups_per_token"]


def test_a_bias_gets_no_gradient_and_changes_none() -> None:
    """Of the same choices: one that is alike for all experts changes no choice."""
    plain, biased = (deepseek_gate({"top_k": 3, "score_function": SIGMOID, "bias_update_rate": 0.1}) for _ in range(2))
    assert plain.expert_bias is not None and biased.expert_bias is not None
    plain.expert_bias.zero_()
    biased.expert_bias.fill_(-7.0)
    x_BSH = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for module in (plain, biased):
        found = module(x_BSH)
        (found.weights_TK.square().sum() + found.balance_B.sum()).backward()
    assert [name for name, _ in biased.named_parameters()] == ["weight"] and not biased.expert_bias.requires_grad
    assert torch.equal(plain.weight.grad, biased.weight.grad)  # type: ignore[arg-type]


def test_a_decision_that_was_made_stays() -> None:
    """Weights follow the scores; which experts, and which tokens find no room, is as it was."""
    module = deepseek_gate({"top_k": 2, "capacity": 1})
    x_BSH = torch.randn(2, 9, 6, dtype=torch.float64)
    first, other = module(x_BSH), module(-x_BSH)
    assert not torch.equal(other.chosen_TK, first.chosen_TK) and not torch.equal(other.ids_TK < 0, first.ids_TK < 0)
    again = module(-x_BSH, first.chosen_TK, first.ids_TK)
    assert torch.equal(again.chosen_TK, first.chosen_TK) and torch.equal(again.ids_TK, first.ids_TK)
    assert torch.equal(again.weights_TK == 0, first.weights_TK == 0) and not torch.equal(again.weights_TK, first.weights_TK)


def test_choices_are_counted_where_a_bias_follows_them() -> None:
    """All of them, dropped ones too; not those of a validation."""
    module = deepseek_gate({"top_k": 2, "score_function": SOFTMAX, "bias_update_rate": 0.1, "capacity": 1})
    assert module.choices_E is not None
    expected = torch.zeros(12, dtype=torch.int64)
    for seed in range(2):
        x_BSH = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = module(x_BSH)
        module.count(found.chosen_TK)
        assert (found.ids_TK < 0).any()
        for expert in found.chosen_TK.flatten().tolist():
            expected[expert] += 1
        with torch.no_grad():
            module.count(module(x_BSH).chosen_TK)
    assert torch.equal(module.choices_E, expected) and int(expected.sum()) == 2 * 2 * 9 * 2
    for rate in (None, 0.0):
        assert deepseek_gate({"top_k": 2, "bias_update_rate": rate}).choices_E is None


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
