"""What do steps take where tokens choose from some groups of experts only, and does the planner know?

One setting in the lab; every number of groups under three placements, with one start of the ranks. Predictions are from a probe
of the setting and the popularity of the first, untimed step, and once more as if tokens chose from all groups.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from hybridep.commands.lab_settings import run_compared
from hybridep.commands.probe import with_measurements
from hybridep.commands.tables import write_provenance, write_rows
from hybridep.config import build
from hybridep.launch.trials import measure
from hybridep.plan import LayerGroup, Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import step_cost

COLUMNS = [
    "groups",
    "placement",
    "median_s",
    "min_s",
    "max_s",
    "predicted_s",
    "predicted_without_s",
    "wan_mb",
    "predicted_wan_mb",
]


def plan_of(config: dict[str, Any], cluster: Cluster, groups: int, placement: str, popularity: Any = ()) -> Plan:
    model = config["model"] | {"groups_per_token": groups}
    workload = build(Workload, {"name": "groups", "model": model, "training": config["training"]}, "config.yaml")
    layers = workload.model.num_moe_layers
    group = LayerGroup(first_layer=0, num_layers=layers, domains=config["domains"][placement], migration={})
    return Plan(cluster=cluster, workload=workload, layers=(group,), popularity=popularity)


def compare(config: dict[str, Any], cluster: Cluster, results: Path) -> None:
    variants = [(groups, placement) for groups in config["groups_per_token"] for placement in config["domains"]]
    plans = [plan_of(config, cluster, *variant) for variant in variants]
    measured, probes = measure(plans * config["turns"], steps=config["steps"], probe_s=config["seconds"])
    rows = []
    for place, (groups, placement) in enumerate(variants):
        turns = measured[place :: len(plans)]
        steps_s = [seconds for turn in turns for seconds in turn.step_s]
        probed = with_measurements(cluster, probes[config["groups_per_token"].index(groups)])
        all_groups, popularity = config["model"]["expert_groups"], turns[0].popularity[0]
        cost, without = (step_cost(plan_of(config, probed, number, placement, popularity)) for number in (groups, all_groups))
        row = {"groups": groups, "placement": placement, "median_s": statistics.median(steps_s), "min_s": min(steps_s)}
        row |= {"max_s": max(steps_s), "predicted_s": cost.step_s, "predicted_without_s": without.step_s}
        rows.append(row | {"wan_mb": turns[0].wan_bytes / 1e6, "predicted_wan_mb": cost.wan_bytes / 1e6})
        print(
            f"{groups} groups, {placement:12} {row['median_s']:.3f} s ({row['min_s']:.3f} to {row['max_s']:.3f}), predicted "
            f"{cost.step_s:.3f}, as if of all groups {without.step_s:.3f}; {rows[-1]['wan_mb']:.2f} MB between sites, "
            f"{rows[-1]['predicted_wan_mb']:.2f} predicted"
        )
    cells = [{name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows]
    write_rows(results / "rows.csv", cells, COLUMNS)
    write_provenance(results)


if __name__ == "__main__":
    sys.exit(run_compared(__file__, __doc__ or "", compare))
