"""What can be bought for a cluster: a faster link of a site, of a pair of sites, or a trunk; or more memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridep.arrays import BoolArray, FloatArray
from hybridep.sites import Site
from hybridep.topology import Cluster
from hybridep.units import format_bandwidth, format_bytes
from planner.difference import with_links

FACTOR = 2.0
"""How many times as fast an upgraded link is, or as large an upgraded memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rates:
    """A cluster at other rates between its sites: arrays, since there are many pairs to try."""

    cluster: Cluster
    """Its trunks and memory are as they are to be, its access links and pairs as they were."""
    up_bytes_per_s: FloatArray
    """[D]"""
    down_bytes_per_s: FloatArray
    """[D]"""
    pair_bytes_per_s: FloatArray | None
    """[D, D] as ``Cluster.pair_bytes_per_s``."""

    @classmethod
    def of(cls, cluster: Cluster) -> Rates:
        """Those that a cluster has."""
        up, down = cluster.access_bytes_per_s
        return cls(cluster=cluster, up_bytes_per_s=up, down_bytes_per_s=down, pair_bytes_per_s=cluster.pair_bytes_per_s)

    @cached_property
    def applied(self) -> Cluster:
        """The cluster, at these rates."""
        cluster, place = self.cluster, {name: dc for dc, name in enumerate(self.cluster.site_names)}
        sites = tuple(
            site.model_copy(update={"up": float(up), "down": float(down)})
            for site, up, down in zip(
                cluster.sites or tuple(Site(name=name) for name in place),
                self.up_bytes_per_s,
                self.down_bytes_per_s,
                strict=True,
            )
        )
        links = cluster.links
        if (rates := self.pair_bytes_per_s) is not None:
            links = tuple(link.model_copy(update={"bandwidth": float(rates[place[link.src], place[link.dst]])}) for link in links)
        return with_links(cluster, sites=sites, links=links, trunks=cluster.trunks)

    @property
    def access_bytes_per_s(self) -> FloatArray:
        """[D, D]: what the access links of both ends leave possible."""
        return np.minimum(self.up_bytes_per_s[:, None], self.down_bytes_per_s[None, :])

    def is_pod(self, dc: int) -> bool:
        """Its links are inside a site, or as wide as others are."""
        return bool(self.cluster.sites) and self.cluster.sites[dc].part_of is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """One thing that can be bought."""

    name: str
    """``up link of us-east``, ``link us-east -> eu-west``, ``trunk us-east up`` or ``memory of every rank``."""
    before: str
    after: str
    rates: Rates
    """Those of the cluster that has it."""
    link: int | None = None
    """The number of its link in ``Cluster.link_table``; None for what is no link."""


def link_options(rates: Rates) -> tuple[Iterator[Option], ...]:
    """Faster links by sort: sites' up links, their down links, pairs and trunks; what joins pods of a site is left out."""
    return _access(rates, up=True), _access(rates, up=False), _pairs(rates), _trunks(rates)


def memory_options(rates: Rates) -> Iterator[Option]:
    """More of it for every rank: the only one of its sort."""
    cluster = rates.cluster
    sites = tuple(
        site.model_copy(update={"gpu": site.gpu.model_copy(update={"memory": site.gpu.memory * FACTOR})})
        if site.gpu is not None and site.gpu.memory is not None
        else site
        for site in cluster.sites
    )
    gpu = cluster.gpu.model_copy(update={"memory": cluster.gpu.memory * FACTOR})
    has = sorted({one.memory for one in cluster.site_gpus})
    yield Option(
        name="memory of every rank",
        before=" or ".join(map(format_bytes, has)),
        after=" or ".join(format_bytes(one * FACTOR) for one in has),
        rates=replace(rates, cluster=cluster.model_copy(update={"gpu": gpu, "sites": sites})),
    )


def _access(rates: Rates, *, up: bool) -> Iterator[Option]:
    present = rates.up_bytes_per_s if up else rates.down_bytes_per_s
    for dc in range(len(present)):
        if rates.is_pod(dc):
            continue
        faster = present.copy()
        faster[dc] *= FACTOR
        changed = replace(rates, up_bytes_per_s=faster) if up else replace(rates, down_bytes_per_s=faster)
        if rates.pair_bytes_per_s is not None and any(site.part_of is not None for site in rates.cluster.sites):
            # Links to and from pods, and beside them, are as wide as access links; so they stay.
            pairs = np.where(_as_access(rates), changed.access_bytes_per_s, rates.pair_bytes_per_s)
            changed = replace(changed, pair_bytes_per_s=pairs)
        name = f"{'up' if up else 'down'} link of {rates.cluster.site_name(dc)}"
        yield Option(
            name=name,
            before=format_bandwidth(present[dc]),
            after=format_bandwidth(faster[dc]),
            rates=changed,
            link=rates.cluster.up_link(0, dc) if up else rates.cluster.down_link(0, dc),
        )


def _as_access(rates: Rates) -> BoolArray:
    """[D, D]: pairs whose links are as wide as the access links of their ends."""
    assert rates.pair_bytes_per_s is not None
    return np.asarray(rates.pair_bytes_per_s == rates.access_bytes_per_s)


def _pairs(rates: Rates) -> Iterator[Option]:
    """Those that are narrower than the access links of their ends: others bring nothing."""
    present = rates.pair_bytes_per_s
    if present is None:
        return
    for src, dst in np.argwhere(present < rates.access_bytes_per_s).tolist():
        if rates.is_pod(src) or rates.is_pod(dst):
            continue
        faster = present.copy()
        faster[src, dst] *= FACTOR
        yield Option(
            name=f"link {rates.cluster.site_name(src)} -> {rates.cluster.site_name(dst)}",
            before=format_bandwidth(present[src, dst]),
            after=format_bandwidth(faster[src, dst]),
            rates=replace(rates, pair_bytes_per_s=faster),
            link=rates.cluster.pair_link(src, dst),
        )


def _trunks(rates: Rates) -> Iterator[Option]:
    cluster, place = rates.cluster, {name: dc for dc, name in enumerate(rates.cluster.site_names)}
    for number, trunk in enumerate(cluster.trunks):
        faster = trunk.model_copy(update={"bandwidth": trunk.bandwidth * FACTOR})
        trunks = (*cluster.trunks[:number], faster, *cluster.trunks[number + 1 :])
        changed = with_links(cluster, sites=cluster.sites, links=cluster.links, trunks=trunks)
        pairs = None if rates.pair_bytes_per_s is None else rates.pair_bytes_per_s.copy()
        for src, dst in (map(place.__getitem__, way.split(" -> ")) for way in trunk.carries):
            # Links of pods are as wide as the path over trunks.
            if pairs is not None and (rates.is_pod(src) or rates.is_pod(dst)):
                pairs[src, dst] *= FACTOR
        yield Option(
            name=f"trunk {trunk.name.removeprefix('trunk ')}",
            before=format_bandwidth(trunk.bandwidth),
            after=format_bandwidth(faster.bandwidth),
            rates=replace(rates, cluster=changed, pair_bytes_per_s=pairs),
            link=cluster.pair_links.stop + number,
        )
