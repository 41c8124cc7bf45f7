"""Plans in pipeline stages against plans without, stages in the cluster's order, and one site alone, on measured links between
sites; and pipelines for the sites that pay.

    .venv/bin/python experiments/stages/run.py [--smoke] [--cluster gcp.csv]

One row per cluster, model and way to train in ``results/stages.csv``; rows that are there are not computed again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands.inputs import cluster_and_workload
from hybridep.commands.plan_choice import planned
from hybridep.commands.sites_choice import Asked, plan_sites
from hybridep.commands.stage_choice import in_stages
from hybridep.commands.tables import read_rows, write_rows
from hybridep.config import write_text
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import StageWishes, alone, least_of_any, memory_use
from planner.stages.costs import costed, predicted
from simulator.errors import PipelineError
from simulator.pipeline import fastest_pipeline, simulate_pipeline
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
WITHOUT, IN_ORDER, PLANNED = "without stages", "stages in order", "planned stages"
ALONE, FEWER = "one site alone", "sites that pay"
COLUMNS = (
    "cluster",
    "model",
    "way",
    "sites",
    "stages",
    "micro_batches",
    "ahead",
    "expected_s",
    "simulated_s",
    "bound_s",
    "wan_gb",
    "memory_gb",
    "cpu_s",
)


@click.command()
@click.option("--cluster", "more", multiple=True, help="Also this CSV matrix or cluster file. Repeatable.")
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
@click.option("--smoke", is_flag=True, help="One case with little time, no verdict: does it run?")
def main(more: tuple[str, ...], results: Path, smoke: bool) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if smoke else {}
    path = results / ("smoke.csv" if smoke else "stages.csv")
    rows: list[dict[str, Any]] = [*read_rows(path)]
    for name in (*config["clusters"], *more):
        for model in config["models"]:
            for row in rows_of(name, model, config, rows):
                rows.append(row)
                write_rows(path, rows, COLUMNS)
    write_text(path.with_suffix(".json"), json.dumps(provenance(), indent=1))
    of_all = {PLANNED: (WITHOUT, IN_ORDER), FEWER: (WITHOUT, IN_ORDER, PLANNED, ALONE)}
    slower = []
    for row in rows:
        if row["way"] in of_all:
            simulated_s = float(row["simulated_s"])
            others = {way: float(_of(rows, row, way)["simulated_s"]) / simulated_s for way in of_all[row["way"]]}
            # What is asked which sites pay has less of the limit for the plan itself.
            least = 0.999 if row["way"] == PLANNED else 0.95
            slower += [way for way, factor in others.items() if factor < least]
            told = ", ".join(f"{way} x {factor:.2f}" for way, factor in others.items())
            where = f"{row['cluster']}, {row['model']}, {row['way']}"
            print(f"{where}: {row['sites']} sites, {row['stages']} stages {row['simulated_s']} s; {told}")
    sys.exit(0 if smoke else int(bool(slower)))


def rows_of(name: str, model: str, config: dict[str, Any], known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One for each way that is not known yet."""
    cluster, workload = cluster_and_workload(name, model, config["overrides"])
    limit_s = config["time_limit_s"]
    ways: dict[str, Callable[[], AnyPlan | None]] = {
        WITHOUT: lambda: planned(cluster, workload, time_limit_s=limit_s),
        IN_ORDER: lambda: _in_order(cluster, workload),
        PLANNED: lambda: in_stages(cluster, workload, time_limit_s=limit_s).plan,
        ALONE: lambda: alone(cluster, workload),
        FEWER: lambda: (
            plan_sites(Asked(cluster=cluster, workload=workload, wishes=StageWishes()), fewer=True, time_limit_s=limit_s).best
        ),
    }
    case = {"cluster": Path(name).stem, "model": model}
    for way, make in ways.items():
        if any({**row, **case, "way": way} == row for row in known):
            continue
        began_s = time.process_time()
        try:
            made = make()
        except PipelineError as error:
            print(f"{name}, {model}, {way}: {error}", file=sys.stderr)
            continue
        if made is None:
            continue
        cpu_s = time.process_time() - began_s
        row = {**case, "way": way, **_figures(made), "cpu_s": f"{cpu_s:.1f}"}
        if way == FEWER:
            row["bound_s"] = f"{least_of_any(cluster, workload, StageWishes()):.4g}"
        print(row, flush=True)
        yield row


def _in_order(cluster: Cluster, workload: Workload) -> PipelinePlan:
    """The fastest of equally large stages in the cluster's order with one baseline in all of them (``simulator.pipeline``)."""
    return fastest_pipeline(baseline_plan(cluster, workload, Baseline.EP)).plan


def _figures(made: AnyPlan) -> dict[str, Any]:
    if isinstance(made, PipelinePlan):
        told = predicted(costed(made), {})
        times = told.step, simulate_pipeline(made).step_s
        wan, memory = told.wan_bytes, told.memory_bytes
        shape = {"stages": len(made.stages), "micro_batches": made.micro_batches, "ahead": made.ahead}
    else:
        times = made.predicted.expected_s, simulate_step(made).step_s
        wan, memory = made.predicted.wan_bytes, memory_use(made).fullest_bytes
        shape = {"stages": 1, "micro_batches": made.workload.training.micro_batches, "ahead": 0}
    return {
        "sites": made.cluster.sizes[0],
        **shape,
        "expected_s": f"{times[0]:.4g}",
        "simulated_s": f"{times[1]:.4g}",
        "bound_s": f"{made.solver.bound:.4g}" if made.solver is not None else "",
        "wan_gb": f"{wan / 1e9:.4g}",
        "memory_gb": f"{memory / 1e9:.4g}",
    }


def _of(rows: list[dict[str, Any]], row: dict[str, Any], way: str) -> dict[str, Any]:
    """The row of the same case for another way; infinitely slow where there is none."""
    same = [one for one in rows if (one["cluster"], one["model"], one["way"]) == (row["cluster"], row["model"], way)]
    return same[0] if same else {"simulated_s": "inf"}


if __name__ == "__main__":
    main()
