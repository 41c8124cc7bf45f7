"""A serving table and what its step takes, smoothed, known anew after some entries change: the guide of the local search.

It sees what sites send each other and what the busiest of them computes, in the equations of ``planner.layer_times``. Exchanges
inside sites, coding, overheads of messages and memory are left to the exact cost, which has the last word.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.compiled import compiled, inlined
from hybridep.plan import Residency
from planner.sites.flows import (
    COPIES,
    RECEIVED,
    SENT,
    SHARPEST,
    TOKENS,
    Flows,
    Links,
    add,
    copy,
    forget,
    links_of,
    no_flows,
    raised,
    rooted,
    smooth_s,
    sum_all,
    sum_pairs,
    sum_sites,
)
from planner.sites.problem import SiteProblem
from planner.sites.room import Room
from planner.sites.work import (
    BYTES,
    CHOICES,
    EXCHANGES,
    EXPERTS,
    FIXED_S,
    KNOT_S,
    KNOTS,
    MEAN,
    OP_KIND,
    OP_WAY,
    OWN,
    ROW_S,
    SITE_ROWS,
    SLOPE,
    VALUE_PER_S,
    VALUE_PER_USD,
    Work,
    work_of,
)

SITE, EXPERT, HOLDER = range(3)
POWERS, BEFORE, LONGEST_S = range(3)
"""Of the experts' computation: the smooth sum of all sites, that before the last change, and the unit of time of powers."""
TINY = 1e-300


class State(NamedTuple):
    """A table and what follows from it, and what is proposed."""

    table: IntArray
    """[D, E]."""
    counts: IntArray
    """[D, D]: what those experts count for (``Work.weight``) that the column's site serves for the row's."""
    users: IntArray
    """[D, E]: how many sites find an expert at a site."""
    moved: IntArray
    """[2 kinds]: entries of the table that are another site's, and copies."""
    served: FloatArray
    """[D]: choices that each rank of a site computes."""
    served_power: FloatArray
    """[D]: their shares of the smooth sum."""
    computed: FloatArray
    """[POWERS to LONGEST_S]."""
    most_bytes: FloatArray
    """[D]: what copies and choices may take at each site, as ``bytes_of`` counts them."""
    most_usd: FloatArray
    """[1]: what bytes between sites may cost, of a layer."""
    bytes_of: FloatArray
    """[2]: of a copy, and of a choice that each rank of a site computes."""
    proposed: IntArray
    """[SITE to HOLDER, D x E]: entries that are to change, all different, and the holders they get."""
    number: IntArray
    """[3]: entries that are proposed, sites that have changed, and pairs that have."""
    changed: IntArray
    """[D + 1]: which sites those are."""
    is_changed: BoolArray
    """[D]."""
    pairs: IntArray
    """[3, 4 x D x E]: kind and ends of the pairs, some more than once."""


class Guide(NamedTuple):
    """What a walk looks at."""

    work: Work
    links: Links
    flows: Flows
    state: State


def guide_of(problem: SiteProblem, table: IntArray, residency: Residency) -> Guide:
    """At ``table`` ([D, E])."""
    size, experts, links = problem.num_sites, problem.num_experts, links_of(problem)
    state = State(
        table=table.astype(np.int64),
        counts=np.zeros((size, size), dtype=np.int64),
        users=np.zeros((size, experts), dtype=np.int64),
        moved=np.zeros(2, dtype=np.int64),
        served=np.zeros(size),
        served_power=np.zeros(size),
        computed=np.zeros(3),
        most_bytes=np.full(size, np.inf),
        most_usd=np.full(1, np.inf),
        bytes_of=np.zeros(2),
        proposed=np.zeros((3, size * experts), dtype=np.int64),
        number=np.zeros(3, dtype=np.int64),
        changed=np.zeros(size + 1, dtype=np.int64),
        is_changed=np.zeros(size, dtype=np.bool_),
        pairs=np.zeros((3, 4 * size * experts), dtype=np.int64),
    )
    typical = np.array([problem.num_inside * float(problem.tokens.mean()), 1.0])
    guide = Guide(work_of(problem, residency), links, no_flows(links, typical), state)
    restart(guide, SHARPEST)
    return guide


def limit(guide: Guide, room: Room, left_usd: float = np.inf) -> None:
    """Memory, and dollars of each layer, that are left beside the table."""
    state = guide.state
    state.bytes_of[:] = room.copy_bytes, room.choice_bytes
    copies = guide.flows.access[:, COPIES, RECEIVED]
    state.most_bytes[:] = room.left_bytes + copies * room.copy_bytes + state.served * room.choice_bytes
    state.most_usd[0] = left_usd + _layer_usd(guide)


@compiled
def restart(guide: Guide, sharpness: int) -> None:
    """All that follows from the table, without what rounding has left of many changes."""
    work, links, flows, state = guide
    size, experts = state.table.shape
    state.counts.fill(0)
    state.users.fill(0)
    state.moved.fill(0)
    state.served.fill(0.0)
    forget(flows)
    for site in range(size):
        for expert in range(experts):
            holder = state.table[site, expert]
            state.counts[site, holder] += work.weight[expert]
            state.users[holder, expert] += 1
            state.moved[TOKENS] += holder != site
    for site in range(size):
        for other in range(size):
            count = state.counts[site, other]
            if count > 0:
                state.served[other] += work.by_site[CHOICES, site] * count
                if other != site:
                    add(links, flows, TOKENS, site, other, work.by_site[SITE_ROWS, site] * work.hit[count])
    for expert in range(experts):
        home = work.home_site[expert]
        for site in range(size):
            if state.users[site, expert] > 0 and site != home:
                state.moved[COPIES] += 1
                add(links, flows, COPIES, home, site, 1.0)
    sum_all(links, flows, sharpness)
    state.computed.fill(0.0)
    for site in range(size):
        state.computed[LONGEST_S] = max(state.computed[LONGEST_S], state.served[site] * work.by_site[ROW_S, site])
    state.served_power.fill(0.0)
    for site in range(size):
        _sum_served(work.by_site[ROW_S], state.served, state.served_power, state.computed, site, sharpness)


@inlined
def change(guide: Guide) -> None:
    """Puts what is proposed into the table."""
    _, _, flows, state = guide
    copy(flows.total, flows.before)
    state.computed[BEFORE] = state.computed[POWERS]
    _swap(guide)
    _settle(guide)


@inlined
def undo(guide: Guide) -> None:
    """As it was before the last ``change``."""
    _, _, flows, state = guide
    _swap(guide)
    _settle(guide)
    # Large powers that came and went have left nothing of small ones.
    copy(flows.before, flows.total)
    state.computed[POWERS] = state.computed[BEFORE]


@inlined
def _swap(guide: Guide) -> None:
    """Exchanges what is proposed for what is there. (Arrays leave their tuples once: that takes longer than an entry.)"""
    flows, state = guide.flows, guide.state
    table, counts, users, moved, served = state.table, state.counts, state.users, state.moved, state.served
    proposed, changed, is_changed = state.proposed, state.changed, state.is_changed
    home_site, hit, weight = guide.work.home_site, guide.work.hit, guide.work.weight
    access, units, pairs = flows.access, flows.units, state.pairs
    rows_of, choices = guide.work.by_site[SITE_ROWS], guide.work.by_site[CHOICES]
    has_pairs, num_changed, num_pairs = units.size > 0, 0, 0
    for number in range(state.number[0]):
        site, expert, holder = proposed[SITE, number], proposed[EXPERT, number], proposed[HOLDER, number]
        before, home = table[site, expert], home_site[expert]
        if before == holder:
            continue
        proposed[HOLDER, number], table[site, expert] = before, holder
        for turn in range(2):
            at, more = (holder, 1) if turn else (before, -1)
            count, weighs = counts[site, at], weight[expert] * more
            counts[site, at] = count + weighs
            served[at] += choices[site] * weighs
            if at != site:
                moved[TOKENS] += more
                old, new = rows_of[site] * hit[count], rows_of[site] * hit[count + weighs]
                access[site, TOKENS, SENT] += new - old
                access[at, TOKENS, RECEIVED] += new - old
                if has_pairs:
                    units[TOKENS, site, at] = new
                    pairs[0, num_pairs], pairs[1, num_pairs], pairs[2, num_pairs] = TOKENS, site, at
                    num_pairs += 1
            found = users[at, expert]
            users[at, expert] = found + more
            if at != home and found + turn == 1:
                moved[COPIES] += more
                access[home, COPIES, SENT] += more
                access[at, COPIES, RECEIVED] += more
                if has_pairs:
                    units[COPIES, home, at] += more
                    pairs[0, num_pairs], pairs[1, num_pairs], pairs[2, num_pairs] = COPIES, home, at
                    num_pairs += 1
            for one in (site, at, home):
                changed[num_changed] = one
                num_changed += not is_changed[one]
                is_changed[one] = True
    state.number[1], state.number[2] = num_changed, num_pairs


@inlined
def _settle(guide: Guide) -> None:
    """What follows from the entries that have been swapped."""
    links, flows, state = guide.links, guide.flows, guide.state
    changed, is_changed, row_s, sharpness = state.changed, state.is_changed, guide.work.by_site[ROW_S], flows.sharpness[0]
    for number in range(state.number[1]):
        is_changed[changed[number]] = False
        _sum_served(row_s, state.served, state.served_power, state.computed, changed[number], sharpness)
    sum_sites(links, flows, changed[: state.number[1]])
    if flows.units.size > 0:
        sum_pairs(links, flows, state.pairs[:, : state.number[2]])


@inlined
def allowed(guide: Guide) -> bool:
    """Whether rules leave what is proposed to the sites."""
    work, state = guide.work, guide.state
    for number in range(state.number[0]):
        site, expert, holder = state.proposed[SITE, number], state.proposed[EXPERT, number], state.proposed[HOLDER, number]
        if not (work.serve[site, holder] and work.hold[holder, expert]):
            return False
    return True


@inlined
def has_room(guide: Guide) -> bool:
    """Whether sites have memory, about, for the last ``change``, and a budget has dollars for its bytes."""
    state, access = guide.state, guide.flows.access
    bytes_of, most_bytes, served = state.bytes_of, state.most_bytes, state.served
    for number in range(state.number[1]):
        site = state.changed[number]
        if access[site, COPIES, RECEIVED] * bytes_of[0] + served[site] * bytes_of[1] > most_bytes[site]:
            return False
    return bool(state.most_usd[0] == np.inf or _layer_usd(guide) <= state.most_usd[0])


@inlined
def _layer_usd(guide: Guide) -> float:
    """What a layer's bytes between sites cost."""
    dollars = 0.0
    for kind in range(2):
        for way in range(2):
            dollars += guide.flows.usd[kind, way] * guide.work.unit_bytes[kind, way]
    return dollars


@inlined
def smooth_value(guide: Guide) -> float:
    """Smoothed seconds of all MoE layers, or dollars."""
    links_s = guide.flows.scratch
    for kind in range(2):
        for way in range(2):
            links_s[2 * kind + way] = smooth_s(guide.flows, kind, way)
    share = rooted(guide.state.computed[POWERS], guide.flows.sharpness[0])
    return _value(guide, links_s, guide.state.computed[LONGEST_S] * share)


@inlined
def _value(guide: Guide, links_s: FloatArray, longest_s: float) -> float:
    """Given what each kind and way takes per unit's byte ([4]), and what the last site computes for."""
    work, flows = guide.work, guide.flows
    by_op, numbers, served, moved = work.by_op, work.numbers, guide.state.served, guide.state.moved
    layer_s, dollars = numbers[FIXED_S], 0.0
    for op in range(len(EXCHANGES)):
        kind, way = OP_KIND[op], OP_WAY[op]
        if moved[kind] == 0:
            continue
        left_s = flows.latency_s[kind, way] + links_s[2 * kind + way] * by_op[op, BYTES]
        begun_s = 0.0
        for piece in range(KNOTS):
            end_s = by_op[op, KNOT_S + piece]
            part_s = min(left_s, end_s - begun_s)
            layer_s += by_op[op, SLOPE + piece] * part_s
            left_s -= part_s
            begun_s = end_s
        layer_s += by_op[op, SLOPE + KNOTS] * left_s
    mean_s = 0.0
    if numbers[MEAN] > 0:
        for site in range(len(served)):
            mean_s += served[site] * work.by_site[ROW_S, site] / len(served)
    layer_s += numbers[EXPERTS] * (numbers[OWN] * longest_s + numbers[MEAN] * mean_s)
    if numbers[VALUE_PER_USD] > 0:
        dollars = _layer_usd(guide)
    return float(numbers[VALUE_PER_S] * layer_s + numbers[VALUE_PER_USD] * dollars)


@compiled
def _sum_served(
    row_s: FloatArray, served: FloatArray, power: FloatArray, computed: FloatArray, site: int, sharpness: int
) -> None:
    """What follows from what a site computes."""
    share = row_s[site] * served[site] / max(computed[LONGEST_S], TINY)
    now = raised(share, sharpness)
    computed[POWERS] += now - power[site]
    power[site] = now
