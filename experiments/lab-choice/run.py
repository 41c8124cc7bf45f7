"""Does the planner choose what is fastest, and does the model predict what is measured? Six settings in the lab.

Per setting: one lab at that rate; links and computation are probed with all ranks; the planner chooses; every combination of
domain sizes is trained and timed. Rows that are already in ``results/rows.csv`` are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from hybridep.commands.inputs import load_cluster
from hybridep.commands.probe import measured_cluster
from hybridep.config import build, write_text
from hybridep.launch.backends import backend_for
from hybridep.launch.host import child_environment
from hybridep.launch.lab import run_in_lab
from hybridep.launch.session import train
from hybridep.launch.shaping import lab_spec, why_not_in_lab
from hybridep.launch.worker import Job
from hybridep.plan import LayerGroup, Plan
from hybridep.provenance import provenance
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import plan, step_cost
from planner.domains import divisors
from simulator.report import simulate

HERE = Path(__file__).resolve().parent
COLUMNS = ["setting", "dc", "gpu", "chosen", "measured_s", "min_s", "max_s", "predicted_s", "simulated_s", "bound_s", "wan_mb"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", help="only these")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    if given.inside:
        measure(config, given.inside, given.results)
        return 0
    for name in given.settings or config["settings"]:
        cluster = shaped(config, name)
        reason = why_not_in_lab(cluster)
        if reason is not None:
            print(f"lab-choice needs the lab: {reason}", file=sys.stderr)
            return 2
        again = [sys.executable, __file__, "--inside", name, "--results", str(given.results.resolve())]
        code = run_in_lab(again, lab_spec(cluster), child_environment())
        if code:
            return code
    return summarise(read(given.results))


def shaped(config: dict[str, Any], name: str) -> Cluster:
    rate = config["settings"][name]["rate"]
    return load_cluster(config["cluster"], [f"levels.dc.bandwidth={rate}"])


def workload_of(config: dict[str, Any], name: str) -> Workload:
    setting = dict(config["settings"][name])
    setting.pop("rate")
    model = {**config["model"], "expert_ffn_size": setting.pop("expert_ffn_size")}
    return build(Workload, {"name": name, "model": model, "training": setting}, "config.yaml")


def measure(config: dict[str, Any], name: str, results: Path) -> None:
    workload, before = workload_of(config, name), read(results)
    cluster = probed(shaped(config, name), workload, results / f"{name}-cluster.json", config["seconds"])
    chosen = plan(cluster, workload)
    sizes = [divisors(level.size) for level in cluster.levels]
    for dc, gpu in product(*sizes):
        if any((row["setting"], row["dc"], row["gpu"]) == (name, str(dc), str(gpu)) for row in before):
            continue
        group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains={"dc": dc, "gpu": gpu}, migration={})
        made = Plan(cluster=cluster, workload=workload, layers=(group,))
        cost = step_cost(made)
        with tempfile.TemporaryDirectory(prefix="hybridep-") as folder:
            run = Run(
                name=name, cluster="lab", workload=name, output=Path(folder), steps=config["steps"], exchange_timeout="60 s"
            )
            job = Job(run=run, plan=made, resume=False)
            with backend_for(job, local=True) as backend:
                summary = train(job, backend, lambda record: None)
        row = {
            "setting": name,
            "dc": dc,
            "gpu": gpu,
            "chosen": int(len(chosen.layers) == 1 and chosen.layers[0].domains == {"dc": dc, "gpu": gpu}),
            "measured_s": summary["step_s"]["median"],
            "min_s": summary["step_s"]["min"],
            "max_s": summary["step_s"]["max"],
            "predicted_s": cost.step_s,
            "simulated_s": simulate(made).step.step_s,
            "bound_s": cost.bound_s,
            "wan_mb": summary["wan_bytes_per_step"] / 1e6,
        }
        before.append({key: str(value) for key, value in row.items()})
        write(results, before)
        print(f"{name} dc {dc} gpu {gpu}: measured {row['measured_s']:.3f} predicted {cost.step_s:.3f}", file=sys.stderr)


def probed(cluster: Cluster, workload: Workload, path: Path, seconds: float) -> Cluster:
    """Measured once per setting, so that a resumed run goes on with the same predictions."""
    if path.exists():
        return build(Cluster, json.loads(path.read_text()), str(path))
    measured = measured_cluster(cluster, workload, seconds)
    write_text(path, json.dumps(measured.model_dump(mode="json", exclude_none=True)))
    return measured


def read(results: Path) -> list[dict[str, str]]:
    path = results / "rows.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def write(results: Path, rows: list[dict[str, str]]) -> None:
    lines = [",".join(COLUMNS), *(",".join(row[column] for column in COLUMNS) for row in rows)]
    write_text(results / "rows.csv", "\n".join(lines) + "\n")
    write_text(results / "provenance.json", json.dumps(provenance(), indent=1))


def summarise(rows: list[dict[str, str]]) -> int:
    """Print a line per setting; 1 when the choice is over 10 % behind the best, or a mean error is over 25 %."""
    failed, errors = False, []
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        times = {(row["dc"], row["gpu"]): float(row["measured_s"]) for row in mine}
        best = min(times, key=lambda key: times[key])
        chosen = next(row for row in mine if row["chosen"] == "1")
        behind = float(chosen["measured_s"]) / times[best] - 1
        own = float(chosen["predicted_s"]) / float(chosen["measured_s"]) - 1
        errors += [abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1) for row in mine]
        ep = times["1", "1"] / float(chosen["measured_s"])
        gather = times["4", "2"] / float(chosen["measured_s"])
        print(
            f"{name:22} best dc {best[0]} gpu {best[1]}, chosen dc {chosen['dc']} gpu {chosen['gpu']} ({behind:+.1%}); "
            f"predicted {own:+.1%}; EP x {ep:.2f}, full gather x {gather:.2f}"
        )
        failed |= behind > 0.10 or abs(own) > 0.25
    print(f"all {len(errors)} placements: prediction off by {statistics.fmean(errors):.1%} on average, {max(errors):.1%} at most")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
