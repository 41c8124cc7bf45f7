"""Max-min fair rates after a few flows ended or began, from the rates before.

Each flow is fixed by one link of its path. Where links are in the order of their levels, each level is what the flows that
links before have fixed leave of the capacity, for each of the flows that the link itself has fixed, and the first link of
every path is the one that fixed the flow, the rates are max-min fair: every flow has a full link on which none is faster.

So levels are computed anew along the order, from the first link that changed. A link whose level is below that of the link
before should have filled earlier: it changes places with that link, fixes the flows that the two share, and so on; links
that lost flows are computed again behind it. Each such move makes the first level that was wrong smaller, so it ends; should
rounding keep it from ending, the budget of moves does, and all is filled from nothing.

Nothing is written for a flow that stays with its link: what is kept is how much the link has given to each since it
began, and for a flow at how much it ends (as in fair queueing's virtual time).
"""

from __future__ import annotations

import numpy as np

from simulator.arrays import FloatArray
from simulator.columns import RESIDUE, UNKNOWN, FlowColumns, Int32Array, LinkColumns, first_ends, settle, swap_entries
from simulator.compiled import compiled

_ROUNDING = 1e-12
_OVERFULL = 1e-9

_MOVES_PER_LINK = 8
"""After so many, filling from nothing is as fast."""


@compiled
def _fix(flows: FlowColumns, links: LinkColumns, link: int, entry: int, left_bytes: float) -> None:
    """From now on the link, which is settled, fixes the rate of the flow at an entry of its own that was not among those."""
    front = links.first[link] + links.num_fixed[link]
    swap_entries(flows.links, flows.places, links.members, links.fixed_by, links.weights, link, entry, front)
    flow = links.members[front]
    links.num_fixed[link] += 1
    links.load[link] += links.weights[front] if links.weights.size else 1.0
    flows.full_link[flow] = link
    flows.due[flow] = links.served[link] + left_bytes
    if links.least_due[link] != UNKNOWN:
        links.least_due[link] = min(links.least_due[link], flows.due[flow])
        links.least_early[link] = min(links.least_early[link], flows.due[flow] - flows.spare_bytes[flow])
    for hop in range(flows.links.shape[1]):
        if flows.links[flow, hop] < 0:
            break
        links.fixed_by[flows.places[flow, hop]] = link


@compiled
def _release(flows: FlowColumns, links: LinkColumns, link: int, entry: int) -> float:
    """The link, which is settled, no longer fixes the flow at an entry of its own; returns the bytes that the flow has left."""
    flow = links.members[entry]
    due = flows.due[flow]
    if due <= links.least_due[link] or due - flows.spare_bytes[flow] <= links.least_early[link]:
        links.least_due[link] = UNKNOWN
    weight = links.weights[entry] if links.weights.size else 1.0
    links.num_fixed[link] -= 1
    rest = links.load[link] - weight
    links.load[link] = rest if links.num_fixed[link] > 0 and rest > RESIDUE * weight else 0.0
    last = links.first[link] + links.num_fixed[link]
    swap_entries(flows.links, flows.places, links.members, links.fixed_by, links.weights, link, entry, last)
    return float(max(due - links.served[link], 0.0))


@compiled
def adopt(flows: FlowColumns, links: LinkColumns, flow: int, now_s: float) -> int:
    """A flow began: until the next refilling, the first link of its path fixes it. Returns the link's position."""
    first = links.order.size
    for hop in range(flows.links.shape[1]):
        if flows.links[flow, hop] < 0:
            break
        first = min(first, links.position[flows.links[flow, hop]])
    for hop in range(flows.links.shape[1]):
        link = flows.links[flow, hop]
        if link >= 0 and links.position[link] == first:
            settle(links, link, now_s)
            _fix(flows, links, link, flows.places[flow, hop], flows.due[flow])
            break
    return int(first)


@compiled
def _take(flows: FlowColumns, links: LinkColumns, link: int, other: int, now_s: float) -> float:
    """Let a link fix the flows that it shares with another one, which has fixed them; returns what they had, together."""
    taken = 0.0
    for entry in range(links.first[link] + links.num_fixed[link], links.first[link] + links.num_members[link]):
        if links.fixed_by[entry] != other:
            continue
        flow = links.members[entry]
        taken += links.level[other] * (links.weights[entry] if links.weights.size else 1.0)
        settle(links, link, now_s)
        settle(links, other, now_s)
        left_bytes = 0.0
        for hop in range(flows.links.shape[1]):
            if flows.links[flow, hop] == other:
                left_bytes = _release(flows, links, other, flows.places[flow, hop])
                break
        # What was first of the rest comes here, and was looked at.
        _fix(flows, links, link, entry, left_bytes)
    return taken


@compiled
def _rate(level: FloatArray, fixed_by: Int32Array, weights: FloatArray, begin: int, end: int) -> float:
    """Of the flows at some entries, together."""
    if weights.size:
        total = 0.0
        for entry in range(begin, end):
            total += weights[entry] * level[fixed_by[entry]]
        return total
    # Four sums, because each addition waits for the one before.
    one, two, three, four = 0.0, 0.0, 0.0, 0.0
    entry = begin
    while entry + 3 < end:
        one += level[fixed_by[entry]]
        two += level[fixed_by[entry + 1]]
        three += level[fixed_by[entry + 2]]
        four += level[fixed_by[entry + 3]]
        entry += 4
    while entry < end:
        one += level[fixed_by[entry]]
        entry += 1
    return (one + two) + (three + four)


@compiled
def _rate_above(links: LinkColumns, link: int) -> float:
    """Of all flows on the rows above."""
    rate, row = 0.0, links.above[link]
    while row >= 0:
        begin = links.first[row]
        rate += _rate(links.level, links.fixed_by, links.weights, begin, begin + links.num_members[row])
        row = links.above[row]
    return rate


@compiled
def _too_fast(links: LinkColumns, link: int) -> bool:
    """Whether a limit has a flow that is over it."""
    for entry in range(links.first[link] + links.num_fixed[link], links.first[link] + links.num_members[link]):
        if links.level[links.fixed_by[entry]] > links.capacity[link] * (1.0 + _OVERFULL):
            return True
    return False


@compiled
def refill(flows: FlowColumns, links: LinkColumns, unchanged: int, now_s: float) -> bool:
    """Bring rates and order up to date. `unchanged`: links at the head of the order that are as they were.

    False where it came to no end in time, and rates are wrong.
    """
    # Named once, and all in one function: to take an array out of a table, or to hand one on, costs as much as to use it.
    first, num_members, num_fixed, load = links.first, links.num_members, links.num_fixed, links.load
    members, fixed_by, entry_weights = links.members, links.fixed_by, links.weights
    order, position, level, priority, capacity = links.order, links.position, links.level, links.priority, links.capacity
    served, since_s, soonest_s = links.served, links.since_s, links.soonest_s
    least_due, least_early, due, spare_bytes = links.least_due, links.least_early, flows.due, flows.spare_bytes
    num_links, layered, limited = order.size, links.above.size > 0, links.is_limit.size > 0
    moves = _MOVES_PER_LINK * num_links
    at = unchanged
    while at < num_links:
        link = order[at]
        if level[link] < np.inf:
            served[link] += level[link] * (now_s - since_s[link])
        since_s[link] = now_s
        begin, end = first[link], first[link] + num_members[link]
        left, mine = 0.0, np.inf
        is_limit = limited and links.is_limit[link] == 1
        if is_limit:
            if num_fixed[link] > 0 or _too_fast(links, link):
                mine = capacity[link]
        else:
            left = capacity[link] - _rate(level, fixed_by, entry_weights, begin + num_fixed[link], end)
            if layered:
                left -= _rate_above(links, link)
            if num_fixed[link] > 0:
                mine = max(left, 0.0) / load[link]
            elif begin < end and left < -_OVERFULL * capacity[link]:
                # All its flows are too fast: it should have come before some of their links.
                mine = -np.inf
        if mine == np.inf and at + 1 < num_links and num_fixed[order[at + 1]] > 0:
            # Not full any more: it goes behind all others.
            for place in range(at, num_links - 1):
                order[place] = order[place + 1]
                position[order[place]] = place
            order[num_links - 1] = link
            position[link] = num_links - 1
            level[link] = np.inf
            continue
        place, again = at, at + 1
        while place > 0 and mine < np.inf:
            other = order[place - 1]
            if level[other] < np.inf and not priority[link] < priority[other]:
                if priority[link] > priority[other] or mine >= level[other] * (1.0 - _ROUNDING):
                    break
            if num_fixed[other] > 0:
                shared = False
                for entry in range(begin + num_fixed[link], end):
                    if fixed_by[entry] == other:
                        shared = True
                        break
                if shared:
                    left += _take(flows, links, link, other, now_s)
                    if not is_limit:
                        mine = max(left, 0.0) / load[link]
                if shared or (layered and priority[other] > priority[link]):
                    again = place
            order[place] = other
            position[other] = place
            place -= 1
            moves -= 1
        order[place] = link
        position[link] = place
        if moves < 0:
            return False
        if place > 0 and priority[order[place - 1]] == priority[link] and level[order[place - 1]] < np.inf:
            # What is missing then is rounding.
            mine = max(mine, level[order[place - 1]])
        level[link] = mine
        if num_fixed[link] == 0:
            least_due[link] = least_early[link] = np.inf
        elif least_due[link] == UNKNOWN:
            least_due[link], least_early[link] = first_ends(members, due, spare_bytes, begin, begin + num_fixed[link])
        # Flows of links that are cut, or taken whole by flows of higher priority, wait.
        waits = not 0.0 < mine < np.inf
        soonest_s[link] = np.inf if waits else now_s + max(least_due[link] - served[link], 0.0) / mine
        at = again
    return True
