"""Registers, shared memory and spills of every kernel, as the compiler that users have reports them; no GPU needed.

``python -m runtime.kernels.resources > experiments/kernels/resources.csv`` writes the table that a test compares with.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable
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
_REGISTERS_OF_A_MULTIPROCESSOR = 65536
_WARP, _GRANULE = 32, 256
"""Threads of a warp; registers are given to warps in so many at a time."""


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

    @property
    def warps(self) -> int:
        """Warps that find registers on a multiprocessor at once: what hides the latency of memory."""
        per_warp = -(-self.registers * _WARP // _GRANULE) * _GRANULE
        return min(64, _REGISTERS_OF_A_MULTIPROCESSOR // per_warp)


def measure(stem: str, arch: int) -> list[Resources]:
    """Compile csrc/``stem``.cu; one entry per kernel. Raises KernelBuildError with the compiler's messages."""
    code, log = build.nvrtc().compile(stem, build.source_of(stem), arch, "--ptxas-options=-v")
    if not code.startswith(b"\x7fELF"):
        raise KernelBuildError(f"kernel {stem} for sm_{arch}", "the compiler made no machine code", log)
    kernels = []
    for match in _ENTRY.finditer(log):
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
        raise KernelBuildError(f"kernel {stem} for sm_{arch}", "the assembler reports no kernel", log)
    return sorted(kernels, key=lambda kernel: kernel.kernel)


def compiler_name() -> str:
    """Of the NVRTC at hand, such as ``NVRTC 13.0``."""
    major, minor = build.nvrtc().version
    return f"NVRTC {major}.{minor}"


def write_table(rows: Iterable[Resources], file: TextIO) -> None:
    """CSV; the first line says which compiler."""
    file.write(f"# {compiler_name()}\n")
    writer = csv.DictWriter(file, [field.name for field in fields(Resources)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)


def read_table(path: Path) -> tuple[str, dict[tuple[str, int], Resources]]:
    """(compiler, entries by kernel and architecture)."""
    with path.open() as file:
        compiler = file.readline().removeprefix("#").strip()
        rows = [
            Resources(kernel=row["kernel"], **{key: int(value) for key, value in row.items() if key != "kernel"})
            for row in csv.DictReader(file)
        ]
    return compiler, {(row.kernel, row.arch): row for row in rows}


if __name__ == "__main__":
    write_table((row for arch in ARCHS for stem in build.stems() for row in measure(stem, arch)), sys.stdout)
