"""Schedules of other systems: times that a person can add up, bytes, and that the best of their choices counts."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_plans import PLANS, RATES_GBPS, make_plan, one_by_one

import simulator.blocks
from hybridep.plan import Plan, Schedule
from hybridep.traffic import Direct, Op, OpLevel, direct_traffic, expected_rows, link_bytes, step_traffic, token_traffic
from simulator.errors import SimulationError
from simulator.report import simulate
from simulator.step import StepResult, simulate_step
from simulator.symmetry import symmetry
from simulator.systems import DEGREES, System, popularity_of, spread_homes, system_step
from simulator.token_exchange import Route, TokenExchange
from simulator.wiring import wiring

FLAT = TokenExchange(route=Route.DIRECT, per_choice=True)
ROW_BYTES = 64 * 4
UNEVEN = [{"name": "a"}, {"name": "b", "up": "0.25 Gbps"}, {"name": "c"}, {"name": "d", "down": "0.5 Gbps"}]


def with_gpu(plan: Plan, **figures: float) -> Plan:
    gpu = plan.cluster.gpu.model_copy(update=figures)
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"gpu": gpu})})


def longest_s(degree: int, out_s: float, compute_s: float, back_s: float) -> float:
    """A pipeline of equal parts: all go out one after the other, are computed one after the other, and come back behind the last
    that went out. The longest chain leaves one stage for the next at the first or at the last part."""
    chains = [degree * (out_s + back_s)]
    for first, last in ((1, 1), (1, degree), (degree, degree)):
        chains.append(first * out_s + (last - first + 1) * compute_s + (degree - last + 1) * back_s)
    return max(chains)


@pytest.mark.parametrize("latency_s", [0.0, 0.002])
@pytest.mark.parametrize("throughput", [1e12, 4e9, 1e8], ids=["links bind", "about equal", "experts bind"])
@pytest.mark.parametrize("degree", DEGREES)
def test_pipelined_exchange_takes_its_longest_chain(degree: int, throughput: float, latency_s: float) -> None:
    sites, tokens, top_k, layers, overhead_s = 4, 64, 3, 2, 1e-5
    plan = with_gpu(make_plan(sites, latency_s=latency_s, throughput=throughput), expert_overhead=overhead_s)
    rate = RATES_GBPS["dc"] * 1e9 / 8
    rows_s = tokens * top_k * (sites - 1) / sites * ROW_BYTES / rate
    counts_s = (sites - 1) * 8 / rate + latency_s
    expert_s = tokens * top_k * plan.workload.expert_flops_per_row / throughput

    def experts_s(parts: int) -> float:
        # Each part passes all of the rank's experts.
        hop_s, part_s = rows_s / parts + latency_s, expert_s / parts + 16 / sites * overhead_s
        return longest_s(parts, counts_s + hop_s, part_s, hop_s) + longest_s(parts, hop_s, 2 * part_s, hop_s)

    plain, piped = (simulate_step(plan, exchange=TokenExchange(per_choice=True, chunks=chunks)).step_s for chunks in (1, degree))
    assert piped - plain == pytest.approx(layers * (experts_s(degree) - experts_s(1)), rel=1e-6, abs=1e-12)
    rest_s = sum(
        seconds
        for name, seconds in simulate_step(plan).parts.items()
        if name.startswith(("pre_expert", "head", "optimizer", "dense"))
    )
    assert plain == pytest.approx(rest_s + layers * experts_s(1), rel=1e-6)


def test_one_part_a_row_per_destination_is_the_plain_schedule() -> None:
    for name in ("part gathered", "every micro-batch", "pairs"):
        plain, same = simulate_step(PLANS[name]), simulate_step(PLANS[name], exchange=TokenExchange())
        np.testing.assert_array_equal(plain.execution.end_s, same.execution.end_s)


def test_a_plain_exchange_carries_a_row_per_choice() -> None:
    plan = make_plan(2, 4, num_experts=16)
    found = simulate_step(plan, exchange=FLAT)
    dense = {key: sent for key, sent in step_traffic(plan).items() if key.op in (Op.DENSE_REDUCE_SCATTER, Op.DENSE_ALL_GATHER)}
    of_dense = dict(zip((link.name for link in plan.cluster.link_table), link_bytes(plan.cluster, dense), strict=True))
    tokens, top_k, layers, gpus = 64, 3, 2, 4
    # Half of all experts live in the other site, 14 of 16 on other ranks; four exchanges, and a count for each peer.
    between = layers * (4 * gpus * tokens * top_k / 2 * ROW_BYTES + gpus * 4 * 8)
    out = layers * (4 * tokens * top_k * 14 / 16 * ROW_BYTES + 7 * 8)
    for link in found.links:
        tokens_bytes = link.size_bytes - of_dense[link.name]
        assert tokens_bytes == pytest.approx(out if "gpu" in link.name else between, rel=1e-9), link.name


@pytest.mark.parametrize("per_choice", [False, True])
@pytest.mark.parametrize("plan", [make_plan(4, latency_s=1e-3), with_gpu(make_plan(1, 4), jitter=1e-3, message_overhead=1e-4)])
def test_on_one_level_straight_and_in_hops_are_the_same(plan: Plan, per_choice: bool) -> None:
    for chunks in (1, 4):
        hops = simulate_step(plan, exchange=TokenExchange(per_choice=per_choice, chunks=chunks))
        straight = simulate_step(plan, exchange=TokenExchange(route=Route.DIRECT, per_choice=True, chunks=chunks))
        assert (hops.step_s == pytest.approx(straight.step_s, rel=1e-9)) == per_choice


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PLANS["ep"], id="even"),
        pytest.param(PLANS["part gathered"], id="part gathered"),
        pytest.param(make_plan(4, 4, sites=UNEVEN, latency_s=1e-3), id="uneven sites"),
        pytest.param(make_plan(8, 2, num_experts=4), id="homes on some ranks only"),
    ],
)
@pytest.mark.parametrize("route", list(Route))
def test_kinds_of_ranks_give_what_all_ranks_give(plan: Plan, route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = TokenExchange(route=route, per_choice=True, chunks=2)
    reduced = simulate_step(plan, exchange=exchange)
    assert reduced.symmetry.num_kinds < plan.cluster.num_gpus
    monkeypatch.setattr(simulator.blocks, "symmetry", one_by_one)
    full = simulate_step(plan, exchange=exchange)
    assert full.symmetry.num_kinds == plan.cluster.num_gpus
    np.testing.assert_allclose(reduced.link_bytes, full.link_bytes, rtol=1e-9)
    assert reduced.step_s == pytest.approx(full.step_s, rel=1e-8)


def test_who_sends_to_whom_tells_ranks_apart() -> None:
    cluster = make_plan(2, 4).cluster
    inside = Direct(np.array([0]), np.array([1]), np.array([5.0]))
    assert symmetry(wiring(cluster), [], [], direct=[inside]).kind.tolist() == [0, 1, 2, 2, 3, 3, 3, 3]
    across = Direct(np.array([0, 4]), np.array([4, 0]), np.array([5.0, 5.0]))
    assert symmetry(wiring(cluster), [], [], direct=[across]).kind.tolist() == [0, 1, 1, 1, 0, 1, 1, 1]
    with pytest.raises(SimulationError, match="trunks"):
        symmetry(wiring(make_plan(3, 2, pairs=True).cluster), [], [], direct=[inside])


def test_recorded_choices_go_where_they_chose(rng: np.random.Generator) -> None:
    plan = make_plan(2, 2, num_experts=8, num_layers=2)
    choices = rng.permuted(np.broadcast_to(np.arange(8), (4, 64, 8)), axis=2)[:, :, :3]
    choices[0, :5, 1] = -1
    crossing = sum(
        int(home // 4 != rank // 2) for rank in range(4) for home in choices[rank].ravel() if home >= 0
    )  # experts 0-3 live in the first site
    for route in Route:
        exchange = TokenExchange(route=route, per_choice=True)
        found = simulate_step(plan, {(0, 0): choices}, exchange=exchange)
        plain = simulate_step(plan, {(0, 0): np.full_like(choices, -1)}, exchange=exchange)
        up = [sum(link.size_bytes for link in result.links if link.name in ("dc0 up", "dc1 up")) for result in (found, plain)]
        # Where nothing is chosen only counts travel, in hops; a plain exchange then has no peers to count for.
        counts = 0 if route is Route.HOPS else 8 * 8
        assert up[0] - up[1] == pytest.approx(4 * crossing * ROW_BYTES + counts, rel=1e-9)


def plain_step(plan: Plan, exchange: TokenExchange) -> StepResult:
    return simulate_step(plan, exchange=exchange)


@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_tutel_takes_the_best_of_its_degrees(latency_s: float) -> None:
    plan = make_plan(2, 2, latency_s=latency_s, throughput=4e9)
    choices = {
        exchange.text: simulate_step(plan, exchange=exchange).step_s
        for route in Route
        for degree in DEGREES
        for exchange in [TokenExchange(route=route, per_choice=True, chunks=degree)]
    }
    found = system_step(plan, System.TUTEL, plain_step)
    assert found.step.step_s == min(choices.values()) == choices[found.choice]
    # Parts cost latencies: where those are long, there is one part.
    assert found.choice.endswith("degree 1") == (latency_s > 0)


def with_popularity(plan: Plan, shares: list[float]) -> Plan:
    return plan.with_popularity((tuple(shares),) * plan.workload.model.num_moe_layers)


@pytest.mark.parametrize(("num_tokens", "shadows"), [(256, "2 shadows"), (1, "no shadows")])
def test_faster_moe_copies_hot_experts_while_that_pays(num_tokens: int, shadows: str) -> None:
    plan = make_plan(4, 2, num_experts=16)
    plan = Plan.model_validate(
        plan.model_dump(mode="json")
        | {"workload": _with_tokens(plan, num_tokens), "cluster": plan.cluster.model_dump(mode="json")}
    )
    shares = [0.2, 0.01, 0.01, 0.01, 0.01, 0.2, *[0.056] * 10]
    plan = with_popularity(plan, shares)
    found = system_step(plan, System.FASTER_MOE, plain_step, [np.asarray(layer) for layer in plan.popularity])
    assert found.choice.startswith(shadows)
    served = found.step.plan.placements[0].serve[0]
    own = [expert for expert in range(16) if (served[:, expert] == np.arange(4)).all()]
    assert own == ([0, 5] if num_tokens > 1 else [])


def _with_tokens(plan: Plan, number: int) -> dict[str, object]:
    data = plan.workload.model_dump(mode="json")
    data["training"] |= {"sequence_length": number, "micro_batch_size": 1}
    return dict(data)


def test_smart_moe_parts_experts_that_are_hot() -> None:
    plan = make_plan(4, num_experts=8, throughput=1e9)
    plan = with_popularity(plan, [0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
    popularity = [np.asarray(layer) for layer in plan.popularity]
    assert spread_homes(plan.cluster, popularity[0]).tolist() == [0, 1, 2, 3, 2, 3, 0, 1]
    found, flat = (system_step(plan, system, plain_step, popularity) for system in (System.SMART_MOE, System.FLAT_EP))
    # Both hot experts lived on the first rank, which computed 0.6 of all; now 0.35 at most.
    assert found.step.parts["expert"] < 0.7 * flat.step.parts["expert"]
    assert found.step.plan.placements[0].num_at_home.tolist() == [2, 2, 2, 2]
    # With nothing known, experts stay where they are.
    even = system_step(make_plan(4, num_experts=8), System.SMART_MOE, plain_step)
    assert even.step.plan.layers[0].homes == {}


def test_systems_have_the_plans_connections() -> None:
    plan = make_plan(2, 2).model_copy(update={"schedule": Schedule(streams={"dc": 4}, chunks=2)})
    assert system_step(plan, System.FLAT_EP, plain_step).step.plan.schedule == Schedule(streams={"dc": 4})


def test_systems_stand_beside_baselines_in_a_report() -> None:
    plan = make_plan(2, 2)
    routing = {(layer, 0): np.tile(np.arange(3), (4, 64, 1)) for layer in range(2)}
    report = simulate(plan, list(System), routing)
    assert set(report.as_dict()["baselines"]) == set(report.as_dict()["choices"]) == {system.value for system in System}
    # All tokens choose the same three experts, which the systems are told.
    assert popularity_of(routing, 16)[1].tolist() == [256.0] * 3 + [0.0] * 13
    assert report.baselines["smart_moe"] < report.baselines["flat_ep"]
    assert "shadows" in report.choices["faster_moe"]


def test_what_does_not_go_together_is_an_error() -> None:
    with pytest.raises(SimulationError, match="chunks: 0"):
        TokenExchange(chunks=0)
    with pytest.raises(SimulationError, match="rows per choice"):
        TokenExchange(route=Route.DIRECT)
    with pytest.raises(SimulationError, match="prefetch 1"):
        simulate_step(PLANS["ahead"], exchange=TokenExchange(chunks=2))


def test_rows_per_choice_add_up_to_all_choices() -> None:
    """Of every rank's choices, those of experts elsewhere leave it, whichever way they take."""
    plan = make_plan(2, 2, num_experts=16)
    layers = plan.placed[0]
    direct = direct_traffic(layers.placement, plan.workload, layers.gating)[Op.TOKEN_DISPATCH]
    assert direct.size_bytes.sum() == pytest.approx(4 * 64 * 3 * 12 / 16 * ROW_BYTES)
    rows = expected_rows(layers.placement, layers.gating, per_choice=True)
    hops = token_traffic(layers.placement, plan.workload, rows, per_choice=True)
    assert hops[OpLevel(Op.TOKEN_DISPATCH, 0)].sum() == pytest.approx(4 * 64 * 3 / 2 * ROW_BYTES)
    assert hops[OpLevel(Op.TOKEN_DISPATCH, 1)].sum() == pytest.approx(4 * 64 * 3 / 2 * ROW_BYTES)
