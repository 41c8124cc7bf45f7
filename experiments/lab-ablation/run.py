"""What do placement, overlap and each codec bring? One setting in the lab, every variant in turn with one start of the ranks."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from hybridep.codecs import Codecs
from hybridep.commands.inputs import load_cluster
from hybridep.config import build, write_text
from hybridep.launch.host import child_environment
from hybridep.launch.lab import run_in_lab
from hybridep.launch.shaping import lab_spec, why_not_in_lab
from hybridep.launch.trials import measure
from hybridep.plan import LayerGroup, Plan, Schedule
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import step_cost

HERE = Path(__file__).resolve().parent
COLUMNS = ["variant", "median_s", "min_s", "max_s", "wan_mb", "bound_s", "over_ep"]
FIRST = "EP"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="few steps: does it run?")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    cluster = load_cluster(config["cluster"], [f"levels.dc.bandwidth={config['rate']}"])
    if given.inside:
        ablate(config, cluster, given.results)
        return 0
    reason = why_not_in_lab(cluster)
    if reason is not None:
        print(f"lab-ablation needs the lab: {reason}", file=sys.stderr)
        return 2
    again = [sys.executable, __file__, "--inside", *sys.argv[1:]]
    return run_in_lab(again, lab_spec(cluster), child_environment())


def plan_of(config: dict[str, Any], cluster: Cluster, variant: dict[str, Any]) -> Plan:
    workload = build(Workload, config["workload"], "config.yaml")
    everywhere = {level.name: level.size for level in cluster.levels}
    domains = {"none": {}, "middle": config["middle"], "all": everywhere}[variant.get("domains", "none")]
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains=domains, migration={})
    return Plan(
        cluster=cluster,
        workload=workload,
        layers=(group,),
        codecs={cluster.levels[0].name: build(Codecs, variant.get("codecs", {}), "config.yaml")},
        schedule=Schedule(overlap=variant.get("overlap", True)),
    )


def ablate(config: dict[str, Any], cluster: Cluster, results: Path) -> None:
    plans = {name: plan_of(config, cluster, variant) for name, variant in config["variants"].items()}
    measured, _ = measure([*plans.values()] * config["turns"], steps=config["steps"])
    rows = []
    for place, (name, plan) in enumerate(plans.items()):
        turns = measured[place :: len(plans)]
        steps_s = [seconds for turn in turns for seconds in turn.step_s]
        row = {"variant": name, "median_s": statistics.median(steps_s), "min_s": min(steps_s), "max_s": max(steps_s)}
        rows.append(row | {"wan_mb": turns[0].wan_bytes / 1e6, "bound_s": step_cost(plan).bound_s})
    first_s = next(row["median_s"] for row in rows if row["variant"] == FIRST)
    for row in rows:
        row["over_ep"] = first_s / row["median_s"]
        print(
            f"{row['variant']:32} {row['median_s']:.3f} s ({row['min_s']:.3f} to {row['max_s']:.3f}), {row['wan_mb']:.2f} MB "
            f"between sites, at least {row['bound_s']:.3f} s; {row['over_ep']:.2f} times as fast as EP"
        )
    cells = [[f"{row[name]:.4g}" if isinstance(row[name], float) else f'"{row[name]}"' for name in COLUMNS] for row in rows]
    write_text(results / "rows.csv", "\n".join(",".join(line) for line in [COLUMNS, *cells]) + "\n")
    write_text(results / "provenance.json", json.dumps(provenance(), indent=1))


if __name__ == "__main__":
    sys.exit(main())
