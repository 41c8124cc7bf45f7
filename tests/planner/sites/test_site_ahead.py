"""Copies ahead of their blocks between sites that differ: the best depth of the best plans, memory, and a bound that holds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from site_cases import small_workload, uneven_cluster

import planner
from hybridep.config import build
from hybridep.errors import UserError
from hybridep.plan import Plan, Residency
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.constraints import Constraints
from planner.cost import step_costs
from planner.depths import BETWEEN_SITES, depths, tables_ahead
from planner.evaluate import evaluate
from planner.memory import memory_use
from planner.plans import predict
from planner.sites.plans import table_plan
from planner.sites.problem import SiteProblem, site_problem

RATES_MBPS = ((80, 30), (50, 50), (50, 80), (80, 20))
CLUSTER = build(
    Cluster,
    {
        "name": "uneven",
        "levels": [{"name": "dc", "size": 4, "bandwidth": "50 Mbps", "latency": "1 ms"}],
        "gpu": {"throughput": "10 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"},
        "sites": [{"name": f"s{i}", "up": f"{up} Mbps", "down": f"{down} Mbps"} for i, (up, down) in enumerate(RATES_MBPS)],
    },
    "test",
)


def workload_of(layers: int, experts: int, *, top_k: int, hidden: int, ffn: int) -> Workload:
    work = small_workload(np.random.default_rng(0), experts)
    model = {"num_layers": layers, "hidden_size": hidden, "top_k": top_k, "expert_ffn_size": ffn}
    training = {"sequence_length": 512, "micro_batch_size": 2, "micro_batches": 1}
    parts = {"model": work.model.model_copy(update=model), "training": work.training.model_copy(update=training)}
    return work.model_copy(update=parts)


WORKLOAD = workload_of(4, 16, top_k=4, hidden=128, ffn=192)


def step_s(plan: Plan) -> float:
    return plan.predicted.step


def with_depth(plan: Plan, depth: int) -> Plan:
    return plan.with_schedule(prefetch=depth)


@pytest.fixture(scope="module")
def plain() -> list[Plan]:
    return planner.plans(CLUSTER, WORKLOAD, BETWEEN_SITES, time_limit_s=2)


@pytest.mark.turns(2)
def test_the_best_depth_of_the_best_plans_is_found(plain: list[Plan]) -> None:
    found = tables_ahead(plain, 5)
    best = sorted(min(cost.step_s for cost in step_costs(one, (0, *depths(4)))) for one in plain)
    assert [step_s(one) for one in found] == pytest.approx(best[:5], rel=1e-9)
    assert found[0].schedule.prefetch > 0 and step_s(found[0]) < 0.95 * step_s(plain[0])
    assert [one.solver is not None for one in found] == [True, False, False, False, False]
    for one in found:
        cost, memory = evaluate(one)
        assert cost.step_s == step_s(one) and memory.fits
    planner.check(found[0])


@pytest.mark.turns(2)
def test_plan_finds_them_also_with_rules() -> None:
    made = planner.plan(CLUSTER, WORKLOAD, time_limit_s=1, ahead=True)
    assert made.schedule.prefetch > 0
    rules = Constraints.model_validate({"rules": [{"name": "not s0", "kind": "forbid", "sites": ["s0"], "experts": "8-15"}]})
    kept = planner.plan(CLUSTER, WORKLOAD, time_limit_s=1, ahead=True, constraints=rules)
    assert kept.schedule.prefetch > 0 and not kept.placements[0].holds[0, 8:].any()


def test_a_depth_without_memory_for_it_is_left_out(plain: list[Plan]) -> None:
    groups = [group.model_copy(update={"residency": Residency.MICROBATCH}) for group in plain[0].layers]
    first = plain[0].with_layers(*groups)
    first = first.model_copy(update={"prediction": predict(first)})
    needs = [memory_use(with_depth(first, depth)).fullest_bytes for depth in (0, *depths(4))]
    assert needs[1] > needs[0] and step_costs(first, (1,))[0].step_s < step_s(first)
    assert tables_ahead([first], 1)[0].schedule.prefetch > 0
    gpu = CLUSTER.gpu.model_copy(update={"memory": (needs[0] + needs[1]) / 2})
    small = first.model_copy(update={"cluster": CLUSTER.model_copy(update={"gpu": gpu})})
    assert tables_ahead([small], 1)[0].schedule.prefetch == 0


def every_step_s(problem: SiteProblem) -> tuple[float, float]:
    """Of all tables in their best configurations: the shortest step without copies ahead, and with any depth."""
    size, experts = problem.num_sites, problem.num_experts
    tried = (0, *depths(problem.num_layers))
    best = np.full(len(tried), np.inf)
    for entries in product(range(size), repeat=size * experts):
        table = np.array(entries).reshape(size, experts)
        for configuration in problem.configurations():
            made = table_plan(problem, table, configuration)
            best = np.minimum(best, [cost.step_s for cost in step_costs(made, tried)])
    return float(best[0]), float(best.min())


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", [5, 9, 18, 20])
def test_no_table_with_any_depth_is_faster_than_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster, work = uneven_cluster(rng, 2, 1, pairs=bool(seed % 2)), workload_of(3, 3, top_k=2, hidden=64, ffn=192)
    plain_s, ahead_s = every_step_s(site_problem(cluster, work))
    made = planner.plan(cluster, work, time_limit_s=5, ahead=True)
    assert made.solver is not None and ahead_s < 0.95 * plain_s
    # All tables are tried without copies ahead, and their best steps are its bound.
    assert ahead_s <= step_s(made) * (1 + 1e-9) and made.solver.bound <= ahead_s * (1 + 1e-9)
    assert made.solver.bound >= 0.5 * plain_s * (1 - 1e-9)


def test_too_many_ranks_and_upgrades_are_refused(plain: list[Plan]) -> None:
    cluster = CLUSTER.model_dump(mode="json", exclude_none=True)
    cluster["levels"].append({"name": "gpu", "size": 300, "bandwidth": "10 Gbps", "latency": "0 s"})
    with pytest.raises(UserError, match=r"at most 1024 ranks, and uneven has 1200; leave ahead out"):
        planner.plan(build(Cluster, cluster, "test"), WORKLOAD, ahead=True)
    with pytest.raises(UserError, match="leave --prefetch or --upgrades out"):
        planner.upgrades(with_depth(plain[0], 1))


def test_other_planners_are_compared_with_the_same_schedule(plain: list[Plan]) -> None:
    made = tables_ahead(plain, 1)[0]
    others, as_before = planner.compare_planners(made), planner.compare_planners(plain[0])
    assert all(others[name].step_s <= as_before[name].step_s * (1 + 1e-9) for name in others)
    assert others["full_gather"].step_s < as_before["full_gather"].step_s
    assert others["ep"].step_s == pytest.approx(as_before["ep"].step_s, rel=1e-9)
    assert all(one.gain == pytest.approx(one.step_s / step_s(made)) for one in others.values())
