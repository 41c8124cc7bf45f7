"""What is added to scores where experts are chosen, and how it follows the choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_cases import PLAIN, Case, training_run

from hybridep.config import build
from hybridep.run import Optimizer
from hybridep.workload import Workload
from runtime.expert_bias import ExpertBias
from runtime.gate import Gate, Gated
from runtime.reference import ReferenceTrainer

RATE = 0.001


class Block:
    """A MoE block of which there is the gate alone."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.gate = Gate(hidden_size=4, num_experts=3, top_k=1, dtype=torch.bfloat16, bias_update_rate=RATE)


def test_it_grows_where_an_expert_had_fewer_tokens_than_the_mean() -> None:
    blocks: Any = [Block(2), Block(3)]
    own = torch.tensor([[5, 0, 4], [3, 3, 3]])
    others = torch.tensor([[0, 6, 0], [0, 0, 0]])

    def total(counts: torch.Tensor) -> None:
        assert counts.dtype is torch.int64
        counts += others.view(-1)

    bias = ExpertBias(blocks, RATE, total)
    for times in (1, 2, 3):
        for block, counts in zip(blocks, own, strict=True):
            block.gate.choices_E.copy_(counts)
        bias.update()
        # 5, 6 and 4 of 15 tokens; then 3 of 9 each.
        first, second = (block.gate.expert_bias for block in blocks)
        step = torch.zeros(())
        for _ in range(times):
            step = step + torch.tensor(RATE)
        assert first.dtype is torch.float32 and torch.equal(first, torch.stack([0 * step, -step, step]))
        assert torch.equal(second, torch.zeros(3))
        assert not any(block.gate.choices_E.any() for block in blocks), "each step counts its own"


def skewed(changes: dict[str, Any]) -> ReferenceTrainer:
    """One process's, whose gates tell letters apart, and letters are not equally frequent; two of eight experts are chosen."""
    plan = Case(sizes=(1, 1), domains=(1, 1)).plan()
    training = {"sequence_length": 32, "micro_batch_size": 4, "dtype": "fp32"}
    data = {"name": "skewed", "model": PLAIN | {"balance_loss_weight": 0} | changes, "training": training}
    plan = plan.model_copy(update={"workload": build(Workload, data, "workload")})
    trainer = ReferenceTrainer(training_run(optimizer=Optimizer(learning_rate=1e-4)), plan)
    draw = torch.Generator().manual_seed(6)
    for block in trainer.transformer.moe_blocks():
        block.gate.weight.data.normal_(std=0.3, generator=draw)
    return trainer


def excess(changes: dict[str, Any]) -> float:
    """How much more than the mean the busiest expert of a layer has on average in the last 10 of 40 steps; 1: twice the mean."""
    trainer, loads = skewed(changes), list[float]()

    def see(_: int, gated: Gated) -> None:
        counts = torch.bincount(gated.chosen_TK.flatten(), minlength=8)
        loads.append(float(counts.max() / counts.double().mean()) - 1)

    for step in range(1, 41):
        for block in trainer.transformer.moe_blocks():
            block.routing_hook = see if step > 30 else None
        trainer.step(step)
    assert len(loads) == 10 * 2
    return sum(loads) / len(loads)


@pytest.mark.turns(3)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_it_makes_loads_even(scores: str) -> None:
    without = excess({"score_function": scores})
    assert without > 0.75
    assert excess({"score_function": scores, "expert_bias_update_rate": 0.005}) < 0.55 * without


def test_one_of_rate_zero_stays_and_chooses() -> None:
    chosen = list[set[int]]()
    trainer = skewed({"expert_bias_update_rate": 0})
    for block, bias_E in zip(trainer.transformer.moe_blocks(), trainer.transformer.expert_biases().values(), strict=True):
        assert not bias_E.any()
        bias_E[3], bias_E[5] = 2, 2  # more than any score
        block.routing_hook = lambda _, gated: chosen.append(set(gated.chosen_TK.flatten().tolist()))
    trainer.step(1)
    trainer.step(2)
    assert all(ids == {3, 5} for ids in chosen) and len(chosen) == 2 * 2
    assert all(bias_E.tolist() == [0, 0, 0, 2, 0, 2, 0, 0] for bias_E in trainer.transformer.expert_biases().values())
