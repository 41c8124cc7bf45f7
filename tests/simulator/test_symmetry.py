"""One rank of each kind stands for all: the same times and bytes as with every rank simulated."""

import time

import numpy as np
import pytest
from simulated_plans import PLANS, make_plan, one_by_one

import simulator.blocks
from hybridep.plan import Plan
from simulator.precision import Precision
from simulator.step import simulate_step

UNEVEN = [{"name": "a"}, {"name": "b", "up": "0.25 Gbps"}, {"name": "c"}, {"name": "d", "down": "0.5 Gbps"}]
SLOW_ENDS = [{"name": "a", "gpu": {"memory_bandwidth": "0.1 TB/s"}}, {"name": "b", "gpu": {"pass_overhead": "3 ms"}}, *UNEVEN[2:]]


@pytest.mark.parametrize(
    "plan",
    [
        *(pytest.param(plan, id=name) for name, plan in PLANS.items()),
        pytest.param(make_plan(4, 4, sites=UNEVEN, latency_s=1e-3), id="uneven sites"),
        pytest.param(
            make_plan(4, 2, 4, domains={"dc": 2, "gpu": 2}, sites=UNEVEN, num_experts=8), id="few experts, uneven sites"
        ),
        pytest.param(make_plan(6, 4, num_experts=16), id="experts that do not divide"),
        pytest.param(make_plan(4, 2, sites=SLOW_ENDS), id="heads and optimizers that differ"),
        pytest.param(make_plan(8, 2, num_experts=4, domains={"dc": 4}, residency="microbatch"), id="homes in some sites only"),
    ],
)
def test_kinds_give_what_all_ranks_give(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = simulate_step(plan)
    monkeypatch.setattr(simulator.blocks, "symmetry", one_by_one)
    full = simulate_step(plan)
    assert full.symmetry.num_kinds == plan.cluster.num_gpus
    kind = reduced.symmetry.kind
    np.testing.assert_allclose(reduced.execution.end_s[:, kind], full.execution.end_s, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(reduced.link_bytes, full.link_bytes, rtol=1e-9)
    np.testing.assert_allclose(reduced.link_busy_s, full.link_busy_s, rtol=1e-6, atol=1e-12)
    assert reduced.step_s == pytest.approx(full.step_s, rel=1e-8)


def test_alike_ranks_are_found() -> None:
    assert simulate_step(make_plan(4, 4)).symmetry.num_kinds == 1
    slow = simulate_step(make_plan(4, 4, sites=UNEVEN)).symmetry
    # Two sites differ from the rest and from each other.
    assert slow.kind.reshape(4, 4)[0].tolist() == slow.kind.reshape(4, 4)[2].tolist()
    assert len({tuple(row) for row in slow.kind.reshape(4, 4).tolist()}) == 3


def test_hundreds_of_sites_take_seconds_and_few_rows_in_a_timeline() -> None:
    plan = make_plan(256, 8, num_experts=8, num_layers=9)
    _ = simulate_step(make_plan(2, 2)).step_s
    began_s = time.process_time()
    result = simulate_step(plan)
    assert time.process_time() - began_s < 10
    assert result.symmetry.num_kinds < 64
    assert len({span.process for span in result.spans()}) <= 32


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["few experts, uneven sites", "fewer experts than ranks", "part gathered"])
def test_little_memory_gives_what_much_gives(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that are mostly zero kept as their entries, and transfers looked at a few at a time."""
    plan = PLANS.get(name, make_plan(4, 2, 4, domains={"gpu": 2}, sites=UNEVEN, num_experts=8))
    if whole:
        monkeypatch.setattr(simulator.blocks, "symmetry", one_by_one)
    much = simulate_step(plan)
    for module, limit, value in (("sent", "_LARGE", 0), ("sent", "_SPARSE", 1.0), ("sent", "_BLOCK", 16), ("fabric", "_PART", 5)):
        monkeypatch.setattr(f"simulator.{module}.{limit}", value)
    little = simulate_step(plan)
    np.testing.assert_array_equal(little.symmetry.kind, much.symmetry.kind)
    np.testing.assert_allclose(little.execution.end_s, much.execution.end_s, rtol=1e-12)
    np.testing.assert_allclose(little.link_bytes, much.link_bytes, rtol=1e-12)


def test_a_tolerance_shifts_a_step_by_no_more() -> None:
    rng = np.random.default_rng(0)
    sites = [{"name": f"s{i}", "up": f"{rate:.3f} Gbps"} for i, rate in enumerate(rng.uniform(0.5, 2, 12))]
    plan = make_plan(12, 2, num_experts=24, sites=sites)
    exact, near = simulate_step(plan), simulate_step(plan, precision=Precision(tolerance=0.01))
    assert exact.largest_cut < 1e-9 < near.largest_cut <= 0.01
    assert near.step_s == pytest.approx(exact.step_s, rel=0.01)
