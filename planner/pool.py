"""Plans to switch between when the links between sites get slower or faster, and the rates from which on each one pays.

Homes are the same in all of them and copies are gathered anew every step, so a switch between two steps moves nothing
(``planner.difference``); what it needs is room for the copies of the plan that keeps most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.topology import Cluster
from planner.difference import equal_at, scaled, step_at
from planner.evaluate import evaluate
from planner.plans import predict
from planner.problem import TIE

PLANNED_AT = 5
"""Factors on the bandwidths between sites at which a plan is made."""
LOOKED_AT = 33
"""Factors at which the plans are compared; between two of these the threshold is found by halving."""


@dataclass(frozen=True, kw_only=True)
class PooledPlan:
    """One plan, for the cluster as it is given."""

    plan: Plan
    pays_from: float
    """Factor on all bandwidths between sites from which on no other plan of the pool is faster."""
    pays_to: float
    step_s: float
    """At the rates as they are given."""
    memory_bytes: float
    """Of the fullest rank."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "pays_from": self.pays_from,
            "pays_to": self.pays_to,
            "step_s": self.step_s,
            "memory_bytes": self.memory_bytes,
            "digest": self.plan.digest,
        }


def plan_pool(
    make: Callable[[Cluster, float], Plan], cluster: Cluster, *, widest: float, time_limit_s: float
) -> list[PooledPlan]:
    """Plans for links between sites from 1 / ``widest`` to ``widest`` times as fast, those for the slowest first; each is the
    fastest of them in its range. ``make`` plans for a cluster within a time limit; all fit its memory, so any can follow any.
    Raises UserError for one site or a factor of at most 1, and what ``make`` raises."""
    if cluster.sizes[0] < 2 or widest <= 1:
        raise UserError(f"cluster {cluster.name}: a pool of plans needs two sites, and a factor above 1 (found {widest:g})")
    from_slow = np.geomspace(1 / widest, widest, PLANNED_AT)
    made = [make(scaled(cluster, float(factor)), time_limit_s / PLANNED_AT) for factor in from_slow]
    # Connections stay when plans change, so all have those of the plan with most.
    most: dict[str, int] = {}
    for one in made:
        most |= {name: max(number, most.get(name, 1)) for name, number in one.schedule.streams.items()}
    found: dict[str, Plan] = {}
    for one in made:
        schedule = one.schedule.model_copy(update={"streams": most})
        here = one.model_copy(update={"cluster": cluster, "schedule": schedule, "prediction": None, "solver": None})
        found.setdefault(here.digest, here.model_copy(update={"prediction": predict(here)}))
    plans = list(found.values())
    looked = [float(factor) for factor in np.geomspace(1 / widest, widest, LOOKED_AT)]
    steps_s = np.array([[step_at(plan, factor) for factor in looked] for plan in plans])
    best = _fastest(steps_s)
    edges = [at for at in range(1, LOOKED_AT) if best[at] != best[at - 1]]
    steps_at = [partial(step_at, plan) for plan in plans]
    thresholds = [equal_at(steps_at[best[at - 1]], steps_at[best[at]], looked[at - 1], looked[at]) for at in edges]
    starts, ends = [looked[0], *thresholds], [*thresholds, looked[-1]]
    pool = []
    for first, pays_from, pays_to in zip([0, *edges], starts, ends, strict=True):
        plan = plans[best[first]]
        cost, memory = evaluate(plan)
        pool.append(
            PooledPlan(plan=plan, pays_from=pays_from, pays_to=pays_to, step_s=cost.step_s, memory_bytes=memory.fullest_bytes)
        )
    return pool


def _fastest(steps_s: np.ndarray) -> Sequence[int]:
    """[LOOKED_AT]: the fastest plan ([plans, LOOKED_AT]); among equals the one before stays."""
    chosen = [int(steps_s[:, 0].argmin())]
    for column in steps_s.T[1:]:
        stays = column[chosen[-1]] <= column.min() * (1 + TIE)
        chosen.append(chosen[-1] if stays else int(column.argmin()))
    return chosen
