"""What networks cost: the totals that MixNet prints, and counts that a person can make."""

from pathlib import Path

import pytest

from hybridep.errors import UserError
from hybridep.units import gbps_to_bytes_per_s
from simulator.network_cost import Components, fat_tree, load_prices, mixnet, rail_optimized, switched, topo_opt

PRICES = load_prices(Path(__file__).resolve().parents[2] / "configs" / "prices" / "mixnet-table-4.yaml")


@pytest.mark.parametrize(
    ("gbps", "fat_tree_million", "mixnet_million"), [(100, 2.70, 1.71), (200, 4.95, 2.71), (400, 11.63, 5.02), (800, 18.53, 7.89)]
)
def test_published_totals_of_1024_gpus(gbps: int, fat_tree_million: float, mixnet_million: float) -> None:
    rate = gbps_to_bytes_per_s(gbps)
    assert fat_tree(1024).cost_usd(PRICES, rate) / 1e6 == pytest.approx(fat_tree_million, abs=0.0051)
    assert mixnet(1024).cost_usd(PRICES, rate) / 1e6 == pytest.approx(mixnet_million, abs=0.0051)


def test_one_endpoint_by_hand() -> None:
    rate = gbps_to_bytes_per_s(400)
    fiber = 150
    assert fat_tree(1).cost_usd(PRICES, rate) == pytest.approx(1499 + 6 * 659 + 5 * 1090 + 3 * fiber)
    assert rail_optimized(1).cost_usd(PRICES, rate) == pytest.approx(1499 + 4 * 659 + 3 * 1090 + 2 * fiber)
    assert topo_opt(1).cost_usd(PRICES, rate) == pytest.approx(1499 + 659 + 100 + fiber)
    # Three times as many ports down as up in a leaf: 1 + 4/3 ports.
    ports = 1 + 4 / 3
    oversubscribed = fat_tree(1, oversubscription=3).cost_usd(PRICES, rate)
    assert oversubscribed == pytest.approx(1499 + (1 + ports) * 659 + ports * 1090 + (1 + 2 / 3) * fiber)
    # A node of eight interfaces, two of them on packet switches.
    node = 8 * 1499 + 2 * (6 * 659 + 5 * 1090) + 3 * fiber + 6 * (659 + 520 + fiber)
    assert mixnet(8).cost_usd(PRICES, rate) == pytest.approx(node)


def test_networks_cost_as_much_as_their_parts() -> None:
    both = fat_tree(8) + topo_opt(8)
    assert both == Components(interfaces=16, transceivers=56, packet_ports=40, patch_panel_ports=8, fibers=32)
    assert mixnet(8, packet=8, optical=0).packet_ports == switched(8).packet_ports


def test_rates_without_prices() -> None:
    with pytest.raises(UserError, match=r"none at 150 Gbps; there are 100 Gbps"):
        fat_tree(8).cost_usd(PRICES, gbps_to_bytes_per_s(150))
