"""What all ranks of a stage hold alike, and who updates it: ranks of one worker of the outermost level share it out.

All weights lie in one piece of memory, and so do their gradients. Gradients are summed to the rank that has a part of them
(``runtime.dense_reduce``), which keeps the optimizer's state of that part alone (ZeRO stage 1, Rajbhandari et al.,
arXiv:1910.02054); what it has updated goes to the others in place of the sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime.dense_reduce import DenseReduce, flat_gradients
from runtime.optimizer import set_gradient

SHARD = "dense"
"""Name of the part among a rank's parameters."""


class Piece(NamedTuple):
    """What of one parameter is in a rank's part."""

    name: str
    shape: torch.Size
    """Of the whole parameter."""
    first: int
    """Element of the parameter, as one row."""
    where: slice
    """In the part."""


class DenseShard:
    """Dense parameters by name. ``parameter`` is this rank's part of all of them, for the optimizer."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], reduce: DenseReduce, gradient_dtype: torch.dtype) -> None:
        self.parameters = dict(parameters)
        self._reduce = reduce
        self._gradient = flat_gradients(list(parameters.values()), gradient_dtype)
        self._weights = _flat_weights(list(parameters.values()))
        self._part = reduce.part(len(self._weights))
        self.parameter = nn.Parameter(self._weights[self._part])
        set_gradient(self.parameter, self._gradient[self._part])

    def reduce(self) -> None:
        """The part's gradient becomes its sum over all ranks."""
        self._reduce.reduce(self._gradient)

    def gather(self) -> None:
        """Every rank gets the other parts' weights; of the gradients that are not its own nothing is left."""
        self._reduce.gather(self._weights)
        self._gradient.zero_()

    def pieces(self) -> Iterator[Piece]:
        """Of the part, in order."""
        begin = 0
        for name, parameter in self.parameters.items():
            first, last = max(self._part.start, begin), min(self._part.stop, begin + parameter.numel())
            if first < last:
                where = slice(first - self._part.start, last - self._part.start)
                yield Piece(name, parameter.shape, first - begin, where)
            begin += parameter.numel()


def _flat_weights(parameters: list[nn.Parameter]) -> Tensor:
    """[D], of which each parameter becomes a view, to stay."""
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    return flat
