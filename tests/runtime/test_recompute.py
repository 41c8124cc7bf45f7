"""Layers that compute again in backward what they did not keep: the same to the bit, as often and as much as plans say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import Pools
from torch.utils.flop_counter import FlopCounterMode
from training_cases import CAPACITY, CROSS, MODELS, Case, order_of_copies, train_case

from hybridep.config import build
from hybridep.plan import Residency
from hybridep.recompute import ALL, Recompute, again_flops, dense_again_flops
from hybridep.workload import Model, Training, Workload
from runtime.gate import Gate, Gated
from runtime.initial_weights import Seeded
from runtime.moe import RoutedExperts
from runtime.reference import LocalExperts
from runtime.transformer import Transformer

pytestmark = pytest.mark.timeout(180)
ATTENTION, EXPERTS = Recompute


def build_model(
    name: str, recompute: Recompute, routed: Callable[..., RoutedExperts] = LocalExperts
) -> tuple[Model, Transformer]:
    workload = workload_of(name)
    model, weights = workload.model, Seeded(workload.model, 0)

    def make(layer: int) -> RoutedExperts:
        experts = routed(model, layer, weights, torch.float64)
        experts.recompute = recompute
        return experts

    transformer = Transformer(workload, make, dtype=torch.float64, dense_recompute=recompute)
    transformer.initialise(weights)
    return model, transformer


def workload_of(name: str) -> Workload:
    model = build(Model, (MODELS | CROSS | CAPACITY)[name], name)
    return Workload(name=name, model=model, training=Training(sequence_length=6, micro_batch_size=2))


AGAIN = [one for one in map(Recompute, range(4)) if one]


def score_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Of what is not masked: each token sees itself and those before it, on average half of all."""
    (sequences, heads, length, width), found = query, value[-1]
    return int(sequences * heads * length * length * (width + found))


def score_backward_flops(_: Any, *forward: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * score_flops(*forward)


@cache
def step_flops(name: str, recompute: Recompute) -> int:
    """Of a forward and a backward of twelve tokens."""
    _, transformer = build_model(name, recompute)
    tokens = torch.randint(256, (2, 6))
    scores = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: score_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: score_backward_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=scores) as counter:
        loss, balance = transformer(tokens, tokens)
        (loss + balance).backward()
    return int(counter.get_total_flops())


@pytest.mark.turns(2)
@pytest.mark.parametrize("recompute", AGAIN, ids=str)
@pytest.mark.parametrize("name", [*MODELS, "top2-shared", "drop-padded"])
def test_what_computes_again_takes_as_many_flops_as_plans_count(name: str, recompute: Recompute) -> None:
    """In products of matrices, to the number. They do not count a shared expert's gate, two FLOPs for each of 16 values of a
    token, nor that latent attention's values are made as wide as keys. Scores count by half, as in plans: the rest is masked.
    Of routed experts the reference computes nothing again."""
    workload = workload_of(name)
    model = workload.model
    counted = model.num_moe_layers * again_flops(workload, recompute) + dense_again_flops(workload, recompute)
    more = model.num_moe_layers * model.shared_expert_gate * 2 * 16 * 12
    if Recompute.ATTENTION in recompute and model.latent_attention is not None:
        more += model.num_layers * 12 * 6 * (model.attention_width - model.value_width)
    assert (counted > 0) is (Recompute.ATTENTION in recompute or model.shared_ffn_size > 0)
    assert step_flops(name, recompute) - step_flops(name, Recompute.NOTHING) == counted + more


@pytest.mark.parametrize("name", ["plain", "top1-gelu-shared", "top4-tied-gqa", "qwen2", "qwen3", "top2-shared"])
def test_model_flops_are_what_a_step_computes(name: str) -> None:
    """But for a shared expert's gate."""
    workload = workload_of(name)
    gate = workload.model.num_moe_layers * workload.model.shared_expert_gate * 2 * workload.model.hidden_size
    assert step_flops(name, Recompute.NOTHING) == 12 * (workload.flops_per_token + 3 * gate)


@pytest.mark.parametrize("recompute", AGAIN, ids=str)
@pytest.mark.parametrize("name", [*MODELS, "drop-probs", "drop-padded"])
def test_what_is_computed_again_changes_no_bit(name: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor how often a gate decides, what it counts, and how often others hear of it."""
    decided, tokens = Counter[str](), torch.randint(256, (2, 6))
    choose = Gate._choose

    def noted(gate: Gate, scores_BSE: torch.Tensor) -> torch.Tensor:
        decided["choices"] += 1
        return choose(gate, scores_BSE)

    def heard(layer: int, gated: Gated) -> None:
        decided[f"layer {layer}"] += 1

    monkeypatch.setattr(Gate, "_choose", noted)
    found = []
    for one in (Recompute.NOTHING, recompute):
        decided.clear()
        model, transformer = build_model(name, one)
        for block in transformer.moe_blocks():
            block.routing_hook = heard
        loss, balance = transformer(tokens, tokens)
        (loss + balance).backward()
        assert decided == {"choices": model.num_moe_layers} | {f"layer {layer}": 1 for layer in range(model.num_moe_layers)}
        counts = [block.gate.choices_E for block in transformer.moe_blocks() if block.gate.choices_E is not None]
        assert all(int(choices_E.sum()) == 12 * model.top_k for choices_E in counts)
        found.append([loss, balance, *(parameter.grad for parameter in transformer.parameters()), *counts])
    assert all(torch.equal(once, again) for once, again in zip(*found, strict=True))


class Nothing(RoutedExperts):
    """That keep nothing for backward."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def forward(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        return x_TH + weights_TK.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("recompute", [Recompute.NOTHING, *AGAIN], ids=str)
@pytest.mark.parametrize("name", [*MODELS, "drop-probs"])
def test_a_layer_that_computes_again_keeps_nothing_but_its_input(name: str, recompute: Recompute) -> None:
    """But for what the gate chose, which autograd does not see."""
    model, transformer = build_model(name, recompute, Nothing)
    for layer in transformer.layers.values():
        x, kept = torch.randn(2, 6, model.hidden_size, dtype=torch.float64, requires_grad=True), set[int]()

        def keep(value: torch.Tensor, kept: set[int] = kept) -> torch.Tensor:
            if value.untyped_storage().nbytes():  # torch 2.11 keeps a tensor of nothing beside it
                kept.add(value.untyped_storage().data_ptr())
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            layer(x)
        assert (kept == {x.untyped_storage().data_ptr()}) is (Recompute.ATTENTION in recompute)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.parametrize("recompute", [ATTENTION, ALL], ids=str)
def test_attention_computes_again_when_the_way_back_of_tokens_is_over(pools: Pools, recompute: Recompute) -> None:
    """While copies' gradients are on theirs; and layers do not all begin at once."""
    for found in pools.run(order_of_copies, Case(sizes=(2, 2), domains=(2, 1), recompute=recompute)):
        assert found == [
            *("_gather 0", "forward 0", "_gather 1", "forward 1"),
            *("_return 1", "forward 1", "backward 1", "_return 0", "forward 0", "backward 0"),
        ]


def passes(rank: int, case: Case) -> dict[str, tuple[int, int]]:
    """How often each layer's attention, and its experts, compute in a step."""
    found: Counter[tuple[str, str]] = Counter()

    def prepare(trainer: Any) -> None:
        for name, layer in trainer.model.transformer.layers.items():
            layer.attention.register_forward_hook(lambda *_, name=name: found.update([(name, "attention")]))
            if (routed := getattr(layer.feed_forward, "routed", None)) is not None:

                def weighted(*inputs: Any, name: str = name, weighted: Any = routed.weighted) -> Any:
                    found.update([(name, "experts")])
                    return weighted(*inputs)

                routed.weighted = weighted

    train_case(rank, case, prepare, steps=1)
    return {name: (found[name, "attention"], found[name, "experts"]) for name, _ in found}


@pytest.mark.parametrize("seed", range(4))
def test_each_layer_computes_again_what_its_plan_says(pools: Pools, seed: int) -> None:
    """Layers without experts as the first one with experts."""
    case = Case(sizes=(2, 2), domains=(1, 1), model="dense-first-uneven", micro_batches=2, wild=seed)
    says = [group.recompute for _, group, _ in case.plan().each_layer()]
    assert says == [Recompute(seed), Recompute((seed + 1) % 4)]

    def times(recompute: Recompute, part: Recompute) -> int:
        return 2 * (1 + (part in recompute))

    expected = {"0": (times(says[0], ATTENTION), 0)}
    expected |= {f"{layer}": (times(one, ATTENTION), times(one, EXPERTS)) for layer, one in enumerate(says, start=1)}
    assert pools.run(passes, case) == [expected] * 4


CODED = (("dc", (("tokens", "int8"), ("gradients", "bf16"))),)


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(sizes=(2, 2), domains=(2, 1), model="qwen2", micro_batches=2, dtype="fp32", codecs=CODED),
        Case(sizes=(2, 2), domains=(1, 2), model="drop-probs", dtype="bf16", chunks=3, residency=Residency.MICROBATCH),
    ],
    ids=str,
)
def test_what_ranks_compute_again_changes_no_bit(pools: Pools, case: Case) -> None:
    steps = partial(train_case, steps=3)
    once, *others = (pools.run(steps, replace(case, recompute=one)) for one in map(Recompute, range(4)))
    for again in others:
        for found, expected in zip(again, once, strict=True):
            assert found.losses == expected.losses
            assert all(np.array_equal(found.parameters[name], value) for name, value in expected.parameters.items())
