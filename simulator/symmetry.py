"""Ranks that must behave alike: a training step is simulated for one of each kind, and counts for all of them.

Two ranks are of one kind when they compute for the same time, and exchange the same bytes with ranks of the same kinds over
links of the same kinds, in every operation; two links are of one kind when they are as fast and transfers of the same kinds
cross them. Such a division (an equitable partition, found by colour refinement) carries over: rates that are the same within a
kind satisfy max-min fairness of the whole, whose solution is unique, and so all ranks of a kind finish each operation at one
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.compiled import allocating, compiled
from hybridep.topology import Cluster
from hybridep.traffic import Direct
from simulator.errors import SimulationError
from simulator.sent import Sent, blocks, dense
from simulator.wiring import Wiring

HashArray = npt.NDArray[np.uint64]


class Exchange(NamedTuple):
    """Bytes of one kind of transfer: sent[g, c] from rank g to its peer at coordinate c of the level."""

    level: int
    sent: Sent


@dataclass(frozen=True, kw_only=True)
class Symmetry:
    """A division of ranks and of links into kinds."""

    wiring: Wiring
    kind: IntArray
    """[ranks] from 0, numbered by their first rank."""
    link_kind: IntArray
    """[links] from 0, numbered by their first link."""

    @property
    def cluster(self) -> Cluster:
        """Whose ranks these are."""
        return self.wiring.cluster

    @cached_property
    def num_kinds(self) -> int:
        """Of ranks."""
        return int(self.kind.max()) + 1

    @cached_property
    def first(self) -> IntArray:
        """[kinds]: a rank of each kind."""
        return np.unique(self.kind, return_index=True)[1]

    @cached_property
    def size(self) -> IntArray:
        """[kinds]: how many ranks there are of each."""
        return np.bincount(self.kind)

    @cached_property
    def link_size(self) -> IntArray:
        """[kinds of links]: how many links there are of each."""
        return np.bincount(self.link_kind)

    @cached_property
    def capacity_bytes_per_s(self) -> FloatArray:
        """[kinds of links]: of one link."""
        return np.asarray(self.wiring.capacity_bytes_per_s[np.unique(self.link_kind, return_index=True)[1]])


def no_symmetry(wiring: Wiring) -> Symmetry:
    """Every rank is of its own kind."""
    ranks, links = wiring.cluster.num_gpus, wiring.capacity_bytes_per_s.size
    return Symmetry(wiring=wiring, kind=np.arange(ranks), link_kind=np.arange(links))


def symmetry(
    wiring: Wiring,
    exchanges: Sequence[Exchange],
    seconds: Sequence[FloatArray],
    link_traits: IntArray | None = None,
    direct: Sequence[Direct] = (),
) -> Symmetry:
    """The coarsest division that everything in a step respects.

    exchanges: all kinds of transfer (the reverse of one is taken in with it). seconds: [ranks] each, all computations.
    link_traits: [links] what else tells links apart. direct: transfers between any two ranks, where sites have no trunks
    between them (and their reverse).
    Descriptions are compared by 64-bit hashes of them.
    """
    cluster, wan = wiring.cluster, wiring.wan
    ranks, sites = cluster.num_gpus, cluster.sizes[0]
    rng = np.random.default_rng(0)
    kind = _numbered(rng, seconds) if seconds else np.zeros(ranks, dtype=np.int64)
    traits = [] if link_traits is None else [link_traits.astype(np.float64)]
    link_kind = _numbered(rng, [wiring.capacity_bytes_per_s, *traits])
    pair_kind = _numbered(rng, [wan.latency_s.ravel()]) if wan is not None else np.zeros(0, dtype=np.int64)
    inner = [_Inner.of(wiring, exchange) for exchange in exchanges if exchange.level > 0]
    if direct and wan is not None:
        raise SimulationError("direct transfers over trunks: their shares of a route are not compared; simulate every rank")
    inner += [
        _Inner(*pairs, wiring.paths(*pairs[:2]).links, wiring.paths(pairs.destination, pairs.source).links) for pairs in direct
    ]
    used = np.zeros(pair_kind.size, dtype=np.bool_)
    while True:
        names, link_names, pair_names = (_names(rng, each) for each in (kind, link_kind, pair_kind))
        about, about_link = np.zeros(ranks, dtype=np.uint64), np.zeros(link_kind.size, dtype=np.uint64)
        about_pair = np.zeros(pair_kind.size, dtype=np.uint64)
        for salt, exchange in enumerate(exchanges):
            if exchange.level == 0:
                for start, block in blocks(exchange.sent):
                    _far(block, start, ranks // sites, np.uint64(salt), names, pair_names, about, about_pair, used)
        for salt, one in enumerate(inner):
            _near(*one, np.uint64(salt), names, link_names, about, about_link)
        for salt, owned in enumerate(wiring.owners()):
            _own(owned, np.uint64(salt + 1), names, link_names, about, about_link)
        if wan is not None:
            trunks = slice(wiring.first_trunk, wiring.first_trunk + wan.num_trunks)
            _cross(wan.first, wan.trunk, wan.share, used, pair_names, link_names[trunks], about_pair, about_link[trunks])
        before = [int(each.max(initial=0)) for each in (kind, link_kind, pair_kind)]
        kind, link_kind, pair_kind = (
            np.unique(_mixed(own, found), return_inverse=True)[1].reshape(-1)
            for own, found in ((names, about), (link_names, about_link), (pair_names, about_pair))
        )
        if [int(each.max(initial=0)) for each in (kind, link_kind, pair_kind)] == before:
            return Symmetry(wiring=wiring, kind=_by_first(kind), link_kind=_by_first(link_kind))


class _Inner(NamedTuple):
    """Transfers inside sites, or direct ones between any two ranks, and the links that each and its reverse cross."""

    source: IntArray
    destination: IntArray
    size_bytes: FloatArray
    there: IntArray
    back: IntArray

    @staticmethod
    def of(wiring: Wiring, exchange: Exchange) -> _Inner:
        sent = dense(exchange.sent)
        source, coordinate = np.nonzero(sent)
        stride, size = wiring.cluster.stride(exchange.level), wiring.cluster.sizes[exchange.level]
        own = source // stride % size
        moves = coordinate != own
        source, coordinate, own = source[moves], coordinate[moves], own[moves]
        destination = source + (coordinate - own) * stride
        return _Inner(
            source,
            destination,
            sent[source, coordinate],
            wiring.inner(source, destination),
            wiring.inner(destination, source),
        )


def _numbered(rng: np.random.Generator, columns: Sequence[FloatArray]) -> IntArray:
    """[rows]: rows that are equal in all columns get one number."""
    key = np.zeros(columns[0].size, dtype=np.uint64)
    for column in columns:
        key = _mixed(key, _names(rng, np.unique(column, return_inverse=True)[1].reshape(-1)))
    return np.unique(key, return_inverse=True)[1].reshape(-1)


def _names(rng: np.random.Generator, kind: IntArray) -> HashArray:
    """A random number for each kind, at everything of that kind."""
    return np.asarray(rng.integers(0, 2**63, int(kind.max(initial=0)) + 1, dtype=np.uint64)[kind])


def _by_first(kind: IntArray) -> IntArray:
    """The same kinds, numbered in order of appearance."""
    first = np.unique(kind, return_index=True)[1]
    rank = np.empty(first.size, dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(first.size)
    return np.asarray(rank[kind])


@compiled
def _mix(value: np.uint64) -> np.uint64:
    """A permutation of 64-bit numbers that scatters them (splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@allocating
def _mixed(first: HashArray, second: HashArray) -> HashArray:
    """[n]: a hash of two numbers each."""
    both = np.empty_like(first)
    for at in range(first.size):
        both[at] = _mix(_mix(first[at] + np.uint64(1)) + second[at])
    return both


@compiled
def hash_of_number(bits: np.uint64, salt: np.uint64) -> np.uint64:
    """Of a float's bits. Sums of the same numbers in another order differ in the last digits, which are left out."""
    return _mix(((bits + np.uint64(0x800)) >> np.uint64(12)) + (salt << np.uint64(56)))


@compiled
def _far(
    sent: FloatArray,
    start: int,
    per_site: int,
    salt: np.uint64,
    names: HashArray,
    pair_names: HashArray,
    about: HashArray,
    about_pair: HashArray,
    used: BoolArray,
) -> None:
    """Transfers between sites: what each rank, from `start` on, sends to whom, and gets from whom, in any order; and what each
    pair carries."""
    num_ranks, sites = sent.shape
    bits = sent.view(np.uint64)
    for row in range(num_ranks):
        rank = start + row
        own = rank // per_site
        for site in range(sites):
            if site == own or bits[row, site] == 0:
                continue
            peer = rank + (site - own) * per_site
            size = hash_of_number(bits[row, site], salt)
            route = np.uint64(0)
            if pair_names.size:
                forth, reverse = own * sites + site, site * sites + own
                route = pair_names[forth] ^ _mix(pair_names[reverse])
                both = _mix(_mix(size + names[rank]) + names[peer])
                about_pair[forth] += both
                about_pair[reverse] += _mix(both)
                used[forth] = used[reverse] = True
            about[rank] += _mix(size + names[peer] + route)
            about[peer] += _mix((size ^ names[rank]) + route)


@compiled
def _near(
    source: IntArray,
    destination: IntArray,
    size_bytes: FloatArray,
    there: IntArray,
    back: IntArray,
    salt: np.uint64,
    names: HashArray,
    link_names: HashArray,
    about: HashArray,
    about_link: HashArray,
) -> None:
    """Transfers inside sites, or direct ones between any two ranks, and their reverse."""
    bits = size_bytes.view(np.uint64)
    for flow in range(source.size):
        a, b = source[flow], destination[flow]
        size = hash_of_number(bits[flow], salt)
        both = _mix(_mix(size + names[a]) + names[b])
        crossed = np.uint64(0)
        for hop in range(there.shape[1]):
            if there[flow, hop] >= 0:
                crossed += _mix(link_names[there[flow, hop]])
                about_link[there[flow, hop]] += both
            if back[flow, hop] >= 0:
                crossed += _mix(~link_names[back[flow, hop]])
                about_link[back[flow, hop]] += _mix(both)
        about[a] += _mix(size + names[b] + crossed)
        about[b] += _mix((size ^ names[a]) + crossed)


@compiled
def _own(
    links: IntArray, salt: np.uint64, names: HashArray, link_names: HashArray, about: HashArray, about_link: HashArray
) -> None:
    """Links that all transfers of a rank to, or from, other sites cross."""
    for rank in range(links.shape[0]):
        for hop in range(links.shape[1]):
            link = links[rank, hop]
            if link >= 0:
                about[rank] += _mix(link_names[link] + salt)
                about_link[link] += _mix(names[rank] + salt)


@compiled
def _cross(
    first: IntArray,
    trunk: IntArray,
    share: FloatArray,
    used: BoolArray,
    pair_names: HashArray,
    trunk_names: HashArray,
    about_pair: HashArray,
    about_trunk: HashArray,
) -> None:
    """Pairs of sites that exchange anything, and the trunks between them."""
    bits = share.view(np.uint64)
    for pair in range(used.size):
        if not used[pair]:
            continue
        for step in range(first[pair], first[pair + 1]):
            part = hash_of_number(bits[step], np.uint64(0))
            about_pair[pair] += _mix(trunk_names[trunk[step]] + part)
            about_trunk[trunk[step]] += _mix(pair_names[pair] + part)
