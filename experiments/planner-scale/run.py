"""How the time and the proven gap of a plan grow with the number of sites.

    .venv/bin/python experiments/planner-scale/run.py [--sites 10,30,100] [--input CSV] [--figure TABLE]

Sites of eight ranks: equal; ten kinds of regions with a tenth of the sites each; three and ten kinds of sites; all different; and
with ``--input`` (columns src, dst, gbps_sent) sites at measured regions. One row each in ``results/scale.csv``. Limits are
seconds of computation of the planner's process, not of wall time.
"""

from __future__ import annotations

import csv
import os
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
EQUAL, REGIONS, THREE_KINDS, TEN_KINDS, DIFFERENT, MEASURED = KINDS = (
    "equal",
    "regions",
    "three kinds",
    "ten kinds",
    "different",
    "measured",
)
SPREAD = 0.1
"""Rates of sites at one measured region differ from the region's by up to this share, so that no two sites are alike."""
COLUMNS = ("kind", "sites", "cpu_s", "wall_s", "step_s", "bound_s", "gap", "ep_s", "full_gather_s", "peak_memory_gb")


def measured_rates(table: Path) -> np.ndarray:
    """[regions, 2] Gbps up and down: the largest of a region's pairs, as everywhere here."""
    with table.open(newline="", encoding="utf-8") as stream:
        rows = [(row["src"], row["dst"], float(row["gbps_sent"])) for row in csv.DictReader(stream) if row["src"] != row["dst"]]
    names = sorted({src for src, _, _ in rows})
    return np.array([[max(rate for *ends, rate in rows if ends[way] == name) for way in (0, 1)] for name in names])


def rates_of(kind: str, sites: int, measured: np.ndarray | None) -> np.ndarray:
    """[sites, or ten, 2] Gbps up and down."""
    rng = np.random.default_rng(0)
    if kind in (REGIONS, THREE_KINDS, TEN_KINDS):
        few = rng.uniform(2, 16, (3 if kind == THREE_KINDS else 10, 2))
        return few if kind == REGIONS else np.tile(few, (sites // len(few) + 1, 1))[:sites]
    if kind == MEASURED:
        assert measured is not None
        return measured[rng.integers(len(measured), size=sites)] * rng.uniform(1 - SPREAD, 1 + SPREAD, (sites, 2))
    return rng.uniform(2, 16, (sites, 2))


def cluster_of(kind: str, sites: int, measured: np.ndarray | None = None) -> Cluster:
    """Eight ranks a site; access links of 2 to 16 Gbps each way where sites, or regions, differ."""
    outer = {"bandwidth": "10 Gbps", "latency": "30 ms"}
    levels: list[dict[str, Any]] = [{"name": "dc", "size": sites, **outer}]
    if kind == REGIONS:
        inner = {"name": "dc", "size": sites // 10, "bandwidth": "10 Gbps", "latency": "1 ms"}
        levels = [{"name": "region", "size": 10, **outer}, inner]
    data: dict[str, Any] = {
        "name": f"{kind} {sites}",
        "levels": [*levels, {"name": "gpu", "size": 8, "bandwidth": "2400 Gbps", "latency": "5 us"}],
        "gpu": {"throughput": "150 TFLOPS", "memory": "80 GB", "memory_bandwidth": "2 TB/s"},
    }
    if kind != EQUAL:
        data["sites"] = [
            {"name": f"s{i}", "up": f"{up:.3f} Gbps", "down": f"{down:.3f} Gbps"}
            for i, (up, down) in enumerate(rates_of(kind, sites, measured))
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


def planned(kind: str, size: int, time_limit_s: float, measured: np.ndarray | None) -> dict[str, Any]:
    """One row; in a process of its own, whose peak memory counts everything that it imports."""
    cluster = cluster_of(kind, size, measured)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    # The limit counts this process's own computation, as on a machine that does nothing else.
    with timed_by(time.process_time):
        made = plan(cluster, workload(), time_limit_s=time_limit_s, free_homes=True)
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
            if points := [(int(row["sites"]), float(row[column])) for row in rows if row["kind"] == kind]:
                axis.plot(*zip(*points, strict=True), marker="o", label=kind)
        axis.set(xscale="log", xlabel="sites of 8 ranks", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend()
    drawing.savefig(figure, dpi=110)


@click.command(help=__doc__)
@click.option("--sites", default="10,30,100,300,1000,3000", show_default=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True, help=f"Without --input all but {MEASURED}.")
@click.option("--input", "rates", type=click.Path(path_type=Path, exists=True), help="A table of measured pairs of regions.")
@click.option("--time-limit", "time_limit_s", default=60.0, show_default=True)
@click.option("--figure", "table", type=click.Path(path_type=Path), help="Only draw this table again, beside it.")
def main(sites: str, kinds: str, rates: Path | None, time_limit_s: float, table: Path | None) -> None:
    if table is not None:
        draw(table, table.with_name("scale.png"))
        return
    out = HERE / "results" / "scale.csv"
    measured = None if rates is None else measured_rates(rates)
    if unknown := set(kinds.split(",")) - set(KINDS):
        raise click.UsageError(f"--kinds: no {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    chosen = [kind for kind in kinds.split(",") if kind != MEASURED or measured is not None]
    if not chosen:
        raise click.UsageError(f"--kinds {MEASURED} needs --input, a table of measured pairs")
    # Of one core: BLAS would take all there are.
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    out.parent.mkdir(exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        for size in (int(text) for text in sites.split(",")):
            for kind in chosen:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                    row = alone.submit(planned, kind, size, time_limit_s, measured).result()
                writer.writerow(row)
                stream.flush()
                click.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    draw(out, out.with_name("scale.png"))


if __name__ == "__main__":
    main()
