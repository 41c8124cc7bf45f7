"""The same flows in SimGrid, where some Python here has it (Debian: python3-simgrid)."""

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

EXPERIMENT = Path(__file__).resolve().parents[2] / "experiments" / "simulator-simgrid"


@cache
def simgrid_python() -> str | None:
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if subprocess.run([python, "-c", "import simgrid"], capture_output=True, timeout=30).returncode == 0:
                return python
        except (OSError, subprocess.SubprocessError):
            continue
    return None


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulator_simgrid_run", EXPERIMENT / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(6))
def test_every_flow_ends_when_it_does_in_simgrid(seed: int, experiment: ModuleType) -> None:
    python = simgrid_python()
    if python is None:
        pytest.skip("no Python with the simgrid module")
    config = yaml.safe_load((EXPERIMENT / "config.yaml").read_text())
    load = experiment.random_load(np.random.default_rng(seed), config | {"most_flows": 60})
    end_s, _ = experiment.here(*load)
    other = np.array(experiment.in_simgrid(python, *load)["end_s"])
    assert end_s.max() == pytest.approx(other.max(), rel=1e-3)
    np.testing.assert_allclose(end_s, other, rtol=1e-2)
