"""How far is the predicted step from the measured one, and is the plan with the shortest prediction the fastest? Random settings
in the lab, fitted on none of them.

Per setting: links and computation are probed with all ranks, every combination of domain sizes is trained and timed. Which
experts are popular is taken from the first steps of expert parallelism's run. Measurements are kept in
``results/<number>.json`` and not made again; predictions are computed from them each time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from hybridep.commands.inputs import load_cluster
from hybridep.commands.probe import with_measurements
from hybridep.config import build, write_text
from hybridep.launch.host import child_environment
from hybridep.launch.lab import Lab, run_in_lab
from hybridep.launch.shaping import lab_spec, why_not_in_lab
from hybridep.launch.trials import measure
from hybridep.plan import LayerGroup, Plan
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import step_cost
from planner.domains import divisors
from simulator.report import simulate

HERE = Path(__file__).resolve().parent
TRAINING = ("sequence_length", "micro_batch_size", "micro_batches")
COLUMNS = ["setting", "rate", "experts", "top_k", "hidden", "ffn", "tokens", "micro_batches"]
COLUMNS += ["dc", "gpu", "measured_s", "min_s", "max_s", "predicted_s", "simulated_s", "uniform_s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--seed", type=int, help="draw other settings")
    parser.add_argument("--settings", type=int, help="how many")
    parser.add_argument("--smoke", action="store_true", help="two settings, few steps, no verdict: does it run?")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    config |= {key: value for key in ("seed", "settings") if (value := getattr(given, key)) is not None}
    results = given.results.resolve() / ("smoke" if given.smoke else f"seed-{config['seed']}")
    if given.inside:
        measure_all(config, results)
        return 0
    cluster = shaped(config, config["rates"][0])
    reason = why_not_in_lab(cluster)
    if reason is not None:
        print(f"prediction-grid needs the lab: {reason}", file=sys.stderr)
        return 2
    code = run_in_lab([sys.executable, __file__, "--inside", *sys.argv[1:]], lab_spec(cluster), child_environment())
    rows = predicted(config, results)
    if code or not rows:
        return code or 1
    write_text(results / "rows.csv", table(rows))
    write_text(results / "provenance.json", json.dumps(provenance(), indent=1))
    return 0 if given.smoke else summarise(rows)


def shaped(config: dict[str, Any], rate: str) -> Cluster:
    return load_cluster(config["cluster"], [f"levels.dc.bandwidth={rate}"])


def draw(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings: the same for the same seed, whatever has been measured."""
    dice, found = random.Random(config["seed"]), []
    while len(found) < config["settings"]:
        setting = {"rate": dice.choice(config["rates"])}
        setting |= {name: dice.choice(values) for name, values in config["choices"].items()}
        if setting["top_k"] * 2 > setting["num_experts"]:
            continue
        cluster = shaped(config, setting["rate"])
        expected_s = [step_cost(plan).step_s for plan in placements(cluster, workload_of(config, setting))]
        in_range = min(expected_s) >= config["shortest_step_s"] and max(expected_s) <= config["longest_step_s"]
        if in_range and sum(expected_s) <= config["all_steps_s"]:
            found.append(setting)
    return found


def workload_of(config: dict[str, Any], setting: dict[str, Any]) -> Workload:
    training = {name: setting[name] for name in TRAINING}
    model = {name: value for name, value in setting.items() if name not in (*TRAINING, "rate")}
    fields = {"name": "drawn", "model": {**config["model"], **model}, "training": training}
    return build(Workload, fields, "config.yaml")


def placements(cluster: Cluster, workload: Workload, popularity: Any = ()) -> list[Plan]:
    """Every combination of domain sizes."""
    names = [level.name for level in cluster.levels]
    layers = workload.model.num_moe_layers
    return [
        Plan(
            cluster=cluster,
            workload=workload,
            layers=(LayerGroup(first_layer=0, num_layers=layers, domains=dict(zip(names, sizes, strict=True)), migration={}),),
            popularity=popularity,
        )
        for sizes in product(*(divisors(level.size) for level in cluster.levels))
    ]


def measure_all(config: dict[str, Any], results: Path) -> None:
    """Whatever is not in ``results`` yet, at one rate after the other."""
    settings = list(enumerate(draw(config)))
    lab = Lab.current()
    for rate in config["rates"]:
        cluster = shaped(config, rate)
        for site in lab.sites:
            bandwidth = cluster.levels[0].bandwidth
            lab.set_bandwidth(site.name, up_bytes_per_s=bandwidth, down_bytes_per_s=bandwidth)
        missing = [(n, one) for n, one in settings if one["rate"] == rate and not (results / f"{n}.json").exists()]
        for chunk in chunks(missing, config["at_once"]):
            plans = [placements(cluster, workload_of(config, setting)) for _, setting in chunk]
            measured, probes = measure(
                [plan for each in plans for plan in each], steps=config["steps"], probe_s=config["seconds"]
            )
            for (number, setting), probe in zip(chunk, probes, strict=True):
                mine, measured = measured[: len(plans[0])], measured[len(plans[0]) :]
                record = {
                    "setting": setting,
                    "cluster": with_measurements(cluster, probe).model_dump(mode="json", exclude_none=True),
                    "popularity": mine[0].popularity,
                    "step_s": [one.step_s for one in mine],
                    "parts_s": [one.parts_s for one in mine],
                }
                write_text(results / f"{number}.json", json.dumps(record))
                print(f"setting {number}: {[round(one.median_s, 3) for one in mine]}", file=sys.stderr, flush=True)


def chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def predicted(config: dict[str, Any], results: Path) -> list[dict[str, Any]]:
    """A row per setting and placement."""
    rows = []
    for number, setting in enumerate(draw(config)):
        path = results / f"{number}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        cluster = build(Cluster, record["cluster"], str(path))
        workload = workload_of(config, setting)
        assert record["setting"] == setting, f"{path} is of another draw"
        uniform = placements(cluster, workload)
        for plan, even, steps_s in zip(
            placements(cluster, workload, record["popularity"]), uniform, record["step_s"], strict=True
        ):
            rows.append(
                {
                    "setting": number,
                    "rate": setting["rate"],
                    "experts": setting["num_experts"],
                    "top_k": setting["top_k"],
                    "hidden": setting["hidden_size"],
                    "ffn": setting["expert_ffn_size"],
                    "tokens": workload.training.tokens,
                    "micro_batches": setting["micro_batches"],
                    **plan.layers[0].domains,
                    "measured_s": statistics.median(steps_s),
                    "min_s": min(steps_s),
                    "max_s": max(steps_s),
                    "predicted_s": step_cost(plan).step_s,
                    "simulated_s": simulate(plan).step.step_s,
                    "uniform_s": step_cost(even).step_s,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "\n".join([",".join(COLUMNS), *(",".join(cell(row[column]) for column in COLUMNS) for row in rows)]) + "\n"


def summarise(rows: list[dict[str, Any]]) -> int:
    """Print errors and choices; 1 where a claim of the README does not hold."""
    numbers = sorted({row["setting"] for row in rows})
    for kind in ("predicted_s", "simulated_s", "uniform_s"):
        errors = [row[kind] / row["measured_s"] - 1 for row in rows]
        sizes = sorted(abs(error) for error in errors)
        print(
            f"{kind:12} {len(rows)} placements of {len(numbers)} settings: median {statistics.median(sizes):.1%}, "
            f"mean {statistics.fmean(sizes):.1%}, worst {sizes[-1]:.1%}; on average {statistics.fmean(errors):+.1%}"
        )
    behind = []
    for number in numbers:
        mine = [row for row in rows if row["setting"] == number]
        chosen = min(mine, key=lambda row: row["predicted_s"])
        best = min(mine, key=lambda row: row["measured_s"])
        behind.append(chosen["measured_s"] / best["measured_s"] - 1)
        if behind[-1] > 0.03:
            names = [f"dc {row['dc']} gpu {row['gpu']}" for row in (chosen, best)]
            print(f"setting {number}: chosen {names[0]} is {behind[-1]:.1%} behind {names[1]}")
    close = sum(value <= 0.03 for value in behind) / len(behind)
    print(f"chosen within 3 % of the best measured: {close:.0%} of the settings; worst {max(behind):.1%}")
    sizes = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    return int(statistics.median(sizes) > 0.05 or statistics.fmean(sizes) > 0.09 or max(sizes) > 0.20 or close < 0.95)


if __name__ == "__main__":
    sys.exit(main())
