"""Steps whose length a person can add up, and properties that hold for every plan."""

import itertools
import time
from math import comb, floor
from pathlib import Path

import numpy as np
import pytest
from simulated_plans import PLANS, RATES_GBPS, THROUGHPUT, make_plan

from hybridep.baselines import Baseline, baseline_plan
from hybridep.config import load
from hybridep.plan import LayerGroup, Plan
from hybridep.recompute import ALL, Recompute
from hybridep.topology import Cluster
from hybridep.traffic import link_bytes, step_traffic
from hybridep.workload import Dtype, Workload
from simulator.step import StepResult, simulate_step


def rate_bytes_per_s(level: str) -> float:
    return RATES_GBPS[level] * 1e9 / 8


def hit(num_served: int, num_experts: int = 16, top_k: int = 3) -> float:
    """Probability that a token needs a place that serves so many experts."""
    return 1 - comb(num_experts - num_served, top_k) / comb(num_experts, top_k)


def fixed_parts(plan: Plan) -> dict[str, float]:
    """What no placement changes, added up from the model's shapes: 2 MoE layers, 1 dense layer, 64 tokens a rank."""
    tokens, hidden, length = 64, 64, 32
    attention = 4 * hidden * hidden
    scores = 2 * length * hidden
    layers = plan.workload.model.num_moe_layers * plan.workload.training.micro_batches
    pre = tokens * (2 * (attention + hidden * 16 + 3 * hidden * 32) + scores) / THROUGHPUT + 1e-3
    expert = tokens * 3 * 2 * 3 * hidden * 128 / THROUGHPUT
    head = tokens * (2 * (attention + 3 * hidden * 96) + scores + 2 * 100 * hidden) / THROUGHPUT
    dense_part = -(-plan.workload.model.dense_params // plan.cluster.ranks_per_site)
    return {
        "pre_expert": layers * pre,
        "pre_expert_backward": 2 * layers * pre,
        "expert": layers * expert,
        "expert_backward": 2 * layers * expert,
        "head": plan.workload.training.micro_batches * head,
        "head_backward": 2 * plan.workload.training.micro_batches * head,
        # 3 x weight-sized and 2 x state-sized accesses of 4 and 8 bytes per parameter of the 2 layers' home experts and of a
        # part of the rest, which a site's ranks share out.
        "optimizer": (16 / plan.cluster.num_gpus * 2 * 3 * hidden * 128 + dense_part) * 28 / 1e12,
    }


@pytest.mark.parametrize("micro_batches", [8, 9])
def test_the_optimizer_reads_gradients_as_wide_as_their_sums(micro_batches: int) -> None:
    """In bf16 those of more than eight micro-batches are fp32; states are fp32, two moments and the weight."""
    plan = make_plan(2, micro_batches=micro_batches)
    training = plan.workload.training.model_copy(update={"dtype": Dtype.BF16})
    plan = plan.with_layers(*plan.layers, workload=plan.workload.model_copy(update={"training": training}))
    gradient_bytes = 2 if micro_batches <= 8 else 4
    moved = 2 * (2 + training.dtype.state_bytes) + gradient_bytes
    assert simulate_step(plan).parts["optimizer"] == pytest.approx(fixed_parts(plan)["optimizer"] / 28 * moved)


# A dispatched row: 64 fp32 values, 3 fp32 weights, 3 int32 ids. Its gradient has no ids; combined rows are values only.
DISPATCH_ROW, COMBINE_ROW, GRADIENT_ROW = 64 * 4 + 3 * 8, 64 * 4, 64 * 4 + 3 * 4


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("num_dcs", [2, 4, 8])
def test_ep_on_one_level_is_the_sum_of_its_parts(num_dcs: int, micro_batches: int) -> None:
    plan = make_plan(num_dcs, micro_batches=micro_batches)
    result = simulate_step(plan)
    rows = (num_dcs - 1) * 64 * hit(16 // num_dcs)
    times, rate = 2 * micro_batches, rate_bytes_per_s("dc")
    params = plan.workload.model.dense_params
    # The first params % N parts are one element larger: the busiest downlink takes in the largest part from each peer.
    shard_bytes = (num_dcs - 1) * -(-params // num_dcs) * 4
    expected = fixed_parts(plan) | {
        "token_counts": times * (num_dcs - 1) * 8 / rate,
        "token_dispatch": times * rows * DISPATCH_ROW / rate,
        "token_combine": times * rows * COMBINE_ROW / rate,
        "combine_backward": times * rows * COMBINE_ROW / rate,
        "dispatch_backward": times * rows * GRADIENT_ROW / rate,
        "dense_reduce_scatter": shard_bytes / rate,
        "dense_all_gather": shard_bytes / rate,
    }
    assert result.parts == pytest.approx(expected, rel=1e-6)
    assert result.step_s == pytest.approx(sum(expected.values()), rel=1e-6)


@pytest.mark.parametrize("latency_s", [0.0, 0.002])
@pytest.mark.parametrize(("num_dcs", "num_gpus"), [(2, 2), (2, 4), (4, 2)])
def test_ep_on_two_levels_is_the_sum_of_its_hops(num_dcs: int, num_gpus: int, latency_s: float) -> None:
    plan = make_plan(num_dcs, num_gpus, latency_s=latency_s)
    result = simulate_step(plan)
    # All GPUs of a DC share its uplink; inside, each rank forwards what it got for the DC, of all origins.
    slow = num_gpus * (num_dcs - 1) * 64 * hit(16 // num_dcs) / rate_bytes_per_s("dc")
    fast = (num_gpus - 1) * num_dcs * 64 * hit(16 // num_dcs // num_gpus) / rate_bytes_per_s("gpu")
    counts = num_gpus * (num_dcs - 1) * 8 / rate_bytes_per_s("dc") + (num_gpus - 1) * 8 / rate_bytes_per_s("gpu")
    layers, hops = 2, 2 * latency_s
    expected = {
        "token_counts": layers * (counts + hops),
        "token_dispatch": layers * ((slow + fast) * DISPATCH_ROW + hops),
        "token_combine": layers * ((slow + fast) * COMBINE_ROW + hops),
        "combine_backward": layers * ((slow + fast) * COMBINE_ROW + hops),
        "dispatch_backward": layers * ((slow + fast) * GRADIENT_ROW + hops),
    }
    parts = result.parts
    assert {name: parts[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert {name: parts[name] for name in fixed_parts(plan)} == pytest.approx(fixed_parts(plan), rel=1e-6)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("throughput", [1e8, 1e13])
def test_copies_hide_behind_computation_as_far_as_it_lasts(overlap: bool, throughput: float) -> None:
    plan = make_plan(4, domains={"dc": 4}, overlap=overlap, throughput=throughput)
    result = simulate_step(plan)
    # Every DC sends its 4 experts to the 3 others.
    copies_s = 3 * 4 * 3 * 64 * 128 * 4 / rate_bytes_per_s("dc")
    pre_s = plan.workload.pre_expert_flops / throughput + 1e-3
    assert (copies_s > pre_s) == (throughput == 1e13)
    block_s = max(copies_s, pre_s) if overlap else copies_s + pre_s
    back_s = max(copies_s, 2 * pre_s) if overlap else copies_s + 2 * pre_s
    parts = result.parts
    shown_s = sum(parts.get(name, 0.0) for name in ("expert_gather", "pre_expert"))
    assert shown_s == pytest.approx(2 * block_s, rel=1e-6)
    shown_s = sum(parts.get(name, 0.0) for name in ("gradient_return", "pre_expert_backward"))
    assert shown_s == pytest.approx(2 * back_s, rel=1e-6)
    assert "token_dispatch" not in parts


@pytest.mark.parametrize("recompute", [Recompute.EXPERTS, Recompute.ATTENTION, ALL])
def test_what_computes_again_takes_a_forward_more_but_for_last_products(recompute: Recompute) -> None:
    """Of shared experts, and of layers without experts, which compute again where attention does."""
    plan = make_plan(2, 2)
    plain, again = (simulate_step(one).parts for one in (plan, plan.with_layers(plan.layers[0].recomputing(recompute))))
    attention = Recompute.ATTENTION in recompute
    tokens, last = 64, 64 * 2 * 64 / THROUGHPUT
    expert_backward = plain.pop("expert_backward") * (1.5 if Recompute.EXPERTS in recompute else 1)
    assert again.pop("expert_backward") == pytest.approx(expert_backward)
    more = plain["pre_expert"] / 2 - 32 * last if attention else 2 * 32 * last
    assert again.pop("pre_expert_backward") == pytest.approx(plain.pop("pre_expert_backward") + 2 * more)
    dense = plain["head"] - tokens * 2 * 100 * 64 / THROUGHPUT - 96 * last if attention else 0.0
    assert again.pop("head_backward") == pytest.approx(plain.pop("head_backward") + dense)
    assert again == pytest.approx(plain)


@pytest.mark.parametrize(("residency", "gathers", "returns"), [("step", 1, 1), ("microbatch", 6, 3)])
def test_residency_decides_how_often_copies_travel(residency: str, gathers: int, returns: int) -> None:
    plan = make_plan(2, domains={"dc": 2}, residency=residency, overlap=False, micro_batches=3)
    parts = simulate_step(plan).parts
    copies_s = 8 * 3 * 64 * 128 * 4 / rate_bytes_per_s("dc")
    assert parts["expert_gather"] == pytest.approx(2 * gathers * copies_s, rel=1e-6)
    assert parts["gradient_return"] == pytest.approx(2 * returns * copies_s, rel=1e-6)


def routing_of(plan: Plan, skew: float) -> dict[tuple[int, int], np.ndarray]:
    rng = np.random.default_rng(11)
    model, training = plan.workload.model, plan.workload.training
    popularity = rng.dirichlet(np.full(model.num_experts, 1 / skew))
    shape = (plan.cluster.num_gpus, training.tokens)
    return {
        (layer, micro_batch): np.argsort(
            -np.log(popularity) + rng.exponential(size=(*shape, model.num_experts)), axis=-1, kind="stable"
        )[..., : model.top_k]
        for layer in range(model.num_moe_layers)
        for micro_batch in range(training.micro_batches)
    }


def check(plan: Plan, result: StepResult, routing: dict[tuple[int, int], np.ndarray] | None) -> None:
    cluster = plan.cluster
    # Every byte of the one traffic function crossed its links, and no other byte did.
    expected = link_bytes(cluster, step_traffic(plan, routing))
    np.testing.assert_allclose(result.link_bytes, expected, rtol=1e-9)
    # Nothing is faster than its link or its computation alone.
    capacity = np.array([link.bandwidth_bytes_per_s for link in cluster.link_table])
    assert result.step_s >= (expected / capacity).max() * (1 - 1e-8)
    assert (result.link_busy_s >= expected / capacity * (1 - 1e-8)).all()
    execution = result.execution
    computes = [i for i, operation in enumerate(result.program.operations) if operation.seconds is not None]
    for rank in range(result.program.num_ranks):
        intervals = sorted((execution.start_s[i, rank], execution.end_s[i, rank]) for i in computes)
        assert result.step_s >= sum(end - start for start, end in intervals) * (1 - 1e-9)
        for (_, end), (start, _) in itertools.pairwise(intervals):
            assert start >= end, f"rank {rank} computes two things at once"
    for position, operation in enumerate(result.program.operations):
        for earlier in operation.after:
            assert (execution.start_s[position] >= execution.end_s[earlier]).all()
    assert sum(result.parts.values()) == pytest.approx(result.step_s, rel=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_bytes_bounds_and_order_hold_for_any_plan(name: str) -> None:
    check(PLANS[name], simulate_step(PLANS[name]), None)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("skew", [0.5, 4.0])
def test_bytes_bounds_and_order_hold_for_uneven_routing(name: str, skew: float) -> None:
    plan = PLANS[name]
    routing = routing_of(plan, skew)
    check(plan, simulate_step(plan, routing), routing)


def test_equal_inputs_give_equal_timelines() -> None:
    routing = routing_of(PLANS["pairs gathered"], 2.0)
    first, second = (simulate_step(PLANS["pairs gathered"], routing) for _ in range(2))
    np.testing.assert_array_equal(first.execution.end_s, second.execution.end_s)


def test_one_slow_site_slows_the_step_and_is_named() -> None:
    sites = [{"name": "a"}, {"name": "b", "up": "0.25 Gbps"}, {"name": "c"}, {"name": "d"}]
    slow, even = simulate_step(make_plan(4, 2, sites=sites)), simulate_step(make_plan(4, 2))
    assert slow.busiest_link.name == "b up"
    # b's uplink has a quarter of the rate, and the others wait for its rows in every hop.
    assert slow.parts["token_dispatch"] > 3 * even.parts["token_dispatch"]


def test_baselines_keep_everything_but_the_placement() -> None:
    plan = PLANS["part gathered"]
    _ = plan.placements
    ep, gathered = (
        simulate_step(baseline_plan(plan.cluster, plan.workload, baseline, schedule=plan.schedule))
        for baseline in (Baseline.EP, Baseline.FULL_GATHER)
    )
    assert (ep.plan.cluster, ep.plan.workload) == (plan.cluster, plan.workload)
    assert "expert_gather" not in {operation.label for operation in ep.program.operations}
    assert ep.plan.placements[0].holds.sum() == 16
    assert not {"token_dispatch", "token_combine"} & {operation.label for operation in gathered.program.operations}
    assert gathered.plan.placements[0].holds.all()
    # Copies cross to each other DC once; inside, they fan out from the rank that got them.
    wan = sum(link.size_bytes for link in gathered.links if link.name in {f"dc{dc} up" for dc in range(4)})
    expert_bytes, dense_bytes = 3 * 64 * 128 * 4, gathered.plan.workload.model.dense_params * 4
    # 2 layers, out and back; the dense gradients' DC stage moves each element 3 times, out and back.
    assert wan == pytest.approx(2 * 2 * 16 * 3 * expert_bytes + 2 * 3 * dense_bytes, rel=1e-9)


def test_timeline_covers_the_step_in_rows_per_datacenter() -> None:
    result = simulate_step(PLANS["pairs gathered"])
    spans = list(result.spans())
    assert {span.process for span in spans} == {"s0", "s1", "s2"}
    assert {span.thread for span in spans} == {"compute", "up", "down", "between gpus"}
    assert min(span.start_s for span in spans) == 0.0
    assert max(span.start_s + span.duration_s for span in spans) == pytest.approx(result.step_s)
    assert all(span.duration_s >= 0 for span in spans)
    assert floor(sum(link.load <= 1 + 1e-9 for link in result.links)) == len(result.links)


@pytest.mark.parametrize("cluster", ["paper-l", "aws-9"])
def test_a_large_model_takes_seconds(cluster: str) -> None:
    configs = Path(__file__).resolve().parents[2] / "configs"
    workload = load(Workload, configs / "models" / "mixtral-8x7b.yaml", ["training.micro_batches=1"])
    plan = Plan(
        cluster=load(Cluster, configs / "clusters" / f"{cluster}.yaml"),
        workload=workload,
        layers=(LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains={}, migration={}),),
    )
    began_s = time.process_time()
    result = simulate_step(plan)
    assert time.process_time() - began_s < 20
    check(plan, result, None)
