"""What torch finds on this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The installed torch and the devices that it can use."""

    version: str
    has_gloo: bool
    cuda_devices: tuple[str, ...]


def torch_facts() -> TorchFacts:
    """Import torch and ask it."""
    import torch
    import torch.distributed

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchFacts(
        version=torch.__version__,
        has_gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        cuda_devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
    )
