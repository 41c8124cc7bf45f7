"""How long the network takes for complete All-to-Alls, every flow by itself.

    .venv/bin/python experiments/simulator-speed/run.py [--sizes uniform] [--most-hosts 256]

N hosts, each behind a full-duplex link into a core that is never full; N (N - 1) flows at once, of one size or of lognormal
ones. One process per run, after compiled code has been loaded; CPU seconds of building the flows' tables and simulating
them. Rows land in results/speed.csv; runs that are there already are not repeated.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

from hybridep.commands.tables import read_rows, write_provenance, write_rows
from simulator.engine import Engine
from simulator.network import Network, Transfers

HERE = Path(__file__).resolve().parent
COLUMNS = (
    *("sizes", "hosts", "flows", "tolerance", "cpu_s", "least_s", "most_s", "wall_s", "allowed_s"),
    *("simulated_ms", "busiest_link_ms", "largest_cut", "peak_memory_gb"),
)


def all_to_all(sizes: str, num_hosts: int, tolerance: float, config: dict[str, Any]) -> dict[str, Any]:
    """One run."""
    source, destination = (ends.ravel() for ends in np.indices((num_hosts, num_hosts)))
    apart = source != destination
    source, destination = source[apart], destination[apart]
    size_bytes = np.full(source.size, config["size"])
    if sizes == "skewed":
        size_bytes *= np.random.default_rng(config["seed"]).lognormal(-0.5, 1.0, source.size)
    transfers = Transfers(
        links=np.stack([2 * source, 2 * destination + 1], axis=1).astype(np.int32),
        latency_s=np.full(source.size, config["latency"]),
        size_bytes=size_bytes,
        groups=np.zeros((source.size, 1), dtype=np.int64),
    )
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    engine = Engine()
    network = Network(engine, np.full(2 * num_hosts, config["link"]), tolerance)
    network.send(transfers, lambda groups, last: None)
    end_s = engine.run()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return {
        "flows": source.size,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "simulated_ms": end_s * 1e3,
        "busiest_link_ms": (network.link_bytes.max() / config["link"] + config["latency"]) * 1e3,
        "largest_cut": network.largest_cut,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def rows_of(case: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    """A case's repeats as one row: the median, least and most CPU seconds."""
    command = [sys.executable, __file__, "--inside", case["sizes"], str(case["hosts"]), str(case["tolerance"])]
    runs = []
    for _ in range(case.get("repeats", config["repeats"])):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise click.ClickException(f"{case}: {ran.stderr.strip().splitlines()[-1:]}")
        runs.append(json.loads(ran.stdout))
    cpu_s = [run["cpu_s"] for run in runs]
    row = {**case, **runs[0], "cpu_s": statistics.median(cpu_s), "least_s": min(cpu_s), "most_s": max(cpu_s)}
    row["wall_s"] = statistics.median(run["wall_s"] for run in runs)
    return {column: f"{row[column]:.6g}" if isinstance(row[column], float) else str(row[column]) for column in COLUMNS}


@click.command(help=__doc__)
@click.option("--sizes", type=click.Choice(["uniform", "skewed"]), default=None, help="[default: both]")
@click.option("--most-hosts", type=int, default=None, help="Leave larger cases out.")
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
@click.option("--inside", nargs=3, type=(str, int, float), hidden=True)
def main(sizes: str | None, most_hosts: int | None, results: Path, inside: tuple[str, int, float] | None) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    if inside is not None:
        all_to_all(inside[0], 4, inside[2], config)
        click.echo(json.dumps(all_to_all(*inside, config)))
        return
    results.mkdir(parents=True, exist_ok=True)
    table = results / "speed.csv"
    rows = read_rows(table)
    known = {(row["sizes"], row["hosts"]) for row in rows}
    for case in config["cases"]:
        if (sizes or case["sizes"]) != case["sizes"] or case["hosts"] > (most_hosts or case["hosts"]):
            continue
        if (case["sizes"], str(case["hosts"])) not in known:
            rows.append(rows_of(case, config))
            write_rows(table, rows, COLUMNS)
            click.echo("  ".join(f"{key} {value}" for key, value in rows[-1].items()), err=True)
    write_provenance(results)


if __name__ == "__main__":
    main()
