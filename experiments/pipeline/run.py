"""HybridEP's plans against pipelines over the same sites: stages of layers at groups of sites, experts inside each.

    .venv/bin/python experiments/pipeline/run.py [--smoke]

One row per workload, number of sites and bandwidth in results/steps.csv (those that are there are not done again): seconds of the
plan, of each other system and of the fastest pipeline, where the pipeline's time goes, and the memory of plan and pipeline.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import click
import yaml

from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands.inputs import load_workload
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.config import build
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.traffic import step_traffic
from hybridep.workload import Workload
from planner import alone, memory_use
from planner import plan as search
from planner.memory import ACTIVATIONS
from simulator.pipeline import PipelineStep, fastest_pipeline
from simulator.stages import timed
from simulator.step import simulate_step
from simulator.token_exchange import Route, TokenExchange

HERE = Path(__file__).resolve().parent
Row = dict[str, str]
BASELINES = (Baseline.EP, Baseline.FULL_GATHER, Baseline.EP_IN_DC)
FLAT = TokenExchange(route=Route.DIRECT, per_choice=True)
KEY = ("workload", "sites", "bandwidth")


def cluster_of(config: dict[str, Any], sites: int, bandwidth: str) -> Cluster:
    outer, *inner = config["levels"]
    levels = [outer | {"size": sites, "bandwidth": bandwidth}, *inner]
    return build(Cluster, {"name": f"{sites} sites", "levels": levels, "gpu": config["gpu"]}, "config.yaml")


def workload_of(name: str, recipe: dict[str, Any], sites: int) -> Workload:
    if "base" in recipe:
        return load_workload(recipe["base"], recipe.get("overrides", ()))
    model = recipe["model"]
    if model["num_experts"] == "per site":
        model = model | {"num_experts": sites}
    return build(Workload, {"name": name, "model": model, "training": recipe["training"]}, "config.yaml")


def step_s(plan: Plan, exchange: TokenExchange | None = None) -> float:
    """Simulated: the first, a middle and the last micro-batch; the middle one stands for all between, which are alike."""
    return timed(plan, lambda one, routing: simulate_step(one, routing, exchange=exchange)).busy_s


def pipeline_bytes(pipeline: PipelineStep) -> float:
    """Of the fullest rank: a stage's memory as the planner counts it, with the activations of all its micro-batches in flight."""
    needs = []
    for number, stage in enumerate(pipeline.stages):
        use = memory_use(stage.plan)
        needs.append(use.fullest_bytes + (pipeline.plan.in_flight(number) - 1) * use.parts_bytes[ACTIVATIONS])
    return max(needs)


def wan_bytes(plan: Plan) -> float:
    """Between sites in one step, all ranks together."""
    return sum(float(sent.sum()) for key, sent in step_traffic(plan).items() if key.level == 0)


def row_of(config: dict[str, Any], name: str, sites: int, bandwidth: str) -> Row:
    recipe = config["workloads"][name]
    cluster, workload = cluster_of(config, sites, bandwidth), workload_of(name, recipe, sites)
    plan = search(cluster, workload, time_limit_s=config["planning_time_s"])
    others_s = {
        **{baseline.value: step_s(baseline_plan(cluster, workload, baseline)) for baseline in BASELINES},
        "flat_ep": step_s(baseline_plan(cluster, workload, Baseline.EP), FLAT),
    }
    pipeline, plan_s, one = fastest_pipeline(plan), step_s(plan), alone(cluster, workload)
    assert one is not None
    best = min(others_s, key=lambda other: others_s[other])
    inside = sum(wan_bytes(stage.plan) for stage in pipeline.stages)
    seconds = {
        "plan_s": plan_s,
        **{f"{other}_s": value for other, value in others_s.items()},
        "pipeline_s": pipeline.step_s,
        "plan_over_pipeline": plan_s / pipeline.step_s,
        "alone_s": step_s(one),
        "work_s": pipeline.work_s,
        "bubble_s": pipeline.bubble_s,
        "activations_s": pipeline.transfers_s,
        "plan_wan_gb": wan_bytes(plan) / 1e9,
        "activation_gb": pipeline.activation_bytes / 1e9,
        "other_pipeline_wan_gb": inside / 1e9,
        "plan_memory_gb": memory_use(plan).fullest_bytes / 1e9,
        "pipeline_memory_gb": pipeline_bytes(pipeline) / 1e9,
    }
    domains = " ".join(f"{level} {size}" for level, size in plan.layers[0].domains.items())
    return {
        **dict(zip(KEY, (name, str(sites), bandwidth), strict=True)),
        **{column: f"{value:.5g}" for column, value in seconds.items()},
        "plan": f"{domains}, {plan.layers[0].residency.value}" + (f", {len(plan.layers)} groups" if len(plan.layers) > 1 else ""),
        "best_other": best,
        "stages": str(len(pipeline.stages)),
        "inside": pipeline.plan.provenance["baseline"],
        "in_flight": str(pipeline.plan.in_flight(0)),
    }


@click.command(help=__doc__)
@click.option("--smoke", is_flag=True, help="The smallest setting: does it run?")
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
def main(smoke: bool, results: Path) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    chosen = config["smoke"] if smoke else config
    results = results / "smoke" if smoke else results
    results.mkdir(parents=True, exist_ok=True)
    table = results / "steps.csv"
    rows = read_rows(table)
    done = {tuple(row[key] for key in KEY) for row in rows}
    points = [
        (name, *point)
        for name in chosen["workloads"]
        for point in product(*(config["workloads"][name].get(key, chosen[key]) for key in ("sites", "bandwidth")))
    ]
    for name, sites, bandwidth in points:
        if (name, str(sites), bandwidth) in done:
            continue
        rows.append(row_of(config, name, sites, bandwidth))
        write_rows(table, rows)
        click.echo("  ".join(f"{key} {value}" for key, value in rows[-1].items() if value), err=True)
    write_provenance(results)


if __name__ == "__main__":
    main()
