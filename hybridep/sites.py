"""What a cluster file says of levels, sites, and what joins the sites."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import Field

from hybridep.config import Bandwidth, Duration, Size, Strict, TransferPrice
from hybridep.gpus import SiteGpu


class PodLink(Strict):
    """What joins the pods of one site."""

    bandwidth: Bandwidth
    """Of each pod's link to its site's switch: up, and down."""
    latency: Duration
    """One way, between two pods of a site."""


class Level(Strict):
    """One level of the hierarchy; ``size`` workers below each worker of the level above."""

    name: str
    size: int = Field(ge=1)
    bandwidth: Bandwidth
    """Of the up link, and of the down link, of each worker of this level (shared by the GPUs below it)."""
    latency: Duration
    """One way, between two workers of this level; includes the software's cost of one message (see ``Gpu.message_overhead``)."""
    window: Size | None = None
    """What one connection between two ranks may have under way, as TCP's window: with N connections (``Schedule.streams``) they
    move at most N windows per round trip, there and back of the latencies. No limit where absent."""
    egress: TransferPrice | None = None
    """Of the outermost level: what each byte costs that leaves a site for another one; nothing where absent."""
    pods: PodLink | None = None
    """Of the outermost level, where sites have several (``Site.pods``)."""

    def under_way_bytes(self, streams: Mapping[str, int]) -> float:
        """Of two ranks with so many connections (level name -> number, one where absent); infinite without a window."""
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
    """Where it differs from the source's."""


class SharedTrunk(Strict):
    """A cable between sites, in one direction, that transfers of several pairs of sites share."""

    name: str
    bandwidth: Bandwidth
    carries: dict[str, float] = Field(min_length=1)
    """``from -> to`` -> the share of that pair's bytes that crosses the trunk: 1, or less where they are split over routes."""
