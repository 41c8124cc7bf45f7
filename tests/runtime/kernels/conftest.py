from __future__ import annotations

from pathlib import Path

import pytest
from kernel_emulator import EmulatingDriver


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where the kernels are compiled for the CPU, once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=[0, 1, 11], ids=["rising", "falling", "random"])
def emulator(request: pytest.FixtureRequest, compiled_kernels: Path) -> EmulatingDriver:
    """Runs the kernels' source on the CPU, in three orders of threads between barriers."""
    return EmulatingDriver(folder=compiled_kernels, order=request.param)
