"""What a cluster file says of levels, sites, and what joins the sites."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import permutations

from pydantic import Field, model_validator

from hybridep.config import Bandwidth, Duration, Size, Strict, TransferPrice
from hybridep.gpus import Gpu, SiteGpu

MOST_RANKS = 10**7


def is_called(name: str, pattern: str) -> bool:
    """Whether a site's or a link's name is this one, or is meant by this pattern: a name itself may have brackets."""
    return name == pattern or fnmatchcase(name, pattern)


class PodLink(Strict):
    """What joins the pods of one site."""

    bandwidth: Bandwidth
    """Bytes per second of each pod's up link, and of its down link, to its site's switch."""
    latency: Duration
    """Seconds one way between two pods of a site."""


class Level(Strict):
    """One level of the hierarchy; ``size`` workers below each worker of the level above."""

    name: str
    size: int = Field(ge=1)
    bandwidth: Bandwidth
    """Bytes per second of the up link, and of the down link, of each worker of this level (shared by the GPUs below it)."""
    latency: Duration
    """Seconds one way between two workers of this level, with the software's cost of one message (``Gpu.message_overhead``)."""
    window: Size | None = None
    """What one connection between two ranks may have under way, as TCP's window: with N connections (``Schedule.streams``) they
    move at most N windows per round trip, there and back of the latencies. No limit where absent."""
    egress: TransferPrice | None = None
    """What each byte costs that leaves a site for another one; outermost level only, nothing where absent."""
    pods: PodLink | None = None
    """What joins pods of one site, where sites have several (``Site.pods``); outermost level only."""

    def under_way_bytes(self, streams: Mapping[str, int]) -> float:
        """Bytes that two ranks may have under way with so many connections (level name -> number, one where absent); infinite
        without a window."""
        return math.inf if self.window is None else self.window * streams.get(self.name, 1)


class Site(Strict):
    """One datacenter by name; its access rates, what sending costs, and its ranks' GPUs, where they differ from the level's and
    the cluster's; and its share of the work."""

    name: str
    up: Bandwidth | None = None
    down: Bandwidth | None = None
    egress: TransferPrice | None = None
    gpu: SiteGpu | None = None
    tokens: float | None = Field(default=None, gt=0)
    """How much of the global batch its ranks take, against the other sites' (see ``hybridep.shares``); 1 where absent."""
    experts: float | None = Field(default=None, ge=0)
    """How many experts live there, against the other sites; 1 where absent, 0 for none."""
    pods: int | None = Field(default=None, ge=1)
    """How many times as large it is as a site of one pod; 1 where absent. Its pods share its access links, and for each of them
    ``gpu``, ``tokens`` and ``experts`` hold (see ``hybridep.pods``)."""
    part_of: str | None = None
    """The site whose pod this is; loading a site with several writes it."""

    @property
    def num_pods(self) -> int:
        """At least 1."""
        return self.pods or 1

    @property
    def labels(self) -> tuple[str, ...]:
        """What it is called: by its own name, and as one of a site's pods."""
        return (self.name,) if self.part_of is None else (self.name, self.part_of)


class PairLink(Strict):
    """The path from one datacenter to another, in that direction."""

    src: str
    dst: str
    bandwidth: Bandwidth
    latency: Duration
    egress: TransferPrice | None = None
    """What each byte over this link costs, where that differs from what its source pays else."""


class SharedTrunk(Strict):
    """A cable between sites, in one direction, that transfers of several pairs of sites share."""

    name: str
    bandwidth: Bandwidth
    carries: dict[str, float] = Field(min_length=1)
    """``from -> to`` -> the share of that pair's bytes that crosses the trunk: 1, or less where they are split over routes."""


class ClusterFile(Strict):
    """All of it, each part in agreement with the others."""

    name: str
    levels: tuple[Level, ...] = Field(min_length=1)
    gpu: Gpu
    sites: tuple[Site, ...] = ()
    links: tuple[PairLink, ...] = ()
    trunks: tuple[SharedTrunk, ...] = ()
    """Between the sites' access links, beside the links per pair."""

    @model_validator(mode="after")
    def _consistent(self) -> ClusterFile:
        names = [level.name for level in self.levels]
        if len(set(names)) != len(names):
            raise ValueError(f"level names repeat: {names}")
        for depth, level in enumerate(self.levels[1:], start=1):
            if level.egress is not None:
                raise ValueError(
                    f"levels.{depth}.egress: only what leaves a {names[0]} has a price; give it to level {names[0]!r}"
                )
            if level.pods is not None:
                raise ValueError(f"levels.{depth}.pods: only a {names[0]} has pods; give it to level {names[0]!r}")
        if (ranks := math.prod(level.size for level in self.levels)) > MOST_RANKS:
            raise ValueError(f"levels: {ranks:.3g} GPUs in all; at most {MOST_RANKS:.3g} are counted")
        sites = [site.name for site in self.sites]
        if sites and len(sites) != self.levels[0].size:
            raise ValueError(f"sites: {len(sites)} are named but level {names[0]!r} has size {self.levels[0].size}")
        if len(set(sites)) != len(sites):
            raise ValueError(f"sites: names repeat: {sites}")
        for at, site in enumerate(self.sites):
            try:
                _ = site.gpu and site.gpu.of(self.gpu)
            except ValueError as error:
                raise ValueError(f"sites.{at}.gpu: {error}") from None
        if self.sites and all(site.experts == 0 for site in self.sites):
            raise ValueError("sites: experts is 0 at every site; they must live somewhere")
        trunks = [trunk.name for trunk in self.trunks]
        if len(set(trunks)) != len(trunks):
            raise ValueError(f"trunks: names repeat: {trunks}")
        # Loads of links, and what changes them, go by name.
        named = {f"{name} {way}" for name in self.site_names for way in ("up", "down")} if trunks else set()
        named |= {f"{link.src} -> {link.dst}" for link in self.links}
        if taken := next((name for name in trunks if name in named), None):
            raise ValueError(f"trunks: {taken!r} is what a link of the sites is called; give the trunk another name")
        for at, trunk in enumerate(self.trunks):
            self._check_carried(f"trunks.{at}.carries", trunk.carries)
        if self.links:
            pairs = [(link.src, link.dst) for link in self.links]
            known, given = set(sites), set(pairs)
            for pair in pairs:
                if pair[0] == pair[1] or not known.issuperset(pair):
                    raise ValueError(f"links: {pair[0]} -> {pair[1]} does not join two of the sites {sites}")
            if len(given) != len(pairs):
                repeated = next(pair for pair in pairs if pairs.count(pair) > 1)
                raise ValueError(f"links: {repeated[0]} -> {repeated[1]} is given twice")
            for pair in permutations(sites, 2):
                if pair not in given:
                    raise ValueError(f"links: no link {pair[0]} -> {pair[1]}; give every ordered pair or none")
        return self

    def _check_carried(self, where: str, carries: dict[str, float]) -> None:
        known = set(self.site_names)
        for way, share in carries.items():
            src, arrow, dst = way.partition(" -> ")
            if not arrow or src == dst or not known.issuperset((src, dst)) or not 0 < share <= 1:
                raise ValueError(f"{where}: {way}: {share:g}; write 'from -> to' of two sites, and a share up to 1")

    def site_name(self, dc: int) -> str:
        """Name of the worker ``dc`` of the outermost level."""
        return self.sites[dc].name if self.sites else f"{self.levels[0].name}{dc}"

    @cached_property
    def site_names(self) -> tuple[str, ...]:
        """[DCs]: those of all."""
        return tuple(self.site_name(dc) for dc in range(self.levels[0].size))

    @property
    def named_sites(self) -> tuple[Site, ...]:
        """All sites, also where the file has none."""
        return self.sites or tuple(Site(name=name) for name in self.site_names)

    @cached_property
    def datacenters(self) -> tuple[str, ...]:
        """[DCs], where each pod is one: the site that each is, or is a pod of."""
        return tuple(site.labels[-1] for site in self.named_sites for _ in range(site.num_pods))
