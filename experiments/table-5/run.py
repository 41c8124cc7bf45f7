"""HybridEP's Table V, simulated at its two clusters' sizes and set beside the published seconds, point by point.

    .venv/bin/python experiments/table-5/run.py [--smoke]

results/table.csv has a row per cluster, size of data and system; results/table-5.png both. Rows that are there are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import matplotlib
import yaml

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands.inputs import load_cluster
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.config import build
from hybridep.plan import Plan
from hybridep.workload import Workload
from planner import alone, plan_domains
from simulator.step import StepResult, simulate_step
from simulator.systems import System, system_step
from simulator.token_exchange import TokenExchange

HERE = Path(__file__).resolve().parent
COLUMNS = ("cluster", "data_mb", "system", "simulated_s", "published_s", "simulated_gain", "published_gain", "choice")
Row = dict[str, str]


def workload_of(config: dict[str, Any], data_mb: int) -> Workload:
    training = config["training"] | {"micro_batch_size": config["sequences_per_6_mb"] * data_mb // 6}
    return build(Workload, {"name": f"{data_mb} MB", "model": config["model"], "training": training}, "config.yaml")


def systems(cluster_name: str, workload: Workload) -> dict[str, tuple[StepResult, str]]:
    """Each system's step. What the paper calls HybridEP gathers everything here: with 0.36 MB experts its model says p = 0."""
    cluster = load_cluster(cluster_name)
    ep = baseline_plan(cluster, workload, Baseline.EP)

    def simulate(plan: Plan, exchange: TokenExchange) -> StepResult:
        return simulate_step(plan, exchange=exchange)

    found = {}
    for system in (System.FLAT_EP, System.TUTEL, System.FASTER_MOE, System.SMART_MOE):
        best = system_step(ep, system, simulate)
        found[system.value] = best.step, best.choice
    found["hybridep"] = simulate_step(baseline_plan(cluster, workload, Baseline.FULL_GATHER)), "all experts gathered"
    found["ep"] = simulate_step(ep), "a row per destination"
    made = plan_domains(cluster, workload)
    domains = ", ".join(f"{name} {size}" for name, size in made.layers[0].domains.items())
    found["planned"] = simulate_step(made), f"domains {domains}"
    one = alone(cluster, workload)
    if one is not None:
        found["alone"] = simulate_step(one), "one datacenter, all of the batch"
    return found


def rows_of(config: dict[str, Any], cluster: str, data_mb: int) -> list[Row]:
    found = systems(cluster, workload_of(config, data_mb))
    at = config["published"]["data_mb"].index(data_mb)
    published = {name: values[at] for name, values in config["published"][cluster].items()}
    rows = []
    for name, (step, choice) in found.items():
        values = {
            "cluster": cluster,
            "data_mb": str(data_mb),
            "system": name,
            "simulated_s": f"{step.step_s:.4g}",
            "published_s": f"{published[name]}" if name in published else "",
            "simulated_gain": f"{found['tutel'][0].step_s / step.step_s:.3g}",
            "published_gain": f"{published['tutel'] / published[name]:.3g}" if name in published else "",
            "choice": choice,
        }
        rows.append(values)
    return rows


def draw(path: Path, rows: list[Row]) -> None:
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    figure, axes = plt.subplots(1, len(clusters), figsize=(5 * len(clusters), 4), layout="constrained", squeeze=False)
    for panel, cluster in zip(axes[0], clusters, strict=True):
        for name, colour in (("hybridep", "tab:blue"), ("tutel", "tab:red")):
            mine = [row for row in rows if row["cluster"] == cluster and row["system"] == name]
            data = [int(row["data_mb"]) for row in mine]
            panel.loglog(data, [float(row["simulated_s"]) for row in mine], marker="o", color=colour, label=f"{name}, simulated")
            if mine and mine[0]["published_s"]:
                seconds = [float(row["published_s"]) for row in mine]
                panel.loglog(data, seconds, "--", marker="s", ms=4, color=colour, label=f"{name}, published")
        panel.set(title=cluster, xlabel="data of one GPU, MB", ylabel="seconds per iteration")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@click.command(help=__doc__)
@click.option("--smoke", is_flag=True, help="The smallest point of the smaller cluster: does it run?")
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
def main(smoke: bool, results: Path) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    results = results / "smoke" if smoke else results
    results.mkdir(parents=True, exist_ok=True)
    table = results / "table.csv"
    rows = read_rows(table)
    points = [(cluster, data_mb) for cluster in ("paper-m", "paper-l") for data_mb in config["published"]["data_mb"]]
    for cluster, data_mb in points[:1] if smoke else points:
        if not any((row["cluster"], row["data_mb"]) == (cluster, str(data_mb)) for row in rows):
            rows += rows_of(config, cluster, data_mb)
            write_rows(table, rows, COLUMNS)
    for row in rows:
        click.echo("  ".join(f"{name} {row[name]}" for name in COLUMNS if row[name]))
    draw(results / "table-5.png", rows)
    write_provenance(results)


if __name__ == "__main__":
    main()
