"""Which flows are on which link, and which links need not be looked at."""

from __future__ import annotations

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.compiled import allocating, compiled
from simulator.columns import ByteArray, Int32Array


@allocating
def members_by_link(paths: Int32Array, num_links: int) -> tuple[IntArray, Int32Array]:
    """paths: [flows, width] link ids, -1 where fewer. Returns first [links + 1] and members: the flows on a link are
    members[first[link] : first[link + 1]], in order."""
    first = np.zeros(num_links + 1, np.int64)
    num_flows, width = paths.shape
    for flow in range(num_flows):
        for hop in range(width):
            if paths[flow, hop] < 0:
                break
            first[paths[flow, hop] + 1] += 1
    for link in range(num_links):
        first[link + 1] += first[link]
    at = first[:-1].copy()
    members = np.empty(first[num_links], np.int32)
    for flow in range(num_flows):
        for hop in range(width):
            link = paths[flow, hop]
            if link < 0:
                break
            members[at[link]] = flow
            at[link] += 1
    return first, members


@allocating
def links_that_can_fill(
    paths: Int32Array, weights: FloatArray, first: IntArray, members: Int32Array, capacity: FloatArray, num_shared: int
) -> ByteArray:
    """[links]: 0 for a link without flows, and for one that can never be full before another.

    That is so where some other link is on the path of all its flows, and carries so much of them that the link could
    take the other's whole capacity: a GPU's port, say, for flows that all leave over their datacenter's slower uplink.
    Links from `num_shared` on are limits of single flows; one is idle where each of its flows has a link no faster.
    weights: [flows, width] flows of a row on one link, or [0, 0] where all are one.
    """
    keep = np.zeros(capacity.size, np.int8)
    for link in range(capacity.size):
        flows = members[first[link] : first[link + 1]]
        if flows.size and (link < num_shared or not _all_are_slower(link, flows, paths, weights, capacity, num_shared)):
            keep[link] = 1
    for link in range(num_shared):
        if not keep[link]:
            continue
        flows = members[first[link] : first[link + 1]]
        for other in paths[flows[0]]:
            if other < 0:
                break
            if other == link or other >= num_shared or not keep[other]:
                continue
            if _load_per_load(link, other, flows, paths, weights) * capacity[other] <= capacity[link]:
                keep[link] = 0
                break
    return keep


@compiled
def _all_are_slower(
    link: int, flows: Int32Array, paths: Int32Array, weights: FloatArray, capacity: FloatArray, num_shared: int
) -> bool:
    """Whether each of the flows has a shared link that is no faster."""
    for flow in flows:
        slower = False
        for hop in range(paths.shape[1]):
            other = paths[flow, hop]
            if other < 0:
                break
            weight = weights[flow, hop] if weights.shape[0] else 1.0
            slower = slower or (other < num_shared and capacity[other] <= weight * capacity[link])
        if not slower:
            return False
    return True


@compiled
def _load_per_load(link: int, other: int, flows: Int32Array, paths: Int32Array, weights: FloatArray) -> float:
    """The most that one of the flows puts on `link` per byte on `other`; infinite where one does not cross `other`."""
    most = 0.0
    for flow in flows:
        mine, theirs = 0.0, 0.0
        for hop in range(paths.shape[1]):
            if paths[flow, hop] < 0:
                break
            weight = weights[flow, hop] if weights.shape[0] else 1.0
            if paths[flow, hop] == link:
                mine += weight
            elif paths[flow, hop] == other:
                theirs += weight
        if theirs == 0.0:
            return np.inf
        most = max(most, mine / theirs)
    return most


@compiled
def compress(paths: Int32Array, weights: FloatArray, local: Int32Array, links: Int32Array, link_weights: FloatArray) -> None:
    """Write the kept links of each path, in their own numbering (`local`, -1 for a link left out), into `links`."""
    num_flows, width = paths.shape
    weighted = weights.shape[0] > 0
    for flow in range(num_flows):
        kept = 0
        for hop in range(width):
            link = paths[flow, hop]
            if link < 0:
                break
            if local[link] >= 0:
                links[flow, kept] = local[link]
                if weighted:
                    link_weights[flow, kept] = weights[flow, hop]
                kept += 1
        for hop in range(kept, links.shape[1]):
            links[flow, hop] = -1


@allocating
def by_priority(paths: Int32Array, priority: ByteArray, num_links: int) -> tuple[ByteArray, Int32Array, Int32Array]:
    """Rows of links where flows have different priorities: one for each that a link's flows have.

    priority: [flows]. Changes `paths` from links to rows; returns priority, link and row above (or -1) of each row."""
    most = priority.max() + 1
    row = np.full((num_links, most), -1, np.int32)
    num_flows, width = paths.shape
    for flow in range(num_flows):
        for hop in range(width):
            if paths[flow, hop] < 0:
                break
            row[paths[flow, hop], priority[flow]] = 0
    num_rows = 0
    for link in range(num_links):
        for level in range(most):
            if row[link, level] == 0:
                row[link, level] = num_rows
                num_rows += 1
    priorities = np.zeros(num_rows, np.int8)
    link_of = np.zeros(num_rows, np.int32)
    above = np.full(num_rows, -1, np.int32)
    for link in range(num_links):
        before = -1
        for level in range(most):
            at = row[link, level]
            if at >= 0:
                priorities[at], link_of[at], above[at] = level, link, before
                before = at
    for flow in range(num_flows):
        for hop in range(width):
            if paths[flow, hop] < 0:
                break
            paths[flow, hop] = row[paths[flow, hop], priority[flow]]
    return priorities, link_of, above


@compiled
def longest(paths: Int32Array, local: Int32Array) -> int:
    """Most kept links of a path."""
    most = 0
    for flow in range(paths.shape[0]):
        kept = 0
        for hop in range(paths.shape[1]):
            if paths[flow, hop] < 0:
                break
            if local[paths[flow, hop]] >= 0:
                kept += 1
        most = max(most, kept)
    return most
