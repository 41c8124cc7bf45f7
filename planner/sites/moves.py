"""Moves on the serving table, most of which relieve what is busiest: some sites get other rows."""

from __future__ import annotations

import numpy as np

from hybridep.compiled import compiled
from hybridep.placement import IntArray
from planner.constraints import BoolArray
from planner.sites.flows import NOW, TOKENS, any_of, at_busiest
from planner.sites.problem import SiteProblem
from planner.sites.smoothed import Guide, copy

RELIEVING = 0.6
"""Share of moves that relieve the busiest link of an exchange."""
NEAR = 8
"""Sites that count as near another."""

Move = tuple[IntArray, IntArray]
"""Sites [k] that get new rows [k, E]."""


def near_sites(problem: SiteProblem) -> IntArray:
    """[D, NEAR or less]: other sites, those with the fastest links both ways first, or the least latency."""
    apart = problem.latency_s if problem.pair_bytes_per_s is None else 1 / problem.pair_bytes_per_s
    return np.ascontiguousarray(np.argsort(apart + apart.T, axis=1, kind="stable")[:, 1 : NEAR + 1])


@compiled
def seed_moves(seed: int) -> None:
    """Moves drawn from now on follow from it."""
    np.random.seed(seed)


@compiled
def relieving_move(guide: Guide, near: IntArray) -> Move:
    """Often one that takes something from the busiest link of an exchange, chosen in proportion to what it takes."""
    table, exchanges_s = guide.state.table[NOW], (guide.state.busy_s * guide.work.unit_bytes).ravel()
    exchange = any_of(exchanges_s)
    if np.random.random() > RELIEVING or exchanges_s[exchange] == 0:
        return any_move(table)
    kind, way = exchange // 2, exchange % 2
    src, dst = at_busiest(guide.links, guide.flows, kind, way)
    if kind == TOKENS:
        return _fewer_rows(table, src, dst, near)
    return _fewer_copies(guide, src, dst)


@compiled
def _fewer_rows(table: IntArray, user: int, holder: int, near: IntArray) -> Move:
    """``user`` has some of the experts that it finds at ``holder`` elsewhere, or takes over another site's row."""
    sites = np.array([user])
    rows, other, kind = _rows_of(table, sites), any_below(len(table)), np.random.random()
    if 0.6 <= kind < 0.75:
        copy(table[other], rows[0])
        return sites, rows
    anywhere = near[user, any_below(near.shape[1])] if kind < 0.9 else _any_entry(table[user])
    for expert in _some(table[user] == holder):
        rows[0, expert] = user if kind < 0.3 else table[other, expert] if kind < 0.6 else anywhere
    return sites, rows


@compiled
def _fewer_copies(guide: Guide, home: int, holder: int) -> Move:
    """All who find some of the experts of ``home`` at ``holder`` have them elsewhere."""
    table, held = guide.state.table[NOW], (guide.state.users[holder] > 0) & (guide.work.home_site == home)
    size, experts = len(table), _one(held) if np.random.random() < 0.6 else _some(held)
    users = np.zeros(size, dtype=np.bool_)
    for expert in experts:
        for site in range(size):
            users[site] |= table[site, expert] == holder
    sites, kind = marked(users), np.random.random()
    rows, other, anywhere = _rows_of(table, sites), any_below(size), any_below(size)
    for number in range(len(sites)):
        if 0.6 <= kind < 0.8:
            other = any_below(size)
        for expert in experts:
            if rows[number, expert] == holder:
                rows[number, expert] = home if 0.4 <= kind < 0.6 else anywhere if kind >= 0.8 else table[other, expert]
    return sites, rows


@compiled
def any_move(table: IntArray) -> Move:
    """Exchanged rows or exchanged holders; or, of a site or of all with its row, another site's row or another holder of some
    experts."""
    size, kind = len(table), np.random.random()
    one, other, chosen = any_below(size), any_below(size), np.zeros(size, dtype=np.bool_)
    if one != other and 0.35 <= kind < 0.5:
        return _exchanged_holders(table, one, other)
    exchanged = one != other and 0.2 <= kind < 0.35
    alike = not exchanged and np.random.random() < 0.6
    for site in range(size):
        chosen[site] = site == one or (exchanged and site == other) or (alike and np.array_equal(table[site], table[one]))
    sites = marked(chosen)
    rows = _rows_of(table, sites)
    if exchanged or kind < 0.2:
        for number in range(len(sites)):
            copy(table[one if exchanged and sites[number] == other else other], rows[number])
        return sites, rows
    experts, kind, entry = _some(table[one] == _any_entry(table[one])), np.random.random(), _any_entry(table[one])
    for number in range(len(sites)):
        for expert in experts:
            rows[number, expert] = one if kind < 0.3 else entry if kind < 0.5 else other
    return sites, rows


@compiled
def _exchanged_holders(table: IntArray, one: int, other: int) -> Move:
    """What is found at either of two sites is found at the other one."""
    touched = np.zeros(len(table), dtype=np.bool_)
    for site in range(len(table)):
        for holder in table[site]:
            touched[site] |= holder in (one, other)
    sites = marked(touched)
    rows = _rows_of(table, sites)
    for number in range(len(sites)):
        for expert in range(table.shape[1]):
            holder = rows[number, expert]
            rows[number, expert] = other if holder == one else one if holder == other else holder
    return sites, rows


@compiled
def _rows_of(table: IntArray, sites: IntArray) -> IntArray:
    """[k, E]: copies."""
    rows = np.empty((len(sites), table.shape[1]), dtype=np.int64)
    for number in range(len(sites)):
        copy(table[sites[number]], rows[number])
    return rows


@compiled
def _any_entry(row: IntArray) -> int:
    """Of a row."""
    return int(row[any_below(len(row))])


@compiled
def _one(among: BoolArray) -> IntArray:
    """[1]: any of those marked."""
    places = marked(among)
    chosen = any_below(len(places))
    return places[chosen : chosen + 1]


@compiled
def _some(among: BoolArray) -> IntArray:
    """All of those marked, or any number of them."""
    places = marked(among)
    if np.random.random() < 0.5:
        return places
    count = 1 + any_below(len(places))
    for place in range(count):
        other = place + any_below(len(places) - place)
        places[place], places[other] = places[other], places[place]
    return places[:count]


@compiled
def marked(among: BoolArray) -> IntArray:
    """Where it is true."""
    count = 0
    for value in among:
        count += value
    places = np.empty(count, dtype=np.int64)
    for place in range(len(among)):
        if among[place]:
            places[len(places) - count] = place
            count -= 1
    return places


@compiled
def any_below(number: int) -> int:
    """From 0 to one less."""
    return int(np.random.random() * number)
