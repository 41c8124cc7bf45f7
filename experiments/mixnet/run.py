"""MixNet's claims from its own figures and from our simulator, its reconfiguration delay, and what it does inside several sites.

    .venv/bin/python experiments/mixnet/run.py [--part dollars|delay|sites] [--smoke]

One row each in results/<part>.csv; rows that are there are not simulated again. A figure per part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import matplotlib
import yaml

matplotlib.use("Agg")

import figures
from groups import Group, popularity

from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands.inputs import CONFIGS, cluster_and_workload
from hybridep.commands.tables import read_rows, write_provenance, write_rows
from hybridep.config import build
from hybridep.plan import Plan
from hybridep.units import gbps_to_bytes_per_s
from simulator.fabric_file import FabricFile
from simulator.network_cost import Components, Prices, fat_tree, load_prices, mixnet, rail_optimized, topo_opt
from simulator.step import simulate_step

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
KEYS = {
    "dollars": ("source", "model", "gbps", "fabric"),
    "delay": ("model", "gbps", "fabric", "delay"),
    "sites": ("plan", "between_gbps", "inside_gbps", "fabric"),
}
NETWORKS: dict[str, Callable[[int], Components]] = {
    "fat_tree": fat_tree,
    "fat_tree_3to1": lambda gpus: fat_tree(gpus, oversubscription=3),
    "rail": rail_optimized,
    "topo_opt": topo_opt,
    "mixnet": mixnet,
}


def network(fabric: str) -> Callable[[int], Components]:
    """What a fabric is built of; variants of MixNet are of the same."""
    return NETWORKS["mixnet" if fabric.startswith("mixnet") else fabric]


@click.command(help=__doc__)
@click.option("--part", type=click.Choice(list(KEYS)), multiple=True, help="[default: all]")
@click.option("--smoke", is_flag=True, help="The smallest point of each part.")
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
def main(part: tuple[str, ...], smoke: bool, results: Path) -> None:
    config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
    if smoke:
        config = smaller(config)
    makers = {"dollars": dollars, "delay": delay, "sites": sites}
    results.mkdir(parents=True, exist_ok=True)
    for name in part or tuple(KEYS):
        table = results / f"{name}.csv"
        rows = read_rows(table)
        known = {tuple(row[key] for key in KEYS[name]) for row in rows}
        for point, simulate in makers[name](config):
            if tuple(map(str, point)) in known:
                continue
            row: Row = dict(zip(KEYS[name], map(str, point), strict=True))
            row |= simulate()
            rows.append({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
            click.echo("  ".join(map(str, rows[-1].values())))
            write_rows(table, rows)
        figures.DRAW[name](results / f"{name}.png", rows)
    write_provenance(results)


def smaller(config: dict[str, Any]) -> dict[str, Any]:
    few: dict[str, Any] = {"rates_gbps": [400], "models": {"llama-moe": config["models"]["llama-moe"]}}
    few["models"]["llama-moe"]["model"]["num_layers"] = 4
    few["fabrics"] = {name: config["fabrics"][name] for name in ("fat_tree", "mixnet")}
    few["delay"] = {"rate_gbps": 400, "exponent": 0.3, "models": ["llama-moe"], "fabrics": ["mixnet"], "delays": ["0 s", "25 ms"]}
    settings = ["workload.model.num_layers=1", "workload.training.micro_batches=1", "cluster.levels.node.size=2"]
    few["sites"] = config["sites"] | {
        "overrides": settings,
        "planning_time": 1,
        "between_gbps": [100],
        "inside_gbps": [400],
        "fabrics": ["fat_tree", "mixnet"],
    }
    return config | few


def prices_of(config: dict[str, Any]) -> Prices:
    return load_prices(CONFIGS / "prices" / f"{config['prices']}.yaml")


def dollars(config: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Callable[[], Row]]]:
    """(a) Published iteration times, and ours, each with the price of the network."""
    prices, gpus = prices_of(config), config["gpus"]

    def cost(fabric: str, gbps: float) -> Row:
        return {"network_usd": network(fabric)(gpus).cost_usd(prices, gbps_to_bytes_per_s(gbps))}

    def published(fabric: str, gbps: float, iteration_s: float) -> Row:
        return cost(fabric, gbps) | {"iteration_s": iteration_s}

    def simulated(group: Group, fabric: str, gbps: float, inside: dict[str, Any]) -> Row:
        return cost(fabric, gbps) | group.iteration_s(gbps, inside)

    for model, fabrics in config["published"].items():
        for fabric, times in fabrics.items():
            for gbps, time in zip((100, 200, 400, 800), times, strict=True):
                yield ("published", model, gbps, fabric), partial(published, fabric, gbps, time)
    for model in config["models"]:
        group = Group(name=model, config=config)
        for gbps in config["rates_gbps"]:
            for fabric, inside in config["fabrics"].items():
                yield ("simulated", model, gbps, fabric), partial(simulated, group, fabric, gbps, inside)


def delay(config: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Callable[[], Row]]]:
    """(b) How long a change of circuits takes."""
    config = config | {"exponent": config["delay"]["exponent"]}
    gbps = config["delay"]["rate_gbps"]
    for model in config["delay"]["models"]:
        group = Group(name=model, config=config)
        for fabric in config["delay"]["fabrics"]:
            inside = config["fabrics"][fabric]
            for text in config["delay"]["delays"]:
                settings = {"mixnet": inside["mixnet"] | {"reconfiguration": text}}
                yield (model, gbps, fabric, text), partial(group.iteration_s, gbps, settings)


def sites(config: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Callable[[], Row]]]:
    """(c) Plans over several sites with a fabric inside each."""
    mine = config["sites"]
    for between in mine["between_gbps"]:
        for inside_gbps in mine["inside_gbps"]:
            overrides = [
                *mine["overrides"],
                f"cluster.levels.dc.bandwidth={between} Gbps",
                f"cluster.levels.node.bandwidth={8 * inside_gbps} Gbps",
            ]
            plans: dict[str, Plan] = {}
            for name in ("ep", "ep_in_dc", "hybrid"):
                for fabric in mine["fabrics"]:
                    inside = config["fabrics"][fabric]

                    def simulate(
                        name: str = name,
                        inside: dict[str, Any] = inside,
                        fabric: str = fabric,
                        overrides: list[str] = overrides,
                        plans: dict[str, Plan] = plans,
                        rate: float = inside_gbps,
                    ) -> Row:
                        if name not in plans:
                            plans[name] = site_plan(config, name, overrides)
                        plan = plans[name]
                        file = build(FabricFile, {"name": fabric, "inside": inside}, "fabrics") if inside else None
                        step = simulate_step(plan, fabric=file)
                        prices = prices_of(config)
                        cost = network(fabric)(plan.cluster.num_gpus).cost_usd(prices, gbps_to_bytes_per_s(rate))
                        return {
                            "step_s": step.step_s,
                            "reconfiguration_s": step.parts.get("reconfiguration", 0.0),
                            "network_usd": cost,
                            "domains": json.dumps(dict(plan.layers[0].domains)),
                        }

                    yield (name, between, inside_gbps, fabric), simulate


def site_plan(config: dict[str, Any], name: str, overrides: list[str]) -> Plan:
    """A baseline, or what the planner makes of it; with experts as uneven as the tokens will find them."""
    mine = config["sites"]
    cluster, workload = cluster_and_workload(mine["cluster"], mine["workload"], overrides)
    shares = popularity(workload, mine["exponent"], config["seed"])
    if name == "hybrid":
        from planner import plan

        return plan(cluster, workload, time_limit_s=mine["planning_time"], popularity=shares)
    return baseline_plan(cluster, workload, Baseline(name), popularity=shares)


if __name__ == "__main__":
    main()
