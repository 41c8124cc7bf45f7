"""Registers, shared memory and spills of every kernel, as nvcc's assembler reports them; no GPU needed.

``python -m runtime.kernels.resources > experiments/kernels/resources.csv`` writes the table that a test compares with.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

from runtime.kernels import build
from runtime.kernels.errors import KernelBuildError

ARCHS = (80, 90, 100)
"""A100, H100 and H200, B200."""

_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for 'sm_\d+'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one kernel takes on one architecture."""

    kernel: str
    arch: int
    registers: int
    """Per thread."""
    shared_bytes: int
    """Static, per block."""
    spill_bytes: int
    """Stores and loads of registers that did not fit."""


def nvcc_version() -> str:
    """Release of the nvcc on PATH, such as ``13.0``. Raises KernelBuildError where there is none."""
    done = _nvcc(["--version"])
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    if found is None:
        raise KernelBuildError("nvcc", "prints no release", done.stdout)
    return found[1]


def measure(stem: str, arch: int) -> list[Resources]:
    """Compile csrc/``stem``.cu ahead of time; one entry per kernel. Raises KernelBuildError with the compiler's messages."""
    with tempfile.TemporaryDirectory() as folder:
        target = ["-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", "-o", str(Path(folder) / "out.cubin")]
        done = _nvcc(["-std=c++17", *target, str(build.CSRC / f"{stem}.cu")])
    kernels = []
    for match in _ENTRY.finditer(done.stderr):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        kernels.append(
            Resources(
                kernel=match["kernel"],
                arch=arch,
                registers=int(match["registers"]),
                shared_bytes=int(shared[1]) if shared else 0,
                spill_bytes=int(match["stores"]) + int(match["loads"]),
            )
        )
    if not kernels:
        raise KernelBuildError(f"kernel {stem} for sm_{arch}", "the assembler reports no kernel", done.stderr)
    return sorted(kernels, key=lambda kernel: kernel.kernel)


def write_table(rows: Iterable[Resources], file: TextIO) -> None:
    """CSV; the first line says which nvcc."""
    file.write(f"# nvcc {nvcc_version()}\n")
    writer = csv.DictWriter(file, [field.name for field in fields(Resources)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)


def read_table(path: Path) -> tuple[str, dict[tuple[str, int], Resources]]:
    """(nvcc release, entries by kernel and architecture)."""
    with path.open() as file:
        release = file.readline().removeprefix("# nvcc ").strip()
        rows = [
            Resources(kernel=row["kernel"], **{key: int(value) for key, value in row.items() if key != "kernel"})
            for row in csv.DictReader(file)
        ]
    return release, {(row.kernel, row.arch): row for row in rows}


def _nvcc(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise KernelBuildError("nvcc", "is not on PATH; kernels are compiled at first use without it")
    done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise KernelBuildError(f"nvcc {arguments[-1]}", f"exit {done.returncode}", done.stderr)
    return done


if __name__ == "__main__":
    write_table((row for arch in ARCHS for stem in build.stems() for row in measure(stem, arch)), sys.stdout)
