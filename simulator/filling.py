"""Max-min fair rates by progressive filling over flows that come and go: the compiled heart of the network.

Rates of all flows rise together; the link with the least left for each of its flows fills first and fixes theirs
(Bertsekas and Gallager, Data Networks, section 6.5.2). Links are thus met in the order of their levels, the rate at which
each filled. Three things make this fast where every flow ends alone:

- A flow that ends changes nothing below the level at which it was fixed, so filling resumes from a saved state there.
- The order of the links hardly changes between two endings. The next link is looked for among the few that came next
  last time. That the levels met rise all along proves the order right; where they do not, the search covers all links.
  A link behind the same links as last time fixes the same flows, and none of them is looked at.
- Flows fixed by one link all go at its level. What is kept is how much the link has given to each since it began, and for
  a flow at how much it ends: nothing is written for a flow that stays with its link (as in fair queueing's virtual time).

Priorities are strict: a link has one row for each priority of its flows, and a row has what the rows above it leave. All
rows of a priority fill before those of the next, so links are met in the order of (priority, level). A limit of each
flow's own rate is a row that is full at this rate, whatever its flows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.arrays import FloatArray, IntArray
from simulator.compiled import compiled

Int32Array = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.int8]

WAITING, ACTIVE, DONE = 0, 1, 2

_WINDOW = 10
"""Links among which the next one to fill is looked for first."""

_BLOCK = 64
"""Links that share one minimum in a search over all."""

_ROUNDING = 1e-12
_OVERFULL = 1e-9

RESIDUE = 1e-9
"""Less than this share of a weight, left over when weights that are no round numbers are taken away again, is nothing."""

NUM_SAVED = 17
"""States kept for resuming, spread evenly over the order; the first is the start."""


class FlowColumns(NamedTuple):
    """[flows]; a flow may stand for many alike. All of a row's links but those that can never be full."""

    links: Int32Array
    """[flows, width], -1 where fewer."""
    weights: FloatArray
    """[flows, width]: how many of the flows cross one link; [0, 0] where all are one."""
    places: Int32Array
    """[flows, width]: where the flow stands among the members of each of its links."""
    status: ByteArray
    due: FloatArray
    """What `served` of the link that fixed the rate will be when the flow ends; its bytes where none has yet."""
    full_link: Int32Array
    """The link that fixed the rate, -1 before the first filling."""


LEFT, LOAD = 0, 1

LATER = 127
"""After every priority."""


class LinkColumns(NamedTuple):
    """[links] that can be full, a row for each priority of their flows; and a row for each limit of single flows."""

    capacity: FloatArray
    """Of a link in all; of a limit, the rate of each flow."""
    priority: ByteArray
    """Rows of lower numbers fill first."""
    below: Int32Array
    """The same link's row of the next priority, -1 without; [0] where there is one priority only."""
    is_limit: ByteArray
    """Of single flows; [0] where there are none."""
    first: IntArray
    """[links + 1]: room for the flows on each link."""
    num_members: IntArray
    num_fixed: IntArray
    """Flows that the link fixed."""
    members: Int32Array
    """Active flows on a link: members[first[link] : first[link] + num_members[link]]; those that it fixed come first."""
    partners: Int32Array
    """Beside `members`, where no path is longer than two: the flow's other link, or -1."""
    load: FloatArray
    """Active flows that cross the link."""
    level: FloatArray
    """Rate at which the link filled; infinite where it does not."""
    served: FloatArray
    """Bytes that each of the flows which the link fixes has had of it, as of `since_s`."""
    since_s: FloatArray
    least_due: FloatArray
    """Of the flows that the link fixed."""
    soonest_s: FloatArray
    """When the first of these ends."""
    order: Int32Array
    """Links by level."""
    saved: FloatArray
    """[NUM_SAVED, links, 2]: `open` before every `stride`-th link was filled."""
    open: FloatArray
    """[links, 2]: capacity that is left, and flows that are not fixed."""
    filled: ByteArray
    block: Int32Array
    """Of each link, in a search."""
    touched: ByteArray
    """Blocks with a link whose share changed."""
    stride: int


@compiled
def _restore(links: LinkColumns, position: int) -> int:
    """Go back to the last saved state at or before a position of the order; return its position."""
    saved = position // links.stride
    if saved == 0:
        links.open[:, LEFT] = links.capacity
        links.open[:, LOAD] = links.load
    else:
        links.open[:] = links.saved[saved]
    links.filled[:] = 0
    for index in range(saved * links.stride):
        links.filled[links.order[index]] = 1
    return saved * links.stride


@compiled
def _share(left: FloatArray, is_limit: ByteArray, link: int) -> float:
    if left[link, LOAD] <= 0.0:
        return np.inf
    if is_limit.size and is_limit[link]:
        return float(left[link, LEFT])
    return float(max(left[link, LEFT], 0.0) / left[link, LOAD])


@compiled
def _begin_search(links: LinkColumns, begin: int, size: Int32Array) -> int:
    """Divide the links from a position of the order on into blocks; return how many."""
    rest = links.order.size - begin
    num_blocks = (rest + _BLOCK - 1) // _BLOCK
    for index in range(rest):
        links.block[links.order[begin + index]] = index // _BLOCK
    for index in range(num_blocks):
        size[index] = min(_BLOCK, rest - index * _BLOCK)
    links.touched[:] = 1
    return num_blocks


@compiled
def fill(flows: FlowColumns, links: LinkColumns, unchanged: int, search: bool, now_s: float) -> None:
    """Bring all rates up to date.

    unchanged: links at the head of the order that are as they were. search: the order is no guide (flows were added).
    """
    # Named once, and all in one function: to take an array out of a tuple, or to hand it on, costs as much as to use it.
    paths, weights, places, due, full_link = flows.links, flows.weights, flows.places, flows.due, flows.full_link
    first, num_members, num_fixed = links.first, links.num_members, links.num_fixed
    members, partners = links.members, links.partners
    capacity, level, soonest_s, order = links.capacity, links.level, links.soonest_s, links.order
    left, filled, saved, block, touched = links.open, links.filled, links.saved, links.block, links.touched
    served, since_s, least_due = links.served, links.since_s, links.least_due
    priority, below, is_limit = links.priority, links.below, links.is_limit
    stride, width, weighted = links.stride, paths.shape[1], weights.shape[0] > 0
    layered, limited = below.size > 0, is_limit.size > 0
    pairs = width == 2 and not (weighted or layered or limited)
    num_links = order.size
    # Of a search: the least share in each block of the links that are open, which has it, and how many are left there.
    open_links = order.copy()
    size = np.empty(touched.size, np.int32)
    least = np.empty(touched.size)
    least_priority = np.empty(touched.size, np.int8)
    who = np.zeros(touched.size, np.int32)
    num_blocks = 0

    at = _restore(links, unchanged)
    if search:
        num_blocks = _begin_search(links, at, size)
        open_links[: num_links - at] = order[at:]
    previous = level[order[at - 1]] if at else 0.0
    reached = priority[order[at - 1]] if at else 0
    tail = num_links
    # Links before this position do not come behind the same links as last time.
    moved = 0
    again = False
    while at < num_links:
        best, first_priority, chosen = np.inf, LATER, -1
        if search:
            for index in range(num_blocks):
                if touched[index]:
                    touched[index] = 0
                    least[index], least_priority[index] = np.inf, LATER
                    for place in range(index * _BLOCK, index * _BLOCK + size[index]):
                        share = _share(left, is_limit, open_links[place])
                        # Links without open flows, of infinite share, come last.
                        mine = 0
                        if layered:
                            mine = priority[open_links[place]] if share < np.inf else LATER
                        if mine < least_priority[index] or (mine == least_priority[index] and share <= least[index]):
                            least[index], least_priority[index], who[index] = share, mine, place
                if size[index]:
                    sooner = least_priority[index] < first_priority
                    if chosen < 0 or sooner or (least_priority[index] == first_priority and least[index] < best):
                        best, first_priority, chosen = least[index], least_priority[index], index
            link = open_links[who[chosen]]
            size[chosen] -= 1
            open_links[who[chosen]] = open_links[chosen * _BLOCK + size[chosen]]
            touched[chosen] = 1
        else:
            back = num_links
            place = at
            while place < min(at + _WINDOW, tail):
                link = order[place]
                share = _share(left, is_limit, link)
                mine = priority[link] if layered else 0
                if share < np.inf and (mine < first_priority or (mine == first_priority and share < best)):
                    best, first_priority, chosen = share, mine, place
                elif share == np.inf:
                    if left[link, LEFT] < -_OVERFULL * capacity[link]:
                        # All its flows are fixed, and too fast: it should have come earlier.
                        back = unchanged
                    tail -= 1
                    if num_fixed[link] > 0 and level[link] < np.inf:
                        moved = num_links
                    elif level[order[tail]] < np.inf:
                        moved = max(moved, tail + 1)
                    order[place], order[tail] = order[tail], link
                    continue
                place += 1
            if first_priority < reached or (first_priority == reached and best < previous * (1.0 - _ROUNDING)):
                # Some link before should have waited for this one.
                back = 0
                while priority[order[back]] < first_priority or (
                    priority[order[back]] == first_priority and level[order[back]] <= best
                ):
                    back += 1
            if back < num_links:
                at = _restore(links, back)
                for place in range(at, num_links):
                    # Another may have been passed over even earlier.
                    link = order[place]
                    share = _share(left, is_limit, link)
                    late = at > 0 and share < np.inf and share < level[order[at - 1]] * (1.0 - _ROUNDING)
                    if layered and share < np.inf and at > 0 and priority[link] != priority[order[at - 1]]:
                        late = priority[link] < priority[order[at - 1]]
                    if late or left[link, LEFT] < -_OVERFULL * capacity[link]:
                        at = _restore(links, unchanged)
                        break
                search = again = True
                num_blocks = _begin_search(links, at, size)
                open_links[: num_links - at] = order[at:]
                previous = level[order[at - 1]] if at else 0.0
                reached = priority[order[at - 1]] if at else 0
                continue
            if chosen < 0:
                chosen = at
            link = order[chosen]
            if chosen > at or level[link] == np.inf:
                moved = max(moved, chosen + 1 if level[link] < np.inf else num_links)
            for place in range(chosen, at, -1):
                order[place] = order[place - 1]
        order[at] = link
        stable = not search and at >= moved
        if at % stride == 0:
            for other in range(num_links):
                saved[at // stride, other, LEFT] = left[other, LEFT]
                saved[at // stride, other, LOAD] = left[other, LOAD]
        at += 1
        before = level[link]
        if before < np.inf:
            served[link] += before * (now_s - since_s[link])
        since_s[link] = now_s
        if best == np.inf:
            level[link] = np.inf
            least_due[link] = np.inf
            soonest_s[link] = np.inf
            num_fixed[link] = 0
            continue

        # Never below the level reached: what is missing then is rounding.
        rate = previous = max(best, previous) if priority[link] == reached else best
        reached = priority[link]
        filled[link] = 1
        still_open = left[link, LOAD]
        left[link, LOAD] = 0.0
        had = first[link] + num_fixed[link]
        kept = 0
        least_new = np.inf
        begin = first[link]
        if stable and pairs:
            for index in range(begin, had):
                partner = partners[index]
                if partner >= 0:
                    left[partner, LEFT] -= rate
                    left[partner, LOAD] -= 1.0
            level[link] = rate
            soonest_s[link] = now_s + max(least_due[link] - served[link], 0.0) / rate if rate > 0.0 else np.inf
            continue
        for index in range(begin, begin + num_members[link]):
            flow = members[index]
            fixed = False
            partner = -1
            if pairs:
                # All-to-Alls: read in order, without a look at the flow itself.
                partner = partners[index]
                fixed = partner >= 0 and filled[partner] != 0
            else:
                for hop in range(width):
                    other = paths[flow, hop]
                    if other < 0:
                        break
                    if other != link and filled[other]:
                        fixed = True
                        break
            if fixed:
                continue
            if index < had and (not again or full_link[flow] == link):
                kept += 1
            else:
                left_bytes = due[flow]
                other = full_link[flow]
                if other >= 0:
                    left_bytes -= served[other]
                    if since_s[other] < now_s:
                        left_bytes -= level[other] * (now_s - since_s[other])
                due[flow] = served[link] + max(left_bytes, 0.0)
                full_link[flow] = link
                least_new = min(least_new, due[flow])
            if pairs:
                still_open -= 1.0
                if partner >= 0:
                    left[partner, LEFT] -= rate
                    left[partner, LOAD] -= 1.0
                    if search:
                        touched[block[partner]] = 1
            for hop in range(0 if pairs else width):
                other = paths[flow, hop]
                if other < 0:
                    break
                weight = weights[flow, hop] if weighted else 1.0
                if layered:
                    lower = below[other]
                    while lower >= 0:
                        left[lower, LEFT] -= weight * rate
                        if search:
                            touched[block[lower]] = 1
                        lower = below[lower]
                if other == link:
                    still_open -= weight
                    continue
                if not (limited and is_limit[other]):
                    left[other, LEFT] -= weight * rate
                elif rate > capacity[other] * (1.0 + _OVERFULL):
                    # It should have come earlier, and is found out when it comes.
                    left[other, LEFT] = -capacity[other]
                rest = left[other, LOAD] - weight
                left[other, LOAD] = rest if rest > RESIDUE * weight else 0.0
                if search:
                    touched[block[other]] = 1
            if index != begin:
                # To the front, where the next filling finds the same flows.
                swapped = members[begin]
                members[begin], members[index] = flow, swapped
                partners[begin], partners[index] = partners[index], partners[begin]
                for hop in range(width):
                    if paths[flow, hop] == link:
                        places[flow, hop] = begin
                    if paths[swapped, hop] == link:
                        places[swapped, hop] = index
            begin += 1
            if still_open <= 0.0:
                break
        if kept < num_fixed[link] or again:
            least_due[link] = np.inf
            for index in range(first[link], begin):
                least_due[link] = min(least_due[link], due[members[index]])
        else:
            least_due[link] = min(least_due[link], least_new)
        level[link] = rate
        # Flows of links that are cut, or taken whole by flows of higher priority, wait.
        soonest_s[link] = now_s + max(least_due[link] - served[link], 0.0) / rate if rate > 0.0 else np.inf
        num_fixed[link] = begin - first[link]
