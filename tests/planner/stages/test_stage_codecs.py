"""Pipelines whose payloads are coded: bytes, times and what a codec may be given for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

from hybridep.codecs import Codecs, ExpertCodec, Speed, Speeds, TokenCodec
from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.pipeline import PipelinePlan, between_link_bytes, codecs_inside, pipeline_link_bytes
from hybridep.plan import Plan
from planner import StageWishes, plan_pipeline
from planner.stages.costs import costed
from simulator.pipeline import simulate_pipeline

INT8 = Codecs(activations=TokenCodec.INT8)


def coded(plan: PipelinePlan, codecs: Codecs, **gpu: Any) -> PipelinePlan:
    cluster = plan.cluster.model_copy(update={"gpu": plan.cluster.gpu.model_copy(update=gpu)})
    data = plan.model_dump(mode="json") | {"codecs": {"dc": codecs}, "cluster": cluster}
    return build(PipelinePlan, data, "pipeline")


@pytest.mark.parametrize("seed", range(6))
def test_coded_activations_take_fewer_bytes_and_nothing_else_does(seed: int) -> None:
    plan = random_pipeline(seed, least_stages=2)
    int8 = coded(plan, INT8)
    # 256 elements of bf16 in a byte each, and two scales.
    assert int8.sequence_bytes / plan.sequence_bytes == pytest.approx((256 + 2 * 4) / 512)
    np.testing.assert_allclose(
        pipeline_link_bytes(plan) - pipeline_link_bytes(int8), between_link_bytes(plan) * (1 - 264 / 512), rtol=1e-9, atol=1e-3
    )
    found = simulate_pipeline(int8)
    np.testing.assert_allclose(found.result.link_bytes[: len(plan.cluster.link_table)], pipeline_link_bytes(int8), rtol=1e-9)
    assert found.step_s <= simulate_pipeline(plan).step_s * (1 + 1e-9)
    assert [one.codecs["dc"].coded for one in int8.plans] == [{}] * len(int8.plans)


def test_coding_activations_takes_its_time_in_both_answers() -> None:
    plan = random_pipeline(3, least_stages=2)
    speed = build(Speed, {"encode": "1 MB/s", "decode": "2 MB/s"}, "speed")
    free, slow = coded(plan, INT8), coded(plan, INT8, coding=Speeds(tokens={TokenCodec.INT8: speed}))
    expected_s = [costed(each).times.step_s for each in (free, slow)]
    simulated_s = [simulate_pipeline(each).step_s for each in (free, slow)]
    rows_bytes = max(int(plan.sequences(stage).max()) for stage in range(len(plan.stages))) * plan.sequence_bytes
    once_s = rows_bytes * (1 / speed.encode + 1 / speed.decode)
    for before_s, after_s in (expected_s, simulated_s):
        # At least one micro-batch waits for it on its way there, and on its way back.
        assert after_s - before_s >= once_s
    assert simulated_s[1] - simulated_s[0] == pytest.approx(expected_s[1] - expected_s[0], rel=0.15)


@pytest.mark.turns(2)
def test_the_search_knows_what_is_coded() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 4, 2, "pairs"), layered_workload(6)
    exact = plan_pipeline(cluster, workload, time_limit_s=1)
    int8 = plan_pipeline(cluster, workload, StageWishes(codecs={"dc": INT8}), time_limit_s=1)
    both = plan_pipeline(
        cluster,
        workload,
        StageWishes(stages=2, codecs={"dc": Codecs(activations=TokenCodec.INT8, experts=ExpertCodec.CHANGE_INT8)}),
        time_limit_s=1,
    )
    assert exact.prediction is not None and int8.prediction is not None
    assert int8.prediction.step < 0.9 * exact.prediction.step and int8.codecs == {"dc": INT8}
    assert int8.prediction.step == pytest.approx(simulate_pipeline(int8).step_s, rel=0.1)
    assert {one.codecs["dc"].experts for one in both.plans} == {ExpertCodec.CHANGE_INT8}


def test_activations_are_coded_between_sites_of_a_pipeline_only() -> None:
    plan = random_pipeline(3, least_stages=2)
    with pytest.raises(ConfigError, match=r"codecs.gpu.activations: pass between sites; give it for dc"):
        build(PipelinePlan, plan.model_dump(mode="json") | {"codecs": {"gpu": INT8}}, "pipeline")
    with pytest.raises(ConfigError, match=r"codecs.dc.activations: pass between pipeline stages, and this plan has none"):
        build(Plan, plan.plans[0].model_dump(mode="json") | {"codecs": {"dc": INT8}}, "plan")
    assert codecs_inside({"dc": INT8}) == {"dc": Codecs()}
