"""Clusters: a hierarchy of workers (datacenter, node, GPU) with one up and one down link each, and optional links per DC pair.

Ranks are numbered by location ``(x_0 .. x_{L-1})`` in mixed radix over the level sizes, last level fastest (HybridEP, Eq. 13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from itertools import permutations, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import ModelWrapValidatorHandler, model_validator
from scipy.sparse import csr_array

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.gpus import Gpu, SiteGpu
from hybridep.pods import expanded
from hybridep.sites import ClusterFile, Level, PairLink, Site

if TYPE_CHECKING:
    import networkx as nx

Location = tuple[int, ...]
Sites = TypeVar("Sites", int, IntArray)


class Link(NamedTuple):
    """One directed resource that transfers share. A tuple, because many sites have tens of thousands."""

    name: str
    bandwidth_bytes_per_s: float


class Cluster(ClusterFile):
    """A bandwidth profile. ``levels`` are outermost first; the last one counts GPUs (one rank each). Loading makes sites
    of the pods of a site, so all sites have equally many ranks; ``Site.part_of`` says which belong together."""

    @model_validator(mode="wrap")
    @classmethod
    def _without_pods(cls, data: object, validated: ModelWrapValidatorHandler[Cluster]) -> Cluster:
        # Once as written, so that errors speak of what was written; then with the pods as sites.
        cluster = validated(data)
        if all(site.num_pods == 1 for site in cluster.sites):
            return cluster
        rest = {"name": cluster.name, "gpu": cluster.gpu}
        return validated(rest | expanded(cluster.levels, cluster.sites, cluster.links, cluster.trunks))

    # --- ranks and locations -------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """SF, the size of each level."""
        return tuple(level.size for level in self.levels)

    @cached_property
    def num_gpus(self) -> int:
        """G, the number of ranks."""
        return math.prod(self.sizes)

    def stride(self, level: int) -> int:
        """Ranks below one worker of a level: what lies between ranks that differ by one there."""
        return math.prod(self.sizes[level + 1 :])

    @property
    def ranks_per_site(self) -> int:
        """Ranks of one worker of the outermost level."""
        return self.stride(0)

    @property
    def processors(self) -> int | None:
        """Processors on which all ranks take turns (``Gpu.sharing``); None where each has its own."""
        number = max(1, round(self.num_gpus / self.gpu.sharing))
        return number if number < self.num_gpus else None

    @cached_property
    def coordinates(self) -> IntArray:
        """[G, L]: the location of each rank."""
        return np.stack(np.unravel_index(np.arange(self.num_gpus), self.sizes), axis=1).astype(np.int64)

    def location(self, rank: int) -> Location:
        """Location of a global rank."""
        return tuple(int(x) for x in np.unravel_index(rank, self.sizes))

    def peer(self, rank: int, level: int, coordinate: int) -> int:
        """The rank that differs from ``rank`` only in its coordinate at ``level``."""
        stride = self.stride(level)
        return rank + (coordinate - rank // stride % self.sizes[level]) * stride

    def site_labels(self, dc: int) -> tuple[str, ...]:
        """``site_name``, and that of the site whose pod it is."""
        return self.sites[dc].labels if self.sites else (self.site_name(dc),)

    @cached_property
    def rank_datacenters(self) -> tuple[str, ...]:
        """[G]: the site of each rank; of a pod's the one whose pod it is."""
        return tuple(site for site in self.datacenters for _ in range(self.ranks_per_site))

    def in_one_site(self, a: int, b: int) -> bool:
        """Whether two of the outermost level are the same, or pods of the same site."""
        return self.datacenters[a] == self.datacenters[b]

    def worker_name(self, location: Sequence[int]) -> str:
        """``us-east/gpu3``; a prefix of a location names a worker of an outer level."""
        inner = [f"{level.name}{x}" for level, x in zip(self.levels[1:], location[1:], strict=False)]
        return "/".join([self.site_name(location[0]), *inner])

    # --- what ranks compute with -----------------------------------------------------------------------------------

    @property
    def site_gpus(self) -> tuple[Gpu, ...]:
        """[DCs]: what the ranks of each compute with."""
        if not self.has_uneven_gpus:
            return (self.gpu,) * self.levels[0].size
        return tuple(self.gpu if site.gpu is None else site.gpu.of(self.gpu) for site in self.sites)

    @property
    def has_uneven_gpus(self) -> bool:
        """Some site's GPUs differ from the cluster's."""
        return any(site.gpu is not None for site in self.sites)

    def of_sites(self, figure: Callable[[Gpu], float]) -> FloatArray:
        """[DCs]: one figure of each site's GPUs."""
        return np.array([figure(gpu) for gpu in self.site_gpus], dtype=np.float64)

    def of_ranks(self, figure: Callable[[Gpu], float]) -> FloatArray:
        """[G]: one figure of each rank's GPU."""
        return np.repeat(self.of_sites(figure), self.ranks_per_site)

    @property
    def token_weights(self) -> FloatArray:
        """[DCs]: tokens of a rank of each, against the others'."""
        return np.array([site.tokens or 1.0 for site in self.sites] or [1.0] * self.levels[0].size)

    @property
    def home_weights(self) -> FloatArray:
        """[DCs]: experts at home in each, against the others."""
        given = [1.0 if site.experts is None else site.experts for site in self.sites]
        return np.array(given or [1.0] * self.levels[0].size)

    @property
    def has_alike_ranks(self) -> bool:
        """Whether all sites have equal GPUs and shares of the batch and of the experts."""
        return not self.has_uneven_gpus and float(np.ptp(self.token_weights) + np.ptp(self.home_weights)) == 0

    # --- links -----------------------------------------------------------------------------------------------------

    @property
    def is_symmetric(self) -> bool:
        """Every worker of a level has the same links, and every rank the same GPU and share of the batch."""
        alike = all(site.up is None and site.down is None for site in self.sites)
        return alike and not self.links and not self.trunks and self.has_alike_ranks

    @cached_property
    def link_table(self) -> tuple[Link, ...]:
        """All links: for each level and worker up, then down; then the DC pairs in row order, then trunks (where given)."""
        table: list[Link] = []
        names: list[str] = []
        for depth, level in enumerate(self.levels):
            inner = [f"/{level.name}{x}" for x in range(level.size)]
            names = [name + one for name in names for one in inner] if depth else list(self.site_names)
            for number, name in enumerate(names):
                up, down = self.access_bytes_per_s[:, number].tolist() if depth == 0 else (level.bandwidth, level.bandwidth)
                table.append(Link(name=f"{name} up", bandwidth_bytes_per_s=up))
                table.append(Link(name=f"{name} down", bandwidth_bytes_per_s=down))
        if self.links:
            for src, dst in permutations(range(self.sizes[0]), 2):
                link = self._pairs[src, dst]
                table.append(Link(name=f"{link.src} -> {link.dst}", bandwidth_bytes_per_s=link.bandwidth))
        table += [Link(name=trunk.name, bandwidth_bytes_per_s=trunk.bandwidth) for trunk in self.trunks]
        return tuple(table)

    @cached_property
    def access_bytes_per_s(self) -> FloatArray:
        """[2, DCs]: of the sites' links up, and down."""
        same = self.levels[0].bandwidth
        given = [(site.up or same, site.down or same) for site in self.sites] or [(same, same)] * self.sizes[0]
        return np.array(given, dtype=np.float64).T.copy()

    @cached_property
    def pair_bytes_per_s(self) -> FloatArray | None:
        """[DCs, DCs]: of the links from the row to the column, infinite on the diagonal; None where none are given."""
        if not self.links:
            return None
        found = np.full((self.sizes[0], self.sizes[0]), np.inf)
        for pair, link in self._pairs.items():
            found[pair] = link.bandwidth
        return found

    @cached_property
    def pair_links(self) -> slice:
        """Where the DC pairs are in ``link_table``; empty where none are given."""
        size = self.sizes[0]
        return slice(self._first_link[-1], self._first_link[-1] + (size * (size - 1) if self.links else 0))

    @cached_property
    def outer_links(self) -> BoolArray:
        """[links] of ``link_table``: whether one is between sites: their access links, pairs, trunks."""
        number = np.arange(len(self.link_table))
        return np.asarray((number < 2 * self.sizes[0]) | (number >= self.pair_links.start))

    @property
    def pairs_in_one_site(self) -> BoolArray:
        """[pair links]: those that join pods of a site."""
        if not self.links:
            return np.zeros(0, dtype=np.bool_)
        names = np.array([site.labels[-1] for site in self.sites])
        same: BoolArray = names[:, None] == names[None, :]
        return same[~np.eye(len(names), dtype=np.bool_)]

    @cached_property
    def trunk_shares(self) -> csr_array:
        """[trunks, DCs x DCs]: share of what goes from the one to the other that crosses the trunk."""
        size = self.sizes[0]
        index = {name: dc for dc, name in enumerate(self.site_names)}
        rows, columns, shares = [], [], []
        for row, trunk in enumerate(self.trunks):
            for pair, share in trunk.carries.items():
                src, _, dst = pair.partition(" -> ")
                rows.append(row)
                columns.append(index[src] * size + index[dst])
                shares.append(share)
        return csr_array((shares, (rows, columns)), shape=(len(self.trunks), size * size))

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], PairLink]:
        index = {site.name: dc for dc, site in enumerate(self.sites)}
        return {(index[link.src], index[link.dst]): link for link in self.links}

    @cached_property
    def site_latency_s(self) -> FloatArray:
        """[DCs, DCs]: seconds one way from the row to the column, zero on the diagonal."""
        latency = np.full((self.sizes[0], self.sizes[0]), self.levels[0].latency)
        np.fill_diagonal(latency, 0.0)
        for pair, link in self._pairs.items():
            latency[pair] = link.latency
        return latency

    @cached_property
    def _first_link(self) -> tuple[int, ...]:
        """Index in ``link_table`` of each level's first link, and of the first pair link."""
        counts = [2 * math.prod(self.sizes[: depth + 1]) for depth in range(len(self.levels))]
        return tuple(int(x) for x in np.cumsum([0, *counts]))

    # --- prices ----------------------------------------------------------------------------------------------------

    @property
    def has_prices(self) -> bool:
        """Something costs money."""
        return any(gpu.price is not None for gpu in self.site_gpus) or self.has_egress_prices

    @property
    def has_egress_prices(self) -> bool:
        """Some bytes between sites cost money."""
        senders: tuple[Level | Site | PairLink, ...] = (self.levels[0], *self.sites, *self.links)
        return any(one.egress is not None for one in senders)

    @property
    def rent_usd_per_s(self) -> float:
        """Dollars per second of all ranks together."""
        return self.ranks_per_site * sum(gpu.price or 0.0 for gpu in self.site_gpus)

    @cached_property
    def egress_usd_per_byte(self) -> FloatArray:
        """[DCs, DCs]: dollars per byte from the row to the column, zero on the diagonal."""
        size = self.sizes[0]
        own = [site.egress for site in self.sites] or [None] * size
        by_source = [(self.levels[0].egress or 0.0) if price is None else price for price in own]
        prices = np.repeat(np.array(by_source)[:, None], size, axis=1)
        for pair, link in self._pairs.items():
            if link.egress is not None:
                prices[pair] = link.egress
        np.fill_diagonal(prices, 0.0)
        return prices

    # --- numbers of links ------------------------------------------------------------------------------------------

    def up_link(self, level: int, worker: int) -> int:
        """Index in ``link_table``; ``worker`` counts the workers of ``level`` over the whole cluster."""
        return self._first_link[level] + 2 * worker

    def down_link(self, level: int, worker: int) -> int:
        """Index in ``link_table`` of a worker's down link."""
        return self._first_link[level] + 2 * worker + 1

    def pair_link(self, src: Sites, dst: Sites) -> Sites:
        """Index in ``link_table`` of the link from one DC to another one, or of those between arrays of them."""
        return self._first_link[-1] + src * (self.sizes[0] - 1) + dst - (dst > src)

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """Links that a transfer uses, in order, without trunks; empty when ``src`` is ``dst``."""
        a, b = self.location(src), self.location(dst)
        first = next((level for level in range(len(a)) if a[level] != b[level]), None)
        if first is None:
            return ()
        ups, downs = [], []
        for level in range(first, len(a)):
            stride = self.stride(level)
            ups.append(self.up_link(level, src // stride))
            downs.append(self.down_link(level, dst // stride))
        pair = []
        if first == 0 and self.links:
            pair = [self.pair_link(a[0], b[0])]
        return (*reversed(ups), *pair, *downs)

    def latency_s(self, src: int, dst: int) -> float:
        """One-way latency between two ranks: that of the outermost level at which they differ."""
        a, b = self.location(src), self.location(dst)
        for level, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return self._pairs[x, y].latency if level == 0 and self.links else self.levels[level].latency
        return 0.0

    def graph(self) -> nx.DiGraph[Any]:
        """The cluster as a directed graph: nodes are ranks (int) and switches (str), edges carry ``link`` (index in
        ``link_table``) and ``bandwidth_bytes_per_s``; without trunks. The unique shortest path between two ranks is ``path``."""
        import networkx as nx  # a fifth of a second that only this needs

        graph: nx.DiGraph[Any] = nx.DiGraph()
        table = self.link_table

        def join(src: Any, dst: Any, link: int) -> None:
            graph.add_edge(src, dst, link=link, bandwidth_bytes_per_s=table[link].bandwidth_bytes_per_s)

        last = len(self.levels) - 1
        for depth in range(len(self.levels)):
            for worker, location in enumerate(product(*(range(size) for size in self.sizes[: depth + 1]))):
                node: Any = worker if depth == last else f"switch of {self.worker_name(location)}"
                above = f"switch of {self.worker_name(location[:-1])}" if depth else "core"
                outward, inward = above, above
                if depth == 0 and self.links:
                    outward, inward = f"exit of {self.worker_name(location)}", f"entry of {self.worker_name(location)}"
                join(node, outward, self.up_link(depth, worker))
                join(inward, node, self.down_link(depth, worker))
        for src, dst in permutations(range(self.sizes[0]), 2) if self.links else ():
            join(f"exit of {self.site_name(src)}", f"entry of {self.site_name(dst)}", self.pair_link(src, dst))
        return graph


def only_sites(cluster: Cluster, sites: Collection[str]) -> Cluster:
    """These sites of a cluster, in its order and by their names, and what joins them."""
    kept = set(sites)
    trunks = []
    for trunk in cluster.trunks:
        carries = {pair: part for pair, part in trunk.carries.items() if set(pair.split(" -> ")) <= kept}
        if carries:
            trunks.append(trunk.model_copy(update={"carries": carries}))
    named = cluster.named_sites
    found = tuple(site for site in named if site.name in kept)
    return Cluster(
        name=cluster.name,
        levels=(cluster.levels[0].model_copy(update={"size": len(found)}), *cluster.levels[1:]),
        gpu=cluster.gpu,
        sites=found,
        links=tuple(link for link in cluster.links if link.src in kept and link.dst in kept),
        trunks=tuple(trunks),
    )


def by_themselves(cluster: Cluster, sites: Collection[str]) -> Cluster:
    """These sites of a cluster, as if no others computed: where ranks share processors (``Gpu.sharing``) all figures are those of
    ranks while all of them compute, and now fewer do."""
    found = only_sites(cluster, sites)
    sharing = max(1.0, cluster.gpu.sharing * found.num_gpus / cluster.num_gpus)
    faster = cluster.gpu.sharing / sharing
    if faster == 1:
        return found
    gpu = found.gpu.model_copy(update={"sharing": sharing, **_faster(found.gpu, faster)})
    own = tuple(
        site if site.gpu is None else site.model_copy(update={"gpu": site.gpu.model_copy(update=_faster(site.gpu, faster))})
        for site in found.sites
    )
    return found.model_copy(update={"gpu": gpu, "sites": own})


_RATES, _TIMES = (
    ("throughput", "expert_throughput", "memory_bandwidth"),
    (
        "block_overhead",
        "expert_overhead",
        "pass_overhead",
        "message_overhead",
    ),
)


def _faster(gpu: Gpu | SiteGpu, times: float) -> dict[str, float]:
    """What changes when a rank has so many times the processor time; jitter and coding are taken to stay."""
    rates = {name: value * times for name in _RATES if (value := getattr(gpu, name)) is not None}
    return rates | {name: value / times for name in _TIMES if (value := getattr(gpu, name, None)) is not None}


def cluster_data(cluster: ClusterFile) -> dict[str, Any]:
    """Plain data of a cluster, as a file holds it."""
    return cluster.model_dump(mode="json", exclude_none=True)


def data_with_sites(cluster: ClusterFile) -> dict[str, Any]:
    """Plain data of a cluster with all sites by name, also where its file has none."""
    data = cluster_data(cluster)
    data["sites"] = data["sites"] or [{"name": name} for name in cluster.site_names]
    return data
