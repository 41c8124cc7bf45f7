"""The local search: its guide against the exact cost and against itself made anew; walks keep rules and find better plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from site_cases import few_kinds, random_problem, random_table, small_workload, uneven_cluster
from test_site_prices import DOLLARS, priced

from hybridep.config import build
from hybridep.placement import IntArray
from hybridep.plan import Residency
from hybridep.topology import Cluster
from hybridep.traffic import Op
from planner.constraints import Constraints, permissions
from planner.sites.cost import fixed_cost, site_cost
from planner.sites.flows import (
    COPIES,
    NOW,
    SECONDS,
    SHARPNESS,
    TOKENS,
    Flows,
    Links,
    at_busiest,
    busiest_s,
    links_of,
    no_flows,
    refresh,
    smooth_s,
)
from planner.sites.flows import replace as replace_row
from planner.sites.moves import near_sites, relieving_move, seed_moves
from planner.sites.oracle import best_table
from planner.sites.problem import Configuration, Inside, SiteProblem, site_problem
from planner.sites.search import Found, Search
from planner.sites.smoothed import Guide, busiest_value, change, guide_of, smooth_value, undo
from planner.sites.strategy import starts
from planner.sites.walks import _deciding, _walk, improve_tables

UNSEEN = {"jitter": 0.0, "message_overhead": 0.0, "expert_overhead": 0.0}
"""What the guide leaves to the exact cost, beside exchanges inside sites."""


def seen(problem: SiteProblem) -> SiteProblem:
    """One rank a site, and nothing that the guide leaves out."""
    assert problem.num_inside == 1
    cluster = problem.cluster.model_copy(update={"gpu": problem.cluster.gpu.model_copy(update=UNSEEN)})
    return site_problem(cluster, problem.workload, problem.schedule, goal=problem.goal)


def slow_pairs(seed: int, sites: int, experts: int) -> SiteProblem:
    """Links of pairs are what limits, where there are any."""
    problem = random_problem(seed, sites, experts)
    slow = None if problem.pair_bytes_per_s is None else problem.pair_bytes_per_s / 10
    return replace(problem, pair_bytes_per_s=slow)


def assert_exact(problem: SiteProblem, guide: Guide, residency: Residency) -> None:
    """But for the bytes of token counts."""
    exact = site_cost(problem, guide.state.table[NOW], Configuration(inside=problem.everywhere(Inside.ALL), residency=residency))
    layers_s = exact.step_s - fixed_cost(problem).total_s
    counts_s = exact.parts_s[Op.TOKEN_COUNTS.value]
    assert layers_s - counts_s <= busiest_value(guide) * (1 + 1e-9) and busiest_value(guide) <= layers_s * (1 + 1e-9)


def with_trunks(problem: SiteProblem) -> SiteProblem:
    """Without links per pair; what the first sites send each other, and what all send the last one, shares trunks."""
    data = problem.cluster.model_dump(mode="json", exclude_none=True)
    data.pop("links", None)
    names = [site["name"] for site in data["sites"]]
    first = {f"{a} -> {b}": 1.0 for a in names[:3] for b in names[:3] if a != b}
    last = {f"{a} -> {names[-1]}": 0.5 for a in names[:-1]}
    data["trunks"] = [
        {"name": "first", "bandwidth": "60 Mbps", "carries": first},
        {"name": "last", "bandwidth": "30 Mbps", "carries": last},
    ]
    return site_problem(build(Cluster, data, "test"), problem.workload, problem.schedule)


@pytest.mark.parametrize("residency", Residency)
@pytest.mark.parametrize("seed", range(6))
def test_the_guide_takes_what_the_exact_cost_takes(seed: int, residency: Residency) -> None:
    problem = seen(random_problem(seed, 5, 8, inside=0))
    rng = np.random.default_rng(seed)
    for table in (random_table(rng, problem), np.tile(problem.home_site, (5, 1)), np.repeat(np.arange(5)[:, None], 8, axis=1)):
        guide = guide_of(problem, table, residency)
        assert_exact(problem, guide, residency)
        assert busiest_value(guide) <= smooth_value(guide) <= busiest_value(guide) * 1.4


@pytest.mark.parametrize("seed", range(4))
def test_the_guide_counts_dollars(seed: int) -> None:
    problem = priced(random_problem(seed, 4, 6, inside=0), np.random.default_rng(seed))
    problem = seen(replace(problem, goal=DOLLARS))
    table = random_table(np.random.default_rng(seed), problem)
    exact = site_cost(problem, table, Configuration(inside=problem.everywhere(Inside.ALL), residency=Residency.STEP)).step_usd
    fixed = fixed_cost(problem)
    exact -= fixed.egress_usd + problem.cluster.rent_usd_per_s * fixed.total_s
    assert busiest_value(guide_of(problem, table, Residency.STEP)) == pytest.approx(exact, rel=1e-3)


def test_the_guide_sees_trunks() -> None:
    problem = seen(with_trunks(random_problem(3, 5, 8, inside=0)))
    rng = np.random.default_rng(0)
    for table in (random_table(rng, problem) for _ in range(5)):
        guide = guide_of(problem, table, Residency.STEP)
        assert_exact(problem, guide, Residency.STEP)
        without = replace(problem, cluster=problem.cluster.model_copy(update={"trunks": ()}))
        assert busiest_value(guide) > 1.01 * busiest_value(guide_of(without, table, Residency.STEP))


def known(guide: Guide) -> list[np.ndarray]:
    """All that follows from the table."""
    state, flows = guide.state, guide.flows
    now = [
        each[NOW] for each in (state.table, state.counts, state.served, flows.units, flows.access, flows.trunk_s, flows.by_row)
    ]
    return [each.copy() for each in (*now, state.users)]


@pytest.mark.parametrize("made", [random_problem(0, 6, 10), with_trunks(random_problem(1, 6, 10)), few_kinds(2, 7, 9)])
def test_a_walk_s_state_is_that_of_its_table(made: SiteProblem) -> None:
    rng, near, moved = np.random.default_rng(1), near_sites(made), 0
    guide = guide_of(made, np.tile(made.home_site, (made.num_sites, 1)), Residency.STEP)
    seed_moves(1)
    busiest_value(guide)
    for _ in range(300):
        sites, rows = relieving_move(guide, near)
        before, value = known(guide), smooth_value(guide)
        wanted = guide.state.table[NOW].copy()
        wanted[sites] = rows
        change(guide, sites, rows)
        assert (guide.state.table[NOW] == wanted).all()
        if rng.random() < 0.5:
            moved += not (wanted == before[0]).all()
            busiest_value(guide)
        else:
            undo(guide, sites)
            assert all((kept == now).all() for kept, now in zip(before, known(guide), strict=True))
            assert smooth_value(guide) == value
    assert moved > 50
    anew = guide_of(made, guide.state.table[NOW], Residency.STEP)
    assert smooth_value(guide) == pytest.approx(smooth_value(anew), rel=1e-9)
    assert busiest_value(guide) == pytest.approx(busiest_value(anew), rel=1e-9)
    for kept, fresh in zip(known(guide), known(anew), strict=True):
        assert kept == pytest.approx(fresh, rel=1e-9, abs=1e-9 * np.abs(fresh).max(initial=0.0))


@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("make", [random_problem, slow_pairs, lambda *given: with_trunks(random_problem(*given))])
def test_moves_look_at_the_busiest_link(make: Callable[[int, int, int], SiteProblem], back: int) -> None:
    for seed in range(12):
        problem, rng = make(seed, 6, 10), np.random.default_rng(seed)
        seed_moves(seed)
        links, kind = links_of(problem), seed % 2
        flows = no_flows(links, np.ones(2))
        flows.units[NOW, kind] = np.where(np.eye(6) > 0, 0.0, rng.uniform(0, 9, (6, 6)) * (rng.random((6, 6)) < 0.6))
        refresh(links, flows)
        before_s, smoothed_s = busiest_s(links, flows, kind, back), smooth_s(links, flows, kind, back)
        assert before_s == pytest.approx(longest_s(links, flows, kind, back))
        assert before_s <= smoothed_s <= before_s * 100 ** (1 / SHARPNESS)
        src, dst = at_busiest(links, flows, kind, back)
        assert src != dst and flows.units[NOW, kind, src, dst] > 0
        # Without these units the busiest link has less to carry.
        rest = flows.units[NOW, kind, src].copy()
        rest[dst] = 0.0
        replace_row(links, flows, kind, src, rest)
        assert smooth_s(links, flows, kind, back) < smoothed_s
        assert busiest_s(links, flows, kind, back) < before_s


def longest_s(links: Links, flows: Flows, kind: int, way: int) -> float:
    """Of all links, without what is kept up to date."""
    units = flows.units[NOW, kind]
    access_s = links.access_s[way] * np.stack([units.sum(axis=1), units.sum(axis=0)])
    trunks_s = np.einsum("std,sd->t", links.trunk_s[way], units)
    return max(float(access_s.max()), float((links.pairs[SECONDS, way] * units).max()), float(trunks_s.max(initial=0.0)))


def walked(problem: SiteProblem, *tables: IntArray, moves: int = 1500) -> Search:
    search = Search(problem=problem)
    improve_tables(search, [search.evaluate(table) for table in tables], moves, np.random.default_rng(0))
    return search


@pytest.mark.parametrize("seed", range(6))
def test_walks_end_near_the_best_of_all_tables(seed: int) -> None:
    problem = random_problem(seed, *[(3, 2), (2, 5)][seed % 2])
    best, search = best_table(problem), walked(problem, *(table for _, table in starts(problem)), moves=300)
    assert best is not None and search.best is not None
    assert best[2] * (1 - 1e-9) <= search.best.rank[1] <= best[2] * 1.02


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_walks_go_on_where_single_links_bind(seed: int) -> None:
    """From domains in rank order, which ignore the links, to what is at least a tenth faster."""
    problem = random_problem(seed, 12, 16, inside=1)
    start = np.arange(12)[:, None] // 4 * 4 + np.arange(16)[None, :] % 4
    search = walked(problem, start)
    assert search.best is not None and search.best.rank[1] < 0.9 * search.evaluate(start).rank[1]


def test_walks_keep_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, workload = uneven_cluster(np.random.default_rng(2), 5, 2), small_workload(np.random.default_rng(2), 8)
    data = [
        {"name": "a", "kind": "keep_tokens", "sites": ["s0", "s1"]},
        {"name": "b", "kind": "forbid", "sites": ["s3"], "experts": "0-2"},
    ]
    constraints = Constraints.model_validate({"rules": data})
    problem, kept = site_problem(cluster, workload, constraints=constraints), permissions(cluster, 8, constraints.rules)
    start = kept.repaired(np.tile(problem.home_site, (5, 1)), problem.home_site)
    search, looked = Search(problem=problem), []
    evaluate = search.evaluate

    def noted(table: IntArray) -> Found:
        looked.append(kept.keeps(table))
        return evaluate(table)

    search.evaluate = noted  # type: ignore[method-assign]
    monkeypatch.setattr("planner.sites.walks.STRETCH", 20)
    improve_tables(search, [evaluate(start)], 2000, np.random.default_rng(0))
    assert search.best is not None and search.best.rank[1] < evaluate(start).rank[1]
    assert len(looked) > 2 and all(looked)


@pytest.mark.parametrize("seed", [17, 21, 28])
def test_walks_keep_within_memory(seed: int) -> None:
    roomy = random_problem(seed, 6, 12, inside=1)
    start = np.tile(roomy.home_site, (6, 1))
    free = walked(roomy, start).best
    assert free is not None and free.cost is not None and free.configuration is not None
    needs = site_cost(roomy, start, free.configuration).memory_bytes
    assert free.cost.memory_bytes > 1.02 * needs
    tight = roomy.cluster.model_copy(update={"gpu": roomy.cluster.gpu.model_copy(update={"memory": 1.01 * needs})})
    search = walked(site_problem(tight, roomy.workload, roomy.schedule), start, moves=6000)
    assert search.best is not None and search.best.rank[0] == 0
    assert search.best.rank[1] < 0.9 * search.evaluate(start).rank[1]


def test_a_walk_first_makes_a_table_fit() -> None:
    roomy = random_problem(12, 6, 12, inside=1)
    home = np.tile(roomy.home_site, (6, 1))
    least = min(site_cost(roomy, home, one).memory_bytes for one in roomy.configurations())
    tight = roomy.cluster.model_copy(update={"gpu": roomy.cluster.gpu.model_copy(update={"memory": 1.02 * least})})
    problem = site_problem(tight, roomy.workload, roomy.schedule)
    search = Search(problem=problem)
    start = search.evaluate(np.zeros_like(home))
    assert start.rank[0] > 0
    end = _walk(search, start, 2000, np.random.default_rng(0))
    assert end.rank[0] == 0 and end is search.best


def test_walks_are_played_off_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them go on with twice as many moves, the last one until it no longer helps."""
    problem = random_problem(0, 3, 4)
    tables, seen_moves = [Search(problem=problem).evaluate(random_table(np.random.default_rng(i), problem)) for i in range(4)], []
    steps_s = {id(one.table): [8.0 - number, 6.0 - number, 1.0, 0.5, 0.4999] for number, one in enumerate(tables)}

    def walk(search: Search, best: Found, moves: int, rng: np.random.Generator) -> Found:
        seen_moves.append((moves, [id(one.table) for one in tables].index(id(best.table))))
        return replace(best, rank=(0, steps_s[id(best.table)].pop(0)))

    monkeypatch.setattr("planner.sites.walks._walk", walk)
    improve_tables(Search(problem=problem), tables, 10, np.random.default_rng(0))
    assert seen_moves == [(10, 0), (10, 1), (10, 2), (10, 3), (20, 3), (20, 2), (40, 3), (40, 3), (40, 3)]


@pytest.mark.parametrize("quantile", [0.5, 1.0])
def test_the_guide_s_links_are_those_of_the_scenario_that_counts(quantile: float) -> None:
    problem = random_problem(3, 4, 6)
    assert problem.pair_bytes_per_s is not None
    scenarios = tuple(replace(problem, pair_bytes_per_s=problem.pair_bytes_per_s * factor) for factor in (0.5, 0.1, 0.2))
    search = Search(problem=problem, scenarios=scenarios, quantile=quantile)
    best = search.evaluate(np.tile(problem.home_site, (4, 1)))
    assert _deciding(search, best) is scenarios[1 if quantile == 1.0 else 2]


def test_what_exchanges_take_counts_their_repetitions() -> None:
    problem = random_problem(2, 4, 6)
    table = random_table(np.random.default_rng(0), problem)
    batches = problem.workload.training.micro_batches
    taken = []
    for residency in (Residency.STEP, Residency.MICROBATCH):
        guide = guide_of(problem, table, residency)
        busiest_value(guide)
        taken.append(guide.state.busy_s * guide.work.unit_bytes)
    once, often = taken
    assert (once[TOKENS] == often[TOKENS]).all() and once.all()
    assert often[COPIES] / once[COPIES] == pytest.approx([2 * batches, batches])


def test_walks_begin_at_tables_that_differ() -> None:
    problem = random_problem(0, 4, 5)
    search, home = Search(problem=problem), np.tile(problem.home_site, (4, 1))
    near, far = home.copy(), np.repeat(np.arange(4)[:, None], 5, axis=1)
    near[0, 0] = (near[0, 0] + 1) % 4
    found = sorted((search.evaluate(table) for table in (home, near, far)), key=lambda one: one.rank)
    assert search.best_apart(9, 0.05) == found
    assert search.best_apart(2, 0.05) == found[:2]
    apart = search.best_apart(9, 0.06)
    assert len(apart) == 2 and apart[0] is found[0] and any((one.table == far).all() for one in apart)
