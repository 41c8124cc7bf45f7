"""Simulate a plan beside its baselines, and say it in plain data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridep.baselines import Baseline, baseline_plan
from hybridep.plan import Plan
from hybridep.routing import Routing
from simulator.conditions import Conditions
from simulator.fabric_file import FabricFile
from simulator.network import EXACT
from simulator.step import StepResult, simulate_step
from simulator.wiring import wiring


@dataclass(frozen=True, kw_only=True)
class Report:
    """A simulated step and what the alternatives would take."""

    step: StepResult
    baselines: Mapping[Baseline, float]
    """Step time in seconds of each baseline asked for."""
    wall_s: float
    """What simulating all of it took."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: seconds, bytes, and loads as shares of the link's capacity over the step."""
        return {
            "step_s": self.step.step_s,
            "wall_s": self.wall_s,
            "largest_cut": self.step.largest_cut,
            "parts": self.step.parts,
            "baselines": {baseline.value: step_s for baseline, step_s in self.baselines.items()},
            "busiest_link": asdict(self.step.busiest_link),
            "links": [asdict(link) for link in self.step.links],
        }


def simulate(
    plan: Plan,
    against: Sequence[Baseline] = (),
    routing: Routing | None = None,
    tolerance: float = EXACT,
    conditions: Conditions | None = None,
    fabric: FabricFile | None = None,
) -> Report:
    """Simulate one training step of a plan, and of the baselines `against` under the same routing.

    routing: (MoE layer, micro-batch) -> [G, T, K] expert ids; the expectation from the plan's popularity without it.
    tolerance, conditions, fabric: as `simulate_step`. Raises UserError for conditions of links or workers that are not there.
    """
    began_s = time.perf_counter()
    if conditions is not None:
        conditions.require(plan.cluster, wiring(plan.cluster, fabric).link_names if fabric is not None else None)
    step = simulate_step(plan, routing, tolerance, conditions, fabric=fabric)
    baselines = {}
    for baseline in against:
        # The alternative keeps the plan's codecs and schedule: it is the placement that differs.
        other = baseline_plan(
            plan.cluster,
            plan.workload,
            baseline,
            schedule=plan.schedule,
            codecs=plan.codecs,
            popularity=plan.popularity,
        )
        baselines[baseline] = simulate_step(other, routing, tolerance, conditions, fabric=fabric).step_s
    return Report(step=step, baselines=baselines, wall_s=time.perf_counter() - began_s)
