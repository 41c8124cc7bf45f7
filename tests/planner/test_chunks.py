"""Tokens in parts: what hides what, the number of parts that pays, and bounds that hold for any number."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from planner_cases import make_cluster, make_workload, shipped_cluster, shipped_workload

import planner
from hybridep.config import build
from hybridep.errors import ConfigError, InfeasibleError, UserError
from hybridep.plan import Objective, Plan, Schedule
from hybridep.workload import Workload
from planner.chunks import WORTH, numbers, tables_in_parts
from planner.constraints import Constraints
from planner.evaluate import MOST_RANKS, evaluate, expected_s
from planner.goal import Goal
from planner.layer_times import piped_s
from planner.memory import memory_use
from planner.plans import plan_domains
from planner.sites.cost import site_cost
from planner.sites.plans import table_plan
from planner.sites.problem import SiteProblem, site_problem

sys.path.insert(0, str(Path(__file__).parent / "sites"))
from site_cases import small_workload, uneven_cluster

PAPER_S = shipped_cluster("paper-s"), shipped_workload("gpt-large")


def step_s(plan: Plan) -> float:
    return plan.predicted.step


def in_parts(plan: Plan, number: int) -> Plan:
    return plan.with_schedule(chunks=number)


def walked_s(out_s: float, expert_s: float, back_s: float, chunks: int) -> float:
    """Part by part: one exchange at a time, all out before any back, and one computation at a time."""
    exchanged = computed = 0.0
    results = []
    for _ in range(chunks):
        exchanged += out_s / chunks
        computed = max(computed, exchanged) + expert_s / chunks
        results.append(computed)
    for result in results:
        exchanged = max(exchanged, result) + back_s / chunks
    return exchanged


def test_the_longest_chain_is_what_a_walk_part_by_part_takes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        out_s, expert_s, back_s = (10 ** rng.uniform(-1, 1, 3)).tolist()
        for chunks in (1, 2, 3, 8, 50):
            assert piped_s(out_s, expert_s, back_s, chunks) == pytest.approx(walked_s(out_s, expert_s, back_s, chunks), rel=1e-12)
        assert piped_s(out_s, expert_s, back_s, 1) == pytest.approx(out_s + expert_s + back_s)


def test_the_fewest_parts_that_are_worth_it_are_found_and_proven() -> None:
    cluster, work = PAPER_S
    made = planner.plan(cluster, work, most_chunks=8)
    each = [plan_domains(cluster, work, schedule=Schedule(chunks=number)) for number in numbers(8)]
    steps_s = [step_s(one) for one in each]
    assert all(one.solver is not None and one.solver.objective == pytest.approx(step_s(one), rel=1e-9) for one in each)
    number = numbers(8).index(made.schedule.chunks)
    assert step_s(made) == steps_s[number] <= min(steps_s) * (1 + WORTH)
    assert all(other > min(steps_s) * (1 + WORTH) for other in steps_s[:number])
    assert made.schedule.chunks > 1 and step_s(made) < 0.8 * steps_s[0]
    assert made.solver is not None and made.solver.bound == pytest.approx(min(steps_s), rel=1e-9)
    planner.check(made)
    hidden = evaluate(made)[0].hidden_s["experts"]
    assert 0 < hidden <= evaluate(each[0])[0].parts_s["experts"] * (1 + 1e-9)


def test_each_number_of_parts_has_a_search_of_its_own() -> None:
    """Where experts are slow, parts hide them behind tokens between sites, which copies would spare."""
    cluster, work = shipped_cluster("lab-4dc"), shipped_workload("tiny")
    others = 0
    for speed in (10, 3, 1):
        gpu = cluster.gpu.model_copy(update={"expert_throughput": speed * 1e9, "block_overhead": 0.0})
        slow = cluster.model_copy(update={"gpu": gpu})
        whole, parts = (plan_domains(slow, work, schedule=Schedule(chunks=number)) for number in (1, 8))
        for best, other in ((whole, parts), (parts, whole)):
            assert step_s(best) <= evaluate(in_parts(other, best.schedule.chunks))[0].step_s * (1 + 1e-9)
        others += whole.layers[0].domains != parts.layers[0].domains
    assert others > 0, "a case in which parts suit other domains"


def test_parts_that_do_not_fit_the_memory_are_left_out() -> None:
    """Gradients of experts are there twice while those of a further part are added: with few rows more than rows save."""
    problem, _ = slow_problem(2, length=32)
    configuration, found = problem.configurations()[0], 0
    for entries in product(range(2), repeat=6):
        plain = table_plan(problem, np.array(entries).reshape(2, 3), configuration)
        needs = [memory_use(in_parts(plain, number)).fullest_bytes for number in (1, 2, 4)]
        if needs[0] < min(needs[1:]) and tables_in_parts([plain], 4, 1)[0].schedule.chunks > 1:
            gpu = plain.cluster.gpu.model_copy(update={"memory": (needs[0] + min(needs[1:])) / 2})
            small = plain.model_copy(update={"cluster": plain.cluster.model_copy(update={"gpu": gpu})})
            assert tables_in_parts([small], 4, 1)[0].schedule.chunks == 1
            found += 1
    assert found


@pytest.mark.turns(4)
def test_numbers_of_parts_that_are_not_possible_are_left_out() -> None:
    """Memory has no room for parts, or none for tokens in one piece, or the budget has none for these, which take longer."""
    for length, memory_mb, room_for in ((4, 11.7, {1}), (32, 14.6, {2, 4}), (32, 13.5, set())):
        workload = shipped_workload("tiny", f"training.sequence_length={length}")
        cluster, possible = shipped_cluster("lab-4dc", f"gpu.memory={memory_mb} MB"), set()
        for number in numbers(4):
            with suppress(InfeasibleError):
                possible.add(planner.plan_domains(cluster, workload, schedule=Schedule(chunks=number)).schedule.chunks)
        assert possible == room_for
        if possible:
            assert planner.plan(cluster, workload, most_chunks=4).schedule.chunks in possible
            continue
        with pytest.raises(InfeasibleError):
            planner.plan(cluster, workload, most_chunks=4)
    sites = "sites=[{name: a}, {name: b}, {name: c, up: 150 Mbps}, {name: d}]"
    for more in ([], [sites]):
        rented = shipped_cluster("lab-4dc", "gpu.price=36 $/h", *more), shipped_workload("tiny")
        cheapest = planner.plan(*rented, most_chunks=4, goal=Goal(objective=Objective.DOLLARS), time_limit_s=0.3)
        budget_usd = cheapest.predicted.cost_usd * 1.001
        assert cheapest.schedule.chunks > 1 and evaluate(in_parts(cheapest, 1))[0].step_usd > 1.05 * budget_usd
        made = planner.plan(*rented, most_chunks=4, goal=Goal(budget_usd=budget_usd), time_limit_s=0.3)
        assert made.schedule.chunks > 1 and made.predicted.cost_usd <= budget_usd


def test_numbers_are_powers_of_two_and_the_most() -> None:
    assert [numbers(most) for most in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]


def test_where_latency_rules_tokens_stay_in_one_piece() -> None:
    cluster = make_cluster(2, 2, latencies=("80 ms", "1 ms"))
    made = planner.plan(cluster, make_workload(), most_chunks=8)
    assert made.schedule.chunks == 1


def test_other_plans_have_as_many_parts_as_the_best() -> None:
    found = planner.plans(*PAPER_S, 3, most_chunks=8)
    assert len(found) == 3 and len({one.schedule.chunks for one in found}) == 1 < found[0].schedule.chunks
    assert [step_s(one) for one in found] == sorted(step_s(one) for one in found)


def test_with_measured_popularity_too() -> None:
    cluster, work = make_cluster(4, 2, throughput="10 GFLOPS"), make_workload(layers=2)
    shares = tuple(np.arange(1, 17) / 136)
    plain = planner.plan(cluster, work, popularity=(shares, shares[::-1]))
    made = planner.plan(cluster, work, popularity=(shares, shares[::-1]), most_chunks=4)
    assert made.schedule.chunks > 1 and step_s(made) < step_s(plain)
    assert made.solver is not None and made.solver.bound <= step_s(made)


def slow_problem(seed: int, length: int = 64) -> tuple[SiteProblem, Workload]:
    rng = np.random.default_rng(seed)
    cluster = uneven_cluster(rng, 2, 1, pairs=bool(seed % 2))
    work = small_workload(rng, 3)
    model = {"num_layers": 2, "hidden_size": 64, "top_k": 2, "expert_ffn_size": 2048}
    training = {"sequence_length": length, "micro_batches": 1}
    parts = {"model": work.model.model_copy(update=model), "training": work.training.model_copy(update=training)}
    work = work.model_copy(update=parts)
    speed = {"throughput": 6e10, "expert_throughput": 6e10, "expert_overhead": 0.0, "message_overhead": 0.0, "jitter": 0.0}
    gpu = cluster.gpu.model_copy(update=speed)
    sites = tuple(site.model_copy(update={"gpu": None}) for site in cluster.sites)
    levels = tuple(level.model_copy(update={"latency": 1e-4}) for level in cluster.levels)
    cluster = cluster.model_copy(update={"gpu": gpu, "sites": sites, "levels": levels})
    return site_problem(cluster, work), work


@pytest.mark.turns(6)
@pytest.mark.parametrize(("seed", "in_one_piece"), [(0, False), (2, False), (4, False), (6, False), (5, True), (7, True)])
def test_no_table_in_any_number_of_parts_is_faster_than_the_bound(seed: int, in_one_piece: bool) -> None:
    problem, work = slow_problem(seed)
    problems = {number: replace(problem, schedule=Schedule(chunks=number)) for number in numbers(4)}
    best = dict.fromkeys(numbers(4), float("inf"))
    for entries in product(range(2), repeat=6):
        for configuration in problem.configurations():
            for number, one in problems.items():
                cost = site_cost(one, np.array(entries).reshape(2, 3), configuration)
                best[number] = min(best[number], cost.step_s)
    made = planner.plan(problem.cluster, work, time_limit_s=3, most_chunks=4)
    shortest_s = min(best.values())
    assert made.solver is not None and made.solver.bound <= shortest_s * (1 + 1e-9)
    assert shortest_s * (1 - 1e-9) <= step_s(made) <= best[1] * (1 + WORTH)
    assert step_s(made) <= shortest_s * 1.05 and made.solver.bound > 0.6 * shortest_s
    assert (made.schedule.chunks == 1) == in_one_piece == (shortest_s > 0.97 * best[1])
    planner.check(made)


def test_each_table_gets_its_number_and_the_best_comes_first() -> None:
    problem, _ = slow_problem(0)
    [configuration] = problem.configurations()[:1]
    tables = [np.array(entries).reshape(2, 3) for entries in product(range(2), repeat=6)][::5]
    plain = [table_plan(problem, table, configuration) for table in tables]
    found = tables_in_parts(plain, 4, 5)
    best = sorted(min(evaluate(in_parts(one, number))[0].step_s for number in numbers(4)) for one in plain)
    assert [step_s(one) for one in found] == pytest.approx(best[:5], rel=WORTH)
    assert [step_s(one) for one in found] == sorted(step_s(one) for one in found)
    assert all(evaluate(one)[0].step_s == step_s(one) for one in found)


@pytest.mark.turns(2)
def test_rules_hold_for_plans_in_parts() -> None:
    problem, work = slow_problem(0)
    foreign = int(np.flatnonzero(problem.home_site == 1)[0])
    free = planner.plan(problem.cluster, work, time_limit_s=1, most_chunks=4)
    rule = {"name": "not s0", "kind": "forbid", "sites": ["s0"], "experts": str(foreign)}
    rules = Constraints.model_validate({"rules": [rule]})
    made = planner.plan(problem.cluster, work, time_limit_s=1, constraints=rules, most_chunks=4)
    assert made.schedule.chunks > 1 and not made.placements[0].holds[0, foreign]
    assert step_s(made) >= step_s(free) * (1 - WORTH)


def test_expected_steps_are_never_longer_than_the_sum() -> None:
    problem, _ = slow_problem(1)
    for entries in list(product(range(2), repeat=6))[::7]:
        for configuration in problem.configurations():
            made = in_parts(table_plan(problem, np.array(entries).reshape(2, 3), configuration), 3)
            cost = evaluate(made)[0]
            assert cost.bound_s <= expected_s(made, cost) <= cost.step_s * (1 + 1e-12)


def test_copies_ahead_and_padding_do_not_go_with_parts() -> None:
    cluster, work = PAPER_S
    with pytest.raises(UserError, match="leave the other out"):
        planner.plan(cluster, work, ahead=True, most_chunks=2)
    padded = work.model.model_copy(update={"pad_expert_input_to_capacity": True, "capacity_factor": 1.0})
    with pytest.raises(UserError, match="pads whole micro-batches"):
        planner.plan(cluster, work.model_copy(update={"model": padded}), most_chunks=2)
    made = planner.plan(cluster, work)
    data = made.model_dump(mode="json", exclude_none=True)
    with pytest.raises(ConfigError, match="only one of them"):
        build(Plan, data | {"schedule": {"chunks": 2, "prefetch": 1}}, "plan")
    with pytest.raises(ConfigError, match=r"schedule\.chunks|chunks"):
        build(Plan, data | {"schedule": {"chunks": 0}}, "plan")


def test_a_thousand_ranks_and_more_are_costed_over_sites() -> None:
    cluster = make_cluster(130, 8, throughput="100 GFLOPS")
    assert cluster.num_gpus > MOST_RANKS
    made = planner.plan(cluster, make_workload(experts=260), time_limit_s=5, most_chunks=4)
    assert made.solver is not None and made.solver.bound <= step_s(made)
    plain = planner.plan(cluster, make_workload(experts=260), time_limit_s=5)
    assert step_s(made) <= step_s(plain) * (1 + WORTH)
