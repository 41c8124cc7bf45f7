"""No kernel reads or writes outside its tensors: the emulated kernels under the address sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from memory_check import CLEAN

HERE = Path(__file__).parent
SOME = ["hidden 63", "no tokens"]


def run_check(folder: Path, names: list[str], timeout_s: float) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels for the CPU")
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_file():
        pytest.skip("no address sanitizer beside g++")
    done = subprocess.run(
        [sys.executable, "-m", "memory_check", str(folder), *names],
        cwd=HERE,
        env=os.environ | {"LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": f"{HERE}:{HERE.parents[2]}"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert CLEAN in done.stdout, done.stdout + done.stderr
    # The same run then writes one row too far: the check can see what it looks for.
    assert "heap-buffer-overflow" in done.stderr, done.stderr
    assert done.returncode != 0


@pytest.mark.turns(4)
def test_memory_on_some_shapes(tmp_path: Path) -> None:
    run_check(tmp_path, SOME, 110)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_on_all_shapes(tmp_path: Path) -> None:
    run_check(tmp_path, [], 590)
