"""A small run on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_cases import write_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path)
