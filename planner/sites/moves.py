"""Moves on the serving table, most of which relieve what is busy: some sites find some experts elsewhere."""

from __future__ import annotations

import numpy as np

from hybridep.arrays import IntArray
from hybridep.compiled import compiled, inlined
from planner.sites.flows import COPIES, any_of, at_busy
from planner.sites.problem import SiteProblem
from planner.sites.smoothed import EXPERT, HOLDER, SITE, Guide, State

RELIEVING = 0.85
"""Share of moves that relieve what is busy."""
NEAR = 8
"""Sites that count as near another."""
TRIES = 16
"""Entries looked at until one will do."""
WIDE = 64
"""Moves that look at the whole table are as rare as there are more sites."""


def near_sites(problem: SiteProblem) -> IntArray:
    """[D, NEAR or less]: other sites, those with the fastest links both ways first, or the least latency."""
    apart = problem.latency_s if problem.pair_bytes_per_s is None else 1 / problem.pair_bytes_per_s
    return np.ascontiguousarray(np.argsort(apart + apart.T, axis=1, kind="stable")[:, 1 : NEAR + 1])


@compiled
def seed_moves(seed: int) -> None:
    """Moves drawn from now on follow from it."""
    np.random.seed(seed)


@compiled
def propose(guide: Guide, near: IntArray) -> None:
    """Often what takes something from a busy link of an exchange, chosen in proportion to what it takes."""
    work, links, flows, state = guide
    state.number[0] = 0
    if np.random.random() > RELIEVING:
        any_move(state)
        return
    for kind in range(2):
        for way in range(2):
            busy = flows.total[kind, way] > 0
            flows.scratch[2 * kind + way] = busy * work.unit_bytes[kind, way] / flows.per_s[kind, way]
    chosen = any_of(flows.scratch)
    kind, way = chosen // 2, chosen % 2
    if flows.total[kind, way] <= 0:
        any_move(state)
        return
    src, dst = at_busy(links, flows, kind, way)
    if kind == COPIES:
        _fewer_copies(guide, src, dst)
    elif src >= 0 or dst >= 0:
        user = src if src >= 0 else _user_of(state, dst)
        holder = dst if dst >= 0 else _partner_of(state, src)
        if user >= 0 and holder >= 0:
            _fewer_rows(state, user, holder, near)


@compiled
def _propose(proposed: IntArray, number: IntArray, site: int, expert: int, holder: int) -> None:
    """One entry more. (Tuples of arrays take longer to pass.)"""
    proposed[SITE, number[0]], proposed[EXPERT, number[0]], proposed[HOLDER, number[0]] = site, expert, holder
    number[0] += 1


@compiled
def _user_of(state: State, holder: int) -> int:
    """Another site that finds something there; -1 for none."""
    size = len(state.table)
    first = any_below(size)
    for place in range(size):
        site = first + place if first + place < size else first + place - size
        if site != holder and state.counts[site, holder] > 0:
            return site
    return -1


@compiled
def _partner_of(state: State, user: int) -> int:
    """Another site where it finds something, the more often the more; -1 for none."""
    experts = state.table.shape[1]
    for _ in range(TRIES):
        holder = state.table[user, any_below(experts)]
        if holder != user:
            return int(holder)
    return -1


@compiled
def _other_holder(table: IntArray, home: int, expert: int, holder: int) -> int:
    """Who also has it, the more often the more find it there; -1 for nobody."""
    for _ in range(6):
        other = table[any_below(len(table)), expert]
        if other != holder:
            return int(other)
    return int(home) if home != holder else -1


@inlined
def _fewer_rows(state: State, user: int, holder: int, near: IntArray) -> None:
    """``user`` has some of the experts that it finds at ``holder`` elsewhere: at itself, where it finds others, where another
    site finds some, near by, or anywhere."""
    table, users, proposed, number, kind = state.table, state.users, state.proposed, state.number, np.random.random()
    size, experts = table.shape
    other = -1
    if kind < 0.25:
        other = user
    elif kind < 0.5:
        other = table[user, any_below(experts)]
    elif kind < 0.65:
        other = table[any_below(size), any_below(experts)]
    elif kind < 0.75:
        other = near[user, any_below(near.shape[1])]
    like = any_below(size)
    if kind >= 0.9:
        # Another site's row.
        for expert in range(experts):
            _propose(proposed, number, user, expert, table[like, expert])
        return
    if other == holder:
        return
    held_only = other != user and np.random.random() < 0.5
    left, first = _how_many(experts), any_below(experts)
    for place in range(experts):
        expert = first + place if first + place < experts else first + place - experts
        if table[user, expert] != holder:
            continue
        to = other
        if other < 0:
            to = table[like, expert] if kind < 0.85 else table[any_below(size), expert]
        if held_only and users[to, expert] == 0:
            continue
        _propose(proposed, number, user, expert, to)
        left -= 1
        if left == 0:
            break


@compiled
def _how_many(experts: int) -> int:
    """All, one, or some of that."""
    kind = np.random.random()
    return experts if kind < 0.35 else 1 if kind < 0.6 else 1 + any_below(max(experts // 4, 2))


@inlined
def _fewer_copies(guide: Guide, home: int, holder: int) -> None:
    """All who find one of the experts of ``home`` at ``holder``, or some, have them elsewhere. Either may be any site, -1."""
    work, state = guide.work, guide.state
    experts = len(work.home_site)
    first, left = any_below(experts), 1 if np.random.random() < 0.7 else 1 + any_below(4)
    for place in range(experts):
        expert = first + place if first + place < experts else first + place - experts
        if home >= 0 and work.home_site[expert] != home:
            continue
        at = holder
        if at < 0:
            at = _other_holder(state.table, home, expert, home)
        if at < 0 or work.home_site[expert] == at or state.users[at, expert] == 0:
            continue
        _drop(guide, at, expert)
        left -= 1
        if left == 0:
            break


@inlined
def _drop(guide: Guide, holder: int, expert: int) -> None:
    """All who find an expert at a site have it elsewhere."""
    state, table, home, kind = guide.state, guide.state.table, guide.work.home_site[expert], np.random.random()
    size, experts = table.shape
    counts, users, proposed, number = state.counts, state.users, state.proposed, state.number
    other = _other_holder(table, home, expert, holder)
    if kind < 0.1 or other < 0:
        other = home
    elif kind < 0.2:
        other = any_below(size)
    if other == holder:
        return
    left = users[holder, expert]
    for site in range(size):
        if table[site, expert] != holder:
            continue
        to = other
        if 0.45 <= kind < 0.75:
            # Where it finds most of what else it looks at.
            most = 0
            for _ in range(8):
                partner = table[site, any_below(experts)]
                if partner != holder and counts[site, partner] > most and users[partner, expert] > 0:
                    to, most = partner, counts[site, partner]
        elif kind >= 0.75:
            another = _other_holder(table, home, expert, holder)
            to = another if another >= 0 else other
        _propose(proposed, number, site, expert, to)
        left -= 1
        if left == 0:
            break


@compiled
def _alike(row: IntArray, other: IntArray) -> bool:
    """The same holder for every expert. (numpy's own comparison makes arrays.)"""
    different = 0
    for expert in range(len(row)):
        different += row[expert] != other[expert]
    return different == 0


@compiled
def any_move(state: State) -> None:
    """Exchanged rows or exchanged holders; or, of a site or of all with its row, another site's row or another holder of some
    experts."""
    table, proposed, number, kind = state.table, state.proposed, state.number, np.random.random()
    size, experts = table.shape
    one, other = any_below(size), any_below(size)
    wide = np.random.random() * size < WIDE
    if one == other:
        return
    if kind < 0.2:
        for expert in range(experts):
            if table[one, expert] != table[other, expert]:
                _propose(proposed, number, one, expert, table[other, expert])
                _propose(proposed, number, other, expert, table[one, expert])
        return
    if kind < 0.4:
        if wide:
            for site in range(size):
                for expert in range(experts):
                    holder = table[site, expert]
                    if holder in (one, other):
                        _propose(proposed, number, site, expert, other if holder == one else one)
        return
    alike = wide and np.random.random() < 0.6
    left, first, takes_row, choice = _how_many(experts), any_below(experts), kind < 0.65, np.random.random()
    at, entry = table[one, any_below(experts)], table[one, any_below(experts)]
    for place in range(experts):
        expert = first + place if first + place < experts else first + place - experts
        if takes_row:
            _propose(proposed, number, one, expert, table[other, expert])
        elif table[one, expert] == at:
            _propose(proposed, number, one, expert, one if choice < 0.3 else entry if choice < 0.5 else other)
            left -= 1
            if left == 0:
                break
    count = number[0]
    if alike:
        for site in range(size):
            if site != one and _alike(table[site], table[one]):
                for place in range(count):
                    _propose(proposed, number, site, proposed[EXPERT, place], proposed[HOLDER, place])


@compiled
def any_below(number: int) -> int:
    """From 0 to one less."""
    return int(np.random.random() * number)
