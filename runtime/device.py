"""Where a rank computes, and what has to be asked differently of a GPU."""

from __future__ import annotations

import os
import resource

import torch

from hybridep.errors import UserError
from hybridep.run import LOCAL_RANK, Device
from runtime.kernels.build import LOWEST_ARCH

CPU = torch.device("cpu")


def choose_device(wanted: Device, rank: int) -> torch.device:
    """The device of a global rank. GPUs of a machine are handed out to its ranks in turn (``LOCAL_RANK``; by ``rank`` where that
    is not set), so ranks share them where there are fewer.
    Raises UserError when a GPU is wanted and torch sees none that the kernels run on."""
    number = torch.cuda.device_count() if wanted is not Device.CPU and torch.cuda.is_available() else 0
    if not number:
        if wanted is Device.CUDA:
            raise UserError("run.device: cuda, but torch sees no CUDA device; install a CUDA build of torch, or set it to cpu")
        return CPU
    device = torch.device("cuda", int(os.environ.get(LOCAL_RANK, rank)) % number)
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < LOWEST_ARCH:
        if wanted is Device.CUDA:
            found = f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}"
            raise UserError(f"run.device: cuda, but {found} and the kernels need sm_{LOWEST_ARCH} or newer; set it to cpu")
        return CPU
    return device


def settle(device: torch.device) -> None:
    """Wait until the device has done what is queued on it, so that a clock read next tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """Largest memory so far: of the process, or of its tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
