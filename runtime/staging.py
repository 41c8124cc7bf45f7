"""Host memory between a GPU and the network: messages of a device's tensors leave from, and arrive in, page-locked buffers."""

from __future__ import annotations

import torch
from torch import Tensor


def needs_staging(tensor: Tensor) -> bool:
    """Whether the network cannot take the tensor where it is."""
    return tensor.device.type != "cpu"


def outgoing(tensor: Tensor) -> Tensor:
    """Its values in host memory: itself, or a copy. Waits for what the device still has to do for them."""
    return _room(tensor).copy_(tensor.detach()) if needs_staging(tensor) else tensor


class Incoming:
    """Where messages for ``tensor`` arrive: in ``host``, which is the tensor itself or a buffer of its size."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.host = _room(tensor) if needs_staging(tensor) else self._tensor

    def deliver(self) -> None:
        """Everything has arrived: the tensor gets it. Kernels queued later see it."""
        if self.host is not self._tensor:
            self._tensor.copy_(self.host)


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
