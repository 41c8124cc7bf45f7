"""How the time and the proven gap of a plan grow with the number of sites.

    .venv/bin/python experiments/planner-scale/run.py [--sites 10,30,100]

Synthetic access links (no measured data): equal sites, ten kinds, all different. One row each in ``results/scale.csv``.
"""

from __future__ import annotations

import csv
import resource
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from hybridep.config import build
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import plan

HERE = Path(__file__).resolve().parent
KINDS = ("equal", "ten kinds", "different")
COLUMNS = ("kind", "sites", "wall_s", "step_s", "bound_s", "gap", "ep_s", "full_gather_s", "peak_memory_gb")


def cluster_of(kind: str, sites: int) -> Cluster:
    """Eight ranks a site; access links of 2 to 16 Gbps each way where sites differ."""
    rng = np.random.default_rng(0)
    rates = np.tile(rng.uniform(2, 16, (10, 2)), (sites // 10 + 1, 1)) if kind == "ten kinds" else rng.uniform(2, 16, (sites, 2))
    data: dict[str, Any] = {
        "name": f"{kind} {sites}",
        "levels": [
            {"name": "dc", "size": sites, "bandwidth": "10 Gbps", "latency": "30 ms"},
            {"name": "gpu", "size": 8, "bandwidth": "2400 Gbps", "latency": "5 us"},
        ],
        "gpu": {"throughput": "150 TFLOPS", "memory": "80 GB", "memory_bandwidth": "2 TB/s"},
    }
    if kind != "equal":
        data["sites"] = [
            {"name": f"s{i}", "up": f"{rates[i, 0]:.3f} Gbps", "down": f"{rates[i, 1]:.3f} Gbps"} for i in range(sites)
        ]
    return build(Cluster, data, "config")


def workload() -> Workload:
    """256 small experts, top-8, in each of 16 layers."""
    model = {
        "num_layers": 16,
        "hidden_size": 2048,
        "num_heads": 16,
        "vocab_size": 32000,
        "num_experts": 256,
        "top_k": 8,
        "expert_ffn_size": 512,
    }
    training = {"sequence_length": 4096, "micro_batch_size": 1, "micro_batches": 4, "dtype": "bf16"}
    return build(Workload, {"name": "256 experts", "model": model, "training": training}, "config")


@click.command(help=__doc__)
@click.option("--sites", default="10,30,100,300,1000", show_default=True)
@click.option("--time-limit", "time_limit_s", default=30.0, show_default=True)
def main(sites: str, time_limit_s: float) -> None:
    out = HERE / "results" / "scale.csv"
    out.parent.mkdir(exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        for size in (int(text) for text in sites.split(",")):
            for kind in KINDS:
                cluster = cluster_of(kind, size)
                started = time.perf_counter()
                made = plan(cluster, workload(), time_limit_s=time_limit_s)
                wall_s = time.perf_counter() - started
                assert made.solver is not None and made.prediction is not None
                row = {
                    "kind": kind,
                    "sites": size,
                    "wall_s": f"{wall_s:.2f}",
                    "step_s": f"{made.solver.objective:.5g}",
                    "bound_s": f"{made.solver.bound:.5g}",
                    "gap": f"{made.solver.gap:.4f}",
                    "ep_s": f"{made.prediction.baselines['ep']:.5g}",
                    "full_gather_s": f"{made.prediction.baselines['full_gather']:.5g}",
                    "peak_memory_gb": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f}",
                }
                writer.writerow(row)
                stream.flush()
                click.echo("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
