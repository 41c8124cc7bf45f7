"""What a network inside a datacenter costs to buy, in US dollars: its components counted, times their prices.

Counted as MixNet does (Liao et al., SIGCOMM 2025): a transceiver in every interface and in every port of a packet switch, none in
optical switches and patch panels, a fiber per cable. Racks, power, cooling, software and spare ports are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from hybridep.config import Strict, load
from hybridep.errors import UserError
from hybridep.units import Dimension, format_bandwidth, parse


class RatePrices(Strict):
    """Of components that are made for one rate, each."""

    transceiver: float = Field(ge=0)
    interface: float = Field(ge=0)
    packet_port: float = Field(ge=0)


class Prices(Strict):
    """A price list in US dollars; one YAML file."""

    name: str
    per_rate: dict[str, RatePrices] = Field(min_length=1)
    optical_port: float = Field(ge=0)
    """Of a circuit switch; whatever the rate."""
    patch_panel_port: float = Field(ge=0)
    fiber_per_meter: float = Field(ge=0)
    fiber_length_meters: float = Field(ge=0)

    @property
    def fiber(self) -> float:
        """Of one cable."""
        return self.fiber_per_meter * self.fiber_length_meters

    def at(self, rate_bytes_per_s: float) -> RatePrices:
        """Of components for this rate. Raises UserError where the list has none."""
        for text, prices in self.per_rate.items():
            if parse(text, Dimension.BANDWIDTH) == rate_bytes_per_s:
                return prices
        raise UserError(f"prices {self.name}: none at {format_bandwidth(rate_bytes_per_s)}; there are {', '.join(self.per_rate)}")


@dataclass(frozen=True, kw_only=True)
class Components:
    """How many of each a network has; they need not be whole, since switches are shared."""

    interfaces: float
    transceivers: float
    packet_ports: float = 0.0
    optical_ports: float = 0.0
    patch_panel_ports: float = 0.0
    fibers: float

    def __add__(self, other: Components) -> Components:
        return Components(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def cost_usd(self, prices: Prices, rate_bytes_per_s: float) -> float:
        """Of all of them for ports of this rate. Raises UserError for a rate without prices."""
        each = prices.at(rate_bytes_per_s)
        return (
            self.interfaces * each.interface
            + self.transceivers * each.transceiver
            + self.packet_ports * each.packet_port
            + self.optical_ports * prices.optical_port
            + self.patch_panel_ports * prices.patch_panel_port
            + self.fibers * prices.fiber
        )


def switched(interfaces: float, *, tiers: int = 3, oversubscription: float = 1.0, cables: float | None = None) -> Components:
    """Packet switches in tiers, every one with as many ports up as down but for the last; leaves with fewer up by the factor
    of oversubscription. A cable of each interface leads to a port of a leaf, and on between two ports per further tier.

    cables: where several interfaces share one (a breakout cable), how many there are; as many as interfaces when omitted.
    """
    above = (tiers - 1) / oversubscription
    ports = interfaces * (1 + 2 * above)
    return Components(
        interfaces=interfaces,
        transceivers=interfaces + ports,
        packet_ports=ports,
        fibers=(interfaces if cables is None else cables) * (1 + above),
    )


def fat_tree(num_gpus: int, *, oversubscription: float = 1.0) -> Components:
    """Three tiers and an interface per GPU: five switch ports each (down, up, two of aggregation, core)."""
    return switched(num_gpus, oversubscription=oversubscription)


def rail_optimized(num_gpus: int) -> Components:
    """A network of its own per local rank, of two tiers: enough for 2048 nodes by switches of 64 ports."""
    return switched(num_gpus, tiers=2)


def topo_opt(num_gpus: int) -> Components:
    """Every interface on a patch panel, whose connections stay for the job (Wang et al., NSDI 2023)."""
    return Components(interfaces=num_gpus, transceivers=num_gpus, patch_panel_ports=num_gpus, fibers=num_gpus)


def mixnet(num_gpus: int, *, packet: int = 2, optical: int = 6) -> Components:
    """Of each node's interfaces some on a fat-tree, which all reach over one cable, the others on a circuit switch."""
    nodes = num_gpus / (packet + optical)
    circuits = nodes * optical
    return switched(nodes * packet, cables=nodes) + Components(
        interfaces=circuits, transceivers=circuits, optical_ports=circuits, fibers=circuits
    )


def load_prices(path: Path) -> Prices:
    """A price list from its file. Raises ConfigError."""
    return load(Prices, path)
