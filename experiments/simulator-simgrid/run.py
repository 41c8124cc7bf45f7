"""Completion of every flow here and in SimGrid, on random networks; and how long both take on uneven All-to-Alls.

taskset -c 1 .venv/bin/python experiments/simulator-simgrid/run.py --simgrid-python /usr/bin/python3
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

from hybridep.arrays import FloatArray, IntArray
from hybridep.commands.tables import write_rows
from hybridep.provenance import provenance
from simulator.engine import Engine
from simulator.network import Network, Transfers

HERE = Path(__file__).resolve().parent


def in_simgrid(python: str, capacity: FloatArray, paths: IntArray, sizes: FloatArray) -> dict[str, Any]:
    """end_s [flows], cpu_s and version. SimGrid takes whole bytes."""
    flows = [[path[path >= 0].tolist(), int(size)] for path, size in zip(paths, sizes, strict=True)]
    work = json.dumps({"capacity": capacity.tolist(), "flows": flows})
    ran = subprocess.run([python, HERE / "fluid.py"], input=work, capture_output=True, text=True, check=True, timeout=900)
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def here(capacity: FloatArray, paths: IntArray, sizes: FloatArray) -> tuple[FloatArray, float]:
    """When each flow ends, and the CPU seconds that took."""
    end_s = np.zeros(sizes.size)
    engine = Engine()
    began_s = time.process_time()
    network = Network(engine, capacity)

    def note(groups: IntArray, last: IntArray) -> None:
        end_s[groups] = engine.now_s

    network.send(Transfers(links=paths, latency_s=np.full(sizes.size, 1e-6), size_bytes=sizes), note)
    engine.run()
    return end_s, time.process_time() - began_s


def random_load(rng: np.random.Generator, config: dict[str, Any]) -> tuple[FloatArray, IntArray, FloatArray]:
    num_links = int(rng.integers(2, config["most_links"] + 1))
    num_flows = int(rng.integers(2, config["most_flows"] + 1))
    width = min(num_links, config["longest_path"])
    paths = np.full((num_flows, width), -1, dtype=np.int64)
    for flow in range(num_flows):
        length = int(rng.integers(1, width + 1))
        paths[flow, :length] = rng.choice(num_links, length, replace=False)
    return rng.uniform(1e9, 2e10, num_links), paths, np.round(1e7 * rng.lognormal(0, config["size_spread"], num_flows))


def uneven_all_to_all(rng: np.random.Generator, hosts: int) -> tuple[FloatArray, IntArray, FloatArray]:
    source, destination = np.array([(a, b) for a in range(hosts) for b in range(hosts) if a != b]).T
    paths = np.stack([2 * source, 2 * destination + 1], axis=1)
    return np.full(2 * hosts, 12.5e9), paths, np.round(1e6 * rng.lognormal(-0.5, 1, source.size))


@click.command()
@click.option("--simgrid-python", default="python3", help="An interpreter that has the simgrid module.")
def main(simgrid_python: str) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    rng = np.random.default_rng(config["seed"])
    loads = [(f"random {number}", random_load(rng, config)) for number in range(config["networks"])]
    loads += [(f"all-to-all of {hosts}", uneven_all_to_all(rng, hosts)) for hosts in config["all_to_all"]]
    here(*loads[0][1])  # compiles
    rows = []
    for name, load in loads:
        theirs = in_simgrid(simgrid_python, *load)
        other = np.array(theirs["end_s"])
        end_s, cpu_s = here(*load)
        rows.append(
            {
                "load": name,
                "links": load[0].size,
                "flows": load[2].size,
                "makespan_difference": abs(end_s.max() / other.max() - 1),
                "largest_flow_difference": float(np.abs(end_s / other - 1).max()),
                "cpu_s": cpu_s,
                "simgrid_cpu_s": theirs["cpu_s"],
                "simgrid": theirs["version"],
            }
        )
        click.echo(rows[-1], err=True)
    write_rows(HERE / "results" / "simgrid.csv", rows)
    (HERE / "results" / "provenance.json").write_text(json.dumps(provenance() | {"config": config}, indent=1))
    worst = {key: max(row[key] for row in rows) for key in ("makespan_difference", "largest_flow_difference")}
    click.echo(json.dumps({"loads": len(rows), **worst}))


if __name__ == "__main__":
    main()
