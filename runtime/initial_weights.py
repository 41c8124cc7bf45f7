"""What weights training begins with: drawn from the seed, or read from a public checkpoint. Each value depends on what it is of
alone, never on the plan or the number of ranks."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from hybridep.run import Run
from hybridep.workload import Model, Workload

INIT_STD = 0.02


class InitialWeights(Protocol):
    """The first weights of a whole model."""

    def dense(self, name: str, shape: torch.Size) -> Tensor:
        """Of a parameter outside the routed experts, or a gate's bias of its experts, by its name in the whole model."""
        ...

    def expert(self, layer: int, expert: int) -> Tensor:
        """[P]: of one expert of a MoE layer of the whole model."""
        ...


class Seeded:
    """Normal values from the seed and the parameter's name. Norms start at one, biases at zero."""

    def __init__(self, model: Model, seed: int) -> None:
        self._num_params, self._seed = model.expert_params, seed

    def dense(self, name: str, shape: torch.Size) -> Tensor:
        """As ``InitialWeights.dense``."""
        if "norm" in name:
            return torch.ones(shape)
        if name.endswith("bias"):
            return torch.zeros(shape)
        return seeded_normal(shape.numel(), self._seed, name).view(shape)

    def expert(self, layer: int, expert: int) -> Tensor:
        """As ``InitialWeights.expert``."""
        return initial_expert(self._seed, layer, expert, self._num_params)


def initial_weights(run: Run, workload: Workload) -> InitialWeights:
    """Of a run of the whole model ``workload``. Raises UserError where ``run.weights`` are not the model's."""
    if run.weights is None:
        return Seeded(workload.model, run.seed)
    from runtime.public_weights import PublicWeights

    return PublicWeights(run.weights, workload.model)


def seeded_normal(number: int, seed: int, name: str) -> Tensor:
    """[number] normal values that depend on (seed, name) only, so on no count of ranks or order of creation."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(number, generator=generator, dtype=torch.float64) * INIT_STD


def initial_expert(seed: int, layer: int, expert: int, num_params: int) -> Tensor:
    """[P]: the first weights of one expert."""
    return seeded_normal(num_params, seed, f"layer{layer}.expert{expert}")
