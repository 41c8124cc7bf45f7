"""How much longer than the busiest link's bytes / rate do exchanges take? In the lab, beside gloo's own collective.

Rows that are already in ``results/exchanges.csv`` are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybridep.commands.inputs import load_cluster
from hybridep.config import write_text
from hybridep.launch.host import child_environment
from hybridep.launch.lab import Lab, run_in_lab
from hybridep.launch.lab_links import UPLINK
from hybridep.launch.shaping import lab_spec, why_not_in_lab
from hybridep.provenance import provenance
from hybridep.topology import Cluster

HERE = Path(__file__).resolve().parent
COLUMNS = ["rate", "kind", "ideal_s", "median_s", "min_s", "max_s", "over_ideal"]
OURS = ("all-to-all", "all-to-all uneven", "gather", "gather in background")
MOST = 1.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    if given.inside:
        measure(config, given.inside, given.results)
        return 0
    for rate in config["rates"]:
        cluster = shaped(config, rate)
        reason = why_not_in_lab(cluster)
        if reason is not None:
            print(f"link-use needs the lab: {reason}", file=sys.stderr)
            return 2
        if any(row["rate"] == rate for row in read(given.results)):
            continue
        again = [sys.executable, __file__, "--inside", rate, "--results", str(given.results.resolve())]
        code = run_in_lab(again, lab_spec(cluster), child_environment())
        if code:
            return code
    return summarise(read(given.results))


def shaped(config: dict[str, Any], rate: str) -> Cluster:
    return load_cluster(config["cluster"], [f"levels.dc.bandwidth={rate}"])


def measure(config: dict[str, Any], rate: str, results: Path) -> None:
    cluster, lab = shaped(config, rate), Lab.current()
    sites, places = cluster.sizes
    bandwidth = cluster.levels[0].bandwidth
    message_bytes = int(bandwidth * config["seconds"] / (places * (sites - 1)))
    rng = np.random.default_rng(0)
    uneven = message_bytes * rng.lognormal(0.0, config["unevenness"], (sites, places, sites))
    uneven[np.arange(sites), :, np.arange(sites)] = 0
    uneven = uneven.astype(np.int64)
    busiest = max(int(uneven.sum(axis=(1, 2)).max()), int(uneven.sum(axis=(0, 1)).max()))
    settings = {
        "sites": sites,
        "places": places,
        "message_bytes": message_bytes,
        "uneven_bytes": uneven.tolist(),
        "repeats": config["repeats"],
    }
    ranks = []
    for rank in range(sites * places):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(sites * places),
            "MASTER_ADDR": lab.sites[0].address,
            "MASTER_PORT": "29500",  # free: every datacenter has its own network
            "GLOO_SOCKET_IFNAME": UPLINK,
        }
        words = [sys.executable, str(HERE / "ranks.py"), json.dumps(settings)]
        ranks.append(lab.spawn(lab.sites[rank // places].name, words, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    times = [[json.loads(line[5:]) for line in output.splitlines() if line.startswith("took ")] for output in outputs]
    taken: dict[str, list[float]] = {}
    for turn in zip(*times, strict=True):
        taken.setdefault(turn[0][0], []).append(max(end for _, _, end in turn) - min(begin for _, begin, _ in turn))
    rows = read(results)
    for kind, seconds in taken.items():
        ideal_s = (busiest if "uneven" in kind else message_bytes * places * (sites - 1)) / bandwidth
        seconds = seconds[1:]
        values = (ideal_s, statistics.median(seconds), min(seconds), max(seconds), statistics.median(seconds) / ideal_s)
        rows.append({"rate": rate, "kind": kind} | {name: f"{value:.4g}" for name, value in zip(COLUMNS[2:], values, strict=True)})
    lines = [",".join(COLUMNS), *(",".join(row[column] for column in COLUMNS) for row in rows)]
    write_text(results / "exchanges.csv", "\n".join(lines) + "\n")
    write_text(results / "provenance.json", json.dumps(provenance(), indent=1))


def read(results: Path) -> list[dict[str, str]]:
    path = results / "exchanges.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def summarise(rows: list[dict[str, str]]) -> int:
    """Print a line per rate and kind; 1 when one of ours takes more than ``MOST`` times the busiest link."""
    failed = False
    for row in rows:
        print(f"{row['rate']:>9} {row['kind']:22} {row['over_ideal']:>6} of the busiest link ({row['min_s']} to {row['max_s']} s)")
        failed |= row["kind"] in OURS and float(row["over_ideal"]) > MOST
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
