"""Plans to switch between when the links between sites get slower or faster, and the rates from which on each one pays.

Homes are the same in all of them and copies are gathered anew every step, so a switch between two steps moves no weights
(``planner.difference``); what it needs is room for the copies of the plan that keeps most. Only where copies travel as changes
receivers must first have what these change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.codecs import Wire
from hybridep.errors import UserError
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.plan import Plan
from hybridep.topology import Cluster
from planner.difference import HALVINGS, StepAt, equal_at, scaled, step_at
from planner.evaluate import evaluate
from planner.plans import predict
from planner.problem import TIE

PLANNED_AT = 5
"""Factors on the bandwidths between sites at which a plan is made."""
_LOOKED_AT = 33
"""Factors at which the plans are compared; between two of these the threshold is found by halving."""

Planned = TypeVar("Planned", bound=AnyPlan, covariant=True)


@dataclass(frozen=True, kw_only=True)
class PooledPlan(Generic[Planned]):
    """One plan, for the cluster as it is given."""

    plan: Planned
    pays_from: float
    """Factor on all bandwidths between sites from which on no other plan of the pool is faster."""
    pays_to: float
    step_s: float
    """At the rates as they are given."""
    memory_bytes: float
    """Of the fullest rank."""

    @property
    def begins_bytes(self) -> float:
        """Bytes between sites that a switch to it takes once: exact copies, where those of its steps travel as changes."""
        plan: AnyPlan = self.plan
        return sum(map(_changed_bytes, plan.plans if isinstance(plan, PipelinePlan) else [plan]))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "pays_from": self.pays_from,
            "pays_to": self.pays_to,
            "step_s": self.step_s,
            "memory_bytes": self.memory_bytes,
            "begins_bytes": self.begins_bytes,
            "digest": self.plan.digest,
        }


class Span(NamedTuple):
    """Factors on the bandwidths between sites at which a plan pays."""

    place: int
    """Of the plan."""
    pays_from: float
    pays_to: float


def plan_pool(
    make: Callable[[Cluster, float], Plan],
    cluster: Cluster,
    *,
    widest: float,
    time_limit_s: float,
    known: Sequence[Plan] = (),
) -> list[PooledPlan[Plan]]:
    """Plans for links between sites from 1 / ``widest`` to ``widest`` times as fast, those for the slowest first; each is the
    fastest of them in its range. ``make`` plans for a cluster within a time limit; ``known`` ones are compared, too; all fit its
    memory, so any can follow any. Raises UserError for one site or a factor of at most 1, and what ``make`` raises."""
    require_range(cluster, widest)
    made = [*known, *(make(scaled(cluster, one), time_limit_s / PLANNED_AT) for one in factors(widest, PLANNED_AT))]
    # Connections stay when plans change, so all have those of the plan with most.
    most: dict[str, int] = {}
    for one in made:
        most |= {name: max(number, most.get(name, 1)) for name, number in one.schedule.streams.items()}
    found: dict[str, Plan] = {}
    for one in made:
        schedule = one.schedule.model_copy(update={"streams": most})
        here = one.model_copy(update={"cluster": cluster, "schedule": schedule, "prediction": None, "solver": None})
        found.setdefault(here.digest, here.model_copy(update={"prediction": predict(here)}))
    plans, pool = list(found.values()), list[PooledPlan[Plan]]()
    for place, pays_from, pays_to in spans([partial(step_at, plan) for plan in plans], factors(widest, _LOOKED_AT)):
        plan = plans[place]
        cost, memory = evaluate(plan)
        pool.append(
            PooledPlan(plan=plan, pays_from=pays_from, pays_to=pays_to, step_s=cost.step_s, memory_bytes=memory.fullest_bytes)
        )
    return pool


def require_range(cluster: Cluster, widest: float) -> None:
    """Raises UserError for one site or a factor of at most 1."""
    if cluster.sizes[0] < 2 or widest <= 1:
        raise UserError(f"cluster {cluster.name}: a pool of plans needs two sites, and a factor above 1 (found {widest:g})")


def factors(widest: float, number: int) -> list[float]:
    """So many, an odd number, from 1 / ``widest`` to ``widest`` in equal ratios; the middle one is 1."""
    return [float(widest**power) for power in np.linspace(-1, 1, number)]


def spans(steps_at: Sequence[StepAt], looked: Sequence[float], halvings: int = HALVINGS) -> list[Span]:
    """Which plan is the fastest at which factors, from the first of those that are ``looked`` at to the last."""
    best = _fastest(_steps_s(steps_at, looked))
    edges = [at for at in range(1, len(looked)) if best[at] != best[at - 1]]
    thresholds = [equal_at(steps_at[best[at - 1]], steps_at[best[at]], looked[at - 1], looked[at], halvings) for at in edges]
    ends = zip([looked[0], *thresholds], [*thresholds, looked[-1]], strict=True)
    return [Span(best[first], *both) for first, both in zip([0, *edges], ends, strict=True)]


def worth_having(steps_at: Sequence[StepAt], looked: Sequence[float], share: float) -> list[int]:
    """Places of few plans, the first one among them, with which no step at the factors that are ``looked`` at takes over such a
    ``share`` more than with all."""
    steps_s, found = _steps_s(steps_at, looked), [0]
    least_s = steps_s.min(axis=0)
    while (lacks := steps_s[found].min(axis=0) / least_s).max() > 1 + share:
        found.append(int(steps_s[:, lacks.argmax()].argmin()))
    return sorted(found)


def _steps_s(steps_at: Sequence[StepAt], looked: Sequence[float]) -> FloatArray:
    """[plans, factors]"""
    return np.array([[step_at(factor) for factor in looked] for step_at in steps_at])


def _fastest(steps_s: FloatArray) -> Sequence[int]:
    """[factors]: the fastest plan ([plans, factors]); among equals the one before stays."""
    chosen = [int(steps_s[:, 0].argmin())]
    for column in steps_s.T[1:]:
        stays = column[chosen[-1]] <= column.min() * (1 + TIE)
        chosen.append(chosen[-1] if stays else int(column.argmin()))
    return chosen


def _changed_bytes(plan: Plan) -> float:
    """Bytes of exact copies of a step between sites, where they travel as changes."""
    if plan.cluster.sizes[0] == 1 or not plan.level_codecs[0].experts.is_change:
        return 0.0
    copies = sum(one.num_layers * float(one.placement.num_moved[0].sum()) for one in plan.placed)
    return copies * Wire(workload=plan.workload).expert_bytes
