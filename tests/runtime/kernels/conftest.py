from __future__ import annotations

from pathlib import Path

import pytest
from kernel_emulator import EmulatingDriver


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where the kernels are compiled for the CPU, once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def emulator(compiled_kernels: Path) -> EmulatingDriver:
    """Runs the kernels' source on the CPU, threads in random order between barriers."""
    return EmulatingDriver(folder=compiled_kernels, order=11)
