"""Local search: walks on the serving table, which a smoothed step guides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridep.compiled import compiled
from hybridep.placement import IntArray
from hybridep.plan import Residency
from planner.sites.cost import site_cost
from planner.sites.flows import NOW
from planner.sites.grouping import MANY
from planner.sites.moves import any_move, near_sites, relieving_move, seed_moves
from planner.sites.problem import SiteProblem
from planner.sites.search import Found, Search
from planner.sites.smoothed import Guide, allowed, busiest_value, change, copy, guide_of, restart, smooth_value, undo

WARMTH = 5e-4
"""Share of a step by which a move may lengthen it at first, about."""
COOLER = 50
"""How much less that is in the end."""
HELPS = 1e-3
"""What a walk must shorten the step by to be followed by another."""
FITTING = 1000
"""Moves at most that make a table fit, each of which is costed exactly."""
STRETCH = 1000
"""Moves after which the best table that they promised is costed exactly."""
ANY_SEED = 2**32


def prepare(problem: SiteProblem) -> None:
    """Compiles what walks need: once on a machine that takes some 20 s, which shall not count as time of a search."""
    guide = guide_of(problem, np.tile(problem.home_site, (problem.num_sites, 1)), Residency.STEP)
    _stretch(guide, near_sites(problem), guide.state.table[NOW].copy(), busiest_value(guide), 0, WARMTH, 0)


def improve_tables(search: Search, tables: Sequence[Found], moves: int, rng: np.random.Generator) -> None:
    """A walk of so many moves from each; from the better half of where they end with twice as many each, and so on; from the last
    one again and again, as long as that helps. Tables without enough memory are left out, but for the first if none has it.
    Nothing among many sites: one site's move hardly changes their step."""
    if search.problem.num_sites > MANY:
        return
    tables = [one for one in tables if one.rank[0] == 0] or tables[:1]
    while tables and not search.over:
        ends = sorted((_walk(search, one, moves, rng) for one in tables), key=lambda one: one.rank)
        if len(tables) > 1:
            tables, moves = ends[: len(tables) // 2], 2 * moves
        else:
            helped = ends[0].rank < (tables[0].rank[0], tables[0].rank[1] * (1 - HELPS))
            tables = ends if helped else []


def _walk(search: Search, best: Found, moves: int, rng: np.random.Generator) -> Found:
    """Moves that make the smoothed step shorter, or longer by ever less; of every stretch the table that promises to be the best,
    if it does so of all before, is costed exactly. Returns the best of these, or ``best``."""
    if best.rank[0] > 0:
        best = _made_to_fit(search, best, rng)
    if best.configuration is None or best.rank[0] > 0:
        return best
    guide = guide_of(_deciding(search, best), best.table, best.configuration.residency)
    near, table = near_sites(search.problem), best.table.copy()
    begun, stretch, least = 0, STRETCH, busiest_value(guide)
    while begun < moves and not search.over:
        warmth = WARMTH * COOLER ** (-begun / moves)
        promised = _stretch(guide, near, table, least, min(stretch, moves - begun), warmth, int(rng.integers(ANY_SEED)))
        begun += stretch
        if promised >= least:
            continue
        found = search.evaluate(table.copy())
        if found.rank[0] > 0:
            # Too far for memory, or a budget: back, and on in smaller steps.
            stretch = max(stretch // 2, 1)
            guide.state.table[NOW] = best.table
        else:
            stretch, least = min(2 * stretch, STRETCH), promised
            best = min(best, found, key=lambda one: one.rank)
    return best


@compiled
def _stretch(guide: Guide, near: IntArray, table: IntArray, least: float, moves: int, warmth: float, seed: int) -> float:
    """So many moves. What the best table on the way promises, if that is below ``least``; it is written to ``table`` then."""
    np.random.seed(seed)
    restart(guide)
    value = smooth_value(guide)
    for _ in range(moves):
        sites, rows = relieving_move(guide, near)
        if not allowed(guide.work, sites, rows):
            continue
        change(guide, sites, rows)
        trial = smooth_value(guide)
        if trial > value * (1 - warmth * np.log(1 - np.random.random())):
            undo(guide, sites)
            continue
        value, promised = trial, busiest_value(guide)
        if promised < least * (1 - 1e-6):
            least = promised
            for site in range(len(table)):
                copy(guide.state.table[NOW, site], table[site])
    return least


def _made_to_fit(search: Search, best: Found, rng: np.random.Generator) -> Found:
    """By moves that leave no more memory, or dollars, missing than before, until nothing is."""
    seed_moves(int(rng.integers(ANY_SEED)))
    for _ in range(FITTING):
        if search.over or best.rank[0] == 0:
            break
        sites, rows = any_move(best.table)
        table = best.table.copy()
        table[sites] = rows
        best = min(search.evaluate(table), best, key=lambda one: one.rank)
    return best


def _deciding(search: Search, best: Found) -> SiteProblem:
    """Of the search's scenarios the one whose step or price is that of ``best``."""
    assert best.configuration is not None
    for one in search.scenarios[:-1]:
        cost = site_cost(one, best.table, best.configuration)
        if one.goal.value(cost.step_s, cost.step_usd) == best.rank[1]:
            return one
    return search.scenarios[-1]
