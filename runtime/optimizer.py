"""AdamW at each parameter's home, at the rate of the step, and, for bf16 weights, fp32 master copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hybridep.run import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
_BATCH, _BATCH_ON_DEVICE = 1 << 20, 1 << 24
"""Elements that are updated together. Their gradients in fp32, and what AdamW makes of them, come beside all that stays: 13 MB at
most, where all of a rank's bf16 gradients had been made fp32 at once. A device with gigabytes takes more, since its kernels are
short."""


def clip_scale(max_norm: float, norm: float) -> float:
    """What gradients of this norm are multiplied by; as ``torch.nn.utils.clip_grad_norm_``."""
    return min(1.0, max_norm / (norm + 1e-6))


def set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Backward adds into ``gradient`` from now on, which may be wider than the parameter."""
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


class HomeOptimizer:
    """AdamW over named parameters of one rank. Steps count from 1. Gradients keep their memory, so that what a rank needs is the
    same in every step, whatever order backward takes."""

    def __init__(
        self, config: Optimizer, parameters: Mapping[str, nn.Parameter], *, gradient_dtype: torch.dtype | None = None
    ) -> None:
        """Gradients that parameters have stay; others are made, of this type, or of each parameter's."""
        self._config = config
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {
            name: p.detach().float() if p.dtype is torch.bfloat16 else p for name, p in self.parameters.items()
        }
        self._moments = {name: {moment: torch.zeros_like(master) for moment in MOMENTS} for name, master in self.masters.items()}
        for parameter in self.parameters.values():
            if parameter.grad is None:
                set_gradient(parameter, torch.zeros_like(parameter, dtype=gradient_dtype))

    @torch.no_grad()
    def step(self, step: int, scale: float = 1.0) -> None:
        """Update from the gradients times ``scale``, then set them to zero. Weight decay and moments move every parameter in
        every step."""
        for pieces in self._batches():
            weights, masters, gradients, first, second = zip(*pieces, strict=True)
            wide = [gradient.to(master.dtype) for gradient, master in zip(gradients, masters, strict=True)]
            for gradient in wide if scale != 1.0 else ():
                gradient.mul_(scale)
            # What torch.optim.AdamW calls. Making one of torch's optimizers imports torch._dynamo: two seconds of every rank.
            adamw(
                list(masters),
                wide,
                list(first),
                list(second),
                [],
                [torch.tensor(step - 1.0) for _ in pieces],
                amsgrad=False,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                lr=self._config.rate_at(step),
                weight_decay=self._config.weight_decay,
                eps=self._config.epsilon,
                maximize=False,
            )
            for weight, master, gradient in zip(weights, masters, gradients, strict=True):
                if weight.dtype is not master.dtype:
                    weight.copy_(master)
                gradient.zero_()

    def squared_norm(self, names: Iterable[str]) -> float:
        """Of the gradients of some parameters together."""
        total = 0.0
        for name in names:
            for piece in torch.split(self._gradient(name).view(-1), _BATCH_ON_DEVICE):  # a CPU makes a wide copy of each
                total += float(torch.linalg.vector_norm(piece, dtype=self.masters[name].dtype).double().square())
        return total

    def is_finite(self) -> bool:
        """Whether all weights are."""
        largest = [torch.linalg.vector_norm(master, ord=torch.inf) for master in self.masters.values() if master.numel()]
        return all(bool(value.isfinite()) for value in largest)

    def _gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None
        return gradient

    def _batches(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """Weights, masters, gradients and moments, or parts of them, as much at a time as may be updated together."""
        batch: list[tuple[Tensor, ...]] = []
        held = 0
        for name, parameter in self.parameters.items():
            whole = [parameter, self.masters[name], self._gradient(name), *self._moments[name].values()]
            most = _BATCH if parameter.is_cpu else _BATCH_ON_DEVICE
            cut = [torch.split(one.view(-1), most) if parameter.numel() > most else (one,) for one in whole]
            for piece in zip(*cut, strict=True):
                held += piece[0].numel()
                if held > most:
                    yield batch
                    batch, held = [], piece[0].numel()
                batch.append(piece)
        yield batch

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
