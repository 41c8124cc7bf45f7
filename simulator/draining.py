"""Flows that end, one after another, until something outside needs to know: the compiled loop around the filling."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.compiled import allocating, compiled
from simulator.columns import ACTIVE, DONE, RESIDUE, UNKNOWN, ByteArray, FlowColumns, Int32Array, LinkColumns, swap_entries
from simulator.filling import fill
from simulator.refilling import adopt, refill

_CLOCK_STEPS = 4.0
"""Flows that end within so many steps of the clock's resolution end together."""

WAIT, TELL, COMPACT = 0, 1, 2
"""Why draining stopped: the next end lies beyond the limit; a ticket is due by then; most rows are done."""


class Cargo(NamedTuple):
    """[flows]: what the filling need not know."""

    path: Int32Array
    """[flows, width]: every link, as the user counts them, -1 where fewer."""
    weights: FloatArray
    """[flows, width] as `FlowColumns.weights`, or [0, 0]."""
    size_bytes: FloatArray
    latency_s: FloatArray
    limit_bytes_per_s: FloatArray
    """What a flow gets at most, infinite without a limit."""
    priority: ByteArray
    tickets: IntArray
    """[flows, per flow]: who waits for the flow."""
    position: IntArray
    """In its batch."""
    batch: IntArray


class Usage(NamedTuple):
    """[all links]: what the flows did to them."""

    size_bytes: FloatArray
    load: FloatArray
    since_s: FloatArray
    busy_s: FloatArray


class Tickets(NamedTuple):
    """[tickets]: groups of flows that somebody waits for together."""

    unfinished: IntArray
    due_s: FloatArray
    """When the last flow so far arrives."""
    last: IntArray
    """Position in its batch of that flow."""
    batch: IntArray


class Clock(NamedTuple):
    """Numbers that change, in arrays so that compiled code can write them."""

    now_s: FloatArray
    """[1]"""
    cut: FloatArray
    """[1] Largest share of a flow's bytes that was left out, or sent beyond them."""
    late: FloatArray
    """[1] Share of its bytes that a flow may send beyond them."""
    counts: IntArray
    """[8]: rows not done, first changed position of the order, whether rates are out of date, and so much that the order is of
    no use; how often to fill from nothing after refilling was in vain, and how often still; how often refilling is to look at
    every link after most had changed, and how often still."""


NOT_DONE, UNCHANGED, STALE, ANEW, VAIN, REST, MOST, EACH = 0, 1, 2, 3, 4, 5, 6, 7

_MOST_REST = 15
"""Refilling that was in vain is not tried for so long at most: what changes the order much once may well do so again."""

_FEW = 0.25
"""To tell which links changed pays where no more of them did."""

_MANY = 8
"""If one in so many flows is new, filling from nothing is faster."""


@compiled
def _hand_in(cargo: Cargo, tickets: Tickets, flow: int, now_s: float, told: IntArray, num_told: int) -> int:
    """A flow's bytes have left; it arrives after its latency. Appends the tickets that waited for nothing else."""
    arrival_s = now_s + cargo.latency_s[flow]
    for column in range(cargo.tickets.shape[1]):
        ticket = cargo.tickets[flow, column]
        tickets.unfinished[ticket] -= 1
        if arrival_s >= tickets.due_s[ticket]:
            tickets.due_s[ticket] = arrival_s
            tickets.last[ticket] = cargo.position[flow]
        if tickets.unfinished[ticket] == 0:
            told[num_told] = ticket
            num_told += 1
    return num_told


@compiled
def _put_on(flows: FlowColumns, links: LinkColumns, flow: int) -> None:
    for hop in range(flows.links.shape[1]):
        link = flows.links[flow, hop]
        if link < 0:
            break
        entry = links.first[link] + links.num_members[link]
        links.members[entry] = flow
        if links.weights.size:
            links.weights[entry] = flows.weights[flow, hop]
        flows.places[flow, hop] = entry
        links.num_members[link] += 1


@compiled
def put_on_links(flows: FlowColumns, links: LinkColumns) -> None:
    """Enter all active flows in the lists of empty links."""
    for flow in range(flows.status.size):
        if flows.status[flow] == ACTIVE:
            _put_on(flows, links, flow)


@compiled
def activate(
    flows: FlowColumns,
    links: LinkColumns,
    cargo: Cargo,
    usage: Usage,
    tickets: Tickets,
    clock: Clock,
    rows: IntArray,
    told: IntArray,
) -> int:
    """Start flows; those of no bytes or over no links are done at once. Returns the number of tickets told."""
    now_s = clock.now_s[0]
    num_told = int(np.int64(0))
    weighted = cargo.weights.shape[0] > 0
    num_entries = 0
    for link in range(links.num_members.size):
        num_entries += links.num_members[link]
    if rows.size * flows.links.shape[1] * _MANY > num_entries:
        clock.counts[ANEW] = 1
    for index in range(rows.size):
        flow = rows[index]
        if cargo.size_bytes[flow] == 0.0 or cargo.path.shape[1] == 0 or cargo.path[flow, 0] < 0:
            flows.status[flow] = DONE
            clock.counts[NOT_DONE] -= 1
            num_told = _hand_in(cargo, tickets, flow, now_s, told, num_told)
            continue
        flows.status[flow] = ACTIVE
        flows.due[flow] = cargo.size_bytes[flow] * (1.0 + clock.late[0])
        for hop in range(cargo.path.shape[1]):
            link = cargo.path[flow, hop]
            if link < 0:
                break
            weight = cargo.weights[flow, hop] if weighted else 1.0
            if usage.load[link] == 0.0:
                usage.since_s[link] = now_s
            usage.load[link] += weight
            usage.size_bytes[link] += weight * cargo.size_bytes[flow]
        _put_on(flows, links, flow)
        clock.counts[STALE] = 1
        if not clock.counts[ANEW]:
            clock.counts[UNCHANGED] = min(clock.counts[UNCHANGED], adopt(flows, links, flow, now_s))
    return num_told


@compiled
def _finish(
    flows: FlowColumns,
    links: LinkColumns,
    cargo: Cargo,
    usage: Usage,
    tickets: Tickets,
    clock: Clock,
    done: IntArray,
    told: IntArray,
    num_told: int,
) -> int:
    """Take flows off their links and hand them in; return the number of tickets told."""
    paths, places, full_link = flows.links, flows.places, flows.full_link
    members, fixed_by, weights = links.members, links.fixed_by, links.weights
    first, num_members, num_fixed, changed = links.first, links.num_members, links.num_fixed, links.changed
    use, since_s, busy_s = usage.load, usage.since_s, usage.busy_s
    all_paths, all_weights, latency_s = cargo.path, cargo.weights, cargo.latency_s
    unfinished, due_s, last_flow, ticket_of = tickets.unfinished, tickets.due_s, tickets.last, cargo.tickets
    now_s = clock.now_s[0]
    weighted = all_weights.shape[0] > 0
    clock.counts[NOT_DONE] -= done.size
    for index in range(done.size):
        flow = done[index]
        flows.status[flow] = DONE
        for hop in range(paths.shape[1]):
            link = paths[flow, hop]
            if link < 0:
                break
            entry = places[flow, hop]
            if full_link[flow] == link:
                weight = weights[entry] if weights.size else 1.0
                num_fixed[link] -= 1
                rest = links.load[link] - weight
                links.load[link] = rest if num_fixed[link] > 0 and rest > RESIDUE * weight else 0.0
                links.least_due[link] = UNKNOWN
                swap_entries(paths, places, members, fixed_by, weights, link, entry, first[link] + num_fixed[link])
                entry = places[flow, hop]
            num_members[link] -= 1
            swap_entries(paths, places, members, fixed_by, weights, link, entry, first[link] + num_members[link])
            changed[link] = 1
        for hop in range(all_paths.shape[1]):
            link = all_paths[flow, hop]
            if link < 0:
                break
            weight = all_weights[flow, hop] if weighted else 1.0
            rest = use[link] - weight
            use[link] = rest if rest > RESIDUE * weight else 0.0
            if use[link] == 0.0:
                busy_s[link] += now_s - since_s[link]
        arrival_s = now_s + latency_s[flow]
        for column in range(ticket_of.shape[1]):
            ticket = ticket_of[flow, column]
            unfinished[ticket] -= 1
            if arrival_s >= due_s[ticket]:
                due_s[ticket] = arrival_s
                last_flow[ticket] = cargo.position[flow]
            if unfinished[ticket] == 0:
                told[num_told] = ticket
                num_told += 1
    return num_told


@compiled
def _bring_up_to_date(flows: FlowColumns, links: LinkColumns, clock: Clock) -> None:
    """Rates, after flows began or ended."""
    now_s = clock.now_s[0]
    counts = clock.counts
    is_done = False
    if not counts[ANEW] and counts[REST] == 0:
        num_looked_at = refill(flows, links, counts[UNCHANGED], now_s, counts[EACH] > 0)
        is_done = num_looked_at >= 0
        if counts[EACH] > 0:
            counts[EACH] -= 1
        else:
            is_few = num_looked_at < _FEW * (links.order.size - counts[UNCHANGED])
            counts[MOST] = 0 if is_few else min(2 * counts[MOST] + 1, _MOST_REST)
            counts[EACH] = counts[MOST]
        counts[VAIN] = 0 if is_done else min(2 * counts[VAIN] + 1, _MOST_REST)
        counts[REST] = counts[VAIN]
    elif counts[REST] > 0:
        counts[REST] -= 1
    if not is_done:
        fill(flows, links, now_s)
    counts[STALE] = counts[ANEW] = 0
    clock.counts[UNCHANGED] = links.order.size


@allocating
def drain(
    flows: FlowColumns,
    links: LinkColumns,
    cargo: Cargo,
    usage: Usage,
    tickets: Tickets,
    clock: Clock,
    until_s: float,
    told: IntArray,
) -> tuple[int, int, float]:
    """Let flows end up to `until_s`, or up to when the first ticket is due if that is sooner.

    A flow with no more left than it may spare ends together with one that ends; where flows may be late, the first is through
    when it has sent its bytes, or later if others can then end with it.
    Returns why it stopped, how many tickets are told, and when the next flow ends.
    """
    level, soonest_s, first, members, num_fixed = links.level, links.soonest_s, links.first, links.members, links.num_fixed
    least_due, least_early, position = links.least_due, links.least_early, links.position
    due, spare_bytes, full_link, served, since_s = flows.due, flows.spare_bytes, flows.full_link, links.served, links.since_s
    size_bytes, late = cargo.size_bytes, clock.late[0]
    done = np.empty(clock.counts[NOT_DONE], np.int64)
    num_told = int(np.int64(0))
    num_links = level.size
    num_rows = clock.counts[NOT_DONE]
    while True:
        if clock.counts[STALE]:
            _bring_up_to_date(flows, links, clock)
        next_s = np.inf
        for link in range(num_links):
            next_s = min(next_s, soonest_s[link])
        if next_s == np.inf or (late == 0.0 and next_s > until_s):
            return WAIT, num_told, next_s
        step_s = _CLOCK_STEPS * (np.nextafter(next_s, np.inf) - next_s)
        # All flows that may have ended when the first must; the last of these that may do so, and the first that is through.
        num_done, last_s, first_s = 0, 0.0, np.inf
        for link in range(num_links):
            rate = level[link]
            if rate == np.inf:
                continue
            given = served[link] + rate * (next_s - since_s[link])
            if least_early[link] - given > 0.0 and least_due[link] - given > step_s * rate:
                continue
            for entry in range(first[link], first[link] + num_fixed[link]):
                flow = members[entry]
                over_bytes = due[flow] - given
                # Of those that are held up, as in `soonest_end_s`.
                goes_on = over_bytes > spare_bytes[flow] if rate > 0.0 else due[flow] - spare_bytes[flow] > given
                if over_bytes > step_s * rate and goes_on:
                    continue
                if late > 0.0 and rate > 0.0:
                    last_s = max(last_s, next_s - (spare_bytes[flow] - over_bytes) / rate)
                    first_s = min(first_s, next_s - (late * size_bytes[flow] - over_bytes) / rate)
                done[num_done] = flow
                num_done += 1
        if late > 0.0:
            next_s = min(next_s, max(last_s, first_s, clock.now_s[0]))
            if next_s > until_s:
                return WAIT, num_told, next_s
        clock.now_s[0] = next_s
        for index in range(num_done):
            flow = done[index]
            link = full_link[flow]
            over_bytes = due[flow] - (served[link] + level[link] * (next_s - since_s[link]))
            clock.cut[0] = max(clock.cut[0], abs(over_bytes / size_bytes[flow] - late))
            clock.counts[UNCHANGED] = min(clock.counts[UNCHANGED], position[link])
        first_told = num_told
        num_told = _finish(flows, links, cargo, usage, tickets, clock, done[:num_done], told, num_told)
        for new in range(first_told, num_told):
            until_s = min(until_s, tickets.due_s[told[new]])
        clock.counts[STALE] = 1
        if num_told and until_s <= next_s:
            return TELL, num_told, next_s
        if clock.counts[NOT_DONE] * 2 < num_rows and num_rows > num_links:
            return COMPACT, num_told, next_s
