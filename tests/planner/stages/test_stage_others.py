"""Pipelines beside what planners without stages do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from stage_cases import layered_workload, sites_cluster, uneven_cluster

from hybridep.baselines import Baseline, baseline_like
from hybridep.codecs import Codecs, TokenCodec
from planner import StageWishes, compare_planners, plan_pipeline
from planner.evaluate import evaluate
from planner.sites.others import OTHERS


def popular(layers: int, experts: int) -> Sequence[tuple[float, ...]]:
    shares = np.arange(experts, 0.0, -1.0)
    return [tuple(np.roll(shares / shares.sum(), layer)) for layer in range(layers)]


@pytest.mark.parametrize("measured", [False, True])
def test_other_planners_meet_what_the_pipeline_meets(measured: bool) -> None:
    """Its cluster and batch, its codecs but for what passes between stages, and its popularity of experts."""
    cluster, workload = uneven_cluster(1, 3, 1), layered_workload(4)
    popularity = tuple(popular(workload.model.num_moe_layers, workload.model.num_experts)) if measured else ()
    codecs = {"dc": Codecs(tokens=TokenCodec.INT8, activations=TokenCodec.INT8)}
    wishes = StageWishes(codecs=codecs, popularity=popularity)
    plan = plan_pipeline(cluster, workload, wishes, time_limit_s=0.5)
    others = compare_planners(plan)
    assert list(others) == list(OTHERS)
    for name, baseline in (("ep", Baseline.EP), ("full_gather", Baseline.FULL_GATHER)):
        like = baseline_like(plan, baseline)
        cost, memory = evaluate(like)
        assert like.codecs["dc"].tokens is TokenCodec.INT8 and others[name].fits
        # Copies that are fetched for each micro-batch may suit better.
        assert others[name].step_s == pytest.approx(cost.step_s) and others[name].memory_bytes <= memory.fullest_bytes * (
            1 + 1e-9
        )
        assert others[name].gain == others[name].step_s / plan.predicted.step


def test_other_planners_compute_again_where_it_takes_that_to_fit() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 3, 1, "access"), layered_workload(4)
    plan = plan_pipeline(cluster, workload, time_limit_s=0.5)
    roomy = compare_planners(plan)
    gpu = cluster.gpu.model_copy(update={"memory": 0.97 * roomy["ep"].memory_bytes})
    tight = compare_planners(
        plan.at_rates(cluster.model_copy(update={"gpu": gpu})).model_copy(update={"prediction": plan.prediction})
    )
    assert tight["ep"].fits and tight["ep"].memory_bytes <= gpu.memory and tight["ep"].step_s > roomy["ep"].step_s
    assert not tight["full_gather"].fits or tight["full_gather"].step_s >= roomy["full_gather"].step_s
