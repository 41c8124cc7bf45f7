"""Every link of a cluster and its fabric, and which of them a transfer crosses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.topology import Cluster
from hybridep.units import counted
from simulator.errors import FabricError
from simulator.fabric_file import FabricFile, Inside
from simulator.routes import Routes, routes


class Paths(NamedTuple):
    """Of n transfers."""

    links: IntArray
    """[n, longest], -1 for none."""
    shares: FloatArray
    """[n, longest] of the transfer that crosses the link."""
    latency_s: FloatArray
    """[n]"""
    round_trip_s: FloatArray
    """[n]: this way's latency and the way back's."""
    level: IntArray
    """[n]: the outermost at which the two ranks differ."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Links are numbered: those of `cluster.link_table` but for its links per pair; the trunks; those of the fabric inside
    sites; circuits. A transfer between sites leaves over all `out` links of its source and enters over all `into` links of its
    destination, and over the trunks of the route between; what it crosses inside a site depends on its two ends alone."""

    cluster: Cluster
    inside: Inside
    wan: Routes | None

    # --- numbers of links ----------------------------------------------------------------------------------------

    @cached_property
    def _num_own(self) -> int:
        return 2 * int(sum(np.cumprod(self.cluster.sizes)))

    @property
    def first_trunk(self) -> int:
        """Number of the first link of the wide-area network."""
        return self._num_own

    @cached_property
    def _first_inside(self) -> int:
        return self._num_own + (self.wan.num_trunks if self.wan is not None else 0)

    @cached_property
    def _leaf_bytes_per_s(self) -> FloatArray:
        """[leaf switches]"""
        tree, cluster = self.inside.fat_tree, self.cluster
        if tree is None:
            return np.zeros(0)
        if len(cluster.sizes) < 2:
            raise FabricError(f"inside.fat_tree: cluster {cluster.name} has no level of workers inside sites")
        if cluster.sizes[1] % tree.workers_per_leaf:
            raise FabricError(
                f"inside.fat_tree.workers_per_leaf: {tree.workers_per_leaf} must divide a site's workers, {cluster.sizes[1]}"
            )
        leaves = cluster.sizes[0] * cluster.sizes[1] // tree.workers_per_leaf
        return np.full(leaves, cluster.levels[1].bandwidth * tree.workers_per_leaf / tree.oversubscription)

    @cached_property
    def _port_bytes_per_s(self) -> FloatArray:
        """[ranks]: of a rank's port to its rail's switch or to its NVLink domain's."""
        cluster, inside = self.cluster, self.inside
        if inside.rail is not None:
            return np.full(cluster.num_gpus, cluster.levels[self.node_level].bandwidth / cluster.sizes[-1])
        if inside.nvlink is None:
            return np.zeros(0)
        if self.cluster.ranks_per_site % inside.nvlink.domain:
            raise FabricError(
                f"inside.nvlink.domain: {inside.nvlink.domain} must divide the ranks of a site, {self.cluster.ranks_per_site}"
            )
        return np.full(cluster.num_gpus, inside.nvlink.bandwidth)

    @cached_property
    def capacity_bytes_per_s(self) -> FloatArray:
        """[links]"""
        own = np.array([link.bandwidth_bytes_per_s for link in self.cluster.link_table[: self._num_own]])
        circuits = np.zeros(0)
        if self.inside.mixnet is not None:
            mixnet, level = self.inside.mixnet, self.node_level
            nodes = slice(self.cluster.up_link(level, 0), self.cluster.up_link(level + 1, 0))
            own[nodes] = mixnet.packet * self.interface_bytes_per_s
            pairs = self.num_regions * self.nodes_per_region**2
            circuits = np.tile(np.arange(1, mixnet.optical + 1) * self.interface_bytes_per_s, pairs)
        trunks = self.wan.capacity_bytes_per_s if self.wan is not None else np.zeros(0)
        inside = np.repeat(np.concatenate([self._leaf_bytes_per_s, self._port_bytes_per_s]), 2)
        return np.concatenate([own, trunks, inside, circuits])

    @cached_property
    def link_names(self) -> list[str]:
        """[links]"""
        return [self.link_name(link) for link in range(self.capacity_bytes_per_s.size)]

    def link_name(self, link: int) -> str:
        """As reports show it."""
        cluster = self.cluster
        if link < self._num_own:
            return cluster.link_table[link].name
        if link < self._first_inside:
            assert self.wan is not None
            return self.wan.trunk_name(link - self._num_own)
        if self.is_circuit(link):
            region, source, destination, number = np.unravel_index(link - self._first_circuit, self._circuit_shape)
            nodes = [f"node {region * self.nodes_per_region + node}" for node in (source, destination)]
            return f"{counted(int(number) + 1, 'circuit')} {nodes[0]} -> {nodes[1]}"
        group, down = divmod(link - self._first_inside, 2)
        leaves = len(self._leaf_bytes_per_s)
        place = f"leaf {group}" if group < leaves else f"{cluster.worker_name(cluster.location(group - leaves))} port"
        return f"{place} {'down' if down else 'up'}"

    # --- MixNet ------------------------------------------------------------------------------------------------------

    @cached_property
    def _first_circuit(self) -> int:
        return self._first_inside + 2 * (len(self._leaf_bytes_per_s) + len(self._port_bytes_per_s))

    @property
    def _circuit_shape(self) -> tuple[int, int, int, int]:
        """Regions, nodes of one, again, and how many circuits a pair may have: a link for each, one used at a time."""
        assert self.inside.mixnet is not None
        return self.num_regions, self.nodes_per_region, self.nodes_per_region, self.inside.mixnet.optical

    def is_circuit(self, link: int) -> bool:
        """Whether it is between two nodes of a region, over its optical switch."""
        return self.inside.mixnet is not None and link >= self._first_circuit

    def node(self, rank: IntArray) -> IntArray:
        """Which worker of the level above GPUs each rank belongs to, counted over all sites."""
        return np.asarray(rank // self.cluster.sizes[-1])

    @property
    def nodes_per_region(self) -> int:
        """Nodes that one circuit switch joins; those of a region are consecutive."""
        assert self.inside.mixnet is not None
        nodes = self.cluster.ranks_per_site // self.cluster.sizes[-1]
        region = self.inside.mixnet.region or nodes
        if nodes % region or region < 2:
            raise FabricError(f"inside.mixnet.region: {region} must divide the nodes of a site, {nodes}, and be at least 2")
        return region

    @property
    def num_regions(self) -> int:
        """Of all sites."""
        return self.cluster.num_gpus // self.cluster.sizes[-1] // self.nodes_per_region

    @property
    def interface_bytes_per_s(self) -> float:
        """Of one of a node's network interfaces, each way."""
        assert self.inside.mixnet is not None
        return self.cluster.levels[self.node_level].bandwidth / (self.inside.mixnet.packet + self.inside.mixnet.optical)

    def _circuit_link(self, source: IntArray, destination: IntArray, circuits: IntArray) -> IntArray:
        """[n], -1 for pairs of ranks whose nodes have no circuit. circuits: [regions, nodes of one, again]."""
        a, b, size = self.node(source), self.node(destination), self.nodes_per_region
        together = a // size == b // size
        region, a, b = a // size, a % size, b % size
        number = np.where(together, circuits[region, a, b], 0)
        link = np.ravel_multi_index((region, a, b, np.maximum(number - 1, 0)), self._circuit_shape)
        return np.where(number > 0, self._first_circuit + link, -1)

    # --- where ranks are -----------------------------------------------------------------------------------------------

    @property
    def node_level(self) -> int:
        """The level above GPUs. Raises FabricError where that is the sites'."""
        if len(self.cluster.sizes) < 3:
            raise FabricError(f"cluster {self.cluster.name}: rail and mixnet each needs a level of nodes between sites and GPUs")
        return len(self.cluster.sizes) - 2

    # --- paths -------------------------------------------------------------------------------------------------------

    @cached_property
    def out(self) -> IntArray:
        """[ranks, n]: links that a transfer to another site crosses in its source's site, -1 for none."""
        return self._between_site_and_ranks(0)

    @cached_property
    def into(self) -> IntArray:
        """[ranks, n]: likewise in its destination's site."""
        return self._between_site_and_ranks(1)

    def _between_site_and_ranks(self, direction: int) -> IntArray:
        ranks = np.arange(self.cluster.num_gpus)
        levels = range(len(self.cluster.sizes))
        if self.inside.rail is not None:
            levels = range(self.node_level)
        columns = [self._worker_link(level, ranks, direction) for level in levels]
        if self.inside.fat_tree is not None:
            columns.append(self._leaf_link(ranks, direction))
        if self.inside.rail is not None:
            columns.append(self._port_link(ranks, direction))
        return np.stack(columns, axis=1)

    def _worker_link(self, level: int, rank: IntArray, direction: int) -> IntArray:
        return np.asarray(self.cluster.up_link(level, 0) + 2 * (rank // self.cluster.stride(level)) + direction)

    def _leaf(self, rank: IntArray) -> IntArray:
        assert self.inside.fat_tree is not None
        return np.asarray(rank // (self.inside.fat_tree.workers_per_leaf * self.cluster.stride(1)))

    def _leaf_link(self, rank: IntArray, direction: int) -> IntArray:
        return self._first_inside + 2 * self._leaf(rank) + direction

    def _port_link(self, rank: IntArray, direction: int) -> IntArray:
        return self._first_inside + 2 * len(self._leaf_bytes_per_s) + 2 * rank + direction

    def inner(self, source: IntArray, destination: IntArray, circuits: IntArray | None = None) -> IntArray:
        """[n, longest]: links between different ranks of one site, -1 for none. circuits: [regions, nodes of one, again], where
        the transfers may use those of a MixNet."""
        cluster = self.cluster
        columns = []

        def use(where: np.ndarray[tuple[int], np.dtype[np.bool_]], link: IntArray) -> None:
            columns.append(np.where(where, link, -1))

        beside = np.zeros(source.size, dtype=np.bool_)
        if self.inside.nvlink is not None:
            beside = source // self.inside.nvlink.domain == destination // self.inside.nvlink.domain
            use(beside, self._port_link(source, 0))
            use(beside, self._port_link(destination, 1))
        lit = np.zeros(source.size, dtype=np.bool_)
        if circuits is not None:
            circuit = self._circuit_link(source, destination, circuits)
            lit = circuit >= 0
            use(lit, circuit)
        for level in range(1, len(cluster.sizes)):
            stride = cluster.stride(level)
            crosses = (source // stride != destination // stride) & ~beside
            if circuits is not None and level <= self.node_level:
                crosses &= ~lit
            if self.inside.rail is not None and level >= self.node_level:
                continue
            use(crosses, self._worker_link(level, source, 0))
            use(crosses, self._worker_link(level, destination, 1))
        if self.inside.fat_tree is not None:
            crosses = (self._leaf(source) != self._leaf(destination)) & ~beside
            use(crosses, self._leaf_link(source, 0))
            use(crosses, self._leaf_link(destination, 1))
        if self.inside.rail is not None:
            size = cluster.sizes[-1]
            away = source // size != destination // size
            # The rank of the source's node on the destination's rail.
            relay = source // size * size + destination % size
            level = len(cluster.sizes) - 1
            local = np.where(away, relay, destination)
            moves = source != local
            use(moves, self._worker_link(level, source, 0))
            use(moves, self._worker_link(level, local, 1))
            use(away, self._port_link(relay, 0))
            use(away, self._port_link(destination, 1))
        return np.stack(columns, axis=1) if columns else np.zeros((source.size, 0), dtype=np.int64)

    def paths(self, source: IntArray, destination: IntArray, circuits: IntArray | None = None) -> Paths:
        """Of transfers between pairs of ranks, [n] each; the ranks of a pair are different. circuits: as `inner`."""
        per_site = self.cluster.ranks_per_site
        a, b = source // per_site, destination // per_site
        far = (a != b)[:, None]
        near = self.inner(source, destination, circuits)
        links = [np.where(far, self.out[source], -1), np.where(far, self.into[destination], -1), np.where(far, -1, near)]
        shares = [np.ones(part.shape) for part in links]
        differ = self.cluster.coordinates[source] != self.cluster.coordinates[destination]
        level = differ.argmax(axis=1)
        latency_s = np.array([one.latency for one in self.cluster.levels])[level]
        round_trip_s = 2 * latency_s
        if self.wan is not None:
            trunks, parts = self.wan.between(a, b)
            links.append(np.where(trunks >= 0, self.first_trunk + trunks, -1))
            shares.append(parts)
            there_s, back_s = self.wan.latency_s[a, b], self.wan.latency_s[b, a]
            latency_s = np.where(far[:, 0], there_s, latency_s)
            round_trip_s = np.where(far[:, 0], there_s + back_s, round_trip_s)
        return Paths(np.concatenate(links, axis=1), np.concatenate(shares, axis=1), latency_s, round_trip_s, level)

    def owners(self) -> Sequence[IntArray]:
        """Links between ranks and their site's exit, both ways: see `out` and `into`."""
        return self.out, self.into


def wiring(cluster: Cluster, fabric: FabricFile | None = None) -> Wiring:
    """A cluster's own links, and those of a fabric where one is given. Raises FabricError where the two do not fit."""
    made = Wiring(
        cluster=cluster,
        inside=fabric.inside if fabric is not None else Inside(),
        wan=routes(cluster, fabric.wan if fabric is not None else None),
    )
    _ = made.capacity_bytes_per_s
    return made
