"""A bound on the steps of all plans for experts whose popularity was measured, between sites that differ.

Layers add up, so each is bounded by itself, as if all were like it. Bounds are made for experts that are all alike; what holds
for any n experts of a layer is that tokens need them at least as often as its n least popular ones, which may be next to never.
So the least popular are left out: whatever a plan does with the others takes no longer without them. How many to leave out is
tried, in each layer close to what was best in the one before. First comes a bound for all layers together, with all experts: it
needs less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hybridep.arrays import IntArray
from hybridep.gating import Gating, gating
from hybridep.plan import Plan
from hybridep.workload import UNGROUPED
from planner.clock import now_s
from planner.cost import step_cost
from planner.sites.bound import prove
from planner.sites.least_hit import least_hit
from planner.sites.problem import SiteProblem
from planner.sites.relaxation import Relaxation

LEFT_OUT = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Shares of the experts that are tried."""
TOGETHER = 0.25
"""Share of the time for all layers together."""
TRYING = 0.4
"""Share of a layer's time, all tries together; the best goes on in the rest."""
MOST_BOXES = 20_000
"""Of a proof."""


def least_s(problem: SiteProblem, plan: Plan, deadline_s: float) -> float:
    """No plan for ``plan``'s popularity takes less, whatever table each layer has. Memory limits nothing: layers need different
    amounts."""
    roomy = problem.cluster.gpu.model_copy(update={"memory": 1e18})
    sites = tuple(
        site.model_copy(update={"gpu": None if site.gpu is None else site.gpu.model_copy(update={"memory": None})})
        for site in problem.cluster.sites
    )
    relaxed = replace(problem, cluster=problem.cluster.model_copy(update={"gpu": roomy, "sites": sites}))
    homes = [placement.home for _, number, _, placement, _ in plan.placed for _ in range(number)]
    relaxed = replace(relaxed, home=np.sort(homes[0]))
    layers = [gating(problem.workload, shares, problem.cluster) for shares in plan.popularity]
    least = np.min([least_hit(one, np.argsort(one.chosen, kind="stable")) for one in layers], axis=0)
    until_s = now_s() + TOGETHER * max(0.0, deadline_s - now_s())
    together_s = _proven_s(replace(relaxed, least_hit=least, by_popularity=True), step_cost(plan).step_s, until_s)
    bounds_s: list[float] = []
    size = len(LEFT_OUT)
    tried = sorted(range(size), key=lambda which: abs(which - size // 2))
    for number, chosen in enumerate(layers):
        left_s = deadline_s - now_s()
        if left_s <= 0:
            bounds_s.append(together_s)
            continue
        ends_s = now_s() + left_s / (len(layers) - number)
        bound_s, best = _layer_s(relaxed, chosen, homes[number], tried, as_all_s(plan, number), ends_s)
        bounds_s.append(max(bound_s, together_s))
        tried = [which for which in (best, best - 1, best + 1) if 0 <= which < size]
    return float(np.mean(bounds_s))


def as_all_s(plan: Plan, layer: int) -> float:
    """The plan's step if all layers were as this one."""
    layers = len(plan.popularity)
    [group] = [one for one in plan.layers if one.first_layer <= layer < one.first_layer + one.num_layers]
    alike = plan.model_copy(
        update={
            "layers": (group.model_copy(update={"first_layer": 0, "num_layers": layers}),),
            "popularity": (plan.popularity[layer],) * layers,
            "prediction": None,
        }
    )
    return step_cost(alike).step_s


def _layer_s(
    problem: SiteProblem, chosen: Gating, home: IntArray, tried: Sequence[int], best_s: float, deadline_s: float
) -> tuple[float, int]:
    """(bound of steps whose layers are all as the one with these choices, which of ``LEFT_OUT`` it is made with). The first that
    is ``tried`` is, however little time there is."""
    order, began_s = np.argsort(chosen.chosen, kind="stable"), now_s()

    def without_s(which: int, until_s: float) -> float:
        number = min(round(LEFT_OUT[which] * len(order)), len(order) - problem.workload.model.top_k)
        return _of_kept_s(problem, chosen, home, order[number:], best_s, until_s)

    each_s = TRYING * (deadline_s - began_s) / len(tried)
    found: list[tuple[float, int]] = []
    for place, which in enumerate(tried, start=1):
        if not found or now_s() < deadline_s:
            found.append((without_s(which, began_s + each_s * place), which))
    bound_s, best = max(found)
    return max(bound_s, without_s(best, deadline_s)) if now_s() < deadline_s else bound_s, best


def _of_kept_s(problem: SiteProblem, chosen: Gating, home: IntArray, kept: IntArray, best_s: float, deadline_s: float) -> float:
    """With no other experts than ``kept``, the least popular first."""
    model = problem.workload.model.model_copy(update={"num_experts": len(kept), **UNGROUPED})
    fewer = replace(
        problem,
        workload=problem.workload.model_copy(update={"model": model}),
        home=np.sort(home[kept]),
        least_hit=least_hit(chosen, kept),
        by_popularity=True,
    )
    return _proven_s(fewer, best_s, deadline_s)


def _proven_s(problem: SiteProblem, best_s: float, deadline_s: float) -> float:
    return prove(Relaxation(problem=problem), best_s, max_boxes=MOST_BOXES, deadline_s=deadline_s).bound_s
