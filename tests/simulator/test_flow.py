"""Max-min fairness: the checker below knows the definition, not the algorithm."""

import numpy as np
import pytest

from simulator.flow import FloatArray, IntArray, max_min_rates


def check_max_min(capacity: FloatArray, paths: IntArray, rates: FloatArray, counts: FloatArray | None = None) -> None:
    """Links carry no more than they can, and every flow crosses a full link on which no flow is faster."""
    count = np.ones(len(paths)) if counts is None else counts
    load = np.zeros(len(capacity))
    fastest = np.zeros(len(capacity))
    for flow, path in enumerate(paths):
        for link in path[path >= 0]:
            load[link] += rates[flow] * count[flow]
            fastest[link] = max(fastest[link], rates[flow])
    assert (load <= capacity * (1 + 1e-9)).all()
    for flow, path in enumerate(paths):
        links = path[path >= 0]
        if links.size == 0:
            assert np.isinf(rates[flow])
            continue
        full = load[links] >= capacity[links] * (1 - 1e-8)
        assert (full & (rates[flow] >= fastest[links] * (1 - 1e-8))).any(), f"flow {flow} has no bottleneck"


def random_case(seed: int) -> tuple[FloatArray, IntArray]:
    rng = np.random.default_rng(seed)
    num_links, num_flows = int(rng.integers(1, 25)), int(rng.integers(1, 80))
    width = min(num_links, int(rng.integers(1, 6)))
    # Half of the networks have few distinct capacities, so that many links fill together.
    capacity = rng.integers(1, 4, num_links) * 1e9 if seed % 2 else rng.lognormal(20, 2, num_links)
    paths = np.full((num_flows, width), -1, dtype=np.int64)
    for flow in range(num_flows):
        length = int(rng.integers(0 if seed % 5 == 0 else 1, width + 1))
        paths[flow, :length] = rng.choice(num_links, length, replace=False)
    return capacity.astype(np.float64), paths


@pytest.mark.parametrize("block", range(10))
def test_random_networks_are_max_min_fair(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        capacity, paths = random_case(seed)
        check_max_min(capacity, paths, max_min_rates(capacity, paths))


@pytest.mark.parametrize("block", range(4))
def test_counted_flows_equal_written_out_flows(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        capacity, paths = random_case(seed)
        counts = np.random.default_rng(seed + 1).integers(1, 6, len(paths))
        counted = max_min_rates(capacity, paths, counts.astype(np.float64))
        check_max_min(capacity, paths, counted, counts.astype(np.float64))
        written_out = max_min_rates(capacity, np.repeat(paths, counts, axis=0))
        np.testing.assert_allclose(np.repeat(counted, counts), written_out, rtol=1e-9)


def test_one_long_and_two_short_flows() -> None:
    # Bertsekas and Gallager's line: the long flow shares each link; the wide link's rest goes to its short flow.
    rates = max_min_rates(np.array([1.0, 3.0]), np.array([[0, 1], [0, -1], [1, -1]]))
    np.testing.assert_allclose(rates, [0.5, 0.5, 2.5], rtol=1e-9)


def test_bottlenecks_that_follow_one_another() -> None:
    # Link 0 (1/3 each) fills first, then link 1 ((2 - 1/3) / 2), then link 2 with what is left.
    paths = np.array([[0, -1, -1], [0, -1, -1], [0, 1, -1], [1, -1, -1], [1, 2, -1], [2, -1, -1]])
    rates = max_min_rates(np.array([1.0, 2.0, 10.0]), paths)
    np.testing.assert_allclose(rates, [1 / 3, 1 / 3, 1 / 3, 5 / 6, 5 / 6, 10 - 5 / 6], rtol=1e-9)


def test_no_flows() -> None:
    assert max_min_rates(np.array([1.0]), np.zeros((0, 0), dtype=np.int64)).shape == (0,)
