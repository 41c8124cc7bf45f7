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

from simulator.arrays import FloatArray
from simulator.columns import (
    ACTIVE,
    RESIDUE,
    ByteArray,
    FlowColumns,
    Int32Array,
    LinkColumns,
    first_ends,
    swap_entries,
)
from simulator.compiled import compiled

_BLOCK = 64
"""Links that share one minimum in the search for the next."""

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
    begin = links.first[link]
    return float(links.weights[begin : begin + links.num_members[link]].sum())


@compiled
def _taken(flows: FlowColumns, links: LinkColumns, link: int) -> float:
    """What flows that are fixed have of a row and of those above it."""
    taken = 0.0
    row = links.above[link]
    while row >= 0:
        for entry in range(links.first[row], links.first[row] + links.num_members[row]):
            rate = links.level[flows.full_link[links.members[entry]]]
            taken += rate * (links.weights[entry] if links.weights.size else 1.0)
        row = links.above[row]
    return taken


@compiled
def _share(rest: FloatArray, is_limit: ByteArray, link: int) -> float:
    """What each flow would have if the link were next; infinite without open flows."""
    if rest[link, _LOAD] <= 0.0:
        return np.inf
    if is_limit.size and is_limit[link]:
        # A limit is each flow's: nothing is taken of it.
        return float(rest[link, _LEFT])
    return float(max(rest[link, _LEFT], 0.0) / rest[link, _LOAD])


@compiled
def _fix_all(flows: FlowColumns, links: LinkColumns, rest: FloatArray, block: Int32Array, touched: ByteArray, link: int) -> None:
    """A link has filled: its open flows are fixed, and what they take is taken from their other links."""
    # Named once: to take an array out of a tuple costs as much as to use it.
    paths, weights, full_link, members = flows.links, flows.weights, flows.full_link, links.members
    places, fixed_by, entry_weights, is_limit = flows.places, links.fixed_by, links.weights, links.is_limit
    weighted, rate, still_open = weights.shape[0] > 0, links.level[link], rest[link, _LOAD]
    rest[link, _LOAD] = 0.0
    front = links.first[link]
    for entry in range(front, front + links.num_members[link]):
        flow = members[entry]
        if full_link[flow] >= 0:
            continue
        full_link[flow] = link
        swap_entries(paths, places, members, fixed_by, entry_weights, link, entry, front)
        front += 1
        for hop in range(paths.shape[1]):
            other = paths[flow, hop]
            if other < 0:
                break
            weight = weights[flow, hop] if weighted else 1.0
            if other == link:
                links.load[link] += weight
                still_open -= weight
                continue
            if not (is_limit.size and is_limit[other]):
                rest[other, _LEFT] -= weight * rate
            left = rest[other, _LOAD] - weight
            rest[other, _LOAD] = left if left > RESIDUE * weight else 0.0
            touched[block[other]] = 1
        if still_open <= 0.0:
            break
    links.num_fixed[link] = front - links.first[link]


@compiled
def _fill_rows(flows: FlowColumns, links: LinkColumns, rows: Int32Array, at: int, now_s: float) -> int:
    """Fill the links of one priority, and enter them in the order from a position on; return how many have filled."""
    rest, is_limit = np.zeros((links.order.size, 2)), links.is_limit
    for link in rows:
        rest[link, _LEFT] = links.capacity[link] - (_taken(flows, links, link) if links.above.size else 0.0)
        rest[link, _LOAD] = _load(links, link)
    # The least share in each block of the links that are not filled, which of them has it, and how many these are.
    num_blocks = (rows.size + _BLOCK - 1) // _BLOCK
    block = np.zeros(links.order.size, np.int32)
    size = np.full(num_blocks, _BLOCK)
    size[-1] = rows.size - (num_blocks - 1) * _BLOCK
    touched = np.ones(num_blocks, np.int8)
    least = np.empty(num_blocks)
    who = np.zeros(num_blocks, np.int32)
    for place in range(rows.size):
        block[rows[place]] = place // _BLOCK
    num_filled, previous = 0, 0.0
    while True:
        best, chosen = np.inf, -1
        for index in range(num_blocks):
            if touched[index]:
                touched[index] = 0
                least[index] = np.inf
                for place in range(index * _BLOCK, index * _BLOCK + size[index]):
                    share = _share(rest, is_limit, rows[place])
                    if share < least[index]:
                        least[index], who[index] = share, place
            if least[index] < best:
                best, chosen = least[index], index
        if chosen < 0:
            return num_filled
        link = rows[who[chosen]]
        size[chosen] -= 1
        last = chosen * _BLOCK + size[chosen]
        rows[who[chosen]], rows[last] = rows[last], link
        touched[chosen] = 1
        # Never below the level reached: what is missing then is rounding.
        links.level[link] = previous = max(best, previous)
        _fix_all(flows, links, rest, block, touched, link)
        begin, end = links.first[link], links.first[link] + links.num_fixed[link]
        ends = first_ends(links.members, flows.due, flows.spare_bytes, begin, end)
        links.least_due[link], links.least_early[link] = ends
        # Flows of links that are cut, or taken whole by flows of higher priority, wait.
        links.soonest_s[link] = now_s + ends[0] / previous if previous > 0.0 else np.inf
        links.order[at + num_filled] = link
        num_filled += 1


@compiled
def fill(flows: FlowColumns, links: LinkColumns, now_s: float) -> None:
    """Find the rates of all active flows and the order of the links."""
    unfix(flows, links, now_s)
    num_links, at = links.order.size, 0
    for priority in range(links.priority.max() + 1 if num_links else 0):
        rows = np.flatnonzero(links.priority == priority).astype(np.int32)
        if rows.size:
            at += _fill_rows(flows, links, rows, at, now_s)
    for link in range(num_links):
        if links.level[link] == np.inf:
            links.least_due[link] = links.least_early[link] = links.soonest_s[link] = np.inf
            links.order[at] = link
            at += 1
    members, fixed_by, full_link = links.members, links.fixed_by, flows.full_link
    for at in range(num_links):
        link = links.order[at]
        links.position[link] = at
        for entry in range(links.first[link], links.first[link] + links.num_members[link]):
            fixed_by[entry] = full_link[members[entry]]
