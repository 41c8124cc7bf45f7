"""Cases of experiments/memory: every rank's measured peak is within 10 % of the planner's figure."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from hybridep.launch.host import child_environment

RUN = Path(__file__).resolve().parents[2] / "experiments" / "memory" / "run.py"


@pytest.mark.turns(12)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["short", "latent-long", "again-attention-dense"])
def test_ranks_take_what_the_planner_says(tmp_path: Path, case: str) -> None:
    command = [sys.executable, str(RUN), "--cases", case, "--results", str(tmp_path)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "rows.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 4
    for row in rows:
        assert float(row["measured_mb"]) > 50
        assert abs(float(row["planned_mb"]) / float(row["measured_mb"]) - 1) <= 0.1
