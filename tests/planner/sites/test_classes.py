"""Merging of many different sites: bands that lose least, and the way to merge that proves more."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from site_cases import small_workload

from hybridep.config import build
from hybridep.topology import Cluster
from planner.sites.bound import verify
from planner.sites.classes import _BANDS, Merging
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.solution import Wishes, solve_sites


def lost(values: np.ndarray, band: np.ndarray) -> float:
    """Seconds for a byte that members count too little, all together."""
    fastest = np.array([values[band == one].max() for one in band])
    return float((1 / values - 1 / fastest).sum())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_close_bands_lose_least(seed: int, number: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.uniform(1, 10, 9) if seed < 3 else rng.choice([1.0, 2.0, 5.0], 9)
    band = _BANDS[Merging.CLOSE](values, number)
    assert len(set(band.tolist())) <= number
    order = np.sort(values)
    splits = (np.searchsorted(order[list(cut)], values) for cut in combinations(range(9), number - 1))
    assert lost(values, band) <= min(lost(values, one) for one in splits) + 1e-12


def sites(rates_mbps: np.ndarray) -> SiteProblem:
    data = {
        "name": "many",
        "levels": [{"name": "dc", "size": len(rates_mbps), "bandwidth": "1 Gbps", "latency": "5 ms"}],
        "gpu": {"throughput": "1 TFLOPS", "memory": "64 GiB", "memory_bandwidth": "1 TB/s"},
        "sites": [{"name": f"s{i}", "up": f"{a:.4f} Mbps", "down": f"{b:.4f} Mbps"} for i, (a, b) in enumerate(rates_mbps)],
    }
    return site_problem(build(Cluster, data, "test"), small_workload(np.random.default_rng(0), 16))


@pytest.mark.parametrize(
    ("low", "high", "merging"), [(500.0, 800.0, Merging.CLOSE), (100.0, 1600.0, Merging.SLOW_APART)], ids=["even", "wide"]
)
def test_the_way_that_proves_more_is_taken_and_can_be_verified(low: float, high: float, merging: Merging) -> None:
    problem = sites(np.random.default_rng(1).uniform(low, high, (120, 2)))
    (proof,) = solve_sites(problem, Wishes(time_limit_s=4)).proofs
    assert proof.merging is merging
    assert verify(Relaxation(problem=problem, merging=merging), proof) == pytest.approx(proof.bound_s, rel=1e-12)
    (other,) = set(Merging) - {merging}
    with pytest.raises(ValueError, match="merged otherwise"):
        verify(Relaxation(problem=problem, merging=other), proof)
