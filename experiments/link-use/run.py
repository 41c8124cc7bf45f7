"""How much longer than the busiest link's bytes / rate do exchanges take, and what of communication shows in a step?

In the lab; exchanges beside gloo's own collective, steps under several prefetch depths. What is already in ``results`` is not
measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybridep.commands.inputs import load_cluster
from hybridep.commands.lab_settings import run_script_in_lab
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.config import build
from hybridep.launch.lab import Lab
from hybridep.launch.lab_links import UPLINK
from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import step_cost
from runtime.mesh import host_store
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
EXCHANGES, STEPS = "exchanges.csv", "steps.csv"
COLUMNS = {
    EXCHANGES: ["rate", "kind", "ideal_s", "median_s", "min_s", "max_s", "over_ideal"],
    STEPS: ["case", "depth", "median_s", "min_s", "max_s", "predicted_s", "simulated_s", "compute_s", "link_s", "exposed"],
}
OURS = ("all-to-all", "all-to-all uneven", "gather", "gather in background")
MOST = 1.1
MOST_EXPOSED = 1.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="one rate, one case, no verdict: does it run?")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    if given.smoke:
        smoke = config["smoke"]
        config |= smoke | {"steps": config["steps"] | smoke["steps"]}
    folder = given.results.resolve() / "smoke" if given.smoke else given.results.resolve()
    if given.inside == STEPS:
        measure_steps(config["steps"], shaped(config, config["steps"]["rate"]), folder)
        return 0
    if given.inside:
        measured = [row for seconds in config["seconds"] for row in exchanges_of(config, given.inside, seconds)]
        write(folder, EXCHANGES, read_rows(folder / EXCHANGES) + measured)
        return 0
    todo = [rate for rate in config["rates"] if rate not in {row["rate"] for row in read_rows(folder / EXCHANGES)}]
    if len(read_rows(folder / STEPS)) < len(config["steps"]["cases"]) * len(config["steps"]["depths"]):
        todo.append(STEPS)
    for part in todo:
        cluster = shaped(config, config["steps"]["rate"] if part == STEPS else part)
        if code := run_script_in_lab(cluster, __file__, *sys.argv[1:], "--inside", part):
            return code
    code = summarise(read_rows(folder / EXCHANGES), read_rows(folder / STEPS))
    return 0 if given.smoke else code


def shaped(config: dict[str, Any], rate: str) -> Cluster:
    return load_cluster(config["cluster"], [f"levels.dc.bandwidth={rate}"])


def exchanges_of(config: dict[str, Any], rate: str, at_rate_s: float) -> list[dict[str, str]]:
    """A row per kind; the busiest link needs ``at_rate_s`` for the bytes of an even exchange."""
    cluster, lab = shaped(config, rate), Lab.current()
    sites, places = cluster.sizes
    bandwidth = cluster.levels[0].bandwidth
    message_bytes = int(bandwidth * at_rate_s / (places * (sites - 1)))
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
    taken: dict[str, list[float]] = {}
    for turn in zip(*run_ranks("exchanges.py", settings, lab, places), strict=True):
        taken.setdefault(turn[0][0], []).append(max(end for *_, end in turn) - min(begin for _, begin, _ in turn))
    rows = []
    for kind, seconds in taken.items():
        ideal_s = (busiest if "uneven" in kind else message_bytes * places * (sites - 1)) / bandwidth
        values = [ideal_s, *spread(seconds[1:]), statistics.median(seconds[1:]) / ideal_s]
        rows.append(dict(zip(COLUMNS[EXCHANGES], [rate, kind, *(f"{value:.4g}" for value in values)], strict=True)))
    return rows


def measure_steps(config: dict[str, Any], cluster: Cluster, results: Path) -> None:
    lab = Lab.current()
    rows = read_rows(results / STEPS)
    for name, case in config["cases"].items():
        if any(row["case"] == name for row in rows):
            continue
        plan = plan_of(config, cluster, dict(case), name)
        settings = {"plan": plan.model_dump(mode="json", exclude_none=True)}
        settings |= {key: config[key] for key in ("depths", "turns", "steps")}
        taken: dict[int, list[float]] = {depth: [] for depth in config["depths"]}
        for turn in zip(*run_ranks("steps.py", settings, lab, cluster.sizes[1]), strict=True):
            if turn[0][2] > 1:
                taken[turn[0][1]].append(max(end for *_, end in turn) - min(begin for *_, begin, _ in turn))
        for depth, seconds in taken.items():
            scheduled = plan.model_copy(update={"schedule": Schedule(prefetch=depth)})
            cost = step_cost(scheduled)
            link_s = float(cost.link_s.max())
            values = [*spread(seconds), cost.step_s, simulate_step(scheduled).step_s, cost.compute_s, link_s]
            values.append((statistics.median(seconds) - cost.compute_s) / link_s)
            rows.append(dict(zip(COLUMNS[STEPS], [name, str(depth), *(f"{value:.4g}" for value in values)], strict=True)))
        write(results, STEPS, rows)


def plan_of(config: dict[str, Any], cluster: Cluster, case: dict[str, Any], name: str) -> Plan:
    gpu = cluster.gpu.model_dump(mode="json") | {key: case.pop(key) for key in ("throughput", "block_overhead")}
    slower = build(Cluster, cluster.model_dump(mode="json", exclude_none=True) | {"gpu": gpu}, "config.yaml")
    domains, residency = {level: case.pop(level) for level in ("dc", "gpu")}, Residency(case.pop("residency"))
    workload = build(Workload, {"name": name, "model": config["model"], "training": case}, "config.yaml")
    layers = workload.model.num_moe_layers
    group = LayerGroup(first_layer=0, num_layers=layers, domains=domains, migration={}, residency=residency)
    return Plan(cluster=slower, workload=workload, layers=(group,))


def run_ranks(program: str, settings: dict[str, Any], lab: Lab, places: int) -> list[list[Any]]:
    """What each rank printed behind ``took``."""
    store = host_store(lab.driver_address, timeout_s=60.0)
    with tempfile.TemporaryDirectory(prefix="hybridep-") as folder:
        path = Path(folder) / "settings.json"
        num_ranks = len(lab.sites) * places
        join = {"host": lab.driver_address, "port": store.port, "num_ranks": num_ranks}
        path.write_text(json.dumps(settings | join))
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": UPLINK}
        words = [sys.executable, str(HERE / program), str(path)]
        ranks = [
            lab.spawn(site.name, [*words, str(number * places + place)], env=environment, stdout=subprocess.PIPE, text=True)
            for number, site in enumerate(lab.sites)
            for place in range(places)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{program}: a rank failed")
    return [[json.loads(line[5:]) for line in output.splitlines() if line.startswith("took ")] for output in outputs]


def spread(seconds: list[float]) -> tuple[float, float, float]:
    return statistics.median(seconds), min(seconds), max(seconds)


def write(results: Path, name: str, rows: list[dict[str, str]]) -> None:
    write_rows(results / name, rows, COLUMNS[name])
    write_provenance(results)


def summarise(exchanges: list[dict[str, str]], steps: list[dict[str, str]]) -> int:
    """Print a line per row; 1 when one of our exchanges takes more than ``MOST`` times the busiest link, or what a step takes
    beyond its computation is more than ``MOST_EXPOSED`` times the busiest link's bytes / rate."""
    failed = False
    for row in exchanges:
        print(
            f"{row['rate']:>9} {row['kind']:22} {row['over_ideal']:>6} of {row['ideal_s']:>5} s on the busiest link "
            f"({row['min_s']} to {row['max_s']} s)"
        )
        failed |= row["kind"] in OURS and float(row["over_ideal"]) > MOST
    for row in steps:
        print(
            f"{row['case']:>24} depth {row['depth']}: {row['median_s']} s ({row['min_s']} to {row['max_s']}), predicted "
            f"{row['predicted_s']}; computation {row['compute_s']}, busiest link {row['link_s']}, exposed {row['exposed']} of it"
        )
        failed |= float(row["exposed"]) > MOST_EXPOSED
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
