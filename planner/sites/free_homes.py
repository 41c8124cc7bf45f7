"""Experts' homes where links are fast: what a home sends to all others, and takes back, passes its site's links.

Homes in even blocks give some sites one expert more than others by their place in the cluster file, or one where others have
none; so the slowest may be who everybody waits for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.placement import homes_of
from hybridep.shares import apportion
from planner.sites.others import other_plan
from planner.sites.problem import SiteProblem
from planner.sites.solution import Wishes, solve_sites

_COMPARED = ("ep", "full_gather", "rank_order_domains", "dt_fm")
"""Planners by whose best plan homes are compared, before anything is searched for."""
_CLEARLY = 0.005
"""Share of the step that other homes must save."""
_LOOK = 0.1
"""Share of the time for a search with either."""


def with_better_homes(problem: SiteProblem, wishes: Wishes) -> tuple[SiteProblem, Wishes]:
    """The problem with the homes that it has, or as many at each site as its links are fast, whichever a short search of both
    prefers, from whose table the next one begins."""
    other = with_faster_homes(problem)
    if other is problem:
        return problem, wishes
    look_s = _LOOK * wishes.time_limit_s
    look = replace(wishes, time_limit_s=look_s, paced_by_s=look_s, keep=1, report=None, proven=False)
    best = min((solve_sites(one, look) for one in (problem, other)), key=lambda found: found.found.rank)
    return best.problem, replace(wishes, seeds=(*wishes.seeds, best.found.table))


def with_faster_homes(problem: SiteProblem) -> SiteProblem:
    """The problem with as many experts at home at each site as its links are fast, if simple plans are clearly shorter so (or fit
    where none does); as it is where sites have ``experts`` of their own, and for one site."""
    if np.ptp(problem.cluster.home_weights) > 0 or problem.num_sites < 2:
        return problem
    numbers = apportion(problem.num_experts, _rates(problem))
    other = replace(problem, home=homes_of(numbers, problem.cluster.sizes))
    if (other.home == problem.home).all():
        return problem
    best, faster = (min(other_plan(one, name).rank for name in _COMPARED) for one in (problem, other))
    return other if faster < (best[0], best[1] * (1 - _CLEARLY)) else problem


def _rates(problem: SiteProblem) -> FloatArray:
    """[D] bytes/s: what each site can send to others, or take from them, whichever is less."""
    up, down, pairs = problem.up_bytes_per_s, problem.down_bytes_per_s, problem.pair_bytes_per_s
    if pairs is not None:
        between = np.where(np.eye(problem.num_sites, dtype=np.bool_), 0.0, pairs)
        up, down = np.minimum(up, between.sum(axis=1)), np.minimum(down, between.sum(axis=0))
    return np.asarray(np.minimum(up, down), dtype=np.float64)
