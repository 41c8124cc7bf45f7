"""Exchanges between sites, kept up to date entry by entry: what a local search asks millions of times.

An exchange takes as long as its busiest link, so two plans with equally busy ones look alike, though in one of them a single link
is left to relieve and in the other ten. In place of that time stands a smooth one, the norm of all links' times with a large
exponent, which falls with every busy link that is relieved.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.compiled import allocating, compiled, inlined
from planner.sites.problem import SiteProblem

TOKENS, COPIES = range(2)
"""Kinds of exchanges. Each has two ways: there (0), to experts and from homes, and back (1)."""
SENT, RECEIVED = range(2)
SECONDS, LATENCY, DOLLARS = range(3)
"""What is known of pairs; seconds and dollars per byte."""
SHARPEST = 7
"""Sharpness is the exponent's binary logarithm. At 5 two links that are equally busy count as one that is 2 % busier, at 2 as
one that is 19 % busier: blunt norms see how much there is to carry in all, sharp ones who carries most of it."""
NEGLIGIBLE = 0.01
"""Links that are busy for less than this share of the busiest one's time count as idle: powers of them have no meaning."""
LEAST = 0.1
"""Share of what is typical that the busiest link takes at least, for the scale of powers."""


class Links(NamedTuple):
    """What joins sites, by way. Rates inside sites and windows count as far as they limit what a site, or a pair of sites, can
    send."""

    access_s: FloatArray
    """[D, 2 ways, SENT and RECEIVED]: seconds per byte."""
    pairs: FloatArray
    """[SECONDS to DOLLARS, 2, D, D]; [3, 2, 0, 0] where all pairs are alike, cost nothing and share no trunks."""
    latency_s: float
    """Of all pairs where these are alike."""
    trunk_s: FloatArray
    """[2, D, trunks, D]: seconds per byte, by source and destination."""


class Flows(NamedTuple):
    """Units from site to site, and what follows from them, by kind."""

    typical_s: FloatArray
    """[2]: seconds per unit's byte of a site's units on a link."""
    units: FloatArray
    """[2, D, D], zeros on the diagonal; [2, 0, 0] where pairs do not matter."""
    summed: FloatArray
    """Likewise those that are in the sums below."""
    access: FloatArray
    """[D, 2, SENT and RECEIVED]: units."""
    trunk_s: FloatArray
    """[2, 2 ways, trunks]."""
    latency_s: FloatArray
    """[2, 2 ways]: of the farthest sites that exchange units, if any do."""
    power: FloatArray
    """[D, 2, 2 ways, SENT and RECEIVED]: shares of the smooth sums."""
    pair_power: FloatArray
    """[2, 2 ways, D, D]: likewise of pairs; [2, 2, 0, 0] where these do not matter."""
    row_power: FloatArray
    """[2, 2 ways, D]: of all pairs of a row, where that is not ``stale``."""
    stale: BoolArray
    """[2, D]."""
    farthest_s: FloatArray
    """[2, 2 ways, D]: the largest latency of pairs of a row that exchange units."""
    usd: FloatArray
    """[2, 2 ways]: per unit's byte."""
    trunk_power: FloatArray
    """[2, 2 ways]: of all trunks together."""
    total: FloatArray
    """[2, 2 ways]: the smooth sums."""
    before: FloatArray
    """Those before the last change."""
    scratch: FloatArray
    """[4]: of each kind and way, whatever is at hand; nothing is kept here."""
    per_s: FloatArray
    """[2, 2 ways]: powers are of seconds in units of the busiest link's, about."""
    sharpness: IntArray
    """[1]"""


def links_of(problem: SiteProblem) -> Links:
    """Of all exchanges."""
    size, inside = problem.num_sites, problem.inside_bytes_per_s
    up_s, down_s = 1 / np.minimum(problem.up_bytes_per_s, inside), 1 / np.minimum(problem.down_bytes_per_s, inside)
    paths, prices = problem.path_bytes_per_s, problem.egress_usd_per_byte
    there = np.zeros((3, 0, 0))
    if not problem.alike_paths or prices is not None or problem.cluster.trunks:
        there = np.zeros((3, size, size))
        there[LATENCY] = problem.latency_s
        if paths is not None:
            there[SECONDS] = 1 / paths
        if prices is not None:
            there[DOLLARS] = prices
    trunks = problem.trunk_s_per_byte.toarray().reshape(-1, size, size)
    return Links(
        access_s=np.ascontiguousarray(np.array([[up_s, down_s], [down_s, up_s]]).transpose(2, 0, 1)),
        pairs=np.ascontiguousarray(np.stack([there, there.transpose(0, 2, 1)], axis=1)),
        latency_s=problem.median_latency_s,
        trunk_s=np.ascontiguousarray(np.stack([trunks.transpose(1, 0, 2), trunks.transpose(2, 0, 1)])),
    )


def no_flows(links: Links, typical: FloatArray) -> Flows:
    """Of no units. ``typical`` ones of a site ([2])."""
    size, pairs, trunks = len(links.access_s), links.pairs.shape[-1], links.trunk_s.shape[2]
    return Flows(
        typical_s=typical * float(np.median(links.access_s)),
        units=np.zeros((2, pairs, pairs)),
        summed=np.zeros((2, pairs, pairs)),
        access=np.zeros((size, 2, 2)),
        trunk_s=np.zeros((2, 2, trunks)),
        latency_s=np.full((2, 2), links.latency_s if pairs == 0 else 0.0),
        power=np.zeros((size, 2, 2, 2)),
        pair_power=np.zeros((2, 2, pairs, pairs)),
        row_power=np.zeros((2, 2, pairs)),
        stale=np.ones((2, pairs), dtype=np.bool_),
        farthest_s=np.zeros((2, 2, pairs)),
        usd=np.zeros((2, 2)),
        trunk_power=np.zeros((2, 2)),
        total=np.zeros((2, 2)),
        before=np.zeros((2, 2)),
        scratch=np.zeros(4),
        per_s=np.ones((2, 2)),
        sharpness=np.full(1, SHARPEST),
    )


@compiled
def copy(src: FloatArray, dst: FloatArray) -> None:
    """[2, 2]. (Assigning slices takes seconds to compile.)"""
    for kind in range(2):
        for way in range(2):
            dst[kind, way] = src[kind, way]


@compiled
def forget(flows: Flows) -> None:
    """No units."""
    flows.units.fill(0.0)
    flows.access.fill(0.0)
    flows.trunk_s.fill(0.0)


@compiled
def add(links: Links, flows: Flows, kind: int, src: int, dst: int, more: float) -> None:
    """So many more units from ``src`` to ``dst``; what follows from it is not known before ``sum_all``."""
    flows.access[src, kind, SENT] += more
    flows.access[dst, kind, RECEIVED] += more
    if flows.units.size > 0:
        flows.units[kind, src, dst] += more
        for trunk in range(flows.trunk_s.shape[2]):
            for way in range(2):
                flows.trunk_s[kind, way, trunk] += links.trunk_s[way, src, trunk, dst] * more


@allocating
def sum_all(links: Links, flows: Flows, sharpness: int) -> None:
    """All that follows from the units."""
    flows.sharpness[0] = sharpness
    for kind in range(2):
        for way in range(2):
            flows.per_s[kind, way] = 1 / max(busiest_s(links, flows, kind, way), LEAST * flows.typical_s[kind])
    flows.power.fill(0.0)
    flows.trunk_power.fill(0.0)
    flows.total.fill(0.0)
    sum_sites(links, flows, np.arange(len(flows.access)))
    if flows.units.size > 0:
        flows.pair_power.fill(0.0)
        flows.farthest_s.fill(0.0)
        flows.latency_s.fill(0.0)
        flows.usd.fill(0.0)
        flows.trunk_s.fill(0.0)
        flows.summed.fill(0.0)
        places, size = np.empty((3, flows.units.size), dtype=np.int64), len(flows.access)
        for place in range(flows.units.size):
            places[0, place], places[1, place], places[2, place] = place // (size * size), place // size % size, place % size
        sum_pairs(links, flows, places)


@inlined
def sum_sites(links: Links, flows: Flows, sites: IntArray) -> None:
    """What follows from what ``sites`` send and receive."""
    access_s, access, per_s, total, powers = links.access_s, flows.access, flows.per_s, flows.total, flows.power
    sharpness = flows.sharpness[0]
    for site in sites:
        for kind in range(2):
            for way in range(2):
                for side in range(2):
                    power = raised(access_s[site, way, side] * access[site, kind, side] * per_s[kind, way], sharpness)
                    total[kind, way] += power - powers[site, kind, way, side]
                    powers[site, kind, way, side] = power


@compiled
def _sum_trunks(flows: Flows) -> None:
    """What follows from what trunks carry."""
    for kind in range(2):
        for way in range(2):
            power = 0.0
            for trunk in range(flows.trunk_s.shape[2]):
                power += raised(flows.trunk_s[kind, way, trunk] * flows.per_s[kind, way], flows.sharpness[0])
            flows.total[kind, way] += power - flows.trunk_power[kind, way]
            flows.trunk_power[kind, way] = power


@inlined
def sum_pairs(links: Links, flows: Flows, places: IntArray) -> None:
    """What follows from the units of pairs, told by their ``places`` ([3, n]) in ``Flows.units``, and for trunks."""
    sharpness, pairs, per_s = flows.sharpness[0], links.pairs, flows.per_s
    total, powers, all_units, summed = flows.total, flows.pair_power, flows.units, flows.summed
    for number in range(places.shape[1]):
        kind, src, dst = places[0, number], places[1, number], places[2, number]
        units, before = all_units[kind, src, dst], summed[kind, src, dst]
        if units == before:
            continue
        summed[kind, src, dst], flows.stale[kind, src] = units, True
        for way in range(2):
            power = raised(pairs[SECONDS, way, src, dst] * units * per_s[kind, way], sharpness)
            total[kind, way] += power - powers[kind, way, src, dst]
            powers[kind, way, src, dst] = power
            flows.usd[kind, way] += pairs[DOLLARS, way, src, dst] * (units - before)
            if (units > 0) != (before > 0):
                pair_s, farthest_s = pairs[LATENCY, way, src], flows.farthest_s[kind, way]
                flows.latency_s[kind, way] = _reach(
                    pair_s, all_units[kind, src], farthest_s, src, dst, flows.latency_s[kind, way]
                )
        for trunk in range(flows.trunk_s.shape[2]):
            for way in range(2):
                flows.trunk_s[kind, way, trunk] += links.trunk_s[way, src, trunk, dst] * (units - before)
    if flows.trunk_s.shape[2] > 0:
        _sum_trunks(flows)


@compiled
def _reach(pair_s: FloatArray, units: FloatArray, farthest_s: FloatArray, src: int, dst: int, latency_s: float) -> float:
    """The largest latency of all pairs, which was ``latency_s``, now that one has begun or ceased to exchange ``units`` ([D] of
    its row, whose latencies are ``pair_s``); ``farthest_s`` ([D]) is that of each row."""
    before_s, now_s = farthest_s[src], 0.0
    if units[dst] > 0:
        now_s = max(before_s, pair_s[dst])
    elif pair_s[dst] < before_s:
        return latency_s
    else:
        for other in range(len(units)):
            now_s = max(now_s, pair_s[other] * (units[other] > 0))
    farthest_s[src] = now_s
    if now_s >= latency_s:
        return now_s
    if before_s < latency_s:
        return latency_s
    for other in range(len(farthest_s)):
        now_s = max(now_s, farthest_s[other])
    return now_s


@compiled
def raised(share: float, sharpness: int) -> float:
    """To the power of 2 ** ``sharpness``."""
    power = share * (share > NEGLIGIBLE)
    for _ in range(sharpness):
        power *= power
    return power


@compiled
def rooted(power: float, sharpness: int) -> float:
    """What ``raised`` has made of it."""
    share = max(power, 0.0)
    for _ in range(sharpness):
        share = math.sqrt(share)
    return share


@compiled
def busiest_s(links: Links, flows: Flows, kind: int, way: int) -> float:
    """Per unit's byte: what the busiest link takes."""
    longest_s = 0.0
    for side in range(2):
        for site in range(len(flows.access)):
            longest_s = max(longest_s, links.access_s[site, way, side] * flows.access[site, kind, side])
    for src in range(flows.units.shape[1]):
        for dst in range(flows.units.shape[1]):
            longest_s = max(longest_s, links.pairs[SECONDS, way, src, dst] * flows.units[kind, src, dst])
    for seconds in flows.trunk_s[kind, way]:
        longest_s = max(longest_s, seconds)
    return longest_s


@compiled
def smooth_s(flows: Flows, kind: int, way: int) -> float:
    """Per unit's byte: the norm of what all links take."""
    return float(rooted(flows.total[kind, way], flows.sharpness[0]) / flows.per_s[kind, way])


@inlined
def at_busy(links: Links, flows: Flows, kind: int, way: int) -> tuple[int, int]:
    """(src, dst) of units that a busy link carries, the busiest most often; -1 for an end that may be any site."""
    left = np.random.random() * flows.total[kind, way]
    for side in range(2):
        for site in range(len(flows.access)):
            left -= flows.power[site, kind, way, side]
            if left < 0:
                return (site, -1) if side == SENT else (-1, site)
    for src in range(flows.units.shape[1]):
        if flows.stale[kind, src]:
            flows.stale[kind, src] = False
            for one in range(2):
                power = 0.0
                for dst in range(len(flows.access)):
                    power += flows.pair_power[kind, one, src, dst]
                flows.row_power[kind, one, src] = power
        left -= flows.row_power[kind, way, src]
        if left < 0:
            return src, any_of(flows.pair_power[kind, way, src])
    for trunk in range(flows.trunk_s.shape[2]):
        left -= raised(flows.trunk_s[kind, way, trunk] * flows.per_s[kind, way], flows.sharpness[0])
        if left < 0:
            return _on_trunk(links.trunk_s[way, :, trunk], flows.units[kind])
    return -1, -1


@allocating
def _on_trunk(trunk_s: FloatArray, units: FloatArray) -> tuple[int, int]:
    """A pair, drawn in proportion to what it takes of a trunk ([D, D] each)."""
    size = len(units)
    weights = np.zeros(size * size)
    for src in range(size):
        for dst in range(size):
            weights[src * size + dst] = trunk_s[src, dst] * units[src, dst]
    chosen = any_of(weights)
    return chosen // size, chosen % size


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
