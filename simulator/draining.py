"""Flows that end, one after another, until something outside needs to know: the compiled loop around the filling."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.arrays import FloatArray, IntArray
from simulator.compiled import compiled
from simulator.filling import ACTIVE, DONE, END_S, LOAD, RATE, FlowColumns, Int32Array, LinkColumns, fill

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
    """[1] Largest share of a flow's bytes that was left out."""
    counts: IntArray
    """[4]: rows not done, first changed position of the order, whether rates are out of date, and whether by flows added."""


NOT_DONE, UNCHANGED, STALE, ADDED = 0, 1, 2, 3


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
        place = links.first[link] + links.num_members[link]
        links.members[place] = flow
        flows.places[flow, hop] = place
        links.num_members[link] += 1
        links.load[link] += flows.weights[flow, hop] if flows.weights.shape[0] > 0 else 1.0


@compiled
def _move(flows: FlowColumns, links: LinkColumns, link: int, place: int, hole: int) -> None:
    flow = links.members[place]
    links.members[hole] = flow
    for hop in range(flows.links.shape[1]):
        if flows.links[flow, hop] == link:
            flows.places[flow, hop] = hole


@compiled
def _take_off(flows: FlowColumns, links: LinkColumns, flow: int, saved_before: int) -> None:
    paths, places = flows.links, flows.places
    for hop in range(paths.shape[1]):
        link = paths[flow, hop]
        if link < 0:
            break
        weight = flows.weights[flow, hop] if flows.weights.shape[0] > 0 else 1.0
        links.load[link] -= weight
        # The states saved before the flow was fixed had it as open.
        for saved in range(1, saved_before):
            links.saved[saved, link, LOAD] -= weight
        links.num_members[link] -= 1
        hole = places[flow, hop]
        fixed = links.first[link] + links.num_fixed[link] - 1
        if hole <= fixed:
            links.num_fixed[link] -= 1
            _move(flows, links, link, fixed, hole)
            hole = fixed
        last = links.first[link] + links.num_members[link]
        if hole < last:
            _move(flows, links, link, last, hole)


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
    num_told = 0
    weighted = cargo.weights.shape[0] > 0
    for index in range(rows.size):
        flow = rows[index]
        if cargo.size_bytes[flow] == 0.0 or cargo.path.shape[1] == 0 or cargo.path[flow, 0] < 0:
            flows.status[flow] = DONE
            clock.counts[NOT_DONE] -= 1
            num_told = _hand_in(cargo, tickets, flow, now_s, told, num_told)
            continue
        flows.status[flow] = ACTIVE
        flows.motion[flow, RATE] = 0.0
        flows.motion[flow, END_S] = cargo.size_bytes[flow]
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
        clock.counts[UNCHANGED] = 0
        clock.counts[STALE] = 1
        clock.counts[ADDED] = 1
    return num_told


@compiled
def _finish(
    flows: FlowColumns,
    links: LinkColumns,
    cargo: Cargo,
    usage: Usage,
    tickets: Tickets,
    clock: Clock,
    flow: int,
    told: IntArray,
    num_told: int,
) -> int:
    now_s = clock.now_s[0]
    weighted = cargo.weights.shape[0] > 0
    flows.status[flow] = DONE
    clock.counts[NOT_DONE] -= 1
    _take_off(flows, links, flow, clock.counts[UNCHANGED] // links.stride + 1)
    for hop in range(cargo.path.shape[1]):
        link = cargo.path[flow, hop]
        if link < 0:
            break
        usage.load[link] -= cargo.weights[flow, hop] if weighted else 1.0
        if usage.load[link] == 0.0:
            usage.busy_s[link] += now_s - usage.since_s[link]
    return _hand_in(cargo, tickets, flow, now_s, told, num_told)


@compiled
def drain(
    flows: FlowColumns,
    links: LinkColumns,
    cargo: Cargo,
    usage: Usage,
    tickets: Tickets,
    clock: Clock,
    until_s: float,
    tolerance: float,
    largest_bytes: float,
    told: IntArray,
) -> tuple[int, int, float]:
    """Let flows end up to `until_s`, or up to when the first ticket is due if that is sooner.

    A flow with no more than the share `tolerance` of its bytes left ends together with one that ends.
    Returns why it stopped, how many tickets are told, and when the next flow ends.
    """
    order, level, soonest_s = links.order, links.level, links.soonest_s
    first, members = links.first, links.members
    motion, size_bytes = flows.motion, cargo.size_bytes
    num_told = 0
    num_links = order.size
    num_rows = clock.counts[NOT_DONE]
    while True:
        if clock.counts[STALE]:
            fill(flows, links, clock.counts[UNCHANGED], clock.counts[ADDED] == 1, clock.now_s[0])
            clock.counts[STALE] = 0
            clock.counts[ADDED] = 0
            clock.counts[UNCHANGED] = num_links
        next_s = np.inf
        for link in range(num_links):
            next_s = min(next_s, soonest_s[link])
        if next_s == np.inf or next_s > until_s:
            return WAIT, num_told, next_s
        clock.now_s[0] = next_s
        step_s = _CLOCK_STEPS * (np.nextafter(next_s, np.inf) - next_s)
        for position in range(num_links):
            link = order[position]
            rate = level[link]
            if rate == np.inf:
                break
            if (soonest_s[link] - next_s - step_s) * rate > tolerance * largest_bytes:
                continue
            # Backwards, so that those which take the place of a flow have been seen.
            for index in range(first[link] + links.num_fixed[link] - 1, first[link] - 1, -1):
                flow = members[index]
                over_s = motion[flow, END_S] - next_s
                if over_s > step_s and over_s * rate > tolerance * size_bytes[flow]:
                    continue
                clock.cut[0] = max(clock.cut[0], over_s * rate / size_bytes[flow])
                clock.counts[UNCHANGED] = min(clock.counts[UNCHANGED], position)
                first_told = num_told
                num_told = _finish(flows, links, cargo, usage, tickets, clock, flow, told, num_told)
                for new in range(first_told, num_told):
                    until_s = min(until_s, tickets.due_s[told[new]])
        clock.counts[STALE] = 1
        if num_told and until_s <= next_s:
            return TELL, num_told, next_s
        if clock.counts[NOT_DONE] * 2 < num_rows and num_rows > num_links:
            return COMPACT, num_told, next_s
