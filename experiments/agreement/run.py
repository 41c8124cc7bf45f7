"""Predicted and simulated steps side by side: the planner's closed form and the flow simulation of the same plans.

    .venv/bin/python experiments/agreement/run.py [CLUSTER ...] [--model NAME] [--planning-time 0]

CLUSTER: files or names, instead of those in config.yaml; a cluster whose sites or links are listed counts as measured, others
as even. Plans: every size of the outermost domain with whole experts copied, experts inside sites, and what the planner
makes of it, where anything fits. Rows land in results/agreement.csv (a cluster that is there is not done again).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import yaml

from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.errors import InfeasibleError
from hybridep.placement import divisors
from hybridep.plan import LayerGroup, Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import expected_s
from planner import plan as search
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
COLUMNS = ("cluster", "kind", "ranks", "model", "plan", "predicted_s", "simulated_s", "difference", "allowed", "holds")


def plans(cluster: Cluster, workload: Workload, planning_s: float) -> Iterator[tuple[str, Plan]]:
    """Plans by name."""
    outer = cluster.levels[0]
    for size in divisors(outer.size):
        group = LayerGroup(
            first_layer=0, num_layers=workload.model.num_moe_layers, domains={outer.name: size}, migration={outer.name: 1.0}
        )
        yield f"domain {size}", Plan(cluster=cluster, workload=workload, layers=(group,))
    yield "ep_in_dc", baseline_plan(cluster, workload, Baseline.EP_IN_DC)
    if planning_s:
        with suppress(InfeasibleError):
            yield "planned", search(cluster, workload, time_limit_s=planning_s)


def rows_of(name: str, model: str, config: dict[str, Any], planning_s: float) -> Iterator[dict[str, str]]:
    """One for each plan."""
    cluster, workload = load_cluster(name), load_workload(model, config["overrides"])
    kind = "measured" if cluster.sites or cluster.links else "even"
    for label, plan in plans(cluster, workload, planning_s):
        predicted_s, simulated_s = expected_s(plan), simulate_step(plan).step_s
        difference = simulated_s / predicted_s - 1
        values = (predicted_s, simulated_s)
        yield {
            **{"cluster": cluster.name, "kind": kind, "ranks": str(cluster.num_gpus), "model": workload.name, "plan": label},
            **{column: f"{value:.6g}" for column, value in zip(("predicted_s", "simulated_s"), values, strict=True)},
            **{"difference": f"{difference:+.2e}", "allowed": str(config["allowed"][kind])},
            "holds": "yes" if abs(difference) <= config["allowed"][kind] else "no",
        }


@click.command(help=__doc__)
@click.argument("clusters", nargs=-1)
@click.option("--model", default=None, help="[default: as config.yaml has it]")
@click.option("--planning-time", type=float, default=None, help="Seconds; 0 leaves the planner's plans out.")
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
def main(clusters: tuple[str, ...], model: str | None, planning_time: float | None, results: Path) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    planning_s = config["planning_time"] if planning_time is None else planning_time
    results.mkdir(parents=True, exist_ok=True)
    table = results / "agreement.csv"
    rows = read_rows(table)
    wanted = clusters or tuple(config["clusters"])
    for name in wanted:
        model_name = model or config["model"]
        known = {(row["cluster"], row["model"]) for row in rows}
        if (load_cluster(name).name, load_workload(model_name).name) in known:
            continue
        rows += rows_of(name, model_name, config, planning_s)
        write_rows(table, rows, COLUMNS)
    write_provenance(results)
    for row in rows:
        click.echo("  ".join(row[column] for column in COLUMNS))
    over = sum(row["holds"] == "no" for row in rows)
    click.echo(f"{len(rows)} plans, {over} further apart than allowed")


if __name__ == "__main__":
    main()
