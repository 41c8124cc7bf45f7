"""The prefetch depth: chosen where it is faster, with an honest bound; memory; the walk along one step by hand."""

from __future__ import annotations

import pytest
from planner_cases import dense_workload, make_cluster, make_workload, two_sites

import planner
from hybridep.codecs import Codecs, TokenCodec
from hybridep.config import build
from hybridep.errors import ConfigError, UserError
from hybridep.placement import LevelChoice
from hybridep.plan import Plan, Residency, Schedule, Status
from hybridep.traffic import Op
from planner.cost import step_cost
from planner.depths import depths
from planner.domains import layer_group
from planner.memory import memory_use
from planner.problem import build_problem

# Computation and copies take about as long: there is something to hide, and something to hide it under.
CLUSTER = make_cluster(4, bandwidths=["400 Mbps"], latencies=["1 ms"], throughput="40 GFLOPS")
WORKLOAD = make_workload(layers=4, hidden=64, experts=8, top_k=2, ffn=512, tokens=2048)


def gathered(residency: Residency, depth: int) -> Plan:
    group = layer_group(0, 4, {"l0": LevelChoice(domain_size=4)}, residency)
    return Plan(cluster=CLUSTER, workload=WORKLOAD, layers=(group,), schedule=Schedule(prefetch=depth))


def test_wishes_that_no_search_has_together_are_refused() -> None:
    shares = ((1 / 8,) * 8,) * 4
    lossy = {"l0": Codecs(tokens=TokenCodec.INT8)}
    with pytest.raises(UserError, match="copies ahead"):
        planner.plan(CLUSTER, WORKLOAD, ahead=True, codecs=lossy)
    with pytest.raises(UserError, match="copies ahead"):
        planner.plan(CLUSTER, WORKLOAD, ahead=True, popularity=shares)
    with pytest.raises(UserError, match="copies ahead"):
        planner.plans(CLUSTER, WORKLOAD, 2, ahead=True)


def test_the_depth_that_is_chosen_is_the_best_of_all() -> None:
    plain, ahead = planner.plan(CLUSTER, WORKLOAD), planner.plan(CLUSTER, WORKLOAD, ahead=True)
    planner.check(ahead)
    assert plain.prediction is not None and ahead.prediction is not None and ahead.solver is not None
    assert ahead.schedule.prefetch > 0 and ahead.layers[0].domains != plain.layers[0].domains
    assert ahead.prediction.step < 0.9 * plain.prediction.step
    tried = []
    for candidate in build_problem(CLUSTER, WORKLOAD, Schedule()).candidates:
        group = layer_group(0, 4, candidate.choices, candidate.residency)
        for depth in (0, *depths(4)):
            made = Plan(cluster=CLUSTER, workload=WORKLOAD, layers=(group,), schedule=Schedule(prefetch=depth))
            tried.append(step_cost(made).step_s)
    assert ahead.prediction.step == pytest.approx(min(tried), rel=1e-9)
    assert ahead.solver.bound <= min(tried) * (1 + 1e-9)
    assert ahead.solver.status is Status.OPTIMAL


@pytest.mark.parametrize("share", [0.85, 0.9])
def test_plans_of_all_that_computes_again_are_weighed(share: float) -> None:
    """With layers without experts there is an integer program for each way; the best mixture need not be of the way with the best
    single configuration."""
    workload = dense_workload(2048)
    most = memory_use(planner.plan_domains(two_sites(1e12), workload)).total_bytes.max()
    tight = two_sites(share * most)
    plain, ahead = planner.plan_domains(tight, workload), planner.plan(tight, workload, ahead=True)
    assert ahead.solver is not None
    assert ahead.predicted.step <= plain.predicted.step * (1 + 1e-9)
    assert ahead.solver.bound <= plain.predicted.step * (1 + 1e-9)


def test_only_what_shows_of_copies_counts() -> None:
    for residency in Residency:
        plain, ahead = (step_cost(gathered(residency, depth)) for depth in (0, 1))
        assert max(ahead.bound_s, ahead.compute_s) <= ahead.step_s < plain.step_s
        for op in (Op.EXPERT_GATHER.value, Op.GRADIENT_RETURN.value):
            assert ahead.parts_s[op] + ahead.hidden_s[op] == pytest.approx(plain.parts_s[op] + plain.hidden_s[op])
        others = plain.parts_s.keys() - {Op.EXPERT_GATHER.value, Op.GRADIENT_RETURN.value}
        assert all(ahead.parts_s[name] == plain.parts_s[name] for name in others)


def test_one_layer_by_hand() -> None:
    """Nothing is above or below it: its gather hides under its pre-expert part, its return under the backward of that."""
    workload = WORKLOAD.model_copy(update={"model": WORKLOAD.model.model_copy(update={"num_layers": 1})})
    group = layer_group(0, 1, {"l0": LevelChoice(domain_size=4)}, Residency.STEP)
    plain, ahead = (
        step_cost(Plan(cluster=CLUSTER, workload=workload, layers=(group,), schedule=Schedule(prefetch=depth)))
        for depth in (0, 1)
    )
    assert ahead.step_s == pytest.approx(plain.step_s, rel=1e-12)


def test_copies_of_more_blocks_are_held() -> None:
    each = [memory_use(gathered(Residency.MICROBATCH, depth)).parts_bytes["copies"] for depth in (0, 1, 2, 9)]
    one_layer = 6 * 2 * WORKLOAD.expert_bytes
    # No more than there are layers.
    assert [held - each[0] for held in each[1:]] == [one_layer, 2 * one_layer, 3 * one_layer]
    # Gradients may be waiting to return until the step ends, when no activations are left.
    parts = memory_use(gathered(Residency.STEP, 1)).parts_bytes
    assert parts["copies"] + parts["activations"] >= 4 * one_layer


def test_a_schedule_without_overlap_has_nothing_ahead() -> None:
    with pytest.raises(ConfigError, match="needs overlap"):
        build(Schedule, {"overlap": False, "prefetch": 1}, "schedule")
