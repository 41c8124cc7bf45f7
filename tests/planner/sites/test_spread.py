"""Hubs that leave experts out: links keep to their time, copies become fewer, and steps shorter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from site_cases import many_experts, random_access_cluster, run

from hybridep.config import build
from hybridep.topology import Cluster
from planner.sites import spread as module
from planner.sites import strategy
from planner.sites.exchange import held_by_site, layer_exchanges
from planner.sites.hubs import best_hubs, served_table
from planner.sites.problem import Inside, SiteProblem, site_problem
from planner.sites.search import Search
from planner.sites.spread import Spread, best_spreads, equal_hubs, equal_spread, own_counts, spread_table


def busiest(problem: SiteProblem, table: np.ndarray) -> tuple[float, float]:
    """Sites' rows over rates on the busiest link, to the experts and back."""
    (rows,) = layer_exchanges(problem, table, problem.everywhere(Inside.ALL)).rows
    tokens = problem.num_inside * problem.workload.training.tokens
    return rows.line(problem)[1] / tokens, rows.reverse.line(problem)[1] / tokens


def within_times(problem: SiteProblem, spread: Spread) -> bool:
    return within(problem, spread, spread_table(problem, spread))


def within(problem: SiteProblem, spread: Spread, table: np.ndarray) -> bool:
    forward, back = busiest(problem, table)
    return forward <= spread.plan.forward * (1 + 1e-6) and back <= spread.plan.back * (1 + 1e-6)


def spread_of(seed: int, sites: int, most_users: int = 3) -> tuple[SiteProblem, Spread]:
    problem = site_problem(random_access_cluster(seed, sites, kinds=10 if seed % 2 else None), many_experts())
    plan = best_hubs(problem, most_users)
    assert plan is not None
    return problem, best_spreads(problem, plan, most_users)[0]


@pytest.mark.parametrize("seed", range(4))
def test_links_keep_to_their_time(seed: int) -> None:
    problem, spread = spread_of(seed, 40 + 7 * seed)
    assert spread.left_out.any()
    assert within_times(problem, spread)
    table = spread_table(problem, spread)
    assert (table == spread_table(problem, spread)).all()


def test_one_expert_more_left_out_is_too_many() -> None:
    """So what hubs leave out is what links have room for."""
    found = []
    for seed in range(2):
        problem, spread = spread_of(seed, 50)
        more = replace(spread, left_out=spread.left_out + 4, most_copies=np.zeros(problem.num_experts))
        found.append(within_times(problem, more))
    assert not all(found)


@pytest.mark.parametrize("seed", range(2))
def test_slow_homes_send_fewer_copies_and_the_step_is_shorter(seed: int) -> None:
    problem, spread = spread_of(seed, 60)
    full, table = served_table(problem, spread.plan), spread_table(problem, spread)
    copies, before = (held_by_site(problem, one).sum(axis=0) for one in (table, full))
    slowest = np.argmin(np.minimum(problem.up_bytes_per_s, problem.down_bytes_per_s)[problem.home_site])
    assert copies[slowest] < before[slowest]
    search = Search(problem=problem)
    assert search.evaluate(table).rank < search.evaluate(full).rank


def test_finer_times_are_tried_about_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no coarse one is, where that is faster."""
    finer = [spread_of(seed, 50) for seed in range(4)]
    monkeypatch.setattr(module, "FINER", ())
    coarse = [spread_of(seed, 50) for seed in range(4)]
    gains = [before.layer_s / after.layer_s for (_, before), (_, after) in zip(coarse, finer, strict=True)]
    assert min(gains) >= 1 and max(gains) > 1.001, gains


@pytest.mark.parametrize("sites", [100, 400])
def test_copies_are_as_many_as_was_estimated(sites: int) -> None:
    """Those at the few holders of what hubs leave out, too, of which there are ever more of each expert among more sites."""
    problem, spread = spread_of(0, sites)
    table, wanted = spread_table(problem, spread), spread.most_copies < len(spread.plan.hubs)
    held = held_by_site(problem, table)
    at_hubs, copies = held[spread.plan.hubs].sum(), held.sum()
    elsewhere = copies - at_hubs - (problem.num_experts - problem.homes[spread.plan.hubs].sum())
    assert spread.thin * spread.left_out.sum() == pytest.approx(elsewhere, rel=0.35)
    # Hubs leave out all they may, which may be more than is of use.
    assert 0.8 < held.sum(axis=0)[wanted].mean() / spread.most_copies[wanted].mean() < 1.05


@pytest.mark.parametrize("seed", range(3))
def test_users_hold_what_hubs_have_no_time_for(seed: int) -> None:
    """Links keep to their time for rows, and hubs' to a share of theirs for copies; one user computes for its hub."""
    problem, spread = spread_of(seed, 60)
    hubs, before = spread.plan.hubs, held_by_site(problem, spread_table(problem, spread))
    own = own_counts(problem, spread, 0.8)
    table = spread_table(problem, spread, own=own)
    assert within(problem, spread, table)
    held = held_by_site(problem, table)
    fewer = before[hubs].sum(axis=1) - held[hubs].sum(axis=1)
    assert (fewer > 0).sum() >= 5 and (fewer[own == 0] == 0).all() and (fewer <= own).all()
    for number in np.flatnonzero(fewer > 0):
        hub = hubs[number]
        users = np.setdiff1d(np.flatnonzero(spread.hub_of == hub), hub)
        gone = np.flatnonzero(before[hub].astype(bool) & ~held[hub].astype(bool))
        assert held[np.ix_(users, gone)].all() and len(np.unique(table[hub, gone])) == 1 and table[hub, gone][0] in users
    rate = np.minimum(
        problem.down_bytes_per_s / problem.wire.expert_bytes, problem.up_bytes_per_s / problem.wire.expert_gradient_bytes
    )
    copies = (held.sum(axis=1) - problem.homes)[hubs] / rate[hubs]
    longest = ((before.sum(axis=1) - problem.homes)[hubs] / rate[hubs]).max()
    assert copies[fewer == own].max() <= 0.8 * longest * (1 + 1e-9)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("sites", "kinds"), [(60, None), (100, None), (100, 10)])
def test_hubs_whose_users_hold_some_are_faster_where_links_of_hubs_are_busiest(
    sites: int, kinds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = site_problem(random_access_cluster(0, sites, kinds=kinds), many_experts())
    steps_s = []
    for shares in (strategy.OWN_SHARES, ()):
        monkeypatch.setattr(strategy, "OWN_SHARES", shares)
        search = Search(problem=problem)
        strategy.try_best_hubs(search)
        assert search.best is not None
        steps_s.append(search.best.rank[1])
    assert steps_s[0] < 0.997 * steps_s[1]


def equal_sites(sites: int) -> SiteProblem:
    data = random_access_cluster(0, sites).model_dump(mode="json", exclude_none=True)
    del data["sites"]
    return site_problem(build(Cluster, data, "test"), many_experts())


def test_equal_sites_share_what_hubs_leave_out() -> None:
    problem = equal_sites(200)
    spread = equal_spread(problem)
    assert spread is not None and within_times(problem, spread)
    search = Search(problem=problem, max_evaluations=40)
    run(search)
    table = spread_table(problem, spread)
    assert table.tobytes() in search._seen
    assert search.evaluate(table).rank < search.evaluate(served_table(problem, spread.plan)).rank


def test_one_site_has_no_hubs() -> None:
    assert equal_spread(equal_sites(1)) is None


def test_each_expert_left_out_is_found_where_few_hold_it() -> None:
    problem = equal_sites(200)
    spread = module._spread(problem, equal_hubs(problem, 3))
    table = spread_table(problem, spread)
    held = held_by_site(problem, table)
    others = np.setdiff1d(np.arange(200), spread.plan.hubs)
    assert held[spread.plan.hubs].sum(axis=1).max() == problem.num_experts - spread.left_out.min()
    assert held[others].sum(axis=1).max() <= 3
    assert (held[table, np.arange(problem.num_experts)] == 1).all()
