"""The time to code and decode: planner and simulator agree on it, and the planner leaves codecs aside that take longer than
they save."""

from __future__ import annotations

import numpy as np
import pytest

import planner
from hybridep.codecs import KINDS, Codecs, ExpertCodec, GradientCodec, Speeds, TokenCodec
from hybridep.coding import direct_coding, token_coding
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.topology import Cluster
from hybridep.traffic import Op, direct_traffic, expected_rows
from planner.check import check
from planner.cost import step_cost
from planner.layer_times import CODING
from simulator.conditions import Conditions
from simulator.step import simulate_step
from simulator.token_exchange import Route, TokenExchange

SMALL = ("model.num_layers=3", "model.vocab_size=256", "training.micro_batches=2")
CHANGE = Codecs(tokens=TokenCodec.INT8, experts=ExpertCodec.CHANGE_INT8, gradients=GradientCodec.INT8)
SHARED = Codecs(tokens=TokenCodec.INT8, experts=ExpertCodec.SHARED_RESIDUAL, gradients=GradientCodec.INT8)
BF16 = Codecs(tokens=TokenCodec.BF16, experts=ExpertCodec.BF16, gradients=GradientCodec.TOP_K)
ALL = {
    kind: [codec.value for codec in enum if codec.value != "exact"]
    for kind, enum in zip(KINDS, (TokenCodec, ExpertCodec, GradientCodec), strict=True)
}


def with_speeds(cluster: Cluster, encode: str, decode: str) -> Cluster:
    speeds = {kind: {codec: {"encode": encode, "decode": decode} for codec in codecs} for kind, codecs in ALL.items()}
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"coding": build(Speeds, speeds, "speeds")})})


def coded_plan(cluster: Cluster, domains: tuple[int, int], coded: tuple[str, ...], codecs: Codecs, **changes) -> Plan:
    workload = load_workload("tiny", SMALL)
    outer, inner = (level.name for level in cluster.levels)
    group = LayerGroup(
        first_layer=0,
        num_layers=workload.model.num_moe_layers,
        domains={outer: domains[0], inner: domains[1]},
        migration={},
        residency=changes.pop("residency", Residency.STEP),
    )
    by_level = dict.fromkeys(coded, codecs)
    return Plan(cluster=cluster, workload=workload, layers=(group,), codecs=by_level, schedule=Schedule(**changes))


@pytest.mark.turns(2)
@pytest.mark.parametrize("schedule", [{}, {"overlap": False}, {"prefetch": 1}], ids=["beside", "serial", "ahead"])
@pytest.mark.parametrize("coded", [("dc",), ("dc", "gpu")], ids="-".join)
def test_even_clusters_agree(coded: tuple[str, ...], schedule: dict[str, int]) -> None:
    cluster = with_speeds(load_cluster("lab-4dc", ["gpu.message_overhead=1 ms"]), "20 MB/s", "35 MB/s")
    for domains in ((1, 1), (2, 1), (2, 2), (4, 2)):
        for codecs, residency in (
            (CHANGE, Residency.STEP),
            (BF16, Residency.MICROBATCH),
            (SHARED, Residency.STEP),
        ):
            plan = coded_plan(cluster, domains, coded, codecs, residency=residency, **schedule)
            cost, simulated = step_cost(plan), simulate_step(plan)
            # As in test_predicted_against_simulated: what runs beside the combine's gradients is added up in the closed form.
            loose = residency is Residency.MICROBATCH and not schedule
            assert (0.9 if loose else 1 - 1e-9) < simulated.step_s / cost.step_s < 1 + 1e-9, domains
            assert cost.parts_s[CODING] > 0.1 * cost.step_s
            assert cost.bound_s <= simulated.step_s * (1 + 1e-9)
            # Nothing of it hides where computation would otherwise hide the transfers.
            free = step_cost(plan.model_copy(update={"cluster": load_cluster("lab-4dc")}))
            assert cost.compute_s == pytest.approx(free.compute_s + cost.parts_s[CODING], rel=1e-12)


@pytest.mark.parametrize("residency", list(Residency))
def test_a_shared_expert_is_renewed_behind_the_returns(residency: Residency) -> None:
    """With little computation to hide it: what follows a gradient's return waits for the renewal, too."""
    cluster = load_cluster("lab-4dc", ["gpu.throughput=1 TFLOPS", "gpu.block_overhead=0 s", "levels.gpu.bandwidth=400 Mbps"])
    for depth in (1, 2):
        for domains in ((2, 1), (2, 2), (4, 2)):
            plan = coded_plan(cluster, domains, ("dc", "gpu"), SHARED, residency=residency, prefetch=depth)
            cost = step_cost(plan)
            assert simulate_step(plan).step_s == pytest.approx(cost.step_s, rel=1e-9), (depth, domains)
            assert cost.parts_s[Op.SHARED_ALL_GATHER.value] > 0.01 * cost.step_s


def test_the_bound_leaves_out_coding_of_different_ranks() -> None:
    """One rank encodes and another decodes at the same time, so their sum bounds nothing."""
    fast = ["levels.dc.bandwidth=100 Tbps", "levels.gpu.bandwidth=100 Tbps"]
    cluster = with_speeds(load_cluster("lab-4dc", fast), "2 MB/s", "2 MB/s")
    cost = step_cost(coded_plan(cluster, (2, 1), ("dc",), CHANGE))
    free_s = step_cost(coded_plan(load_cluster("lab-4dc", fast), (2, 1), ("dc",), CHANGE)).compute_s
    assert (cost.bound_by, cost.bound_s) == ("computation", pytest.approx(free_s, rel=1e-12))
    assert cost.compute_s > 1.1 * cost.bound_s


def test_other_routes_and_recorded_routing_take_the_time_too() -> None:
    slow, free = (with_speeds(load_cluster("lab-4dc"), rate, rate) for rate in ("20 MB/s", "1000 TB/s"))
    plans = [coded_plan(cluster, (1, 1), ("dc", "gpu"), CHANGE) for cluster in (slow, free)]
    in_all_s = []
    for exchange in (
        TokenExchange(),
        TokenExchange(route=Route.DIRECT, per_choice=True),
        TokenExchange(per_choice=True),
        TokenExchange(per_choice=True, chunks=2),
    ):
        with_time, without = (simulate_step(plan, exchange=exchange) for plan in plans)
        assert with_time.step_s > 1.2 * without.step_s
        longer_s = with_time.step_s - without.step_s
        # While a chunk is coded another one travels.
        assert longer_s <= with_time.parts["coding"] * (1 + 1e-6)
        assert exchange.chunks == 2 or longer_s == pytest.approx(with_time.parts["coding"], rel=1e-6)
        in_all_s.append(sum(float(one.seconds[0]) for one in with_time.program.operations if one.label == "coding"))
    # In chunks as much is coded, and straight to its rank a row is coded once, at any level.
    assert in_all_s[3] == pytest.approx(in_all_s[2])
    placement, gating, codecs = plans[0].placed[0].placement, plans[0].placed[0].gating, plans[0].level_codecs
    in_hops = token_coding(placement, plans[0].workload, expected_rows(placement, gating), codecs, gating)
    direct = direct_traffic(placement, plans[0].workload, gating, None, codecs)
    straight = direct_coding(direct, placement, plans[0].workload, codecs)
    hops_s, straight_s = (6 * sum((one.encoded + one.decoded)[0] for one in each.values()) / 20e6 for each in (in_hops, straight))
    assert in_all_s[1] - in_all_s[0] == pytest.approx(straight_s - hops_s)
    slow_sites = Conditions.model_validate({"stragglers": [{"worker": f"dc{dc}", "slowdown": 3} for dc in range(4)]})
    coding_s = [simulate_step(plans[0], conditions=met).parts["coding"] for met in (None, slow_sites)]
    assert coding_s[1] == pytest.approx(3 * coding_s[0], rel=1e-6)
    model, training = plans[0].workload.model, plans[0].workload.training
    rng = np.random.default_rng(3)
    drawn = {
        (layer, batch): np.stack(
            [[rng.permutation(model.num_experts)[: model.top_k] for _ in range(training.tokens)] for _ in range(8)]
        )
        for layer in range(3)
        for batch in range(2)
    }
    found = simulate_step(plans[0], routing=drawn).parts["coding"]
    assert found == pytest.approx(step_cost(plans[0]).parts_s[CODING], rel=0.1)


def test_a_codec_is_chosen_where_it_saves_more_than_it_takes() -> None:
    workload = load_workload("tiny", SMALL)

    def chosen(cluster: Cluster) -> Plan:
        made = planner.plan(cluster, workload, max_loss=0.004, time_limit_s=10)
        check(made)
        return made

    # Nothing that transfers could hide beside.
    small = ["levels.dc.size=2", "levels.gpu.size=1", "gpu.throughput=100 TFLOPS", "gpu.block_overhead=0 s"]
    for bandwidth, pays in (("100 Mbps", True), ("5 Gbps", False)):
        free = load_cluster("lab-4dc", [*small, f"levels.dc.bandwidth={bandwidth}"])
        assert bool(chosen(with_speeds(free, "200 MB/s", "200 MB/s")).codecs) is pays, bandwidth
    # Where coding takes no time, fewer bytes are faster.
    assert chosen(free).codecs


def test_speeds_of_what_is_not_coded_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokens\.exact"):
        build(Speeds, {"tokens": {"exact": {"encode": "1 GB/s", "decode": "1 GB/s"}}}, "speeds")
    with pytest.raises(ConfigError, match="decode"):
        load_cluster("lab-4dc", ["gpu.coding.tokens.int8.encode=1 GB/s"])
