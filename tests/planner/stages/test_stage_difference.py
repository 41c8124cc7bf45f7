"""Two plans side by side of which some are in stages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

import planner
from hybridep.baselines import Baseline, baseline_plan
from hybridep.config import build
from hybridep.errors import PlanMismatchError
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.plan import LayerGroup, Plan
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import compare_pipelines
from planner.difference import scaled, switch_at
from planner.evaluate import evaluate, expected_s
from planner.stages.costs import costed, predicted
from planner.stages.difference import SiteLayers, expected_at


def given(kind: str = "pairs") -> tuple[Cluster, Workload]:
    cluster = sites_cluster(np.random.default_rng(2), 3, 2, kind, throughput="1 TFLOPS")
    return cluster, layered_workload(6, micro_batches=2, micro_batch_size=6)


def staged(
    cluster: Cluster, workload: Workload, stages: list[tuple[tuple[str, ...], int]], micro_batches: int = 6, ahead: int = 1
) -> PipelinePlan:
    made = []
    for sites, number in stages:
        placed = LayerGroup(first_layer=0, num_layers=number, domains={"dc": 1, "gpu": 1}, migration={})
        made.append({"sites": sites, "num_layers": number, "layers": [placed]})
    data = {"cluster": cluster, "workload": workload, "micro_batches": micro_batches, "ahead": ahead, "stages": made}
    return build(PipelinePlan, data, "pipeline")


def slower_by(plan: AnyPlan, factor: float) -> float:
    """Seconds of the step of a plan read anew, for links between sites so many times as fast."""
    data = plan.model_dump(mode="json", exclude_none=True)
    data["cluster"] = scaled(plan.cluster, factor).model_dump(mode="json", exclude_none=True)
    made = build(type(plan), data, "plan")
    return costed(made).times.step_s if isinstance(made, PipelinePlan) else expected_s(made)


@pytest.mark.parametrize("seed", range(400, 406))
@pytest.mark.parametrize("factor", [0.3, 5.0])
def test_a_step_at_other_rates_is_that_of_a_plan_for_them(seed: int, factor: float) -> None:
    plan = random_pipeline(seed, least_stages=2)
    before_s = costed(plan).times.step_s
    assert expected_at(plan, factor) == pytest.approx(slower_by(plan, factor), rel=1e-12)
    assert expected_at(plan, 1.0) == pytest.approx(before_s, rel=1e-12) == costed(plan).times.step_s
    cluster = plan.cluster.model_copy(update={"levels": scaled(plan.cluster, factor).levels})
    assert plan.at_rates(cluster).plans[0].cluster.levels[0].bandwidth == cluster.levels[0].bandwidth


def test_what_moved_between_two_pipelines() -> None:
    first = staged(*given(), [(("s0",), 2), (("s1",), 2), (("s2",), 2)])
    second = staged(*given(), [(("s0", "s2"), 3), (("s1",), 3)], micro_batches=3, ahead=2)
    found = compare_pipelines(first, second)
    assert (found.stages, found.micro_batches, found.ahead, found.sites) == ((3, 2), (6, 3), (1, 2), (3, 3))
    for at, plan in enumerate((first, second)):
        cost = costed(plan)
        told = predicted(cost, {})
        assert found.step_s[at] == cost.times.step_s and found.wan_bytes[at] == told.wan_bytes
        assert found.memory_bytes[at] == cost.fullest.fullest_bytes
        assert sum(both[at] or 0.0 for both in found.parts_s.values()) == pytest.approx(cost.times.step_s)
    # Layer 3 stays at s1; layers 0 and 1 are at s2, too, layer 2 has gone from s1 to s0 and s2, and so on.
    assert found.layers_moved == 5
    assert found.sites_moved == {
        "s0": (SiteLayers(stage=0, first_layer=0, num_layers=2), SiteLayers(stage=0, first_layer=0, num_layers=3)),
        "s1": (SiteLayers(stage=1, first_layer=2, num_layers=2), SiteLayers(stage=1, first_layer=3, num_layers=3)),
        "s2": (SiteLayers(stage=2, first_layer=4, num_layers=2), SiteLayers(stage=0, first_layer=0, num_layers=3)),
    }
    same = compare_pipelines(first, first)
    assert same.switch_at == 1.0 and same.layers_moved == 0 and same.sites_moved == {}
    # A stage that only has another number has not moved.
    fewer = staged(*given(), [(("s0", "s1"), 4), (("s2",), 2)])
    assert set(compare_pipelines(first, fewer).sites_moved) == {"s0", "s1"}
    assert found.to_json()["sites_moved"]["s0"][1] == {"stage": 0, "first_layer": 0, "num_layers": 3}


def with_and_without() -> tuple[PipelinePlan, Plan]:
    cluster, workload = given("even")
    pipeline = staged(cluster, workload, [(("s0",), 2), (("s1",), 2), (("s2",), 2)])
    return pipeline, baseline_plan(cluster, workload, Baseline.FULL_GATHER)


def test_with_and_without_stages() -> None:
    pipeline, gather = with_and_without()
    found, turned = compare_pipelines(pipeline, gather), compare_pipelines(gather, pipeline)
    cost, memory = evaluate(gather)
    assert found.step_s == (costed(pipeline).times.step_s, expected_s(gather)) == turned.step_s[::-1]
    assert (found.wan_bytes[1], found.memory_bytes[1]) == (cost.wan_bytes, memory.fullest_bytes)
    assert (found.stages, found.micro_batches, found.ahead) == ((3, 1), (6, 2), (1, None)) and found.layers_moved == 6
    assert found.parts_s["stage_work"][1] is None and found.parts_s["pre_expert"][0] is None
    assert sum(both[1] or 0.0 for both in found.parts_s.values()) == pytest.approx(cost.step_s)
    assert found.sites_moved["s1"] == (
        SiteLayers(stage=1, first_layer=2, num_layers=2),
        SiteLayers(stage=None, first_layer=0, num_layers=6),
    )


@pytest.mark.turns(2)
def test_equally_fast_where_switching_pays() -> None:
    """Between the two sides of the factor the other plan is the faster one; nearer to 1 it is not."""
    found = 0
    pipeline, gather = with_and_without()
    even = pipeline.cluster, pipeline.workload
    two = staged(*even, [(("s0", "s1"), 4), (("s2",), 2)], ahead=2)
    for first, second in ((pipeline, gather), (gather, pipeline), (pipeline, two), (two, gather)):
        factor = compare_pipelines(first, second).switch_at
        if factor is None:
            for each in np.geomspace(1 / 64, 64, 13).tolist():
                steps_s = slower_by(first, each), slower_by(second, each)
                assert (steps_s[0] < steps_s[1]) == (slower_by(first, 1.0) < slower_by(second, 1.0))
            continue
        found += 1
        sides = [slower_by(first, factor * by) - slower_by(second, factor * by) for by in (0.998, 1.002)]
        assert sides[0] * sides[1] < 0
        here = slower_by(first, 1.0) - slower_by(second, 1.0)
        assert here * (sides[0] if factor > 1 else sides[1]) > 0
    assert found >= 2


def test_the_factor_nearest_to_one() -> None:
    """Between 0.6 and 1.9 times the rates the first is the faster one."""

    def steps(low: float, high: float) -> Callable[[float], float]:
        return lambda factor: 2.0 if low < factor < high else 0.5

    assert switch_at(lambda factor: 1.0, steps(0.6, 1.9), 20) == pytest.approx(0.6, rel=1e-5)
    assert switch_at(lambda factor: 1.0, steps(0.51, 1.6), 20) == pytest.approx(1.6, rel=1e-5)
    assert switch_at(lambda factor: 1.0, steps(0.01, 100.0)) is None


def test_a_plan_for_fewer_sites_and_for_other_ones() -> None:
    pipeline, _ = with_and_without()
    cluster, workload = on_sites(pipeline.cluster, pipeline.workload, {"s0", "s2"})
    fewer = staged(cluster, workload, [(("s0",), 3), (("s2",), 3)])
    for first, second in ((pipeline, fewer), (fewer, pipeline)):
        found = compare_pipelines(first, second)
        assert found.step_s == (costed(first).times.step_s, costed(second).times.step_s)
        assert found.sites == (len(first.cluster.site_names), len(second.cluster.site_names))
        assert found.sites_moved["s1"][first is pipeline] is None and found.layers_moved == 2
    alone = planner.alone(pipeline.cluster, pipeline.workload)
    assert alone is not None
    name = alone.cluster.site_name(0)
    found = compare_pipelines(alone, pipeline)
    assert found.sites == (1, 3) and found.wan_bytes[0] == 0 and found.sites_moved[name][0] is not None
    others, same = given("access")
    with pytest.raises(PlanMismatchError, match=r"the first plan.*cluster"):
        compare_pipelines(pipeline, staged(others, same, [(("s0",), 2), (("s1",), 2), (("s2",), 2)]))
    less = layered_workload(6, micro_batches=1, micro_batch_size=6)
    other = staged(pipeline.cluster, less, [(("s0",), 2), (("s1",), 2), (("s2",), 2)])
    with pytest.raises(PlanMismatchError, match="workload"):
        compare_pipelines(fewer, other)
