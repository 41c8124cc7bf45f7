"""What the installed distribution carries, and what importing it costs."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["hybridep", "planner", "runtime", "simulator"]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed(package: str) -> None:
    assert (importlib.resources.files(package) / "py.typed").is_file()


def test_configs_are_found_through_the_package() -> None:
    configs = importlib.resources.files("hybridep") / "configs"
    assert (configs / "clusters" / "lab-4dc.yaml").is_file()
    assert (configs / "models" / "tiny.yaml").is_file()


SOLVERS = ("pulp", "highspy")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hybridep.cli", ("torch", "ray", "tokenizers", *SOLVERS)),
        ("hybridep.launch", ("torch", "ray", *SOLVERS)),
        ("simulator", ("torch", "ray", *SOLVERS)),
        ("planner", ("torch", "ray")),
    ],
)
def test_import_stays_light(module: str, absent: tuple[str, ...]) -> None:
    """`hybridep --help` must not pay for torch, a solver or Ray; their importers load them when they are needed."""
    code = f"import sys, {module}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_wheel_holds_code_types_and_configs(tmp_path: Path) -> None:
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("hybridep-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
        modules = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert modules and modules <= names
    configs = {f"hybridep/{path.relative_to(ROOT)}" for path in (ROOT / "configs").glob("*/*.yaml")}
    assert configs and configs <= names
    assert not [name for name in names if name.startswith(("tests/", "experiments/", "configs/"))]
