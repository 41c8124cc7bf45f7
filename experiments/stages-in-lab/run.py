"""Are pipeline stages as fast as the planner says, and is its choice of their number right, in settings that it has not seen?

In the lab: links and computation are probed with all ranks, the planner plans for what was measured, without stages and in
several numbers of them, and all these plans train in turn. What is already in ``results`` is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from hybridep.commands.inputs import load_cluster
from hybridep.commands.lab_settings import each_in_lab
from hybridep.commands.probe import with_measurements
from hybridep.commands.tables import write_provenance, write_rows
from hybridep.config import build, write_text
from hybridep.errors import InfeasibleError
from hybridep.launch.trials import measure
from hybridep.pipeline import AnyPlan, PipelinePlan, build_plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import StageWishes, expected_s, plan, plan_pipeline
from planner.stages.costs import costed
from simulator.pipeline import simulate_pipeline
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
TRAINING = ("sequence_length", "micro_batch_size")
TIMES = ("predicted_s", "simulated_s", "measured_s", "min_s", "max_s")
COLUMNS = ("setting", "stages", "sites", "micro_batches", *TIMES, "wan_mb")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml", help="what is trained where; gpu.yaml: on GPUs")
    parser.add_argument("--results", type=Path, help="default: a folder in results named after the configuration")
    parser.add_argument("--smoke", action="store_true", help="one setting, few steps, no verdict: does it run?")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load(given.config.read_text())
    config |= config["smoke"] if given.smoke else {}
    results = given.results or HERE / "results" / given.config.stem
    folder = results.resolve() / ("smoke" if given.smoke else "")
    if given.inside is not None:
        write_text(folder / f"{given.inside}.json", json.dumps(measured(config, given.inside)))
        return 0
    code = each_in_lab(__file__, config["settings"], folder, lambda name: setting(config, name)[0])
    if code:
        return code
    rows = [_row(name, one) for name in config["settings"] for one in json.loads((folder / f"{name}.json").read_text())]
    write_rows(folder / "stages.csv", rows, COLUMNS)
    write_provenance(folder)
    return 0 if given.smoke else summarise(rows)


def setting(config: dict[str, Any], name: str) -> tuple[Cluster, Workload]:
    fields = dict(config["settings"][name])
    own = HERE / config["cluster"]
    cluster = load_cluster(str(own) if own.exists() else config["cluster"], [f"levels.dc.bandwidth={fields.pop('rate')}"])
    training = config["training"] | {field: fields.pop(field) for field in TRAINING if field in fields}
    return cluster, build(Workload, {"name": name, "model": config["model"] | fields, "training": training}, "config.yaml")


def measured(config: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The plan without stages, and one for each number of them, with the seconds of its steps; inside the lab."""
    cluster, workload = setting(config, name)
    _, probes = measure([plan(cluster, workload)], steps=2, probe_s=config["probe_s"])
    probed = with_measurements(cluster, probes[0])
    plans: list[AnyPlan] = [plan(probed, workload, time_limit_s=config["planning_s"])]
    for stages in config["stages"]:
        try:
            plans.append(plan_pipeline(probed, workload, StageWishes(stages=stages), time_limit_s=config["planning_s"]))
        except InfeasibleError as error:
            print(f"{name}: {error}", file=sys.stderr)
    found, _ = measure(plans * config["turns"], steps=config["steps"])
    return [
        {
            "plan": made.model_dump(mode="json", exclude={"prediction", "solver"}, exclude_none=True),
            "steps_s": [one for trial in found[kind :: len(plans)] for one in trial.step_s],
            "wan_bytes": found[kind].wan_bytes,
        }
        for kind, made in enumerate(plans)
    ]


def _row(name: str, one: dict[str, Any]) -> dict[str, Any]:
    """With what is predicted and simulated of the plan."""
    made, steps_s = build_plan(one["plan"], name), one["steps_s"]
    if isinstance(made, PipelinePlan):
        both_s = costed(made).times.step_s, simulate_pipeline(made).step_s
    else:
        both_s = expected_s(made), simulate_step(made).step_s
    times = *both_s, statistics.median(steps_s), min(steps_s), max(steps_s)
    row: dict[str, Any] = {"setting": name, "stages": 1, "sites": "4", "micro_batches": made.workload.training.micro_batches}
    if isinstance(made, PipelinePlan):
        sizes = " ".join(str(len(stage.sites)) for stage in made.stages)
        row |= {"stages": len(made.stages), "sites": sizes, "micro_batches": made.micro_batches}
    row["wan_mb"] = f"{one['wan_bytes'] / 1e6:.4g}"
    return row | {column: f"{seconds:.4g}" for column, seconds in zip(TIMES, times, strict=True)}


def summarise(rows: list[dict[str, Any]]) -> int:
    """1 where what is predicted to be fastest takes over a tenth longer than the fastest, or predictions are off by more than a
    tenth in half of the plans, or by more than a quarter in one."""
    worst = 0.0
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        best = min(mine, key=lambda row: float(row["measured_s"]))
        chosen = min(mine, key=lambda row: float(row["predicted_s"]))
        lost = float(chosen["measured_s"]) / float(best["measured_s"])
        worst = max(worst, lost)
        print(f"{name}: predicted to be fastest {chosen['stages']} stages, measured {best['stages']} (x {lost:.3f})")
        for row in mine:
            print(
                f"  {row['stages']} stages: {row['measured_s']} s ({row['min_s']} to {row['max_s']}), predicted "
                f"{row['predicted_s']}, simulated {row['simulated_s']}, {row['wan_mb']} MB between sites"
            )
    off = sorted(abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1) for row in rows)
    print(f"predicted: off by {statistics.median(off):.1%} (median of {len(off)}), at most {off[-1]:.1%}")
    return int(worst > 1.1 or statistics.median(off) > 0.1 or off[-1] > 0.25)


if __name__ == "__main__":
    sys.exit(main())
