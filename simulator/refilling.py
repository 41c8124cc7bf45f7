"""Max-min fair rates after a few flows ended or began, from the rates before.

Each flow is fixed by one link of its path. Where links are in the order of their levels, each level is what the flows that
links before have fixed leave of the capacity, for each of the flows that the link itself has fixed, and the first link of
every path is the one that fixed the flow, the rates are max-min fair: every flow has a full link on which none is faster.

So levels are computed anew along the order, from the first link that changed. A link whose level is below that of the link
before should have filled earlier: it changes places with that link, fixes the flows that the two share, and so on; links
that lost flows are computed again behind it. Each such move makes the first level that was wrong smaller, so it ends; should
rounding keep it from ending, the budget of moves does, and all is filled from nothing.

Only links whose flows or whose flows' rates changed need that: a link whose level changes marks the other links of the flows
that it fixed, which lie behind it, and what lies between is passed over. Where most links change at every end, as in a
complete All-to-All, marking costs more than it spares, and each is looked at.

Nothing is written for a flow that stays with its link: what is kept is how much the link has given to each since it
began, and for a flow at how much it ends (as in fair queueing's virtual time).
"""

from __future__ import annotations

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.compiled import compiled
from simulator.columns import UNKNOWN, FlowColumns, LinkColumns, Uint32Array, soonest_end_s, swap_entries

_ROUNDING = 1e-12
_OVERFULL = 1e-9

_MOVES_PER_LINK = 8
"""After so many, filling from nothing is as fast."""


@compiled
def adopt(flows: FlowColumns, links: LinkColumns, flow: int, now_s: float) -> int:
    """A flow began: until the next refilling, the first link of its path fixes it. Returns the link's position."""
    first = links.order.size
    for hop in range(flows.links.shape[1]):
        if flows.links[flow, hop] < 0:
            break
        first = min(first, links.position[flows.links[flow, hop]])
    link = links.order[first]
    if links.level[link] < np.inf:
        links.served[link] += links.level[link] * (now_s - links.since_s[link])
    links.since_s[link] = now_s
    front = links.first[link] + links.num_fixed[link]
    for hop in range(flows.links.shape[1]):
        if flows.links[flow, hop] == link:
            entry = flows.places[flow, hop]
            swap_entries(flows.links, flows.places, links.members, links.fixed_by, links.weights, link, entry, front)
    links.num_fixed[link] += 1
    links.load[link] += links.weights[front] if links.weights.size else 1.0
    links.least_due[link] = UNKNOWN
    flows.full_link[flow] = link
    flows.due[flow] += links.served[link]
    for hop in range(flows.links.shape[1]):
        if flows.links[flow, hop] >= 0:
            links.fixed_by[flows.places[flow, hop]] = link
            links.changed[flows.links[flow, hop]] = 1
    return int(first)


@compiled
def _rate(level: FloatArray, fixed_by: Uint32Array, weights: FloatArray, begin: int, end: int) -> float:
    """Of the flows at some entries, together."""
    rate = 0.0
    for entry in range(begin, end):
        rate += level[fixed_by[entry]] * (weights[entry] if weights.size else 1.0)
    return rate


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
def refill(flows: FlowColumns, links: LinkColumns, unchanged: int, now_s: float, each: bool) -> int:
    """Bring rates and order up to date. `unchanged`: links at the head of the order that are as they were. Each link behind
    is looked at, or only those whose flows or rates changed.

    Returns how many were; -1 where it came to no end in time, and rates are wrong.
    """
    paths, places, full_link, due, spare_bytes = flows.links, flows.places, flows.full_link, flows.due, flows.spare_bytes
    first, num_members, num_fixed, load = links.first, links.num_members, links.num_fixed, links.load
    members, fixed_by, weights = links.members, links.fixed_by, links.weights
    order, position, level, priority, capacity = links.order, links.position, links.level, links.priority, links.capacity
    served, since_s, soonest_s, least_due, least_early = (
        links.served,
        links.since_s,
        links.soonest_s,
        links.least_due,
        links.least_early,
    )
    num_links, width, weighted = order.size, paths.shape[1], weights.size > 0
    changed, layered, limited = links.changed, links.above.size > 0, links.is_limit.size > 0
    moves, num_looked_at = _MOVES_PER_LINK * num_links, 0
    each = each or layered
    at = unchanged
    while at < num_links:
        link = order[at]
        if not (each or changed[link]) and (at == 0 or level[order[at - 1]] <= level[link]):
            at += 1
            continue
        num_looked_at += 1
        level_before = level[link]
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
            entry = begin + num_fixed[link]
            if weighted:
                left = _rate(level, fixed_by, weights, entry, end)
            else:
                # Four sums, because each addition waits for the one before.
                two, three, four = 0.0, 0.0, 0.0
                while entry + 3 < end:
                    left += level[fixed_by[entry]]
                    two += level[fixed_by[entry + 1]]
                    three += level[fixed_by[entry + 2]]
                    four += level[fixed_by[entry + 3]]
                    entry += 4
                while entry < end:
                    left += level[fixed_by[entry]]
                    entry += 1
                left = (left + two) + (three + four)
            if layered:
                left += _rate_above(links, link)
            left = capacity[link] - left
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
            in_order = priority[link] > priority[other] or mine >= level[other] * (1.0 - _ROUNDING)
            if in_order and level[other] < np.inf and priority[link] >= priority[other]:
                break
            before = num_fixed[other]
            for entry in range(begin + num_fixed[link], end if before > 0 else 0):
                if fixed_by[entry] != other:
                    continue
                flow = members[entry]
                if since_s[other] < now_s:
                    served[other] += level[other] * (now_s - since_s[other])
                    since_s[other] = now_s
                if due[flow] <= least_due[other] or due[flow] - spare_bytes[flow] <= least_early[other]:
                    least_due[other] = UNKNOWN
                due[flow] = served[link] + max(due[flow] - served[other], 0.0)
                full_link[flow] = link
                if least_due[link] != UNKNOWN:
                    least_due[link] = min(least_due[link], due[flow])
                    least_early[link] = min(least_early[link], due[flow] - spare_bytes[flow])
                # The last of those that the other fixed, and the first here that it does not fix yet (which was looked at).
                num_fixed[other] -= 1
                for side in range(2):
                    row = link if side else other
                    target = first[row] + num_fixed[row]
                    source = entry
                    for hop in range(width):
                        if paths[flow, hop] == row:
                            source = places[flow, hop]
                    if weighted:
                        load[row] += weights[source] if side else -weights[source]
                        left += 0.0 if side == 0 else weights[source] * level[other]
                        weights[source], weights[target] = weights[target], weights[source]
                    moved = members[target]
                    for hop in range(width):
                        if paths[moved, hop] == row:
                            places[moved, hop] = source
                        if paths[flow, hop] == row:
                            places[flow, hop] = target
                    members[source], members[target] = moved, flow
                    fixed_by[source] = fixed_by[target]
                num_fixed[link] += 1
                for hop in range(width):
                    if paths[flow, hop] >= 0:
                        fixed_by[places[flow, hop]] = link
                        changed[paths[flow, hop]] = 1
                if not weighted:
                    left += level[other]
                    load[link] += 1.0
                    load[other] -= 1.0
            if num_fixed[other] < before:
                if num_fixed[other] == 0:
                    load[other] = 0.0
                if not is_limit:
                    mine = max(left, 0.0) / load[link]
                again = place
            elif layered and priority[other] > priority[link]:
                again = place
            order[place] = other
            position[other] = place
            place -= 1
            moves -= 1
        order[place] = link
        position[link] = place
        if moves < 0:
            return -1
        if place > 0 and priority[order[place - 1]] == priority[link] and level[order[place - 1]] < np.inf:
            # What is missing then is rounding.
            mine = max(mine, level[order[place - 1]])
        level[link] = mine
        if not each and mine != level_before:
            for entry in range(begin, begin + num_fixed[link]):
                for hop in range(width):
                    if paths[members[entry], hop] >= 0:
                        changed[paths[members[entry], hop]] = 1
        changed[link] = 0
        if num_fixed[link] == 0:
            least_due[link] = least_early[link] = np.inf
        elif least_due[link] == UNKNOWN:
            least, early = np.inf, np.inf
            for entry in range(begin, begin + num_fixed[link]):
                least = min(least, due[members[entry]])
                early = min(early, due[members[entry]] - spare_bytes[members[entry]])
            least_due[link], least_early[link] = least, early
        soonest_s[link] = soonest_end_s(links, link, now_s)
        at = again
    return num_looked_at
