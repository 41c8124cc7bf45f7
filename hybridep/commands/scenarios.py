"""Scenarios brought to the simulator: plans from the planner or from files, routing, and what comes out as plain data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridep.baselines import Baseline
from hybridep.commands.fabrics import MADE_NOW, fabric_of
from hybridep.commands.inputs import Kind, cluster_and_workload, plan_file
from hybridep.commands.named_plans import BASELINES, named_plan
from hybridep.errors import InfeasibleError, NoSolutionError, UserError
from hybridep.pipeline import AnyPlan, load_any_plan
from hybridep.routing import Routing, load_routing
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.units import format_seconds

if TYPE_CHECKING:
    from planner.memory import MemoryUse
    from simulator.fabric_file import FabricFile
    from simulator.many_steps import RoutingOfStep, RunResult
    from simulator.report import Report
    from simulator.scenario import Scenario
    from simulator.systems import System

_NAMED = 8
"""Sites that an error names at most."""


def others(names: tuple[str, ...], where: str) -> list[Baseline | System]:
    """The baselines and systems of these names. Raises UserError."""
    from simulator.systems import System

    known: dict[str, Baseline | System] = {**BASELINES, **{system.value: system for system in System}}
    for name in names:
        if name not in known:
            raise UserError(f"{where} {name}: no such baseline; there are {', '.join(known)}")
    return [known[name] for name in names]


def resolve(scenario: Scenario) -> AnyPlan:
    """The plan that a scenario names, made for its fabric's trunks where it is no file. Raises what the planner raises,
    ConfigError, FabricError and UserError."""
    from simulator.routes import planned_over
    from simulator.wiring import wiring

    names = (*MADE_NOW, *BASELINES)
    if scenario.plan not in names:
        path = plan_file(scenario.plan, names)
        if scenario.cluster or scenario.workload:
            raise UserError(f"plan {scenario.plan}: a plan file brings its cluster and workload along; leave them out")
        return load_any_plan(path, overrides=[in_plan(override) for override in scenario.overrides])
    if not (scenario.cluster and scenario.workload):
        raise UserError(f"plan {scenario.plan}: needs a cluster and a workload, or name a plan file")
    cluster, workload = cluster_and_workload(scenario.cluster, scenario.workload, scenario.overrides)
    # Said at once, and not once a plan is made.
    fabric = fabric_of(scenario.fabric)
    scenario.course.require(cluster, fabric)
    scenario.conditions.require(cluster, wiring(cluster, fabric).link_names)
    cluster = planned_over(cluster, fabric)
    return named_plan(scenario.plan, cluster, workload, time_limit_s=scenario.planning_time)


def in_plan(override: str) -> str:
    """``levels.dc.bandwidth=1 Gbps`` with the key that a plan file has: of its cluster or its workload, if one of them has it."""
    first = override.partition("=")[0].partition(".")[0]
    owners = [kind for kind in (Kind.CLUSTER, Kind.WORKLOAD) if first in kind.model.model_fields]
    return f"{owners[0].prefix}.{override}" if len(owners) == 1 else override


def routing_of(scenario: Scenario) -> tuple[Callable[[AnyPlan], AnyPlan], RoutingOfStep | None]:
    """What a scenario's plans get to know of the popularity of experts, and what tokens choose in each step (None: as many
    as the popularity lets expect). Raises UserError for an unknown name or a file that is no record."""
    text = scenario.routing
    name, colon, number = text.partition(":")
    if text == "uniform":
        return lambda plan: plan, None
    if name == "zipf" and colon:
        try:
            exponent = float(number)
        except ValueError:
            exponent = math.nan
        if not (exponent >= 0 and math.isfinite(exponent)):
            raise UserError(f"routing {text}: write zipf:1.2, with an exponent of at least zero")
        from simulator.routing import zipf_routing

        seed, drift = scenario.seed, scenario.drift
        return lambda plan: plan, lambda plan, step: zipf_routing(plan, exponent=exponent, seed=seed, step=step, drift=drift)
    if not os.path.isfile(text):
        raise UserError(f"routing {text}: no such file; give uniform, zipf:1.2 or what `hybridep train` recorded (routing.npz)")
    record = load_routing(Path(text))

    def informed(plan: AnyPlan) -> AnyPlan:
        record.require(plan, Path(text))
        return plan.with_popularity(record.popularity())

    if not record.choices:
        return informed, None
    recorded = len(next(iter(record.choices.values())))

    def chosen(plan: AnyPlan, step: int) -> Routing | None:
        # Once sites are lost, the ranks are others than those of the record; its popularity remains.
        if plan.cluster.num_gpus != recorded:
            return None
        steps = record.steps(plan.workload)
        return steps[step % len(steps)]

    return informed, chosen


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a scenario takes."""

    plan: AnyPlan
    report: Report
    """What the scenario's first step takes."""
    run: RunResult | None
    """What all steps take, where the scenario has a course."""
    not_met: tuple[str, ...]
    """In words, what the scenario has in store after its end."""
    memory: MemoryUse | None
    """Of the plan's fullest rank, which may have less; None where that is not computed."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        run = {} if self.run is None else {"run": self.run.as_dict()}
        memory = self.memory and {
            "bytes": self.memory.fullest_bytes,
            "capacity_bytes": self.memory.capacity_bytes,
            "fullest_rank": self.memory.fullest_name,
            "fits": self.memory.fits,
        }
        own = {"plan_digest": self.plan.digest, "memory": memory, "not_met": list(self.not_met)}
        return {**self.report.as_dict(), **own, **run}


def simulate_scenario(scenario: Scenario, progress: Callable[[str, float], None] | None = None) -> Outcome:
    """Simulate the first step beside its baselines, and then the whole run where it has more. progress: of the first step, as
    `simulator.report.simulate`."""
    from planner import fullest_of
    from simulator.many_steps import Course, Happening, simulate_run

    informed, routing = routing_of(scenario)
    plan, fabric = informed(resolve(scenario)), fabric_of(scenario.fabric)
    scenario.course.require(plan.cluster, fabric)
    report, run = _first_step(scenario, plan, routing, fabric, progress), None
    if scenario.course != Course():

        def anew(cluster: Cluster) -> AnyPlan:
            # As training does: the sites that are left share out the batch.
            whole, names = (plan.cluster, plan.workload), cluster.site_names
            left = on_sites(*whole, names)[1]
            try:
                return named_plan(scenario.plan, cluster, left, time_limit_s=scenario.planning_time, before=plan)
            except (InfeasibleError, NoSolutionError) as error:
                which = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} of {whole[0].sizes[0]} sites"
                raise type(error)(f"course: a plan anew for {which}: {error}") from None

        run = simulate_run(
            plan,
            scenario.course,
            scenario.conditions,
            routing,
            anew,
            scenario.precision,
            fabric=fabric,
        )
    end_s = run.total_s if run is not None else report.step.step_s
    lost = [f"{loss.site} is lost at {format_seconds(loss.at)}" for loss in scenario.course.in_order if loss.at >= end_s]
    # A loss ends the step at hand, which had begun.
    begins_s = [0.0] if run is None else [one.start_s for one in run.stretches if one.what in (Happening.STEP, Happening.LOSS)]
    not_met = (*scenario.conditions.from_s(end_s, begins_s), *lost)
    return Outcome(plan=plan, report=report, run=run, not_met=not_met, memory=fullest_of(plan))


def _first_step(
    scenario: Scenario,
    plan: AnyPlan,
    routing: RoutingOfStep | None,
    fabric: FabricFile | None,
    progress: Callable[[str, float], None] | None,
) -> Report:
    from simulator.report import simulate

    return simulate(
        plan,
        others(scenario.against, "against"),
        routing(plan, 0) if routing is not None else None,
        scenario.precision,
        scenario.conditions,
        fabric,
        progress,
    )
