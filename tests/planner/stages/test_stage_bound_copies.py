"""What waits for copies in a pipeline's bound: nothing passes a stage before they have come, nor once their gradients leave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest
from stage_cases import layered_workload, sites_cluster
from test_stage_bound import in_stages, waits_for_nothing

from hybridep.codecs import EXACT
from hybridep.config import build
from hybridep.pipeline import PipelinePlan, possible_micro_batches
from hybridep.shares import parts
from hybridep.topology import Cluster
from planner.stages.bound import _Sites, least_s
from planner.stages.costs import Costed, costed
from planner.stages.least_bytes import Copying, Payloads, _convex
from planner.stages.schedule import stage_links, stage_sites
from planner.stages.walk import Way
from simulator.pipeline import simulate_pipeline


@pytest.mark.parametrize(
    ("tflops", "ffn", "batch", "layers", "near"), [(60, 8192, 128, 5, 0.97), (60, 16384, 256, 3, 0.97), (25, 16384, 256, 3, 0.84)]
)
def test_the_last_stage_has_what_copies_leave_of_the_step(
    tflops: int, ffn: int, batch: int, layers: int, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sites between two others copy all of a layer from each other."""
    cluster = sites_cluster(np.random.default_rng(1), 4, 1, "even", throughput=f"{tflops} TFLOPS")
    workload, ends = layered_workload(layers, ffn=ffn, micro_batches=batch), (layers - 1) // 2
    plan = in_stages(cluster, workload, [(["s0"], ends, 1), (["s1", "s2"], 1, 2), (["s3"], ends, 1)], 2 * batch)
    found, least = costed(plan), least_s(cluster, workload, 3)
    assert near * found.times.step_s < least <= min(found.times.step_s, simulate_pipeline(plan).step_s)
    if near < 0.9:
        # Neither a link nor a stage is busy for so long.
        assert least > 1.1 * max(found.times.busiest_link_s, found.times.work_s)
    waits_for_nothing(monkeypatch)
    assert least_s(cluster, workload, 3) < 0.83 * least


def copied_and_computed_s(plan: PipelinePlan, found: Costed) -> float:
    """What a stage copies before its first pass and returns after its last one, on average over sequences, and what the last one
    computes between: with equal GPUs, and links that nothing else is on."""
    cluster, inside = plan.cluster, stage_links(plan, found.times.stages)
    shares = [np.array(plan.sequences(stage))[:: cluster.ranks_per_site] for stage in range(len(plan.stages))]

    def held_s(way: Way, link: int) -> float:
        return float(sum(seconds for one, seconds, _ in way.links if one == link))

    copied_s = [
        float(
            share
            @ [held_s(one.gathered, 2 * site + 1) + held_s(one.returned, 2 * site) + held_s(one.dense, 2 * site) for site in own]
        )
        / share.sum()
        for share, one, own in zip(shares[:-1], inside, stage_sites(plan), strict=False)
    ]
    last, share = plan.plans[-1], shares[-1] / shares[-1].sum()
    sites = _Sites(cluster, plan.workload, EXACT, 2, alike=True)
    layer_s = sites._whole_flops * share.min() / (sites._fastest)
    passed_s = sites._step_bytes / (len(share) * cluster.access_bytes_per_s.max() * plan.micro_batches)
    return max(copied_s) + last.workload.model.num_moe_layers * layer_s + float(passed_s)


def test_steps_are_no_shorter_than_copies_and_what_waits_for_them() -> None:
    """Simulated: two to four sites that copy all, a stage between in half of the cases, and the last one, of one to three."""
    shares = list[float]()
    for seed in (2, 7, 18, 20, 21, 54, 61, 86, 136, 152):
        rng = np.random.default_rng(seed)
        numbers = int(rng.integers(2, 5)), int(rng.integers(0, 3)), int(rng.integers(1, 4))
        cluster = sites_cluster(
            rng, sum(numbers), 1, ("even", "access")[seed % 2], throughput=f"{10 ** rng.uniform(0, 2.5):.3f} TFLOPS"
        )
        batch, ffn = int(rng.choice([24, 48, 96])), int(rng.choice([1024, 4096]))
        names = [cluster.site_name(int(site)) for site in rng.permutation(sum(numbers))]
        edges = np.cumsum([0, *numbers])
        parts_of = [names[low:high] for low, high in pairwise(edges.tolist()) if high > low]
        stages = [(sites, 1, len(sites) if rng.random() < 0.7 or not place else 1) for place, sites in enumerate(parts_of)]
        workload = layered_workload(len(stages), ffn=ffn, micro_batches=batch, micro_batch_size=int(rng.integers(1, 3)))
        groups = [[cluster.site_names.index(name) for name in sites] for sites in parts_of]
        plan = in_stages(cluster, workload, stages, possible_micro_batches(workload, cluster, groups)[-1])
        found = costed(plan)
        shares.append(copied_and_computed_s(plan, found) / min(found.times.step_s, simulate_pipeline(plan).step_s))
    assert 0.9 < max(shares) <= 1 and sorted(shares)[-3] > 0.8


def test_the_last_stage_is_not_the_only_one_and_has_sites_of_its_own() -> None:
    """Three sites, of which each has two layers: with one layer at least in the last stage five are left for the others."""
    sites = _Sites(sites_cluster(np.random.default_rng(1), 3, 1, "access"), layered_workload(6), EXACT, 2, alike=True)
    able, counts, last = np.full((2, 3, len(sites._sizes)), 2.0), 1 / sites._sizes, np.array([2.0, -np.inf])
    assert sites._could_count(able, counts, last=last)
    # One of the others is the first.
    assert not sites._could_count(able - [[[0.0]], [[1.0]]], counts, last=last)
    # A site that could have one layer only is the last stage's, but not two of them.
    less = able - (np.arange(3) == 1)[:, None], able - (np.arange(3) > 0)[:, None]
    assert [sites._could_count(one, counts, last=last) for one in less] == [True, False]
    assert not sites._could_count(able, counts, last=last - 1)
    # Two sites together have four layers, and leave two for the third.
    assert sites._could_count(able, counts, last=np.array([-np.inf, 4.0]))
    assert not sites._could_count(able, counts, last=np.array([-np.inf, 3.0]))


@pytest.mark.parametrize("kind", ["even", "access"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sites_that_copy_all_have_as_many_layers_as_is_counted(kind: str, stage: int) -> None:
    """The two with the fastest links, first, in the middle or last; none less than what they copy and pass takes."""
    cluster = sites_cluster(np.random.default_rng(3), 4, 1, kind, throughput="1000 TFLOPS")
    workload, order = layered_workload(5, ffn=1024, micro_batches=240), np.argsort(-cluster.access_bytes_per_s.sum(axis=0))
    names = [cluster.site_name(site) for site in order]
    ends = [([names[2]], 1, 1), ([names[3]], 1, 1)]
    ends.insert(stage, (names[:2], 3, 2))
    plan = in_stages(cluster, workload, ends, 480)
    found, sites = costed(plan), _Sites(cluster, workload, EXACT, 2, alike=True)
    inside, rates = stage_links(plan, found.times.stages)[stage], cluster.access_bytes_per_s[:, order[:2]]

    def sent(ways: Sequence[Way], way: int) -> np.ndarray:
        """[the two] bytes."""
        held_s = {link: sum(one[1] for each in ways for one in each.links if one[0] == link) for link in range(8)}
        return np.asarray(np.array([held_s[2 * site + way] for site in order[:2]]) * rates[way])

    every, passes = inside.every, 1 + (stage == 1)
    both = [(sent(every, way).sum() + passes * sites._step_bytes) / sites._most_access[way, 1] for way in (0, 1)]
    up, down = cluster.access_bytes_per_s.max(axis=1)
    took_s = (sent(every[:1], 1) / down + sent(every[1:], 0) / up).mean()
    if stage < 2:
        # All that a stage sends once a step, it sends before its first pass or after its last one.
        assert sites._copied(max(both) * (1 + 1e-6), took_s * (1 + 1e-6), passes)[1] == 3
        assert sites._copied(max(both) * 0.99, took_s, passes)[1] == 2
        assert sites._copied(max(both), 0.9 * took_s, passes)[1] == 2
    else:
        step_s, carried = max(both) * (1 + 1e-6), np.full((4, len(sites._sizes)), 5.0)
        assert [sites._last(each_s, step_s, carried)[1] for each_s in (step_s, 0.99 * step_s)] == [3, 2]


def test_the_last_stage_computes_as_fast_as_the_fastest_sites() -> None:
    """Of three sequences two may pass one site, and one another, which then may have three times the mean for its passes."""
    even = sites_cluster(np.random.default_rng(1), 3, 1, "even", throughput="1 TFLOPS")
    slow = {"gpu": {"throughput": "0.5 TFLOPS"}}
    given = even.model_dump(mode="json", exclude_none=True) | {
        "sites": [{"name": "s0"}, {"name": "s1"} | slow, {"name": "s2"} | slow]
    }
    workload = layered_workload(12, ffn=2, micro_batches=999)
    workload = workload.model_copy(update={"training": workload.training.model_copy(update={"micro_batch_size": 1})})

    def last(bytes_per_s: float) -> list[float]:
        given["levels"][0] |= {"bandwidth": f"{8 * bytes_per_s / 1e9} Gbps"}
        sites = _Sites(build(Cluster, given, "sites"), workload, EXACT, 2, alike=True)
        found = sites._last(1e9, 3 * layer_s * (1 + 1e-6), np.full((3, len(sites._sizes)), 12.0))
        return [float(layers) for layers in found]

    sites = _Sites(even, workload, EXACT, 2, alike=True)
    layer_s = sites._whole_flops / 1e12
    assert last(1e15) == [3, 9]
    # Up to 2997 micro-batches, of a sequence each, or 1498: what one of them takes to come and to go is half of 1.98 layers.
    assert last(sites._step_bytes / 2997 / (0.99 * layer_s)) == [2, 6]


@pytest.mark.parametrize("seed", range(6))
def test_no_stage_has_more_layers_than_its_copies_leave_room_for(seed: int) -> None:
    """Whatever its sites hold of each layer, and whichever share of the sequences passes each."""
    rng, experts, top_k, tight = np.random.default_rng(seed), 5, 2, 0.0
    payloads = Payloads(row=int(rng.integers(1, 9)), expert=int(rng.integers(1, 40)), gradient=int(rng.integers(1, 40)))
    away = np.array([1 - comb(held, top_k) / comb(experts, top_k) for held in range(experts + 1)])
    tokens, dense_bytes = float(rng.choice([3.0, 30.0, 300.0])), rng.uniform(0, 5, 2)
    homes = {number: parts(experts, tuple(rng.choice([1.0, 2.0], number))) for number in (2, 3)}
    counts = {number: parts(6, tuple(rng.choice([1.0, 2.0], number))) for number in (2, 3)}
    most_share = np.array([max(counts[number]) / 6 for number in (2, 3)])
    copying = Copying(away, [max(homes[number]) for number in (2, 3)], most_share, tokens, payloads)
    for _ in range(400):
        number, layers = int(rng.integers(2, 4)), int(rng.integers(1, 4))
        home, share = np.array(homes[number])[:, None], np.array(counts[number]) / 6
        held = np.minimum(home + rng.integers(0, rng.integers(1, experts + 1), (number, layers)), experts)
        if rng.random() < 0.3:
            # The site that most sequences pass copies all, and others nothing.
            held = np.where((share == share.max())[:, None], experts, home) + np.zeros_like(held)
        up, down = rng.uniform(1, 2, number), rng.uniform(4, 8, number)
        copies, dense = (held - home).sum(axis=1), layers * dense_bytes[number - 2]
        took_s = float(share @ (copies * payloads.expert / down + (copies * payloads.gradient + dense) / up))
        sent = (held - home) * (payloads.expert + payloads.gradient) + share[:, None] * tokens * payloads.row * away[held]
        room = np.zeros(2)
        room[number - 2] = sent.sum() + number * dense
        found = copying.layers(took_s, 4, (float(up.max()), float(down.max())), dense_bytes, np.zeros(2), room)[number - 2]
        assert found >= layers
        tight = max(tight, layers / found)
        less = copying.layers(0.0, 4, (float(up.max()), float(down.max())), dense_bytes * 0, np.zeros(2), room)[number - 2]
        assert less <= room.sum() / (tokens * payloads.row * _convex(away[home.max() :])[0]) + 1e-6
    assert tight == 1


def test_one_site_may_copy_for_most_sequences() -> None:
    """Two of three pass the first of two sites, which copies both experts of the other one; that copies nothing."""
    away, tokens, payloads = np.array([1.0, 1.0, 5 / 6, 1 / 2, 0.0]), 3e3, Payloads(row=5, expert=100, gradient=200)
    copying, sent_bytes = Copying(away, [2], np.array([2 / 3]), tokens, payloads), 2 * 300 + tokens / 3 * 5 * away[2]

    def layers(took_s: float, room_bytes: float) -> int:
        return int(copying.layers(took_s, 9, (1.0, 1.0), np.zeros(1), np.zeros(1), np.array([room_bytes]))[0])

    assert [layers(2 / 3 * 600, share * sent_bytes) for share in (1.0, 0.99)] == [1, 0]
    assert [layers(share * 2 / 3 * 1800, 3 * sent_bytes) for share in (1.0, 0.99)] == [3, 2]


def test_convex_functions_below_others() -> None:
    for values in (np.array([3.0, 1.0, 2.0, 0.0, 5.0]), np.random.default_rng(0).uniform(size=9)):
        found, places = _convex(values), range(len(values))
        # Of all lines between two values, whichever is least.
        lines = [
            [min(values[at], *(np.interp(at, [one, other], values[[one, other]]) for one, other in pairs), values[at])]
            for at in places
            if (pairs := [(one, other) for one, other in combinations(places, 2) if one <= at <= other])
        ]
        np.testing.assert_allclose(found, np.ravel(lines))
