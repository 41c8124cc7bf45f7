"""Messages in fewer bytes that lose nothing: how many fewer with the numbers of a training, and how much shorter steps are.

``numbers``: exponents that a message has to write out, by payload. ``plans``: steps between measured regions as planned and
simulated, exact and lossless. ``lab``: both trained in turn between emulated sites, planned for what was probed there.
What is already in ``results`` is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from hybridep.codecs import lossless_bytes
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.commands.lab_settings import each_in_lab
from hybridep.commands.probe import with_measurements
from hybridep.commands.tables import write_provenance, write_rows
from hybridep.config import build, write_text
from hybridep.launch.trials import measure
from hybridep.pipeline import PipelinePlan
from hybridep.plan import LayerGroup, Plan
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import StageWishes, plan, plan_pipelines
from runtime.codecs.lossless import shorten
from runtime.reference import ReferenceTrainer
from simulator.pipeline import simulate_pipeline
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
PARTS = ("numbers", "plans", "lab")
COLUMNS = ("part", "case", "what", "exact", "lossless", "ratio", "least", "most")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--smoke", action="store_true", help="few steps, one plan, no lab: does it run?")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    folder = given.results.resolve() / ("smoke" if given.smoke else "")
    if given.inside is not None:
        write_text(folder / f"{given.inside}.json", json.dumps(list(in_lab(config["lab"], given.inside))))
        return 0
    if given.smoke:
        config["numbers"]["steps"] = [1]
        config["plans"] |= {"clusters": ["aws-9"], "models": ["gpt-large"], "time_limit_s": 1}
    parts = {"numbers": numbers, "plans": plans}
    rows: list[dict[str, Any]] = []
    for part in PARTS[: 2 if given.smoke else 3] if given.only is None else [given.only]:
        if part == "lab":
            settings = config["lab"]["settings"]
            if code := each_in_lab(__file__, settings, folder, lambda name: setting(config["lab"], name)[0]):
                return code
            found = [row for name in settings for row in json.loads((folder / f"{name}.json").read_text())]
        else:
            path = folder / f"{part}.json"
            if not path.exists():
                write_text(path, json.dumps(list(parts[part](config[part]))))
            found = json.loads(path.read_text())
        rows += [{"part": part, **row} for row in found]
    write_rows(folder / "rows.csv", rows, COLUMNS)
    write_provenance(folder)
    for row in rows:
        print(*(f"{column} {row[column]}" for column in COLUMNS if column in row), sep=", ")
    longer = [row for row in rows if row["part"] != "numbers" and float(row["ratio"]) > 1]
    return 0 if given.smoke else int(bool(longer))


# --- numbers -----------------------------------------------------------------------------------------------------------


def numbers(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each payload after some steps: bits of a number in bf16, and exponents written out (least and most of layers)."""
    torch.manual_seed(0)
    level = {"name": "dc", "size": 1, "bandwidth": "1 Gbps", "latency": "1 ms"}
    gpu = {"throughput": "10 GFLOPS", "memory": "8 GiB", "memory_bandwidth": "5 GB/s"}
    cluster = build(Cluster, {"name": "one", "levels": [level], "gpu": gpu}, "config.yaml")
    fields = {"name": "small", "model": config["model"], "training": config["training"]}
    workload = build(Workload, fields, "config.yaml")
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains={"dc": 1}, migration={})
    one = {
        "name": "numbers",
        "cluster": "one",
        "workload": "small",
        "output": str(HERE / "results"),
        "steps": max(config["steps"]),
    }
    run = build(Run, one | {"optimizer": config["optimizer"]}, "config.yaml")
    trainer = ReferenceTrainer(run, Plan(cluster=cluster, workload=workload, layers=(group,)))
    seen: dict[str, list[Tensor]] = {}
    watch(trainer, seen)
    for step in range(1, max(config["steps"]) + 1):
        seen.clear()
        trainer.step(step)
        if step in config["steps"]:
            for name, found in seen.items():
                yield row_of_numbers(step, name, found)


def watch(trainer: ReferenceTrainer, seen: dict[str, list[Tensor]]) -> None:
    """Keep in ``seen`` what a step would send."""

    def keep(name: str, x: Tensor) -> None:
        seen.setdefault(name, []).append(x.detach().clone())

    def noting(name: str, value: Callable[..., Tensor]) -> Callable[..., None]:
        def note(*given: Any) -> None:
            x = value(*given)
            keep(name, x)
            if x.requires_grad:
                x.register_hook(lambda gradient: keep(f"{name}, gradient", gradient))

        return note

    for layer in list(trainer.transformer.layers.values())[1:]:
        layer.register_forward_pre_hook(noting("activations", lambda _, inputs: inputs[0]))
    for block in trainer.transformer.moe_blocks():
        block.routed.register_forward_pre_hook(noting("tokens there", lambda _, inputs: inputs[0]))
        block.routed.register_forward_hook(noting("tokens back", lambda _, inputs, output: output))
    update = trainer.optimizer.step

    def step(number: int) -> Any:
        for block in trainer.transformer.moe_blocks():
            keep("experts", block.routed.weights_EP)
            keep("experts, gradient", block.routed.weights_EP.grad)
        keep("dense, gradient", torch.cat([one.grad.flatten() for one in trainer.transformer.dense_parameters().values()])[None])
        return update(number)

    trainer.optimizer.step = step  # type: ignore[method-assign]


def row_of_numbers(step: int, name: str, found: list[Tensor]) -> dict[str, Any]:
    shares, bits = [], []
    for one in found:
        x = one.reshape(-1, one.shape[-1]).to(torch.bfloat16)
        shortened = shorten(x)
        shares.append(len(shortened.written_out) / x.numel())
        bits.append(8 * (shortened.fixed_NB.numel() + len(shortened.written_out)) / x.numel())
    kind = "rows" if name.startswith(("tokens", "activations")) else "gradients" if "gradient" in name else "experts"
    planned = 8 * lossless_bytes(kind, 1 << 20, 2) / (1 << 20)
    return {
        "case": f"{name}, step {step}",
        "what": f"bits of 16 (planned: {planned:.2f}); exponents written out",
        "exact": 16,
        "lossless": f"{statistics.mean(bits):.2f}",
        "ratio": f"{statistics.mean(bits) / 16:.3f}",
        "least": f"{min(shares):.4f}",
        "most": f"{max(shares):.4f}",
    }


# --- plans -------------------------------------------------------------------------------------------------------------


def plans(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Steps in seconds, by the planner and simulated, with stages and without."""
    for cluster_name in config["clusters"]:
        for model in config["models"]:
            workload, limit_s = load_workload(model), config["time_limit_s"]
            cluster = load_cluster(cluster_name, config["set"].get(model, ()))
            tables = [plan(cluster, workload, max_loss=loss, time_limit_s=limit_s) for loss in (None, 0.0)]
            yield row_of_steps(f"{model} on {cluster_name}", "predicted", [one.predicted.expected_s for one in tables])
            yield row_of_steps(f"{model} on {cluster_name}", "simulated", [simulate_step(one).step_s for one in tables])
            cluster, found = load_cluster(cluster_name), list[PipelinePlan]()
            for loss in (None, 0.0):
                found.append(plan_pipelines(cluster, workload, StageWishes(max_loss=loss), 1, time_limit_s=limit_s)[0])
            case = f"{model} on {cluster_name}, in stages"
            yield row_of_steps(case, "predicted", [one.predicted.expected_s for one in found])
            yield row_of_steps(case, "simulated", [simulate_pipeline(one).step_s for one in found])


def row_of_steps(case: str, what: str, steps_s: list[float]) -> dict[str, Any]:
    exact_s, lossless_s = steps_s
    times = {"exact": f"{exact_s:.4g}", "lossless": f"{lossless_s:.4g}", "ratio": f"{lossless_s / exact_s:.3f}"}
    return {"case": case, "what": f"step, {what}, s", **times}


# --- lab ---------------------------------------------------------------------------------------------------------------


def setting(config: dict[str, Any], name: str) -> tuple[Cluster, Workload]:
    fields = config["settings"][name]
    cluster = load_cluster(config["cluster"], [f"levels.dc.bandwidth={fields['rate']}"])
    training = config["training"] | {"dtype": fields["dtype"]}
    return cluster, build(Workload, {"name": name, "model": config["model"], "training": training}, "config.yaml")


def in_lab(config: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Predicted and measured; the same placement with and without, in turn."""
    cluster, workload = setting(config, name)
    _, probes = measure([plan(cluster, workload)], steps=2, probe_s=config["probe_s"])
    probed = with_measurements(cluster, probes[0])
    both = [plan(probed, workload, max_loss=loss) for loss in (None, 0.0)]
    found, _ = measure(both * config["turns"], steps=config["steps"])
    steps_s = [[one for trial in found[kind::2] for one in trial.step_s] for kind in (0, 1)]
    kinds = ", ".join(both[1].codecs["dc"].lossless) if both[1].codecs else "nothing"
    case = f"{name}, lossless: {kinds}"
    yield row_of_steps(case, "predicted", [one.predicted.expected_s for one in both])
    yield row_of_steps(case, "measured", [statistics.median(one) for one in steps_s]) | {
        "least": f"{min(steps_s[1]) / max(steps_s[0]):.3f}",
        "most": f"{max(steps_s[1]) / min(steps_s[0]):.3f}",
    }
    wan = [found[kind].wan_bytes / 1e6 for kind in (0, 1)]
    yield row_of_steps(case, "measured", wan) | {"what": "bytes between sites in a step, MB"}


if __name__ == "__main__":
    sys.exit(main())
