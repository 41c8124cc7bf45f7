"""What a step costs, the cheapest plan, and the fastest plan within a budget, against enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brute_force import brute_force
from planner_cases import make_cluster, make_workload, mixing_case, random_cluster, random_workload

import planner
from hybridep.config import build
from hybridep.errors import InfeasibleError, UserError
from hybridep.plan import Objective, Plan, Schedule, Status
from hybridep.topology import Cluster
from hybridep.traffic import step_traffic
from hybridep.workload import Workload
from planner.check import CheckError, check
from planner.goal import Goal
from planner.problem import Problem, build_problem
from planner.solve import PROVEN_GAP, gap, solve

DOLLARS = Goal(objective=Objective.DOLLARS)


def priced(cluster: Cluster, rng: np.random.Generator, *, rent: str = "3 $/h") -> Cluster:
    """With prices per site, and for some pairs."""
    data = cluster.model_dump(mode="json", exclude_none=True)
    data["gpu"]["price"] = rent
    data["levels"][0]["egress"] = f"{rng.uniform(0, 0.2):.4f} $/GB"
    for site in data.get("sites", []):
        site["egress"] = f"{rng.uniform(0, 0.2):.4f} $/GB"
    for link in data.get("links", [])[::2]:
        link["egress"] = f"{rng.uniform(0, 0.2):.4f} $/GB"
    return build(Cluster, data, "test")


def counted_usd(plan: Plan) -> float:
    """Byte by byte over ordered pairs of sites, then the rent."""
    cluster, total = plan.cluster, 0.0
    own = [site.egress for site in cluster.sites]
    pairs = {(link.src, link.dst): link.egress for link in cluster.links if link.egress is not None}
    for (_, level), sent in step_traffic(plan).items():
        for rank, dc in np.argwhere(sent) if level == 0 else ():
            source = int(rank) // cluster.ranks_per_site
            price = own[source] if own else None
            price = cluster.levels[0].egress if price is None else price
            ends = cluster.site_name(source), cluster.site_name(int(dc))
            total += sent[rank, dc] * (pairs.get(ends, price) or 0.0)
    assert plan.prediction is not None and cluster.gpu.price is not None
    return total + cluster.num_gpus * cluster.gpu.price * plan.prediction.step


def test_a_step_costs_its_bytes_and_its_ranks() -> None:
    rng = np.random.default_rng(1)
    for _ in range(12):
        cluster = priced(random_cluster(rng), rng)
        plan = planner.baseline(cluster, random_workload(rng), str(rng.choice(["ep", "full_gather"])))
        assert plan.predicted.cost == pytest.approx(counted_usd(plan), rel=1e-9)


def hiding_case(rng: np.random.Generator, rent: str) -> tuple[Cluster, Workload]:
    """Slow computation hides copies, which cost money all the same."""
    throughput, ffn = rng.choice(["1 GFLOPS", "3 GFLOPS"]), int(rng.choice([128, 256, 512]))
    cluster = make_cluster(4, 2, bandwidths=["200 Mbps", "8 Gbps"], latencies=["0.5 ms", "0.2 ms"], throughput=str(throughput))
    workload = make_workload(layers=int(rng.integers(1, 4)), hidden=128, experts=16, top_k=4, ffn=ffn, tokens=512)
    return priced(cluster, rng, rent=rent), workload


def enumerable(rng: np.random.Generator, goal: Goal) -> Problem:
    """A random handful of real candidates, in half the cases under memory that rules some of them out."""
    cluster, workload = hiding_case(rng, "0.0001 $/h")
    if rng.random() < 0.3:
        cluster, workload = priced(random_cluster(rng), rng), random_workload(rng)
    whole = build_problem(cluster, workload, Schedule(), goal=goal)
    few = sorted(rng.choice(len(whole.candidates), size=min(6, len(whole.candidates)), replace=False))
    problem = replace(whole, candidates=tuple(whole.candidates[c] for c in few))
    needs = [float(problem.memory_bytes(problem.uniform(c)).max()) for c in range(len(few))]
    capacity = 1.01 * max(needs) if rng.random() < 0.5 else float(np.median(needs))
    return replace(problem, capacity_bytes=np.full_like(problem.capacity_bytes, capacity))


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_the_cheapest_equal_domains_are_those_of_enumeration(solver: str) -> None:
    rng = np.random.default_rng(3)
    dearer = 0
    for _ in range(14 if solver == "highs" else 4):
        problem = enumerable(rng, DOLLARS)
        found, oracle = solve(problem, solver=solver), brute_force(problem)
        assert oracle is not None and found.status is Status.OPTIMAL
        assert found.price_usd == pytest.approx(oracle[1], rel=PROVEN_GAP)
        assert found.bound_usd <= oracle[1] * (1 + PROVEN_GAP) and gap(found.price_usd, found.bound_usd) <= PROVEN_GAP
        fastest = brute_force(replace(problem, goal=Goal()))
        assert fastest is not None and found.bound_s <= fastest[1] * (1 + PROVEN_GAP)
        dearer += problem.price_usd(fastest[0]) > oracle[1] * (1 + 1e-6)
    assert dearer > (3 if solver == "highs" else 0)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_the_fastest_within_a_budget_is_that_of_enumeration(solver: str) -> None:
    rng = np.random.default_rng(5)
    slower = 0
    for _ in range(14 if solver == "highs" else 4):
        free = enumerable(rng, Goal())
        cheapest, fastest = brute_force(replace(free, goal=DOLLARS)), brute_force(free)
        assert cheapest is not None and fastest is not None
        dear = free.price_usd(fastest[0])
        problem = replace(free, goal=Goal(budget_usd=float(rng.uniform(cheapest[1] * 1.0001, max(dear, cheapest[1] * 1.001)))))
        found, oracle = solve(problem, solver=solver), brute_force(problem)
        assert oracle is not None and found.objective_s == pytest.approx(oracle[1], rel=PROVEN_GAP)
        assert problem.affords(found.counts) and found.bound_s <= oracle[1] * (1 + PROVEN_GAP)
        slower += found.objective_s > fastest[1] * (1 + 1e-6)
        with pytest.raises(InfeasibleError, match=rf"the cheapest costs {cheapest[1]:.4g} \$"):
            solve(replace(free, goal=Goal(budget_usd=cheapest[1] * 0.99)), solver=solver)
    assert slower > (3 if solver == "highs" else 0)


def test_a_plan_says_what_it_costs_and_is_checked() -> None:
    cluster, workload = hiding_case(np.random.default_rng(0), "0.0001 $/h")
    cheap, fast = planner.plan(cluster, workload, goal=DOLLARS), planner.plan(cluster, workload)
    for plan in (cheap, fast):
        check(plan)
    assert cheap.solver is not None and cheap.prediction is not None and fast.prediction is not None
    assert cheap.prediction.cost is not None and fast.prediction.cost is not None
    assert cheap.prediction.cost < fast.prediction.cost and cheap.prediction.step > fast.prediction.step
    assert cheap.solver.cost_bound is not None and cheap.solver.cost_bound <= cheap.prediction.cost
    # Of equal domains the cheapest is proven; tables' bound adds the least rent and the least egress.
    equal = planner.plan_domains(cluster, workload, goal=DOLLARS)
    assert equal.solver is not None and equal.solver.cost_bound == pytest.approx(equal.predicted.cost_usd, rel=1e-6)
    assert cheap.predicted.cost_usd <= equal.predicted.cost_usd * (1 + 1e-9)
    middle = (cheap.prediction.cost + fast.prediction.cost) / 2
    between = planner.plan(cluster, workload, goal=Goal(budget_usd=middle))
    check(between)
    assert (
        between.prediction is not None and between.prediction.cost is not None and between.prediction.cost <= middle * (1 + 1e-5)
    )
    edits = {
        "prediction": ({"cost": "1 $"}, "prediction.cost"),
        "solver": ({"cost_bound": "0 $"}, "solver.gap"),
    }
    for part, (change, words) in edits.items():
        data = cheap.model_dump(mode="json")
        data[part] |= change
        with pytest.raises(CheckError, match=words):
            check(build(Plan, data, "edited"))
    data = between.model_dump(mode="json")
    data["solver"]["budget"] = "0.000001 $"
    with pytest.raises(CheckError, match=r"solver.budget: is 1e-06 \$"):
        check(build(Plan, data, "edited"))


def test_what_goes_together() -> None:
    cluster, workload = mixing_case()
    with pytest.raises(UserError, match="nothing has a price"):
        planner.plan(cluster, workload, goal=DOLLARS)
    cluster = priced(cluster, np.random.default_rng(0))
    with pytest.raises(UserError, match="needs no budget"):
        planner.plan(cluster, workload, goal=Goal(objective=Objective.DOLLARS, budget_usd=1.0))
    with pytest.raises(UserError, match="allows nothing"):
        planner.plan(cluster, workload, goal=Goal(budget_usd=0.0))
    with pytest.raises(UserError, match="copies ahead"):
        planner.plan(cluster, make_workload(), goal=DOLLARS, ahead=True)
