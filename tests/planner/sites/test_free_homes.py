"""Experts that live where links are fast: shorter plans, whose figures and bounds hold for the homes that they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from site_cases import access_cluster, many_experts, random_access_cluster, random_problem
from test_forced import random_rules

import planner
from hybridep.commands.sites_choice import Asked, in_one
from hybridep.config import build
from hybridep.errors import InfeasibleError, UserError
from hybridep.homes import home_table
from hybridep.placement import home_blocks, homes_of
from hybridep.plan import Objective, Plan, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.check import CheckError
from planner.constraints import Constraints, permissions
from planner.evaluate import evaluate
from planner.goal import Goal
from planner.sites.bound import prove
from planner.sites.evaluate import evaluate_sites, home_of
from planner.sites.free_homes import by_rate, gathered_soonest, with_faster_homes, with_possible_homes
from planner.sites.oracle import best_table
from planner.sites.others import other_plan
from planner.sites.plans import chosen_table
from planner.sites.problem import site_problem
from planner.sites.relaxation import Relaxation
from simulator.step import simulate_step

pytestmark = pytest.mark.timeout(120)


def large_experts() -> Workload:
    """Four of them, of 101 MB: copies pay, and their bytes rule the step."""
    model = {"num_layers": 2, "hidden_size": 1024, "num_heads": 8, "vocab_size": 64, "num_experts": 4, "top_k": 2}
    training = {"sequence_length": 1024, "micro_batch_size": 4, "micro_batches": 16}
    return build(Workload, {"name": "large", "model": model | {"expert_ffn_size": 8192}, "training": training}, "test")


def planned(cluster: Cluster, workload: Workload, time_limit_s: float = 20.0, *, free_homes: bool, **wishes: object) -> Plan:
    return planner.plan(cluster, workload, time_limit_s=time_limit_s, free_homes=free_homes, **wishes)  # type: ignore[arg-type]


def homes_by_site(plan: Plan) -> list[int]:
    cluster = plan.cluster
    home = home_table(cluster, plan.workload.model.num_experts, plan.layers[0].homes)
    return np.bincount(home // cluster.ranks_per_site, minlength=cluster.sizes[0]).tolist()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.turns(4)) for seed in range(1, 8))])
def test_plans_are_no_longer_and_their_figures_hold(seed: int) -> None:
    """Eight sites and fewer experts, so in even blocks those have one that come first."""
    cluster, workload = random_access_cluster(seed, 8), large_experts()
    even, free = (planned(cluster, workload, free_homes=flag) for flag in (False, True))
    assert not any(group.homes for group in even.layers)
    assert free.predicted.step <= even.predicted.step * 1.005
    planner.check(free)
    assert free.solver is not None and free.solver.bound <= free.predicted.step
    assert simulate_step(free).step_s == pytest.approx(free.predicted.expected_s, rel=0.1)
    numbers, rates = homes_by_site(free), np.min(cluster.access_bytes_per_s, axis=0)
    if free.layers[0].homes:
        assert sum(numbers) == 4 and np.average(rates, weights=numbers) > np.mean(rates)
    # Without arrays over ranks, as for clusters of thousands.
    found = evaluate_sites(free)
    assert found is not None
    cost, memory = evaluate(free)
    assert found[0].step_s == pytest.approx(cost.step_s, rel=1e-9)
    assert found[1].total_bytes == pytest.approx(memory.total_bytes, rel=1e-9)


@pytest.mark.turns(2)
def test_slow_sites_are_nobodys_home() -> None:
    """Of a site with a hundredth of the others' rate; where it has an expert all wait for it."""
    rates = np.full((2, 8), 10.0)
    rates[:, 0] = 0.1
    data = random_access_cluster(0, 8).model_dump(mode="json", exclude_none=True)
    for site, (up, down) in zip(data["sites"], rates.T, strict=True):
        site |= {"up": f"{up} Gbps", "down": f"{down} Gbps"}
    cluster, workload = build(Cluster, data, "slow"), large_experts()
    even, free = (planned(cluster, workload, free_homes=flag) for flag in (False, True))
    assert homes_by_site(even)[0] == 1
    assert free.predicted.step <= even.predicted.step * 1.005
    assert home_of(free) is not None and (home_of(free) == home_of(Plan.model_validate(free.model_dump()))).all()


@pytest.mark.turns(2)
def test_homes_stay_where_they_are_said_to() -> None:
    """By sites' own numbers, also where popularity is heeded."""
    cluster, workload = random_access_cluster(3, 8), large_experts()
    asked = Asked(cluster=cluster, workload=workload, wishes=planner.StageWishes())
    for one in (asked, replace(asked, wishes=planner.StageWishes(schedule=Schedule()))):
        assert in_one(one, 4.0).layers[0].homes
    assert with_faster_homes(site_problem(cluster, workload))
    data = cluster.model_dump(mode="json", exclude_none=True)
    data["sites"][2]["experts"] = 2.0
    own = build(Cluster, data, "own")
    assert not with_faster_homes(site_problem(own, workload))
    popularity = tuple(tuple([0.4, 0.3, 0.2, 0.1]) for _ in range(workload.model.num_moe_layers))
    for wishes in ({}, {"popularity": popularity}):
        assert not any(group.homes for group in planned(own, workload, free_homes=True, **wishes).layers), wishes


def ruled(*entries: dict[str, object]) -> Constraints:
    return Constraints.model_validate({"rules": [{"name": f"r{place}"} | entry for place, entry in enumerate(entries)]})


@pytest.mark.parametrize(
    "rules",
    [
        ruled({"kind": "no_link", "sites": ["s0"], "to": ["s1"]}),
        pytest.param(ruled({"kind": "keep_tokens", "sites": ["s2", "s5"]}), marks=pytest.mark.turns(2)),
        pytest.param(ruled({"kind": "forbid", "sites": ["s3"], "experts": "0"}), marks=pytest.mark.turns(2)),
    ],
    ids=["no_link", "keep_tokens", "forbid"],
)
def test_plans_under_rules(rules: Constraints) -> None:
    """Shorter than with even homes, simulated as expected, and kept with experts where they live."""
    cluster, workload = random_access_cluster(3, 8), large_experts()
    even, free = (planned(cluster, workload, free_homes=flag, constraints=rules) for flag in (False, True))
    assert free.layers[0].homes and free.predicted.step < 0.98 * even.predicted.step
    assert free.solver is not None and free.solver.bound <= free.predicted.step
    planner.check(free, rules)
    assert simulate_step(free).step_s == pytest.approx(free.predicted.expected_s, rel=0.1)
    explained = planner.explain(free, rules)
    assert explained.plan.allowed
    assert "experts in even blocks" in {one.name for one in explained.neighbours}


def test_rules_that_only_other_homes_keep() -> None:
    """Tokens of two sites stay there, and no copy comes from the third, so its expert must live elsewhere: with them, or at the
    fourth, which serves the third's tokens."""
    cluster, workload = random_access_cluster(3, 4), large_experts()
    rules = ruled({"kind": "keep_tokens", "sites": ["s0", "s1"]}, {"kind": "no_link", "sites": ["s2"], "to": ["s0", "s1"]})
    with pytest.raises(InfeasibleError, match="rules 'r0' and 'r1' clash"):
        planned(cluster, workload, 3.0, free_homes=False, constraints=rules)
    free = planned(cluster, workload, 3.0, free_homes=True, constraints=rules)
    first = with_possible_homes(replace(site_problem(cluster, workload), constraints=rules))
    assert first is not None and first.permissions is not None and (first.homes > 0).tolist() == [False, True, False, True]
    assert homes_by_site(free)[2] == 0
    planner.check(free, rules)
    with pytest.raises(CheckError, match="computed or held where a rule forbids it"):
        planner.check(free.with_layers(free.layers[0].model_copy(update={"homes": {}})), rules)
    assert all(one.step_s >= free.predicted.step * (1 - 1e-9) for one in planner.compare_planners(free, rules).values())
    # Nowhere can all experts live.
    apart = ruled(*({"kind": "no_link", "sites": [f"s{site}"], "to": [f"s{(site + 1) % 4}"]} for site in range(4)))
    kept = Constraints(rules=(*rules.rules[:1], *(one.model_copy(update={"name": f"a{one.name}"}) for one in apart.rules)))
    with pytest.raises(InfeasibleError, match="clash"):
        planned(cluster, workload, 3.0, free_homes=True, constraints=kept)


@pytest.mark.turns(2)
def test_homes_where_bytes_cost_least() -> None:
    """Half of what copies cost is paid where experts live."""
    cluster, workload = random_access_cluster(3, 8), large_experts()
    data = cluster.model_dump(mode="json", exclude_none=True)
    for place, site in enumerate(data["sites"]):
        site["egress"] = "0.01 $/GB" if place == 5 else "0.10 $/GB"
    cluster, cheapest = build(Cluster, data, "priced"), Goal(objective=Objective.DOLLARS)
    even, free = (planned(cluster, workload, 5.0, free_homes=flag, goal=cheapest) for flag in (False, True))
    assert homes_by_site(free) == [0, 0, 0, 0, 0, 4, 0, 0]
    assert free.predicted.cost_usd < 0.9 * even.predicted.cost_usd
    planner.check(free)
    budget = Goal(budget_usd=(free.predicted.cost_usd + even.predicted.cost_usd) / 2)
    within = planned(cluster, workload, 5.0, free_homes=True, goal=budget)
    assert within.predicted.cost_usd <= (budget.budget_usd or 0.0) * (1 + 1e-5)
    planner.check(within)


@pytest.mark.turns(2)
def test_homes_where_rates_are_not_known() -> None:
    """Those of the plan for the cluster as it is, in all scenarios."""
    cluster, workload = random_access_cluster(3, 8), large_experts()
    scenarios = planner.interval_scenarios(cluster, 0.3, draws=3)
    even, free = (
        planner.plan_for_scenarios(cluster, workload, scenarios, time_limit_s=6.0, free_homes=flag) for flag in (False, True)
    )
    assert free.bound_s <= free.step_s < 0.97 * even.step_s and free.step_s <= free.nominal_step_s * (1 + 1e-9)
    planned_at = home_of(free.plan)
    assert free.plan.layers[0].homes and planned_at is not None
    assert free.step_s == max(evaluate(free.plan.model_copy(update={"cluster": one}))[0].step_s for one in scenarios)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.turns(4)) for seed in range(1, 16))])
def test_homes_for_gathers_are_about_the_best(seed: int) -> None:
    """Of all there are, for copies of all experts everywhere."""
    problem = random_problem(seed, 4, 5, inside=0)

    def gathered_s(numbers: Sequence[int]) -> float:
        moved = replace(problem, home=homes_of(np.array(numbers), problem.cluster.sizes))
        return other_plan(moved, "full_gather").rank[1]

    least_s = min(gathered_s(numbers) for numbers in product(range(6), repeat=4) if sum(numbers) == 5)
    found = gathered_soonest(problem)
    assert found.sum() == 5 and gathered_s(found.tolist()) <= 1.03 * least_s


def test_the_slowest_pair_counts_for_gathers() -> None:
    """All carry as much in all, but one little to another: copies of its experts, or gradients of the other's."""
    cluster = access_cluster(4, np.full((4, 2), 10.0))
    rates = {("s1", "s0"): 1.0, ("s1", "s2"): 9.0, ("s1", "s3"): 8.0}
    links = [
        {"src": src, "dst": dst, "bandwidth": f"{rates.get((src, dst), 6.0)} Gbps", "latency": "1 ms"}
        for src, dst in permutations(cluster.site_names, 2)
    ]
    problem = site_problem(
        build(Cluster, cluster.model_dump(mode="json", exclude_none=True) | {"links": links}, "pairs"), many_experts()
    )
    numbers = gathered_soonest(problem)
    assert numbers.sum() == 64 and numbers[:2].max() <= 7 and numbers[2:].min() >= 24
    assert numbers.tolist() in [one.homes.tolist() for one in with_faster_homes(problem)]


def test_homes_by_rate() -> None:
    assert by_rate(6, np.array([4.0, 2.0, 0.5])).tolist() == [4, 2, 0]
    assert by_rate(3, np.array([1.0, 1.0, 1.0])).tolist() == [1, 1, 1]
    rng = np.random.default_rng(0)
    for experts in (1, 5, 40):
        rates = rng.uniform(1, 10, 12)
        numbers = by_rate(experts, rates)
        least = (rates[numbers > 0] / numbers[numbers > 0]).min()
        assert numbers.sum() == experts and np.floor(rates / least * (1 - 1e-9)).sum() < experts


@pytest.mark.turns(2)
def test_among_many_sites() -> None:
    """A hundred, of which a few have experts; the plan's figures hold for arrays over ranks, too."""
    workload = large_experts()
    model = workload.model.model_copy(update={"num_experts": 30})
    cluster, workload = random_access_cluster(0, 100), workload.model_copy(update={"model": model})
    even, free = (planned(cluster, workload, 5.0, free_homes=flag) for flag in (False, True))
    assert free.predicted.step <= even.predicted.step * 0.98
    assert free.solver is not None and free.solver.bound <= free.predicted.step
    planner.check(free)
    assert evaluate(free)[0].step_s == pytest.approx(free.predicted.step, rel=1e-9)
    assert not with_faster_homes(site_problem(access_cluster(100), workload))  # equal


def test_no_plan_is_longer_than_full_gather_with_such_homes() -> None:
    """Among so many sites hubs are tried first, which may take all of a short time."""
    cluster, workload = random_access_cluster(0, 150), many_experts()
    problem = site_problem(cluster, workload)
    (moved,) = with_faster_homes(problem)
    gathered_s = other_plan(moved, "full_gather").rank[1]
    assert gathered_s < 0.95 * other_plan(problem, "full_gather").rank[1]
    assert planned(cluster, workload, 1.0, free_homes=True).predicted.step <= gathered_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.turns(4)) for seed in range(1, 12))])
@pytest.mark.parametrize("with_rules", [False, True])
def test_bounds_hold_for_other_homes(seed: int, with_rules: bool) -> None:
    """Any numbers of experts at each site, against all tables, that keep random rules."""
    problem = random_problem(seed, 3, 3, inside=0)
    rng = np.random.default_rng(seed)
    numbers = np.bincount(rng.integers(3, size=3), minlength=3)
    moved = replace(problem, home=homes_of(numbers, problem.cluster.sizes))
    while with_rules and moved.constraints is None:
        rules = random_rules(rng, problem)
        if rules is not None and permissions(problem.cluster, 3, rules.rules, moved.home).possible:
            moved = replace(moved, constraints=rules)
    found = best_table(moved)
    assert found is not None and moved.homes.tolist() == numbers.tolist()
    assert moved.permissions is None or moved.permissions.keeps(found[0])
    assert prove(Relaxation(problem=moved), found[2] * 1.2, max_boxes=40).bound_s <= found[2] * (1 + 1e-9)


@pytest.mark.turns(2)
def test_homes_that_are_given() -> None:
    """As the plans of a pool have them, without equal domains, which have their own."""
    cluster, workload = random_access_cluster(3, 8), large_experts()
    home = homes_of(np.array([2, 0, 0, 0, 1, 0, 0, 1]), cluster.sizes)
    given = planner.plan(cluster, workload, time_limit_s=5.0, free_homes=True, home=home)
    assert homes_by_site(given) == [2, 0, 0, 0, 1, 0, 0, 1]
    assert given.solver is not None and given.solver.bound <= given.predicted.step
    with pytest.raises(UserError, match="homes of experts are given between sites that differ"):
        planner.plan(access_cluster(3), workload, home=home)
    with pytest.raises(UserError, match=r"homes: .* by layer, \(2, 4\), and not \(4,\)"):
        planner.plan(cluster, workload, home=home, popularity=((0.4, 0.3, 0.2, 0.1),) * 2)


@pytest.mark.turns(2)
def test_what_homes_bring_and_what_to_buy_is_known_for_such_plans() -> None:
    cluster, workload = random_access_cluster(3, 8), large_experts()
    even, free = (planned(cluster, workload, free_homes=flag) for flag in (False, True))
    told = {one.name: one.step_s for one in planner.explain(free).neighbours}
    assert told["experts in even blocks"] > 1.01 * free.predicted.step
    assert "experts in even blocks" not in {one.name for one in planner.explain(even).neighbours}
    assert free.layers[0].homes and chosen_table(free) is not None
    found = planner.upgrades(free)
    assert found and all(one.present_s <= free.predicted.step * (1 + 1e-9) for one in found)
    assert max(one.gain_s for one in found) > 0.01 * free.predicted.step
    # Homes that are not the cluster's are others for the same plan at those.
    assert (home_of(free) != home_blocks(cluster, 4)).any()
