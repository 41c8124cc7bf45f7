"""Balance without a loss: a number for each expert, added to its score where experts are chosen, follows how often it is chosen
(DeepSeek-V3, arXiv:2412.19437, section 2.1.2; Wang et al., arXiv:2408.15664).

What moves it are counts over the whole global batch. Sums of integers have no order, so it is the same to the bit under any plan,
micro-batches and number of ranks. It is no parameter: the optimizer does not know of it, and all ranks of a stage compute it
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from runtime.barrier import Barrier
from runtime.channels import level_of
from runtime.codecs.messages import Message
from runtime.dense_reduce import DenseReduce
from runtime.mesh import Mesh
from runtime.moe import MoeBlock
from runtime.transport import Transport

COUNTS = "expert_counts"
"""Under which timelines and errors have their exchange."""

Total = Callable[[Tensor], None]
"""Replaces int64 [n], in host memory, by the sum over all that train the same layers."""


def of_one_process(counts: Tensor) -> None:
    """As ``Total``: there is nothing to add."""


class ExpertBias:
    """The biases of one process's gates, by MoE layer of the whole model; none where its model has none."""

    def __init__(self, blocks: Iterable[MoeBlock], rate: float | None, total: Total = of_one_process) -> None:
        """``rate``: as ``hybridep.workload.Model.expert_bias_update_rate``."""
        self._gates = {block.layer: block.gate for block in blocks}
        self._rate, self._total = rate, total

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step, by what was chosen since the last; all ranks call it."""
        if not self._rate:
            return
        chosen_LE = torch.stack([_there(gate.choices_E) for gate in self._gates.values()]).cpu()
        self._total(chosen_LE.view(-1))
        # The sign of mean - count, in whole numbers.
        signs_LE = (chosen_LE.sum(dim=1, keepdim=True) - chosen_LE * chosen_LE.shape[1]).sign()
        for gate, signs_E in zip(self._gates.values(), signs_LE, strict=True):
            bias_E = _there(gate.expert_bias)
            bias_E += self._rate * signs_E.to(bias_E)
            _there(gate.choices_E).zero_()

    def of_all_layers(self, barrier: Barrier, num_layers: int, num_experts: int) -> Tensor | None:
        """fp64 [L, E], of all MoE layers of the model, for a checkpoint; all ranks of the run call it. None where it has none."""
        if self._rate is None:
            return None
        own_LE = torch.full((num_layers, num_experts), -math.inf, dtype=torch.float64)
        for layer, gate in self._gates.items():
            own_LE[layer] = _there(gate.expert_bias)
        # Those that have a layer have the same numbers.
        return torch.tensor(barrier.most(own_LE.flatten().tolist()), dtype=torch.float64).view_as(own_LE)

    @torch.no_grad()
    def restore(self, found_LE: Tensor | None) -> None:
        """What ``of_all_layers`` gave."""
        if found_LE is not None:
            for layer, gate in self._gates.items():
                _there(gate.expert_bias).copy_(found_LE[layer])


def sum_over_ranks(mesh: Mesh, transport: Transport) -> Total:
    """Over the ranks of a stage, as dense gradients are summed; exactly, for these are integers."""

    def exchange(sends: Mapping[int, Message], receives: Mapping[int, Message], label: str) -> None:
        transport.exchange(sends, receives, count_label(level_of(label)))

    return DenseReduce(mesh, exchange, coded=False, wire=torch.int64)


def count_label(level: str) -> str:
    """Of the exchange at a level."""
    return f"{COUNTS}@{level}"


def _there(value: Tensor | None) -> Tensor:
    assert value is not None, "gates are made with the rate"
    return value
