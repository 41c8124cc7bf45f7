"""Hubs: sites that hold everything for their users, against every choice of hubs and users on few sites, and among many."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from site_cases import access_cluster, many_experts, random_access_cluster, small_workload

from hybridep.config import build
from hybridep.plan import Residency
from hybridep.workload import Workload
from planner.sites import hubs
from planner.sites.exchange import layer_exchanges
from planner.sites.hubs import NO_TEAMS, best_hubs, hubs_within, served_table
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


def middling(sites: int) -> SiteProblem:
    """A fifth of fast sites, half of middling ones and the rest slow, of eight ranks each; about three users for a hub."""
    model = {"num_layers": 16, "hidden_size": 2048, "num_heads": 16, "vocab_size": 32000, "num_experts": 256, "top_k": 8}
    training = {"sequence_length": 4096, "micro_batch_size": 1, "micro_batches": 4, "dtype": "bf16"}
    workload = build(Workload, {"name": "test", "model": model | {"expert_ffn_size": 512}, "training": training}, "test")
    rng, kinds = np.random.default_rng(0), ((15, 30, 0.2), (8, 10, 0.5), (5, 6, 0.3))
    rates = np.concatenate([rng.uniform(low, high, (round(sites * share), 2)) for low, high, share in kinds])
    return site_problem(access_cluster(sites, rates, gpus=8), workload)


def test_teams_find_everything_among_themselves() -> None:
    """Where hubs would serve fewer users than a team has members; links are busy no longer than was asked for."""
    problem, seen = middling(300), 0
    best = best_hubs(problem, 300)
    assert best is not None
    for there, again in product((1.0, 1.02, 1.05), (0.9, 0.95, 1.0, 1.02)):
        forward, back = there * best.forward, again * best.back
        plan = hubs_within(problem, forward, back, 300)
        if plan is None or not len(plan.teams):
            continue
        seen += 1
        table = served_table(problem, plan)
        for members in plan.teams:
            assert set(table[members].ravel()) == set(members.tolist()) and (table[members] == table[members[0]]).all()
            assert np.bincount(table[members[0]])[members].max() == 86
        assert set(plan.users(problem)) | set(plan.hubs) | set(plan.teams.ravel()) == set(range(300))
        assert set(table[plan.users(problem)].ravel()) <= set(plan.hubs)
        layer = layer_exchanges(problem, table, problem.everywhere(Inside.ALL))
        rows, site_rows = layer.rows[0], problem.num_inside * problem.workload.training.tokens
        assert rows.line(problem)[1] <= site_rows * forward * (1 + 1e-6)
        assert rows.reverse.line(problem)[1] <= site_rows * back * (1 + 1e-6)
    assert seen


def test_teams_make_shorter_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, steps_s = middling(300), list[float]()
    for _ in range(2):
        search = Search(problem=problem)
        try_best_hubs(search)
        assert search.best is not None and search.best.rank[0] == 0
        steps_s.append(search.best.rank[1])
        monkeypatch.setattr(hubs, "_teams", lambda *_: NO_TEAMS)
    assert steps_s[0] < 0.98 * steps_s[1]
