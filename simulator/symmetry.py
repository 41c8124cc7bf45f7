"""Ranks that must behave alike: a training step is simulated for one of each kind, and counts for all of them.

Two ranks are of one kind when they compute for the same time, and exchange the same bytes with ranks of the same kinds
over links of the same kinds, in every operation. Such a division (an equitable partition, found by colour refinement)
carries over: rates that are the same within a kind satisfy max-min fairness of the whole, whose solution is unique, and
so all ranks of a kind finish each operation at one time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridep.topology import Cluster
from simulator.arrays import FloatArray, IntArray
from simulator.compiled import compiled

HashArray = npt.NDArray[np.uint64]


class Exchange(NamedTuple):
    """Bytes of one kind of transfer: sent[g, c] from rank g to its peer at coordinate c of the level."""

    level: int
    sent: FloatArray


@dataclass(frozen=True, kw_only=True)
class Symmetry:
    """A division of ranks, and with them of workers and links, into kinds."""

    cluster: Cluster
    kind: IntArray
    """[ranks] from 0, numbered by their first rank."""

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
    def link_kind(self) -> IntArray:
        """[links of the cluster]: kind of each, from 0."""
        kinds: list[IntArray] = []
        found = 0
        for depth, size in enumerate(np.cumprod(self.cluster.sizes).tolist()):
            workers = _numbered([np.sort(self.kind.reshape(size, -1), axis=1)])
            both = np.stack([found + 2 * workers, found + 2 * workers + 1], axis=1).ravel()
            kinds.append(both)
            found += 2 * int(workers.max() + 1)
            assert both.size == 2 * int(np.prod(self.cluster.sizes[: depth + 1]))
        # Links between two datacenters are each of their own kind: `symmetry` keeps such datacenters apart.
        pairs = len(self.cluster.link_table) - sum(part.size for part in kinds)
        return np.concatenate([*kinds, found + np.arange(pairs)])

    @cached_property
    def link_size(self) -> IntArray:
        """[kinds of links]: how many links there are of each."""
        return np.bincount(self.link_kind)

    @cached_property
    def capacity_bytes_per_s(self) -> FloatArray:
        """[kinds of links]: of one link."""
        table = np.array([link.bandwidth_bytes_per_s for link in self.cluster.link_table])
        return np.asarray(table[np.unique(self.link_kind, return_index=True)[1]])


def no_symmetry(cluster: Cluster) -> Symmetry:
    """Every rank is of its own kind."""
    return Symmetry(cluster=cluster, kind=np.arange(cluster.num_gpus))


def symmetry(cluster: Cluster, exchanges: Sequence[Exchange], seconds: Sequence[FloatArray]) -> Symmetry:
    """The coarsest division that everything in a step respects.

    exchanges: all kinds of transfer (the reverse of one adds nothing). seconds: [ranks] each, all computations.
    Descriptions of ranks are compared by 64-bit hashes of them.
    """
    coordinates = cluster.coordinates
    table = np.array([link.bandwidth_bytes_per_s for link in cluster.link_table])
    sites = table[: 2 * cluster.sizes[0]].reshape(-1, 2)
    if cluster.links:
        sites = np.arange(cluster.sizes[0])[:, None]
    kind = _numbered([*seconds, *sites.T[:, coordinates[:, 0]]])
    rng = np.random.default_rng(0)
    while True:
        names = rng.integers(0, 2**63, int(kind.max()) + 1, dtype=np.uint64)
        described = [kind]
        for exchange in exchanges:
            signature = np.zeros(cluster.num_gpus, dtype=np.uint64)
            stride = int(np.prod(cluster.sizes[exchange.level + 1 :]))
            _describe(exchange.sent, stride, names[kind], signature)
            described.append(signature.view(np.int64))
        kind_of_ranks = _numbered(described)
        # A rank is also known by the workers that it is part of.
        for size in np.cumprod(cluster.sizes[:-1]).tolist():
            workers = _numbered([np.sort(kind_of_ranks.reshape(size, -1), axis=1)])
            kind_of_ranks = _numbered([kind_of_ranks, np.repeat(workers, cluster.num_gpus // size)])
        if kind_of_ranks.max() == kind.max():
            return Symmetry(cluster=cluster, kind=kind_of_ranks)
        kind = kind_of_ranks


def _numbered(columns: Sequence[npt.NDArray[np.generic]]) -> IntArray:
    """[rows]: rows that are equal in all columns ([rows] or [rows, n] each) get one number, in order of appearance."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        wide = column.reshape(len(column), -1)
        if wide.shape[1] > 1:
            part = np.unique(wide, axis=0, return_inverse=True)[1].reshape(-1)
        else:
            part = np.unique(wide[:, 0], return_inverse=True)[1].reshape(-1)
        number = np.unique(number * (int(part.max()) + 1) + part, return_inverse=True)[1].reshape(-1)
    first = np.unique(number, return_index=True)[1]
    rank = np.empty(first.size, dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(first.size)
    return np.asarray(rank[number])


@compiled
def _mix(value: np.uint64) -> np.uint64:
    """A permutation of 64-bit numbers that scatters them (splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled
def _describe(sent: FloatArray, stride: int, names: HashArray, signature: HashArray) -> None:
    """Add to each rank's signature what it sends to whom, and what it gets from whom, in any order."""
    num_ranks, size = sent.shape
    bits = sent.view(np.uint64)
    for rank in range(num_ranks):
        own = rank // stride % size
        for coordinate in range(size):
            if coordinate == own or bits[rank, coordinate] == 0:
                continue
            # Sums of the same numbers in another order differ in the last digits.
            size_hash = _mix((bits[rank, coordinate] + np.uint64(0x800)) >> np.uint64(12))
            peer = rank + (coordinate - own) * stride
            signature[rank] += _mix(size_hash + names[peer])
            signature[peer] += _mix(size_hash ^ names[rank])
