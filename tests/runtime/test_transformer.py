"""The model: parameter counts of the workload's formulas, initial values, attention and rotation properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training_cases import CROSS, LATENT, MODELS, PLAIN, Case

from hybridep.attention import RopeScaling
from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.workload import Ffn, Model, Training, Workload
from planner.activations import attention_elements
from runtime.attention import Attention, LatentAttention
from runtime.experts import feed_forward, grouped_feed_forward, split_row
from runtime.initial_weights import Seeded, initial_expert
from runtime.mesh import Mesh
from runtime.reference import LocalExperts
from runtime.rotary import Rotary
from runtime.transformer import Transformer


def build_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Model, Transformer]:
    model = build(Model, (MODELS | CROSS)[name], name)
    workload = Workload(name=name, model=model, training=Training(sequence_length=6, micro_batch_size=2))
    weights = Seeded(model, seed)
    transformer = Transformer(workload, lambda layer: LocalExperts(model, layer, weights, dtype), dtype=dtype)
    transformer.initialise(weights)
    return model, transformer


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_plans_count(name: str) -> None:
    model, transformer = build_model(name)
    dense = sum(parameter.numel() for parameter in transformer.dense_parameters().values())
    assert dense == model.dense_params
    assert sum(parameter.numel() for parameter in transformer.parameters()) == model.total_params
    assert len(list(transformer.moe_blocks())) == model.num_moe_layers


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first = build_model("plain", seed=3)[1].state_dict()
    torch.manual_seed(999)
    again, other = build_model("plain", seed=3)[1].state_dict(), build_model("plain", seed=4)[1].state_dict()
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert "norm" in name or not torch.equal(value, other[name])
    assert not torch.equal(initial_expert(0, 0, 1, 8), initial_expert(0, 1, 0, 8))


def test_a_token_sees_no_later_one() -> None:
    _, transformer = build_model("top4-tied-gqa")
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 256
    hidden: list[torch.Tensor] = []
    transformer.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    for text in (tokens, changed):
        transformer(text, text)
    torch.testing.assert_close(hidden[0][:, :5], hidden[1][:, :5])
    assert not torch.allclose(hidden[0][:, 5:], hidden[1][:, 5:])


def test_grouped_queries_are_repeated_keys() -> None:
    """Grouped-query attention equals full attention whose key and value projections repeat each group's."""
    grouped_model = build(Model, MODELS["top4-tied-gqa"], "model")
    grouped = Attention(grouped_model, torch.float64)
    full = Attention(grouped_model.model_copy(update={"num_kv_heads": 2}), torch.float64)
    with torch.no_grad():
        for name in ("query", "output"):
            getattr(full, name).weight.copy_(getattr(grouped, name).weight)
        for name in ("key", "value"):
            getattr(full, name).weight.copy_(getattr(grouped, name).weight.repeat(2, 1))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(full(x), grouped(x))


def test_rotation_depends_on_distance_only() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64)
    rotary = Rotary(build(Model, PLAIN | {"head_dim": 8}, "model"))
    turned_query, turned_key = rotary(query.expand(6, 8)), rotary(key.expand(6, 8))
    torch.testing.assert_close(turned_query[3] @ turned_key[1], turned_query[5] @ turned_key[3])
    torch.testing.assert_close(turned_query.norm(dim=1), query.norm().expand(6))
    torch.testing.assert_close(turned_query[0], query)


def turned(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """All of a vector, by hand."""
    half, y = len(x) // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half), dtype=torch.float64)
        y[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        y[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return y


GLM = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "attention_bias": True, "qk_norm": True, "partial_rotary_factor": 0.75}
"""Of each head six of eight elements are rotated, as two halves of three."""
GROUPED: dict[str, dict[str, Any]] = {
    "bare": {"num_kv_heads": 1},
    "glm": GLM,
    "glm-air": GLM | {"qk_norm": False, "partial_rotary_factor": 0.5},
    "olmoe": {"qk_norm": True, "qk_norm_full_width": True, "num_heads": 4, "num_kv_heads": 2},
}


def grouped_attention(name: str) -> tuple[Model, Attention]:
    model = build(Model, PLAIN | GROUPED[name] | {"rope_theta": 50.0, "norm_eps": 0.01}, "model")
    attention = Attention(model, torch.float64)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model, attention


@pytest.mark.parametrize("name", GROUPED)
def test_attention_of_one_head_and_token_after_the_other(name: str) -> None:
    model, attention = grouped_attention(name)
    weights, wide = attention.state_dict(), model.attention_width // model.num_heads
    rotated = round(wide * model.partial_rotary_factor)

    def made(token: torch.Tensor, kind: str, head: int, position: int) -> torch.Tensor:
        """One head's query, key or value."""
        rows = slice(head * wide, (head + 1) * wide)
        x = weights[f"{kind}.weight"][rows] @ token + (weights[f"{kind}.bias"][rows] if model.attention_bias else 0)
        if kind == "value":
            return x
        if model.qk_norm:
            normed = weights[f"{kind}.weight"] @ token if model.qk_norm_full_width else x
            scale = weights[f"{kind}_norm.weight"][rows if model.qk_norm_full_width else slice(None)]
            x = x / (normed.square().mean() + 0.01).sqrt() * scale
        return torch.cat([turned(x[:rotated], position, 50.0), x[rotated:]])

    text = torch.randn(5, 16, dtype=torch.float64)
    expected = torch.zeros(5, 16, dtype=torch.float64)
    for head in range(model.num_heads):
        shared = head * (model.num_kv_heads or model.num_heads) // model.num_heads
        for position, token in enumerate(text):
            query = made(token, "query", head, position)
            before = list(enumerate(text[: position + 1]))
            scores = torch.stack([query @ made(one, "key", shared, at) for at, one in before]) / wide**0.5
            values = torch.stack([made(one, "value", shared, at) for at, one in before])
            columns = slice(head * wide, (head + 1) * wide)
            expected[position] += weights["output.weight"][:, columns] @ (torch.softmax(scores, dim=0) @ values)
    torch.testing.assert_close(attention(text[None])[0], expected)


@pytest.mark.parametrize("name", GROUPED)
def test_attention_takes_parameters_flops_and_memory_as_plans_count(name: str) -> None:
    model, attention = grouped_attention(name)
    norms = 2 if model.qk_norm_full_width else (model.num_heads + (model.num_kv_heads or 0)) * model.qk_norm
    as_plans_count(model, attention, numbers=norms + model.num_heads + 2 * model.rotary_dim)


WIDE_VALUES = {"kv_rank": 3, "nope_head_dim": 2, "rope_head_dim": 2, "value_head_dim": 5}
"""Wider than keys; and queries that are projected at once."""


def latent_attention(sizes: dict[str, int]) -> tuple[Model, LatentAttention]:
    model = build(Model, PLAIN | {"num_heads": 3, "latent_attention": sizes, "rope_theta": 50.0}, "model")
    attention = LatentAttention(model, torch.float64)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model, attention


@pytest.mark.parametrize("sizes", [LATENT, WIDE_VALUES])
def test_latent_attention_of_one_head_and_token_after_the_other(sizes: dict[str, int]) -> None:
    """DeepSeek-V2's equations 9 to 19, by themselves."""
    _, attention = latent_attention(sizes)
    weights = attention.state_dict()
    nope, rope, values = sizes["nope_head_dim"], sizes["rope_head_dim"], sizes["value_head_dim"]

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.mul(x / (x.square().mean() + 1e-6).sqrt(), weights[f"{name}.weight"])

    text = torch.randn(5, 16, dtype=torch.float64)
    expected = torch.zeros(5, 16, dtype=torch.float64)
    for head in range(3):
        keys, found = [], []
        for position, token in enumerate(text):
            if "query_rank" in sizes:
                query = weights["query_up.weight"] @ normed(weights["query_down.weight"] @ token, "query_norm")
            else:
                query = weights["query.weight"] @ token
            query = query[head * (nope + rope) : (head + 1) * (nope + rope)]
            query = torch.cat([query[:nope], turned(query[nope:], position, 50.0)])
            down = weights["kv_down.weight"] @ token
            up = weights["kv_up.weight"] @ normed(down[: sizes["kv_rank"]], "kv_norm")
            up = up[head * (nope + values) : (head + 1) * (nope + values)]
            keys.append(torch.cat([up[:nope], turned(down[sizes["kv_rank"] :], position, 50.0)]))
            found.append(up[nope:])
            shares = torch.softmax(torch.stack([query @ key for key in keys]) / (nope + rope) ** 0.5, dim=0)
            value = torch.stack([share * one for share, one in zip(shares, found, strict=True)]).sum(dim=0)
            expected[position] += weights["output.weight"][:, head * values : (head + 1) * values] @ value
    torch.testing.assert_close(attention(text[None])[0], expected)


@pytest.mark.parametrize("sizes", [LATENT, WIDE_VALUES])
def test_latent_attention_takes_parameters_flops_and_memory_as_plans_count(sizes: dict[str, int]) -> None:
    model, attention = latent_attention(sizes)
    as_plans_count(model, attention, numbers=3 + 2 + 2 * sizes["rope_head_dim"])


def as_plans_count(model: Model, attention: Attention | LatentAttention, numbers: int) -> None:
    """Of projections to the number; scores would need a kernel that leaves out what is masked. Beside it may be kept so many
    numbers a token: of each norm's rows and of each head's one, and a row of a rotation's angles."""
    assert sum(one.numel() for one in attention.parameters()) == model.attention_block_params + model.attention_other_params
    tokens = 64
    x = torch.randn(1, tokens, 16, dtype=torch.float64, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        y = attention(x)
    counts = counter.get_flop_counts()["Global"]
    products = counts.get(torch.ops.aten.mm, 0) + counts.get(torch.ops.aten.addmm, 0)
    assert products == 2 * tokens * model.attention_block_params
    for value in (x, *attention.parameters()):
        kept.pop(value.untyped_storage().data_ptr(), None)
    assert 0 <= sum(kept.values()) / 8 - tokens * attention_elements(model) <= tokens * numbers
    y.sum().backward()


def turns_of(scaling: dict[str, float]) -> torch.Tensor:
    """[D/2]: by what each pair of 32 elements turns from one position to the next, and how much longer it becomes: [2, D/2]."""
    rotary = Rotary(build(Model, PLAIN | {"head_dim": 32, "rope_theta": 100.0, "rope_scaling": scaling}, "model"))
    first, second = rotary(torch.cat([torch.ones(16), torch.zeros(16)]).double().expand(2, 32))[1].chunk(2)
    return torch.stack([torch.atan2(second, first), torch.hypot(first, second)])


def test_scaled_rotation_slows_down_what_turns_slowly() -> None:
    """Of 16 pairs: in 512 positions the first turns 81 times, the last 1.1 times."""
    plain = 100.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    turned, longer = turns_of({"factor": 8, "original_length": 512, "beta_fast": 40, "beta_slow": 5})
    turns = 512 * plain / (2 * torch.pi)
    # The ramp begins at the last pair that turns so often, and ends at the first that does not turn so often any more.
    first, last = int((turns >= 40).sum()) - 1, int((turns > 5).sum())
    assert (first, last) == (2, 10)
    slow = torch.tensor([min(max((pair - first) / (last - first), 0), 1) for pair in range(16)], dtype=torch.float64)
    torch.testing.assert_close(turned, plain * (1 - slow) + plain / 8 * slow)
    torch.testing.assert_close(longer, torch.full((16,), 1 + 0.1 * math.log(8), dtype=torch.float64))


def test_scaled_rotation_without_a_ramp() -> None:
    """As Kimi-K2's: pairs that turn at least once in the original length stay as they are, all others are slowed in full."""
    plain = 100.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    turned, _ = turns_of({"factor": 8, "original_length": 64, "beta_fast": 1, "beta_slow": 1})
    often = 64 * plain / (2 * torch.pi) >= 1
    assert 0 < int(often.sum()) < 16
    torch.testing.assert_close(turned, torch.where(often, plain, plain / 8))


def test_scaled_rotation_of_deepseek_makes_nothing_longer_but_scores() -> None:
    """Where both scales are the same; all queries and keys are longer by what one of them makes of the factor."""
    scaling = {"factor": 40, "original_length": 4096, "mscale": 1, "mscale_all_dim": 1}
    torch.testing.assert_close(turns_of(scaling)[1], torch.ones(16, dtype=torch.float64))
    ratio = turns_of(scaling | {"mscale": 0.5})[1]
    torch.testing.assert_close(ratio, torch.full_like(ratio, (1 + 0.05 * math.log(40)) / (1 + 0.1 * math.log(40))))
    model, attention = latent_attention(LATENT)
    scaled = LatentAttention(model.model_copy(update={"rope_scaling": build(RopeScaling, scaling, "scaling")}), torch.float64)
    scaled.load_state_dict(attention.state_dict())
    x = torch.randn(1, 1, 16, dtype=torch.float64)
    torch.testing.assert_close(scaled(x), attention(x), msg="one token finds itself alone")
    assert scaled.scale == pytest.approx((1 + 0.1 * math.log(40)) ** 2 * attention.scale)


@pytest.mark.parametrize("ffn", Ffn)
def test_grouped_experts_equal_single_ones(ffn: Ffn) -> None:
    rows = torch.randn(3, ffn.num_matrices * 4 * 6, dtype=torch.float64)
    x = torch.randn(7, 4, dtype=torch.float64)
    y = grouped_feed_forward(x, [2, 0, 5], list(rows), ffn=ffn)
    torch.testing.assert_close(y[:2], feed_forward(x[:2], rows[0], ffn=ffn))
    torch.testing.assert_close(y[2:], feed_forward(x[2:], rows[2], ffn=ffn))
    assert [tuple(part.shape) for part in split_row(rows[0], ffn=ffn, hidden_size=4)] == [(6, 4)] * (ffn.num_matrices - 1) + [
        (4, 6)
    ]


def test_an_expert_without_tokens_gets_zero_gradient() -> None:
    rows = torch.randn(2, 48, dtype=torch.float64, requires_grad=True)
    grouped_feed_forward(torch.randn(3, 4, dtype=torch.float64), [3, 0], list(rows.unbind(0)), ffn=Ffn.GELU).sum().backward()
    assert rows.grad is not None
    assert rows.grad[0].abs().sum() > 0
    assert rows.grad[1].abs().sum() == 0


def changed(**values: object) -> Plan:
    plan = Case(sizes=(2, 2), domains=(1, 1)).plan()
    model = plan.workload.model.model_copy(update=values)
    return plan.model_copy(update={"workload": plan.workload.model_copy(update={"model": model})})


def test_what_cannot_be_trained_is_an_error_before_any_process_group() -> None:
    with pytest.raises(UserError, match="head_dim: 5 must be even"):
        Mesh(plan=changed(head_dim=5), rank=0)
    for factor, rotated in ((0.5, 3), (0.1, 0)):
        with pytest.raises(UserError, match=f"partial_rotary_factor: {rotated} rotated elements must be even and more than none"):
            Mesh(plan=changed(head_dim=6, partial_rotary_factor=factor), rank=0)


def test_a_rank_must_exist() -> None:
    with pytest.raises(UserError, match="rank 4: cluster test has ranks 0 to 3"):
        Mesh(plan=Case(sizes=(2, 2), domains=(1, 1)).plan(), rank=4)
