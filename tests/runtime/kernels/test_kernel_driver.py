"""The CUDA driver's calls, made to a library that only answers: what is loaded and launched, and what errors say."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from runtime.kernels import build, driver
from runtime.kernels.driver import CudaDriver, Launch
from runtime.kernels.errors import KernelBuildError

DEVICE = torch.device("cuda", 1)
CONTEXT, STREAM = 0x1234, 0x77


class Library:
    """Answers like libcuda: every handle is a number, every call is kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.current = 0
        self.failing = ""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append((name, arguments))
            if name == self.failing:
                return 700
            target = getattr(arguments[0], "_obj", None) if arguments else None
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"an illegal memory access was encountered"  # type: ignore[attr-defined]
            elif name == "cuDevicePrimaryCtxRetain":
                target.value = CONTEXT
            elif name == "cuCtxGetCurrent":
                target.value = self.current
            elif name == "cuCtxSetCurrent":
                self.current = arguments[0].value  # type: ignore[attr-defined]
            elif name in ("cuModuleLoadData", "cuModuleGetFunction"):
                target.value = len(self.calls)
            return 0

        return call

    def named(self, name: str) -> list[tuple[object, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(build, "cubin", lambda stem, arch: f"{stem} for {arch}".encode())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=STREAM))
    return library


def make_launch(kernel: str = "combine_bf16") -> Launch:
    arguments = (ctypes.c_void_p(2**40 + 8), ctypes.c_uint32(2**32 - 1), ctypes.c_int64(-(2**40)))
    return Launch(stem="combine", kernel=kernel, grid=3, block=256, shared_bytes=64, arguments=arguments)


def test_one_module_per_device_and_the_right_arguments(library: Library) -> None:
    cuda = CudaDriver()
    for kernel in ("combine_bf16", "combine_bf16", "combine_f32"):
        cuda.launch(make_launch(kernel), DEVICE)
    assert [arguments[1] for arguments in library.named("cuModuleLoadData")] == [b"combine for 90"]
    assert [arguments[2] for arguments in library.named("cuModuleGetFunction")] == [b"combine_bf16", b"combine_f32"]
    assert library.current == CONTEXT
    assert len(library.named("cuCtxSetCurrent")) == 1
    launches = library.named("cuLaunchKernel")
    assert len(launches) == 3
    function, *shape, shared, stream, arguments, extra = launches[0]
    assert function.value > 0  # type: ignore[attr-defined]
    assert shape == [3, 1, 1, 256, 1, 1]
    assert (shared, extra) == (64, None)
    assert stream.value == STREAM  # type: ignore[attr-defined]
    assert len(arguments) == 3  # type: ignore[arg-type]


def test_parameters_point_at_the_values() -> None:
    launch = make_launch()
    found = driver.parameters(launch)
    read = [
        ctypes.cast(at, ctypes.POINTER(kind))[0]
        for at, kind in zip(found, (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int64), strict=True)
    ]
    assert read == [2**40 + 8, 2**32 - 1, -(2**40)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cuModuleLoadData", "loading kernel combine: an illegal memory access"),
        ("cuModuleGetFunction", "kernel combine_bf16: an illegal"),
        ("cuLaunchKernel", "launching combine_bf16 with 3 blocks of 256 threads: an illegal"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain: an illegal"),
    ],
)
def test_failures_say_what_was_tried(call: str, message: str, library: Library) -> None:
    library.failing = call
    with pytest.raises(KernelBuildError, match=message):
        CudaDriver().launch(make_launch(), DEVICE)
