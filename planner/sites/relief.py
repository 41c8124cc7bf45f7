"""Memory for one more user: what a hub's own tokens leave to others.

What limits a hub's users is often memory rather than links. A hub sends little, so its own tokens can have some of their experts
elsewhere, at the same few holders that others find one by one, while the hub still serves those experts to its users. The
activations that this saves are those of one site of several, on the ranks that lack room.
"""

from __future__ import annotations

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.plan import Residency
from planner.activations import routed_bytes
from planner.sites.cost import rank_memory_bytes
from planner.sites.exchange import layer_exchanges
from planner.sites.problem import Inside, SiteProblem
from planner.sites.spread import Spread, left_out, spread_table

ROUNDS = 3
"""Tokens that leave need some memory themselves, for what comes back of them."""
AT_LEAST = 0.2
"""What is wanted grows by such a share of itself where some is still missing: a little more may change nothing."""


def relieved_table(problem: SiteProblem, spread: Spread, table: IntArray, own: IntArray | None = None) -> IntArray | None:
    """[D, E]: ``table``, which is that of ``spread`` and of what users hold themselves (``own``), with tokens of hubs sent away
    until copies may stay for the whole step in all ranks' memory, or as it is where they may already; None where hubs' links have
    too little room for that."""
    missing_bytes = wanted_bytes = _missing_bytes(problem, table)
    for _ in range(ROUNDS):
        if not missing_bytes.any():
            return table
        away = _sent_away(problem, spread, wanted_bytes)
        if away is None:
            return None
        table = spread_table(problem, spread, away, own)
        missing_bytes = _missing_bytes(problem, table)
        more_bytes = np.maximum(missing_bytes, AT_LEAST * wanted_bytes)
        wanted_bytes = wanted_bytes + np.where(missing_bytes > 0, more_bytes, 0.0)
    return None if missing_bytes.any() else table


def _missing_bytes(problem: SiteProblem, table: IntArray) -> FloatArray:
    """[D, n]: what ranks lack if copies stay."""
    inside = problem.everywhere(Inside.ONE)
    needs = rank_memory_bytes(problem, layer_exchanges(problem, table, inside), Residency.STEP)
    return np.maximum(needs - problem.compute.memory_bytes, 0.0)


def _sent_away(problem: SiteProblem, spread: Spread, wanted_bytes: FloatArray) -> np.ndarray | None:
    """[hubs, E]: experts that each hub's own tokens find elsewhere, so that its ranks need so much less; None where that is more
    than its links have room for, or others lack memory, too."""
    hubs, missing = spread.plan.hubs, left_out(problem, spread)
    if wanted_bytes.sum() > wanted_bytes[hubs].sum():
        return None
    # Experts that many hubs leave out have holders with room.
    order = np.argsort(-missing.sum(axis=0), kind="stable")
    rows = spread.plan.rows(problem)[0] / problem.hit[1] * (1 + 1e-9)
    away = np.zeros_like(missing)
    for number, hub in enumerate(hubs):
        for rank in np.flatnonzero(wanted_bytes[hub]):
            computed = (problem.home_inside == rank) & ~missing[number]
            here = order[(computed & (problem.home_site != hub))[order]]
            count = int(np.searchsorted(_saved_bytes(problem, int(hub), int(computed.sum())), wanted_bytes[hub, rank]))
            if count > len(here):
                return None
            away[number, here[:count]] = True
        if (missing[number] | away[number]).sum() > rows[hub]:
            return None
    return away


def _saved_bytes(problem: SiteProblem, site: int, held: int) -> FloatArray:
    """[held + 1]: activations that a rank with so many experts saves at least if tokens of its own site have 0, 1, .. of them
    elsewhere."""
    counts, n = np.arange(held + 1), problem.num_inside
    served = counts * (n * problem.rows_per_choice[site])
    arrived = n * problem.tokens[site] * (problem.hit[held] - problem.hit[held - counts])
    return problem.num_layers * routed_bytes(problem.workload, served, arrived, problem.recompute).kept
