"""The cost of a step: the paper as a special case, hand-computed steps, bounds, and where a middle domain wins."""

from __future__ import annotations

import time
from math import comb, sqrt

import numpy as np
import pytest
from planner_cases import make_cluster, make_workload, random_cluster, random_workload, shipped_cluster, shipped_workload

from hybridep.config import build
from hybridep.gating import gating
from hybridep.placement import LevelChoice, divisors, place
from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.topology import Cluster
from hybridep.traffic import Op, link_bytes, step_traffic
from hybridep.workload import Workload
from planner import paper
from planner.cost import block_times, layer_traffic, step_cost
from planner.domains import all_choices, layer_group
from planner.exchange import ExchangeTimes
from planner.layer_times import EXPERTS, BlockTimes
from planner.problem import build_problem


def times_of(cluster: Cluster, workload: Workload, choices: dict[str, LevelChoice]) -> BlockTimes:
    placed = place(cluster, workload.model.num_experts, choices)
    expected = gating(workload)
    return block_times(ExchangeTimes(cluster=cluster), workload, placed, expected, layer_traffic(placed, workload, expected))


def plan_of(
    cluster: Cluster,
    workload: Workload,
    choices: dict[str, LevelChoice],
    residency: Residency = Residency.STEP,
    *,
    overlap: bool = True,
) -> Plan:
    group = layer_group(0, workload.model.num_moe_layers, choices, residency)
    return Plan(cluster=cluster, workload=workload, layers=(group,), schedule=Schedule(overlap=overlap))


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("throughput", ["1 GFLOPS", "100 GFLOPS", "100 TFLOPS"])
def test_the_paper_is_a_special_case(gpus: int, throughput: str) -> None:
    """Forward, one level, no latency, top-1, one expert per GPU: Eq. 10-12. What the paper leaves out is left out here: the
    counts before a dispatch, and expert computation, which it takes as hidden. Its D is the mean of both directions."""
    cluster = make_cluster(gpus, latencies=["0 s"], throughput=throughput)
    workload = make_workload(experts=gpus, top_k=1)
    tokens = workload.training.tokens
    case = {
        "data_bytes": tokens * (workload.dispatch_row_bytes + workload.combine_row_bytes) / 2,
        "expert_bytes": float(workload.expert_bytes),
        "num_gpus": gpus,
        "bandwidth_bytes_per_s": cluster.levels[0].bandwidth,
        "pre_expert_s": workload.pre_expert_flops / cluster.gpu.throughput,
    }
    forwards = {}
    for size in divisors(gpus):
        times = times_of(cluster, workload, {"l0": LevelChoice(domain_size=size)})
        tokens_s = times.exchanges_s[Op.TOKEN_DISPATCH] + times.exchanges_s[Op.TOKEN_COMBINE]
        forwards[size] = max(times.pre_expert_s + times.overhead_s, times.exchanges_s[Op.EXPERT_GATHER]) + tokens_s
        expected = paper.latency_s(paper.share_of_domain(gpus, size), **case)
        assert forwards[size] == pytest.approx(expected, rel=1e-9)
    # No feasible domain beats the continuous optimum of Eq. 12, and the best one is next to it.
    best = paper.best_share(**case)
    assert min(forwards.values()) >= paper.latency_s(best, **case) * (1 - 1e-9)
    sizes = divisors(gpus)
    larger = sizes.index(paper.domain_of_share(gpus, best))
    beside = {sizes[larger], sizes[max(0, larger - 1)]}
    assert min(forwards[size] for size in beside) == pytest.approx(min(forwards.values()))


def test_a_step_computed_by_hand() -> None:
    """Two GPUs, plain expert parallelism, one layer: every term of the sum."""
    cluster = make_cluster(2, bandwidths=["8 Mbps"], latencies=["10 ms"], throughput="1 MFLOPS")
    workload = make_workload(layers=1, hidden=16, experts=2, top_k=1, ffn=8, tokens=10)
    model, training = workload.model, workload.training
    cost = step_cost(plan_of(cluster, workload, {}))
    rate, alpha = 1e6, 0.01
    rows = training.tokens / 2  # top-1 of two experts: half of a rank's tokens go to the other
    row_bytes = {
        "token_dispatch": 16 * 4 + 1 * (4 + 4),
        "token_combine": 16 * 4,
        "combine_backward": 16 * 4,
        "dispatch_backward": 16 * 4 + 4,
    }
    for name, size in row_bytes.items():
        assert cost.parts_s[name] == pytest.approx(alpha + rows * size / rate)
    assert cost.parts_s["token_counts"] == pytest.approx(alpha + 8 / rate)
    assert cost.parts_s["expert_gather"] == cost.parts_s["gradient_return"] == 0
    assert cost.parts_s["experts"] == pytest.approx(3 * 10 * 2 * (3 * 16 * 8) / 1e6)
    assert cost.parts_s["pre_expert"] == pytest.approx(3 * workload.pre_expert_flops / 1e6)
    assert cost.parts_s["head"] == pytest.approx(3 * 10 * 2 * 256 * 16 / 1e6)
    half = model.dense_params * 4 / 2
    assert cost.parts_s["dense_reduce_scatter"] == pytest.approx(alpha + half / rate, rel=1e-3)
    weights, states = 4, 8
    parameters = model.dense_params + model.expert_params
    assert cost.parts_s["optimizer"] == pytest.approx(parameters * (3 * weights + 2 * states) / 1e12)
    assert cost.step_s == pytest.approx(sum(cost.parts_s.values()), rel=1e-12)
    assert cost.compute_s == pytest.approx(sum(cost.parts_s[name] for name in ("experts", "pre_expert", "head", "optimizer")))


def test_copies_hide_behind_computation_as_far_as_it_goes() -> None:
    workload = make_workload(layers=1, experts=2, micro_batches=3)
    full = {"l0": LevelChoice(domain_size=2)}
    for throughput in ("10 GFLOPS", "10 TFLOPS"):
        cluster = make_cluster(2, throughput=throughput)
        times = times_of(cluster, workload, full)
        gather, back = times.exchanges_s[Op.EXPERT_GATHER], times.exchanges_s[Op.GRADIENT_RETURN]
        pre = times.pre_expert_s
        with_overlap = step_cost(plan_of(cluster, workload, full))
        without = step_cost(plan_of(cluster, workload, full, overlap=False))
        assert with_overlap.hidden_s["expert_gather"] == pytest.approx(min(gather, pre))
        assert with_overlap.hidden_s["gradient_return"] == pytest.approx(min(back, 2 * pre))
        assert without.step_s - with_overlap.step_s == pytest.approx(sum(with_overlap.hidden_s.values()))
        # Per micro-batch: the second gather, before the expert backward, is never hidden.
        each = step_cost(plan_of(cluster, workload, full, Residency.MICROBATCH))
        assert each.parts_s["expert_gather"] == pytest.approx(3 * (2 * gather - min(gather, pre)))
        assert each.parts_s["gradient_return"] == pytest.approx(3 * (back - min(back, 2 * pre)))


def test_links_carry_the_traffic_of_the_plan_and_no_step_beats_its_bound(rng: np.random.Generator) -> None:
    for _ in range(60):
        cluster, workload = random_cluster(rng), random_workload(rng)
        choices = all_choices(cluster, workload.model.num_experts, 4)
        plan = plan_of(
            cluster,
            workload,
            choices[rng.integers(len(choices))],
            list(Residency)[rng.integers(2)],
            overlap=bool(rng.integers(2)),
        )
        cost = step_cost(plan)
        np.testing.assert_allclose(cost.link_bytes, link_bytes(cluster, step_traffic(plan)), rtol=1e-12)
        assert cost.bound_s <= cost.step_s * (1 + 1e-12)
        assert cost.bound_s >= cost.compute_s
        names = {link.name for link in cluster.link_table} | {"computation"}
        assert cost.bound_by in names
        assert min(cost.parts_s.values()) >= 0


def test_layers_add_up() -> None:
    cluster, workload = make_cluster(4, 2), make_workload(layers=5)
    one = {"first_layer": 0, "domains": {"l0": 2, "l1": 1}, "migration": {}}
    two = {"domains": {"l0": 4, "l1": 2}, "migration": {"l0": 0.5}, "residency": Residency.MICROBATCH}

    def step(*groups: LayerGroup) -> float:
        return step_cost(Plan(cluster=cluster, workload=workload, layers=groups)).step_s

    first, second = step(LayerGroup(num_layers=5, **one)), step(LayerGroup(first_layer=0, num_layers=5, **two))
    mixed = step(LayerGroup(num_layers=2, **one), LayerGroup(first_layer=2, num_layers=3, **two))
    assert mixed == pytest.approx((2 * first + 3 * second) / 5, rel=1e-12)


def test_latency_counts_once_per_exchange() -> None:
    workload = make_workload(layers=2, micro_batches=3)
    slow, fast = (make_cluster(4, 2, latencies=[text, "0 s"]) for text in ("20 ms", "0 s"))
    plans = [plan_of(cluster, workload, {}, overlap=False) for cluster in (slow, fast)]
    # Counts, dispatch, combine and the two backward exchanges per block, two for the dense all-reduce.
    exchanges = 2 * 3 * 5 + 2
    assert step_cost(plans[0]).step_s - step_cost(plans[1]).step_s == pytest.approx(exchanges * 0.02)


def test_one_slow_pair_of_sites_holds_everybody_up() -> None:
    workload = make_workload()
    even = make_cluster(3, 2, pairs=["100 Mbps"])
    data = even.model_dump(mode="json")
    data["links"][2] |= {"bandwidth": "10 Mbps", "latency": "300 ms"}
    uneven = build(Cluster, data, "test")
    before, after = (times_of(cluster, workload, {}).exchanges_s[Op.TOKEN_DISPATCH] for cluster in (even, uneven))
    # Before, each site's access link carries two pairs' bytes at the pairs' rate, and the farthest pair has 6 ms.
    assert after == pytest.approx((before - 0.006) / 2 * 10 + 0.3, rel=0.01)
    # A domain that holds all sites sends no tokens over it, but copies.
    assert times_of(uneven, workload, {"l0": LevelChoice(domain_size=3)}).exchanges_s[Op.TOKEN_DISPATCH] < 0.01


@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_a_middle_domain_wins_with_deduplication(ratio: float) -> None:
    """Tokens cost about t (N - 1) for N = G / S domains and top-k >= N, experts e (S - 1): neither end point is best.

    t: four exchanges of a GPU's tokens; e: gather and gradient return of its experts; S* = sqrt(G t / e)."""
    gpus, experts, top_k, hidden, ffn, tokens = 4, 64, 8, 2048, 32, 768
    workload = make_workload(layers=1, hidden=hidden, experts=experts, top_k=top_k, ffn=ffn, tokens=round(tokens * ratio))
    token_unit = 4 * workload.training.tokens * hidden * 4
    expert_unit = 2 * experts / gpus * workload.expert_bytes
    assert token_unit / expert_unit == pytest.approx(ratio)
    cluster = make_cluster(gpus, latencies=["0 s"], throughput="1000000 TFLOPS")
    costs = {}
    for size in divisors(gpus):
        exchanges = times_of(cluster, workload, {"l0": LevelChoice(domain_size=size)}).exchanges_s
        dense = {Op.DENSE_REDUCE_SCATTER, Op.DENSE_ALL_GATHER}
        seconds = sum(value for op, value in exchanges.items() if op not in dense)
        costs[size] = seconds * cluster.levels[0].bandwidth / expert_unit

    def expected(size: int) -> float:
        domains = gpus // size
        hit = 1 - comb(experts - experts // domains, top_k) / comb(experts, top_k)
        return (domains - 1) * hit * ratio + (size - 1)

    assert costs == pytest.approx({size: expected(size) for size in costs}, rel=0.01)
    best = min(costs, key=lambda size: costs[size])
    assert best == {1.0: 2, 4.0: 4}[ratio] == sqrt(gpus * ratio)
    if ratio == 1.0:
        assert costs[1] == pytest.approx(2.74, abs=0.02)
        assert costs[2] == pytest.approx(2.0, abs=0.02)
        assert costs[4] == pytest.approx(3.0, abs=0.02)


@pytest.mark.parametrize("ratio", [1.0, 0.25, 4.0])
def test_the_best_domain_grows_with_the_square_root(ratio: float) -> None:
    """16 GPUs, every token needs nearly every domain: S* = sqrt(16 t / e)."""
    workload = make_workload(layers=1, hidden=1024, experts=64, top_k=24, ffn=64, tokens=round(384 * ratio))
    assert 4 * workload.training.tokens * 1024 * 4 == pytest.approx(ratio * 2 * 4 * workload.expert_bytes)
    cluster = make_cluster(16, latencies=["0 s"], throughput="1000000 TFLOPS")
    costs = {size: step_cost(plan_of(cluster, workload, {"l0": LevelChoice(domain_size=size)})).step_s for size in divisors(16)}
    assert min(costs, key=lambda size: costs[size]) == sqrt(16 * ratio)


def test_more_bandwidth_or_compute_is_never_slower(rng: np.random.Generator) -> None:
    for _ in range(30):
        cluster, workload = random_cluster(rng), random_workload(rng)
        choices = all_choices(cluster, workload.model.num_experts, 2)
        chosen = choices[rng.integers(len(choices))]
        data = cluster.model_dump(mode="json")
        for level in data["levels"]:
            level["bandwidth"] = "1 Tbps"
        for link in data["links"]:
            link["bandwidth"] = "1 Tbps"
        data["gpu"]["throughput"] = "1000000 TFLOPS"
        faster = build(Cluster, data, "test")
        assert step_cost(plan_of(faster, workload, chosen)).step_s <= step_cost(plan_of(cluster, workload, chosen)).step_s


def test_all_experts_on_few_gpus_slow_the_step() -> None:
    """Four experts on eight GPUs: half of the GPUs compute, each for two."""
    workload = make_workload(experts=4)
    spread, crowded = (make_cluster(gpus) for gpus in (4, 8))
    assert step_cost(plan_of(crowded, workload, {})).parts_s[EXPERTS] == pytest.approx(
        2 * step_cost(plan_of(spread, workload, {})).parts_s[EXPERTS]
    )


def test_costs_of_all_candidates_are_quick() -> None:
    started = time.perf_counter()
    problem = build_problem(shipped_cluster("paper-l"), shipped_workload("gpt-large"), Schedule())
    assert time.perf_counter() - started < 5.0  # 0.05 s on an idle machine
    assert len(problem.candidates) == 1 + 2 * (3 * 4 - 1)
