"""Hubs: sites that hold everything for their users, against every choice of hubs and users on few sites, and among many."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from site_cases import many_experts, random_access_cluster, small_workload

from hybridep.plan import Residency
from planner.sites.exchange import layer_exchanges
from planner.sites.hubs import best_hubs, served_table
from planner.sites.problem import Inside, SiteProblem, site_problem
from planner.sites.search import Search
from planner.sites.strategy import try_best_hubs


def link_seconds(problem: SiteProblem, table: np.ndarray) -> float:
    """What rows and copies of one layer take on the busiest links, without latencies."""
    layer, work = layer_exchanges(problem, table, problem.everywhere(Inside.ALL)), problem.workload
    (rows,), (copies,) = layer.rows, layer.copies
    batches = work.training.micro_batches
    forward, back = rows.line(problem)[1], rows.reverse.line(problem)[1]
    there = forward * (work.dispatch_row_bytes + work.combine_row_bytes)
    again = back * (work.combine_row_bytes + work.dispatch_gradient_row_bytes)
    moved = (copies.line(problem)[1] + copies.reverse.line(problem)[1]) * work.expert_bytes
    return batches * (there + again) + moved


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(6))
def test_hubs_against_every_choice(seed: int) -> None:
    problem = site_problem(random_access_cluster(seed, 4), small_workload(np.random.default_rng(seed), 10))
    steps_s: dict[bool, float] = {}
    for holder in product(range(4), repeat=4):
        if all(holder[one] == one for one in holder):
            table = np.repeat(np.array(holder)[:, None], problem.num_experts, axis=1)
            everywhere = len(set(holder)) == 4
            steps_s[everywhere] = min(steps_s.get(everywhere, np.inf), link_seconds(problem, table))
    plan = best_hubs(problem, 4)
    assert plan is not None
    found_s = link_seconds(problem, served_table(problem, plan))
    assert found_s <= plan.layer_s * (1 + 1e-9)
    # Plans without any users are tried elsewhere too.
    assert min(steps_s.values()) * (1 - 1e-9) <= found_s <= 1.03 * steps_s[False]


@pytest.mark.parametrize("most_users", [1, 3, 100])
def test_no_hub_has_more_users_than_asked_for_and_everyone_has_a_hub(most_users: int) -> None:
    problem = site_problem(random_access_cluster(1, 60), many_experts())
    plan = best_hubs(problem, most_users)
    assert plan is not None
    holder = served_table(problem, plan)[:, 0]
    assert (holder[plan.hubs] == plan.hubs).all() and set(holder) <= set(plan.hubs)
    assert np.bincount(holder, minlength=60).max() - 1 <= most_users
    assert link_seconds(problem, served_table(problem, plan)) <= plan.layer_s * (1 + 1e-9)


def test_paths_with_limits_have_no_hubs_of_this_kind() -> None:
    problem = site_problem(random_access_cluster(1, 6), many_experts())
    assert best_hubs(replace(problem, pair_bytes_per_s=np.full((6, 6), 1e9)), 6) is None


def test_many_sites_with_little_memory_have_hubs_with_few_users() -> None:
    """With users as links alone would have them, copies would have to be gathered for every micro-batch."""
    workload = many_experts()
    ample = site_problem(random_access_cluster(2, 60, kinds=10), workload)
    plan = best_hubs(ample, 60)
    assert plan is not None
    costs = [Search(problem=ample).evaluate(served_table(ample, one)) for one in (plan, best_hubs(ample, 1)) if one is not None]
    needs = [one.cost.memory_bytes for one in costs if one.cost is not None]
    memory_bytes = (needs[0] + needs[1]) / 2
    problem = site_problem(random_access_cluster(2, 60, kinds=10, memory=f"{memory_bytes:.0f} B"), workload)
    assert Search(problem=problem).evaluate(served_table(problem, plan)).rank > costs[0].rank
    search = Search(problem=problem)
    try_best_hubs(search)
    assert search.best is not None and search.best.configuration is not None and search.best.rank[0] == 0
    assert search.best.configuration.residency is Residency.STEP
    assert search.best.rank <= costs[1].rank
