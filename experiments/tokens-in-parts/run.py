"""Do tokens that travel in parts shorten steps where the planner says so, and by as much?

In the lab: links and computation are probed with all ranks, the planner plans for what was measured, with tokens in one piece and
in as many parts as it chooses, and both plans train in turn. What is already in ``results`` is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from hybridep.commands.inputs import load_cluster
from hybridep.commands.lab_settings import each_in_lab
from hybridep.commands.probe import with_measurements
from hybridep.commands.tables import write_provenance, write_rows
from hybridep.config import build, write_text
from hybridep.launch.trials import measure
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import plan
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
TIMES = ("predicted_s", "simulated_s", "measured_s", "min_s", "max_s")
COLUMNS = ("setting", "chunks", "dc", "gpu", *TIMES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="one setting, few steps, no verdict: does it run?")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    folder = given.results.resolve() / ("smoke" if given.smoke else "")
    if given.inside is not None:
        write_text(folder / f"{given.inside}.json", json.dumps(measured(config, given.inside)))
        return 0
    code = each_in_lab(__file__, config["settings"], folder, lambda name: setting(config, name)[0])
    if code:
        return code
    rows = [row for name in config["settings"] for row in json.loads((folder / f"{name}.json").read_text())]
    write_rows(folder / "parts.csv", rows, COLUMNS)
    write_provenance(folder)
    return 0 if given.smoke else summarise(rows)


def setting(config: dict[str, Any], name: str) -> tuple[Cluster, Workload]:
    fields = dict(config["settings"][name])
    cluster = load_cluster(config["cluster"], [f"levels.dc.bandwidth={fields.pop('rate')}"])
    training = config["training"] | {"sequence_length": fields.pop("sequence_length")}
    return cluster, build(Workload, {"name": name, "model": config["model"] | fields, "training": training}, "config.yaml")


def measured(config: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A row for tokens in one piece, and one for the planner's number of parts, if that is another; inside the lab."""
    cluster, workload = setting(config, name)
    _, probes = measure([plan(cluster, workload)], steps=2, probe_s=config["probe_s"])
    probed = with_measurements(cluster, probes[0])
    plans = [plan(probed, workload), plan(probed, workload, most_chunks=config["most_chunks"])]
    plans = plans if plans[1].schedule.chunks > 1 else plans[:1]
    found, _ = measure(plans * config["turns"], steps=config["steps"])
    return [
        _row(name, made, [one for trial in found[kind :: len(plans)] for one in trial.step_s]) for kind, made in enumerate(plans)
    ]


def _row(name: str, made: Plan, steps_s: list[float]) -> dict[str, Any]:
    times = made.predicted.expected_s, simulate_step(made).step_s, statistics.median(steps_s), min(steps_s), max(steps_s)
    row = {"setting": name, "chunks": made.schedule.chunks, **made.layers[0].domains}
    return row | {column: f"{seconds:.4g}" for column, seconds in zip(TIMES, times, strict=True)}


def summarise(rows: list[dict[str, Any]]) -> int:
    """1 where the plan with parts takes longer than the one without."""
    ratios = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        plain, *parts = (row for row in rows if row["setting"] == name)
        print(f"{name}: in one piece {_shown(plain)}")
        for row in parts:
            ratios.append(float(row["measured_s"]) / float(plain["measured_s"]))
            promised = [float(row[column]) / float(plain[column]) for column in ("predicted_s", "simulated_s")]
            print(f"  in {row['chunks']} {_shown(row)}: x {ratios[-1]:.3f}", end="")
            print(f", predicted x {promised[0]:.3f}, simulated x {promised[1]:.3f}")
    return int(not ratios or max(ratios) > 1)


def _shown(row: dict[str, Any]) -> str:
    return f"{row['measured_s']} s ({row['min_s']} to {row['max_s']}), dc {row['dc']} gpu {row['gpu']}"


if __name__ == "__main__":
    sys.exit(main())
