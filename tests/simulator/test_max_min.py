"""The network's rates and times against the definition of max-min fairness and the textbook's filling."""

import numpy as np
import pytest
from max_min_oracle import Run, carried_bytes, check_max_min, fluid_end_s, max_min_rates, random_network, rates_bytes_per_s

from hybridep.arrays import IntArray
from simulator.columns import ACTIVE
from simulator.filling import fill
from simulator.refilling import refill


@pytest.mark.turns(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", range(5))
def test_a_thousand_random_networks_are_max_min_fair_and_conserve_bytes(block: int, weighted: bool) -> None:
    for seed in range(block * 100, block * 100 + 100):
        capacity, paths, weights = random_network(seed, weighted=weighted)
        run = Run(capacity, paths, weights, np.ones(len(paths)) * 1e9)
        run.engine.run(until_s=0.0)
        rates = rates_bytes_per_s(run.network, run.batch)
        check_max_min(capacity, paths, weights, rates)
        np.testing.assert_allclose(rates, max_min_rates(capacity, paths, weights), rtol=1e-8)
        run.engine.run()
        # The fastest have their first rate to the end. No link carries more than its rate, nor after its last flow.
        assert run.end_s.min() == pytest.approx(1e9 / rates.max(), rel=1e-8)
        used = paths >= 0
        size_bytes = np.bincount(paths[used], weights[used] * 1e9, minlength=len(capacity))
        np.testing.assert_allclose(run.network.link_bytes, size_bytes, rtol=1e-12)
        assert (run.network.link_busy_s >= size_bytes / capacity * (1 - 1e-8)).all()
        last_s = np.zeros(len(capacity))
        np.maximum.at(last_s, paths[used], np.broadcast_to(run.end_s[:, None], paths.shape)[used])
        np.testing.assert_allclose(run.network.link_busy_s, last_s, rtol=1e-12)


@pytest.mark.turns(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", range(4))
def test_flows_that_end_one_by_one_end_when_they_should(block: int, weighted: bool) -> None:
    for seed in range(block * 10, block * 10 + 10):
        capacity, paths, weights = random_network(seed, weighted=weighted)
        sizes = np.random.default_rng(seed).lognormal(20, 1.5, len(paths))
        run = Run(capacity, paths, weights, sizes)
        run.engine.run()
        np.testing.assert_allclose(run.end_s, fluid_end_s(capacity, paths, weights, sizes), rtol=1e-7)


@pytest.mark.parametrize("weighted", [False, True])
def test_flows_that_start_one_by_one(weighted: bool) -> None:
    """Each start and end changes the rates a little: the order of links is mended, not found anew."""
    for seed in range(25):
        capacity, paths, weights = random_network(seed, weighted=weighted)
        rng = np.random.default_rng(seed)
        sizes = rng.lognormal(20, 1.5, len(paths))
        all_at_once = Run(capacity, paths, weights, sizes)
        all_at_once.engine.run()
        start_s = rng.uniform(0, np.median(all_at_once.end_s), len(paths))
        run = Run(capacity, paths, weights, sizes, start_s=start_s)
        run.engine.run()
        expected_s = fluid_end_s(capacity, paths, weights, sizes, start_s)
        np.testing.assert_allclose(run.end_s - start_s, expected_s - start_s, rtol=1e-6, atol=1e-9 * expected_s.max())


def test_the_check_tells_unfair_rates_from_fair_ones() -> None:
    for seed in range(20):
        capacity, paths, weights = random_network(seed, weighted=seed % 2 == 0)
        rates = max_min_rates(capacity, paths, weights)
        check_max_min(capacity, paths, weights, rates)
        for factor in (0.999, 1.001):
            wrong = rates.copy()
            wrong[seed % len(rates)] *= factor
            with pytest.raises(AssertionError):
                check_max_min(capacity, paths, weights, wrong)


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(6))
def test_uneven_all_to_all_ends_when_it_should(seed: int) -> None:
    """Dense traffic, in which the order of the links changes often."""
    rng = np.random.default_rng(seed)
    num_hosts = 14
    pairs = np.array([(a, b) for a in range(num_hosts) for b in range(num_hosts) if a != b])
    paths = np.stack([2 * pairs[:, 0], 2 * pairs[:, 1] + 1], axis=1)
    capacity = np.full(2 * num_hosts, 10.0) if seed % 2 else rng.uniform(5, 20, 2 * num_hosts)
    weights, sizes = np.ones(paths.shape), rng.lognormal(0, 1, len(paths))
    run = Run(capacity, paths, weights, sizes)
    run.engine.run()
    np.testing.assert_allclose(run.end_s, fluid_end_s(capacity, paths, weights, sizes), rtol=1e-7)


@pytest.mark.parametrize("seed", [3, 11])
def test_links_that_are_passed_over_several_at_a_time(seed: int) -> None:
    """Many links with few flows each: of two that should have filled earlier, one shows only once all its flows are fixed."""
    rng = np.random.default_rng(seed)
    capacity = rng.lognormal(20, 1, 60)
    paths = np.stack([rng.choice(60, 3, replace=False) for _ in range(100)])
    sizes = rng.lognormal(20, 1.5, 100)
    run = Run(capacity, paths, np.ones(paths.shape), sizes)
    run.engine.run()
    np.testing.assert_allclose(run.end_s, fluid_end_s(capacity, paths, np.ones(paths.shape), sizes), rtol=1e-7)


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(12))
def test_hubs_whose_users_change_few_links_at_a_time(seed: int) -> None:
    """Most links are as they were at each end and start: levels are computed anew only where flows or their rates changed."""
    rng = np.random.default_rng(seed)
    num_users, num_hubs = 40, 5
    users = np.repeat(np.arange(num_users), 3)
    hubs = num_users + np.concatenate([rng.choice(num_hubs, 3, replace=False) for _ in range(num_users)])
    pairs = np.stack([rng.permutation(num_users)[:2] for _ in range(10)])
    paths = np.concatenate([np.stack([users, hubs], axis=1), pairs])
    capacity = np.concatenate([rng.uniform(1, 4, num_users), rng.uniform(5, 40, num_hubs)])
    weights, sizes = np.ones(paths.shape), rng.lognormal(0, 1, len(paths))
    start_s = rng.uniform(0, 3, len(paths)) if seed % 2 else np.zeros(len(paths))
    run = Run(capacity, paths, weights, sizes, start_s=start_s)
    run.engine.run()
    expected_s = fluid_end_s(capacity, paths, weights, sizes, start_s)
    np.testing.assert_allclose(run.end_s, expected_s, rtol=1e-7)


def test_bottlenecks_that_follow_one_another() -> None:
    # Link 0 (1/3 each) fills first, then link 1 ((2 - 1/3) / 2), then link 2 with what is left.
    paths = np.array([[0, -1, -1], [0, -1, -1], [0, 1, -1], [1, -1, -1], [1, 2, -1], [2, -1, -1]])
    run = Run(np.array([1.0, 2.0, 10.0]), paths, np.ones(paths.shape), np.ones(6))
    run.engine.run(until_s=0.0)
    rates = rates_bytes_per_s(run.network, run.batch)
    np.testing.assert_allclose(rates, [1 / 3, 1 / 3, 1 / 3, 5 / 6, 5 / 6, 10 - 5 / 6], rtol=1e-9)


def all_to_all(num_hosts: int) -> IntArray:
    """Paths of every pair's flow over its source's link up and its destination's link down."""
    source, destination = np.nonzero(~np.eye(num_hosts, dtype=bool))
    return np.stack([2 * source, 2 * destination + 1], axis=1)


@pytest.mark.parametrize("seed", range(6))
def test_many_flows_that_end_at_once(seed: int) -> None:
    """Few different sizes, in rounds: at each end all links change, and many change places."""
    rng = np.random.default_rng(seed)
    num_hosts = 12
    paths = all_to_all(num_hosts)
    weights = rng.integers(1, 4, paths.shape) / 3.0 if seed % 3 == 0 else np.ones(paths.shape)
    capacity = rng.uniform(5, 20, 2 * num_hosts)
    rates = max_min_rates(capacity, paths, weights)
    # Those of the first round end together; so may others.
    sizes = np.where(rng.uniform(size=len(paths)) < 0.3, rates, rng.integers(1, 4, len(paths)) * 3.0)
    run = Run(capacity, paths, weights, sizes)
    run.engine.run()
    np.testing.assert_allclose(run.end_s, fluid_end_s(capacity, paths, weights, sizes), rtol=1e-7)


@pytest.mark.turns(2)
@pytest.mark.parametrize("tolerance", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("seed", range(8))
def test_times_are_exact_for_sizes_within_the_tolerance(seed: int, tolerance: float) -> None:
    """Of sparse and of dense networks; what the textbook's rates carry up to the ends that were told is the proof."""
    rng = np.random.default_rng(seed)
    capacity, paths, weights = random_network(seed)
    if seed % 2:
        paths, capacity = all_to_all(10), rng.uniform(5, 20, 20) if seed % 4 == 1 else np.full(20, 10.0)
        weights = np.ones(paths.shape)
    sizes = rng.lognormal(20, 1, len(paths))
    exact, near = Run(capacity, paths, weights, sizes), Run(capacity, paths, weights, sizes, tolerance)
    exact.engine.run()
    near.engine.run()
    assert len(set(near.end_s)) <= len(set(exact.end_s))
    assert exact.network.largest_cut <= 1e-9
    difference = np.abs(carried_bytes(capacity, paths, weights, near.end_s) / sizes - 1)
    assert near.network.largest_cut <= tolerance * (1 + 1e-9)
    assert near.network.largest_cut == pytest.approx(difference.max(), rel=1e-6, abs=1e-9)
    assert near.end_s.max() == pytest.approx(exact.end_s.max(), rel=tolerance)


def test_flows_that_end_alone_end_on_time_in_spite_of_a_tolerance() -> None:
    paths = np.array([[0, 1], [2, 3], [4, 5]])
    run = Run(np.full(6, 10.0), paths, np.ones(paths.shape), np.array([10.0, 20.0, 30.0]), tolerance=0.05)
    run.engine.run()
    np.testing.assert_allclose(run.end_s, [1.0, 2.0, 3.0], rtol=1e-12)
    assert run.network.largest_cut < 1e-12


@pytest.mark.parametrize("spread", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_filling_from_nothing_goes_on_from_other_rates(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    paths = all_to_all(14) if seed % 2 else np.stack([rng.choice(40, 3, replace=False) for _ in range(400)])
    weights = rng.integers(1, 4, paths.shape) / 3.0 if seed >= 2 else np.ones(paths.shape)
    capacity = rng.uniform(5, 20, paths.max() + 1)
    run = Run(capacity, paths, weights, np.full(len(paths), 1e9))
    run.engine.run(until_s=0.0)
    flows, links = run.network._flows, run.network._links
    assert links.capacity.size == capacity.size
    active = flows.status == ACTIVE
    for _ in range(5):
        capacity = capacity * rng.lognormal(0, spread, capacity.size)
        links.capacity[:] = capacity
        fill(flows, links, 0.0)
        rates = rates_bytes_per_s(run.network, run.batch)[active]
        check_max_min(capacity, paths[active], weights[active], rates)
        np.testing.assert_allclose(rates, max_min_rates(capacity, paths[active], weights[active]), rtol=1e-8)
        # The tables are such that single ends can be followed from here.
        assert refill(flows, links, 0, 0.0, True) >= 0
        np.testing.assert_allclose(rates_bytes_per_s(run.network, run.batch)[active], rates, rtol=1e-9)
