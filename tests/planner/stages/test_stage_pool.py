"""Pipelines to switch between: the same stages in all of them, and near the best of all that keep these at any rate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from stage_cases import random_pipeline

from hybridep.config import build
from hybridep.errors import UserError
from hybridep.pipeline import PipelinePlan, possible_micro_batches
from planner import PooledPlan, StageWishes, pipeline_pool
from planner.difference import scaled
from planner.pool import factors
from planner.stages import pool, search
from planner.stages.costs import costed, expected_over
from planner.stages.inside import Store
from planner.stages.within_loss import choices, recoded

pytestmark = pytest.mark.timeout(120)
WIDEST = 16.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without searches inside stages, which go by the clock, and at fewer factors."""
    monkeypatch.setattr(search, "searched", lambda *_, **__: None)
    monkeypatch.setattr(pool, "PLANNED_AT", 3)
    monkeypatch.setattr(pool, "_LOOKED_AT", 9)


def at(plan: PipelinePlan, factor: float) -> float:
    return expected_over(plan, scaled(plan.cluster, factor))


def pool_of(held: PipelinePlan, wishes: StageWishes | None = None) -> list[PooledPlan[PipelinePlan]]:
    return pipeline_pool(held, wishes, widest=WIDEST, time_limit_s=60.0)


def tight(held: PipelinePlan) -> PipelinePlan:
    """With hardly more memory than it takes."""
    gpu = held.cluster.gpu.model_copy(update={"memory": costed(held).fullest.fullest_bytes * 1.05})
    return held.at_rates(held.cluster.model_copy(update={"gpu": gpu}))


def every_with_its_stages(held: PipelinePlan) -> Iterator[PipelinePlan]:
    """All numbers of micro-batches, some depths, and domains of one or all in all stages, that fit."""
    numbers = possible_micro_batches(held.workload, held.cluster, held.groups)
    for number, ahead, sites, ranks in product(numbers, (1, 2, 4, 8), (False, True), (False, True)):
        stages = []
        for stage in held.stages:
            domains = {"dc": len(stage.sites) if sites else 1, "gpu": held.cluster.sizes[1] if ranks else 1}
            group = {"first_layer": 0, "num_layers": stage.layers[0].num_layers, "domains": domains, "migration": {}}
            stages.append({"sites": stage.sites, "num_layers": stage.num_layers, "layers": [group]})
        data: dict[str, Any] = {"cluster": held.cluster, "workload": held.workload, "micro_batches": number}
        plan = build(PipelinePlan, data | {"ahead": ahead, "stages": stages}, "pipeline")
        if costed(plan).fits:
            yield plan


@pytest.mark.turns(6)
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_near_the_best_of_all_with_the_same_stages(seed: int) -> None:
    held = random_pipeline(seed, least_stages=2)
    held = tight(held) if seed == 1 else held
    made, every = pool_of(held), list(every_with_its_stages(held))
    for factor in (1 / WIDEST, WIDEST):
        best_s = min(at(plan, factor) for plan in every)
        assert min(at(one.plan, factor) for one in made) <= best_s * 1.01 < at(held, factor)


@pytest.mark.turns(3)
def test_each_pays_in_its_range_and_nothing_moves() -> None:
    held = tight(random_pipeline(1, least_stages=2))
    made = pool_of(held)
    assert len(made) > 1 and made[0].pays_from == pytest.approx(1 / WIDEST) and made[-1].pays_to == pytest.approx(WIDEST)
    for before, after in pairwise(made):
        assert before.pays_to == after.pays_from
        assert at(before.plan, before.pays_to) == pytest.approx(at(after.plan, before.pays_to), rel=1e-3)
    for factor in factors(WIDEST, 9):
        own = next(one.plan for one in made if one.pays_from <= factor <= one.pays_to)
        assert at(own, factor) <= min(at(plan, factor) for plan in (held, *(one.plan for one in made))) * (1 + 1e-9)
    for one in made:
        found = costed(one.plan)
        assert found.fits and one.memory_bytes == found.fullest.fullest_bytes <= held.cluster.gpu.memory
        assert one.step_s == found.times.step_s == pytest.approx(one.plan.predicted.step)
        assert one.plan.cluster == held.cluster and one.begins_bytes == 0
        assert [(stage.sites, stage.num_layers) for stage in one.plan.stages] == [
            (stage.sites, stage.num_layers) for stage in held.stages
        ]
        for stage, own in zip(one.plan.plans, held.plans, strict=True):
            for _, _, placement in stage.each_layer():
                assert (placement.home == own.placements[0].home).all()
    assert [one.plan.digest for one in pool_of(held)] == [one.plan.digest for one in made]


@pytest.mark.turns(4)
def test_codecs_of_each_are_those_that_are_best_within_the_loss() -> None:
    held, most = random_pipeline(6, least_stages=2), 0.005
    exact, coded = pool_of(held), pool_of(held, StageWishes(max_loss=most))
    for place, factor in ((0, 1 / WIDEST), (-1, WIDEST)):
        best_s = at(coded[place].plan, factor)
        # What was found without loss, with all codecs that are permitted.
        cluster = scaled(held.cluster, factor)
        found = costed(exact[place].plan.at_rates(cluster))
        every = [recoded(found, codecs, Store()) for codecs in choices(cluster, held.workload, most)]
        assert best_s <= min(one.times.step_s for one in every if one is not None) * 1.01 < found.times.step_s
    for one in coded:
        gates = [gate for codecs in one.plan.codecs.values() for gate in codecs.gates.values()]
        assert gates and sum(max(gate.relative, 0.0) for gate in gates) <= most and costed(one.plan).fits


def test_an_interrupt_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "search_kept", interrupted)
    held = random_pipeline(0, least_stages=2)
    [only] = pool_of(held)
    assert only.plan.digest == held.digest and (only.pays_from, only.pays_to) == (1 / WIDEST, WIDEST)
    with pytest.raises(UserError, match="a factor above 1"):
        pipeline_pool(held, widest=1.0, time_limit_s=1.0)
