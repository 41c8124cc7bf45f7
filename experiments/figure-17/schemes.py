"""What is compared at one setting: each scheme simulates one whole training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridep.baselines import Baseline, baseline_plan
from hybridep.codecs import Codecs
from hybridep.commands.inputs import load_workload
from hybridep.config import build
from hybridep.errors import NoSolutionError
from hybridep.plan import LayerGroup, Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import alone, plan_domains
from planner import plan as search
from planner.choose import MANY_SITES
from simulator.step import StepResult, simulate_step
from simulator.systems import System, system_step
from simulator.token_exchange import TokenExchange

Outcome = tuple[StepResult, str]
"""The step, and what was chosen where there was a choice."""
PER_CHOICE = TokenExchange(per_choice=True)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """So many equal datacenters, each one worker, with one workload."""

    name: str
    recipe: dict[str, Any]
    sites: int
    bandwidth: str
    config: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, str]:
        """As tables have it."""
        return self.name, str(self.sites), self.bandwidth

    @cached_property
    def cluster(self) -> Cluster:
        latency = self.recipe.get("latency", self.config["latency"])
        level = {"name": "dc", "size": self.sites, "bandwidth": self.bandwidth, "latency": latency}
        return build(Cluster, {"name": f"{self.sites} sites", "levels": [level], "gpu": self.config["gpu"]}, "config.yaml")

    @cached_property
    def workload(self) -> Workload:
        data = {key: value for key, value in self.recipe.items() if key != "latency"}
        if "base" in data:
            data["model"] = load_workload(data.pop("base")).model.model_dump(mode="json")
        if data["model"]["num_experts"] == "per site":
            data["model"] = data["model"] | {"num_experts": self.sites}
        return build(Workload, {"name": self.name} | data, "config.yaml")

    @property
    def with_gpus_inside(self) -> tuple[Cluster, Workload]:
        """The same sites with a level of GPUs below, which share a site's sequences."""
        inside, training = self.config["inside"], self.workload.training
        levels = [self.cluster.model_dump(mode="json")["levels"][0]]
        levels.append({"name": "gpu", "size": inside["size"], "bandwidth": inside["bandwidth"], "latency": inside["latency"]})
        cluster = build(Cluster, {"name": "GPUs inside", "levels": levels, "gpu": inside["gpu"]}, "config.yaml")
        fewer = training.model_copy(update={"micro_batch_size": training.micro_batch_size // inside["size"]})
        return cluster, self.workload.model_copy(update={"training": fewer})

    def placed(self, size: int, codecs: dict[str, Codecs] | None = None) -> Plan:
        """Expert domains of so many sites, in all layers."""
        layers = self.workload.model.num_moe_layers
        group = LayerGroup(first_layer=0, num_layers=layers, domains={"dc": size}, migration={"dc": 1.0} if size > 1 else {})
        return Plan(cluster=self.cluster, workload=self.workload, layers=(group,), codecs=codecs or {})

    def sent_gb(self, step: StepResult) -> float:
        """Over the busiest site's link in the fuller direction."""
        return float(step.link_bytes.max()) / 1e9


def schemes(setting: Setting) -> dict[str, Callable[[], Outcome]]:
    """Name -> what simulates it."""
    config, size = setting.config, setting.sites
    coded = {name: {"dc": build(Codecs, data, name)} for name, data in config["codecs"].items()}
    # The paper codes experts alone.
    shared = {"dc": build(Codecs, {"experts": "sr", "experts_keep": 0.02}, "config.yaml")}

    def plain(plan: Plan, exchange: TokenExchange | None = None) -> Callable[[], Outcome]:
        return lambda: (simulate_step(plan, exchange=exchange), "")

    def system(name: System) -> Callable[[], Outcome]:
        def run() -> Outcome:
            seen: dict[tuple[int, int], StepResult] = {}

            def hops(plan: Plan, exchange: TokenExchange) -> StepResult:
                # On one level a hop is the straight way, so both routes are the same.
                key = (id(plan), exchange.chunks)
                if key not in seen:
                    seen[key] = simulate_step(plan, exchange=TokenExchange(per_choice=True, chunks=exchange.chunks))
                return seen[key]

            found = system_step(setting.placed(1), name, hops)
            return found.step, found.choice

        return run

    def planned(codecs: dict[str, Codecs]) -> Callable[[], Outcome]:
        def run() -> Outcome:
            # Equal domains end by themselves, whatever the machine does beside.
            made = [plan_domains(setting.cluster, setting.workload, time_limit_s=3600, codecs=codecs)]
            if size > MANY_SITES and not codecs:
                with suppress(NoSolutionError):
                    made.append(search(setting.cluster, setting.workload, time_limit_s=config["planning_time_s"]))
            best = min(made, key=_predicted_s)
            return simulate_step(best), _describe(best)

        return run

    found = {system_name.value: system(system_name) for system_name in (System.FLAT_EP, System.TUTEL)}
    if size <= config["most_sites_of_faster_moe"]:
        found[System.FASTER_MOE.value] = system(System.FASTER_MOE)
    found |= {
        "ep": plain(setting.placed(1)),
        "full_gather": plain(baseline_plan(setting.cluster, setting.workload, Baseline.FULL_GATHER)),
    }
    fixed = {f"S={each}": each for each in config["domains"]} | {f"S=G/{each}": size // each for each in config["parts"]}
    for name, each in fixed.items():
        if size % each or each == size or (name.startswith("S=G") and each in config["domains"]):
            continue
        found[f"{name}, a row per choice"] = plain(setting.placed(each), PER_CHOICE)
        found[f"{name}, a row per choice, top-k 2 % of experts"] = plain(setting.placed(each, shared), PER_CHOICE)
        found[name] = plain(setting.placed(each))
    found["planned"] = planned({})
    one = alone(setting.cluster, setting.workload)
    if one is not None:
        found["alone"] = plain(one)
    if size == config["inside"]["sites"] and setting.workload.training.micro_batch_size % config["inside"]["size"] == 0:
        cluster, workload = setting.with_gpus_inside
        found["ep, GPUs inside"] = plain(baseline_plan(cluster, workload, Baseline.EP))
        found["ep_in_dc, GPUs inside"] = plain(baseline_plan(cluster, workload, Baseline.EP_IN_DC))
    for name, codecs in coded.items():
        found[f"ep, {name}"] = plain(setting.placed(1, codecs))
        found[f"full_gather, {name}"] = plain(setting.placed(size, codecs))
        found[f"planned, {name}"] = planned(codecs)
    return found


def _predicted_s(made: Plan) -> float:
    return made.predicted.step


def _describe(made: Plan) -> str:
    """Sites that share copies, of most layers."""
    group = max(made.layers, key=lambda layers: layers.num_layers)
    residency = f"copies per {group.residency.value}"
    if group.serving:
        sizes = sorted({len(one.sites) for one in group.serving})
        holders = sorted({len(one.holders) for one in group.serving})
        return (
            f"{len(group.serving)} groups of {sizes[0]} to {sizes[-1]} sites; {holders[0]} to {holders[-1]} holders; {residency}"
        )
    return f"domains of {group.domains['dc']}, {group.migration.get('dc', 1.0):g} copied; {residency}"
