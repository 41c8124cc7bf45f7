"""Hubs that lack memory for their users find some experts for their own tokens elsewhere, and copies stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from site_cases import many_experts, random_access_cluster

from hybridep.plan import Residency
from planner.sites.cost import rank_memory_bytes
from planner.sites.exchange import held_by_site, layer_exchanges
from planner.sites.hubs import best_hubs
from planner.sites.problem import Inside, SiteProblem, site_problem
from planner.sites.relief import relieved_table
from planner.sites.search import Search
from planner.sites.spread import Spread, best_spreads, spread_table

SITES, USERS = 60, 3


def needs_bytes(problem: SiteProblem, table: np.ndarray) -> np.ndarray:
    """[D]: of sites of one rank whose copies stay."""
    return rank_memory_bytes(problem, layer_exchanges(problem, table, problem.everywhere(Inside.ALL)), Residency.STEP)[:, 0]


def problem_of(memory_bytes: float) -> SiteProblem:
    return site_problem(random_access_cluster(1, SITES, kinds=10, memory=f"{memory_bytes:.0f} B"), many_experts())


@pytest.fixture(scope="module")
def spread() -> Spread:
    problem = problem_of(1e12)
    plan = best_hubs(problem, USERS)
    assert plan is not None
    return best_spreads(problem, plan, USERS)[0]


@pytest.fixture(scope="module")
def needed_bytes(spread: Spread) -> float:
    problem = problem_of(1e12)
    table = spread_table(problem, spread)
    assert relieved_table(problem, spread, table) is table  # there is room
    return float(needs_bytes(problem, table).max())


@pytest.mark.parametrize("share", [0.97, 0.985, 0.995])
def test_a_little_memory_is_made_up_for(spread: Spread, needed_bytes: float, share: float) -> None:
    memory_bytes = share * needed_bytes
    problem = problem_of(memory_bytes)
    table = spread_table(problem, spread)
    relieved = relieved_table(problem, spread, table)
    assert relieved is not None
    before, after = needs_bytes(problem, table), needs_bytes(problem, relieved)
    assert before.max() > memory_bytes >= after.max()
    # Hubs keep what they hold and whom they serve; only tokens of those that lacked room go elsewhere instead.
    hubs = spread.plan.hubs
    own = relieved[hubs] == hubs[:, None]
    assert (own <= (table[hubs] == hubs[:, None])).all()
    changed = hubs[(own != (table[hubs] == hubs[:, None])).any(axis=1)]
    assert set(changed) == set(np.flatnonzero(before > memory_bytes))
    assert (held_by_site(problem, relieved)[hubs] == held_by_site(problem, table)[hubs]).all()
    # No link is busy for longer than the hubs' times.
    (rows,) = layer_exchanges(problem, relieved, problem.everywhere(Inside.ALL)).rows
    tokens = problem.workload.training.tokens
    assert rows.line(problem)[1] / tokens <= spread.plan.forward * (1 + 1e-6)
    assert rows.reverse.line(problem)[1] / tokens <= spread.plan.back * (1 + 1e-6)
    # Copies stay, which is faster than gathering them for every micro-batch.
    search = Search(problem=problem)
    found = search.evaluate(relieved)
    assert found.configuration is not None and found.configuration.residency is Residency.STEP
    assert search.evaluate(table).rank > found.rank


def test_there_is_no_relief_where_memory_or_links_have_too_little_room(spread: Spread, needed_bytes: float) -> None:
    problem = problem_of(0.7 * needed_bytes)
    assert relieved_table(problem, spread, spread_table(problem, spread)) is None
    problem = problem_of(0.98 * needed_bytes)
    plan = replace(spread.plan, forward=0.3 * spread.plan.forward, back=0.3 * spread.plan.back)
    assert relieved_table(problem, replace(spread, plan=plan), spread_table(problem, spread)) is None
