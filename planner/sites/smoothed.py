"""A serving table and what its step takes, smoothed, known anew after some rows change: the guide of the local search.

It sees what sites send each other and what the busiest of them computes, in the equations of ``planner.layer_times``. Exchanges
inside sites, coding, overheads of messages and memory are left to the exact cost, which has the last word.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridep.compiled import compiled
from hybridep.placement import IntArray
from hybridep.plan import Residency
from hybridep.traffic import FloatArray
from planner.constraints import BoolArray
from planner.sites.flows import (
    BEFORE,
    COPIES,
    NOW,
    TOKENS,
    Flows,
    Links,
    busiest_s,
    copy_row,
    copy_sums,
    latency_s,
    links_of,
    no_flows,
    refresh,
    replace,
    smooth_s,
    usd,
)
from planner.sites.problem import SiteProblem
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

Numbers = FloatArray | IntArray


class State(NamedTuple):
    """A table and what follows from it; ``NOW``, and what the last change replaced."""

    table: IntArray
    """[NOW and BEFORE, D, E]."""
    counts: IntArray
    """[NOW and BEFORE, D, D]: experts that the column's site serves for the row's."""
    served: FloatArray
    """[NOW and BEFORE, D]: choices that each rank of a site computes."""
    users: IntArray
    """[D, E]: how many sites find an expert at a site."""
    touched: BoolArray
    """[D]: whether the last change was one of copies of the site's own experts."""
    busy_s: FloatArray
    """[2 kinds, 2 ways]: what the busiest links take per unit's byte."""


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
        table=np.stack([table, table]).astype(np.int64),
        counts=np.zeros((2, size, size), dtype=np.int64),
        served=np.zeros((2, size)),
        users=np.zeros((size, experts), dtype=np.int64),
        touched=np.zeros(size, dtype=np.bool_),
        busy_s=np.zeros((2, 2)),
    )
    typical = np.array([problem.num_inside * float(problem.tokens.mean()), 1.0])
    guide = Guide(work_of(problem, residency), links, no_flows(links, typical), state)
    restart(guide)
    return guide


@compiled
def restart(guide: Guide) -> None:
    """All that follows from the table."""
    work, _, flows, state = guide
    size, experts = state.table.shape[1:]
    state.users.fill(0)
    state.served[NOW].fill(0.0)
    for site in range(size):
        _count(state, site)
        _to_rows(work, state, site, flows.units[NOW, TOKENS, site])
        for other in range(size):
            state.served[NOW, other] += work.by_site[CHOICES, site] * state.counts[NOW, site, other]
        for expert in range(experts):
            state.users[state.table[NOW, site, expert], expert] += 1
    for site in range(size):
        _to_copies(work, state, site, flows.units[NOW, COPIES, site])
    refresh(guide.links, flows)


@compiled
def change(guide: Guide, sites: IntArray, rows: IntArray) -> None:
    """``rows`` ([k, E]) in place of those of ``sites`` ([k], all different)."""
    work, links, flows, state = guide
    size = state.table.shape[1]
    units = np.empty(size)
    copy(state.served[NOW], state.served[BEFORE])
    state.touched.fill(False)
    copy_sums(flows, NOW, BEFORE)
    for number in range(len(sites)):
        site = sites[number]
        copy(state.table[NOW, site], state.table[BEFORE, site])
        copy(state.counts[NOW, site], state.counts[BEFORE, site])
        _move_users(work, state, site, rows[number])
        _count(state, site)
        for other in range(size):
            more = state.counts[NOW, site, other] - state.counts[BEFORE, site, other]
            state.served[NOW, other] += work.by_site[CHOICES, site] * more
        _to_rows(work, state, site, units)
        copy_row(flows, NOW, BEFORE, TOKENS, site)
        replace(links, flows, TOKENS, site, units)
    for home in range(size):
        if state.touched[home]:
            _to_copies(work, state, home, units)
            copy_row(flows, NOW, BEFORE, COPIES, home)
            replace(links, flows, COPIES, home, units)


@compiled
def undo(guide: Guide, sites: IntArray) -> None:
    """As it was before the last ``change``, which was one of ``sites``."""
    work, _, flows, state = guide
    for home in range(len(state.touched)):
        if state.touched[home]:
            copy_row(flows, BEFORE, NOW, COPIES, home)
    for site in sites:
        copy_row(flows, BEFORE, NOW, TOKENS, site)
        _move_users(work, state, site, state.table[BEFORE, site])
        copy(state.counts[BEFORE, site], state.counts[NOW, site])
    copy(state.served[BEFORE], state.served[NOW])
    copy_sums(flows, BEFORE, NOW)


@compiled
def allowed(work: Work, sites: IntArray, rows: IntArray) -> bool:
    """Whether rules leave ``rows`` ([k, E]) to ``sites`` ([k])."""
    for number in range(len(sites)):
        for expert in range(rows.shape[1]):
            holder = rows[number, expert]
            if not (work.serve[sites[number], holder] and work.hold[holder, expert]):
                return False
    return True


@compiled
def smooth_value(guide: Guide) -> float:
    """Smoothed seconds of all MoE layers, or dollars."""
    links_s = np.empty((2, 2))
    for kind in range(2):
        for way in range(2):
            links_s[kind, way] = smooth_s(guide.links, guide.flows, kind, way)
    return _value(guide, links_s)


@compiled
def busiest_value(guide: Guide) -> float:
    """The same with the busiest link's time in place of the norm of all; notes those times."""
    for kind in range(2):
        for way in range(2):
            guide.state.busy_s[kind, way] = busiest_s(guide.links, guide.flows, kind, way)
    return _value(guide, guide.state.busy_s)


@compiled
def _value(guide: Guide, links_s: FloatArray) -> float:
    """Given what each kind and way takes per unit's byte ([2, 2])."""
    work, _, flows, state = guide
    layer_s, dollars = work.numbers[FIXED_S], 0.0
    for op in range(len(EXCHANGES)):
        kind, way = OP_KIND[op], OP_WAY[op]
        left_s = latency_s(flows, kind, way) + links_s[kind, way] * work.by_op[op, BYTES]
        begun_s = 0.0
        for piece in range(KNOTS):
            end_s = work.by_op[op, KNOT_S + piece]
            part_s = min(left_s, end_s - begun_s)
            layer_s += work.by_op[op, SLOPE + piece] * part_s
            left_s -= part_s
            begun_s = end_s
        layer_s += work.by_op[op, SLOPE + KNOTS] * left_s
    mean_s = longest_s = 0.0
    for site in range(len(state.touched)):
        alone_s = state.served[NOW, site] * work.by_site[ROW_S, site]
        mean_s += alone_s / len(state.touched)
        longest_s = max(longest_s, alone_s)
    layer_s += work.numbers[EXPERTS] * (work.numbers[OWN] * longest_s + work.numbers[MEAN] * mean_s)
    if work.numbers[VALUE_PER_USD] > 0:
        for kind in range(2):
            for way in range(2):
                dollars += usd(flows, kind, way) * work.unit_bytes[kind, way]
    return float(work.numbers[VALUE_PER_S] * layer_s + work.numbers[VALUE_PER_USD] * dollars)


@compiled
def copy(src: Numbers, dst: Numbers) -> None:
    """Numbers [n]. (Assigning slices takes seconds to compile.)"""
    for place in range(len(src)):
        dst[place] = src[place]


@compiled
def _count(state: State, site: int) -> None:
    """How many of a site's experts each other one serves."""
    state.counts[NOW, site].fill(0)
    for holder in state.table[NOW, site]:
        state.counts[NOW, site, holder] += 1


@compiled
def _to_rows(work: Work, state: State, site: int, units: FloatArray) -> None:
    """Rows that a site sends to others ([D])."""
    for other in range(len(units)):
        units[other] = work.by_site[SITE_ROWS, site] * work.hit[state.counts[NOW, site, other]]
    units[site] = 0.0


@compiled
def _to_copies(work: Work, state: State, home: int, units: FloatArray) -> None:
    """How many of a site's own experts each other one holds ([D])."""
    units.fill(0.0)
    for expert in range(len(work.home_site)):
        if work.home_site[expert] == home:
            for site in range(len(units)):
                if state.users[site, expert] > 0 and site != home:
                    units[site] += 1.0


@compiled
def _move_users(work: Work, state: State, site: int, row: IntArray) -> None:
    """From what a site has in the table to ``row``, which is written there."""
    for expert in range(len(row)):
        old, new, home = state.table[NOW, site, expert], row[expert], work.home_site[expert]
        if old == new:
            continue
        state.users[old, expert] -= 1
        state.users[new, expert] += 1
        if (state.users[old, expert] == 0 and old != home) or (state.users[new, expert] == 1 and new != home):
            state.touched[home] = True
        state.table[NOW, site, expert] = new
