"""Merging of many different sites."""

from __future__ import annotations

import numpy as np
import pytest
from site_cases import small_workload

from hybridep.config import build
from hybridep.topology import Cluster
from planner.sites.bound import verify
from planner.sites.classes import site_classes
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.solution import Wishes, solve_sites


def sites(rates_mbps: np.ndarray) -> SiteProblem:
    data = {
        "name": "many",
        "levels": [{"name": "dc", "size": len(rates_mbps), "bandwidth": "1 Gbps", "latency": "5 ms"}],
        "gpu": {"throughput": "1 TFLOPS", "memory": "64 GiB", "memory_bandwidth": "1 TB/s"},
        "sites": [{"name": f"s{i}", "up": f"{a:.4f} Mbps", "down": f"{b:.4f} Mbps"} for i, (a, b) in enumerate(rates_mbps)],
    }
    return site_problem(build(Cluster, data, "test"), small_workload(np.random.default_rng(0), 16))


def test_what_is_alike_is_one_kind_and_classes_are_made_of_kinds() -> None:
    rng = np.random.default_rng(0)
    some = rng.uniform(500, 800, (60, 2))
    problem = sites(np.concatenate([some, some]))
    classes = site_classes(problem)
    kinds = classes.kinds
    assert len(kinds.count) > len(classes.count) > 1
    assert (classes.label == kinds.label[kinds.place]).all()
    assert (kinds.up_bytes_per_s[kinds.place] == problem.up_bytes_per_s).all()
    for one in range(len(classes.count)):
        of_class = problem.up_bytes_per_s[classes.label == one]
        assert classes.count[one] == len(of_class)
        assert classes.up_bytes_per_s[one] == of_class.max() == classes.largest(kinds.up_bytes_per_s)[one]
        assert classes.mean(kinds.up_bytes_per_s)[one] == pytest.approx(of_class.mean())


@pytest.mark.turns(8)
@pytest.mark.parametrize(("low", "high", "gap"), [(500.0, 800.0, 0.04), (100.0, 1600.0, 0.08)], ids=["even", "wide"])
def test_hundreds_of_different_sites_have_a_bound_that_can_be_verified(low: float, high: float, gap: float) -> None:
    problem = sites(np.random.default_rng(1).uniform(low, high, (120, 2)))
    solution = solve_sites(problem, Wishes(time_limit_s=14))
    (proof,) = solution.proofs
    relaxation = Relaxation(problem=problem)
    assert relaxation.classes.mixed
    assert verify(relaxation, proof) == pytest.approx(proof.bound_s, rel=1e-12)
    assert solution.bound_s >= (1 - gap) * proof.best_s
