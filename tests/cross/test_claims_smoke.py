"""Experiments run at their smallest size, and say what they must."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands.inputs import load_cluster, load_workload
from runtime.mesh import host_store

pytestmark = pytest.mark.turns(6)

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


def rows_of(claim: str, table: str, folder: Path) -> list[dict[str, str]]:
    script = EXPERIMENTS / claim / "run.py"
    done = subprocess.run(
        [sys.executable, str(script), "--smoke", "--results", str(folder)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader((folder / "smoke" / table).open(newline="", encoding="utf-8")))


def test_lossless(tmp_path: Path) -> None:
    rows = rows_of("lossless", "rows.csv", tmp_path)
    numbers = [row for row in rows if row["part"] == "numbers"]
    assert len(numbers) == 9 and all(0.70 < float(row["ratio"]) < 0.74 for row in numbers)
    assert all(0.6 < float(row["ratio"]) < 0.9 for row in rows if row["part"] == "plans")


def test_figure_17(tmp_path: Path) -> None:
    gains = rows_of("figure-17", "gains.csv", tmp_path)
    assert len(gains) == 1
    for row in gains:
        # What is chosen freely is never behind what it could have chosen.
        assert float(row["planned over best other"]) > 0.999, row
        assert float(row["planned over ep"]) >= float(row["planned over best other"]) - 1e-3, row
    paper = list(csv.DictReader((tmp_path / "smoke" / "paper.csv").open(newline="", encoding="utf-8")))
    of_share = {row["fixed"]: float(row["most_gain"]) for row in paper if row["compression"] == "50"}
    # Nothing is faster than without the part of the tokens that stays at home: at most 1 / p.
    assert all(float(row["most_gain"]) <= 1 / float(row["fixed"][2:]) + 1e-9 for row in paper if row["fixed"].startswith("p="))
    assert of_share["p=0.25"] > 2


def test_table_5(tmp_path: Path) -> None:
    rows = {row["system"]: row for row in rows_of("table-5", "table.csv", tmp_path)}
    assert {row["data_mb"] for row in rows.values()} == {"6"}
    step_s = {name: float(row["simulated_s"]) for name, row in rows.items()}
    # With so few tokens no plan for both datacenters pays.
    assert step_s.pop("alone") < step_s["planned"]
    assert step_s["planned"] <= min(step_s.values()) * 1.001
    assert step_s["tutel"] <= step_s["flat_ep"] and step_s["ep"] < step_s["flat_ep"]
    assert float(rows["hybridep"]["simulated_gain"]) == pytest.approx(step_s["tutel"] / step_s["hybridep"], rel=0.01)


def test_pipeline(tmp_path: Path) -> None:
    (row,) = rows_of("pipeline", "steps.csv", tmp_path)
    seconds = {name: float(row[name]) for name in ("plan_s", "pipeline_s", "work_s", "bubble_s", "activations_s")}
    assert seconds["work_s"] + seconds["bubble_s"] + seconds["activations_s"] == pytest.approx(seconds["pipeline_s"], rel=1e-3)
    assert float(row["plan_over_pipeline"]) == pytest.approx(seconds["plan_s"] / seconds["pipeline_s"], rel=1e-3)
    # What is planned freely is never behind what it could have chosen.
    assert seconds["plan_s"] <= float(row[f"{row['best_other']}_s"]) * 1.001


def test_codec_time(tmp_path: Path) -> None:
    rows = rows_of("codec-time", "rows.csv", tmp_path)
    ratios = {(row["payload"], row["codec"]): float(row["ratio"]) for row in rows}
    assert ratios["gradients", "bf16"] == 2 and 3.5 < ratios["tokens", "int8"] < 4 and 49 < ratios["experts", "sr"] < 51
    assert all(float(row["encode_ms"]) > 0 and float(row["decode_ms"]) > 0 for row in rows)


def test_codec_loss(tmp_path: Path) -> None:
    exact = rows_of("codec-loss", "exact-0.csv", tmp_path)
    names = ("experts-change-int4", "tokens-fp8")
    change, tokens = (list(csv.DictReader((tmp_path / "smoke" / f"{name}-0.csv").open(encoding="utf-8"))) for name in names)
    # Both ends start from the same copy of an expert, whose later changes are rounded; tokens are from the first step on.
    assert change[0] == exact[0] and change[19] != exact[19] and tokens[0] != exact[0]
    assert float(change[19]["loss"]) == pytest.approx(float(exact[19]["loss"]), rel=1e-3)


def test_popular_experts(tmp_path: Path) -> None:
    [row] = rows_of("popular-experts", "rows.csv", tmp_path)
    assert float(row["plan_s"]) < min(float(row["domains_s"]), float(row["unknown_s"]))
    assert float(row["simulated_plan_s"]) < float(row["simulated_domains_s"]) and 0 < float(row["gap"]) < 1


def test_sites_that_pay(tmp_path: Path) -> None:
    [row] = rows_of("sites-that-pay", "sites.csv", tmp_path)
    bound_s, paying_s, *others_s = (float(row[f"{way}_s"]) for way in ("bound", "paying", "alone", "without", "staged"))
    assert 0.9 * paying_s < bound_s <= paying_s <= 1.05 * min(others_s) and row["paying"] == "1"


def test_a_step_of_link_use(tmp_path: Path) -> None:
    """Whose ranks compute as slowly as is planned; in the lab below only with all that is slow."""
    cluster = load_cluster("lab-4dc", ["levels.dc.size=1", "levels.gpu.size=1"])
    plan = baseline_plan(cluster, load_workload("tiny", ["model.num_layers=1"]), Baseline.EP)
    store = host_store("127.0.0.1", timeout_s=60)
    settings = {"host": "127.0.0.1", "port": store.port, "num_ranks": 1, "turns": 1, "depths": [0], "steps": 1}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings | {"plan": plan.model_dump(mode="json", exclude_none=True)}))
    command = [sys.executable, str(EXPERIMENTS / "link-use" / "steps.py"), str(path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.stdout.startswith("took [0, 0, 1"), done.stderr


@pytest.mark.lab
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("claim", "tables"),
    [
        ("lab-ablation", {"rows.csv": 3}),
        # Of the same parts as that one, half a minute each and more.
        pytest.param("prediction-grid", {"rows.csv": 6}, marks=pytest.mark.slow),
        pytest.param("lab-choice", {"rows.csv": 6}, marks=pytest.mark.slow),
        pytest.param("link-use", {"exchanges.csv": 5, "steps.csv": 2}, marks=pytest.mark.slow),
        pytest.param("copies-ahead", {"ahead.csv": 1}, marks=pytest.mark.slow),
        pytest.param("tokens-in-parts", {"parts.csv": 1}, marks=pytest.mark.slow),
        pytest.param("gpu-choice", {"rows.csv": 3}, marks=pytest.mark.slow),
    ],
)
def test_in_the_lab(claim: str, tables: dict[str, int], tmp_path: Path) -> None:
    """Tables have at least so many rows, each with times that were measured and a prediction or bound beside."""
    first, *others = tables
    found = {first: rows_of(claim, first, tmp_path)}
    found |= {name: list(csv.DictReader((tmp_path / "smoke" / name).open(newline="", encoding="utf-8"))) for name in others}
    for name, least in tables.items():
        assert len(found[name]) >= least
        for row in found[name]:
            times = {column: float(value) for column, value in row.items() if column.endswith("_s")}
            assert len(times) >= 4 and min(times.values()) > 0, row
