"""Ways between sites over shared trunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.config import build
from hybridep.topology import Cluster
from hybridep.units import Dimension, exact
from simulator.errors import FabricError
from simulator.fabric_file import FabricFile, Graph, Hub, Mesh, Ring, Routing, Wan

MOST_SITES = 64
"""Of a cluster whose plans know a fabric's trunks: between more, a plan file would hold too many routes, and planning over them
takes too long."""

TRUNK = "trunk "
"""Before the name that a fabric has for a trunk, where it is a cluster's own: a pair's link may have the same."""

_MOST_STEPS = 50_000_000
"""Of all routes together; a ring of 500 sites has 31 million."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """For every ordered pair of sites, pair = source x sites + destination: which trunks it crosses."""

    num_sites: int
    first: IntArray
    """[pairs + 1]: the steps of a pair are first[pair] .. first[pair + 1]."""
    trunk: IntArray
    """[steps]"""
    share: FloatArray
    """[steps] of a transfer that crosses the trunk; 1 unless it is split over several routes."""
    capacity_bytes_per_s: FloatArray
    """[trunks], each in one direction."""
    latency_s: FloatArray
    """[sites, sites], one way; of the longest route where there are several."""
    trunk_name: Callable[[int], str]
    """Each has its own."""

    @property
    def num_trunks(self) -> int:
        """One per direction of a cable."""
        return len(self.capacity_bytes_per_s)

    def between(self, source: IntArray, destination: IntArray) -> tuple[IntArray, FloatArray]:
        """[n] sites each -> trunks [n, longest], -1 behind the end, and shares."""
        pair = source * self.num_sites + destination
        length = self.first[pair + 1] - self.first[pair]
        at = self.first[pair][:, None] + np.arange(int(length.max(initial=0)))
        used = at < self.first[pair + 1][:, None]
        at = np.where(used, at, 0)
        return np.where(used, self.trunk[at], -1), np.where(used, self.share[at], 1.0)


def routes(cluster: Cluster, wan: Wan | None) -> Routes | None:
    """The routes of a fabric, or else over the cluster's links per pair and trunks; None where the core is never full.

    Raises FabricError for places that are not joined, for more routes than memory should hold, and where sites have pods.
    """
    if wan is None:
        return _own(cluster) if cluster.trunks else _pairs(cluster) if cluster.links else None
    if any(site.part_of is not None for site in cluster.sites):
        raise FabricError(f"wan: some site of cluster {cluster.name} has several pods, which a fabric would join like sites")
    if wan.mesh is not None:
        return _mesh(cluster, wan.mesh)
    if wan.hub is not None:
        return _hub(cluster, wan.hub)
    if wan.ring is not None:
        return _ring(cluster, wan.ring)
    assert wan.graph is not None
    return _graph(cluster, wan.graph)


def _numbered(names: Sequence[str]) -> list[str]:
    """Names of trunks; parallel ones have numbers behind theirs, from 1 on."""
    alike, seen, found = Counter(names), Counter[str](), list[str]()
    for name in names:
        seen[name] += 1
        found.append(f"{name} {seen[name]}" if alike[name] > 1 else name)
    return found


def _one_step(cluster: Cluster, capacity: FloatArray, latency_s: FloatArray) -> Routes:
    """A trunk per ordered pair."""
    sites = cluster.sizes[0]
    between = ~np.eye(sites, dtype=bool).ravel()
    ends = np.flatnonzero(between)
    return Routes(
        num_sites=sites,
        first=np.concatenate([[0], np.cumsum(between)]),
        trunk=np.arange(ends.size),
        share=np.ones(ends.size),
        capacity_bytes_per_s=capacity,
        latency_s=latency_s,
        trunk_name=lambda trunk: " -> ".join(cluster.site_name(site) for site in divmod(int(ends[trunk]), sites)),
    )


def _pairs(cluster: Cluster) -> Routes:
    table = cluster.link_table[cluster.pair_links]
    return _one_step(cluster, np.array([link.bandwidth_bytes_per_s for link in table]), cluster.site_latency_s)


def _own(cluster: Cluster) -> Routes:
    """The cluster's links per pair, where given, then its trunks: numbered as in ``cluster.link_table`` behind the others."""
    sites, pairs = cluster.sizes[0], cluster.pair_links
    num_pairs = pairs.stop - pairs.start
    crossed = cluster.trunk_shares.T.tocsr()
    crossed.sort_indices()
    steps: list[tuple[IntArray, FloatArray]] = []
    for pair in range(sites * sites):
        own = np.arange(crossed.indptr[pair], crossed.indptr[pair + 1])
        trunks, shares = num_pairs + crossed.indices[own].astype(np.int64), crossed.data[own]
        source, destination = divmod(pair, sites)
        if num_pairs and source != destination:
            link = cluster.pair_link(source, destination) - pairs.start
            trunks, shares = np.concatenate([[link], trunks]), np.concatenate([[1.0], shares])
        steps.append((trunks, shares))
    table = cluster.link_table[pairs.start :]
    return Routes(
        num_sites=sites,
        first=np.concatenate([[0], np.cumsum([len(trunks) for trunks, _ in steps])]),
        trunk=np.concatenate([trunks for trunks, _ in steps]),
        share=np.concatenate([shares for _, shares in steps]),
        capacity_bytes_per_s=np.array([link.bandwidth_bytes_per_s for link in table]),
        latency_s=cluster.site_latency_s,
        trunk_name=lambda trunk: table[trunk].name,
    )


def planned_over(cluster: Cluster, fabric: FabricFile | None) -> Cluster:
    """The cluster for which to plan what is simulated over a fabric: with the trunks that join its sites as its own, or as it is
    where none do, or join more than ``MOST_SITES``. Raises FabricError where the two do not fit."""
    if fabric is None or fabric.wan is None or cluster.sizes[0] > MOST_SITES:
        return cluster
    return with_fabric(cluster, fabric.wan)


def with_fabric(cluster: Cluster, wan: Wan) -> Cluster:
    """The cluster with a fabric's trunks as its own, in place of its links per pair and its trunks; links remain where latencies
    differ, no narrower than the access links. Raises FabricError where the two do not fit."""
    size = cluster.sizes[0]
    found = routes(cluster, wan)
    assert found is not None
    names = cluster.site_names
    carries: list[dict[str, float]] = [{} for _ in range(found.num_trunks)]
    for pair in range(size * size):
        for step in range(int(found.first[pair]), int(found.first[pair + 1])):
            source, destination = divmod(pair, size)
            carries[found.trunk[step]][f"{names[source]} -> {names[destination]}"] = float(found.share[step])
    data = cluster.model_dump(mode="json", exclude_none=True)
    data["trunks"] = [
        {
            "name": f"{TRUNK}{found.trunk_name(number)}",
            "bandwidth": exact(float(found.capacity_bytes_per_s[number]), Dimension.BANDWIDTH),
            "carries": carried,
        }
        for number, carried in enumerate(carries)
        if carried
    ]
    away = ~np.eye(size, dtype=bool)
    uniform = bool((found.latency_s[away] == cluster.levels[0].latency).all())
    egress = {(link.src, link.dst): link.egress for link in cluster.links if link.egress is not None}
    data["sites"] = data["sites"] or ([] if uniform and not egress else [{"name": name} for name in names])
    data["links"] = [
        {
            "src": a,
            "dst": b,
            "bandwidth": exact(float(cluster.access_bytes_per_s[0, i]), Dimension.BANDWIDTH),
            "latency": exact(float(found.latency_s[i, j]), Dimension.TIME),
            **({"egress": exact(egress[a, b], Dimension.TRANSFER_PRICE)} if (a, b) in egress else {}),
        }
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j and not (uniform and not egress)
    ]
    return build(Cluster, data, cluster.name)


def _mesh(cluster: Cluster, mesh: Mesh) -> Routes:
    sites = cluster.sizes[0]
    latency_s = cluster.site_latency_s if mesh.latency is None else np.full((sites, sites), mesh.latency)
    return _one_step(cluster, np.full(sites * (sites - 1), mesh.bandwidth), latency_s)


def _hub(cluster: Cluster, hub: Hub) -> Routes:
    sites = cluster.sizes[0]
    names = cluster.site_names
    if hub.at is not None and hub.at not in names:
        raise FabricError(f"wan.hub.at: no site {hub.at!r} in cluster {cluster.name}")
    center = names.index(hub.at) if hub.at is not None else -1
    source, destination = (ends.ravel() for ends in np.indices((sites, sites)))
    steps = np.stack([2 * source, 2 * destination + 1], axis=1)
    used = np.stack([source != center, destination != center], axis=1) & (source != destination)[:, None]
    hops = used.sum(axis=1)
    place = hub.at or "hub"
    return Routes(
        num_sites=sites,
        first=np.concatenate([[0], np.cumsum(hops)]),
        trunk=steps[used],
        share=np.ones(int(hops.sum())),
        capacity_bytes_per_s=np.full(2 * sites, hub.bandwidth),
        latency_s=cluster.site_latency_s if hub.latency is None else (hops * hub.latency).reshape(sites, sites),
        trunk_name=lambda trunk: f"{place} -> {names[trunk // 2]}" if trunk % 2 else f"{names[trunk // 2]} -> {place}",
    )


def _ring(cluster: Cluster, ring: Ring) -> Routes:
    """Trunk 2 i leads from site i to the next, trunk 2 i + 1 to the one before."""
    sites = cluster.sizes[0]
    source, destination = (ends.ravel() for ends in np.indices((sites, sites)))
    ahead = (destination - source) % sites
    opposite = 2 * ahead == sites
    both = opposite & (ring.routing is Routing.ECMP)
    forward = 2 * ahead <= sites
    hops = np.minimum(ahead, sites - ahead)
    num_steps = np.where(both, 2 * hops, hops)
    if int(num_steps.sum()) > _MOST_STEPS:
        raise FabricError(f"wan.ring: {sites} sites have {int(num_steps.sum())} steps in their routes, over {_MOST_STEPS}")
    pair = np.repeat(np.arange(sites * sites), num_steps)
    first = np.concatenate([[0], np.cumsum(num_steps)])
    step = np.arange(pair.size) - first[pair]
    back = ~forward[pair] | (step >= hops[pair])
    step = np.where(step >= hops[pair], step - hops[pair], step)
    site = (source[pair] + np.where(back, -step, step)) % sites
    names = cluster.site_names
    trunk_names = _numbered([f"{name} -> {names[(at + way) % sites]}" for at, name in enumerate(names) for way in (1, -1)])
    return Routes(
        num_sites=sites,
        first=first,
        trunk=2 * site + back,
        share=np.where(both[pair], 0.5, 1.0),
        capacity_bytes_per_s=np.full(2 * sites, ring.bandwidth),
        latency_s=cluster.site_latency_s if ring.latency is None else (hops * ring.latency).reshape(sites, sites),
        trunk_name=lambda trunk: trunk_names[trunk],
    )


def _graph(cluster: Cluster, wan: Graph) -> Routes:
    """Trunk 2 i is the i-th named, from its first end to its second; 2 i + 1 the other way."""
    names = cluster.site_names
    places = list(dict.fromkeys([*names, *(end for trunk in wan.trunks for end in trunk.ends)]))
    index = {place: at for at, place in enumerate(places)}
    ends = [index[end] for trunk in wan.trunks for end in (*trunk.ends, *trunk.ends[::-1])]
    tail, head = np.array(ends[::2]), np.array(ends[1::2])
    metric = np.repeat([trunk.metric for trunk in wan.trunks], 2)
    delay_s = np.repeat([trunk.latency for trunk in wan.trunks], 2)
    graph: nx.DiGraph[int] = nx.DiGraph()
    for at in np.argsort(-metric, kind="stable"):
        # The least of parallel trunks is written last.
        graph.add_edge(int(head[at]), int(tail[at]), metric=float(metric[at]))
    trunk_names = _numbered([f"{places[a]} -> {places[b]}" for a, b in zip(tail, head, strict=True)])
    leaving = [np.flatnonzero(tail == place) for place in range(len(places))]
    sites = len(names)
    steps: dict[int, dict[int, float]] = {}
    latency_s = np.zeros((sites, sites))
    for target in range(sites):
        distance = nx.single_source_dijkstra_path_length(graph, target, weight="metric") if target in graph else {}
        onward = {
            place: [
                int(trunk)
                for trunk in leaving[place]
                if distance.get(int(head[trunk]), np.inf) < distance[place]
                and np.isclose(metric[trunk] + distance[int(head[trunk])], distance[place], rtol=1e-12, atol=0)
            ]
            for place in distance
            if place != target
        }
        lost = next((place for place, trunks in onward.items() if not trunks), None)
        if lost is not None:
            raise FabricError(f"wan.graph: metrics at {places[lost]} are too unequal to add up")
        for source in range(sites):
            if source == target:
                continue
            if source not in distance:
                raise FabricError(f"wan.graph: no route from {names[source]} to {names[target]}")
            share, arrives_s, crossed = {source: 1.0}, {source: 0.0}, dict[int, float]()
            for place in sorted(
                (each for each in distance if distance[each] <= distance[source]), key=lambda each: -distance[each]
            ):
                if place == target or place not in share:
                    continue
                chosen = onward[place] if wan.routing is Routing.ECMP else onward[place][:1]
                for trunk in chosen:
                    part, following = share[place] / len(chosen), int(head[trunk])
                    crossed[trunk] = crossed.get(trunk, 0.0) + part
                    share[following] = share.get(following, 0.0) + part
                    arrives_s[following] = max(arrives_s.get(following, 0.0), arrives_s[place] + float(delay_s[trunk]))
            latency_s[source, target] = arrives_s[target]
            steps[source * sites + target] = crossed
    length = np.array([len(steps.get(pair, ())) for pair in range(sites * sites)])
    order = sorted(steps)
    return Routes(
        num_sites=sites,
        first=np.concatenate([[0], np.cumsum(length)]),
        trunk=np.array([trunk for pair in order for trunk in steps[pair]], dtype=np.int64),
        share=np.array([part for pair in order for part in steps[pair].values()], dtype=np.float64),
        capacity_bytes_per_s=np.repeat([trunk.bandwidth for trunk in wan.trunks], 2),
        latency_s=latency_s,
        trunk_name=lambda trunk: trunk_names[trunk],
    )
