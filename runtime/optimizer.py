"""AdamW at each parameter's home, at the rate of the step, and, for bf16 weights, fp32 master copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hybridep.run import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class HomeOptimizer:
    """AdamW over named parameters of one rank. Steps count from 1. Gradients keep their memory, so that what a rank needs is the
    same in every step, whatever order backward takes."""

    def __init__(self, config: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._config = config
        self.parameters = dict(parameters)
        self.masters = {
            name: nn.Parameter(p.detach().float()) if p.dtype is torch.bfloat16 else p for name, p in self.parameters.items()
        }
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._adam = torch.optim.AdamW(
            list(self.masters.values()),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        )

    def step(self, step: int) -> None:
        """Update from the gradients, then set them to zero. Weight decay and moments move every parameter in every step."""
        for group in self._adam.param_groups:
            group["lr"] = self._config.rate_at(step)
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter:
                assert parameter.grad is not None
                master.grad = parameter.grad.to(master.dtype)
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])
                    self.masters[name].grad = None
                assert parameter.grad is not None
                parameter.grad.zero_()

    def state(self, name: str) -> dict[str, Tensor]:
        """Weight and moments of one parameter, all of its shape; what a checkpoint keeps."""
        master = self.masters[name]
        kept = self._adam.state.get(master, {})
        moments = {moment: kept.get(moment, torch.zeros_like(master)) for moment in MOMENTS}
        return {"weight": master.detach(), **moments}

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, Tensor], step: int) -> None:
        """Restore one parameter as it was after ``step`` steps."""
        master, parameter = self.masters[name], self.parameters[name]
        master.copy_(state["weight"])
        if master is not parameter:
            parameter.copy_(master)
        kept = self._adam.state[master]
        kept["step"] = torch.tensor(float(step))
        for moment in MOMENTS:
            kept[moment] = state[moment].to(master, copy=True).view_as(master)
