"""Loads compiled kernels and launches them: the only place that talks to the CUDA driver.

``Driver`` is the seam: tests put a checking driver or a CPU emulator in its place, with the same argument memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from runtime.kernels import build
from runtime.kernels.errors import KernelBuildError

Argument = ctypes.c_void_p | ctypes.c_uint32 | ctypes.c_int64


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch, with nothing of the device in it."""

    stem: str
    """Source file csrc/<stem>.cu."""
    kernel: str
    grid: int
    """Blocks (one dimension)."""
    block: int
    """Threads per block."""
    shared_bytes: int = 0
    """Dynamic shared memory per block."""
    arguments: tuple[Argument, ...]
    """In the kernel's order, each of the width that the kernel declares."""


class Driver(Protocol):
    """Runs launches in order on the current stream of ``device``; does not wait for them."""

    def launch(self, launch: Launch, device: torch.device) -> None: ...


class CudaDriver:
    """The real one: compiles at first use (``build.cubin``), one module per source and device."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KernelBuildError("kernels", f"no CUDA driver: {error}") from None
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._modules: dict[tuple[int, str], ctypes.c_void_p] = {}
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def _check(self, result: int, what: str) -> None:
        if result:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(result, ctypes.byref(text))
            raise KernelBuildError(what, text.value.decode() if text.value else f"CUDA driver error {result}")

    def _enter(self, index: int) -> None:
        """Make torch's context of the device current on this thread: autograd's threads may have none yet."""
        if index not in self._contexts:
            torch.cuda.current_device()  # initialises CUDA
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._check(self._cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
            self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
            self._contexts[index] = context
        current = ctypes.c_void_p()
        self._check(self._cuda.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
        if current.value != self._contexts[index].value:
            self._check(self._cuda.cuCtxSetCurrent(self._contexts[index]), "cuCtxSetCurrent")

    def _function(self, index: int, stem: str, kernel: str) -> ctypes.c_void_p:
        key = (index, kernel)
        if key not in self._functions:
            if (index, stem) not in self._modules:
                major, minor = torch.cuda.get_device_capability(index)
                module = ctypes.c_void_p()
                code = build.cubin(stem, 10 * major + minor)
                self._check(self._cuda.cuModuleLoadData(ctypes.byref(module), code), f"loading kernel {stem}")
                self._modules[index, stem] = module
            function = ctypes.c_void_p()
            module = self._modules[index, stem]
            self._check(self._cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()), f"kernel {kernel}")
            self._functions[key] = function
        return self._functions[key]

    def launch(self, launch: Launch, device: torch.device) -> None:
        """Raises KernelBuildError where compilation, loading or the launch itself fails."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        with torch.cuda.device(index):
            self._enter(index)
            function = self._function(index, launch.stem, launch.kernel)
            stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
            result = self._cuda.cuLaunchKernel(
                function, launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes, stream, parameters(launch), None
            )
            self._check(result, f"launching {launch.kernel} with {launch.grid} blocks of {launch.block} threads")


def parameters(launch: Launch) -> ctypes.Array[ctypes.c_void_p]:
    """The argument array of cuLaunchKernel: a pointer to each value. ``launch`` must outlive it."""
    return (ctypes.c_void_p * len(launch.arguments))(*map(ctypes.addressof, launch.arguments))


@cache
def cuda_driver() -> Driver:
    """The process's driver, made when the first kernel is launched."""
    return CudaDriver()
