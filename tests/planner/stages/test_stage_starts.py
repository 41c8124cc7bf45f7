"""Searches that go on from pipelines that are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stage_cases import layered_workload, sites_cluster

from hybridep.codecs import Codecs
from hybridep.commands import stage_choice
from hybridep.commands.sites_choice import Asked, plan_sites
from hybridep.commands.stage_choice import in_stages
from hybridep.pipeline import PipelinePlan
from hybridep.topology import Cluster
from planner import StageCache, StageWishes, plan_pipeline
from planner.stages import fewer
from planner.stages.candidates import Candidate, Candidates
from planner.stages.costs import Costed
from planner.stages.inside import Store
from planner.stages.search import Search

pytestmark = pytest.mark.timeout(120)


def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches find nothing themselves."""
    monkeypatch.setattr(Search, "_search", lambda *_: None)


def test_what_is_found_is_no_worse_than_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 5, 2, "pairs"), layered_workload(8)
    good = plan_pipeline(cluster, workload, time_limit_s=3)
    again = plan_pipeline(cluster, workload, time_limit_s=0.5, starts=[good])
    assert again.predicted.step <= good.predicted.step * (1 + 1e-9)
    slow = sites_cluster(np.random.default_rng(2), 5, 2, "pairs")
    idle(monkeypatch)
    # At the rates that are asked for, whatever those were for which it was found.
    at_those = plan_pipeline(slow, workload, starts=[good])
    assert at_those.cluster == slow and at_those.groups == good.groups
    assert at_those.predicted.step != pytest.approx(good.predicted.step, rel=0.01)


def test_no_start_has_other_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 4, 2, "pairs"), layered_workload(8)
    coded, begun, begin = StageWishes(codecs={"dc": Codecs(activations="int8")}), list[int](), Search._begin

    def noted(self: Search, starts: Sequence[PipelinePlan]) -> None:
        begun.append(len(starts))
        begin(self, starts)

    good = plan_pipeline(cluster, workload, coded, time_limit_s=1)
    monkeypatch.setattr(Search, "_begin", noted)
    assert plan_pipeline(cluster, workload, coded, time_limit_s=0.1, starts=[good]).codecs == good.codecs
    assert plan_pipeline(cluster, workload, time_limit_s=0.1, starts=[good]).codecs == {}
    assert begun == [1, 0]


def test_the_second_look_goes_on_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, planned = list[tuple[tuple[str, ...], list[PipelinePlan]]](), fewer.plan_pipeline

    def noted(cluster: Cluster, *asked: Any, starts: list[PipelinePlan], **more: Any) -> PipelinePlan:
        begun.append((cluster.site_names, starts))
        return planned(cluster, *asked, starts=starts, **more)

    known, staged = list[PipelinePlan | None](), stage_choice.in_stages

    def noted_choice(*asked: Any, **more: Any) -> stage_choice.StageChoice:
        known.append(more["known"])
        return staged(*asked, **more)

    monkeypatch.setattr(fewer, "plan_pipeline", noted)
    monkeypatch.setattr("hybridep.commands.sites_choice.in_stages", noted_choice)
    cluster = sites_cluster(np.random.default_rng(4), 3, 1, "access", throughput="0.3 TFLOPS")
    made = plan_sites(
        Asked(cluster=cluster, workload=layered_workload(4, micro_batch_size=6), wishes=StageWishes()), fewer=True, time_limit_s=4
    )
    looks = {sites: [len(starts) for own, starts in begun if own == sites] for sites, _ in begun}
    assert all(first == 0 and all(later) for first, *later in looks.values())
    assert known[0] is not None and known[0].cluster.site_names == made.asked.sites


def test_a_known_pipeline_is_one_to_choose_from_once() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 4, 2, "pairs"), layered_workload(6)
    good = plan_pipeline(cluster, workload, time_limit_s=2)
    found = in_stages(cluster, workload, time_limit_s=1, known=good)
    every = [found.plan.digest, *(other.plan.digest for other in found.others)]
    assert every.count(good.digest) == 1


def test_no_other_is_awaited_where_one_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take far longer than the limit to find a first one that fits."""
    awaited, made = list[float](), Candidates.made

    def noted(self: Candidates, numbers: Any, left_s: Any, first_by_s: float = math.inf, **more: Any) -> list[Candidate]:
        awaited.append(first_by_s)
        return made(self, numbers, left_s, first_by_s, **more)

    monkeypatch.setattr(Candidates, "made", noted)
    cluster, workload = sites_cluster(np.random.default_rng(1), 4, 2, "pairs"), layered_workload(6)
    good = plan_pipeline(cluster, workload, time_limit_s=1)
    assert awaited[0] == math.inf
    awaited.clear()
    assert plan_pipeline(cluster, workload, time_limit_s=0, starts=[good]).predicted.step <= good.predicted.step * (1 + 1e-9)
    assert awaited[0] == -math.inf


def test_later_searches_for_the_same_sites_know_what_stages_take(monkeypatch: pytest.MonkeyPatch) -> None:
    stores, run = list[tuple[tuple[str, ...], int]](), Search.run

    def noted(self: Search, *asked: Any) -> list[Costed]:
        found = run(self, *asked)
        assert self.candidates.store.placed
        kept.append(self.candidates.store)
        stores.append((self.candidates.cluster.site_names, id(self.candidates.store)))
        return found

    kept = list[Store]()  # or another one may have the same id
    monkeypatch.setattr(Search, "run", noted)
    cluster = sites_cluster(np.random.default_rng(4), 3, 1, "access", throughput="0.01 TFLOPS")
    workload = layered_workload(4, micro_batch_size=6)
    made = plan_sites(Asked(cluster=cluster, workload=workload, wishes=StageWishes()), fewer=True, time_limit_s=4)
    of_all = [store for sites, store in stores if sites == cluster.site_names]
    assert made.asked.sites == cluster.site_names and len(of_all) > 2 and len(set(of_all)) == 1
    assert len({store for sites, store in stores if sites != cluster.site_names} - set(of_all)) > 0


def test_a_cache_is_for_the_same_wishes_and_knows_no_reasons() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 4, 2, "pairs"), layered_workload(6)
    cache, coded = StageCache(), StageWishes(codecs={"dc": Codecs(activations="int8")})
    first = cache.candidates(cluster, workload, coded)
    first.lacking, first.barred, first.why = "memory", "a rule", "sequences"
    again, other = cache.candidates(cluster, workload, replace(coded)), cache.candidates(cluster, workload, StageWishes())
    assert again.store is first.store is not other.store
    assert again.reason == other.reason == "none was found in time"
