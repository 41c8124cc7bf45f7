"""Pipelines for rates that are not known: never worse than the one for the nominal rates, and near the best of all there are."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest
from stage_cases import every_pipeline, layered_workload, sites_cluster, uneven_cluster

from hybridep.codecs import Codecs
from hybridep.config import build
from hybridep.errors import InfeasibleError, UserError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Plan
from hybridep.topology import Cluster
from planner import StageWishes, interval_scenarios, plan_pipeline
from planner.clock import timed_by
from planner.evaluate import expected_s
from planner.sites.search import at_quantile
from planner.stages import robust
from planner.stages.bound import least_s
from planner.stages.costs import costed
from planner.stages.robust import RobustPipeline, pipeline_for_scenarios, staged_for_scenarios

pytestmark = [pytest.mark.timeout(120), pytest.mark.turns(2)]


def over(plan: PipelinePlan, scenarios: list[Cluster]) -> list[float]:
    """Its steps, as a file with each of these clusters has it."""
    data = plan.model_dump(mode="json", exclude={"prediction", "solver"})
    made = [build(PipelinePlan, data | {"cluster": one}, "scenario") for one in scenarios]
    return [costed(one).times.step_s for one in made]


def drawn(seeds: range, sites: int) -> list[Cluster]:
    return [uneven_cluster(seed, sites, 1) for seed in seeds]


@pytest.mark.turns(4)
@pytest.mark.parametrize("quantile", [1.0, 0.5])
def test_never_worse_than_the_plan_for_the_nominal_rates(quantile: float) -> None:
    nominal, *scenarios = drawn(range(4), 4)
    workload = layered_workload(6)
    with timed_by(time.process_time):
        found = pipeline_for_scenarios(nominal, workload, scenarios, quantile=quantile, time_limit_s=5)
    assert found.plan.cluster == nominal
    assert found.steps_s == pytest.approx(over(found.plan, scenarios), rel=1e-9)
    assert found.step_s == at_quantile(found.steps_s, quantile)
    # Rates of each scenario are others altogether: what suits one suits no other.
    assert found.bound_s <= found.step_s < found.nominal_step_s == at_quantile(found.nominal_steps_s, quantile)
    assert found.bound_s == pytest.approx(at_quantile([least_s(one, workload) for one in scenarios], quantile))
    assert found.plan.predicted.step == pytest.approx(over(found.plan, [nominal])[0])
    assert found.plan.solver is not None and found.plan.solver.bound == pytest.approx(least_s(nominal, workload))
    assert found.to_json()["gap"] == pytest.approx(1 - found.bound_s / found.step_s)


@pytest.mark.parametrize("quantile", [0.01, 0.4, 0.5, 0.75, 1.0])
def test_the_best_at_the_quantile_is_taken(monkeypatch: pytest.MonkeyPatch, quantile: float) -> None:
    """However few scenarios each is costed in; and what counts next is the scenario at the quantile."""
    rng, costed_in = np.random.default_rng(0), list[int]()

    def step_s(plan: Any, cluster: Any, store: object = None) -> float:
        costed_in.append(cluster)
        return float(table[plan, cluster])

    monkeypatch.setattr(robust, "expected_over", step_s)
    for _ in range(20):
        table = rng.permutation(200).reshape(25, 8).astype(float)
        choice = robust._Choice(cast(Any, range(8)), quantile, np.inf)
        choice.begin(cast(Any, 0))
        choice.consider(cast(Any, range(1, 25)))
        best = min(range(25), key=lambda plan: at_quantile(list(table[plan]), quantile))
        assert choice.plan == best and choice.steps_s == tuple(table[best])
        order = [table[best, place] for place in choice.from_quantile]
        assert order[0] == choice.step_s and sorted(choice.from_quantile) == list(range(8))
        slower = sum(step > choice.step_s for step in table[best])
        assert order[: 8 - slower] == sorted(order[: 8 - slower], reverse=True)
    assert quantile < 1 or len(costed_in) < 0.9 * 20 * 25 * 8


@pytest.mark.turns(4)
def test_near_the_best_of_all_at_the_quantile() -> None:
    nominal, *scenarios = drawn(range(10, 13), 3)
    workload = layered_workload(3, micro_batches=2, micro_batch_size=1)
    every = [plan.running_ahead(ahead) for plan in every_pipeline(nominal, workload) for ahead in (1, 4)]
    best_s = min(max(costed(plan.at_rates(one)).times.step_s for one in scenarios) for plan in every)
    with timed_by(time.process_time):
        found = pipeline_for_scenarios(nominal, workload, scenarios, time_limit_s=3)
    assert found.step_s <= best_s * 1.03


def test_all_links_at_the_lower_end_is_the_worst() -> None:
    cluster, workload = drawn(range(1), 4)[0], layered_workload(6)
    found = pipeline_for_scenarios(cluster, workload, interval_scenarios(cluster, 0.5, draws=2), time_limit_s=2)
    assert found.step_s == found.steps_s[0] == max(found.steps_s) and len(found.steps_s) == 3
    with pytest.raises(UserError, match="site s3 is not in it"):
        pipeline_for_scenarios(cluster, workload, drawn(range(1), 3))
    with pytest.raises(UserError, match="at least one"):
        pipeline_for_scenarios(cluster, workload, [])


def test_an_interrupt_leaves_the_plan_for_the_nominal_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    nominal, *scenarios = drawn(range(3), 3)
    monkeypatch.setattr(robust, "_search", interrupted)
    found = pipeline_for_scenarios(nominal, layered_workload(4), scenarios, time_limit_s=2)
    assert found.steps_s == pytest.approx(over(found.plan, scenarios), rel=1e-9) and found.step_s <= found.nominal_step_s


@pytest.mark.parametrize("what", ["least_s", "expected_over", "without_stages"])
def test_an_interrupt_beside_the_search_leaves_it_too(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """While the nominal plan is costed, while all is told at the end, and in the first look at plans without stages."""
    usual, calls = getattr(robust, what), list[object]()

    def interrupted_once(*given: Any, **more: Any) -> Any:
        calls.append(what)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return usual(*given, **more)

    monkeypatch.setattr(robust, what, interrupted_once)
    nominal, *scenarios = drawn(range(3), 3)
    if what == "without_stages":
        found = staged_for_scenarios(nominal, layered_workload(4), scenarios, StageWishes(), time_limit_s=2)
    else:
        found = pipeline_for_scenarios(nominal, layered_workload(4), scenarios, time_limit_s=2)
    assert isinstance(found.plan, PipelinePlan) and calls
    assert found.steps_s == pytest.approx(over(found.plan, scenarios), rel=1e-9) and found.step_s <= found.nominal_step_s
    if what == "expected_over":
        # No more is searched after the interrupt.
        assert len(calls) == 1 + len(scenarios) and found.steps_s == found.nominal_steps_s


@pytest.mark.parametrize("what", ["expected_over", "plan_pipelines"])
def test_an_interrupt_after_the_first_look_leaves_its_pipeline(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """While it is costed in the scenarios, and in the next search before that has a plan."""
    usual, calls, looked = getattr(robust, what), list[object](), list[PipelinePlan]()

    def interrupted_once(*given: Any, **more: Any) -> Any:
        calls.append(what)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return usual(*given, **more)

    def noted(*given: Any, **more: Any) -> PipelinePlan:
        looked.append(plan_pipeline(*given, **more))
        return looked[-1]

    monkeypatch.setattr(robust, what, interrupted_once)
    monkeypatch.setattr(robust, "plan_pipeline", noted)
    nominal, *scenarios = drawn(range(3), 3)
    found = staged_for_scenarios(nominal, layered_workload(4), scenarios, StageWishes(), time_limit_s=2)
    assert isinstance(found, RobustPipeline) and calls
    assert found.step_s <= at_quantile(over(looked[0], scenarios), 1.0) * (1 + 1e-9)
    if what == "plan_pipelines":
        # No more is searched after the interrupt.
        assert len(calls) == 1 and found.plan.stages == looked[0].stages and found.steps_s == found.nominal_steps_s


def test_an_interrupt_before_there_is_a_plan_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(robust, "without_stages", interrupted)
    cluster = sites_cluster(np.random.default_rng(0), 2, 1, "access")
    with pytest.raises(KeyboardInterrupt):
        staged_for_scenarios(cluster, layered_workload(1), interval_scenarios(cluster, 0.2), StageWishes(), time_limit_s=1)


@pytest.mark.turns(4)
@pytest.mark.parametrize(("throughput", "stages"), [("30 TFLOPS", True), ("0.01 TFLOPS", False)])
def test_with_or_without_stages(throughput: str, stages: bool) -> None:
    """Where computation is all that counts, what stages save is less than their bubble."""
    cluster = sites_cluster(np.random.default_rng(0), 2, 1, "access", throughput=throughput)
    workload, scenarios = layered_workload(4), interval_scenarios(cluster, 0.2, draws=2)
    wishes = StageWishes(codecs={"dc": build(Codecs, {"activations": "int8"}, "codecs")})
    found = staged_for_scenarios(cluster, workload, scenarios, wishes, time_limit_s=3)
    assert isinstance(found, RobustPipeline) == stages
    pipeline = pipeline_for_scenarios(cluster, workload, scenarios, wishes, time_limit_s=2)
    if isinstance(found.plan, Plan):
        steps_s = [expected_s(found.plan.model_copy(update={"cluster": one})) for one in scenarios]
        assert max(steps_s) < pipeline.step_s and not any(one.coded for one in found.plan.codecs.values())
    else:
        assert found.step_s == pytest.approx(pipeline.step_s, rel=0.01)


def test_stages_that_are_not_possible_are_left_out() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(0), 2, 1, "access"), layered_workload(1)
    scenarios = interval_scenarios(cluster, 0.2, draws=1)
    with pytest.raises(
        InfeasibleError, match=r"no number of stages is possible; 2 stages .* and 1 layer .*; plan fewer stages, or none"
    ):
        pipeline_for_scenarios(cluster, workload, scenarios, time_limit_s=1)
    told = list[str]()
    found = staged_for_scenarios(cluster, workload, scenarios, StageWishes(), time_limit_s=1, tell=told.append)
    assert isinstance(found.plan, Plan) and len(told) == 1 and "no number of stages is possible" in told[0]
    alike = ((1 / workload.model.num_experts,) * workload.model.num_experts,) * workload.model.num_moe_layers
    with pytest.raises(UserError, match="leave --routing out"):
        staged_for_scenarios(cluster, workload, scenarios, StageWishes(popularity=alike))
