"""The bound of pipelines is below every one of them, and not far below the best where links decide."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from math import comb
from typing import Any

import numpy as np
import pytest
from stage_cases import KINDS, layered_workload, random_pipeline, random_pipeline_over, sites_cluster, with_shares

from hybridep.codecs import EXACT, Codecs, ExpertCodec, GradientCodec, TokenCodec, Wire
from hybridep.config import build
from hybridep.pipeline import PipelinePlan, codecs_inside
from hybridep.plan import LayerGroup, Plan
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.traffic import DENSE, link_bytes, step_traffic
from hybridep.workload import Workload
from planner import StageWishes, plan_pipeline
from planner.stages import bound
from planner.stages.bound import _Sites, least_of_any_s, least_s, least_usd_of_any
from planner.stages.costs import costed
from planner.stages.least_bytes import layer_dense_bytes, least_mean_bytes, least_site_bytes
from planner.stages.schedule import least_step_s

CODED = Codecs(activations=TokenCodec.INT8, tokens=TokenCodec.INT8, experts=ExpertCodec.CHANGE_INT8)
SHORT_GRADIENTS = tuple(
    CODED.model_copy(update={"gradients": codec}) for codec in (GradientCodec.INT8, GradientCodec.TOP_K, GradientCodec.BF16)
)


@pytest.mark.turns(8)
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_no_pipeline_is_below_it(first: int, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what waits for copies not even the busiest of its links, or its busiest stage; also where sites have ``shares`` of
    their own."""
    for seed in range(first, first + 50):
        plan = random_pipeline(seed, least_stages=2, shares=shares)
        found = costed(plan)
        assert least_s(plan.cluster, plan.workload, len(plan.stages)) <= found.times.step_s * (1 + 1e-9), seed
        least = least_step_s(plan, [one.times for one in found.inside])
        with monkeypatch.context() as patch:
            waits_for_nothing(patch)
            for stages in range(2, len(plan.stages) + 1):
                assert least_s(plan.cluster, plan.workload, stages) <= least * (1 + 1e-9), seed
        if all(group.residency.value == "step" for stage in plan.stages for group in stage.layers):
            codecs = (CODED, *SHORT_GRADIENTS)[seed % 4]
            coded = build(PipelinePlan, plan.model_dump(mode="json") | {"codecs": {"dc": codecs}}, "pipeline")
            found = costed(coded)
            assert least_s(plan.cluster, plan.workload, 2, codecs) <= found.times.step_s * (1 + 1e-9), seed
            with monkeypatch.context() as patch:
                waits_for_nothing(patch)
                least = least_step_s(coded, [one.times for one in found.inside])
                assert least_s(plan.cluster, plan.workload, 2, codecs) <= least * (1 + 1e-9), seed


def waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """The bound counts what sites do, whenever they do it."""
    patch.setattr(_Sites, "_could_in_parts", lambda *_, **__: True)


def in_groups(workload: Workload, groups: int, per_token: int) -> Workload:
    changes = {"expert_groups": groups, "groups_per_token": per_token}
    return workload.model_copy(update={"model": workload.model.model_copy(update=changes)})


@pytest.mark.turns(2)
@pytest.mark.parametrize("groups", [2, 4])
def test_it_knows_of_groups_of_experts(groups: int) -> None:
    """Tokens that choose from one group need fewer experts elsewhere, so where bytes between a stage's sites decide it is lower;
    and no pipeline is below it."""
    cluster, free = (
        sites_cluster(np.random.default_rng(0), 3, 2, "access", throughput="300 TFLOPS"),
        layered_workload(2, ffn=1024),
    )
    assert least_s(cluster, in_groups(free, groups, 1)) < 0.9 * least_s(cluster, free)
    assert least_s(cluster, in_groups(free, groups, groups)) == least_s(cluster, free)
    for seed in range(40):
        plan = random_pipeline(seed, least_stages=2)
        plan = plan.model_copy(update={"workload": in_groups(plan.workload, groups, 1)})
        plan = PipelinePlan.model_validate(plan.model_dump())
        assert least_s(plan.cluster, plan.workload, len(plan.stages)) <= costed(plan).times.step_s * (1 + 1e-9), seed


def uneven(rng: np.random.Generator, cluster: Cluster) -> Cluster:
    """Ranks that share processors, or sites of which some compute up to ten times as fast, in half of the cases each."""
    given = cluster.model_dump(mode="json", exclude_none=True)
    if rng.random() < 0.5:
        given["gpu"] |= {"sharing": float(rng.uniform(1, 5))}
    if rng.random() < 0.5:
        for site in given["sites"]:
            site |= {"gpu": {"throughput": f"{cluster.gpu.throughput / 1e9 * 10 ** rng.uniform(0, 1):.4f} GFLOPS"}}
    return build(Cluster, given, "uneven")


@pytest.mark.turns(6)
@pytest.mark.parametrize(("shares", "waits"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_no_plan_for_some_of_the_sites_is_below_theirs(
    first: int, shares: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stages or without, for every choice of sites that can share the batch."""
    if not waits:
        waits_for_nothing(monkeypatch)
    tried = {1: 0, 2: 0}
    for seed in range(first, first + 10):
        rng = np.random.default_rng(seed)
        throughput = f"{10 ** rng.uniform(-2, 2.5):.4f} TFLOPS"
        cluster = uneven(rng, sites_cluster(rng, 4, int(rng.integers(1, 3)), KINDS[seed % 3], throughput=throughput))
        workload = layered_workload(int(rng.integers(4, 7)), ffn=int(rng.choice([64, 256, 1024])), micro_batch_size=6)
        if shares:
            cluster = with_shares(rng, cluster)
        any_s, staged_s = least_of_any_s(cluster, workload), least_of_any_s(cluster, workload, 2)
        for number in range(1, 5):
            for sites in combinations(range(4), number):
                if not cluster.home_weights[list(sites)].any():
                    continue
                some, work = on_sites(cluster, workload, [f"s{site}" for site in sites])
                for least_stages in (1, *(2,) * (number - 1)):
                    plan = random_pipeline_over(rng, some, work, least_stages)
                    if plan is not None:
                        stages, found = len(plan.stages), costed(plan)
                        least = least_step_s(plan, [one.times for one in found.inside])
                        if waits or cluster.gpu.sharing > 1:
                            # The latter lets stages compute together as fast as each does while no other does.
                            least = found.times.step_s
                        assert (any_s if stages == 1 else staged_s) <= least * (1 + 1e-9), (seed, sites)
                        assert any_s <= staged_s
                        tried[min(stages, 2)] += 1
    assert min(tried.values()) > 50


def test_one_site_alone_is_the_bound_where_links_are_slow() -> None:
    """And two where the third cannot be reached in time; with links that are fast all of them."""
    cluster = sites_cluster(np.random.default_rng(1), 3, 1, "even", throughput="0.01 TFLOPS")
    workload = layered_workload(4, ffn=1024, micro_batch_size=6)

    def with_links(*rates: str) -> Cluster:
        sites = [{"name": f"s{place}", "up": rate, "down": rate} for place, rate in enumerate(rates)]
        return build(Cluster, cluster.model_dump(mode="json") | {"sites": sites}, "sites")

    fast, slow = "1000 Gbps", "1 Kbps"
    whole_s = 3 * least_s(cluster, workload, 1)
    assert least_of_any_s(with_links(slow, slow, slow), workload) == pytest.approx(whole_s)
    # Pipelines' bounds leave out where the output projection is.
    for links, sites in ((with_links(fast, fast, slow), 2), (with_links(fast, fast, fast), 3)):
        assert 0.96 * whole_s / sites <= least_of_any_s(links, workload) <= whole_s / sites
    # Two stages need two sites.
    assert least_of_any_s(with_links(slow, slow, slow), workload, 2) > 100 * whole_s
    assert least_of_any_s(cluster, workload, 3) > least_of_any_s(cluster, workload, 2) >= least_of_any_s(cluster, workload)
    one, work = on_sites(cluster, workload, ["s0"])
    assert least_of_any_s(one, work) == pytest.approx(whole_s)


def test_the_cheapest_computation_is_the_bound_of_prices() -> None:
    cluster = sites_cluster(np.random.default_rng(1), 3, 2, "even", throughput="0.01 TFLOPS")
    workload, prices = layered_workload(4), (1e-3, 4e-4, 7e-4)
    sites = [
        {"name": f"s{place}", "gpu": {"throughput": f"{10 * (place + 1)} GFLOPS", "price": f"{3600 * price} $/h"}}
        for place, price in enumerate(prices)
    ]
    priced = build(Cluster, cluster.model_dump(mode="json") | {"sites": sites}, "sites")
    one, work = on_sites(priced, workload, ["s1"])
    # Of a FLOP: 1e-3, 2e-4, 2.33e-4.
    assert least_usd_of_any(priced, workload) == pytest.approx(2 * 4e-4 * least_s(one, work, 1), rel=1e-6)


def test_more_stages_and_more_to_do_take_no_less() -> None:
    cluster = sites_cluster(np.random.default_rng(0), 5, 2, "access")
    steps = [least_s(cluster, layered_workload(6), stages) for stages in (1, 2, 3, 4, 5)]
    assert all(one <= other for one, other in pairwise(steps)) and steps[0] < 0.1 * steps[1] < steps[4]
    slow = sites_cluster(np.random.default_rng(0), 5, 2, "even", throughput="0.1 TFLOPS")
    assert least_s(slow, layered_workload(12)) > 1.9 * least_s(slow, layered_workload(6))
    assert least_s(cluster, layered_workload(6), 2, CODED) < 0.7 * steps[1]
    assert least_s(cluster, layered_workload(6), 2, alike=False) <= steps[1]


def test_where_links_are_all_that_counts_one_site_a_stage_meets_it() -> None:
    """Two sites and experts that are too large to move: activations cross once each way."""
    cluster = sites_cluster(np.random.default_rng(1), 2, 1, "access", throughput="1000 TFLOPS")
    workload = layered_workload(2, ffn=4096, micro_batches=4, micro_batch_size=8)
    plan = plan_pipeline(cluster, workload, time_limit_s=5)
    least = least_step_s(plan, [one.times for one in costed(plan).inside])
    assert least == pytest.approx(least_s(cluster, workload), rel=1e-5)


def test_a_stage_in_the_middle_passes_everything_twice() -> None:
    cluster = sites_cluster(np.random.default_rng(1), 3, 1, "even", throughput="1000 TFLOPS")
    workload = layered_workload(3, ffn=4096, micro_batches=4, micro_batch_size=8)
    plan = plan_pipeline(cluster, workload, StageWishes(stages=3), time_limit_s=5)
    least = least_step_s(plan, [one.times for one in costed(plan).inside])
    found = least_s(cluster, workload, 3)
    assert least == pytest.approx(found, rel=1e-5)
    # Up and down the link of the one in the middle.
    training = workload.training
    passed_bytes = training.tokens * training.micro_batches * cluster.num_gpus * workload.combine_row_bytes
    assert found == pytest.approx(2 * passed_bytes / cluster.levels[0].bandwidth, rel=1e-3)
    two = sites_cluster(np.random.default_rng(1), 2, 1, "even", throughput="1000 TFLOPS")
    # The same batch for each site, so two thirds of it in all, once.
    assert least_s(two, workload) == pytest.approx(found / 3, rel=1e-3)


@pytest.mark.parametrize("slow", ["links", "gpu"])
def test_a_site_may_have_a_sequence_less_than_its_stages_others(slow: str) -> None:
    """Of three sequences the second site of a stage, which is slow, has one; small experts are where their tokens are."""
    cluster, workload = sites_cluster(np.random.default_rng(1), 3, 1, "even"), layered_workload(4, ffn=2, micro_batches=999)
    one = workload.training.model_copy(update={"micro_batch_size": 1})
    workload = workload.model_copy(update={"training": one})
    sites: list[dict[str, Any]] = [{"name": f"s{site}", "up": "1000 Gbps", "down": "1000 Gbps"} for site in range(3)]
    sites[1] |= {"up": "10 Mbps", "down": "10 Mbps"} if slow == "links" else {"gpu": {"throughput": "10 GFLOPS"}}
    cluster = build(Cluster, cluster.model_dump(mode="json") | {"sites": sites}, "sites")
    plan = in_stages(cluster, workload, [(["s0", "s1"], 1, 2), (["s2"], 3, 1)], 999)
    assert plan.sequences(0).tolist() == [2, 1]
    least = least_step_s(plan, [one.times for one in costed(plan).inside])
    assert 0.8 * least < least_s(cluster, workload) <= least


def test_sites_pass_on_their_shares_and_no_more() -> None:
    """Two stages of two sites, or of one and three: all are ends, and each passes half of what crosses, on average."""
    cluster = sites_cluster(np.random.default_rng(1), 4, 1, "even", throughput="1000 TFLOPS")
    workload = layered_workload(4, micro_batch_size=30)
    training, found = workload.training, least_s(cluster, workload, alike=False)
    passed_bytes = training.tokens * training.micro_batches * cluster.num_gpus * workload.combine_row_bytes
    # Two of the four layers' dense gradients, half of each there and back.
    dense_bytes = 2 * layer_dense_bytes(cluster, Wire(workload=workload), np.array([2]))[0]
    assert 0.01 * passed_bytes < dense_bytes < passed_bytes / 2
    assert found == pytest.approx((passed_bytes / 2 + dense_bytes) / cluster.levels[0].bandwidth, rel=1e-3)


def test_a_site_sends_rows_of_its_own_sequences() -> None:
    cluster = sites_cluster(np.random.default_rng(1), 3, 1, "even")
    sites = _Sites(cluster, layered_workload(4, ffn=4096), EXACT, 3, alike=True)
    two = sites._sizes == 2
    up_bytes, share = sites._layer_bytes[0, 0, two], sites._share[0, two]
    up_bytes = up_bytes - layer_dense_bytes(cluster, Wire(workload=layered_workload(4, ffn=4096)), np.array([2]))
    assert share.min() == 1 / 3 and share.max() == 2 / 3
    # Nothing is worth copying.
    np.testing.assert_allclose(up_bytes / share, up_bytes[0] / share[0])
    # Of any two sites' shares each is at least the least one.
    dense_bytes = sites._layer_bytes[0, 0, two] - up_bytes
    both_bytes = sites._layer_bytes[:, 0, two].sum(axis=0) - 2 * dense_bytes
    assert sites._sent_bytes[1] - dense_bytes[0] == pytest.approx(both_bytes[share.argmin()])


def test_layers_are_whole_ones() -> None:
    """Of three layers one of two sites has two: experts fill its time, and are too large to move."""
    cluster = sites_cluster(np.random.default_rng(1), 2, 1, "even", throughput="0.001 TFLOPS")
    level = cluster.levels[0].model_copy(update={"bandwidth": 1e9})
    cluster = cluster.model_copy(update={"levels": (level, *cluster.levels[1:])})
    three, four = (least_s(cluster, layered_workload(layers, ffn=1024)) for layers in (3, 4))
    assert 0.9 * four < three <= four
    plan = in_stages(cluster, layered_workload(3, ffn=1024), [(["s0"], 2, 1), (["s1"], 1, 1)], 4)
    assert three <= least_step_s(plan, [one.times for one in costed(plan).inside]) <= 1.1 * three


def test_sites_of_a_stage_share_its_layers() -> None:
    """Computation is what counts: two sites have three layers, one and a half each, where one by one somebody had two of four."""
    cluster = sites_cluster(np.random.default_rng(1), 3, 1, "even", throughput="0.001 TFLOPS")
    level = cluster.levels[0].model_copy(update={"bandwidth": 1e12})
    cluster, workload = cluster.model_copy(update={"levels": (level, *cluster.levels[1:])}), layered_workload(4, ffn=1024)
    plan = in_stages(cluster, workload, [(["s2"], 1, 1), (["s0", "s1"], 3, 1)], 4)
    least = least_step_s(plan, [one.times for one in costed(plan).inside])
    assert 0.85 * least < least_s(cluster, workload) <= least


def in_stages(cluster: Cluster, workload: Workload, stages: list[tuple[list[str], int, int]], micro_batches: int) -> PipelinePlan:
    """(Sites, layers, equal domains) of each stage."""
    made = [
        {
            "sites": sites,
            "num_layers": layers,
            "layers": [LayerGroup(first_layer=0, num_layers=layers, domains={"dc": size, "gpu": 1}, migration={})],
        }
        for sites, layers, size in stages
    ]
    data = {"cluster": cluster, "workload": workload, "micro_batches": micro_batches, "ahead": 8, "stages": made}
    return build(PipelinePlan, data, "pipeline")


def test_computation_that_is_shared_perfectly_meets_it() -> None:
    """Two sites with fast links, and experts of next to no size: attention is all there is."""
    cluster = sites_cluster(np.random.default_rng(1), 2, 1, "even", throughput="0.01 TFLOPS")
    level = cluster.levels[0].model_copy(update={"bandwidth": 1e12})
    cluster, workload = cluster.model_copy(update={"levels": (level, *cluster.levels[1:])}), layered_workload(2, ffn=2)
    plan = in_stages(cluster, workload, [(["s0"], 1, 1), (["s1"], 1, 1)], 2)
    times = [one.times for one in costed(plan).inside]
    # Both stages together; the output projection is in one of them only.
    mean_s = sum(one.busy_s(2) for one in times) / 2
    assert 0.95 * mean_s < least_s(cluster, workload) <= mean_s


def away_of(experts: int, top_k: int) -> np.ndarray:
    """[E + 1]: the share of tokens that need others than so many experts."""
    return np.array([1 - comb(held, top_k) / comb(experts, top_k) for held in range(experts + 1)])


def test_a_site_has_as_many_experts_of_its_own_as_homes_may_give_it() -> None:
    """Eight experts of three sites: the first has three, and fetches five where tokens are many, none where they are few."""
    many, few, away = 1e12, 1e-6, away_of(8, 2)
    found = least_site_bytes(away, 3, np.array([many, few]), (1, 2), (100, 10))
    assert found[:, 0].tolist() == [500.0, 50.0] and found[:, 1].max() < 1e-5
    # Of 28 pairs of experts three are among its own, so 25 bytes in 28 leave; or all five others come.
    assert least_site_bytes(away, 3, np.array([1.0]), (28, 28), (1000, 2)).tolist() == [[25.0], [10.0]]


def test_what_sites_send_each_other_is_counted_for_both() -> None:
    """Every way to hold five experts at three sites with homes of two, two and one: what is sent is fetched, so counts once."""
    experts, top_k, tokens, row_bytes, copy_bytes = 5, 2, 7.0, 3, 10
    sets = [frozenset(found) for number in range(experts + 1) for found in combinations(range(experts), number)]

    def sent(home: frozenset[int], held: frozenset[int]) -> float:
        """What one site fetches, gives back, and what its tokens are there and back."""
        chosen = list(combinations(range(experts), top_k))
        away = sum(not set(some) <= held for some in chosen) / len(chosen)
        return len(held - home) * copy_bytes + away * tokens * row_bytes

    for copy_bytes in (1, 4, 10, 1000):
        homes = [frozenset({0, 1}), frozenset({2, 3}), frozenset({4})]
        least = sum(min(sent(home, held) for held in sets if home <= held) for home in homes) / 3
        found = away_of(experts, top_k), 3, tokens, row_bytes, copy_bytes
        assert least_mean_bytes(*found) == pytest.approx(least)
        # Of homes as they come, too.
        least = min(
            sum(min(sent(home, held) for held in sets if home <= held) for home in homes) / 3
            for homes in product(sets, repeat=3)
            if sum(map(len, homes)) == experts and len(frozenset().union(*homes)) == experts
        )
        assert 0.8 * least < least_mean_bytes(*found, alike=False) <= least * (1 + 1e-12)


@pytest.mark.parametrize("codecs", [EXACT, *SHORT_GRADIENTS])
@pytest.mark.parametrize("sites", [2, 3, 4])
def test_dense_gradients_are_those_of_a_layer(sites: int, codecs: Codecs) -> None:
    """What one more layer adds to what each site of a stage sends."""
    cluster = sites_cluster(np.random.default_rng(0), sites, 2, "even")

    def sent(layers: int) -> float:
        plan = build(
            Plan,
            {
                "cluster": cluster,
                "workload": layered_workload(layers),
                "layers": [LayerGroup(first_layer=0, num_layers=layers, domains={}, migration={})],
                "codecs": codecs_inside({"dc": codecs}),
            },
            "plan",
        )
        traffic = {key: rows for key, rows in step_traffic(plan).items() if key.op in DENSE and key.level == 0}
        up = link_bytes(cluster, traffic)[: 2 * sites].reshape(sites, 2)
        assert len(traffic) == 2 and np.ptp(up) < 0.01 * up.max()
        return float(up.min())

    counted = float(layer_dense_bytes(cluster, Wire(workload=layered_workload(3), codecs=codecs), np.array([sites]))[0])
    assert counted == pytest.approx((sent(11) - sent(1)) / 10, rel=0.005) and 11 * counted < sent(11)


def test_near_shares_that_count_as_one_leave_every_pipeline_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven sequences of three sites, two of which share them as three and four: together they are one end, not 8/7 of one."""
    monkeypatch.setattr(bound, "_MANY", 0)
    seven = sites_cluster(np.random.default_rng(1), 7, 1, "access")
    cluster, workload = on_sites(seven, layered_workload(2, micro_batches=1, micro_batch_size=1), ["s0", "s1", "s2"])
    sites = _Sites(cluster, workload, EXACT, 2, alike=True)
    assert sites._sizes.tolist() == [1, 2] and sites._share[0, 1] * 7 == 3 and sites._most_share[0, 1] * 7 == 4
    # One layer each in a stage of one site, and of two, and nothing else: neither other sizes nor the middle.
    able = np.full((2, 3, 2), -np.inf)
    able[1, [0, 1, 2], [0, 1, 1]] = 1.0
    assert sites._could_count(able, sites._most_share, sites._share)
    assert not sites._could_count(np.where(able == 1, 0.9, able), sites._most_share, sites._share)


@pytest.mark.parametrize("any_sites", [False, True])
def test_sites_that_copy_all_from_each_other_meet_it(any_sites: bool) -> None:
    """Two stages of two sites, which copy what the other one has: half of the experts come, and as many go."""
    cluster = sites_cluster(np.random.default_rng(1), 4, 1, "even", throughput="1000 TFLOPS")
    workload = layered_workload(4, micro_batches=400, micro_batch_size=1)
    plan = in_stages(cluster, workload, [(["s0", "s1"], 2, 2), (["s2", "s3"], 2, 2)], 200)
    least = least_step_s(plan, [one.times for one in costed(plan).inside])
    found = least_of_any_s(cluster, workload, 2) if any_sites else least_s(cluster, workload)
    assert 0.9 * least < found <= least


def test_sites_without_stages_send_what_they_copy() -> None:
    """One site alone computes for long, and activations are many, so two sites with all layers copy everything. A third one is
    slow, and left out."""
    even = sites_cluster(np.random.default_rng(1), 3, 1, "even", throughput="20 TFLOPS")
    slow = [{"name": "s0", "up": "1 Mbps", "down": "1 Mbps"}, {"name": "s1"}, {"name": "s2"}]
    cluster = build(Cluster, even.model_dump(mode="json", exclude_none=True) | {"sites": slow}, "sites")
    workload = layered_workload(4, ffn=1024, micro_batches=64, micro_batch_size=8)
    two, work = on_sites(cluster, workload, ["s1", "s2"])
    found = costed(in_stages(two, work, [(["s1", "s2"], 4, 2)], work.training.micro_batches))
    for least in (least_of_any_s(cluster, workload), least_of_any_s(two, work)):
        assert 1.3 * least_s(two, work, 1) < least < 0.8 * least_of_any_s(two, work, 2)
        assert 0.95 * found.times.busiest_link_s < least <= found.times.busiest_link_s
