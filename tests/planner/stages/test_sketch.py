"""Sketched steps of pipelines beside walked ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

from hybridep.config import build
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Schedule
from planner.stages.batches import number_about, unevenness
from planner.stages.candidates import Candidates
from planner.stages.changes import layers_of
from planner.stages.costs import Costed, costed
from planner.stages.rules import StageRules
from planner.stages.wander import Sketch, wander
from planner.stages.wishes import StageWishes


def candidates_for(plan: PipelinePlan) -> Candidates:
    rules = StageRules(plan.cluster, plan.workload.model.num_experts, None)
    return Candidates(plan.cluster, plan.workload, plan.schedule, StageWishes(codecs=plan.codecs), rules)


def best_of(candidates: Candidates, plan: PipelinePlan, micro_batches: int) -> Costed | None:
    """The plan's stages with the best of a few placements in each."""
    found = candidates.of(plan.groups, layers_of(plan), micro_batches)
    return found and costed(found.plan, found.inside)


def sketched(candidates: Candidates, plan: PipelinePlan) -> float:
    return candidates.sketch_s(plan.groups, layers_of(plan), plan.micro_batches, plan.ahead)


SLOWLY = {"coding": {"tokens": {"int8": {"encode": "0.5 GB/s", "decode": "0.5 GB/s"}}}}


@pytest.mark.turns(2)
@pytest.mark.parametrize("codecs", [{}, {"dc": {"activations": "int8"}}], ids=["exact", "coded"])
def test_sketches_are_near_what_is_walked(codecs: dict[str, Any]) -> None:
    ratios = []
    for seed in range(30):
        data = random_pipeline(seed, least_stages=2).model_dump(mode="json") | {"codecs": codecs}
        data["cluster"]["gpu"] |= SLOWLY
        plan = build(PipelinePlan, data, "pipeline")
        candidates = candidates_for(plan)
        if (found := best_of(candidates, plan, plan.micro_batches)) is not None:
            ratios.append(sketched(candidates, found.plan) / found.times.step_s)
    assert len(ratios) >= 25
    assert min(ratios) > 0.9 and max(ratios) < 1.3
    assert abs(np.median(ratios) - 1) < 0.02


@pytest.mark.parametrize("seed", range(6))
def test_other_micro_batches_lie_on_a_line(seed: int) -> None:
    plan = random_pipeline(seed, least_stages=2)
    candidates = candidates_for(plan)
    possible = unevenness(plan.workload, plan.cluster, plan.groups)
    # Timed with the first and with the smallest micro-batches; the others are between, or larger.
    for times in (4, 2, 1, 8, 0.5):
        number = number_about(possible, times * len(plan.stages))
        if (found := best_of(candidates, plan, number)) is not None:
            assert sketched(candidates, found.plan) == pytest.approx(found.times.step_s, rel=0.3)


THREE = Sketch(((0, 1), (2,), (3, 4)), (3, 2, 1), 6, 2)


def wandered(
    seed: int,
    until_s: float = np.inf,
    dense: int = 0,
    stages: int | None = None,
    start: Sketch = THREE,
) -> tuple[Candidates, Sketch, list[Sketch]]:
    cluster = sites_cluster(np.random.default_rng(seed), 5, 2, "pairs")
    workload = layered_workload(6, micro_batches=3)
    if dense:
        model = workload.model.model_copy(update={"num_dense_layers": dense, "dense_ffn_size": 512})
        workload = workload.model_copy(update={"model": model})
    rules, wishes = StageRules(cluster, workload.model.num_experts, None), StageWishes(stages=stages)
    candidates = Candidates(cluster, workload, Schedule(), wishes, rules)
    return candidates, start, wander(candidates, start, 5, np.random.default_rng(0), until_s)


def test_wandering_meets_pipelines_that_are_possible_and_faster() -> None:
    candidates, start, met = wandered(3, dense=2)
    assert len(met) == 5 and start not in met
    for one in met:
        assert sorted(site for group in one.path for site in group) == list(range(5))
        assert sum(one.layers) == 6 and min(one.layers) >= 1 and one.layers[0] >= 3
        assert candidates.of(one.path, one.layers, one.micro_batches) is not None
    seconds = [candidates.sketch_s(*one) for one in met]
    assert seconds == sorted(seconds) and seconds[0] < 0.9 * candidates.sketch_s(*start)
    assert len({(one.path, one.micro_batches) for one in met}) == 5
    assert wandered(3, dense=2)[2] == met


def test_stages_split_and_join_unless_their_number_is_given() -> None:
    alone = Sketch(((0,), (1,), (2,), (3,), (4,)), (2, 1, 1, 1, 1), 6, 2)
    split, joined, given = ([wandered(seed, **how)[2] for seed in range(3)] for how in ({}, {"start": alone}, {"stages": 3}))
    assert max(len(one.path) for met in split for one in met) > 3
    assert min(len(one.path) for met in joined for one in met) < 5
    assert {len(one.path) for met in given for one in met} == {3}


def test_wandering_ends_in_time() -> None:
    assert wandered(3, until_s=-np.inf)[2] == []


def test_the_busiest_sites_are_at_the_busiest_link_or_in_the_busiest_stage() -> None:
    seen = set()
    for seed in range(20):
        plan = random_pipeline(seed, least_stages=2)
        found = costed(plan)
        busy, inside = found.times.busiest_sites, plan.cluster.ranks_per_site
        works = [one.times.busy_s(plan.micro_batches) for one in found.inside]
        by_work = max(works) > found.times.busiest_link_s
        seen.add(by_work)
        if by_work:
            assert busy == set((plan.ranks[int(np.argmax(works))] // inside).tolist())
        else:
            assert 1 <= len(busy) <= 2 and busy <= set(range(plan.cluster.sizes[0]))
    assert seen == {True, False}
