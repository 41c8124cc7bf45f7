"""How the time and memory of one simulated training step grow with the number of datacenters.

    .venv/bin/python experiments/simulator-scale/run.py [--sites 10,100,1000] [--kinds equal]

Mixtral 8x7B, 32 layers, forward and backward, 8 GPUs a site, expert parallelism. Equal sites, and sites whose access links all
differ (synthetic rates, no measured data). And on the latter what the planner makes of 256 small experts in each of 16 layers and
four micro-batches: with all ranks, and with the ranks of a site taken for alike. One process per point; one row each in
results/scale.csv, and a figure.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import matplotlib
import yaml

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands.inputs import load_workload
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.config import build
from hybridep.plan import Plan
from hybridep.timeline import write_chrome_trace
from hybridep.topology import Cluster
from planner import plan as search
from simulator.precision import Precision
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
COLUMNS = (
    *("kind", "sites", "gpus", "tolerance", "cpu_s", "wall_s", "step_s", "largest_cut", "peak_memory_gb"),
    *("trace_mb", "trace_s"),
)
KINDS = EQUAL, DIFFERENT, PLANNED, MERGED = ("equal", "different", "planned", "planned merged")
"""Merged: one rank for each site."""


def cluster_of(kind: str, sites: int) -> Cluster:
    """8 GPUs a site; all access links alike or all different."""
    data: dict[str, Any] = {
        "name": f"{kind} {sites}",
        "levels": [
            {"name": "dc", "size": sites, "bandwidth": "10 Gbps", "latency": "30 ms"},
            {"name": "gpu", "size": 8, "bandwidth": "2400 Gbps", "latency": "5 us"},
        ],
        "gpu": {"throughput": "150 TFLOPS", "memory": "80 GB", "memory_bandwidth": "2 TB/s"},
    }
    if kind != EQUAL:
        rates = np.random.default_rng(0).uniform(2, 16, (sites, 2))
        data["sites"] = [
            {"name": f"s{i}", "up": f"{up:.3f} Gbps", "down": f"{down:.3f} Gbps"} for i, (up, down) in enumerate(rates)
        ]
    return build(Cluster, data, "config")


def plan_of(kind: str, sites: int) -> Plan:
    """Expert parallelism, or what the planner finds in 20 s."""
    if kind not in (PLANNED, MERGED):
        workload = load_workload("mixtral-8x7b", ["training.micro_batches=1"])
        return baseline_plan(cluster_of(kind, sites), workload, Baseline.EP)
    model = {"hidden_size": 2048, "num_experts": 256, "top_k": 8, "expert_ffn_size": 512, "ffn": "swiglu"}
    training = {"sequence_length": 4096, "micro_batch_size": 1, "micro_batches": 4}
    overrides = [f"model.{key}={value}" for key, value in model.items()]
    overrides += [f"training.{key}={value}" for key, value in training.items()]
    return search(cluster_of(kind, sites), load_workload("gpt-large", overrides), time_limit_s=20)


def measure(kind: str, sites: int, tolerance: float) -> dict[str, Any]:
    """In a process of its own, after the compiled code has been loaded."""
    precision = Precision(tolerance=tolerance, one_rank_per_site=kind == MERGED)
    simulate_step(plan_of(kind, 3), precision=precision)
    # What planning takes is another experiment's.
    planned = plan_of(kind, sites) if kind in (PLANNED, MERGED) else None
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = simulate_step(planned or plan_of(kind, sites), precision=precision)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    peak_memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        trace_s = time.process_time()
        write_chrome_trace(trace, result.spans())
        trace_s = time.process_time() - trace_s
        trace_mb = trace.stat().st_size / 1e6
    return {
        "kind": kind,
        "sites": sites,
        "gpus": 8 * sites,
        "tolerance": tolerance,
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(wall_s, 3),
        "step_s": result.step_s,
        "largest_cut": result.largest_cut,
        "peak_memory_gb": round(peak_memory_gb, 3),
        "trace_mb": round(trace_mb, 2),
        "trace_s": round(trace_s, 2),
    }


@click.command(help=__doc__)
@click.option("--sites", default=None, help="Comma separated.  [default: as config.yaml has them]")
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
@click.option("--inside", nargs=3, type=(str, int, float), hidden=True)
def main(sites: str | None, kinds: str, results: Path, inside: tuple[str, int, float] | None) -> None:
    if inside is not None:
        click.echo(json.dumps(measure(*inside)))
        return
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    results.mkdir(parents=True, exist_ok=True)
    table = results / "scale.csv"
    rows = read_rows(table)
    for kind in kinds.split(","):
        for number in [int(text) for text in sites.split(",")] if sites else config[kind]["sites"]:
            if any((row["kind"], row["sites"]) == (kind, str(number)) for row in rows):
                continue
            command = [sys.executable, __file__, "--inside", kind, str(number), str(config[kind]["tolerance"])]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise click.ClickException(f"{kind}, {number} sites: {ran.stderr.strip().splitlines()[-1:]}")
            rows.append({key: str(value) for key, value in json.loads(ran.stdout).items()})
            write_rows(table, rows, COLUMNS)
            click.echo("  ".join(f"{key} {value}" for key, value in rows[-1].items()), err=True)
    write_provenance(results)
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = sorted((row for row in rows if row["kind"] == kind), key=lambda row: int(row["sites"]))
        axes.loglog([int(row["sites"]) for row in mine], [float(row["cpu_s"]) for row in mine], marker="o", label=kind)
    axes.set(xlabel="datacenters of 8 GPUs", ylabel="CPU seconds for one step, one core")
    axes.legend(frameon=False)
    figure.savefig(results / "scale.png", dpi=130)


if __name__ == "__main__":
    main()
