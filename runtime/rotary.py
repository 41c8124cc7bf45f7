"""Rotary position embeddings (Su et al., arXiv:2104.09864), also scaled for long sequences (YaRN, arXiv:2309.00071)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridep.attention import RopeScaling
from hybridep.workload import Model


class Rotary:
    """Of a model's queries and keys."""

    def __init__(self, model: Model) -> None:
        self._width, self._theta, self._scaling = model.rotary_dim, model.rope_theta, model.rope_scaling

    def __call__(self, x: Tensor) -> Tensor:
        """[..., S, D]: of the first R elements, those that are rotated, element i turns with element i + R/2."""
        length, wide = x.shape[-2], torch.promote_types(x.dtype, torch.float32)
        frequency = self._theta ** (-torch.arange(0, self._width, 2, dtype=wide, device=x.device) / self._width)
        if self._scaling is not None:
            frequency = frequency * _slowed(
                torch.arange(self._width // 2, dtype=wide, device=x.device), self._theta, self._scaling
            )
        angle = torch.arange(length, dtype=wide, device=x.device)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        if self._scaling is not None:
            cos, sin = cos * self._scaling.rotated_scale, sin * self._scaling.rotated_scale
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        first, second = x[..., : self._width].chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., self._width :]], dim=-1)


def _slowed(pairs: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """[R/2]: what the frequencies of all ``pairs``, given by number, are multiplied by (Eq. 23). The ramp goes from one pair's
    number to another's, as public models have it, not by the turns themselves."""
    width = 2 * len(pairs)

    def pair_of(turns: float) -> float:
        """Which pair turns so often in the original length."""
        return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(pair_of(scaling.beta_fast)), 0), min(math.ceil(pair_of(scaling.beta_slow)), width - 1)
    slow = ((pairs - first) / ((last - first) or 1e-3)).clamp(0, 1)
    return 1 - slow + slow / scaling.factor
