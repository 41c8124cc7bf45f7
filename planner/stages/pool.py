"""Pipelines to switch between when the links between sites get slower or faster, and the rates from which on each one pays.

All keep the stages of one: the same sites have the same layers, and with them the same homes and the same part of the optimizer's
state, so a switch between two steps moves no weights. What differs is in how many micro-batches the same global batch passes the
stages, and with it which sequences each site has, how far ahead stages run, who copies what inside them, what computes again, and
codecs where these are to be chosen.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from hybridep.errors import InfeasibleError
from hybridep.pipeline import PipelinePlan
from planner.clock import elapsed_s, now_s
from planner.difference import scaled
from planner.goal import FASTEST
from planner.pool import PLANNED_AT, PooledPlan, factors, require_range, spans, worth_having
from planner.stages.bound import least_s
from planner.stages.costs import costed, expected_over
from planner.stages.difference import HALVINGS
from planner.stages.inside import Store
from planner.stages.kept import search_kept
from planner.stages.pipelines import reported
from planner.stages.wishes import StageWishes

_LOOKED_AT = 17
"""Factors at which pipelines are compared; between two of these the threshold is found by halving."""
_OVER = 1.5
"""Multiple of the time limit after which no more searches begin: each does some work, however little time is left."""
_WORTH = 0.01
"""Share of a step up to which another pipeline is not worth a place in the pool."""


def pipeline_pool(
    held: PipelinePlan, wishes: StageWishes | None = None, *, widest: float, time_limit_s: float
) -> list[PooledPlan[PipelinePlan]]:
    """Pipelines with the stages of the one that is ``held``, for links between sites from 1 / ``widest`` to ``widest`` times as
    fast, those for the slowest first; each is the fastest of them in its range, and the held one is among those that are
    compared. Others are left out that make the step no more than a hundredth shorter, since what is expected errs by more. All
    fit the memory, so any can follow any. By what is expected of the step, whatever the goal; wishes are those with which
    ``held`` was made. On KeyboardInterrupt of those that were found. Raises UserError for one site or a factor of at most 1."""
    cluster, workload, asked_s = held.cluster, held.workload, elapsed_s()
    require_range(cluster, widest)
    wishes = replace(wishes or StageWishes(popularity=held.popularity, codecs=held.codecs), goal=FASTEST)
    begun_s, store = now_s(), Store()
    every = [held.at_rates(cluster)]
    with suppress(KeyboardInterrupt):
        # Those for rates near the given ones first, for what ends it early.
        for number, factor in enumerate(sorted(factors(widest, PLANNED_AT), key=lambda one: abs(math.log(one)))):
            left_s = begun_s + time_limit_s - now_s()
            if left_s < (1 - _OVER) * time_limit_s:
                break
            limit_s = max(left_s, 0.0) / (PLANNED_AT - number)
            with suppress(InfeasibleError):  # with codecs that were tried: the held one fits with its own
                found = search_kept(held, scaled(cluster, factor), wishes, time_limit_s=limit_s, store=store)
                every += [one.plan.at_rates(cluster) for one in found]
    plans = list({plan.digest: plan for plan in every}.values())

    @cache
    def step_at(place: int, factor: float) -> float:
        return expected_over(plans[place], scaled(cluster, factor), store)

    looked = factors(widest, _LOOKED_AT)
    few = worth_having([partial(step_at, place) for place in range(len(plans))], looked, _WORTH)
    made = [costed(plans[place], store=store) for place in few]
    outer = wishes.shortest(cluster, workload)
    bound_s = least_s(cluster, workload, wishes.stages or 2, outer, alike=not wishes.popularity)
    told = reported(made, wishes, bound_s, elapsed_s() - asked_s)
    return [
        PooledPlan(
            plan=told[place],
            pays_from=pays_from,
            pays_to=pays_to,
            step_s=made[place].times.step_s,
            memory_bytes=made[place].fullest.fullest_bytes,
        )
        for place, pays_from, pays_to in spans([partial(step_at, place) for place in few], looked, HALVINGS)
    ]
