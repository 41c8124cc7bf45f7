"""A cluster as links and paths of a network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import networkx as nx
import numpy as np

from hybridep.topology import Cluster
from simulator.collective import Flows
from simulator.engine import Engine
from simulator.flow import FloatArray, IntArray
from simulator.network import Network


class Fabric:
    """The network of a cluster, with transfers routed over the shortest path between their ranks.

    Paths are found in the cluster's graph. A rank hangs on one switch, so all pairs of ranks below the same two switches
    share the way between these, which is looked for once.
    """

    def __init__(self, engine: Engine, cluster: Cluster) -> None:
        self._cluster = cluster
        self._graph = cluster.graph()
        self.network = Network(engine, [link.bandwidth_bytes_per_s for link in cluster.link_table])
        self._path_ids = np.full((cluster.num_gpus, cluster.num_gpus), -1, dtype=np.int64)
        self._between: dict[tuple[int | str, int | str], tuple[int, ...]] = {}

    @property
    def link_names(self) -> tuple[str, ...]:
        """[links]"""
        return tuple(link.name for link in self._cluster.link_table)

    def links(self, source: int, destination: int) -> tuple[int, ...]:
        """Link ids, in order, from one rank to another."""
        if source == destination:
            return ()
        (start,), (end,) = self._graph.successors(source), self._graph.predecessors(destination)
        if (start, end) not in self._between:
            nodes = nx.shortest_path(self._graph, start, end)
            self._between[start, end] = tuple(self._graph.edges[edge]["link"] for edge in pairwise(nodes))
        edges = self._graph.edges
        return (edges[source, start]["link"], *self._between[start, end], edges[end, destination]["link"])

    def path(self, source: int, destination: int) -> int:
        """Id of the path in the network, between two ranks."""
        known = int(self._path_ids[source, destination])
        if known < 0:
            latency_s = self._cluster.latency_s(source, destination)
            known = self.network.path(self.links(source, destination), latency_s)
            self._path_ids[source, destination] = known
        return known

    def flows(
        self,
        source: Sequence[int] | IntArray,
        destination: Sequence[int] | IntArray,
        size_bytes: Sequence[float] | FloatArray,
    ) -> Flows:
        """The transfers of an exchange, one per position; those without bytes, or to oneself, are left out."""
        sources = np.asarray(source, dtype=np.int64)
        destinations = np.asarray(destination, dtype=np.int64)
        sizes = np.asarray(size_bytes, dtype=np.float64)
        moves = (sizes > 0) & (sources != destinations)
        sources, destinations, sizes = sources[moves], destinations[moves], sizes[moves]
        unknown = np.flatnonzero(self._path_ids[sources, destinations] < 0)
        for row in unknown.tolist():
            self.path(int(sources[row]), int(destinations[row]))
        return Flows(
            source=sources,
            destination=destinations,
            size_bytes=sizes,
            path=self._path_ids[sources, destinations],
        )
