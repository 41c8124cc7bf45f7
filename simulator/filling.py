"""Max-min fair rates by progressive filling: all flows at once, from nothing.

Rates of all flows rise together; the link with the least left for each of its flows fills first and fixes theirs
(Bertsekas and Gallager, Data Networks, section 6.5.2). Links are thus met in the order of their levels, the rate at which
each filled.

Priorities are strict: a link has one row for each priority of its flows, and a row has what the rows above it leave. All
rows of a priority fill before those of the next, so links are met in the order of (priority, level). A limit of each
flow's own rate is a row that is full at this rate, whatever its flows.
"""

from __future__ import annotations

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.compiled import allocating, compiled
from simulator.columns import (
    ACTIVE,
    RESIDUE,
    UNKNOWN,
    ByteArray,
    FlowColumns,
    Int32Array,
    LinkColumns,
    first_ends,
    soonest_end_s,
    swap_entries,
)

_BLOCK = 64
"""Links that share one minimum in the search for the next."""

_FEW = 16
"""Sorting entries of links is faster than looking at every flow where these are so many times as many."""

_LEFT, _LOAD = 0, 1


@compiled
def unfix(flows: FlowColumns, links: LinkColumns, now_s: float) -> None:
    """Make `due` of all active flows the bytes that they have left, as if they had not been fixed yet."""
    for link in range(links.order.size):
        if links.level[link] < np.inf:
            links.served[link] += links.level[link] * (now_s - links.since_s[link])
    links.since_s[:] = now_s
    for flow in range(flows.status.size):
        link = flows.full_link[flow]
        if flows.status[flow] == ACTIVE and link >= 0:
            flows.due[flow] = max(flows.due[flow] - links.served[link], 0.0)
            flows.full_link[flow] = -1
    links.num_fixed[:] = 0
    links.load[:] = 0.0
    links.served[:] = 0.0
    links.level[:] = np.inf


@compiled
def _load(links: LinkColumns, link: int) -> float:
    """Of all flows on a link."""
    if links.weights.size == 0:
        return float(links.num_members[link])
    load = 0.0
    for entry in range(links.first[link], links.first[link] + links.num_members[link]):
        load += links.weights[entry]
    return load


@compiled
def _taken(flows: FlowColumns, links: LinkColumns, level: FloatArray, link: int) -> float:
    """What flows of the rows above a row have, each at the least level of its path."""
    taken = 0.0
    row = links.above[link]
    while row >= 0:
        for entry in range(links.first[row], links.first[row] + links.num_members[row]):
            flow, rate = links.members[entry], np.inf
            for hop in range(flows.links.shape[1]):
                if flows.links[flow, hop] >= 0:
                    rate = min(rate, level[flows.links[flow, hop]])
            taken += rate * (links.weights[entry] if links.weights.size else 1.0)
        row = links.above[row]
    return taken


@compiled
def _fix_all(flows: FlowColumns, links: LinkColumns, rest: FloatArray, is_open: ByteArray, link: int, rate: float) -> float:
    """A link has filled: its open flows are not open any more, and what they take is taken from their other links. Returns
    their weight."""
    paths, weights, members, is_limit = flows.links, flows.weights, links.members, links.is_limit
    weighted, still_open, load = weights.shape[0] > 0, rest[link, _LOAD], 0.0
    rest[link, _LOAD] = 0.0
    # Those that it fixed before come first, and most of them are fixed by it again.
    for entry in range(links.first[link], links.first[link] + links.num_members[link]):
        flow = members[entry]
        if not is_open[flow]:
            continue
        is_open[flow] = 0
        for hop in range(paths.shape[1]):
            other = paths[flow, hop]
            if other < 0:
                break
            weight = weights[flow, hop] if weighted else 1.0
            if other == link:
                load += weight
                still_open -= weight
                continue
            if not (is_limit.size and is_limit[other]):
                rest[other, _LEFT] -= weight * rate
            left = rest[other, _LOAD] - weight
            rest[other, _LOAD] = left if left > RESIDUE * weight else 0.0
        if still_open <= 0.0:
            break
    return load


@allocating
def _fill_rows(
    flows: FlowColumns,
    links: LinkColumns,
    rows: Int32Array,
    is_open: ByteArray,
    level: FloatArray,
    load: FloatArray,
    order: Int32Array,
    at: int,
) -> int:
    """Fill the links of one priority: level and load of each [links], and the order from a position on; return how many have
    filled."""
    rest, is_limit = np.zeros((order.size, 2)), links.is_limit
    for link in rows:
        rest[link, _LEFT] = links.capacity[link] - (_taken(flows, links, level, link) if links.above.size else 0.0)
        rest[link, _LOAD] = _load(links, link)
    # The least share in each block of the links that are not filled, and which of them has it. Shares only grow while others
    # fill: what was the least once is a bound, and only a block that looks least is looked at again.
    num_blocks = (rows.size + _BLOCK - 1) // _BLOCK
    size = np.full(num_blocks, _BLOCK)
    size[-1] = rows.size - (num_blocks - 1) * _BLOCK
    is_new = np.zeros(num_blocks, np.int8)
    least = np.zeros(num_blocks)
    who = np.zeros(num_blocks, np.int32)
    num_filled, previous = 0, 0.0
    while True:
        best, chosen = np.inf, -1
        for index in range(num_blocks):
            if least[index] < best:
                best, chosen = least[index], index
        if chosen < 0:
            return num_filled
        if not is_new[chosen]:
            is_new[chosen] = 1
            least[chosen] = np.inf
            for place in range(chosen * _BLOCK, chosen * _BLOCK + size[chosen]):
                link = rows[place]
                if rest[link, _LOAD] <= 0.0:
                    continue
                share = max(rest[link, _LEFT], 0.0) / rest[link, _LOAD]
                if is_limit.size and is_limit[link]:
                    # A limit is each flow's: nothing is taken of it.
                    share = rest[link, _LEFT]
                if share < least[chosen]:
                    least[chosen], who[chosen] = share, place
            continue
        link = rows[who[chosen]]
        size[chosen] -= 1
        last = chosen * _BLOCK + size[chosen]
        rows[who[chosen]], rows[last] = rows[last], link
        # Never below the level reached: what is missing then is rounding.
        level[link] = previous = max(best, previous)
        load[link] = _fix_all(flows, links, rest, is_open, link, previous)
        is_new[:] = 0
        order[at + num_filled] = link
        num_filled += 1


@allocating
def _active(flows: FlowColumns, links: LinkColumns) -> Int32Array:
    """Flows that are on links, in order. Of very many that wait, only those on links are looked at."""
    num_entries = 0
    for link in range(links.order.size):
        num_entries += links.num_members[link]
    if num_entries * _FEW > flows.status.size:
        return np.flatnonzero(flows.status == ACTIVE).astype(np.int32)
    found, num_found = np.empty(num_entries, np.int32), 0
    for link in range(links.order.size):
        for entry in range(links.first[link], links.first[link] + links.num_members[link]):
            if flows.links[links.members[entry], 0] == link:
                found[num_found] = links.members[entry]
                num_found += 1
    return np.sort(found[:num_found])


@compiled
def _hand_over(flows: FlowColumns, links: LinkColumns, active: Int32Array) -> None:
    """Fix all active flows by the first links of their paths."""
    paths, places, due, full_link = flows.links, flows.places, flows.due, flows.full_link
    order, position, served, least_due = links.order, links.position, links.served, links.least_due
    first, num_fixed, members, fixed_by, weights = links.first, links.num_fixed, links.members, links.fixed_by, links.weights
    for flow in active:
        earliest = order.size
        for hop in range(paths.shape[1]):
            if paths[flow, hop] >= 0:
                earliest = min(earliest, position[paths[flow, hop]])
        if earliest == order.size or order[earliest] == full_link[flow]:
            continue
        link, before = order[earliest], full_link[flow]
        if before >= 0:
            due[flow] = max(due[flow] - served[before], 0.0)
            least_due[before] = UNKNOWN
        due[flow] += served[link]
        least_due[link] = UNKNOWN
        full_link[flow] = link
        for hop in range(paths.shape[1]):
            row = paths[flow, hop]
            if row >= 0 and row in (before, link):
                # To behind those that the link before fixes, or to those that this one does.
                num_fixed[row] -= row == before
                target = first[row] + num_fixed[row]
                swap_entries(paths, places, members, fixed_by, weights, row, places[flow, hop], target)
                num_fixed[row] += row == link
        for hop in range(paths.shape[1]):
            if paths[flow, hop] >= 0:
                fixed_by[places[flow, hop]] = link


@allocating
def fill(flows: FlowColumns, links: LinkColumns, now_s: float) -> None:
    """Find the rates of all active flows and the order of the links. What is written is little where little has changed."""
    num_links, at = links.order.size, int(np.int64(0))
    level, load, order = np.full(num_links, np.inf), np.zeros(num_links), links.order
    active, is_open = _active(flows, links), np.zeros(flows.status.size, np.int8)
    for flow in active:
        is_open[flow] = 1
    last_priority = -1
    for link in range(num_links):
        last_priority = max(last_priority, links.priority[link])
    for priority in range(last_priority + 1):
        rows = np.flatnonzero(links.priority == priority).astype(np.int32)
        if rows.size:
            at += _fill_rows(flows, links, rows, is_open, level, load, order, at)
    for link in range(num_links):
        if level[link] == np.inf:
            order[at] = link
            at += 1
        if links.level[link] < np.inf:
            links.served[link] += links.level[link] * (now_s - links.since_s[link])
        links.since_s[link], links.level[link], links.load[link] = now_s, level[link], load[link]
        links.changed[link] = 0
    for place in range(num_links):
        links.position[order[place]] = place
    _hand_over(flows, links, active)
    for link in range(num_links):
        if links.num_fixed[link] == 0:
            links.least_due[link] = links.least_early[link] = np.inf
        elif links.least_due[link] == UNKNOWN:
            begin, end = links.first[link], links.first[link] + links.num_fixed[link]
            ends = first_ends(links.members, flows.due, flows.spare_bytes, begin, end)
            links.least_due[link], links.least_early[link] = ends
        links.soonest_s[link] = soonest_end_s(links, link, now_s)
