"""The learning rate of a run."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.run import Optimizer


@pytest.mark.parametrize("warmup", [0, 5])
def test_rate_falls_as_torchs_schedulers_do(warmup: int) -> None:
    config = Optimizer(learning_rate=3e-3, warmup_steps=warmup, decay_steps=20, final_learning_rate=1e-4)
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    falling = CosineAnnealingLR(adam, T_max=20 - warmup, eta_min=1e-4)
    theirs = falling
    if warmup:
        # Torch counts from 0 and we from 1.
        rising = LinearLR(adam, start_factor=1 / warmup, total_iters=warmup - 1)
        theirs = SequentialLR(adam, [rising, falling], milestones=[warmup - 1])
    first = 1 if warmup else 0
    for step in range(first, 21):
        assert config.rate_at(step) == pytest.approx(adam.param_groups[0]["lr"], rel=1e-9)
        adam.step()
        theirs.step()
    assert config.rate_at(20) == config.rate_at(1000) == 1e-4


def test_rate_stays_without_decay() -> None:
    config = Optimizer(learning_rate=1.0, warmup_steps=4)
    assert [config.rate_at(step) for step in (1, 2, 4, 5, 10**6)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert Optimizer(learning_rate=1.0).rate_at(1) == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_steps": 10, "decay_steps": 10}, "decay_steps 10 must come after warmup_steps 10"),
        ({"learning_rate": 0.1, "final_learning_rate": 0.2}, "final_learning_rate 0.2 must not exceed learning_rate 0.1"),
        # In fp32 they are infinite, or zero, which is divided by where an expert had no token.
        ({"learning_rate": 1e300}, "learning_rate: Input should be less than"),
        ({"weight_decay": 1e300}, "weight_decay: Input should be less than"),
        ({"epsilon": 1e-300}, "epsilon: Input should be greater than"),
    ],
)
def test_rates_that_make_no_sense(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Optimizer, fields, "run.yaml")
