"""Why a pipeline: its neighbours are plans that cost what is said of them, and the best of their kind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from stage_cases import layered_workload, random_pipeline, sites_cluster

from hybridep.baselines import Baseline, baseline_group
from hybridep.config import build
from hybridep.pipeline import PipelinePlan, pipeline_link_bytes, possible_micro_batches
from hybridep.plan import LayerGroup, Objective, Plan
from hybridep.recompute import ALL, Recompute
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import Constraints, PipelineAlternative, PipelineExplanation, explain_pipeline
from planner.goal import Goal
from planner.plans import solver_report
from planner.stages import neighbours, schedule, sketch
from planner.stages.costs import WORTH, costed, predicted
from planner.stages.neighbours import merged, resized
from planner.stages.schedule import paced_s

pytestmark = pytest.mark.turns(2)


def lone_sites(
    seed: int = 0, *, layers: tuple[int, ...] = (3, 2, 2), ahead: int = 2, kind: str = "pairs", **model: Any
) -> PipelinePlan:
    """One rank in each stage, so that there is one way to place its experts."""
    cluster = sites_cluster(np.random.default_rng(seed), len(layers), 1, kind, throughput="0.3 TFLOPS")
    workload = layered_workload(sum(layers), micro_batch_size=8, micro_batches=4)
    if model:
        data = workload.model_dump(mode="json")
        workload = build(Workload, data | {"model": data["model"] | model}, "layers")
    return of(cluster, workload, [(f"s{stage}",) for stage in range(len(layers))], layers, ahead=ahead)


def of(
    cluster: Cluster,
    workload: Workload,
    sites: list[tuple[str, ...]],
    layers: tuple[int, ...],
    *,
    micro_batches: int | None = None,
    ahead: int = 2,
    recompute: Recompute = Recompute.NOTHING,
) -> PipelinePlan:
    """With all tokens at their experts' homes."""
    dense, stages = workload.model.num_dense_layers, []
    for place, (names, number) in enumerate(zip(sites, layers, strict=True)):
        domains = {level.name: 1 for level in cluster.levels}
        mine = number - (dense if place == 0 else 0)
        placed = LayerGroup(first_layer=0, num_layers=mine, domains=domains, migration={}, recompute=recompute)
        stages.append({"sites": names, "num_layers": number, "layers": [placed]})
    every = cluster.site_names
    groups = [[every.index(name) for name in names] for names in sites]
    number = micro_batches or possible_micro_batches(workload, cluster, groups)[-2]
    data = {"cluster": cluster, "workload": workload, "micro_batches": number, "ahead": ahead, "stages": stages}
    return build(PipelinePlan, data, "pipeline")


def again(plan: PipelinePlan) -> PipelinePlan:
    """As it is read from its file."""
    return build(PipelinePlan, plan.model_dump(mode="json", exclude_none=True), "pipeline")


def step_s(plan: PipelinePlan) -> float:
    return costed(again(plan)).times.step_s


def named(found: PipelineExplanation, words: str) -> PipelineAlternative:
    [one] = [one for one in found.alternatives if words in one.name]
    return one


def require_true(found: PipelineExplanation, plan: PipelinePlan) -> None:
    """What is told of every alternative is so of the plan that it is."""
    assert len({one.name for one in found.alternatives}) == len(found.alternatives)
    assert again(found.plan.plan).digest == again(plan).digest
    for one in (found.plan, *found.alternatives):
        assert one.plan.prediction is None and one.plan.solver is None
        cost = costed(again(one.plan))
        assert one.step_s == pytest.approx(cost.times.step_s, rel=1e-9), one.name
        assert one.memory_bytes == pytest.approx(cost.fullest.fullest_bytes) and one.fits == cost.fits
        assert sum(one.parts_s.values()) == pytest.approx(one.step_s) and one.ratio == one.step_s / found.plan.step_s
        better = one.fits and one.allowed and one.step_s < found.plan.step_s * (1 - WORTH)
        assert (one.name in found.better) == better
        assert one is found.plan or one.plan.digest != found.plan.plan.digest, one.name


@pytest.mark.parametrize("seed", range(300, 312))
def test_alternatives_are_plans_that_take_what_is_said(seed: int) -> None:
    plan = random_pipeline(seed, least_stages=2)
    found = explain_pipeline(plan)
    require_true(found, plan)
    assert all(one.allowed for one in found.alternatives) and found.to_json()["alternatives"]
    fastest = found.links[0]
    bound_by = fastest.name if fastest.busy_s > found.stage.busy_s else f"stage {found.stage.number}"
    lacking = any(one.step_s < found.plan.step_s * (1 - WORTH) for one in found.alternatives if not one.fits)
    assert found.binds == bound_by or lacking
    # The walk knows links from what passes exchange, without the counts of tokens that go before.
    busiest = {link.name: link for link in found.links}
    times = costed(plan).times
    outer = [one.name for one, is_outer in zip(plan.cluster.link_table, plan.cluster.outer_links, strict=True) if is_outer]
    most_s = max((busiest[name].busy_s for name in outer if name in busiest), default=0.0)
    if most_s == found.links[0].busy_s:
        assert most_s == pytest.approx(times.busiest_link_s, rel=1e-3)
    assert found.stage.busy_s == times.work_s == max(one.busy_s(plan.micro_batches) for one in times.stages)
    assert sum(found.memory_parts_bytes.values()) == pytest.approx(found.plan.memory_bytes)
    assert found.fullest_rank.split("/")[0] in plan.stages[found.fullest_stage].sites


@pytest.mark.parametrize("seed", range(4))
def test_of_each_kind_the_best_is_told(seed: int) -> None:
    plan = lone_sites(seed, layers=(3, 2, 2, 1))
    found = explain_pipeline(plan)
    require_true(found, plan)
    assert named(found, "1 forward ahead").step_s == pytest.approx(step_s(plan.running_ahead(1)))
    assert named(found, "3 forwards ahead").step_s == pytest.approx(step_s(plan.running_ahead(3)))
    sites, layers = [stage.sites for stage in plan.stages], tuple(stage.num_layers for stage in plan.stages)

    def other(sites: list[tuple[str, ...]], layers: list[int], micro_batches: int = plan.micro_batches) -> float:
        return step_s(of(plan.cluster, plan.workload, sites, tuple(layers), micro_batches=micro_batches))

    def exchanged(things: Any, one: int) -> Any:
        return [*things[:one], things[one + 1], things[one], *things[one + 2 :]]

    half, double = (plan.micro_batches // 2, plan.micro_batches * 2)
    for number in (half, double):
        assert named(found, f"{number} micro-batches").step_s == pytest.approx(other(sites, list(layers), number))
    best_s = min(other(exchanged(sites, one), exchanged(layers, one)) for one in range(3))
    assert named(found, "exchanged").step_s == pytest.approx(best_s)
    giver, takers = found.stage.number, [found.stage.number + side for side in (-1, 1)]
    moved_s = [
        other(sites, [number - (stage == giver) + (stage == taker) for stage, number in enumerate(layers)])
        for taker in takers
        if 0 <= taker < 4
    ]
    if layers[giver] > 1:
        assert named(found, f"a layer of stage {giver}").step_s == pytest.approx(min(moved_s))
    joined = [
        other([*sites[:one], (*sites[one], *sites[one + 1]), *sites[one + 2 :]], [*layers[:one], a + b, *layers[one + 2 :]])
        for one, (a, b) in enumerate(pairwise(layers))
    ]
    # There all tokens travel; copies may be faster, and tokens in copies' place are no slower than that.
    assert named(found, "joined").step_s <= min(joined) * (1 + 1e-9)
    assert len(named(found, "joined").plan.stages) == 3 and not any("inside" in one.name for one in found.alternatives)


def test_nothing_is_told_twice_and_what_is_not_possible_is_left_out() -> None:
    """No stage runs further ahead than there are micro-batches, none is less than one ahead, and one layer cannot be shared."""
    plan = lone_sites(layers=(1, 1), ahead=1)
    two = of(plan.cluster, plan.workload, [("s0",), ("s1",)], (1, 1), micro_batches=2, ahead=1)
    names = [one.name for one in explain_pipeline(two).alternatives]
    assert not any("ahead" in name or "layer" in name or "split" in name for name in names)
    assert {"1 micro-batch", "4 micro-batches", "stages 0 and 1 exchanged"} <= set(names)
    assert any(name.startswith("stages 0 and 1 joined") for name in names)


def test_placements_in_all_stages_and_a_large_stage_in_two() -> None:
    rng = np.random.default_rng(1)
    cluster, workload = sites_cluster(rng, 5, 2, "pairs"), layered_workload(6, micro_batches=4, micro_batch_size=6)
    plan = of(cluster, workload, [("s0", "s1", "s3"), ("s2", "s4")], (4, 2))
    found = explain_pipeline(plan)
    require_true(found, plan)
    groups = [baseline_group(stage.cluster, stage.workload, Baseline.FULL_GATHER) for stage in plan.plans]
    gathered = named(found, "all experts copied inside stages")
    assert gathered.step_s == pytest.approx(step_s(plan.with_layers([(group,) for group in groups])))
    assert not any(one.name == "tokens travel inside stages" for one in found.alternatives)
    within = named(found, "copied between a stage's sites").plan.stages
    assert [group.domains for stage in within for group in stage.layers] == [{"dc": 3, "gpu": 1}, {"dc": 2, "gpu": 1}]
    split = named(found, "stage 0 split in two").plan
    assert [len(stage.sites) for stage in split.stages] in ([1, 2, 2], [2, 1, 2]) and split.stages[2].sites == ("s2", "s4")
    assert [stage.num_layers for stage in split.stages[:2]] == [round(4 * len(one.sites) / 3) for one in split.stages[:2]]
    back = explain_pipeline(gathered.plan)
    assert named(back, "tokens travel inside stages").step_s == pytest.approx(found.plan.step_s)


def with_memory(plan: PipelinePlan, size_bytes: float) -> PipelinePlan:
    data = plan.model_dump(mode="json", exclude_none=True)
    data["cluster"]["gpu"]["memory"] = f"{int(size_bytes)} B"
    return build(PipelinePlan, data, "pipeline")


def test_memory_binds_where_activations_would_be_kept() -> None:
    roomy = lone_sites(kind="even")
    layers = tuple(stage.num_layers for stage in roomy.stages)
    plan = of(roomy.cluster, roomy.workload, [stage.sites for stage in roomy.stages], layers, recompute=Recompute.EXPERTS)
    assert named(explain_pipeline(plan), "activations kept").fits
    kept, computed = costed(roomy), costed(plan)
    assert kept.times.step_s < computed.times.step_s * (1 - WORTH)
    assert "memory" not in explain_pipeline(plan).binds
    tight = with_memory(plan, (kept.fullest.fullest_bytes + computed.fullest.fullest_bytes) / 2)
    found = explain_pipeline(tight)
    told = named(found, "activations kept")
    assert not told.fits and told.step_s == pytest.approx(kept.times.step_s)
    assert found.binds == f"memory of {kept.fullest.fullest_name}" and told.name not in found.better
    # With fewer layers that compute again it fits, which an even plan does not know: so alternatives may be faster.
    require_true(found, tight)


def test_the_rank_that_lacks_memory_is_not_the_fullest() -> None:
    """The second stage of two whose experts would keep what they now compute again, while the first is the fullest."""
    kept = lone_sites(kind="even", layers=(4, 5, 1))
    data = kept.model_dump(mode="json", exclude_none=True)
    data["stages"][1]["layers"][0]["recompute"] = ["attention", "experts"]
    plan = build(PipelinePlan, data, "pipeline")
    most, least = (costed(one).inside[1].memory.fullest_bytes for one in (kept, plan))
    full_bytes = costed(plan).fullest.fullest_bytes
    assert least < full_bytes < most
    found = explain_pipeline(with_memory(plan, (full_bytes + most) / 2))
    assert (found.fullest_stage, found.fullest_rank, found.binds) == (0, "s0/gpu0", "memory of s1/gpu0")
    assert named(found, "activations kept").fullest_rank == "s1/gpu0"


def test_what_does_not_fit_runs_less_far_ahead() -> None:
    even = lone_sites(kind="even")
    given = even.cluster, even.workload, [stage.sites for stage in even.stages], (3, 2, 2)
    plan = of(*given, ahead=4, recompute=ALL)
    number = plan.micro_batches // 2
    half = [of(*given, ahead=ahead, micro_batches=number, recompute=ALL) for ahead in (4, 2)]
    full_bytes, *others = (costed(one).fullest.fullest_bytes for one in (plan, *half))
    assert full_bytes < min(others)
    tight = with_memory(plan, (full_bytes + min(others)) / 2)
    found = explain_pipeline(tight)
    require_true(found, tight)
    told = {one.name: one for one in found.alternatives if one.name.startswith(f"{number} micro-batches")}
    less = told.pop(f"{number} micro-batches, 1 forward ahead")
    assert less.fits and less.plan.ahead == 1
    assert all(not one.fits and one.step_s < found.plan.step_s for one in told.values())


def test_placements_that_a_search_found_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """No quick placement of the first stage is as good here, so it keeps its own, also with a layer less."""

    def tokens_travel(stage: Plan) -> Iterator[list[LayerGroup]]:
        yield [baseline_group(stage.cluster, stage.workload, Baseline.EP)]

    monkeypatch.setattr("planner.stages.inside._placements", tokens_travel)
    cluster = sites_cluster(np.random.default_rng(0), 5, 2, "even", throughput="1 TFLOPS")
    workload = layered_workload(6, ffn=1024, micro_batch_size=4, micro_batches=4)
    domains, ways = {"dc": 4, "gpu": 1}, of(cluster, workload, [("s0", "s1", "s3", "s4"), ("s2",)], (3, 3))
    own = LayerGroup(first_layer=0, num_layers=3, domains=domains, migration={})
    plan = ways.with_layers([(own,), ways.stages[1].layers])
    found = explain_pipeline(plan)
    require_true(found, plan)
    for words in ("a layer of stage", "micro-batches", "exchanged"):
        assert {
            str(group.domains)
            for one in found.alternatives
            if words in one.name
            for stage in one.plan.stages
            if len(stage.sites) == 4
            for group in stage.layers
        } == {str(domains)}


def test_rules_that_alternatives_would_break() -> None:
    plan = lone_sites(layers=(2, 2, 3))
    rule = {"name": "apart", "kind": "no_link", "sites": ["s0"], "to": ["s2"]}
    rules = build(Constraints, {"rules": [rule]}, "rules")
    found = explain_pipeline(plan, rules)
    require_true(found, plan)
    # Next to each other after either exchange: s1, s0, s2 and s0, s2, s1.
    assert found.plan.allowed and not any(one.allowed for one in found.alternatives if "exchanged" in one.name)
    free = explain_pipeline(plan)
    assert named(free, "exchanged").step_s == named(found, "exchanged").step_s
    assert all(one.allowed for one in found.alternatives if "ahead" in one.name or "micro-batches" in one.name)
    inside = {"name": "not-there", "kind": "forbid", "sites": ["s1"], "experts": "0"}
    whole = of(plan.cluster, plan.workload, [("s0", "s1"), ("s2",)], (4, 3))
    kept = explain_pipeline(whole, build(Constraints, {"rules": [inside]}, "rules"))
    copied = named(kept, "all experts copied inside stages")
    assert kept.plan.allowed and not copied.allowed and copied.name not in kept.better
    assert not any("split" in one.name for one in kept.alternatives), "s1 alone may not have all experts"


@pytest.mark.parametrize("more", [{"num_dense_layers": 1, "dense_ffn_size": 128}, {}])
def test_layers_without_experts_and_measured_popularity(more: dict[str, Any]) -> None:
    plan = lone_sites(layers=(3, 2, 2), **more)
    if not more:
        shares = np.random.default_rng(0).dirichlet(np.ones(8), 7)
        plan = plan.with_popularity(tuple(tuple(row) for row in shares.tolist()))
    found = explain_pipeline(plan)
    require_true(found, plan)
    assert {"exchanged", "joined", "layer of"} <= {
        word for one in found.alternatives for word in ("exchanged", "joined", "layer of") if word in one.name
    }


def test_what_is_better_but_breaks_a_rule_is_told_beside_what_does_not() -> None:
    plan = lone_sites(3, layers=(3, 2, 2, 1))
    best = named(explain_pipeline(plan), "exchanged")
    assert best.name == "stages 1 and 2 exchanged" and best.name in explain_pipeline(plan).better
    rule = {"name": "apart", "kind": "no_link", "sites": ["s0"], "to": ["s2"]}
    found = explain_pipeline(plan, build(Constraints, {"rules": [rule]}, "rules"))
    told = {one.name: one for one in found.alternatives if "exchanged" in one.name}
    assert {name: one.allowed for name, one in told.items()} == {
        "stages 2 and 3 exchanged": True,
        "stages 1 and 2 exchanged": False,
    }
    assert told[best.name].step_s == best.step_s and best.name not in found.better and "memory" not in found.binds


def test_a_stage_of_two_sites_is_split_the_better_way() -> None:
    seen = set()
    for seed in range(4):
        cluster = sites_cluster(np.random.default_rng(seed), 3, 1, "pairs")
        workload = layered_workload(6, micro_batch_size=8, micro_batches=4)
        plan = of(cluster, workload, [("s0", "s1"), ("s2",)], (4, 2))
        split = named(explain_pipeline(plan), "split in two")
        number = plan.micro_batches
        both = {
            order: step_s(of(cluster, workload, [(order[0],), (order[1],), ("s2",)], (2, 2, 2), micro_batches=number))
            for order in (("s0", "s1"), ("s1", "s0"))
        }
        assert split.step_s == pytest.approx(min(both.values()))
        seen.add(min(both, key=lambda order: both[order]))
    assert len(seen) == 2


def test_prices_choose_where_they_are_to_be_small() -> None:
    """What a site sends leaves it once at an end, and twice between others; so the dear one is to be at an end."""
    data = lone_sites(3, layers=(2, 1, 1, 1)).model_dump(mode="json", exclude_none=True)
    for site, price in zip(data["cluster"]["sites"], ("0 $/GB", "5 $/GB", "0 $/GB", "0 $/GB"), strict=True):
        site["egress"] = price
    plan = build(PipelinePlan, data, "pipeline")
    told = {}
    for objective in Objective:
        goal = Goal(objective=objective)
        how = solver_report(
            solver="highs", goal=goal, objective_s=1.0, bound_s=1.0, cost_usd=1.0, bound_usd=1.0, solve_s=0.0, proven=False
        )
        made = plan.model_copy(update={"solver": how, "prediction": predicted(costed(plan), {})})
        found = explain_pipeline(made)
        told[objective] = named(found, "exchanged")
        if objective is Objective.TIME:
            require_true(found, made)
        else:
            assert told[objective].name in found.better
    fast, cheap = told[Objective.TIME], told[Objective.DOLLARS]
    assert fast.name == "stages 1 and 2 exchanged" and cheap.name == "stages 0 and 1 exchanged"
    assert fast.step_usd is not None and cheap.step_usd is not None and fast.step_s < cheap.step_s
    assert cheap.step_usd < fast.step_usd and cheap.step_usd == pytest.approx(costed(again(cheap.plan)).step_usd)


def test_among_many_stages_what_comes_last_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = lone_sites(layers=(2, 1, 1, 2, 1, 1, 2, 1))
    whole = explain_pipeline(plan).alternatives
    walks = list[None]()

    def counted(*arguments: Any) -> float:
        walks.append(None)
        return paced_s(*arguments)

    for module in (schedule, sketch):
        monkeypatch.setattr(module, "paced_s", counted)
    for most in (5, 20, 40):
        monkeypatch.setattr(neighbours, "_WALKS", most * 64)
        few = explain_pipeline(plan).alternatives
        # Of the last kind up to three are costed.
        assert few == whole[: len(few)] and len(few) >= 2 and len(walks) <= most + 6
        assert (len(few) < len(whole)) == (most < 40)
        walks.clear()


def test_sketches_choose_what_is_costed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = lone_sites(5, layers=(2, 1, 1, 2, 1, 1))
    monkeypatch.setattr(neighbours, "_LIKELIEST", 1)
    one = named(explain_pipeline(plan), "exchanged").step_s
    monkeypatch.setattr(neighbours, "_LIKELIEST", 5)
    assert named(explain_pipeline(plan), "exchanged").step_s <= one <= 1.1 * named(explain_pipeline(plan), "exchanged").step_s


def test_groups_of_layers_for_more_and_fewer() -> None:
    def group(first: int, number: int, recompute: Recompute = Recompute.NOTHING, size: int = 1) -> LayerGroup:
        return LayerGroup(first_layer=first, num_layers=number, domains={"dc": size}, migration={}, recompute=recompute)

    both = (group(0, 2, recompute=Recompute.EXPERTS), group(2, 1))
    assert merged(both) == (group(0, 3),) and merged((group(0, 2), group(2, 1, size=2))) == (group(0, 2), group(2, 1, size=2))
    assert resized(both, 4) == (group(0, 3, recompute=Recompute.EXPERTS), group(3, 1))
    assert resized(both, 2) == (group(0, 2, recompute=Recompute.EXPERTS),) and resized(both, 1) == (
        group(0, 1, recompute=Recompute.EXPERTS),
    )
    assert resized(both, 3) == both


def test_links_are_those_of_all_stages() -> None:
    plan = random_pipeline(301, least_stages=2)
    found, loads = explain_pipeline(plan).links, pipeline_link_bytes(plan)
    seconds = {
        link.name: size_bytes / link.bandwidth_bytes_per_s
        for link, size_bytes in zip(plan.cluster.link_table, loads, strict=True)
    }
    assert [link.busy_s for link in found] == sorted(seconds.values(), reverse=True)[:5]
    assert all(link.busy_s == seconds[link.name] and link.share == link.busy_s / costed(plan).times.step_s for link in found)
