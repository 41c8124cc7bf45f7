"""Pipelines that are to be cheap: what a step costs, bytes and ranks, and what the search does about it."""

from __future__ import annotations

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

from hybridep.config import build
from hybridep.errors import InfeasibleError, UserError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Objective
from hybridep.topology import Cluster, cluster_data
from planner import StageWishes, plan_pipeline, plan_pipelines
from planner.goal import Goal
from planner.stages.bound import least_s, least_usd
from planner.stages.costs import costed, simulated_usd

CHEAPEST = Goal(objective=Objective.DOLLARS)


def priced(cluster: Cluster, seed: int, rent: str = "2 $/h") -> Cluster:
    """Each site's bytes, or each pair's, at another price."""
    rng, data = np.random.default_rng(seed), cluster_data(cluster)
    for one in data["links"] if cluster.links else data["sites"]:
        one["egress"] = f"{10 ** rng.uniform(-3, 0):.5f} $/GB"
    data["gpu"]["price"] = rent
    return build(Cluster, data, "sites")


@pytest.mark.parametrize("seed", range(12))
def test_a_step_costs_its_bytes_and_its_ranks(seed: int) -> None:
    plan = random_pipeline(seed, least_stages=2)
    plan = build(PipelinePlan, plan.model_dump(mode="json") | {"cluster": priced(plan.cluster, seed)}, "pipeline")
    found = costed(plan)
    # What stages send inside and between them, each counted by itself, is what all links together carry.
    assert found.step_usd == pytest.approx(simulated_usd(plan, found.times.step_s), rel=1e-9)
    assert least_usd(plan.cluster, plan.workload, least_s(plan.cluster, plan.workload)) < found.step_usd
    assert found.egress_usd > 0
    free = costed(random_pipeline(seed, least_stages=2))
    assert free.step_usd == 0 and free.times.step_s == found.times.step_s


@pytest.mark.turns(4)
@pytest.mark.parametrize("kind", ["pairs", pytest.param("access", marks=pytest.mark.slow)])
def test_the_cheapest_pipeline_costs_no_more_than_the_fastest(kind: str) -> None:
    cluster = priced(sites_cluster(np.random.default_rng(3), 5, 2, kind), 3, rent="0.01 $/h")
    workload = layered_workload(6)
    fastest = plan_pipeline(cluster, workload, time_limit_s=5)
    cheapest = plan_pipeline(cluster, workload, StageWishes(goal=CHEAPEST), time_limit_s=5)
    assert fastest.prediction is not None and fastest.prediction.cost is not None
    assert cheapest.prediction is not None and cheapest.prediction.cost is not None and cheapest.solver is not None
    # Ranks cost next to nothing here, so bytes go where they are cheap.
    assert cheapest.prediction.cost < 0.9 * fastest.prediction.cost
    assert cheapest.solver.minimised is Objective.DOLLARS and cheapest.solver.cost_bound is not None
    assert cheapest.solver.cost_bound < cheapest.prediction.cost
    budget = 0.5 * (cheapest.prediction.cost + fastest.prediction.cost)
    within = plan_pipelines(cluster, workload, StageWishes(goal=Goal(budget_usd=budget)), 3, time_limit_s=5)[0]
    assert within.prediction is not None and within.prediction.cost is not None and within.prediction.cost <= budget * (1 + 1e-5)
    assert within.prediction.step >= fastest.prediction.step * (1 - 1e-3)
    assert within.solver is not None and within.solver.budget == pytest.approx(budget)


def test_a_budget_that_nothing_keeps_is_named() -> None:
    cluster = priced(sites_cluster(np.random.default_rng(3), 4, 1, "access"), 3)
    with pytest.raises(InfeasibleError, match=r"costs at most .* per step: the cheapest costs .*; raise --budget"):
        plan_pipeline(cluster, layered_workload(4), StageWishes(goal=Goal(budget_usd=1e-9)), time_limit_s=1)
    with pytest.raises(UserError, match="nothing has a price"):
        plan_pipeline(sites_cluster(np.random.default_rng(3), 4, 1, "even"), layered_workload(4), StageWishes(goal=CHEAPEST))
