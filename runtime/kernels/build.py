"""Compiles the kernels for the GPU at hand with NVRTC, at first use, and keeps the result on disk.

NVRTC comes with every CUDA build of torch (the wheel nvidia-cuda-nvrtc), so no toolkit is needed; the sources include
nothing outside csrc/. Cached files are keyed by source, architecture, options and compiler version, and live in
``$XDG_CACHE_HOME/hybridep`` (``~/.cache/hybridep`` where that is unset).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from runtime.kernels.errors import KernelBuildError

CSRC = Path(__file__).parent / "csrc"
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
LOWEST_ARCH = 80
"""sm_80: bf16 conversions and the bf16 matrix units."""


def stems() -> tuple[str, ...]:
    """Names of the compilation units, one per csrc/*.cu."""
    return tuple(sorted(path.stem for path in CSRC.glob("*.cu")))


def source_of(stem: str) -> str:
    """Text of csrc/``stem``.cu."""
    return (CSRC / f"{stem}.cu").read_text()


@cache
def headers() -> dict[str, str]:
    """Name -> text of csrc/*.cuh."""
    return {path.name: path.read_text() for path in sorted(CSRC.glob("*.cuh"))}


def cubin(stem: str, arch: int) -> bytes:
    """Machine code of csrc/``stem``.cu for sm_``arch``, from the cache or compiled now.
    Raises KernelBuildError where NVRTC is missing or refuses the source."""
    if arch < LOWEST_ARCH:
        raise KernelBuildError(f"kernel {stem}", f"sm_{arch} is too old; the kernels need sm_{LOWEST_ARCH} or newer")
    source, compiler = source_of(stem), nvrtc()
    recipe = repr((source, headers(), OPTIONS, arch, compiler.version))
    path = cache_folder() / f"{stem}-sm{arch}-{hashlib.sha256(recipe.encode()).hexdigest()[:24]}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    code, _ = compiler.compile(stem, source, arch)
    # Several ranks compile at once: each writes a file of its own and renames it, so none reads half a file. A folder that
    # cannot be written costs a compilation per process and nothing else.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, path)
    return code


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridep" / "kernels"


class Nvrtc:
    """The few NVRTC calls that compilation takes (C interface, unchanged since CUDA 11.1)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = (major.value, minor.value)

    def _check(self, result: int, what: str, log: str = "") -> None:
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise KernelBuildError(what, self._library.nvrtcGetErrorString(result).decode(), log)

    def compile(self, stem: str, source: str, arch: int, *extra: str) -> tuple[bytes, str]:
        """(machine code of one source, the compiler's messages); ``extra`` options besides OPTIONS. Raises KernelBuildError
        with the messages."""
        library, texts = self._library, headers()
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(texts))(*(name.encode() for name in texts))
        bodies = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts.values()))
        self._check(
            library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{stem}.cu".encode(), len(texts), bodies, names),
            f"kernel {stem}",
        )
        try:
            options = [f"--gpu-architecture=sm_{arch}", *OPTIONS, *extra]
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            result = library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
            self._check(result, f"kernel {stem} for sm_{arch}", log)
            return self._read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, get_size: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(get_size(program, ctypes.byref(size)), "nvrtc")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(get(program, buffer), "nvrtc")
        return buffer.raw


@cache
def nvrtc() -> Nvrtc:
    """The installed NVRTC. Raises KernelBuildError where there is none."""
    for name in _nvrtc_names():
        with suppress(OSError):
            # NVRTC opens its builtins by name, and the loader does not look beside it: loaded before, they are found.
            for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")) if Path(name).is_absolute() else ():
                ctypes.CDLL(str(builtins))
            return Nvrtc(ctypes.CDLL(name))
    raise KernelBuildError(
        "kernels",
        "no NVRTC found: install the CUDA build of torch, or the package nvidia-cuda-nvrtc (pip install nvidia-cuda-nvrtc)",
    )


def _nvrtc_names() -> Iterator[str]:
    """Files in site-packages first, of the CUDA release that torch was built for before others: the driver takes its code.
    Then what the loader finds by name."""
    own = f".so.{(torch.version.cuda or '').partition('.')[0]}"
    # nvidia/cu13/lib (CUDA 13 wheels), nvidia/cuda_nvrtc/lib (earlier ones)
    found = [path for folder in map(Path, sys.path) for path in sorted(folder.glob("nvidia/*/lib/libnvrtc.so.*"))]
    found = [path.absolute() for path in found if ".alt." not in path.name]
    yield from map(str, sorted(found, key=lambda path: not path.name.endswith(own)))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
