"""The network's rates and times against the definition of max-min fairness and the textbook's filling."""

import numpy as np
import pytest
from max_min_oracle import Run, check_max_min, fluid_end_s, max_min_rates, random_network


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", range(5))
def test_a_thousand_random_networks_are_max_min_fair(block: int, weighted: bool) -> None:
    for seed in range(block * 100, block * 100 + 100):
        capacity, paths, weights = random_network(seed, weighted=weighted)
        run = Run(capacity, paths, weights, np.ones(len(paths)) * 1e9)
        run.engine.run(until_s=0.0)
        rates = run.network.rates_bytes_per_s(run.batch)
        check_max_min(capacity, paths, weights, rates)
        np.testing.assert_allclose(rates, max_min_rates(capacity, paths, weights), rtol=1e-8)


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


def test_bottlenecks_that_follow_one_another() -> None:
    # Link 0 (1/3 each) fills first, then link 1 ((2 - 1/3) / 2), then link 2 with what is left.
    paths = np.array([[0, -1, -1], [0, -1, -1], [0, 1, -1], [1, -1, -1], [1, 2, -1], [2, -1, -1]])
    run = Run(np.array([1.0, 2.0, 10.0]), paths, np.ones(paths.shape), np.ones(6))
    run.engine.run(until_s=0.0)
    rates = run.network.rates_bytes_per_s(run.batch)
    np.testing.assert_allclose(rates, [1 / 3, 1 / 3, 1 / 3, 5 / 6, 5 / 6, 10 - 5 / 6], rtol=1e-9)


@pytest.mark.parametrize("tolerance", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("seed", range(8))
def test_ends_that_are_drawn_together_stay_within_the_tolerance(seed: int, tolerance: float) -> None:
    capacity, paths, weights = random_network(seed)
    sizes = np.random.default_rng(seed).lognormal(20, 1, len(paths))
    exact, near = Run(capacity, paths, weights, sizes), Run(capacity, paths, weights, sizes, tolerance)
    exact.engine.run()
    near.engine.run()
    assert near.network.largest_cut <= tolerance
    assert exact.network.largest_cut <= 1e-9
    assert near.end_s.max() == pytest.approx(exact.end_s.max(), rel=tolerance)
    assert (near.end_s <= exact.end_s * (1 + 1e-9)).mean() > 0.5
