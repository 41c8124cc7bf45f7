"""Codecs of pipelines chosen by their loss for rates that are not known, and those of the next best pipelines."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from stage_cases import every_pipeline, layered_workload, sites_cluster, uneven_cluster
from test_stage_loss import steps_s

from hybridep.codec_losses import permitted, shortest, worthwhile
from hybridep.codecs import KINDS, PAYLOADS, Codecs, ExpertCodec, GradientCodec, Speed, Speeds, TokenCodec
from hybridep.config import build
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Plan
from hybridep.topology import Cluster
from planner import StageWishes, interval_scenarios, plan_for_scenarios, plan_pipeline, plan_pipelines
from planner.clock import timed_by
from planner.difference import scaled
from planner.sites.search import at_quantile
from planner.stages.bound import least_s
from planner.stages.costs import costed, expected_over
from planner.stages.robust import RobustPipeline, pipeline_for_scenarios, staged_for_scenarios
from planner.stages.within_loss import _Choice

pytestmark = [pytest.mark.timeout(120), pytest.mark.turns(3)]
LOSS = 0.002


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """What is compiled counts to no search's time."""
    cluster = uneven_cluster(0, 3, 1)
    staged_for_scenarios(cluster, layered_workload(3), [cluster], StageWishes(), time_limit_s=0.2)


def at(plan: PipelinePlan, scenarios: list[Cluster], quantile: float = 1.0) -> float:
    return at_quantile([costed(plan.at_rates(one)).times.step_s for one in scenarios], quantile)


def loss_of(plan: PipelinePlan | Plan) -> float:
    return sum(max(gate.relative, 0.0) for codecs in plan.codecs.values() for gate in codecs.gates.values())


@pytest.mark.turns(4)
def test_near_the_best_of_all_pipelines_with_all_codecs() -> None:
    nominal, *scenarios = (uneven_cluster(seed, 3, 1) for seed in range(10, 13))
    workload = layered_workload(3, micro_batches=2, micro_batch_size=1)
    kept = worthwhile(permitted(LOSS, PAYLOADS), workload, None)
    best_s = math.inf
    for plan in every_pipeline(nominal, workload):
        for codecs in kept:
            best_s = min(best_s, at(plan.running_ahead(4).coded({"dc": codecs}), scenarios))
    with timed_by(time.process_time):
        found = pipeline_for_scenarios(nominal, workload, scenarios, StageWishes(max_loss=LOSS), time_limit_s=12)
    assert found.bound_s <= best_s and found.step_s <= best_s * 1.03
    assert loss_of(found.plan) <= LOSS and found.plan.codecs


@pytest.mark.turns(4)
@pytest.mark.parametrize("quantile", [1.0, 0.5])
def test_never_worse_than_the_nominal_one_within_the_loss(quantile: float) -> None:
    nominal, *scenarios = (uneven_cluster(seed, 4, 1) for seed in range(4))
    workload, wishes = layered_workload(6), StageWishes(max_loss=LOSS)
    with timed_by(time.process_time):
        found = pipeline_for_scenarios(nominal, workload, scenarios, wishes, quantile=quantile, time_limit_s=2)
        exact = pipeline_for_scenarios(nominal, workload, scenarios, quantile=quantile, time_limit_s=2)
    assert found.plan.cluster == nominal and loss_of(found.plan) <= LOSS
    assert found.step_s == pytest.approx(at(found.plan, scenarios, quantile), rel=1e-9)
    assert found.bound_s <= found.step_s <= found.nominal_step_s * (1 + 1e-9)
    # Bounds hold for all codecs that are permitted, whatever was chosen.
    least = shortest(permitted(LOSS, PAYLOADS), workload)
    bounds_s = [least_s(one, workload, 2, least) for one in (nominal, *scenarios)]
    assert found.bound_s == pytest.approx(at_quantile(bounds_s[1:], quantile)) and found.bound_s < exact.bound_s
    assert found.plan.solver is not None and found.plan.solver.bound == pytest.approx(bounds_s[0])
    # Each codec brings something at the quantile.
    for kind in (codecs := found.plan.codecs["dc"]).coded:
        assert at(found.plan.coded({"dc": codecs.without(kind)}), scenarios, quantile) > found.step_s * (1 + 1e-9)


def slow_to_code(cluster: Cluster) -> Cluster:
    """Coding takes longer than a link of 1 Gbps, and less long than one of 10 Mbps."""
    speed = build(Speed, {"encode": "20 MB/s", "decode": "20 MB/s"}, "speed")
    coding = Speeds(
        tokens={codec: speed for codec in TokenCodec if codec is not TokenCodec.EXACT},
        experts={codec: speed for codec in ExpertCodec if codec is not ExpertCodec.EXACT},
        gradients={codec: speed for codec in GradientCodec if codec is not GradientCodec.EXACT},
    )
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"coding": coding})})


def test_codecs_are_those_of_the_quantile() -> None:
    """With the rates as they are nothing is worth coding; with what they may be everything is."""
    cluster = slow_to_code(sites_cluster(np.random.default_rng(1), 3, 1, "even"))
    workload, scenarios = layered_workload(4), [scaled(cluster, 0.02), cluster]
    assert not plan_pipeline(cluster, workload, StageWishes(max_loss=LOSS), time_limit_s=0.5).codecs
    slow = pipeline_for_scenarios(cluster, workload, scenarios, StageWishes(max_loss=LOSS), time_limit_s=1)
    assert slow.plan.codecs["dc"].activations is not TokenCodec.EXACT and slow.step_s < 0.8 * slow.nominal_step_s
    fast = pipeline_for_scenarios(cluster, workload, scenarios, StageWishes(max_loss=LOSS), quantile=0.5, time_limit_s=1)
    assert not fast.plan.codecs
    without = [plan_for_scenarios(cluster, workload, scenarios, quantile=one, max_loss=LOSS, time_limit_s=2) for one in (1, 0.5)]
    assert without[0].plan.codecs["dc"].coded and not without[1].plan.codecs
    assert without[0].step_s < 0.8 * without[0].nominal_step_s


@pytest.mark.turns(2)
@pytest.mark.parametrize(("throughput", "stages"), [("30 TFLOPS", True), ("0.01 TFLOPS", False)])
def test_with_or_without_stages_within_the_loss(throughput: str, stages: bool) -> None:
    cluster = sites_cluster(np.random.default_rng(0), 2, 1, "access", throughput=throughput)
    workload, scenarios = layered_workload(4), interval_scenarios(cluster, 0.2, draws=2)
    found = staged_for_scenarios(cluster, workload, scenarios, StageWishes(max_loss=LOSS), time_limit_s=3)
    assert isinstance(found, RobustPipeline) == stages and loss_of(found.plan) <= LOSS
    assert found.steps_s == pytest.approx([expected_over(found.plan, one) for one in scenarios], rel=1e-9)
    if isinstance(found.plan, Plan):
        other = plan_for_scenarios(cluster, workload, scenarios, max_loss=LOSS, time_limit_s=2)
        assert found.step_s == pytest.approx(other.step_s, rel=0.01)


def test_the_next_best_have_no_codecs_for_nothing() -> None:
    """Stages of one site pass activations only, whatever the best pipeline does."""
    cluster, workload = uneven_cluster(3, 4, 1), layered_workload(6)
    made = plan_pipelines(cluster, workload, StageWishes(max_loss=LOSS), 12, time_limit_s=2)
    single = [one for one in made if all(len(stage.sites) == 1 for stage in one.stages)]
    assert single and all(set(one.codecs["dc"].coded) == {"activations"} for one in single)
    worths = [one.predicted.step for one in made]
    assert worths == sorted(worths) and len({one.digest for one in made}) == len(made) > 1
    # With all kinds coded, looked for in all of them or in the best one, however long that takes.
    every = permitted(LOSS, PAYLOADS)
    choice, full = _Choice(cluster, workload, StageWishes(max_loss=LOSS)), worthwhile(every, workload, None)[-1]
    found = choice.coded([costed(one) for one in made], full)
    kinds = {str(one.plan.with_layers([stage.layers for stage in one.plan.stages]).stages): one for one in found}
    assert len(kinds) > 1 and set(full.coded) == {*KINDS, "activations"}
    in_all, in_one = (choice.plain(found, most) for most in (len(found), 1))
    assert [one.times.step_s for one in in_all] == pytest.approx([one.times.step_s for one in found])
    for one in in_all:
        codecs = one.plan.codecs.get("dc", Codecs())
        fewer = [one.plan.coded({"dc": codecs.without(kind)}) for kind in codecs.coded]
        assert all(costed(other).times.step_s > one.times.step_s * (1 + 1e-9) for other in fewer)
        assert one.times.step_s <= min(steps_s(one.plan, [full])) * (1 + 1e-6)
    assert [one.times.step_s for one in in_one] == pytest.approx([one.times.step_s for one in found])
    several = [one for one in in_one[1:] if any(len(stage.sites) > 1 for stage in one.plan.stages)]
    assert all(set(one.plan.codecs["dc"].coded) == set(full.coded) for one in several)
