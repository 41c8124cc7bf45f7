"""What to buy next for a pipeline: each upgrade costed by hand, and what planning anew makes of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster, uneven_cluster

from hybridep.config import build
from hybridep.errors import UserError
from hybridep.pipeline import PipelinePlan, pipeline_link_bytes
from hybridep.topology import Cluster
from hybridep.units import Dimension, exact
from planner import StageWishes, plan, plan_pipeline
from planner import upgrades as upgrades_without_stages
from planner.constraints import Constraints
from planner.sensitivity import Upgrade
from planner.stages import search
from planner.stages import upgrades as upgrades_of_stages
from planner.stages.costs import costed
from planner.stages.pipelines import search_on
from planner.stages.upgrades import of_either_kind, pipeline_upgrades, searched_on

pytestmark = [pytest.mark.timeout(120), pytest.mark.turns(3)]


TWO = StageWishes(stages=2)


@pytest.fixture(scope="module")
def found() -> PipelinePlan:
    return plan_pipeline(uneven_cluster(3, 4, 2), layered_workload(8), TWO, time_limit_s=60)


@pytest.fixture(scope="module")
def upgrades(found: PipelinePlan) -> list[Upgrade]:
    return pipeline_upgrades(found, TWO, top=2)


def step_s(plan: PipelinePlan) -> float:
    return costed(plan).times.step_s


def with_double(plan: PipelinePlan, name: str) -> PipelinePlan:
    """The plan as a file would have it whose cluster had bought that."""
    cluster, data = plan.cluster, copy.deepcopy(plan.model_dump(mode="json", exclude={"prediction", "solver"}))
    rates = {link.name: link.bandwidth_bytes_per_s for link in cluster.link_table}
    kind, *words = name.split()
    if kind in ("up", "down"):
        site = next(one for one in data["cluster"]["sites"] if one["name"] == words[-1])
        site[kind] = exact(2 * rates[f"{words[-1]} {kind}"], Dimension.BANDWIDTH)
    elif kind == "link":
        link = next(one for one in data["cluster"]["links"] if [one["src"], "->", one["dst"]] == words)
        link["bandwidth"] = exact(2 * rates[" ".join(words)], Dimension.BANDWIDTH)
    elif kind == "trunk":
        trunk = next(one for one in data["cluster"]["trunks"] if one["name"].removeprefix("trunk ") == " ".join(words))
        trunk["bandwidth"] = exact(2 * rates[trunk["name"]], Dimension.BANDWIDTH)
    else:
        data["cluster"]["gpu"]["memory"] = exact(2 * cluster.gpu.memory, Dimension.SIZE)
    made = build(PipelinePlan, data, "bought")
    assert made.cluster != cluster
    return made


def test_upgrades_gain_what_they_say(found: PipelinePlan, upgrades: list[Upgrade]) -> None:
    own_s = step_s(found)
    assert [one.gain_s for one in upgrades] == sorted((one.gain_s for one in upgrades), reverse=True)
    sorts = [one.name.split()[0] for one in upgrades]
    assert {sort: sorts.count(sort) for sort in sorts} == {"up": 2, "down": 2, "link": 2, "memory": 1}
    for one in upgrades:
        assert one.as_it_is_s == pytest.approx(min(step_s(with_double(found, one.name)), own_s), rel=1e-9)
        assert one.planned_anew_s <= min(one.as_it_is_s, one.present_s) and one.present_s <= own_s
        assert one.gain_s == one.present_s - one.planned_anew_s >= 0
    assert upgrades[0].gain_s > 0.01 * own_s


def test_no_other_link_brings_more_to_the_plan_as_it_is(found: PipelinePlan, upgrades: list[Upgrade]) -> None:
    names = [f"{way} link of {site}" for way in ("up", "down") for site in found.cluster.site_names]
    names += [f"link {link.src} -> {link.dst}" for link in found.cluster.links]
    told = {one.name: one.as_it_is_s for one in upgrades}
    for name in names:
        if name not in told:
            worst_s = max(as_it_is_s for other, as_it_is_s in told.items() if other.split()[0] == name.split()[0])
            assert step_s(with_double(found, name)) >= worst_s * (1 - 1e-9)


def test_of_many_links_the_busiest_are_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrades_of_stages, "_SCREENED", 1)
    monkeypatch.setattr(upgrades_of_stages, "search_on", lambda *_, **__: [])
    apart = 0
    for seed in range(8):
        plan = random_pipeline(seed, least_stages=2)
        told = {one.name for one in pipeline_upgrades(plan)}
        table = zip(plan.cluster.link_table, pipeline_link_bytes(plan), strict=True)
        busy_s = {link.name: size_bytes / link.bandwidth_bytes_per_s for link, size_bytes in table if "/" not in link.name}
        up, down = (max((name for name in busy_s if name.endswith(way)), key=busy_s.__getitem__) for way in (" up", " down"))
        assert {f"up link of {up.split()[0]}", f"down link of {down.split()[0]}"} <= told and len(told) <= 4
        apart += up.split()[0] != down.split()[0]
    assert apart


def test_no_more_changes_are_looked_at_than_said(found: PipelinePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, change = list[object](), search.Search._with_change
    monkeypatch.setattr(search.Search, "_with_change", lambda *given: looked.append(given) or change(*given))  # type: ignore[func-returns-value]
    search_on(found.cluster, [found], TWO, tries=20, looks=7)
    assert len(looked) == 7


def test_a_plan_that_does_not_fit() -> None:
    """Nothing is found that does; what it would take is told."""
    plan = random_pipeline(1, least_stages=2)
    small = plan.cluster.model_copy(update={"gpu": plan.cluster.gpu.model_copy(update={"memory": 1e6})})
    lacking = plan.at_rates(small)
    for one in pipeline_upgrades(lacking, top=1):
        assert one.present_s == pytest.approx(step_s(lacking), rel=1e-12) and one.planned_anew_s == one.as_it_is_s


@pytest.mark.turns(4)
def test_planned_anew_as_a_search_for_that_cluster_finds(found: PipelinePlan, upgrades: list[Upgrade]) -> None:
    for one in upgrades[:2]:
        cluster = with_double(found, one.name).cluster
        anew = plan_pipeline(cluster, found.workload, TWO, time_limit_s=60)
        assert one.planned_anew_s <= 1.02 * anew.predicted.step


@pytest.mark.parametrize("seed", range(4))
def test_of_any_pipeline(seed: int) -> None:
    """From a poor one, too: what is searched on without an upgrade is no worse off."""
    plan = random_pipeline(seed, least_stages=2)
    for one in pipeline_upgrades(plan, top=1):
        assert one.planned_anew_s <= one.present_s <= step_s(plan)
        assert one.as_it_is_s == pytest.approx(min(step_s(with_double(plan, one.name)), step_s(plan)), rel=1e-9)


def test_more_memory_where_it_is_short() -> None:
    """Stages then run as far ahead as with all the room that they could use."""
    workload, wishes = layered_workload(8, ffn=1024, micro_batches=4), StageWishes(stages=4)
    roomy = sites_cluster(np.random.default_rng(2), 4, 2, "even", throughput="1 TFLOPS")
    most = plan_pipeline(roomy, workload, wishes, time_limit_s=60)
    memory = 0.6 * costed(most).fullest.fullest_bytes
    tight = roomy.model_copy(update={"gpu": roomy.gpu.model_copy(update={"memory": memory})})
    plan = plan_pipeline(tight, workload, wishes, time_limit_s=60)
    told = next(one for one in pipeline_upgrades(plan, top=1) if one.name == "memory of every rank")
    assert told.as_it_is_s == pytest.approx(step_s(plan)) and told.gain_s > 0.1 * told.present_s
    assert told.planned_anew_s == pytest.approx(most.predicted.step, rel=0.02)


@pytest.mark.turns(2)
def test_trunks_are_bought_where_sites_have_pods() -> None:
    data = sites_cluster(np.random.default_rng(0), 3, 1, "access").model_dump(mode="json", exclude_none=True)
    data["levels"][0]["pods"] = {"bandwidth": "5 Gbps", "latency": "0.1 ms"}
    data["sites"][0]["pods"] = 2
    cluster = build(Cluster, data, "pods")
    plan = plan_pipeline(cluster, layered_workload(4), time_limit_s=60)
    told = {one.name: one for one in pipeline_upgrades(plan, top=2)}
    assert any(name.startswith("trunk") for name in told) and not any("pod" in name for name in told)
    for name, one in told.items():
        if name.startswith("trunk"):
            own = step_s(with_double(plan, name))
            assert one.as_it_is_s <= step_s(plan) and own >= one.as_it_is_s * (1 - 1e-9)


def test_what_is_searched_on_fits_and_costs_what_it_says() -> None:
    started = random_pipeline(3, least_stages=2)
    every = search_on(started.cluster, [started], StageWishes(), 5, tries=20, looks=500)
    assert 1 < len(every) <= 5 and min(one.times.step_s for one in every) <= step_s(started)
    for one in every:
        again = build(PipelinePlan, one.plan.model_dump(mode="json"), "again")
        assert one.fits and step_s(again) == pytest.approx(one.times.step_s, rel=1e-9)


def test_what_is_found_without_an_upgrade_is_told_where_it_is_better(found: PipelinePlan, upgrades: list[Upgrade]) -> None:
    poor = random_pipeline(3, least_stages=2)
    search = searched_on(poor)
    assert search.better is not None
    again = build(PipelinePlan, search.better.model_dump(mode="json"), "again")
    assert again.predicted.step == pytest.approx(step_s(again)) and step_s(again) < 0.999 * step_s(poor)
    assert step_s(again) == min(one.times.step_s for one in search.found) and again.solver is not None
    assert again.solver.bound <= again.solver.objective == again.predicted.step
    # From what it found on upgrades are told as from a plan that was written so.
    for one in pipeline_upgrades(search.better, top=1, present=search):
        assert one.present_s == again.predicted.step
        assert one.as_it_is_s == pytest.approx(min(step_s(with_double(search.better, one.name)), one.present_s), rel=1e-9)
    # What is as good as the plan is not called better.
    assert searched_on(found, TWO).better is None
    assert pipeline_upgrades(found, TWO, top=2, present=searched_on(found, TWO)) == upgrades


@pytest.mark.turns(2)
def test_fresh_ones_have_other_numbers_of_stages() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 4, 2, "pairs"), layered_workload(8)
    poor = plan_pipeline(cluster, workload, StageWishes(stages=2), time_limit_s=2)
    best_s = plan_pipeline(cluster, workload, time_limit_s=20).predicted.step
    for stages, fresh in ((None, 0), (None, 16), (2, 16)):
        [found] = search_on(cluster, [poor], StageWishes(stages=stages), tries=20, looks=500, fresh=fresh)
        if stages is None and fresh:
            assert found.times.step_s < 0.9 * poor.predicted.step and found.times.step_s == pytest.approx(best_s, rel=0.05)
        assert (len(found.plan.stages) == 2) == (stages == 2 or not fresh)


def test_what_is_searched_on_keeps_rules() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(4), 4, 1, "pairs"), layered_workload(6)
    rules = build(Constraints, {"rules": [{"name": "r", "kind": "forbid", "sites": ["s0"], "experts": "0-3"}]}, "rules")
    wishes = StageWishes(constraints=rules)
    plan = plan_pipeline(cluster, workload, wishes, time_limit_s=5)
    # At other rates another plan is better, so something is changed.
    other = sites_cluster(np.random.default_rng(5), 4, 1, "pairs")
    every = search_on(other, [plan], wishes, 9, tries=20, looks=500)
    assert any(one.plan.stages != plan.stages for one in every)
    for one in every:
        for stage in one.plan.plans:
            if "s0" in stage.cluster.site_names:
                site = stage.cluster.site_names.index("s0")
                for _, _, placement in stage.each_layer():
                    assert (placement.serve[0][:, :4] != site).all()


def test_one_site_has_nothing_to_buy() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(0), 1, 1, "even"), layered_workload(2)
    layers = [{"first_layer": 0, "num_layers": 2, "domains": {"dc": 1, "gpu": 1}, "migration": {}}]
    stages = [{"sites": ["s0"], "num_layers": 2, "layers": layers}]
    data = {"cluster": cluster, "workload": workload, "micro_batches": 1, "stages": stages}
    with pytest.raises(UserError, match="between sites"):
        pipeline_upgrades(build(PipelinePlan, data, "one"))


@pytest.mark.parametrize(
    ("in_stages", "memory", "throughput", "layers", "ffn"),
    [(False, "220 MB", "30 TFLOPS", 3, 1024), (True, "96 MB", "0.01 TFLOPS", 4, 256)],
)
def test_more_memory_may_be_for_a_plan_of_the_other_kind(
    in_stages: bool, memory: str, throughput: str, layers: int, ffn: int
) -> None:
    """Stages that have room only then; or none, where they are slower but had room already."""
    cluster, roomy = (
        sites_cluster(np.random.default_rng(0), 2, 1, "access", memory=one, throughput=throughput)
        for one in (memory, f"{2 * int(memory.split()[0])} MB")
    )
    workload = layered_workload(layers, ffn=ffn, micro_batches=1 + in_stages)
    if in_stages:
        staged = plan_pipeline(cluster, workload, time_limit_s=1)
        told = pipeline_upgrades(staged)
        either = of_either_kind(staged, told, StageWishes())
        anew_s = plan(roomy, workload, time_limit_s=1).predicted.expected_s
    else:
        found = plan(cluster, workload, time_limit_s=1)
        told = upgrades_without_stages(found)
        either = of_either_kind(found, told, StageWishes())
        anew_s = plan_pipeline(roomy, workload, time_limit_s=1).predicted.expected_s
    [before], [after] = ([one for one in each if one.name == "memory of every rank"] for each in (told, either))
    assert after.planned_anew_s == pytest.approx(anew_s, rel=0.01) and after.planned_anew_s < 0.97 * before.planned_anew_s
    assert after.gain_s == after.present_s - after.planned_anew_s and after.present_s == before.present_s
    assert [one.gain_s for one in either] == sorted((one.gain_s for one in either), reverse=True)
    assert {one.name: one for one in either} == {one.name: one for one in told} | {after.name: after}
