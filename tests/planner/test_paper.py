"""The paper's equations and its Table IV."""

from __future__ import annotations

import numpy as np
import pytest

from hybridep.placement import divisors
from planner import paper

# HybridEP, Table IV with G = 8: (P_E in MB, D in MB, PE in ms) of the rows, and the share p that it prints.
MIX_1 = (4.7, 8.0, 0.049)
MIX_2 = (2.35, 8.0, 0.049)
AG_ONLY = [(0.094, 3.0, 0.099), (0.047, 3.0, 0.099)]


def best_share(row: tuple[float, float, float], bandwidth_bytes_per_s: float) -> float:
    expert_mb, data_mb, pre_expert_ms = row
    return paper.best_share(
        data_bytes=data_mb * 1e6,
        expert_bytes=expert_mb * 1e6,
        num_gpus=8,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        pre_expert_s=pre_expert_ms * 1e-3,
    )


def test_stream_equations() -> None:
    assert paper.all_to_all_bytes(8.0, 4) == 6.0
    assert paper.all_gather_bytes(8.0, 4) == 24.0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_equal_shares_reduce_equation_8_to_equation_10(share: float) -> None:
    """With computation, communication and overlap of Eq. 2, 5 and 7, the expert term cancels."""
    common = {"data_bytes": 8e6, "expert_bytes": 4.7e6, "num_gpus": 8, "bandwidth_bytes_per_s": 16e9}
    pre_expert_s, expert_s, num_experts = 5e-4, 1e-4, 4
    gather_s, exchanges_s = paper.communication_terms_s(share, **common)
    computation_s, communication_s = pre_expert_s + num_experts * expert_s, gather_s + exchanges_s
    # Of a gather what is computed before the experts hides, and all that experts compute.
    overlap_s = min(pre_expert_s, gather_s) + num_experts * expert_s
    latency_s = computation_s + communication_s - overlap_s
    assert paper.latency_s(share, pre_expert_s=pre_expert_s, **common) == pytest.approx(latency_s, rel=1e-12)


@pytest.mark.parametrize("row", AG_ONLY)
def test_gather_only_rows_of_table_iv(row: tuple[float, float, float]) -> None:
    """2 D >= G P_E whatever the bandwidth, so p = 0."""
    for gigabytes_per_s in (1.25, 16, 128):
        assert best_share(row, gigabytes_per_s * 1e9) == 0.0


def test_one_gpu_gathers_nothing() -> None:
    common = {"data_bytes": 1.0, "expert_bytes": 8.0, "bandwidth_bytes_per_s": 1e9, "pre_expert_s": 1e-3}
    assert paper.best_share(num_gpus=1, **common) == 0.0 < paper.best_share(num_gpus=2, **common | {"pre_expert_s": 0.0})


def test_mixed_rows_of_table_iv_need_gigabits_read_as_gigabytes() -> None:
    """Table IV prints p = .75 and .5 for 128 Gbps. That is 16 GB/s, for which Eq. 12 gives .976 and .952, next to plain EP.
    Only 128 GB/s gives .81 and .62, which round down to feasible shares as the paper prints them (1 - S / G)."""
    assert best_share(MIX_1, 16e9) == pytest.approx(0.976, abs=5e-4)
    assert best_share(MIX_2, 16e9) == pytest.approx(0.952, abs=5e-4)
    assert best_share(MIX_1, 128e9) == pytest.approx(0.81, abs=5e-3)
    assert best_share(MIX_2, 128e9) == pytest.approx(0.62, abs=5e-3)
    feasible = [1 - size / 8 for size in divisors(8)]
    printed = [max(share for share in feasible if share <= best_share(row, 128e9)) for row in (MIX_1, MIX_2)]
    assert printed == [0.75, 0.5]


def test_best_share_minimises_the_latency(rng: np.random.Generator) -> None:
    shares = np.linspace(0, 1, 2001)
    for _ in range(200):
        case = {
            "data_bytes": rng.uniform(1e5, 1e8),
            "expert_bytes": rng.uniform(1e4, 1e7),
            "num_gpus": int(rng.choice([2, 4, 8, 32])),
            "bandwidth_bytes_per_s": rng.uniform(1e8, 1e11),
            "pre_expert_s": rng.uniform(0, 1e-2),
        }
        best = paper.latency_s(paper.best_share(**case), **case)
        assert best <= min(paper.latency_s(float(share), **case) for share in shares) * (1 + 1e-12)


@pytest.mark.parametrize("gpus", [2, 6, 8, 32])
def test_shares_and_domains_map_onto_each_other(gpus: int) -> None:
    for size in divisors(gpus):
        share = paper.share_of_domain(gpus, size)
        assert share == (gpus - size) / (gpus - 1)
        assert paper.domain_of_share(gpus, share) == size
    assert paper.share_of_domain(gpus, 1) == 1.0
    assert paper.domain_of_share(gpus, 0.0) == gpus


def test_a_share_between_feasible_ones_takes_the_larger_domain() -> None:
    assert paper.domain_of_share(8, 0.81) == 4  # 6/7 = .857 is too much, 4/7 = .571 fits
    assert paper.domain_of_share(8, 0.99) == 2
