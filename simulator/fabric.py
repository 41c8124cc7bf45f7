"""A cluster as links and paths of a network, one of each kind."""

from __future__ import annotations

import numpy as np

from hybridep.topology import Cluster
from simulator.arrays import FloatArray, IntArray
from simulator.collective import Flows
from simulator.conditions import Conditions
from simulator.engine import Engine
from simulator.network import EXACT, Network, Transfers
from simulator.symmetry import Symmetry


def paths(cluster: Cluster, source: IntArray, destination: IntArray) -> tuple[IntArray, FloatArray]:
    """Links of `cluster.link_table` between pairs of ranks, [n, longest], -1 behind the end; and latencies in seconds, [n].

    The same as `cluster.path` and `cluster.latency_s` for each pair, which must be of two different ranks.
    """
    last = len(cluster.levels)
    a, b = cluster.coordinates[source], cluster.coordinates[destination]
    first = (a != b).argmax(axis=1)
    links = np.full((source.size, 2 * last + (1 if cluster.links else 0)), -1, dtype=np.int64)
    used = np.zeros(source.size, dtype=np.int64)
    rows = np.arange(source.size)

    def use(which: IntArray, link: IntArray) -> None:
        links[which, used[which]] = link
        used[which] += 1

    for level in range(last):
        which = rows[first <= level]
        inner = int(np.prod(cluster.sizes[level + 1 :]))
        use(which, cluster.up_link(level, 0) + 2 * (source[which] // inner))
        use(which, cluster.down_link(level, 0) + 2 * (destination[which] // inner))
    latency_s = np.array([level.latency for level in cluster.levels])[first]
    if cluster.links:
        which = rows[first == 0]
        table = len(cluster.link_table) - cluster.sizes[0] * (cluster.sizes[0] - 1)
        skip = a[which, 0] * (cluster.sizes[0] - 1) + b[which, 0] - (b[which, 0] > a[which, 0])
        use(which, table + skip)
        latency_s[which] = cluster.pair_latency_s[a[which, 0], b[which, 0]]
    return links[:, : int(used.max(initial=0))], latency_s


class Fabric:
    """The network of a cluster. Ranks and links that are alike are in it once, and transfers between them are weighted."""

    def __init__(
        self, engine: Engine, symmetry: Symmetry, tolerance: float = EXACT, conditions: Conditions | None = None
    ) -> None:
        self.symmetry = symmetry
        self._conditions = conditions or Conditions()
        self.network = Network(engine, symmetry.capacity_bytes_per_s, tolerance)

    def flows(self, level: int, sent: FloatArray) -> Flows:
        """Transfers of an array [ranks, size of the level]: from each rank to its peer at each coordinate."""
        symmetry = self.symmetry
        cluster = symmetry.cluster
        stride, size = int(np.prod(cluster.sizes[level + 1 :])), cluster.sizes[level]
        kind, coordinate = np.nonzero(sent[symmetry.first])
        source = symmetry.first[kind]
        own = source // stride % size
        moves = coordinate != own
        kind, coordinate, source, own = kind[moves], coordinate[moves], source[moves], own[moves]
        destination = source + (coordinate - own) * stride
        size_bytes = sent[source, coordinate]
        peer = symmetry.kind[destination]
        if symmetry.num_kinds == cluster.num_gpus:
            links, latency_s = paths(cluster, source, destination)
            return Flows(
                source=source,
                destination=destination,
                transfers=Transfers(
                    links=links,
                    latency_s=latency_s,
                    size_bytes=size_bytes,
                    limit_bytes_per_s=self._conditions.limit_bytes_per_s(latency_s),
                ),
            )
        alike, counts = _alike(kind * symmetry.num_kinds + peer, size_bytes)
        links, latency_s = paths(cluster, source[alike], destination[alike])
        on_link = links >= 0
        link_kinds = np.where(on_link, symmetry.link_kind[links], -1)
        total = (counts * symmetry.size[kind[alike]])[:, None]
        return Flows(
            source=kind[alike],
            destination=peer[alike],
            transfers=Transfers(
                links=link_kinds,
                latency_s=latency_s,
                size_bytes=size_bytes[alike],
                weights=np.where(on_link, total / symmetry.link_size[link_kinds], 1.0),
                limit_bytes_per_s=self._conditions.limit_bytes_per_s(latency_s),
            ),
        )


def _alike(ends: IntArray, size_bytes: FloatArray) -> tuple[IntArray, IntArray]:
    """First row of each group of transfers with the same ends and (but for rounding) size, and the groups' sizes."""
    if not ends.size:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    order = np.lexsort((size_bytes, ends))
    near = np.isclose(size_bytes[order[1:]], size_bytes[order[:-1]], rtol=1e-11, atol=0)
    new = np.concatenate([[True], (np.diff(ends[order]) != 0) | ~near])
    starts = np.flatnonzero(new)
    return order[starts], np.diff(np.append(starts, ends.size))
