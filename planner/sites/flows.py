"""Exchanges between sites, kept up to date row by row: what a local search asks millions of times.

An exchange takes as long as its busiest link, so two plans with equally busy ones look alike, though in one of them a single link
is left to relieve and in the other ten. Beside that time stands a smooth one, the norm of all links' times with the exponent
``SHARPNESS``, which falls with every busy link that is relieved.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridep.compiled import compiled
from hybridep.traffic import FloatArray
from planner.sites.problem import SiteProblem

DOUBLINGS = 5
SHARPNESS = 2**DOUBLINGS
"""Two links that are equally busy count as one that is 2 % busier."""
TOKENS, COPIES = range(2)
"""Kinds of exchanges. Each has two ways: there (0), to experts and from homes, and back (1)."""
NOW, BEFORE = range(2)
SENT, RECEIVED = range(2)
SECONDS, LATENCY, DOLLARS = range(3)
"""What is known of pairs; seconds and dollars per byte."""
SMOOTH, BUSIEST, FARTHEST, PRICE = range(4)
"""What is kept of each row: its share of the smooth sum, seconds of its busiest pair, its largest latency, and dollars; all but
the latency per unit's byte."""


class Links(NamedTuple):
    """What joins sites, by way. Rates inside sites and windows count as far as they limit what a site, or a pair of sites, can
    send."""

    access_s: FloatArray
    """[2, SENT and RECEIVED, D]: seconds per byte."""
    pairs: FloatArray
    """[SECONDS to DOLLARS, 2, D, D]; zero where pairs have nothing of their own."""
    trunk_s: FloatArray
    """[2, D, trunks, D]: seconds per byte, by source and destination."""


class Flows(NamedTuple):
    """Units from site to site, and what follows from them, by kind; ``NOW``, and what the last change replaced."""

    scale_s: FloatArray
    """[2]: powers of seconds in units of it are neither too large nor too small."""
    units: FloatArray
    """[NOW and BEFORE, 2, D, D], zeros on the diagonal."""
    access: FloatArray
    """[NOW and BEFORE, 2, SENT and RECEIVED, D]: units."""
    trunk_s: FloatArray
    """[NOW and BEFORE, 2, 2 ways, trunks]."""
    by_row: FloatArray
    """[NOW and BEFORE, 2, SMOOTH to PRICE, 2 ways, D]."""


def links_of(problem: SiteProblem) -> Links:
    """Of all exchanges."""
    size, inside = problem.num_sites, problem.inside_bytes_per_s
    up_s, down_s = 1 / np.minimum(problem.up_bytes_per_s, inside), 1 / np.minimum(problem.down_bytes_per_s, inside)
    paths, prices = problem.path_bytes_per_s, problem.egress_usd_per_byte
    there = np.zeros((3, size, size))
    there[LATENCY] = problem.latency_s
    if paths is not None:
        there[SECONDS] = 1 / paths
    if prices is not None:
        there[DOLLARS] = prices
    trunks = problem.trunk_s_per_byte.toarray().reshape(-1, size, size)
    return Links(
        access_s=np.array([[up_s, down_s], [down_s, up_s]]),
        pairs=np.ascontiguousarray(np.stack([there, there.transpose(0, 2, 1)], axis=1)),
        trunk_s=np.ascontiguousarray(np.stack([trunks.transpose(1, 0, 2), trunks.transpose(2, 0, 1)])),
    )


def no_flows(links: Links, typical: FloatArray) -> Flows:
    """Of no units. ``typical`` ones of a site ([2]), within a factor of a million."""
    size, trunks = links.pairs.shape[-1], links.trunk_s.shape[2]
    return Flows(
        scale_s=typical * float(np.median(links.access_s)),
        units=np.zeros((2, 2, size, size)),
        access=np.zeros((2, 2, 2, size)),
        trunk_s=np.zeros((2, 2, 2, trunks)),
        by_row=np.zeros((2, 2, 4, 2, size)),
    )


@compiled
def refresh(links: Links, flows: Flows) -> None:
    """All that follows from the units, without what rounding has left of many changes."""
    for kind in range(2):
        for side in range(2):
            flows.access[NOW, kind, side].fill(0.0)
            flows.trunk_s[NOW, kind, side].fill(0.0)
        for row in range(flows.units.shape[2]):
            for other in range(flows.units.shape[3]):
                _add_to_sums(links, flows, kind, row, other, flows.units[NOW, kind, row, other])
            _sum_row(links, flows, kind, row)


@compiled
def replace(links: Links, flows: Flows, kind: int, row: int, units: FloatArray) -> None:
    """A row gets other ``units`` ([D])."""
    for other in range(len(units)):
        more = units[other] - flows.units[NOW, kind, row, other]
        flows.units[NOW, kind, row, other] = units[other]
        if more != 0:
            _add_to_sums(links, flows, kind, row, other, more)
    _sum_row(links, flows, kind, row)


@compiled
def copy_sums(flows: Flows, src: int, dst: int) -> None:
    """What is summed over rows, from ``NOW`` to ``BEFORE`` or back."""
    for kind in range(2):
        for side in range(2):
            for site in range(flows.access.shape[3]):
                flows.access[dst, kind, side, site] = flows.access[src, kind, side, site]
            for trunk in range(flows.trunk_s.shape[3]):
                flows.trunk_s[dst, kind, side, trunk] = flows.trunk_s[src, kind, side, trunk]


@compiled
def copy_row(flows: Flows, src: int, dst: int, kind: int, row: int) -> None:
    """Likewise what is known of a row."""
    for other in range(flows.units.shape[3]):
        flows.units[dst, kind, row, other] = flows.units[src, kind, row, other]
    for what in range(4):
        for way in range(2):
            flows.by_row[dst, kind, what, way, row] = flows.by_row[src, kind, what, way, row]


@compiled
def _add_to_sums(links: Links, flows: Flows, kind: int, row: int, other: int, more: float) -> None:
    """So many more units from ``row`` to ``other``."""
    flows.access[NOW, kind, SENT, row] += more
    flows.access[NOW, kind, RECEIVED, other] += more
    for trunk in range(flows.trunk_s.shape[3]):
        for way in range(2):
            flows.trunk_s[NOW, kind, way, trunk] += links.trunk_s[way, row, trunk, other] * more


@compiled
def _sum_row(links: Links, flows: Flows, kind: int, row: int) -> None:
    """What is kept of a row."""
    units, by_row, per_scale = flows.units[NOW, kind, row], flows.by_row[NOW, kind], 1 / flows.scale_s[kind]
    for way in range(2):
        pair_s, pair_latency_s = links.pairs[SECONDS, way, row], links.pairs[LATENCY, way, row]
        smooth = busiest = farthest = usd = 0.0
        for other in range(len(units)):  # without branches, which would take longer than what they skip
            seconds = pair_s[other] * units[other]
            busiest = max(busiest, seconds)
            smooth += _power(seconds * per_scale)
            farthest = max(farthest, pair_latency_s[other] * (units[other] > 0))
        for other in range(len(units)):
            usd += links.pairs[DOLLARS, way, row, other] * units[other]
        by_row[SMOOTH, way, row], by_row[BUSIEST, way, row] = smooth, busiest
        by_row[FARTHEST, way, row], by_row[PRICE, way, row] = farthest, usd


@compiled
def _power(value: float) -> float:
    """To the power of ``SHARPNESS``."""
    for _ in range(DOUBLINGS):
        value *= value
    return value


@compiled
def latency_s(flows: Flows, kind: int, way: int) -> float:
    """Of the farthest sites that exchange units."""
    longest_s = 0.0
    for seconds in flows.by_row[NOW, kind, FARTHEST, way]:
        longest_s = max(longest_s, seconds)
    return longest_s


@compiled
def usd(flows: Flows, kind: int, way: int) -> float:
    """Per unit's byte."""
    total = 0.0
    for price in flows.by_row[NOW, kind, PRICE, way]:
        total += price
    return total


@compiled
def busiest_s(links: Links, flows: Flows, kind: int, way: int) -> float:
    """Per unit's byte: what the busiest link takes."""
    longest_s = 0.0
    for site in range(flows.access.shape[3]):
        longest_s = max(longest_s, flows.by_row[NOW, kind, BUSIEST, way, site])
        for side in range(2):
            longest_s = max(longest_s, links.access_s[way, side, site] * flows.access[NOW, kind, side, site])
    for seconds in flows.trunk_s[NOW, kind, way]:
        longest_s = max(longest_s, seconds)
    return longest_s


@compiled
def smooth_s(links: Links, flows: Flows, kind: int, way: int) -> float:
    """Per unit's byte: the norm of what all links take."""
    total, scale_s = 0.0, flows.scale_s[kind]
    for site in range(flows.access.shape[3]):
        total += flows.by_row[NOW, kind, SMOOTH, way, site]
        for side in range(2):
            total += _power(links.access_s[way, side, site] * flows.access[NOW, kind, side, site] / scale_s)
    for seconds in flows.trunk_s[NOW, kind, way]:
        total += _power(seconds / scale_s)
    return float(scale_s * total ** (1 / SHARPNESS))


@compiled
def at_busiest(links: Links, flows: Flows, kind: int, way: int) -> tuple[int, int]:
    """(src, dst) of units that the busiest link carries; of several any, in proportion to what they take. There must be some."""
    units, longest_s = flows.units[NOW, kind], busiest_s(links, flows, kind, way)
    size = len(units)
    for trunk in range(flows.trunk_s.shape[3]):
        if flows.trunk_s[NOW, kind, way, trunk] == longest_s:
            weights = np.zeros(size * size)
            for src in range(size):
                for dst in range(size):
                    weights[src * size + dst] = links.trunk_s[way, src, trunk, dst] * units[src, dst]
            chosen = any_of(weights)
            return chosen // size, chosen % size
    for src in range(size):
        if flows.by_row[NOW, kind, BUSIEST, way, src] == longest_s:
            best = 0
            for dst in range(size):
                if links.pairs[SECONDS, way, src, dst] * units[src, dst] == longest_s:
                    best = dst
            return src, best
    for site in range(size):
        if links.access_s[way, SENT, site] * flows.access[NOW, kind, SENT, site] == longest_s:
            return site, any_of(units[site])
    weights, busiest = np.zeros(size), 0
    for site in range(size):
        if links.access_s[way, RECEIVED, site] * flows.access[NOW, kind, RECEIVED, site] == longest_s:
            busiest = site
    for src in range(size):
        weights[src] = units[src, busiest]
    return any_of(weights), busiest


@compiled
def any_of(weights: FloatArray) -> int:
    """An index, drawn in proportion to ``weights``."""
    total, last = 0.0, 0
    for weight in weights:
        total += weight
    left = np.random.random() * total
    for index in range(len(weights)):
        if weights[index] > 0:
            last = index
            left -= weights[index]
            if left < 0:
                break
    return last
