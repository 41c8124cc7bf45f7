"""AdamW at each parameter's home, at the rate of the step, and, for bf16 weights, fp32 master copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hybridep.run import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class HomeOptimizer:
    """AdamW over named parameters of one rank. Steps count from 1. Gradients keep their memory, so that what a rank needs is the
    same in every step, whatever order backward takes."""

    def __init__(self, config: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._config = config
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {
            name: p.detach().float() if p.dtype is torch.bfloat16 else p for name, p in self.parameters.items()
        }
        self._moments = {name: {moment: torch.zeros_like(master) for moment in MOMENTS} for name, master in self.masters.items()}
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Update from the gradients, then set them to zero. Weight decay and moments move every parameter in every step."""
        masters, moments = list(self.masters.values()), list(self._moments.values())
        gradients = []
        for parameter, master in zip(self.parameters.values(), masters, strict=True):
            assert parameter.grad is not None
            gradients.append(parameter.grad.to(master.dtype))
        # What torch.optim.AdamW calls. Making one of torch's optimizers imports torch._dynamo: two seconds of every rank.
        adamw(
            masters,
            gradients,
            [kept["exp_avg"] for kept in moments],
            [kept["exp_avg_sq"] for kept in moments],
            [],
            [torch.tensor(step - 1.0) for _ in masters],
            amsgrad=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=self._config.rate_at(step),
            weight_decay=self._config.weight_decay,
            eps=self._config.epsilon,
            maximize=False,
        )
        for parameter, master in zip(self.parameters.values(), masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
            assert parameter.grad is not None
            parameter.grad.zero_()

    def state(self, name: str) -> dict[str, Tensor]:
        """Weight and moments of one parameter, all of its shape; what a checkpoint keeps."""
        return {"weight": self.masters[name].detach(), **self._moments[name]}

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Restore one parameter."""
        master, parameter = self.masters[name], self.parameters[name]
        master.copy_(state["weight"])
        if master is not parameter:
            parameter.copy_(master)
        for moment, kept in self._moments[name].items():
            kept.copy_(state[moment].view_as(kept))
