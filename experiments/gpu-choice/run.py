"""Training on a GPU between emulated sites: does the planner choose what is fastest, and is a step what was predicted?

Per setting links, computation on the GPU and what it takes to stage messages are probed with all ranks, every domain size is
trained and timed, and so is what the planner chooses from the probe. Ranks share the GPUs that there are. Without a lab
(``--unshaped``) messages pass over this machine's loopback. What is already in ``results`` is not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from hybridep.commands.lab_settings import Bench, enter_lab, measure_all, rows_of, setting_of, write_rows

HERE = Path(__file__).resolve().parent
MOST_BEHIND = 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="one small setting, on CPU where there is no GPU: does it run?")
    parser.add_argument("--unshaped", action="store_true", help="without a lab: links are loopback")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.smoke and not torch.cuda.is_available():
        print("gpu-choice needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    folder = given.results.resolve() / ("smoke" if given.smoke else "unshaped" if given.unshaped else "full")
    times = {"steps": config["steps"], "untimed": config["untimed"], "probe_s": config["seconds"]}
    bench = Bench(cluster=str(HERE / "cluster.yaml"), folder=folder, **times)
    settings = [setting_of(config["model"], name, fields) for name, fields in config["settings"].items()]
    if given.inside or given.unshaped:
        measure_all(bench, settings, shaped=not given.unshaped)
        if given.inside:
            return 0
    elif code := enter_lab(bench, settings[0].rate, __file__):
        return code
    rows = rows_of(bench, settings)
    write_rows(folder, rows)
    return 0 if given.smoke else summarise(rows)


def summarise(rows: Sequence[dict[str, Any]]) -> int:
    """A line per setting; 1 when a chosen plan is over 3 % behind the fastest placement."""
    failed = False
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        best = min(mine, key=lambda row: row["measured_s"])
        chosen = next(row for row in mine if row["chosen"])
        behind = chosen["measured_s"] / best["measured_s"] - 1
        placed = ", ".join(
            f"dc {row['dc']} {row['measured_s']:.3f} s ({row['min_s']:.3f} to {row['max_s']:.3f}), predicted "
            f"{row['predicted_s'] / row['measured_s'] - 1:+.1%}, simulated {row['simulated_s'] / row['measured_s'] - 1:+.1%}"
            for row in mine
        )
        print(f"{name:20} best dc {best['dc']}, chosen dc {chosen['dc']} ({behind:+.1%}): {placed}")
        failed |= behind > MOST_BEHIND
    for kind in ("predicted", "simulated"):
        errors = [abs(row[f"{kind}_s"] / row["measured_s"] - 1) for row in rows]
        print(f"{kind}: off by {statistics.median(errors):.1%} (median), {max(errors):.1%} (worst) in {len(errors)} placements")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
