"""Sketched steps of pipelines beside walked ones."""

from __future__ import annotations

import numpy as np
import pytest
from stage_cases import random_pipeline

from hybridep.pipeline import PipelinePlan
from planner.stages.candidates import Candidates, number_about, unevenness
from planner.stages.costs import Costed, costed
from planner.stages.rules import StageRules
from planner.stages.search import _groups, _layers
from planner.stages.wishes import StageWishes


def candidates_for(plan: PipelinePlan) -> Candidates:
    rules = StageRules(plan.cluster, plan.workload.model.num_experts, None)
    return Candidates(plan.cluster, plan.workload, plan.schedule, StageWishes(), rules)


def best_of(candidates: Candidates, plan: PipelinePlan, micro_batches: int) -> Costed | None:
    """The plan's stages with the best of a few placements in each."""
    found = candidates.of(_groups(plan), _layers(plan), micro_batches)
    return found and costed(found.plan, found.inside)


def sketched(candidates: Candidates, plan: PipelinePlan) -> float:
    return candidates.sketch_s(_groups(plan), _layers(plan), plan.micro_batches, plan.ahead)


def test_sketches_are_near_what_is_walked() -> None:
    ratios = []
    for seed in range(30):
        plan = random_pipeline(seed, least_stages=2)
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
    possible = unevenness(plan.workload, plan.cluster, [len(stage.sites) for stage in plan.stages])
    # Timed with the first and with the smallest micro-batches; the others are between, or larger.
    for times in (4, 2, 1, 8, 0.5):
        number = number_about(possible, times * len(plan.stages))
        if (found := best_of(candidates, plan, number)) is not None:
            assert sketched(candidates, found.plan) == pytest.approx(found.times.step_s, rel=0.3)


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
