"""How far is the predicted step from the measured one, and is the plan that is chosen the fastest? Random settings in the lab,
fitted on none of them.

Per setting links and computation are probed with all ranks, and every combination of domain sizes is trained and timed. What
tokens choose in the first steps, which are not timed, is recorded: it predicts the others, which have new batches, and a plan is
chosen by it as `hybridep plan --top --simulate --routing` does, trained and timed. What is already in ``results`` is not
measured again.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybridep.codecs import Codecs
from hybridep.commands.lab_settings import CHOSEN, Bench, Setting, enter_lab, measure_all, placements, rows_of, write_rows
from hybridep.config import build
from hybridep.plan import Plan
from hybridep.workload import Workload
from planner import step_cost

HERE = Path(__file__).resolve().parent
TRAINING = ("sequence_length", "micro_batch_size", "micro_batches")
CODED = ("tokens", "experts", "gradients")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--seed", type=int, help="draw other settings")
    parser.add_argument("--settings", type=int, help="how many")
    parser.add_argument("--smoke", action="store_true", help="one short setting, few steps, no verdict: does it run?")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    config |= {key: value for key in ("seed", "settings") if (value := getattr(given, key)) is not None}
    folder = given.results.resolve() / ("smoke" if given.smoke else f"seed-{config['seed']}")
    bench = Bench(
        cluster=config["cluster"],
        steps=config["steps"],
        untimed=config["recorded_steps"],
        record=True,
        candidates=config["candidates"],
        probe_s=config["seconds"],
        folder=folder,
        at_once=config["at_once"],
    )
    settings = draw(config, bench)
    if given.inside:
        measure_all(bench, settings)
        return 0
    code = enter_lab(bench, config["rates"][0], __file__)
    rows = rows_of(bench, settings)
    if code or not rows:
        return code or 1
    write_rows(folder, rows)
    return 0 if given.smoke else summarise(rows)


def draw(config: dict[str, Any], bench: Bench) -> list[Setting]:
    """The settings: the same for the same seed, whatever has been measured."""
    dice, found = random.Random(config["seed"]), list[Setting]()
    while len(found) < config["settings"]:
        rate = dice.choice(config["rates"])
        drawn = {name: dice.choice(values) for name, values in config["choices"].items()}
        codecs = {name: dice.choice(config["codecs"][name]) for name in CODED}
        if drawn["top_k"] * 2 > drawn["num_experts"]:
            continue
        training = {name: drawn.pop(name) for name in TRAINING}
        fields = {"name": "drawn", "model": {**config["model"], **drawn}, "training": training}
        setting = Setting(
            name=str(len(found)),
            rate=rate,
            workload=build(Workload, fields, "config.yaml"),
            codecs={"dc": build(Codecs, codecs, "config.yaml")},
        )
        if fits(config, placements(bench.at(rate), setting)):
            found.append(setting)
    return found


def fits(config: dict[str, Any], plans: Sequence[Plan]) -> bool:
    """Are all steps as long, and computation as little of them, as the config asks for?"""
    total_s = 0.0
    for plan in plans:
        cost = step_cost(plan)
        in_range = config["shortest_step_s"] <= cost.step_s <= config["longest_step_s"]
        if not in_range or cost.compute_s > config["most_computation"] * cost.step_s:
            return False
        total_s += cost.step_s
    return total_s <= config["all_steps_s"]


def summarise(rows: Sequence[dict[str, Any]]) -> int:
    """Print errors of every prediction, and how far every way to choose is behind the best that was measured; 1 where a claim of
    the README does not hold."""
    combinations = [row for row in rows if row["dc"] != CHOSEN]
    errors_hold = errors_of(rows, "simulated_s")
    errors_of(rows, "predicted_s")
    errors_of(combinations, "uniform_s")
    choice_holds = choices_of(rows, "plan", lambda row: 1 - row["chosen"])
    for kind in ("simulated_s", "predicted_s", "uniform_s"):
        choices_of(rows, kind, lambda row, kind=kind: math.inf if row["dc"] == CHOSEN else row[kind])
    for sizes in dict.fromkeys((row["dc"], row["gpu"]) for row in combinations):
        choices_of(rows, "dc {} gpu {}".format(*sizes), lambda row, sizes=sizes: (row["dc"], row["gpu"]) != sizes)
    return int(not (errors_hold and choice_holds))


def errors_of(rows: Sequence[dict[str, Any]], kind: str) -> bool:
    """Whether one kind of prediction is as close to the measured steps as claimed; prints how close."""
    errors = [row[kind] / row["measured_s"] - 1 for row in rows]
    sizes = sorted(abs(error) for error in errors)
    median, mean, worst = statistics.median(sizes), statistics.fmean(sizes), sizes[-1]
    print(
        f"{kind:12} off in {len(rows)} placements by {median:.1%} (median), {mean:.1%} (mean), {worst:.1%} (worst); "
        f"on average {statistics.fmean(errors):+.1%}"
    )
    return median <= 0.05 and mean <= 0.09 and worst <= 0.20


def choices_of(rows: Sequence[dict[str, Any]], name: str, weight: Callable[[dict[str, Any]], float]) -> bool:
    """Whether the lightest of each setting's rows is the best measured, or close, as often as claimed."""
    settings = [[row for row in rows if row["setting"] == one] for one in dict.fromkeys(row["setting"] for row in rows)]
    behind = []
    for mine in settings:
        best, taken = min(mine, key=lambda row: row["measured_s"]), min(mine, key=weight)
        behind.append(taken["measured_s"] / best["measured_s"] - 1)
        if behind[-1] > 0.03 and name == "plan":
            print(f"    setting {best['setting']}: the plan is {behind[-1]:.1%} behind dc {best['dc']} gpu {best['gpu']}")
    close = sum(value <= 0.03 for value in behind) / len(behind)
    print(f"{name:12} is within 3 % of the best in {close:.1%} of {len(settings)} settings; worst {max(behind):.1%}")
    return close >= 0.95


if __name__ == "__main__":
    sys.exit(main())
