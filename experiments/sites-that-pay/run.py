"""When do more datacenters pay? One site alone against plans for sixteen, and for those of them that pay.

    .venv/bin/python experiments/sites-that-pay/run.py [--smoke]

One row per model and bandwidth in ``results/sites.csv``; rows that are there are not computed again.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import click
import yaml

from hybridep.commands.inputs import load_workload
from hybridep.commands.plan_choice import planned
from hybridep.commands.sites_choice import Asked, plan_sites
from hybridep.commands.stage_choice import in_stages
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.config import build
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.topology import Cluster
from planner import StageWishes, alone, least_of_any, memory_use
from planner.stages.costs import costed
from simulator.pipeline import simulate_any

HERE = Path(__file__).resolve().parent
KEY = ("workload", "bandwidth")
WORSE = 1.05
"""By more than this nothing else may be faster than what is planned for the sites that pay."""


@click.command(help=__doc__)
@click.option("--smoke", is_flag=True, help="The smallest setting, no verdict: does it run?")
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
def main(smoke: bool, results: Path) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    config |= config["smoke"] if smoke else {}
    table = (results / "smoke" if smoke else results) / "sites.csv"
    rows = read_rows(table)
    for name, bandwidth in product(config["workloads"], config["bandwidth"]):
        if any((row["workload"], row["bandwidth"]) == (name, bandwidth) for row in rows):
            continue
        rows.append(row_of(config, name, bandwidth))
        write_rows(table, rows)
        click.echo("  ".join(f"{key} {value}" for key, value in rows[-1].items()), err=True)
    write_provenance(table.parent)
    slower = False
    for row in rows:
        alone_s, paying_s, bound_s = (float(row[column]) for column in ("alone_s", "paying_s", "bound_s"))
        best_s = min(alone_s, float(row["without_s"]), float(row["staged_s"]))
        slower |= paying_s > WORSE * best_s
        click.echo(
            f"{row['workload']}, {row['bandwidth']}: {row['paying']} sites pay, x {alone_s / paying_s:.2f} over one (no plan "
            f"is over x {alone_s / bound_s:.2f}); best of the others x {paying_s / best_s:.2f}"
        )
    sys.exit(0 if smoke else int(slower))


def row_of(config: dict[str, Any], name: str, bandwidth: str) -> dict[str, str]:
    outer, *inner = config["levels"]
    levels = [outer | {"size": config["sites"], "bandwidth": bandwidth}, *inner]
    cluster = build(Cluster, {"name": f"{config['sites']} sites", "levels": levels, "gpu": config["gpu"]}, "config.yaml")
    workload, limit_s = load_workload(name.split(",")[0], config["workloads"][name]), config["time_limit_s"]
    one = alone(cluster, workload)
    assert one is not None
    paying = plan_sites(Asked(cluster=cluster, workload=workload, wishes=StageWishes()), fewer=True, time_limit_s=limit_s).best
    return {
        **dict(zip(KEY, (name, bandwidth), strict=True)),
        "alone_s": _simulated(one),
        "without_s": _simulated(planned(cluster, workload, time_limit_s=limit_s)),
        "staged_s": _simulated(in_stages(cluster, workload, time_limit_s=limit_s).plan),
        "paying_s": _simulated(paying),
        "paying": str(paying.cluster.sizes[0]),
        "stages": str(len(paying.stages) if isinstance(paying, PipelinePlan) else 1),
        "memory_gb": f"{_memory_bytes(paying) / 1e9:.4g}",
        "alone_memory_gb": f"{memory_use(one).fullest_bytes / 1e9:.4g}",
        "bound_s": f"{least_of_any(cluster, workload, StageWishes()):.4g}",
    }


def _simulated(made: AnyPlan) -> str:
    return f"{simulate_any(made).step_s:.4g}"


def _memory_bytes(made: AnyPlan) -> float:
    """Of the fullest rank."""
    return costed(made).fullest.fullest_bytes if isinstance(made, PipelinePlan) else memory_use(made).fullest_bytes


if __name__ == "__main__":
    main()
