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
from planner.sites.flows import SHARPNESS, Flow
from planner.sites.moves import _deciding, _move, _near, _walk, improve_tables
from planner.sites.oracle import best_table
from planner.sites.problem import Configuration, Inside, SiteProblem, site_problem
from planner.sites.search import Found, Search
from planner.sites.smoothed import Smoothed
from planner.sites.strategy import starts

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


def assert_exact(guide: Smoothed) -> None:
    """But for the bytes of token counts."""
    exact = site_cost(guide.problem, guide.table, Configuration(inside=Inside.ALL, residency=guide.residency))
    layers_s = exact.step_s - fixed_cost(guide.problem).total_s
    counts_s = exact.parts_s[Op.TOKEN_COUNTS.value]
    assert layers_s - counts_s <= guide.busiest_value * (1 + 1e-9) and guide.busiest_value <= layers_s * (1 + 1e-9)


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
        guide = Smoothed(problem, table, residency)
        assert_exact(guide)
        assert guide.busiest_value <= guide.value <= guide.busiest_value * 1.4


@pytest.mark.parametrize("seed", range(4))
def test_the_guide_counts_dollars(seed: int) -> None:
    problem = priced(random_problem(seed, 4, 6, inside=0), np.random.default_rng(seed))
    problem = seen(replace(problem, goal=DOLLARS))
    table = random_table(np.random.default_rng(seed), problem)
    exact = site_cost(problem, table, Configuration(inside=Inside.ALL, residency=Residency.STEP)).step_usd
    fixed = fixed_cost(problem)
    exact -= fixed.egress_usd + problem.cluster.rent_usd_per_s * fixed.total_s
    assert Smoothed(problem, table, Residency.STEP).busiest_value == pytest.approx(exact, rel=1e-3)


def test_the_guide_sees_trunks() -> None:
    problem = seen(with_trunks(random_problem(3, 5, 8, inside=0)))
    rng = np.random.default_rng(0)
    for table in (random_table(rng, problem) for _ in range(5)):
        guide = Smoothed(problem, table, Residency.STEP)
        assert_exact(guide)
        without = replace(problem, cluster=problem.cluster.model_copy(update={"trunks": ()}))
        assert guide.busiest_value > 1.01 * Smoothed(without, table, Residency.STEP).busiest_value


@pytest.mark.parametrize("made", [random_problem(0, 6, 10), with_trunks(random_problem(1, 6, 10)), few_kinds(2, 7, 9)])
def test_a_walk_s_state_is_that_of_its_table(made: SiteProblem) -> None:
    rng = np.random.default_rng(1)
    at = Smoothed(made, np.tile(made.home_site, (made.num_sites, 1)), Residency.STEP)
    near = _near(made)
    for _ in range(300):
        trial = at.trial(*_move(at, near, rng))
        before = at.table.copy(), at.users.copy(), at.tokens.units.copy(), at.copies.units.copy()
        if rng.random() < 0.5:
            at.accept(trial)
            assert at.value == trial.value
        else:
            for kept, now in zip(before, (at.table, at.users, at.tokens.units, at.copies.units), strict=True):
                assert (kept == now).all()
    anew = Smoothed(made, at.table, Residency.STEP)
    assert at.value == pytest.approx(anew.value, rel=1e-9)
    assert at.busiest_value == pytest.approx(anew.busiest_value, rel=1e-9)
    assert at.exchanges_s == pytest.approx(anew.exchanges_s, rel=1e-9)
    assert (at.users == anew.users).all() and (at.counts == anew.counts).all()
    assert at.served == pytest.approx(anew.served) and at.copies.units == pytest.approx(anew.copies.units)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("make", [random_problem, slow_pairs, lambda *given: with_trunks(random_problem(*given))])
def test_moves_look_at_the_busiest_link(make: Callable[[int, int, int], SiteProblem], back: bool) -> None:
    for seed in range(12):
        problem, rng = make(seed, 6, 10), np.random.default_rng(seed)
        flow = Flow(problem, np.where(np.eye(6) > 0, 0.0, rng.uniform(0, 9, (6, 6)) * (rng.random((6, 6)) < 0.6)), 1.0)
        before_s = flow.busiest_s(flow.now)[int(back)]
        smooth_s = flow.smooth_s(flow.now)[int(back)]
        assert before_s <= smooth_s <= before_s * 100 ** (1 / SHARPNESS)
        src, dst = flow.at_busiest(back, rng)
        assert src != dst and flow.units[src, dst] > 0
        # Without these units the busiest link has less to carry.
        rest = flow.units[[src]].copy()
        rest[0, dst] = 0.0
        changed = flow.changed(np.array([src]), rest)
        assert flow.smooth_s(changed)[int(back)] < smooth_s
        assert flow.busiest_s(changed)[int(back)] < before_s


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


def test_walks_keep_rules() -> None:
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
    improve_tables(search, [evaluate(start)], 2000, np.random.default_rng(0))
    assert search.best is not None and search.best.rank[1] < evaluate(start).rank[1]
    assert len(looked) > 2 and all(looked)


@pytest.mark.parametrize("seed", [12, 13])
def test_walks_keep_within_memory(seed: int) -> None:
    roomy = random_problem(seed, 6, 12, inside=1)
    start = np.tile(roomy.home_site, (6, 1))
    free = walked(roomy, start).best
    assert free is not None and free.cost is not None and free.configuration is not None
    needs = site_cost(roomy, start, free.configuration).memory_bytes
    assert free.cost.memory_bytes > 1.02 * needs
    tight = roomy.cluster.model_copy(update={"gpu": roomy.cluster.gpu.model_copy(update={"memory": 1.01 * needs})})
    search = walked(site_problem(tight, roomy.workload, roomy.schedule), start)
    assert search.best is not None and search.best.rank[0] == 0
    assert search.best.rank[1] < search.evaluate(start).rank[1]


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

    monkeypatch.setattr("planner.sites.moves._walk", walk)
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
    once, often = (Smoothed(problem, table, one).exchanges_s for one in (Residency.STEP, Residency.MICROBATCH))
    assert (once[:2] == often[:2]).all() and once.all()
    assert often[2:] / once[2:] == pytest.approx([2 * batches, batches])
