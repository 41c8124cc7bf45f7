"""Ranks that are done go on: never longer than the sum over exchanges that wait for the slowest, and exact where links are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridep.codecs import Codecs, ExpertCodec, GradientCodec, TokenCodec
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.config import build
from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.recompute import Recompute
from hybridep.serving import ServingGroup
from hybridep.topology import Cluster
from hybridep.traffic import Op, OpLevel
from planner import expected_s, step_cost
from planner.exchange import ExchangeTimes
from planner.layer_times import CODING
from planner.staggered import Pairs, pairs_of, staggered_s
from simulator.step import simulate_step

GPU = {"throughput": "10 TFLOPS", "memory": "80 GiB", "memory_bandwidth": "1 TB/s"}
MS = 1e-3


def sites(size, *, latency="0 s", inside=1, **more):
    """One rank a site unless told; access at 1 MB/s."""
    levels = [{"name": "dc", "size": size, "bandwidth": "8 Mbps", "latency": latency}]
    if inside > 1:
        levels.append({"name": "gpu", "size": inside, "bandwidth": "80 Mbps", "latency": latency})
    return build(Cluster, {"name": "sites", "levels": levels, "gpu": GPU | more.pop("gpu", {}), **more}, "test")


def seconds_of(cluster, sent, **streams):
    """[source, destination] of one exchange between sites of one rank; zero where nothing moves."""
    pairs = pairs_of(
        ExchangeTimes(cluster=cluster, streams=streams), OpLevel(Op.TOKEN_DISPATCH, 0), np.array(sent, dtype=np.float64)
    )
    found = np.zeros((cluster.num_gpus, cluster.num_gpus))
    found[pairs.source, pairs.destination] = pairs.seconds
    return found


def test_a_transfer_waits_for_both_ends_and_a_rank_for_all_its_own():
    pairs = Pairs(source=np.array([0, 1, 2]), destination=np.array([1, 0, 1]), seconds=np.array([8.0, 5.0, 1.0]))
    assert pairs.ends(np.array([1.0, 4.0, 10.0, 3.0])).tolist() == [12.0, 12.0, 11.0, 3.0]


def test_a_link_is_shared_evenly_until_the_smaller_are_done():
    """1, 2 and 6 kB over one uplink of 1 kB/ms: at 3, 5 and 9 ms."""
    sent = np.zeros((4, 4))
    sent[0, 1:] = 1e3, 2e3, 6e3
    assert seconds_of(sites(4), sent)[0, 1:] == pytest.approx([3 * MS, 5 * MS, 9 * MS])
    assert seconds_of(sites(4), sent.T)[1:, 0] == pytest.approx([3 * MS, 5 * MS, 9 * MS]), "and one downlink"


def test_the_slowest_link_and_the_latency_of_the_pair_count():
    names = [{"name": f"s{one}"} for one in range(3)]
    links = [
        {"src": f"s{a}", "dst": f"s{b}", "bandwidth": "800 kbps" if (a, b) == (0, 1) else "80 Mbps", "latency": f"{a + b} ms"}
        for a in range(3)
        for b in range(3)
        if a != b
    ]
    sent = np.zeros((3, 3))
    sent[0, 1], sent[0, 2] = 1e3, 1e3
    found = seconds_of(sites(3, sites=names, links=links), sent)
    assert found[0, 1] == pytest.approx(10 * MS + 1 * MS), "its own link"
    assert found[0, 2] == pytest.approx(2 * MS + 2 * MS), "the uplink of both"


def test_windows_hold_each_pair_by_itself():
    plain = sites(3, latency="5 ms")
    cluster = plain.model_copy(update={"levels": (plain.levels[0].model_copy(update={"window": 1e3}),)})
    sent = np.zeros((3, 3))
    sent[0, 1], sent[0, 2] = 1e3, 3e3
    assert seconds_of(plain, sent)[0, 1:] == pytest.approx([7 * MS, 9 * MS])
    assert seconds_of(cluster, sent)[0, 1:] == pytest.approx([15 * MS, 35 * MS]), "1 kB per 10 ms"
    assert seconds_of(cluster, sent, dc=10)[0, 1:] == pytest.approx([7 * MS, 9 * MS])


def test_a_trunk_is_shared_by_what_crosses_it():
    trunk = {"name": "bridge", "bandwidth": "8 Mbps", "carries": {"s0 -> s1": 1.0, "s2 -> s1": 0.5}}
    cluster = sites(3, sites=[{"name": f"s{one}", "up": "8 Gbps", "down": "8 Gbps"} for one in range(3)], trunks=[trunk])
    sent = np.zeros((3, 3))
    sent[0, 1], sent[2, 1], sent[0, 2] = 1e3, 4e3, 8e3
    found = seconds_of(cluster, sent)
    assert found[0, 1] == pytest.approx((1e3 + 0.5e3) / 1e6), "all of it, beside as much of the half"
    assert found[2, 1] == pytest.approx((1e3 + 2e3) / 1e6)
    assert found[0, 2] == pytest.approx(9e3 / 1e9), "by another way"


def test_further_messages_and_jitter_take_their_time():
    sent = np.zeros((3, 3))
    sent[0, 1], sent[0, 2], sent[1, 2] = 1e3, 1e3, 1e3
    plain, late = sites(3), sites(3, gpu={"message_overhead": "1 ms", "jitter": "5 ms"})
    assert seconds_of(late, sent)[0] == pytest.approx(seconds_of(plain, sent)[0] + [0, 1 * MS, 1 * MS])
    assert seconds_of(late, sent)[1, 2] == pytest.approx(seconds_of(plain, sent)[1, 2])
    key = OpLevel(Op.EXPERT_GATHER, 0)
    gathered = pairs_of(ExchangeTimes(cluster=late), key, sent).seconds
    assert gathered == pytest.approx(pairs_of(ExchangeTimes(cluster=plain), key, sent).seconds + np.array([6, 6, 5]) * MS)


def walked_s(made, cost):
    """The walk itself, wherever the sum and the bound are."""
    return staggered_s(made, replace(cost, bound_s=0.0, step_s=np.inf))


def plan_of(cluster, workload, domain, residency=Residency.STEP, schedule=None, codecs=None):
    group = LayerGroup(
        first_layer=0,
        num_layers=workload.model.num_moe_layers,
        domains={"dc": domain},
        migration={},
        residency=residency,
        recompute=Recompute((domain + 2) % 4),
    )
    return Plan(cluster=cluster, workload=workload, layers=(group,), schedule=schedule or Schedule(), codecs=codecs or {})


SMALL = ("model.num_layers=3", "model.vocab_size=256", "model.shared_ffn_size=512", "training.micro_batches=2")


@pytest.mark.parametrize("residency", list(Residency))
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("cluster", "model"), [("lab-4dc", "tiny"), ("paper-m", "llama-tiny")])
def test_ranks_that_all_do_the_same_take_the_sum(cluster, model, overlap, residency):
    measured = (*("gpu.pass_overhead=6 ms", "gpu.message_overhead=1.3 ms", "gpu.jitter=2 ms", "gpu.sharing=3"),)
    for overrides in ((), measured):
        for domain in (1, 2):
            made = plan_of(
                load_cluster(cluster, overrides), load_workload(model, SMALL), domain, residency, Schedule(overlap=overlap)
            )
            cost = step_cost(made)
            assert walked_s(made, cost) == pytest.approx(cost.step_s, rel=1e-12)


@pytest.mark.parametrize("residency", list(Residency))
@pytest.mark.parametrize("overlap", [True, False])
def test_coding_and_the_shared_expert_take_as_long_as_in_the_sum(overlap, residency):
    """With little computation to hide them."""
    kinds, rates = ("tokens.int8", "experts.sr", "gradients.int8"), ("encode=20 MB/s", "decode=35 MB/s")
    coding = [f"gpu.coding.{kind}.{rate}" for kind in kinds for rate in rates]
    cluster = load_cluster("lab-4dc", ["gpu.throughput=1 TFLOPS", "gpu.block_overhead=0 s", "gpu.sharing=3", *coding])
    codecs = Codecs(tokens=TokenCodec.INT8, experts=ExpertCodec.SHARED_RESIDUAL, gradients=GradientCodec.INT8)
    made = plan_of(cluster, load_workload("tiny", SMALL), 2, residency, Schedule(overlap=overlap), {"dc": codecs})
    cost = step_cost(made)
    assert min(cost.parts_s[CODING], cost.parts_s[Op.SHARED_ALL_GATHER.value]) > 0.001 * cost.step_s
    assert walked_s(made, cost) == pytest.approx(cost.step_s, rel=1e-12)


def test_what_is_expected_stays_between_the_bound_and_the_sum():
    made = plan_of(load_cluster("lab-4dc"), load_workload("tiny", SMALL), 2)
    cost = step_cost(made)
    assert staggered_s(made, replace(cost, bound_s=2 * cost.step_s, step_s=3 * cost.step_s)) == 2 * cost.step_s
    assert staggered_s(made, replace(cost, bound_s=0.0, step_s=cost.step_s / 2)) == cost.step_s / 2


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_never_longer_than_the_sum_and_never_below_the_bound(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    size = draw(3, 4, 6)
    rates = [{"name": f"s{one}", "up": f"{draw(1, 3, 10)} Gbps", "down": f"{draw(1, 3, 10)} Gbps"} for one in range(size)]
    links = [
        {"src": f"s{a}", "dst": f"s{b}", "bandwidth": f"{draw(1, 2, 7)} Gbps", "latency": f"{draw(1, 30)} ms"}
        for a in range(size)
        for b in range(size)
        if a != b
    ]
    cluster = sites(size, inside=draw(1, 2), latency="1 ms", sites=rates, links=links if draw(True, False) else [])
    workload = load_workload("gpt-medium", ("model.num_layers=2", "model.num_experts=12", "training.micro_batches=2"))
    domain = draw(*(one for one in (1, 2, 3, size) if size % one == 0))
    made = plan_of(cluster, workload, domain, draw(*Residency), Schedule(overlap=draw(True, False)))
    cost = step_cost(made)
    assert cost.bound_s <= staggered_s(made, cost) <= cost.step_s


def test_what_is_slow_for_some_hides_behind_what_is_slow_for_others():
    """Three pairs of sites have all experts among them. One pair's copies come slowly, another one's tokens are exchanged slowly:
    at the same time, while the sum over exchanges has both."""
    slow = {(2, 0), (4, 5)}
    links = [
        {"src": f"s{a}", "dst": f"s{b}", "bandwidth": "80 Mbps" if (a, b) in slow else "800 Mbps", "latency": "1 ms"}
        for a in range(6)
        for b in range(6)
        if a != b
    ]
    cluster = sites(6, sites=[{"name": f"s{one}", "up": "8 Gbps", "down": "8 Gbps"} for one in range(6)], links=links)
    held = "0-1,4-5,8-9", "2-3,6-7,10-11"
    pairs = [(f"s{a}", f"s{a + 1}") for a in (0, 2, 4)]
    serving = tuple(ServingGroup(sites=pair, holders=dict(zip(pair, held, strict=True))) for pair in pairs)
    workload = load_workload("tiny", (*SMALL, "model.num_experts=12"))
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains={}, migration={}, serving=serving)
    made = Plan(cluster=cluster, workload=workload, layers=(group,))
    simulated_s = simulate_step(made).step_s
    assert step_cost(made).step_s > 1.05 * simulated_s
    assert expected_s(made) == pytest.approx(simulated_s, rel=0.02)


def test_layers_that_repeat_are_walked_as_if_each_were_new():
    """Copies of one layer group against as many groups of one layer."""
    cluster, workload = load_cluster("aws-9", ["levels.gpu.size=2"]), load_workload("gpt-medium", ("model.num_layers=6",))
    together = plan_of(cluster, workload, 3)
    each = [together.layers[0].model_copy(update={"first_layer": one, "num_layers": 1}) for one in range(6)]
    apart = Plan(cluster=cluster, workload=workload, layers=tuple(each))
    assert len(apart.placed) == 6
    assert expected_s(apart) == pytest.approx(expected_s(together), rel=1e-12)
    assert expected_s(together) < step_cost(together).step_s * (1 - 1e-3)


def test_copies_ahead_are_walked_elsewhere():
    made = plan_of(load_cluster("lab-4dc"), load_workload("tiny", SMALL), 2, schedule=Schedule(prefetch=1))
    with pytest.raises(ValueError, match=r"planner\.ahead"):
        staggered_s(made, step_cost(made))
    assert expected_s(made) == step_cost(made).step_s


@pytest.mark.parametrize(("prefetch", "residency"), [(0, "step"), (0, "microbatch"), (1, "step")])
def test_a_million_micro_batches_take_no_walk_of_each(prefetch: int, residency: str) -> None:
    """Each of those in the middle takes as long as any other."""
    cluster, found = load_cluster("lab-4dc"), {}
    for number in (2, 3, 1_000_000):
        workload = load_workload("tiny", [f"training.micro_batches={number}"])
        group = LayerGroup(first_layer=0, num_layers=4, domains={"dc": 2, "gpu": 2}, migration={}, residency=Residency(residency))
        plan = Plan(cluster=cluster, workload=workload, layers=(group,), schedule=Schedule(prefetch=prefetch))
        found[number] = expected_s(plan, step_cost(plan))
    assert found[1_000_000] == pytest.approx(found[2] + 999_998 * (found[3] - found[2]), rel=1e-6)
