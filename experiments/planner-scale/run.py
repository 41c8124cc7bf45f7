"""How the time and the proven gap of a plan grow with the number of sites.

    .venv/bin/python experiments/planner-scale/run.py [--sites 10,30,100] [--figure TABLE]

Synthetic access links (no measured data): equal sites, ten kinds, all different. One row each in ``results/scale.csv``.
Limits are seconds of computation of the planner's process, not of wall time.
"""

from __future__ import annotations

import csv
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np

from hybridep.config import build
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import plan
from planner.clock import timed_by

HERE = Path(__file__).resolve().parent
KINDS = ("equal", "ten kinds", "different")
COLUMNS = ("kind", "sites", "cpu_s", "wall_s", "step_s", "bound_s", "gap", "ep_s", "full_gather_s", "peak_memory_gb")


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


def planned(kind: str, size: int, time_limit_s: float) -> dict[str, Any]:
    """One row; in a process of its own, whose peak memory counts everything that it imports."""
    cluster = cluster_of(kind, size)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    # The limit counts this process's own computation, as on a machine that does nothing else.
    with timed_by(time.process_time):
        made = plan(cluster, workload(), time_limit_s=time_limit_s)
    cpu_s, wall_s = time.process_time() - started_cpu_s, time.monotonic() - started_s
    assert made.solver is not None and made.prediction is not None
    return {
        "kind": kind,
        "sites": size,
        "cpu_s": f"{cpu_s:.2f}",
        "wall_s": f"{wall_s:.2f}",
        "step_s": f"{made.solver.objective:.5g}",
        "bound_s": f"{made.solver.bound:.5g}",
        "gap": f"{made.solver.gap:.4f}",
        "ep_s": f"{made.prediction.baselines['ep']:.5g}",
        "full_gather_s": f"{made.prediction.baselines['full_gather']:.5g}",
        "peak_memory_gb": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f}",
    }


def draw(table: Path, figure: Path) -> None:
    """Time, gap and memory over the number of sites."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(csv.DictReader(line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith("#")))
    drawing, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    panels = (("cpu_s", "planning, seconds of one core"), ("gap", "gap proven"), ("peak_memory_gb", "peak memory, GB"))
    for axis, (column, label) in zip(axes, panels, strict=True):
        for kind in KINDS:
            points = [(int(row["sites"]), float(row[column])) for row in rows if row["kind"] == kind]
            axis.plot(*zip(*points, strict=True), marker="o", label=kind)
        axis.set(xscale="log", xlabel="sites of 8 ranks", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend()
    drawing.savefig(figure, dpi=110)


@click.command(help=__doc__)
@click.option("--sites", default="10,30,100,300,1000,3000", show_default=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option("--time-limit", "time_limit_s", default=60.0, show_default=True)
@click.option("--figure", "table", type=click.Path(path_type=Path), help="Only draw this table again, beside it.")
def main(sites: str, kinds: str, time_limit_s: float, table: Path | None) -> None:
    if table is not None:
        draw(table, table.with_name("scale.png"))
        return
    out = HERE / "results" / "scale.csv"
    out.parent.mkdir(exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        for size in (int(text) for text in sites.split(",")):
            for kind in kinds.split(","):
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                    row = alone.submit(planned, kind, size, time_limit_s).result()
                writer.writerow(row)
                stream.flush()
                click.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    draw(out, out.with_name("scale.png"))


if __name__ == "__main__":
    main()
