"""experiments/mixnet at its smallest: the ranges that MixNet prints follow from its times and prices; every part ends."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from hybridep.launch.host import child_environment

RUN = Path(__file__).resolve().parents[2] / "experiments" / "mixnet" / "run.py"
GAINS = {100: (1.24, 1.53), 200: (1.47, 1.82), 400: (1.95, 2.31), 800: (1.97, 2.37)}
"""Least and most of four models; printed as 1.2-1.5, 1.4-1.8, 1.9-2.3 and 2.0-2.4."""


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.turns(2)
@pytest.mark.timeout(300)
def test_the_smallest_points(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--smoke", "--results", str(tmp_path)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    value: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in rows(tmp_path / "dollars.csv"):
        per_dollar = 1 / (float(row["iteration_s"]) * float(row["network_usd"]))
        if row["source"] == "published":
            value[row["fabric"], int(row["gbps"])][row["model"]] = per_dollar
    for gbps, expected in GAINS.items():
        gains = [value["mixnet", gbps][model] / value["fat_tree", gbps][model] for model in value["mixnet", gbps]]
        assert len(gains) == 4
        assert (min(gains), max(gains)) == pytest.approx(expected, abs=0.0051)
    delays = {row["delay"]: float(row["iteration_s"]) for row in rows(tmp_path / "delay.csv")}
    assert delays["25 ms"] >= delays["0 s"] > 0
    sites = rows(tmp_path / "sites.csv")
    assert {(row["plan"], row["fabric"]) for row in sites} == {
        (plan, fabric) for plan in ("ep", "ep_in_dc", "hybrid") for fabric in ("fat_tree", "mixnet")
    }
    assert {path.name for path in tmp_path.glob("*.png")} == {"dollars.png", "delay.png", "sites.png"}
