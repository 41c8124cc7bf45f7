"""Do copies that set out ahead of their blocks shorten steps between sites that differ, and by as much as is simulated?

In the lab: access rates of four sites are drawn at random; the planner's plan, and the one that it finds with copies ahead, train
in turn. Draws for which that promises little are passed over. What is already in ``results`` is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybridep.commands.lab_settings import run_script_in_lab
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.config import build
from hybridep.launch.trials import measure
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import plan
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
COLUMNS = (
    *("seed", "up_mbps", "down_mbps", "sequence_length", "predicted_s", "predicted_ahead_s", "simulated_s", "simulated_ahead_s"),
    *("measured_s", "min_s", "max_s", "measured_ahead_s", "min_ahead_s", "max_ahead_s", "simulated_ratio", "measured_ratio"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="one setting, few steps, no verdict: does it run?")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    folder = given.results.resolve() / ("smoke" if given.smoke else "")
    table = folder / "ahead.csv"
    if given.inside is not None:
        write_rows(table, [*read_rows(table), measured(given.inside, config)], COLUMNS)
        write_provenance(folder)
        return 0
    seeds = itertools.count()
    while len(rows := read_rows(table)) < config["settings"]:
        seed = next(seed for seed in seeds if all(row["seed"] != str(seed) for row in rows))
        _, _, plans = drawn(seed, config)
        plain_s, ahead_s = (simulate_step(one).step_s for one in plans)
        if ahead_s > plain_s * (1 - config["least_gain"]):
            continue
        if code := run_script_in_lab(plans[0].cluster, __file__, *sys.argv[1:], "--inside", str(seed)):
            return code
    return 0 if given.smoke else summarise(rows)


def drawn(seed: int, config: dict[str, Any]) -> tuple[Cluster, Workload, list[Plan]]:
    """Rates and the length of sequences, and the plans without and with copies ahead."""
    rng = np.random.default_rng(seed)
    up, down = (rng.choice(config["rates"], config["cluster"]["levels"][0]["size"]).tolist() for _ in range(2))
    training = config["training"] | {"sequence_length": int(rng.choice(config["sequence_lengths"]))}
    sites = [{"name": f"s{number}", "up": one, "down": other} for number, (one, other) in enumerate(zip(up, down, strict=True))]
    cluster = build(Cluster, config["cluster"] | {"name": f"draw {seed}", "sites": sites}, "config")
    workload = build(Workload, {"name": "lab", "model": config["model"], "training": training}, "config")
    return cluster, workload, [plan(cluster, workload, time_limit_s=config["planning_s"], ahead=ahead) for ahead in (False, True)]


def measured(seed: int, config: dict[str, Any]) -> dict[str, Any]:
    """One row; inside the lab."""
    cluster, workload, plans = drawn(seed, config)
    found, _ = measure(plans * config["turns"], steps=config["steps"])
    predicted_s = [one.prediction.step for one in plans if one.prediction is not None]
    simulated_s = [simulate_step(one).step_s for one in plans]
    row: dict[str, Any] = {"seed": seed, "sequence_length": workload.training.sequence_length}
    row |= {"up_mbps": " ".join(f"{site.up * 8e-6:g}" for site in cluster.sites if site.up)}
    row |= {"down_mbps": " ".join(f"{site.down * 8e-6:g}" for site in cluster.sites if site.down)}
    medians = []
    for kind, name in enumerate(("", "_ahead")):
        steps_s = [seconds for one in found[kind::2] for seconds in one.step_s]
        medians.append(statistics.median(steps_s))
        row |= {f"predicted{name}_s": f"{predicted_s[kind]:.4g}", f"simulated{name}_s": f"{simulated_s[kind]:.4g}"}
        row |= {f"measured{name}_s": f"{medians[-1]:.4g}", f"min{name}_s": f"{min(steps_s):.4g}"}
        row |= {f"max{name}_s": f"{max(steps_s):.4g}"}
    row |= {"simulated_ratio": f"{simulated_s[1] / simulated_s[0]:.3f}", "measured_ratio": f"{medians[1] / medians[0]:.3f}"}
    return row


def summarise(rows: list[dict[str, str]]) -> int:
    """1 where copies ahead make a step longer."""
    for row in rows:
        print(
            f"seed {row['seed']}: {row['measured_s']} s ({row['min_s']} to {row['max_s']}), ahead {row['measured_ahead_s']} s "
            f"({row['min_ahead_s']} to {row['max_ahead_s']}), x {row['measured_ratio']}, simulated x {row['simulated_ratio']}"
        )
    return int(any(float(row["measured_ratio"]) > 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
