"""Local search: walks on the serving table, which a smoothed step guides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hybridep.arrays import IntArray
from hybridep.compiled import compiled
from hybridep.plan import Residency
from planner.sites.cost import site_cost
from planner.sites.flows import SHARPEST
from planner.sites.moves import any_move, near_sites, propose, seed_moves
from planner.sites.problem import SiteProblem
from planner.sites.room import room_of
from planner.sites.search import Found, Search
from planner.sites.smoothed import Guide, allowed, change, guide_of, has_room, limit, restart, smooth_value, undo

COOLER = 50
"""How much less warmth there is in the end."""
HELPS = 3e-3
"""What walks must shorten the step by to be followed by others."""
FITTING = 1000
"""Moves at most that make a table fit, each of which is costed exactly."""
TRIED = 10
"""Of which the best one is taken."""
ANY_SEED = 2**32


class Pace(NamedTuple):
    """Of walks."""

    walks: int
    """How many begin."""
    moves: int
    """Of each at first."""
    stretch: int
    """Moves after which the table may be costed exactly."""
    warmth: float
    """Share of a step by which a move may lengthen it at first, about."""
    begins: tuple[int, ...]
    """How sharp the norm is (``planner.sites.flows``) at first, walk by walk in turn: blunt ones lead to better tables where all
    links are about as busy, and lose what is good where few links decide."""
    repeats: int
    """How often the last table is walked on from at most, each time with twice as many moves. What luck has left out another
    round finds sooner (``strategy.walk``), and moves that are counted make the same plan on any machine."""


FULL_SITES, FEW_SITES, SOME_SITES = 20, 32, 64
FEW = Pace(32, 16000, 500, 5e-4, (2, 3, 5), 3)
"""Among so many sites at most; walks are shorter among fewer than ``FULL_SITES``, with the square of their number."""
SOME = Pace(16, 12000, 500, 5e-4, (3, 5), 4)
"""Moves take longer, so fewer walks begin; the bluntest norm gains nothing."""
MANY = Pace(4, 48000, 10000, 5e-6, (4, 5), 4)
"""A single move changes a step by little, and to cost a table takes long."""


def pace_of(problem: SiteProblem) -> Pace:
    """By the number of sites."""
    if problem.num_sites > FEW_SITES:
        return SOME if problem.num_sites <= SOME_SITES else MANY
    return FEW._replace(moves=round(FEW.moves * min(problem.num_sites / FULL_SITES, 1) ** 2))


def improve_tables(search: Search, tables: Sequence[Found], moves: int, rng: np.random.Generator) -> None:
    """A walk of so many moves from each; from the better half of where they end with twice as many each, and so on; from the last
    one with four times as many in each of the ways that walks begin, with twice as many in each again, and so on, as long as that
    helps, ``Pace.repeats`` times at most. Tables that do not fit are left out, but for the first if none does."""
    tables = [one for one in tables if one.rank[0] == 0] or tables[:1]
    pace, turn = pace_of(search.problem), 0
    begins = pace.begins
    while len(tables) > 1 and not search.over:
        ends = [_walk(search, one, moves, begins[(turn + at) % len(begins)], rng) for at, one in enumerate(tables)]
        tables = sorted(ends, key=lambda one: one.rank)[: len(tables) // 2]
        moves *= 2
        turn += 1
    for _ in range(pace.repeats):
        if search.over:
            break
        moves *= 2
        best = tables[0]
        for begin in begins:
            best = _walk(search, best, moves, begin, rng)
        if not helped(tables[0], best):
            break
        tables = [best]


def walked(
    guide: Guide, near: IntArray, pace: Pace, moves: int, cost_s: Callable[[IntArray], float], rng: np.random.Generator
) -> tuple[float, IntArray]:
    """As ``_walk``, of what ``cost_s`` says of a table ([D, E]; infinite for none): the least, and the table that has it."""
    least_s, best = cost_s(guide.state.table), guide.state.table.copy()
    promised, sharpness, begin = np.inf, 0, pace.begins[-1]
    for begun in range(0, moves, pace.stretch):
        now, warmth = _at(pace, begin, begun, moves)
        if now != sharpness:
            sharpness, promised = now, np.inf
        value = _stretch(guide, near, pace.stretch, warmth, sharpness, int(rng.integers(ANY_SEED)))
        if value >= promised:
            continue
        promised, table_s = value, cost_s(guide.state.table)
        if table_s < least_s:
            least_s, best = table_s, guide.state.table.copy()
    return least_s, best


def _at(pace: Pace, begin: int, begun: int, moves: int) -> tuple[int, float]:
    """How sharp the norm is, and how warm a walk, after ``begun`` of its moves."""
    return begin + (SHARPEST + 1 - begin) * begun // moves, pace.warmth * COOLER ** (-begun / moves)


def helped(before: Found, after: Found) -> bool:
    """Whether walks from the one to the other are worth others."""
    return after.rank < (before.rank[0], before.rank[1] * (1 - HELPS))


def _walk(search: Search, best: Found, moves: int, begin: int, rng: np.random.Generator) -> Found:
    """Moves that make the smoothed step shorter, or longer by ever less, whose norm is as sharp as ``begin`` at first and gets
    sharper. Where a stretch of them ends is costed exactly, if it promises to be better than where all before did with a norm as
    sharp, in the configuration of ``best``. Returns the best of these, in its best one, or ``best``."""
    if best.rank[0] > 0:
        best = _made_to_fit(search, best, rng)
    if best.configuration is None or best.rank[0] > 0:
        return best
    problem, configuration = _deciding(search, best), best.configuration
    guide = guide_of(problem, best.table, configuration.residency)
    limit(guide, room_of(problem, best.table, configuration), _left_usd(problem, best))
    pace, near, begun, least, sharpness = pace_of(problem), near_sites(problem), 0, np.inf, 0
    stretch = pace.stretch
    while begun < moves and not search.over:
        now, warmth = _at(pace, begin, begun, moves)
        if now != sharpness:
            sharpness, least = now, np.inf
        promised = _stretch(guide, near, min(stretch, moves - begun), warmth, sharpness, int(rng.integers(ANY_SEED)))
        begun += stretch
        if promised >= least:
            continue
        found = search.evaluate(guide.state.table.copy(), configuration)
        if found.rank[0] > 0:
            # Too far for memory, or a budget: back, and on in smaller steps.
            stretch = max(stretch // 2, 1)
            guide.state.table[:] = best.table
        else:
            stretch, least = min(2 * stretch, pace.stretch), promised
            limit(guide, room_of(problem, found.table, configuration), _left_usd(problem, found))
            best = min(best, found, key=lambda one: one.rank)
    return min(best, search.evaluate(best.table), key=lambda one: one.rank)


def _left_usd(problem: SiteProblem, found: Found) -> float:
    """Of the budget, for each layer; time that a walk saves is rent that it may spend, too, once the table has been costed."""
    if problem.goal.budget_usd is None:
        return np.inf
    assert found.cost is not None
    return max(problem.goal.budget_usd - found.cost.step_usd, 0.0) / problem.num_layers


@compiled
def _stretch(guide: Guide, near: IntArray, moves: int, warmth: float, sharpness: int, seed: int) -> float:
    """So many moves; the smoothed value where they end."""
    np.random.seed(seed)
    restart(guide, sharpness)
    value = smooth_value(guide)
    for _ in range(moves):
        propose(guide, near)
        if guide.state.number[0] == 0 or not allowed(guide):
            continue
        change(guide)
        trial = smooth_value(guide)
        if has_room(guide) and trial <= value * (1 - warmth * np.log(1 - np.random.random())):
            value = trial
        else:
            undo(guide)
    return value


def fitting(search: Search, tables: Sequence[Found], evaluations: int, rng: np.random.Generator) -> list[Found]:
    """Tables that fit, and in place of the others what they become when they are made to, one by one until so many tables have
    been costed: what just fits may lead nowhere. If none does, the one where least is missing."""
    starts, most = [one for one in tables if one.rank[0] == 0], search.evaluations + evaluations
    for one in tables:
        if one.rank[0] > 0 and search.evaluations < most:
            starts.append(_made_to_fit(search, one, rng))
    return [one for one in starts if one.rank[0] == 0] or sorted([*starts, *tables], key=lambda one: one.rank)[:1]


def _made_to_fit(search: Search, best: Found, rng: np.random.Generator) -> Found:
    """By moves that leave less memory, or dollars, missing than before, until nothing is: of ``TRIED`` each the one that costs
    least, in time or whatever is the goal, for what it gains."""
    state = guide_of(search.problem, best.table, Residency.STEP).state
    seed_moves(int(rng.integers(ANY_SEED)))
    for _ in range(FITTING // TRIED):
        if search.over or best.rank[0] == 0:
            break
        tried = []
        for _ in range(TRIED):
            state.table[:] = best.table
            state.number[0] = 0
            any_move(state)
            sites, experts, holders = state.proposed[:, : state.number[0]]
            table = best.table.copy()
            table[sites, experts] = holders
            tried.append(search.evaluate(table))
        gaining = [one for one in tried if one.rank[0] < best.rank[0]]
        best = min(gaining, key=lambda one: (one.rank[1] - best.rank[1]) / (best.rank[0] - one.rank[0]), default=best)
    return best


def _deciding(search: Search, best: Found) -> SiteProblem:
    """Of the search's scenarios the one whose step or price is that of ``best``."""
    assert best.configuration is not None
    for one in search.scenarios[:-1]:
        cost = site_cost(one, best.table, best.configuration)
        if one.goal.value(cost.step_s, cost.step_usd) == best.rank[1]:
            return one
    return search.scenarios[-1]
