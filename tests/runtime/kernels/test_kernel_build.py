"""Compilation: of everything against the checked-in table of resources, and at first use with its cache."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_cases import RESOURCES

from runtime.kernels import build, driver, resources
from runtime.kernels.errors import KernelBuildError
from runtime.kernels.resources import Resources


@pytest.mark.turns(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arch", resources.ARCHS)
def test_every_kernel_compiles_without_spills_to_what_the_table_says(arch: int) -> None:
    """To the register with the compiler of the table; the same kernels with any other. NVRTC is among the development tools, so
    this is never skipped."""
    build.nvrtc.cache_clear()
    build.nvrtc()
    with ThreadPoolExecutor(2) as pool:
        found = [row for rows in pool.map(lambda stem: resources.measure(stem, arch), build.stems()) for row in rows]
    assert {row.arch for row in found} == {arch} and [row.kernel for row in found if row.spill_bytes] == []
    # Two blocks of 256 threads on a multiprocessor at least, for all.
    assert min(row.warps for row in found) >= 16
    measured = {(row.kernel, row.arch): row for row in found}
    compiler, every = resources.read_table(RESOURCES)
    assert {of for _, of in every} == set(resources.ARCHS)
    table = {key: row for key, row in every.items() if key[1] == arch}
    assert measured.keys() == table.keys()
    if resources.compiler_name() == compiler:
        assert measured == table, (
            "python -m runtime.kernels.resources > experiments/kernels/resources.csv, and look at the change"
        )


def test_warps_that_registers_leave_room_for() -> None:
    def warps(registers: int) -> int:
        return Resources(kernel="", arch=90, registers=registers, shared_bytes=0, spill_bytes=0).warps

    # NVIDIA's occupancy tables: 32 registers a thread fill the multiprocessor, 64 half of it, 255 leave 8 warps.
    assert [warps(registers) for registers in (16, 32, 33, 64, 72, 128, 255)] == [64, 64, 51, 32, 28, 16, 8]


def test_spills_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot keep its values in registers."""
    source = """
        extern "C" __global__ void __launch_bounds__(1024, 2) greedy(float* at) {
          float held[96];
          for (int i = 0; i < 96; ++i) held[i] = at[i * 1024 + threadIdx.x];
          __syncthreads();
          for (int i = 0; i < 96; ++i) at[i * 1024 + threadIdx.x] = held[i] * held[95 - i];
        }
    """
    monkeypatch.setattr(build, "source_of", lambda stem: source)
    [row] = resources.measure("greedy", 90)
    assert (row.kernel, row.registers) == ("greedy", 32)
    assert row.spill_bytes > 0


class CountingCompiler:
    """Stands where NVRTC does."""

    version = (13, 0)

    def __init__(self) -> None:
        self.compiled: list[tuple[str, int]] = []

    def compile(self, stem: str, source: str, arch: int, *extra: str) -> tuple[bytes, str]:
        self.compiled.append((stem, arch))
        return f"{stem} {arch}".encode(), ""


def test_compiled_once_per_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CountingCompiler()
    monkeypatch.setattr(build, "nvrtc", lambda: compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(3):
        assert build.cubin("combine", 90) == b"combine 90"
    assert build.cubin("combine", 80) == b"combine 80"
    assert compiler.compiled == [("combine", 90), ("combine", 80)]
    compiler.version = (13, 1)  # another compiler: its own code
    build.cubin("combine", 90)
    assert len(compiler.compiled) == 3
    assert not [path for path in build.cache_folder().iterdir() if path.suffix != ".cubin"]


def test_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CountingCompiler()
    monkeypatch.setattr(build, "nvrtc", lambda: compiler)
    (tmp_path / "hybridep").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cubin("route", 90) == b"route 90"


def test_old_gpus_are_refused() -> None:
    with pytest.raises(KernelBuildError, match="sm_75 is too old; the kernels need sm_80"):
        build.cubin("route", 75)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    build.nvrtc.cache_clear()
    with pytest.raises(KernelBuildError, match="pip install nvidia-cuda-nvrtc"):
        build.nvrtc()
    with pytest.raises(KernelBuildError, match=r"no CUDA driver: libcuda\.so\.1"):
        driver.CudaDriver()


def test_what_users_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a first launch: compiled, kept, and a broken source explained."""
    build.nvrtc.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = build.cubin("carry", 90)
    assert code.startswith(b"\x7fELF")
    assert [path.read_bytes() for path in build.cache_folder().iterdir()] == [code]
    with pytest.raises(KernelBuildError, match=r"broken\.cu\(1\): error"):
        build.nvrtc().compile("broken", "not a kernel", 90)


def test_compiler_of_torchs_own_cuda_release_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("cu13", "libnvrtc.so.13"), ("cuda_nvrtc", "libnvrtc.so.12"), ("cu13", "libnvrtc.alt.so.13")):
        path = tmp_path / "nvidia" / folder / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for cuda, first in (("12.8", "libnvrtc.so.12"), ("13.0", "libnvrtc.so.13"), (None, "libnvrtc.so.13")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        names = list(build._nvrtc_names())
        assert Path(names[0]).name == first
        assert [Path(name).name for name in names].count("libnvrtc.alt.so.13") == 0
        assert names[-1] == "libnvrtc.so"
