"""The optimizer of a rank against torch's own, bit by bit."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.adamw import adamw

from hybridep.run import Optimizer
from runtime.optimizer import HomeOptimizer

CONFIG = Optimizer(learning_rate=1e-2, warmup_steps=3)
STEPS = 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_are_those_of_torchs_adamw(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces, of which each is all that is held beside what stays."""
    held: list[int] = []

    def counted(state: list[torch.Tensor], gradients: list[torch.Tensor], *arguments: Any, **options: Any) -> None:
        held.append(sum(one.numel() for one in gradients))
        adamw(state, gradients, *arguments, **options)

    monkeypatch.setattr("runtime.optimizer.adamw", counted)
    monkeypatch.setattr("runtime.optimizer._BATCH", 128, raising=False)
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 5), "b": (300,), "c": (9,)}
    mine = {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}
    # bf16 weights follow fp32 masters.
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    theirs = [nn.Parameter(one.detach().to(wide, copy=True)) for one in mine.values()]
    optimizer = HomeOptimizer(CONFIG, mine)
    betas = CONFIG.beta1, CONFIG.beta2
    adam = torch.optim.AdamW(theirs, lr=1.0, betas=betas, eps=CONFIG.epsilon, weight_decay=CONFIG.weight_decay)
    resumed = HomeOptimizer(CONFIG, {name: nn.Parameter(torch.zeros_like(one)) for name, one in mine.items()})
    for step in range(1, STEPS + 1):
        gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes.values()]
        if step == 4:
            for name in shapes:
                resumed.load(name, optimizer.state(name))
        for running in (optimizer, resumed):
            for parameter, gradient in zip(running.parameters.values(), gradients, strict=True):
                assert parameter.grad is not None and not parameter.grad.any()
                parameter.grad.copy_(gradient)
            if running is optimizer or step >= 4:
                running.step(step)
            else:
                for parameter in running.parameters.values():
                    parameter.grad.zero_()
        adam.param_groups[0]["lr"] = CONFIG.rate_at(step)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.to(wide)
        adam.step()
    assert held[:4] == [35, 128, 128, 53], "the rest of b with c"
    for name, expected in zip(shapes, theirs, strict=True):
        for running in (optimizer, resumed):
            assert torch.equal(running.masters[name], expected)
            assert torch.equal(running.parameters[name], expected.to(dtype))


def test_sums_wider_than_weights_keep_what_is_small() -> None:
    """In bf16 1 + 1/512 is 1."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = HomeOptimizer(CONFIG, {"weight": weight}, gradient_dtype=torch.float32)
    memory = weight.grad
    for factor in (1.0, *(1 / 512,) * 256):
        (weight * factor).sum().backward()
    assert memory is not None and weight.grad is memory and torch.equal(memory, torch.full((3,), 1.5))
    optimizer.step(1)
    assert not memory.any() and weight.dtype is torch.bfloat16
