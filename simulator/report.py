"""Simulate a plan beside its baselines, and say it in plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from hybridep.baselines import Baseline, baseline_like
from hybridep.compiled import seconds_compiling
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.plan import Plan
from hybridep.routing import Routing
from simulator.conditions import Conditions
from simulator.errors import PipelineError
from simulator.fabric_file import FabricFile
from simulator.pipeline import PipelineStep, fastest_pipeline, simulate_pipeline
from simulator.precision import EXACTLY, Precision
from simulator.step import StepResult, simulate_step
from simulator.systems import System, popularity_of, system_step
from simulator.token_exchange import TokenExchange
from simulator.wiring import wiring

_compiling_s = seconds_compiling(time.perf_counter)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A simulated step and what the alternatives would take."""

    step: StepResult
    pipeline: PipelineStep | None
    """Of a plan in stages: what its step is made of."""
    baselines: Mapping[str, float]
    """Step time in seconds of each baseline and system asked for, by name."""
    choices: Mapping[str, str]
    """What systems chose, by name."""
    do_not_fit: Mapping[str, str]
    """Why, of those asked for that cannot be on the plan's cluster and model, by name."""
    wall_s: float
    """What simulating all of it took, but for compiling."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: seconds, bytes, and loads as shares of what links could carry in the step."""
        return {
            "step_s": self.step.step_s,
            "wall_s": self.wall_s,
            "largest_cut": self.step.largest_cut,
            "parts": self.step.parts,
            "baselines": dict(self.baselines),
            "choices": dict(self.choices),
            "do_not_fit": dict(self.do_not_fit),
            "busiest_link": asdict(self.step.busiest_link),
            "links": [asdict(link) for link in self.step.links],
            **({} if self.pipeline is None else of_stages(self.pipeline)),
        }


def of_stages(step: PipelineStep) -> dict[str, Any]:
    """What a report says of a plan in stages beside, in plain data."""
    return {
        "stage_work_s": step.work_s,
        "bubble_s": step.bubble_s,
        "activations_s": step.transfers_s,
        "activation_bytes": step.activation_bytes,
        "stages": [
            {"sites": list(of.sites), "busy_s": one.busy_s} for of, one in zip(step.plan.stages, step.stages, strict=True)
        ],
    }


def simulate(
    plan: AnyPlan,
    against: Sequence[Baseline | System] = (),
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
    fabric: FabricFile | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Report:
    """Simulate one training step of a plan, in stages or not, and of the baselines and systems `against` under the same routing.

    routing: (MoE layer, micro-batch) -> [G, T, K] expert ids; the expectation from the plan's popularity without it.
    precision, conditions, fabric: as `simulate_step`. progress: takes the name of what is simulated, "plan" or one of `against`,
    and the share of it that is done. Raises UserError for conditions of links or workers that are not there, and what
    `simulate_pipeline` does.
    """
    began_s = time.perf_counter() - _compiling_s()
    if conditions is not None:
        conditions.require(plan.cluster, wiring(plan.cluster, fabric).link_names if fabric is not None else None)

    def simulated(name: str, one: Plan, exchange: TokenExchange | None = None) -> StepResult:
        told = None if progress is None else partial(progress, name)
        return simulate_step(one, routing, precision, conditions, fabric=fabric, exchange=exchange, progress=told)

    pipeline = None
    if isinstance(plan, PipelinePlan):
        told = None if progress is None else partial(progress, "plan")
        pipeline = simulate_pipeline(plan, routing, precision, conditions, progress=told, fabric=fabric)
        # Others have every layer at all sites, as expert parallelism does.
        step, plan = pipeline.result, baseline_like(plan, Baseline.EP)
    else:
        step = simulated("plan", plan)
    popularity = [np.asarray(shares) for shares in plan.popularity]
    if routing is not None:
        popularity = popularity_of(routing, plan.workload.model.num_experts)

    baselines, choices, do_not_fit = {}, {}, {}
    for name in against:
        if name is System.PIPELINE:
            try:
                in_order = fastest_pipeline(plan, routing, precision, conditions, fabric)
            except PipelineError as error:
                do_not_fit[name.value] = str(error)
            else:
                baselines[name.value], choices[name.value] = in_order.step_s, in_order.choice
            continue
        if isinstance(name, System):
            found = system_step(plan, name, partial(simulated, name.value), popularity)
            baselines[name.value], choices[name.value] = found.step.step_s, found.choice
            continue
        # The alternative keeps the plan's codecs and schedule: it is the placement that differs.
        baselines[name.value] = simulated(name.value, baseline_like(plan, name)).step_s
    wall_s = time.perf_counter() - _compiling_s() - began_s
    return Report(step=step, pipeline=pipeline, baselines=baselines, choices=choices, do_not_fit=do_not_fit, wall_s=wall_s)
