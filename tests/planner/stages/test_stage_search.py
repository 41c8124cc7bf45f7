"""The search for stages: against all that there is where that can be enumerated, and against stages in the cluster's order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from stage_cases import KINDS, every_pipeline, layered_workload, sites_cluster, with_shares

from hybridep.baselines import Baseline, baseline_group, baseline_plan
from hybridep.commands import stage_choice
from hybridep.commands.stage_choice import in_stages
from hybridep.config import build
from hybridep.errors import InfeasibleError
from hybridep.pipeline import PipelinePlan
from hybridep.placement import LevelChoice
from hybridep.plan import LayerGroup, Prediction, Residency, Status
from hybridep.recompute import ALL, Recompute, cheapest_first
from hybridep.topology import Cluster
from hybridep.workload import Model
from planner import StageWishes, memory_use, pipeline_summary, plan_pipeline, plan_pipelines
from planner.constraints import Permissions
from planner.cost import StepCost
from planner.domains import layer_group
from planner.memory import step_memory
from planner.stages.bound import least_s
from planner.stages.candidates import AHEAD
from planner.stages.costs import Costed, costed, predicted, rooms
from planner.stages.inside import (
    Room,
    Store,
    _further,
    _placements,
    placed,
    searched,
    with_less_memory,
    without_search,
)
from planner.stages.order import groupings, ordered, steps_s, way_s_per_byte
from planner.stages.rules import permitted_group
from simulator.pipeline import fastest_pipeline, simulate_pipeline

pytestmark = pytest.mark.timeout(120)


def best_of_all(seed: int, num_sites: int, layers: int, *, shares: bool = False) -> tuple[float, float]:
    """(step of the search's plan, of the best of all partitions, orders, layers, micro-batches, `AHEAD`, and equal domains)."""
    rng = np.random.default_rng(seed)
    cluster = sites_cluster(rng, num_sites, 1, KINDS[seed % len(KINDS)])
    workload = layered_workload(layers, ffn=int(rng.choice([64, 1024])), micro_batch_size=2, micro_batches=2)
    if shares:
        cluster = with_shares(rng, cluster)
    best = np.inf
    for plan in every_pipeline(cluster, workload):
        inside = [placed(one, one.layers, Room(in_flight=1, beside_bytes=0.0)) for one in plan.plans]
        for ahead in AHEAD:
            best = min(best, costed(plan.running_ahead(ahead), inside).times.step_s)
    found = plan_pipeline(cluster, workload, time_limit_s=10)
    assert least_s(cluster, workload) <= best
    return found.predicted.step, best


@pytest.mark.turns(4)
@pytest.mark.parametrize(("seed", "shares"), [(0, False), pytest.param(1, False, marks=pytest.mark.slow), (2, True)])
def test_the_search_is_near_the_best_of_all(seed: int, shares: bool) -> None:
    """Also where sites take shares of their own, of tokens and of experts."""
    found_s, best_s = best_of_all(seed, num_sites=3, layers=3, shares=shares)
    # Plans inside stages may be better than equal domains.
    assert found_s <= best_s * 1.05


@pytest.mark.turns(2)
def test_other_numbers_of_stages_are_searched_on_in_the_time_that_is_left() -> None:
    """Six equal sites with time for many rounds: as good as what is found for each number of stages by itself."""
    cluster, workload = sites_cluster(np.random.default_rng(0), 6, 2, "even"), layered_workload(8, micro_batches=8)
    of_each = [plan_pipeline(cluster, workload, StageWishes(stages=stages), time_limit_s=6) for stages in range(2, 7)]
    found = plan_pipeline(cluster, workload, time_limit_s=30)
    assert found.predicted.step <= min(one.predicted.step for one in of_each) * 1.005


@pytest.mark.turns(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_sites", [4, 6])
def test_never_slower_than_stages_in_the_clusters_order(kind: str, num_sites: int) -> None:
    cluster = sites_cluster(np.random.default_rng(num_sites), num_sites, 2, kind)
    workload = layered_workload(8)
    found = in_stages(cluster, workload, time_limit_s=12 if num_sites == 4 else 5)
    plan, step_s = found.plan, found.simulated_s
    assert plan.prediction is not None and plan.solver is not None and plan.solver.status is Status.FEASIBLE
    assert step_s == simulate_pipeline(plan).step_s
    assert found.simulated > 1 or num_sites > 4  # of many sites the search takes all the time
    # Copies, which the expectation leaves links to themselves, are most of a step here.
    assert step_s == pytest.approx(plan.prediction.step, rel=0.1)
    assert step_s <= fastest_pipeline(baseline_plan(cluster, workload, Baseline.EP)).step_s * 1.001
    assert plan.solver.bound == pytest.approx(least_s(cluster, workload)) and plan.solver.bound < plan.prediction.step


@pytest.mark.turns(4)
def test_what_is_expected_to_be_far_behind_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 4, 2, "pairs"), layered_workload(8)
    expected_s: list[float] = []
    monkeypatch.setattr(stage_choice, "simulated_s", lambda plan: expected_s.append(plan.predicted.expected_s) or 1.0)
    in_stages(cluster, workload, time_limit_s=20)
    every_s = [plan.predicted.expected_s for plan in plan_pipelines(cluster, workload, None, 8, time_limit_s=20)]
    assert max(every_s) > 1.25 * min(every_s) >= max(expected_s)


@pytest.mark.turns(2)
def test_two_searches_find_the_same() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(1), 5, 2, "pairs"), layered_workload(8)
    first, second = (plan_pipeline(cluster, workload, time_limit_s=60) for _ in range(2))
    assert first.digest == second.digest


@pytest.mark.turns(2)
@pytest.mark.parametrize("stages", [3, None])
def test_layers_without_experts_stay_with_one_that_has_some(stages: int | None) -> None:
    """Also where sites and layers change stages."""
    workload = layered_workload(5)
    model = build(Model, workload.model.model_dump(mode="json") | {"num_dense_layers": 2, "dense_ffn_size": 512}, "model")
    cluster = sites_cluster(np.random.default_rng(3), 4, 1, "access")
    plan = plan_pipeline(cluster, workload.model_copy(update={"model": model}), StageWishes(stages=stages), time_limit_s=1.5)
    assert plan.stages[0].num_layers > 2 and all(one.workload.model.num_moe_layers for one in plan.plans)


@pytest.mark.turns(4)
def test_stages_keep_within_memory() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(2), 4, 2, "even"), layered_workload(8)
    roomy = plan_pipeline(cluster, workload, time_limit_s=2)
    needs = max(
        memory_use(stage, room.in_flight, room.beside_bytes).fullest_bytes
        for stage, room in zip(roomy.plans, rooms(roomy), strict=True)
    )
    tight = sites_cluster(np.random.default_rng(2), 4, 2, "even", memory=f"{0.7 * needs:.0f} B")
    plan = plan_pipeline(tight, workload, time_limit_s=2)
    assert all(one.memory.fits for one in costed(plan).inside)
    summary = pipeline_summary(plan)
    assert summary["memory_bytes"] <= 0.7 * needs * (1 + 1e-4)
    assert all(stage["memory_bytes"] <= stage["capacity_bytes"] * (1 + 1e-4) for stage in summary["stages"])
    small = sites_cluster(np.random.default_rng(2), 4, 2, "even").model_dump(mode="json")
    for site in small["sites"]:
        site["gpu"] = {"memory": "11 MB"}
    with pytest.raises(InfeasibleError, match=r"stages rank (s\d)/gpu\d needs .* and has 11 MB; raise sites\.\1\.gpu\.memory"):
        plan_pipeline(build(Cluster, small, "small"), workload, time_limit_s=2)
    tiny = sites_cluster(np.random.default_rng(2), 4, 2, "even", memory="10 MB")
    with pytest.raises(InfeasibleError, match=r"stages rank s\d/gpu\d needs .* and has 10 MB; raise gpu\.memory"):
        plan_pipeline(tiny, workload, time_limit_s=2)


@pytest.mark.turns(2)
def test_where_memory_is_short_first_stages_compute_again_or_have_fewer_layers_or_micro_batches_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first stages keep the activations of most micro-batches: over 150 MB with as many layers as balance them."""
    workload = layered_workload(12, ffn=32, micro_batch_size=64)

    def planned(memory_mb: float) -> PipelinePlan:
        cluster = sites_cluster(np.random.default_rng(2), 4, 2, "even", memory=f"{memory_mb} MB")
        plan = plan_pipeline(cluster, workload, StageWishes(stages=4), time_limit_s=0.1)
        assert all(one.memory.fits for one in costed(plan).inside)
        return plan

    def again(memory_mb: float) -> list[Recompute]:
        return [stage.recomputes for stage in planned(memory_mb).plans]

    nothing, attention, experts = Recompute.NOTHING, Recompute.ATTENTION, Recompute.EXPERTS
    assert again(160) == [nothing] * 4
    assert again(145) == [experts, nothing, nothing, nothing]
    assert again(60) == [ALL, attention, attention, nothing]
    assert planned(38).micro_batches > 64
    monkeypatch.setattr("planner.stages.candidates.MANY_BATCHES", ())
    for memory_mb in (38.9, 38.5):
        layers = [stage.num_layers for stage in planned(memory_mb).stages]
        assert sum(layers) == 12 and layers[0] < layers[-1]
    with pytest.raises(InfeasibleError, match=r"needs 40\.72 MB and has 38 MB"):
        planned(38)


@pytest.mark.parametrize(
    ("layers", "stages", "words"),
    [
        (8, 9, "9 stages for 4 sites"),
        (2, 3, "3 stages for 4 sites and 2 layers"),
    ],
)
def test_what_cannot_be_is_named(layers: int, stages: int, words: str) -> None:
    cluster = sites_cluster(np.random.default_rng(3), 4, 1, "even")
    workload = layered_workload(layers, micro_batch_size=1, micro_batches=1)
    with pytest.raises(InfeasibleError, match=words):
        plan_pipeline(cluster, workload, StageWishes(stages=stages))


def test_a_short_time_limit_still_ends_with_a_plan() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(4), 6, 2, "pairs"), layered_workload(8)
    told: list[tuple[str, float]] = []
    plan = plan_pipeline(cluster, workload, time_limit_s=0.01, report=lambda what, seconds: told.append((what, seconds)))
    assert plan.prediction is not None and simulate_pipeline(plan).step_s > 0
    assert told[0][0] == "bound" and ("plan", pytest.approx(plan.prediction.step, rel=0.2)) in told
    falling = [seconds for what, seconds in told if what == "plan"]
    assert all(later <= earlier for earlier, later in pairwise(falling))
    # Unless there is no patience.
    with pytest.raises(InfeasibleError, match="none was found in time"):
        plan_pipeline(cluster, workload, time_limit_s=0, patience_s=0)


def test_an_interrupted_search_returns_the_best_so_far() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(5), 4, 2, "pairs"), layered_workload(8)

    def interrupt(what: str, _: float) -> None:
        if what == "plan":
            raise KeyboardInterrupt

    plan = plan_pipeline(cluster, workload, report=interrupt)
    assert plan.prediction is not None and costed(plan).fits


def test_an_interrupted_report_is_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, workload = sites_cluster(np.random.default_rng(5), 4, 2, "pairs"), layered_workload(8)
    reported = list[Costed]()

    def interrupted(found: Costed, baselines: dict[str, float], known: dict[str, StepCost]) -> Prediction:
        reported.append(found)
        if len(reported) == 2:
            raise KeyboardInterrupt
        return predicted(found, baselines, known)

    monkeypatch.setattr("planner.stages.pipelines.predicted", interrupted)
    plans = plan_pipelines(cluster, workload, number=6, time_limit_s=2)
    assert len(plans) == 1 and plans[0].stages == reported[0].plan.stages and plans[0].solver is not None


def test_what_is_predicted_of_several_is_what_is_of_each() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(5), 4, 2, "pairs"), layered_workload(8)
    for made in plan_pipelines(cluster, workload, number=6, time_limit_s=2):
        alone = predicted(costed(made), {})
        assert made.predicted.wan_bytes == alone.wan_bytes and made.predicted.bound == alone.bound
        assert made.predicted.step == pytest.approx(alone.step)


@pytest.mark.parametrize("seed", range(8))
def test_a_path_of_few_stages_is_the_shortest(seed: int) -> None:
    cluster = sites_cluster(np.random.default_rng(seed), 6, 1, "pairs")
    groups = tuple((site,) for site in range(6))
    busy_s, way_s = steps_s(cluster, groups, 1e8)

    def length_s(path: tuple[int, ...]) -> float:
        ends = list(pairwise(path))
        return 9 * max(busy_s[end] for end in ends) + 2 * sum(way_s[end] for end in ends)

    found = ordered(cluster, groups, 1e8, 10, 0.0)[0]
    best_s = min(length_s(path) for path in permutations(range(6)))
    assert length_s(tuple(group[0] for group in found)) <= best_s * 1.1


def test_groupings_have_as_many_stages_as_asked_for_and_every_site_once() -> None:
    cluster = sites_cluster(np.random.default_rng(7), 7, 1, "pairs")
    for stages in range(1, 8):
        for groups in groupings(cluster, stages, 1e8):
            assert len(groups) == stages and sorted(site for group in groups for site in group) == list(range(7))
    rate = way_s_per_byte(cluster)
    link = next(one for one in cluster.links if (one.src, one.dst) == ("s2", "s5"))
    assert rate[2, 5] == pytest.approx(1 / min(link.bandwidth, 125e6))


def test_the_farthest_site_is_also_tried_by_itself_and_the_rest_in_groups_of_nearly_equal_size() -> None:
    cluster = sites_cluster(np.random.default_rng(7), 7, 1, "pairs")
    links = tuple(
        link.model_copy(update={"bandwidth": 1e9, "latency": 0.11 if "s4" in (link.src, link.dst) else 0.1})
        for link in cluster.links
    )
    found = list(groupings(cluster.model_copy(update={"links": links}), 3, 1e6))
    assert [(4,), 3, 3] in [[groups[0], *map(len, groups[1:])] for groups in found]
    assert len({tuple(sorted(groups)) for groups in found}) == len(found)


def test_few_sites_with_fast_links_are_also_tried_beside_many_with_slow_ones() -> None:
    cluster = sites_cluster(np.random.default_rng(7), 9, 1, "even")
    rates = (1, 1, 4, 1, 1, 8, 1, 4, 3)
    sites = [{"name": f"s{place}", "up": f"{rate} Gbps", "down": f"{rate + 1} Gbps"} for place, rate in enumerate(rates)]
    fast = build(Cluster, cluster.model_dump(mode="json", exclude_none=True) | {"sites": sites}, "sites")
    assert ((5,), (2, 7), (0, 1, 3, 4, 6, 8)) in list(groupings(fast, 3, 1e6))


@pytest.mark.turns(2)
def test_inside_a_stage_the_planner_is_no_worse_than_a_few_placements() -> None:
    cluster, workload = sites_cluster(np.random.default_rng(8), 3, 2, "pairs"), layered_workload(3, ffn=1024)
    stage, room = baseline_plan(cluster, workload, Baseline.EP), Room(in_flight=3, beside_bytes=1e6)
    few, found = without_search(stage, room), searched(stage, room, solver="highs", time_limit_s=5)
    batches = workload.training.micro_batches
    assert found is not None and found.memory.fits
    assert found.times.busy_s(batches) <= few.times.busy_s(batches) * 1.02
    assert with_less_memory(cluster, 1e9).gpu.memory == cluster.gpu.memory - 1e9
    assert (
        searched(baseline_plan(with_less_memory(cluster, 85.8e9), workload, Baseline.EP), room, solver="highs", time_limit_s=5)
        is None
    )


@pytest.mark.parametrize("kind", KINDS)
def test_few_placements_are_enough(kind: str) -> None:
    """Where copies everywhere are clearly the fewest bytes nothing else is asked; where rules bar some of them, all is."""
    rng, room, asked = np.random.default_rng(5), Room(in_flight=1, beside_bytes=0.0), []
    for _ in range(6):
        sites = int(rng.choice([2, 4, 6]))
        cluster, workload = sites_cluster(rng, sites, 2, kind), layered_workload(1, ffn=int(rng.choice([64, 512, 4096])))
        stage, batches = baseline_plan(cluster, workload, Baseline.EP), workload.training.micro_batches
        every = [group for groups in _placements(stage) for group in groups]
        all_pairs = np.ones((sites, sites), dtype=bool)
        barred = Permissions(serve=all_pairs, hold=np.ones((sites, 8), dtype=bool), copy=all_pairs)
        # The second site may compute its own experts alone.
        barred.hold[1] = stage.placements[0].home // cluster.ranks_per_site == 1
        for allowed in (None, barred):
            if allowed is not None:
                every = [permitted_group(group, cluster, workload.model.num_experts, allowed) for group in every]
            found = without_search(stage, room, store=(store := Store()), allowed=allowed)
            best_s = min(placed(stage, (group,), room).value(batches) for group in every)
            assert found.value(batches) == pytest.approx(best_s, rel=1e-12)
            asked.append((allowed is None, len(store.placed) < len({str(group) for group in every})))
    assert (True, True) in asked and (False, True) not in asked


def test_few_placements_are_about_as_good_as_all_domains() -> None:
    """Also where tokens are fewer bytes than copies: they wait for links' latencies in every layer."""
    rng, room, worse = np.random.default_rng(5), Room(in_flight=1, beside_bytes=0.0), list[float]()
    for place in range(45):
        sites = int(rng.choice([4, 6, 8, 9, 12]))
        cluster = sites_cluster(rng, sites, int(rng.choice([1, 2, 8])), KINDS[place % 3])
        ffn, batch = int(rng.choice([64, 256, 1024, 4096])), int(rng.choice([1, 4, 16]))
        workload = layered_workload(1, ffn=ffn, micro_batches=int(rng.integers(1, 9)), micro_batch_size=batch)
        stage, batches, store = baseline_plan(cluster, workload, Baseline.EP), workload.training.micro_batches, Store()
        choices = [LevelChoice(domain_size=size) for size in range(1, sites + 1) if sites % size == 0]
        every = [layer_group(0, 1, {"dc": choice, "gpu": LevelChoice()}, Residency.STEP) for choice in choices]
        every += [baseline_group(cluster, workload, one) for one in (Baseline.EP, Baseline.FULL_GATHER)]
        best_s = min(placed(stage, (group,), room, store).value(batches) for group in every)
        worse.append(without_search(stage, room, store=store).value(batches) / best_s)
    assert np.quantile(worse, 0.9) < 1.01 and max(worse) < 1.4


def test_a_plan_file_holds_what_the_summary_says(tmp_path: Path) -> None:
    cluster, workload = sites_cluster(np.random.default_rng(9), 4, 2, "access"), layered_workload(8)
    plan = plan_pipeline(cluster, workload, StageWishes(stages=4), time_limit_s=5)
    plan.save(tmp_path / "plan.yaml")
    summary = pipeline_summary(plan)
    assert summary["objective_s"] == pytest.approx(plan.prediction.step if plan.prediction else 0)
    assert sum(summary["parts_s"].values()) == pytest.approx(summary["step_s"])
    assert [stage["num_layers"] for stage in summary["stages"]] == [stage.num_layers for stage in plan.stages]
    assert summary["stages"][-1]["in_flight"] == 1 and summary["digest"] == plan.digest


def test_what_fits_nothing_quick_has_domains_of_other_sizes() -> None:
    """Eight experts on a site of eight nodes of two: expert parallelism computes all at half of the ranks, copies everywhere are
    too many."""
    levels = [("dc", 1, "1 Gbps"), ("node", 8, "100 Gbps"), ("gpu", 2, "400 Gbps")]
    gpu = {"throughput": "30 TFLOPS", "memory": "80 GiB", "memory_bandwidth": "1 TB/s"}
    data = [{"name": name, "size": size, "bandwidth": rate, "latency": "10 us"} for name, size, rate in levels]
    cluster = build(Cluster, {"name": "site", "levels": data, "gpu": gpu}, "site")
    workload = layered_workload(4, ffn=512, micro_batch_size=16)
    stage, room = baseline_plan(cluster, workload, Baseline.EP), Room(in_flight=4, beside_bytes=0.0)
    ways = cheapest_first(workload)

    def least_bytes(groups: Iterable[LayerGroup]) -> float:
        used = (step_memory(stage.with_layers(group.recomputing(again))) for group in groups for again in ways)
        return min(one.use(room.in_flight).fullest_bytes for one in used)

    quick, further = least_bytes(chain(*_placements(stage))), least_bytes(_further(stage))
    assert further < 0.95 * quick
    small = cluster.gpu.model_copy(update={"memory": (quick + further) / 2})
    tight = stage.model_copy(update={"cluster": cluster.model_copy(update={"gpu": small})})
    assert without_search(tight, room).memory.fits
