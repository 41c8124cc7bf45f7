"""What do placement, overlap and each codec bring, and how do steps change with the migration ratio?

One setting in the lab, every variant in turn with one start of the ranks. Predictions are from a probe of that setting and the
popularity of the first, untimed step.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from hybridep.codecs import Codecs
from hybridep.commands.lab_settings import run_compared
from hybridep.commands.probe import with_measurements
from hybridep.commands.tables import write_provenance, write_rows
from hybridep.config import build
from hybridep.launch.trials import measure
from hybridep.plan import LayerGroup, Plan, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import step_cost

COLUMNS = ["table", "variant", "median_s", "min_s", "max_s", "predicted_s", "bound_s", "wan_mb", "over_ep"]
FIRST = "EP"


def plan_of(config: dict[str, Any], cluster: Cluster, variant: dict[str, Any], popularity: Any = ()) -> Plan:
    fields = {"name": "ablation", "model": config["model"], "training": config["training"]}
    workload = build(Workload, fields, "config.yaml")
    outermost = cluster.levels[0].name
    group = LayerGroup(
        first_layer=0,
        num_layers=workload.model.num_moe_layers,
        domains=config[variant["domains"]] if "domains" in variant else {},
        migration={outermost: variant["migration"]} if "migration" in variant else {},
    )
    return Plan(
        cluster=cluster,
        workload=workload,
        layers=(group,),
        popularity=popularity,
        codecs={outermost: build(Codecs, variant.get("codecs", {}), "config.yaml")},
        schedule=Schedule(overlap=variant.get("overlap", True)),
    )


def ablate(config: dict[str, Any], cluster: Cluster, results: Path) -> None:
    variants = {(table, name): variant for table, rows in config["tables"].items() for name, variant in rows.items()}
    plans = [plan_of(config, cluster, variant) for variant in variants.values()]
    measured, [probe] = measure(plans * config["turns"], steps=config["steps"], probe_s=config["seconds"])
    probed, rows = with_measurements(cluster, probe), []
    for place, ((table, name), variant) in enumerate(variants.items()):
        turns = measured[place :: len(plans)]
        steps_s = [seconds for turn in turns for seconds in turn.step_s]
        # With measured popularity partial migration would copy other experts than the plan that was trained.
        popularity = () if "migration" in variant else measured[0].popularity[0]
        cost = step_cost(plan_of(config, probed, variant, popularity))
        row = {"table": table, "variant": name, "median_s": statistics.median(steps_s), "min_s": min(steps_s)}
        row |= {"max_s": max(steps_s), "predicted_s": cost.step_s, "bound_s": cost.bound_s, "wan_mb": turns[0].wan_bytes / 1e6}
        rows.append(row)
    first_s = next(row["median_s"] for row in rows if row["variant"] == FIRST)
    for row in rows:
        row["over_ep"] = first_s / row["median_s"]
        print(
            f"{row['variant']:32} {row['median_s']:.3f} s ({row['min_s']:.3f} to {row['max_s']:.3f}), predicted "
            f"{row['predicted_s']:.3f}, at least {row['bound_s']:.3f}; {row['wan_mb']:.2f} MB between sites; "
            f"{row['over_ep']:.2f} times as fast as EP"
        )
    cells = [{name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows]
    write_rows(results / "rows.csv", cells, COLUMNS)
    write_provenance(results)


if __name__ == "__main__":
    sys.exit(run_compared(__file__, __doc__ or "", ablate))
