"""Plans on measured site-to-site profiles against those of other planners, under the cost model and the simulator.

    .venv/bin/python experiments/planner-quality/run.py --input skyplane=throughput.csv --input dtfm=pairs.csv

One row per profile, model and planner in ``results/quality.csv``; rows that are there are not computed again.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import click
import yaml

from hybridep.config import build, load
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import plan
from planner.sites.others import OTHERS, other_plan
from planner.sites.plans import table_plan
from planner.sites.problem import site_problem
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent.parent / "configs" / "models"
COLUMNS = ("profile", "sites", "model", "planner", "step_s", "gain", "fits", "simulated_s", "bound_s", "gap", "plan_s")


def cluster_of(name: str, recipe: Mapping[str, Any], site: Mapping[str, Any], table: Path) -> Cluster:
    """A site's access rate is the largest of its pairs."""
    pairs: dict[tuple[str, str], tuple[float, float]] = {}
    with table.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            src, dst = row["src"], row["dst"]
            if src != dst and src.startswith(recipe["prefix"]) and dst.startswith(recipe["prefix"]):
                pairs[src, dst] = float(row[recipe["bandwidth_column"]]), float(row[recipe["rtt_column"]]) / 2
                if not recipe["ordered"]:
                    pairs[dst, src] = pairs[src, dst]
    names = sorted({src for src, _ in pairs})
    missing = [pair for pair in permutations(names, 2) if pair not in pairs]
    if missing:
        raise click.ClickException(f"{table}: no row for {missing[0][0]} -> {missing[0][1]} ({len(missing)} missing)")
    rates = {pair: value[0] for pair, value in pairs.items()}
    data = {
        "name": name,
        "levels": [
            {"name": "dc", "size": len(names), "bandwidth": "1 Gbps", "latency": "0 s"},
            {"name": "gpu", "size": site["ranks"], "bandwidth": site["bandwidth"], "latency": site["latency"]},
        ],
        "gpu": {key: site[key] for key in ("throughput", "memory", "memory_bandwidth")},
        "sites": [
            {
                "name": one,
                "up": f"{max(rates[one, other] for other in names if other != one)} Gbps",
                "down": f"{max(rates[other, one] for other in names if other != one)} Gbps",
            }
            for one in names
        ],
        "links": [
            {"src": a, "dst": b, "bandwidth": f"{pairs[a, b][0]} Gbps", "latency": f"{pairs[a, b][1]} ms"}
            for a, b in permutations(names, 2)
        ],
    }
    return build(Cluster, data, str(table))


def rows_of(name: str, cluster: Cluster, model: str, workload: Workload, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per planner, ours first."""
    problem = site_problem(cluster, workload)
    started = time.perf_counter()
    ours = plan(cluster, workload, time_limit_s=config["time_limit_s"])
    plan_s = time.perf_counter() - started
    assert ours.solver is not None and ours.prediction is not None
    common = {"profile": name, "sites": problem.num_sites, "model": model}
    found = {other: other_plan(problem, other) for other in OTHERS}
    nearest = min((other for other in found if found[other].rank[0] == 0), key=lambda other: found[other].rank)

    def simulated(made: Plan) -> str:
        small = problem.num_sites <= config["simulate_up_to_sites"]
        return f"{simulate_step(made).step_s:.6g}" if small else ""

    rows = [
        common
        | {
            "planner": "hybridep",
            "step_s": f"{ours.prediction.step:.6g}",
            "gain": "1",
            "fits": True,
            "simulated_s": simulated(ours),
            "bound_s": f"{ours.solver.bound:.6g}",
            "gap": f"{ours.solver.gap:.4f}",
            "plan_s": f"{plan_s:.2f}",
        }
    ]
    for other, one in found.items():
        assert one.configuration is not None
        other_s = simulated(table_plan(problem, one.table, one.configuration)) if other == nearest else ""
        rows.append(
            common
            | {
                "planner": other,
                "step_s": f"{one.rank[1]:.6g}",
                "gain": f"{one.rank[1] / ours.prediction.step:.3f}",
                "fits": one.rank[0] == 0,
                "simulated_s": other_s,
            }
        )
    return rows


@click.command(help=__doc__)
@click.option("--input", "inputs", multiple=True, required=True, metavar="NAME=CSV", help="A table.")
@click.option("--only", default="", help="Profiles, comma separated.")
def main(inputs: tuple[str, ...], only: str) -> None:
    tables = dict(entry.split("=", 1) for entry in inputs)
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    out = HERE / "results" / "quality.csv"
    out.parent.mkdir(exist_ok=True)
    done: set[tuple[str, str]] = set()
    if out.exists():
        with out.open(newline="", encoding="utf-8") as stream:
            done = {(row["profile"], row["model"]) for row in csv.DictReader(stream)}
    else:
        out.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    for name, recipe in config["profiles"].items():
        if recipe["input"] not in tables or (only and name not in only.split(",")):
            continue
        cluster = cluster_of(name, recipe, config["site"], Path(tables[recipe["input"]]))
        for model, layers in config["models"].items():
            if (name, model) in done:
                continue
            overrides = [f"model.num_layers={layers}", "model.num_dense_layers=0"]
            workload = load(Workload, MODELS / f"{model}.yaml", overrides)
            rows = rows_of(name, cluster, model, workload, config)
            with out.open("a", newline="", encoding="utf-8") as stream:
                csv.DictWriter(stream, COLUMNS).writerows(rows)
            for row in rows:
                click.echo("  ".join(f"{key} {row[key]}" for key in COLUMNS if row.get(key) not in (None, "")))


if __name__ == "__main__":
    main()
