"""Simulated steps of plans between uneven sites."""

from __future__ import annotations

import numpy as np
import pytest
from site_cases import small_workload, uneven_cluster

import planner
from simulator.step import simulate_step


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(3))
def test_the_simulated_step_is_no_longer_than_predicted(seed: int) -> None:
    """The simulator lets operations of different ranks overlap that the cost model adds up."""
    rng = np.random.default_rng(seed)
    made = planner.plan(uneven_cluster(rng, 5, 2), small_workload(rng, 10), time_limit_s=2)
    assert made.predicted.bound * (1 - 1e-9) <= simulate_step(made).step_s <= made.predicted.step * 1.05
