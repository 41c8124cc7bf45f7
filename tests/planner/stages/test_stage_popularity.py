"""Pipelines for measured popularity: each stage is planned for that of its own layers."""

from __future__ import annotations

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

from hybridep.config import build
from hybridep.errors import ConfigError, UserError
from hybridep.pipeline import PipelinePlan, pipeline_link_bytes
from hybridep.plan import Objective
from planner import StageWishes, plan_pipeline
from planner.goal import Goal
from planner.stages.costs import costed
from simulator.pipeline import simulate_pipeline


def shares(layers: int, seed: int, experts: int = 8) -> tuple[tuple[float, ...], ...]:
    """Of each layer's experts, none above a half, which top-2 permits."""
    drawn = np.random.default_rng(seed).dirichlet(np.full(experts, 2.0), layers)
    drawn = np.minimum(drawn, 0.45)
    return tuple(tuple(float(share) for share in row / row.sum()) for row in drawn)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", ["access", "pairs"])
def test_a_pipeline_for_measured_popularity(kind: str) -> None:
    cluster, workload, layers = sites_cluster(np.random.default_rng(2), 4, 2, kind), layered_workload(6), shares(6, 1)
    plan = plan_pipeline(cluster, workload, StageWishes(stages=2, popularity=layers), time_limit_s=1.5)
    assert plan.popularity == layers
    seen = [row for stage in plan.plans for row in stage.popularity]
    assert seen == list(layers)
    assert plan.predicted.step == pytest.approx(simulate_pipeline(plan).step_s, rel=0.15)


@pytest.mark.parametrize("seed", [2, 5, 7])
def test_links_carry_what_popularity_lets_expect(seed: int) -> None:
    plan = random_pipeline(seed, least_stages=2)
    layers = shares(plan.workload.model.num_layers, seed)
    skewed = build(PipelinePlan, plan.model_dump(mode="json") | {"popularity": layers}, "pipeline")
    found, expected = simulate_pipeline(skewed).result.link_bytes, pipeline_link_bytes(skewed)
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-9)
    # Tokens travel inside these stages, to other ranks than if experts were alike.
    assert not np.allclose(pipeline_link_bytes(plan), expected, rtol=1e-3)
    assert costed(plan).times.step_s != costed(skewed).times.step_s
    with pytest.raises(ConfigError, match=r"popularity: .* layers, the model has"):
        build(PipelinePlan, plan.model_dump(mode="json") | {"popularity": (*layers, layers[0])}, "pipeline")


def test_prices_and_popularity_do_not_go_together() -> None:
    cluster = sites_cluster(np.random.default_rng(2), 4, 2, "even")
    priced = cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"price": 1.0})})
    with pytest.raises(UserError, match=r"--stages: prices \(--objective, --budget\) with measured popularity"):
        plan_pipeline(priced, layered_workload(6), StageWishes(popularity=shares(6, 1), goal=Goal(objective=Objective.DOLLARS)))
