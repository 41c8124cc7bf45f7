"""Tables for sites of very uneven links: the fastest hold all experts, each serving as many of the others as its links carry."""

from __future__ import annotations

import numpy as np

from hybridep.placement import IntArray
from planner.sites.grouping import assign, distance
from planner.sites.problem import SiteProblem


def hub_table(problem: SiteProblem, count: int, team: int) -> IntArray:
    """[D, E]: ``count`` hubs of ``team`` sites each; the hubs' sites are the fastest, and each hub gets users in proportion to
    the slowest link of its sites, near ones where paths between sites differ."""
    rate = np.minimum(problem.up_bytes_per_s, problem.down_bytes_per_s)
    order = np.argsort(-rate, kind="stable")
    hubs = order[: count * team].reshape(count, team)
    room = shares_of(len(order) - count * team, rate[hubs].min(axis=1))
    table = np.empty((problem.num_sites, problem.num_experts), dtype=np.int64)
    even = np.full(team, problem.num_experts // team) + (np.arange(team) < problem.num_experts % team)
    rows = [assign(problem, [int(site) for site in members], even) for members in hubs]
    for members, row in zip(hubs, rows, strict=True):
        table[members] = row
    apart = distance(problem) if problem.pair_bytes_per_s is not None else None
    owner = np.repeat(np.arange(count), room)
    for turn, user in enumerate(order[count * team :]):
        chosen = int(owner[turn])
        if apart is not None:
            costs = np.where(room > 0, apart[user][hubs].max(axis=1), np.inf)
            chosen = int(np.argmin(costs))
            room[chosen] -= 1
        table[user] = rows[chosen]
    return table


def shares_of(total: int, weight: np.ndarray) -> IntArray:
    """``total`` in whole parts in proportion to ``weight``: the largest remainders are rounded up."""
    exact = total * weight / weight.sum()
    whole = np.floor(exact).astype(np.int64)
    rest = np.argsort(-(exact - whole), kind="stable")[: total - int(whole.sum())]
    whole[rest] += 1
    return np.asarray(whole)
