"""Local search: moves on groups of sites, then on the serving table itself, where most relieve what is busiest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hybridep.placement import IntArray
from planner.sites.cost import site_cost
from planner.sites.grouping import MANY, Groups, Share, groups_of, shared_table
from planner.sites.problem import SiteProblem
from planner.sites.search import Found, Search
from planner.sites.smoothed import Smoothed

WARMTH = 1e-3
"""Share of a step by which a move may lengthen it at first, about."""
COOLER = 50
"""How much less that is in the end."""
HELPS = 1e-3
"""What a walk must shorten the step by to be followed by another."""
RELIEVING = 0.6
"""Share of moves that relieve the busiest link of an exchange."""
NEAR = 8
"""Sites that count as near another."""

Move = tuple[IntArray, IntArray]
"""Sites [k] that get new rows [k, E]."""


def improve_groups(search: Search, groups: Groups, share: Share, rng: np.random.Generator) -> Found:
    """Move a site to another group, or swap two, while it helps."""
    problem = search.problem
    size = problem.num_sites
    label = np.empty(size, dtype=np.int64)
    for number, members in enumerate(groups):
        label[list(members)] = number

    def evaluated(labels: IntArray) -> Found:
        return search.evaluate(shared_table(problem, groups_of(labels), share))

    here = evaluated(label)
    patience = 0
    while patience < 8 * size and not search.over:
        trial = label.copy()
        if rng.random() < 0.5:
            trial[rng.integers(size)] = rng.integers(label.max() + 2)
        else:
            a, b = rng.integers(size, size=2)
            trial[a], trial[b] = label[b], label[a]
        there = evaluated(trial)
        patience = 0 if there.rank < here.rank else patience + 1
        if there.rank <= here.rank:
            label, here = trial, there
    return here


def improve_tables(search: Search, tables: Sequence[Found], moves: int, rng: np.random.Generator) -> None:
    """A walk of so many moves from each; from the better half of where they end with twice as many each, and so on; from the last
    one again and again, as long as that helps. Nothing among many sites: one site's move hardly changes their step."""
    if search.problem.num_sites > MANY:
        return
    while tables and not search.over:
        ends = sorted((_walk(search, one, moves, rng) for one in tables), key=lambda one: one.rank)
        if len(tables) > 1:
            tables, moves = ends[: len(tables) // 2], 2 * moves
        else:
            helped = ends[0].rank < (tables[0].rank[0], tables[0].rank[1] * (1 - HELPS))
            tables = ends if helped else []


def _walk(search: Search, best: Found, moves: int, rng: np.random.Generator) -> Found:
    """Moves that make the smoothed step shorter, or longer by ever less; every table that promises to be better than all before
    is costed exactly. Returns the best of these, or ``best``."""
    if best.rank[0] > 0:
        best = _made_to_fit(search, best, moves, rng)
    if best.configuration is None or best.rank[0] > 0:
        return best
    problem, residency, rules = _deciding(search, best), best.configuration.residency, search.problem.permissions
    near = _near(problem)
    at = Smoothed(problem, best.table, residency)
    least = at.busiest_value
    for turn in range(moves):
        if search.over:
            break
        sites, rows = _move(at, near, rng)
        if (rows == at.table[sites]).all():
            continue
        if rules is not None and not (rules.serve[sites[:, None], rows] & rules.hold[rows, np.arange(rows.shape[1])]).all():
            continue
        trial = at.trial(sites, rows)
        longer = WARMTH * COOLER ** (-turn / moves) * -math.log(1 - rng.random())
        if trial.value > at.value * (1 + longer):
            continue
        at.accept(trial)
        if at.busiest_value < least * (1 - 1e-6):
            least = at.busiest_value
            best = min(best, search.evaluate(at.table.copy()), key=lambda one: one.rank)
    return best


def _made_to_fit(search: Search, best: Found, moves: int, rng: np.random.Generator) -> Found:
    """By moves that leave no more memory, or dollars, missing than before, until nothing is."""
    for _ in range(moves):
        if search.over or best.rank[0] == 0:
            break
        sites, rows = _any(best.table, rng)
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


def _near(problem: SiteProblem) -> IntArray:
    """[D, NEAR or less]: other sites, those with the fastest links both ways first, or the least latency."""
    apart = problem.latency_s if problem.pair_bytes_per_s is None else 1 / problem.pair_bytes_per_s
    return np.argsort(apart + apart.T, axis=1, kind="stable")[:, 1 : NEAR + 1]


def _move(at: Smoothed, near: IntArray, rng: np.random.Generator) -> Move:
    """Often one that takes something from the busiest link of an exchange, chosen in proportion to what it takes."""
    exchanges_s = np.cumsum(at.exchanges_s)
    if rng.random() > RELIEVING or exchanges_s[-1] <= 0:
        return _any(at.table, rng)
    copies, back = divmod(min(int(np.searchsorted(exchanges_s, rng.random() * exchanges_s[-1], side="right")), 3), 2)
    if copies:
        return _fewer_copies(at, *at.copies.at_busiest(bool(back), rng), rng)
    return _fewer_rows(at.table, *at.tokens.at_busiest(bool(back), rng), near, rng)


def _fewer_rows(table: IntArray, user: int, holder: int, near: IntArray, rng: np.random.Generator) -> Move:
    """``user`` has some of the experts that it finds at ``holder`` elsewhere, or takes over another site's row."""
    row = table[user].copy()
    experts = _some(np.flatnonzero(row == holder), rng)
    other, kind = rng.integers(len(table)), rng.random()
    if kind < 0.3:
        row[experts] = user
    elif kind < 0.6:
        row[experts] = table[other, experts]
    elif kind < 0.75:
        row = table[other].copy()
    elif kind < 0.9:
        row[experts] = near[user, rng.integers(near.shape[1])]
    else:
        row[experts] = row[rng.integers(len(row))]
    return np.array([user]), row[None, :]


def _fewer_copies(at: Smoothed, home: int, holder: int, rng: np.random.Generator) -> Move:
    """All who find some of the experts of ``home`` at ``holder`` have them elsewhere."""
    table, size = at.table, len(at.table)
    held = np.flatnonzero((at.users[holder] > 0) & (at.problem.home_site == home))
    experts = held[rng.integers(len(held), size=1)] if rng.random() < 0.6 else _some(held, rng)
    there = np.zeros(table.shape, dtype=np.bool_)
    there[:, experts] = table[:, experts] == holder
    users = np.flatnonzero(there.any(axis=1))
    rows, kind = table[users], rng.random()
    if kind < 0.4:
        elsewhere = table[rng.integers(size)][None, :]
    elif kind < 0.6:
        elsewhere = np.full((1, 1), home)
    elif kind < 0.8:
        elsewhere = table[rng.integers(size, size=len(users))]
    else:
        elsewhere = rng.integers(size, size=(1, 1))
    return users, np.where(there[users], elsewhere, rows)


def _any(table: IntArray, rng: np.random.Generator) -> Move:
    """Exchanged rows or exchanged holders; or, of a site or of all with its row, another site's row or another holder of some
    experts."""
    size, kind = len(table), rng.random()
    one, other = rng.integers(size, size=2)
    if one != other and 0.2 <= kind < 0.35:
        return np.array([one, other]), table[[other, one]]
    if one != other and 0.35 <= kind < 0.5:
        sites = np.flatnonzero(((table == one) | (table == other)).any(axis=1))
        rows = table[sites]
        return sites, np.where(rows == one, other, np.where(rows == other, one, rows))
    sites = np.flatnonzero((table == table[one]).all(axis=1)) if rng.random() < 0.6 else np.array([one])
    if kind < 0.2:
        return sites, np.repeat(table[other][None, :], len(sites), axis=0)
    experts = _some(np.flatnonzero(table[one] == table[one, rng.integers(table.shape[1])]), rng)
    kind, rows = rng.random(), table[sites]
    rows[:, experts] = one if kind < 0.3 else table[one, rng.integers(table.shape[1])] if kind < 0.5 else other
    return sites, rows


def _some(among: IntArray, rng: np.random.Generator) -> IntArray:
    """All, or any number of them."""
    if rng.random() < 0.5:
        return among
    return rng.permutation(among)[: rng.integers(1, len(among) + 1)]
