"""Sites that may change places: which those are, and that a search looks at no two pipelines that differ in nothing else."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from stage_cases import all_groups, layered_workload, sites_cluster

from hybridep.config import build
from hybridep.pipeline import PipelinePlan
from hybridep.topology import Cluster
from planner import StageWishes, plan_pipeline, sites_that_pay
from planner.constraints import Constraints
from planner.stages import fewer, sketch
from planner.stages.changes import changed
from planner.stages.kinds import Kinds, kinds_of
from planner.stages.pipelines import candidates_of
from planner.stages.sketch import Sketches


def cluster_of(sites: list[dict[str, Any]], kind: str = "even") -> Cluster:
    """``sites``: what is said of each beside its name."""
    given = sites_cluster(np.random.default_rng(0), len(sites), 2, kind).model_dump(mode="json", exclude_none=True)
    named = [site | more for site, more in zip(given["sites"], sites, strict=True)]
    return build(Cluster, given | {"sites": named}, "kinds")


@pytest.mark.parametrize(
    "other",
    [
        {"up": "2 Gbps"},
        {"down": "2 Gbps"},
        {"egress": "0.05 USD/GB"},
        {"tokens": 2.0},
        {"experts": 0.0},
        {"gpu": {"memory": "40 GiB"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_sites_are_told_apart_by(other: dict[str, Any]) -> None:
    assert kinds_of(cluster_of([{}, other, {}, other]), ruled=False).of_site == (0, 1, 0, 1)


def test_rules_and_different_links_tell_all_apart() -> None:
    every, four = (0, 1, 2, 3), [dict[str, Any]()] * 4
    assert kinds_of(cluster_of(four), ruled=False).of_site == (0, 0, 0, 0)
    assert kinds_of(cluster_of(four, "pairs"), ruled=False).of_site == every
    assert kinds_of(cluster_of(four), ruled=True).of_site == every
    rule = build(Constraints, {"rules": [{"name": "one", "kind": "no_link", "sites": ["s0"], "to": ["s1"]}]}, "rules")
    wishes = StageWishes(constraints=rule)
    assert candidates_of(cluster_of(four), layered_workload(4), wishes).kinds.of_site == every


def test_pods_of_a_site_are_alike_and_sites_with_the_same_ways() -> None:
    given = cluster_of([{}] * 3).model_dump(mode="json", exclude_none=True)
    given["sites"][1]["pods"] = 3
    given["levels"][0]["pods"] = {"bandwidth": "10 Gbps", "latency": "0.1 ms"}
    assert kinds_of(build(Cluster, given, "pods"), ruled=False).of_site == (0, 1, 1, 1, 0)
    pairs = cluster_of([{}] * 4, "pairs").model_dump(mode="json", exclude_none=True)
    way = {"bandwidth": "1 Gbps", "latency": "1 ms"}
    alike = [{"src": f"s{a}", "dst": f"s{b}", **way} for a, b in permutations(range(4), 2)]
    assert kinds_of(build(Cluster, pairs | {"links": alike}, "pairs"), ruled=False).of_site == (0, 0, 0, 0)
    for key, value in {"bandwidth": "2 Gbps", "latency": "2 ms", "egress": "0.05 USD/GB"}.items():
        one = [link | ({key: value} if link["src"] == "s1" and link["dst"] == "s3" else {}) for link in alike]
        assert kinds_of(build(Cluster, pairs | {"links": one}, "pairs"), ruled=False).of_site == (0, 1, 0, 2)
        # There and back: then these two may change places, and so may the others.
        both = [link | ({key: value} if {link["src"], link["dst"]} == {"s1", "s3"} else {}) for link in alike]
        assert kinds_of(build(Cluster, pairs | {"links": both}, "pairs"), ruled=False).of_site == (0, 1, 0, 1)
    for carries, of_site in (({"s1 -> s3": 1.0}, (0, 1, 0, 2)), ({"s1 -> s3": 0.5, "s3 -> s1": 0.5}, (0, 1, 0, 1))):
        trunk = {"name": "cable", "bandwidth": "1 Gbps", "carries": carries}
        for links in ([], alike):
            assert kinds_of(build(Cluster, pairs | {"links": links, "trunks": [trunk]}, "pairs"), ruled=False).of_site == of_site
    ring = [link | ({"latency": "2 ms"} if (int(link["src"][1]) - int(link["dst"][1])) % 4 == 1 else {}) for link in alike]
    assert kinds_of(build(Cluster, pairs | {"links": ring}, "pairs"), ruled=False).of_site == (0, 1, 2, 3)


def test_a_path_is_settled_to_one_of_all_that_are_the_same() -> None:
    kinds = Kinds((0, 1, 0, 1, 1))
    settled = {kinds.settled(path) for path in all_groups(5)}

    def of_kinds(path: tuple[tuple[int, ...], ...]) -> tuple[list[int], ...]:
        return tuple(sorted(kinds.of_site[site] for site in group) for group in path)

    for path in all_groups(5):
        assert of_kinds(kinds.settled(path)) == of_kinds(path)
        assert sorted(site for group in kinds.settled(path) for site in group) == [0, 1, 2, 3, 4]
        assert kinds.settled(kinds.settled(path)) == kinds.settled(path)
    for one, other in combinations(settled, 2):
        assert of_kinds(one) != of_kinds(other)


def test_changes_are_all_but_for_sites_of_a_kind() -> None:
    path, layers = ((0, 1), (2,), (3, 4)), [2, 1, 2]
    alone, kinds = Kinds((0, 1, 2, 3, 4)), Kinds((0, 0, 1, 0, 1))
    every = {other for other, given in changed(path, layers, alone) if given is None}
    some = [other for other, given in changed(path, layers, kinds) if given is None]
    assert set(some) - {path} == {kinds.settled(other) for other in every} - {path}
    assert len(some) == len(set(some)) < len(every)


def test_a_search_sketches_no_pipeline_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[Any, ...]]()
    sketched = Sketches._step_s

    def noted(self: Sketches, path: Any, layers: Any, micro_batches: int, ahead: int) -> float:
        seen.append((tuple(map(len, path)), layers, micro_batches, ahead))
        return sketched(self, path, layers, micro_batches, ahead)

    monkeypatch.setattr(sketch.Sketches, "_step_s", noted)
    plan_pipeline(cluster_of([{}] * 5), layered_workload(6), time_limit_s=2)
    assert len(seen) > 100
    assert len(set(seen)) == len(seen)


def test_no_sites_are_tried_that_are_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[tuple[str, ...]]()
    planned = fewer.plan_pipeline

    def noted(cluster: Cluster, *asked: Any, time_limit_s: float, **more: Any) -> PipelinePlan:
        tried.append(cluster.site_names)
        return planned(cluster, *asked, time_limit_s=min(time_limit_s, 0.3), **more)

    monkeypatch.setattr(fewer, "plan_pipeline", noted)
    slow, gpu = {"up": "0.2 Gbps"}, {"gpu": {"throughput": "0.3 TFLOPS"}}
    cluster = cluster_of([one | gpu for one in (slow, {}, {}, slow, {})])
    assert sites_that_pay(cluster, layered_workload(4, micro_batch_size=10), time_limit_s=9).sites == ("s1", "s2", "s4")
    like = [(sum(site in {"s0", "s3"} for site in sites), len(sites)) for sites in tried if len(sites) < 5]
    assert set(like) == {(0, 2), (0, 3), (1, 3), (1, 4)}
    assert len(set(like)) == len(like)
    # What is left of the time is for all sites.
    assert len(tried) - len(like) == 3
