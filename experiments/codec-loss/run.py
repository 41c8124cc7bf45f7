"""What does each codec cost in loss? A small model, trained from scratch with each codec alone (HybridEP, Fig. 14).

Curves that are already in ``results/`` are not trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml
from emulation import EmulatedSites
from scipy.stats import t as student_t

from hybridep.codecs import Codecs, TokenCodec
from hybridep.commands.tables import read_rows, write_provenance
from hybridep.config import build, write_text
from hybridep.pipeline import codecs_inside
from hybridep.plan import LayerGroup, Plan
from hybridep.run import Optimizer, Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from runtime.reference import code_activations

HERE = Path(__file__).resolve().parent
WINDOW = 50
GATE = 0.005
"""int8 change coding of experts must end within this share of the exact loss."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--smoke", action="store_true", help="few steps of few codecs, no verdict: does it run?")
    parser.add_argument("--report", action="store_true", help="only of what is there")
    given = parser.parse_args()
    config = yaml.safe_load(given.config.read_text())
    folder = given.results / "smoke" if given.smoke else given.results
    if given.smoke:
        config |= config["smoke"] | {"runs": {name: config["runs"][name] for name in config["smoke"]["runs"]}}
    if not given.report:
        wanted = [(seed, name) for name in config["runs"] for seed in range(num_seeds(config, name))]
        todo = [one for one in sorted(wanted) if not curve(folder, one[1], one[0]).exists()]
        with ProcessPoolExecutor(given.workers) as pool:
            for name, seed in pool.map(train, [config] * len(todo), todo, [folder] * len(todo)):
                print(f"{name} seed {seed}: done", flush=True)
        write_provenance(folder)
    code = report(config, folder)
    return 0 if given.smoke else code


def num_seeds(config: dict[str, Any], name: str) -> int:
    """More where a small difference is to be told from none."""
    return int(config["seeds_of"].get(name, config["seeds"]))


def curve(results: Path, name: str, seed: int) -> Path:
    return results / f"{name}-{seed}.csv"


def plan_of(config: dict[str, Any], name: str) -> Plan:
    """Sites of one rank each."""
    sites = config["sites"]
    level = {"name": "dc", "size": sites, "bandwidth": "1 Gbps", "latency": "1 ms"}
    gpu = {"throughput": "10 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"}
    cluster = build(Cluster, {"name": "sites", "levels": [level], "gpu": gpu}, "config.yaml")
    workload = build(Workload, {"name": name, "model": config["model"], "training": config["training"]}, "config.yaml")
    codecs = build(Codecs, config["runs"][name], "config.yaml")
    domain = 1 if codecs.tokens is not TokenCodec.EXACT else sites
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains={"dc": domain}, migration={})
    return Plan(cluster=cluster, workload=workload, layers=(group,), codecs=codecs_inside({"dc": codecs}))


def train(config: dict[str, Any], one: tuple[int, str], results: Path) -> tuple[str, int]:
    seed, name = one
    torch.set_num_threads(1)
    optimizer = build(Optimizer, config["optimizer"], "config.yaml")
    run = Run(name=name, cluster="sites", workload=name, output=results, steps=config["steps"], seed=seed, optimizer=optimizer)
    sites = EmulatedSites(run, plan_of(config, name))
    activations = build(Codecs, config["runs"][name], "config.yaml").activations
    # As if the sites were two stages.
    code_activations(sites.transformer, [config["model"]["num_layers"] // 2], activations)
    losses = [sites.step(step) for step in range(1, config["steps"] + 1)]
    spread = statistics.mean(float(apart(layer.weights_EP.detach())) for layer in sites.layers)
    lines = ["step,loss", *(f"{step},{loss:.6f}" for step, loss in enumerate(losses, 1)), f"apart,{spread:.6f}"]
    write_text(curve(results, name, seed), "\n".join(lines) + "\n")
    return name, seed


def apart(weights_EP: torch.Tensor) -> torch.Tensor:
    """How far experts have specialised: the share of their weights' energy that is not in their mean."""
    return ((weights_EP - weights_EP.mean(dim=0)) ** 2).sum() / (weights_EP**2).sum()


def final(config: dict[str, Any], results: Path, name: str, seed: int) -> float | None:
    path = curve(results, name, seed)
    if not path.exists():
        return None
    losses = [float(row["loss"]) for row in read_rows(path) if row["step"] != "apart"]
    return statistics.mean(losses[-config["last"] :])


def report(config: dict[str, Any], results: Path) -> int:
    """Print a row per codec; 1 unless int8 change coding is shown to keep its gate: with 95 % confidence its mean lies inside."""
    print("codec,seeds,loss,relative_mean,relative_min,relative_max,standard_error")
    shown = False
    for name in config["runs"]:
        losses, relative = [], []
        for seed in range(num_seeds(config, name)):
            mine, exact = final(config, results, name, seed), final(config, results, "exact", seed)
            if mine is not None and exact is not None:
                losses.append(mine)
                relative.append(mine / exact - 1)
        if not losses:
            continue
        number, mean = len(losses), statistics.mean(relative)
        error = statistics.stdev(relative) / number**0.5 if number > 1 else math.inf
        spread = f"{mean:+.5f},{min(relative):+.5f},{max(relative):+.5f},{error:.5f}"
        print(f"{name},{number},{statistics.mean(losses):.4f},{spread}")
        if name == "experts-change-int8" and number > 1:
            shown = abs(mean) + float(student_t.ppf(0.975, number - 1)) * error <= GATE
    return int(not shown)


if __name__ == "__main__":
    raise SystemExit(main())
