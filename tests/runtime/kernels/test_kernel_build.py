"""Compilation: ahead of time against the checked-in table of resources, and at first use with its cache."""

from __future__ import annotations

import ctypes
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.kernels import build, driver, resources
from runtime.kernels.errors import KernelBuildError

TABLE = Path(__file__).parents[3] / "experiments" / "kernels" / "resources.csv"


@pytest.mark.timeout(300)
def test_every_kernel_compiles_and_none_spills() -> None:
    """For sm_80, sm_90 and sm_100. With the nvcc release of the table the figures must be the table's."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH: kernels can not be compiled ahead of time here")
    release, table = resources.read_table(TABLE)
    jobs = [(stem, arch) for arch in resources.ARCHS for stem in build.stems()]
    with ThreadPoolExecutor(2) as pool:
        measured = {(row.kernel, row.arch): row for rows in pool.map(lambda job: resources.measure(*job), jobs) for row in rows}
    assert [key for key, row in measured.items() if row.spill_bytes] == []
    assert measured.keys() == table.keys()
    if resources.nvcc_version() == release:
        assert measured == table, (
            "python -m runtime.kernels.resources > experiments/kernels/resources.csv, and look at the change"
        )


def test_table_has_every_kernel_without_spills() -> None:
    _, table = resources.read_table(TABLE)
    assert {arch for _, arch in table} == set(resources.ARCHS)
    assert all(row.spill_bytes == 0 for row in table.values())
    # Two blocks of 256 threads on a multiprocessor of 65536 registers at least, for all.
    assert max(row.registers for row in table.values()) <= 128


class CountingCompiler:
    """Stands where NVRTC does."""

    version = (13, 0)

    def __init__(self) -> None:
        self.compiled: list[tuple[str, int]] = []

    def compile(self, stem: str, source: str, arch: int) -> bytes:
        self.compiled.append((stem, arch))
        return f"{stem} {arch}".encode()


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


@pytest.mark.timeout(300)
def test_nvrtc_compiles_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that users have, where its wheel is installed; it needs no GPU."""
    build.nvrtc.cache_clear()
    try:
        compiler = build.nvrtc()
    except KernelBuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for stem in build.stems():
        for arch in resources.ARCHS:
            assert build.cubin(stem, arch).startswith(b"\x7fELF")
    with pytest.raises(KernelBuildError, match=r"broken\.cu\(1\): error"):
        compiler.compile("broken", "not a kernel", 90)
