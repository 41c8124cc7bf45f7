"""Drivers that take launches without a GPU: one only checks them, one runs the kernels' own source on the CPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch

from runtime.kernels import build
from runtime.kernels.driver import Launch, parameters

HERE = Path(__file__).parent / "emulator"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
ADDRESS_CHECKS = ("-fsanitize=address", "-fno-omit-frame-pointer")


def check(launch: Launch) -> None:
    """What the hardware demands of every launch."""
    assert 1 <= launch.grid < 2**31, launch
    assert launch.block % 32 == 0 and 32 <= launch.block <= 1024, launch
    assert 0 <= launch.shared_bytes <= 48 * 1024, launch
    assert (build.CSRC / f"{launch.stem}.cu").is_file(), launch


@dataclass
class RecordingDriver:
    """Checks and keeps launches; runs nothing."""

    launches: list[Launch] = field(default_factory=list)

    def launch(self, launch: Launch, device: torch.device) -> None:
        check(launch)
        self.launches.append(launch)


@dataclass
class EmulatingDriver:
    """Compiles csrc/*.cu for the CPU and runs each launch at once, with the argument memory that the CUDA driver gets."""

    folder: Path
    order: int = 0
    """Order of threads between barriers: 0 rising, 1 falling, else the seed of random ones."""
    flags: tuple[str, ...] = ()
    kernels_run: set[str] = field(default_factory=set)

    def launch(self, launch: Launch, device: torch.device) -> None:
        assert device.type == "cpu"
        check(launch)
        library = library_for(self.folder, launch.stem, self.flags)
        check_arguments(library, launch)
        failure = library.cpu_launch(
            launch.kernel.encode(),
            launch.grid,
            launch.block,
            ctypes.c_size_t(launch.shared_bytes),
            self.order,
            parameters(launch),
        )
        assert failure is None, f"{launch.kernel}: {failure.decode()}"
        self.kernels_run.add(launch.kernel)


def check_arguments(library: ctypes.CDLL, launch: Launch) -> None:
    """As many as the kernel declares, each of the width that it declares."""
    sizes = (ctypes.c_int * 32)()
    number = library.cpu_parameters(launch.kernel.encode(), sizes, len(sizes))
    assert number >= 0, f"no kernel {launch.kernel} in {launch.stem}.cu"
    assert [ctypes.sizeof(argument) for argument in launch.arguments] == list(sizes[:number]), launch


@cache
def library_for(folder: Path, stem: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The kernels of one source, compiled for the CPU once."""
    library = ctypes.CDLL(str(compile_for_cpu(folder, stem, flags)))
    library.cpu_launch.restype = ctypes.c_char_p
    return library


def compile_for_cpu(folder: Path, stem: str, flags: tuple[str, ...] = ()) -> Path:
    """Shared library of csrc/<stem>.cu with a table of its kernels."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the kernels for the CPU")
    text = f'#include "{HERE / "cuda_on_cpu.h"}"\n#include "{build.CSRC / stem}.cu"\n'
    source, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
    source.write_text(text)
    command = [compiler, *FLAGS, *flags]
    expanded = subprocess.run([*command, "-E", "-P", str(source)], capture_output=True, text=True, check=True, timeout=60).stdout
    names = re.findall(r'extern "C"\s+void\s+(\w+)\s*\(', expanded)
    source.write_text(text + "".join(f'static bool added_{name} = cpu::add("{name}", &{name});\n' for name in names))
    done = subprocess.run([*command, "-o", str(library), str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return library
