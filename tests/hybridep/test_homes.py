"""Homes as people write them."""

from __future__ import annotations

import numpy as np
import pytest

from hybridep.config import build
from hybridep.errors import ConfigError, PlacementError
from hybridep.homes import home_table, homes_text
from hybridep.placement import divisors, expert_homes, home_blocks
from hybridep.topology import Cluster


def cluster(*experts: float) -> Cluster:
    levels = [{"name": name, "size": size, "bandwidth": "1 Gbps", "latency": "1 ms"} for name, size in (("dc", 3), ("gpu", 2))]
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "100 GB/s"}
    given = experts or (None, None, None)
    sites = [{"name": name, "experts": each} for name, each in zip(("east", "west", "north"), given, strict=True)]
    return build(Cluster, {"name": "test", "levels": levels, "gpu": gpu, "sites": sites}, "test")


def test_sites_spread_their_experts_and_ranks_keep_theirs() -> None:
    homes = {"east": "0-3,9", "west/gpu1": "4-7", "west": "8"}
    assert home_table(cluster(), 10, homes).tolist() == [0, 0, 0, 1, 3, 3, 3, 3, 2, 1]


def test_nothing_said_is_even_blocks() -> None:
    np.testing.assert_array_equal(home_table(cluster(), 11, {}), expert_homes(11, 6))


def test_sites_have_as_many_homes_as_they_are_given() -> None:
    assert home_table(cluster(2, 1, 1), 8, {}).tolist() == [0, 0, 1, 1, 2, 3, 4, 5]
    assert home_table(cluster(0, 2, 1), 9, {}).tolist() == [2, 2, 2, 3, 3, 3, 4, 4, 5]
    np.testing.assert_array_equal(home_table(cluster(3, 3, 3), 11, {}), expert_homes(11, 6))
    with pytest.raises(ConfigError, match="experts is 0 at every site"):
        cluster(0, 0, 0)


def test_any_homes_can_be_written(rng: np.random.Generator) -> None:
    for _ in range(20):
        home = rng.integers(6, size=13)
        np.testing.assert_array_equal(home_table(cluster(), 13, homes_text(cluster(), home)), home)


@pytest.mark.parametrize(
    ("homes", "problem"),
    [
        ({"south": "0-3"}, "no worker 'south' in cluster test; names are like east, west, north, east/gpu0"),
        ({"east": "0-2", "west": "2-3"}, "expert 2 has two homes, the second is west"),
        ({"east": "0-2"}, "expert 3 has no home"),
        ({"east": "0-4"}, "must rise and stay below 4"),
    ],
)
def test_errors_name_the_expert_or_the_worker(homes: dict[str, str], problem: str) -> None:
    with pytest.raises(PlacementError, match=problem):
        home_table(cluster(), 4, homes)


@pytest.mark.parametrize(
    ("sizes", "experts"), [((1, 4, 8), 8), ((1, 4, 8), 16), ((4, 8), 8), ((5, 8), 8), ((2, 16, 8), 64), ((3, 2, 4), 12)]
)
def test_fewer_experts_than_ranks_are_spread_over_places_in_domains(sizes: tuple[int, ...], experts: int) -> None:
    """Whatever domains sites or nodes are in, as many of theirs are at each place inside them; none where all are at home."""
    levels = [{"name": f"l{level}", "size": size, "bandwidth": "1 Gbps", "latency": "1 ms"} for level, size in enumerate(sizes)]
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 TB/s"}
    made = build(Cluster, {"name": "test", "levels": levels, "gpu": gpu}, "test")
    home = home_blocks(made, experts)
    np.testing.assert_array_equal(home // made.ranks_per_site, np.arange(experts) * sizes[0] // experts)
    places = np.stack(np.unravel_index(home, sizes))
    for level in range(len(sizes) - 1):
        for domain in divisors(sizes[level]):
            # Copies in domains of this level, tokens at all others: who computes what.
            where = places.copy()
            where[level] //= domain
            others = [size // domain if one == level else size for one, size in enumerate(sizes)]
            inside = np.ravel_multi_index(where, others)
            workers = inside // np.prod(others[level + 1 :], dtype=np.int64)
            for worker in np.unique(workers):
                number = np.bincount(inside[workers == worker] % np.prod(others[level + 1 :], dtype=np.int64))
                own = len(inside[workers == worker])
                assert number.max() == -(-own // int(np.prod(others[level + 1 :]))), (level, domain)
