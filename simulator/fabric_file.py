"""What joins datacenters, and what joins the machines inside one, as a user writes it: one YAML file per fabric.

A cluster's levels say how fast each worker's own link is; a fabric says what lies between those links. Without one, sites
are joined by a core that is never full (or by the cluster's links per pair), and so are the workers of every level below.
"""

from __future__ import annotations

from enum import Enum

from pydantic import Field, model_validator

from hybridep.config import Bandwidth, Duration, Strict


class Mesh(Strict):
    """A trunk of its own from every site to every other."""

    bandwidth: Bandwidth
    latency: Duration | None = None
    """Of a trunk, one way; the cluster's between two sites where omitted. So for hub and ring."""


class Hub(Strict):
    """Every site has a trunk to a hub and one back."""

    bandwidth: Bandwidth
    latency: Duration | None = None
    at: str | None = None
    """The site that is the hub, which then needs no trunk; an exchange point without GPUs where omitted."""


class Routing(Enum):
    """Which of several shortest routes a transfer takes."""

    SHORTEST = "shortest"
    """One: the trunk that was named first, at every fork (clockwise in a ring)."""
    ECMP = "ecmp"
    """All: at every fork in equal parts over the trunks that lie on a shortest route (as equal-cost multi-path routers do)."""


class Ring(Strict):
    """Trunks between neighbours, in the order of the sites; transfers take the shorter way."""

    bandwidth: Bandwidth
    latency: Duration | None = None
    routing: Routing = Routing.SHORTEST


class Trunk(Strict):
    """A cable between two places: its bandwidth each way."""

    ends: tuple[str, str]
    """Sites, or places without GPUs (any other name)."""
    bandwidth: Bandwidth
    latency: Duration
    metric: float = Field(default=1.0, gt=0)
    """What routing adds up; the least sum is the shortest route."""


class Graph(Strict):
    """Trunks as they are, shared by all transfers whose route crosses them."""

    trunks: tuple[Trunk, ...] = Field(min_length=1)
    routing: Routing = Routing.SHORTEST


class Wan(Strict):
    """Between sites; one of the four. It lies between the sites' access links, and replaces the cluster's links per pair."""

    mesh: Mesh | None = None
    hub: Hub | None = None
    ring: Ring | None = None
    graph: Graph | None = None

    @model_validator(mode="after")
    def _one(self) -> Wan:
        if sum(shape is not None for shape in (self.mesh, self.hub, self.ring, self.graph)) != 1:
            raise ValueError("needs exactly one of mesh, hub, ring, graph")
        return self


class FatTree(Strict):
    """Leaf switches under a non-blocking core; the workers of the level below sites hang on them, a number on each."""

    workers_per_leaf: int = Field(ge=1)
    oversubscription: float = Field(default=1.0, ge=1)
    """A leaf's link bandwidth down to its workers, over that up to the core. Transfers to other sites use the core too."""


class Rail(Strict):
    """Rail-optimized: each GPU has its own share of its node's bandwidth, to a switch that joins the GPUs of the same local
    rank. A transfer to another rank of another node first moves inside its node (as NCCL's PXN does)."""


class NvLink(Strict):
    """Domains of consecutive ranks of a site, joined by a switch of their own beside the cluster's links."""

    domain: int = Field(ge=2)
    """Ranks."""
    bandwidth: Bandwidth
    """Of each rank, each way. Transfers inside a domain use nothing else."""


class Allocation(Enum):
    """Who gets the circuits of an optical switch (see `simulator.circuits`)."""

    PAPER = "paper"
    """MixNet's Algorithm 1, which stops at the first pair without a free port."""
    SIMULATOR = "simulator"
    """As MixNet's public simulator does: goes on, and nearly all pairs get one circuit before any gets two."""
    MATCHING = "matching"
    """By matchings and a search from there; never slower than the two."""


class Prediction(Enum):
    """What is known of a layer's traffic before its gate, so that circuits change while attention computes."""

    NONE = "none"
    """Nothing: the layer's first exchange waits for its circuits."""
    LAST = "last"
    """What it was in the micro-batch before."""
    LOAD = "load"
    """What the layer before it has chosen, and how the two went together in earlier micro-batches (MixNet's estimate)."""


class MixNet(Strict):
    """MixNet (Liao et al., SIGCOMM 2025): some of a node's network interfaces lead to packet switches, the others to its
    region's optical circuit switch, whose circuits follow the token exchanges. Needs a level of nodes between sites and GPUs,
    whose bandwidth is that of all interfaces."""

    packet: int = Field(default=2, ge=1)
    """Interfaces of a node on the packet network, which is non-blocking. It carries all that has no circuit."""
    optical: int = Field(default=6, ge=1)
    """On the circuit switch; all are equally fast."""
    region: int | None = Field(default=None, ge=2)
    """Nodes that one circuit switch joins; all of a site where omitted."""
    allocation: Allocation = Allocation.MATCHING
    prediction: Prediction = Prediction.NONE
    reconfiguration: Duration = 0.025
    """From the last use of a region's circuits until the next ones carry traffic."""
    keep: bool = False
    """Leave a region's circuits as the layer before had them where others would save two exchanges less than that time."""


class Inside(Strict):
    """Inside a site."""

    fat_tree: FatTree | None = None
    rail: Rail | None = None
    mixnet: MixNet | None = None
    nvlink: NvLink | None = None

    @model_validator(mode="after")
    def _fit(self) -> Inside:
        if self.rail is not None and (self.fat_tree is not None or self.nvlink is not None):
            raise ValueError(
                "rail: has no leaves, and its NVLink domains are the cluster's nodes; give neither fat_tree nor nvlink"
            )
        if self.mixnet is not None and any(other is not None for other in (self.fat_tree, self.rail, self.nvlink)):
            raise ValueError(
                "mixnet: brings its own packet network, and its NVLink domains are the cluster's nodes; give it alone"
            )
        return self


class FabricFile(Strict):
    """A fabric; one YAML file."""

    name: str
    wan: Wan | None = None
    inside: Inside = Inside()
