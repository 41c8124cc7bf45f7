"""The local search: its guide against the exact cost and against itself made anew; walks keep rules and find better plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from site_cases import few_kinds, random_problem, random_table, run, small_workload, uneven_cluster
from test_site_prices import DOLLARS, priced

from hybridep.arrays import IntArray
from hybridep.config import build
from hybridep.plan import Residency
from hybridep.topology import Cluster
from hybridep.traffic import Op
from planner.constraints import Constraints, permissions
from planner.sites.cost import fixed_cost, site_cost
from planner.sites.flows import (
    COPIES,
    SECONDS,
    SHARPEST,
    TOKENS,
    Flows,
    Links,
    add,
    at_busy,
    busiest_s,
    links_of,
    no_flows,
    smooth_s,
    sum_all,
)
from planner.sites.moves import near_sites, propose, seed_moves
from planner.sites.oracle import best_table
from planner.sites.others import rank_order_domains
from planner.sites.problem import Configuration, Inside, SiteProblem, site_problem
from planner.sites.room import room_of
from planner.sites.search import Found, Search
from planner.sites.smoothed import (
    EXPERT,
    HOLDER,
    SITE,
    Guide,
    _value,
    change,
    guide_of,
    has_room,
    limit,
    restart,
    smooth_value,
    undo,
)
from planner.sites.walks import Pace, _deciding, _walk, improve_tables, pace_of
from planner.sites.work import ROW_S

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


def busiest_value(guide: Guide) -> float:
    """What the smoothed step becomes with the busiest link's and site's time in place of the norm of all."""
    links_s = np.array([busiest_s(guide.links, guide.flows, kind, way) for kind in range(2) for way in range(2)])
    return _value(guide, links_s, float((guide.state.served * guide.work.by_site[ROW_S]).max()))


def assert_exact(problem: SiteProblem, guide: Guide, residency: Residency) -> None:
    """But for the bytes of token counts."""
    exact = site_cost(problem, guide.state.table, Configuration(inside=problem.everywhere(Inside.ALL), residency=residency))
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


@pytest.mark.turns(2)
@pytest.mark.parametrize("residency", Residency)
@pytest.mark.parametrize("seed", range(6))
def test_the_guide_takes_what_the_exact_cost_takes(seed: int, residency: Residency) -> None:
    problem = seen(random_problem(seed, 5, 8, inside=0))
    rng = np.random.default_rng(seed)
    for table in (random_table(rng, problem), np.tile(problem.home_site, (5, 1)), np.repeat(np.arange(5)[:, None], 8, axis=1)):
        guide = guide_of(problem, table, residency)
        assert_exact(problem, guide, residency)
        values = [busiest_value(guide)]
        for sharpness in (SHARPEST, 5, 3, 2):
            restart(guide, sharpness)
            values.append(smooth_value(guide))
            # At most a dozen access links and twenty pairs in each exchange.
            assert values[-2] * (1 - 1e-12) <= values[-1] <= values[0] * 32 ** (1 / 2**sharpness)


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
    exact = (state.table, state.counts, state.users, state.moved, flows.units, flows.farthest_s, flows.latency_s)
    rounded = (
        state.served,
        flows.access,
        flows.trunk_s,
        flows.usd,
        flows.power,
        flows.pair_power,
        flows.trunk_power,
        flows.total,
    )
    return [each.copy() for each in (*exact, *rounded)]


def assert_alike(ones: list[np.ndarray], others: list[np.ndarray]) -> None:
    """But for rounding."""
    for one, other in zip(ones, others, strict=True):
        assert one == pytest.approx(other, rel=1e-8, abs=1e-8 * np.abs(other).max(initial=0.0))


def priced_pairs(seed: int, sites: int, experts: int) -> SiteProblem:
    """What is sent costs something."""
    return replace(priced(random_problem(seed, sites, experts), np.random.default_rng(seed)), goal=DOLLARS)


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    "made",
    [
        random_problem(0, 6, 10),
        with_trunks(random_problem(1, 6, 10)),
        few_kinds(2, 7, 9),
        slow_pairs(4, 6, 10),
        priced_pairs(5, 6, 8),
    ],
)
def test_a_walk_s_state_is_that_of_its_table(made: SiteProblem) -> None:
    rng, near, moved = np.random.default_rng(1), near_sites(made), 0
    guide = guide_of(made, np.tile(made.home_site, (made.num_sites, 1)), Residency.STEP)
    seed_moves(1)
    for number in range(300):
        if number % 50 == 0:
            restart(guide, 2 + number // 50 % 6)
        propose(guide, near)
        before, value = known(guide), smooth_value(guide)
        wanted, count = guide.state.table.copy(), guide.state.number[0]
        sites, experts, holders = guide.state.proposed[[SITE, EXPERT, HOLDER], :count]
        assert len({*zip(sites.tolist(), experts.tolist(), strict=True)}) == count
        wanted[sites, experts] = holders
        change(guide)
        assert (guide.state.table == wanted).all()
        anew = guide_of(made, wanted, Residency.STEP)
        assert busiest_value(guide) == pytest.approx(busiest_value(anew), rel=1e-9)
        if rng.random() < 0.6 and smooth_value(guide) < 3 * value:
            moved += not (wanted == before[0]).all()
        else:
            undo(guide)
            assert_alike(known(guide), before)
            assert smooth_value(guide) == pytest.approx(value, rel=1e-12)
    assert moved > 20
    kept = known(guide)
    restart(guide, int(guide.flows.sharpness[0]))
    anew = guide_of(made, guide.state.table, Residency.STEP)
    restart(anew, int(guide.flows.sharpness[0]))
    assert_alike(known(guide), known(anew))
    assert_alike(kept[:10], known(anew)[:10])


@pytest.mark.turns(2)
@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("make", [random_problem, slow_pairs, lambda *given: with_trunks(random_problem(*given))])
def test_moves_look_at_the_busiest_link(make: Callable[[int, int, int], SiteProblem], back: int) -> None:
    sharpest = 0
    for seed in range(12):
        problem, rng = make(seed, 6, 10), np.random.default_rng(seed)
        seed_moves(seed)
        links, kind = links_of(problem), seed % 2
        units = np.where(np.eye(6) > 0, 0.0, rng.uniform(0, 9, (6, 6)) * (rng.random((6, 6)) < 0.6))
        flows = flows_of(links, kind, units)
        sharpness = (2, 5, SHARPEST)[seed % 3]
        sum_all(links, flows, sharpness)
        before_s, smoothed_s = busiest_s(links, flows, kind, back), smooth_s(flows, kind, back)
        assert before_s == pytest.approx(longest_s(links, units, back))
        assert before_s * (1 - 1e-12) <= smoothed_s <= before_s * 100 ** (1 / 2**sharpness)
        for _ in range(20):
            src, dst = at_busy(links, flows, kind, back)
            assert (src != dst or src == dst == -1) and (min(src, dst) < 0 or units[src, dst] > 0)
            # Without these units a busy link has less to carry.
            rest = units.copy()
            rest[src if src >= 0 else slice(None), dst if dst >= 0 else slice(None)] = 0.0
            less = flows_of(links, kind, rest)
            sum_all(links, less, sharpness)
            sharpest += busiest_s(links, less, kind, back) < before_s
    assert sharpest > 0.8 * 240


def flows_of(links: Links, kind: int, units: np.ndarray) -> Flows:
    """Of ``units`` ([D, D]) of a kind."""
    flows = no_flows(links, np.ones(2))
    for src, dst in np.argwhere(units > 0):
        add(links, flows, kind, src, dst, units[src, dst])
    return flows


def longest_s(links: Links, units: np.ndarray, way: int) -> float:
    """Of all links, without what is kept up to date."""
    access_s = links.access_s[:, way].T * np.stack([units.sum(axis=1), units.sum(axis=0)])
    pairs_s = links.pairs[SECONDS, way] * units if links.pairs.size else np.zeros(1)
    trunks_s = np.einsum("std,sd->t", links.trunk_s[way], units)
    return max(float(access_s.max()), float(pairs_s.max()), float(trunks_s.max(initial=0.0)))


def walked(problem: SiteProblem, *tables: IntArray, moves: int = 1500) -> Search:
    search = Search(problem=problem)
    improve_tables(search, [search.evaluate(table) for table in tables], moves, np.random.default_rng(0))
    return search


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(6))
def test_walks_end_near_the_best_of_all_tables(seed: int) -> None:
    problem = random_problem(seed, *[(3, 2), (2, 5)][seed % 2])
    best, search = best_table(problem), walked(problem, *rank_order_domains(problem), moves=300)
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

    def noted(table: IntArray, configuration: Configuration | None = None) -> Found:
        looked.append(kept.keeps(table))
        return evaluate(table, configuration)

    search.evaluate = noted  # type: ignore[method-assign]
    monkeypatch.setattr("planner.sites.walks.FEW", Pace(16, 2000, 20, 5e-4, (2, 5), 3))
    improve_tables(search, [evaluate(start)], 2000, np.random.default_rng(0))
    assert search.best is not None and search.best.rank[1] < evaluate(start).rank[1]
    assert len(looked) > 2 and all(looked)


@pytest.mark.parametrize("seed", [21, 28, 37])
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
    end = _walk(search, start, 2000, 2, np.random.default_rng(0))
    assert end.rank[0] == 0 and end is search.best


@pytest.mark.parametrize(("repeats", "last"), [(5, (80, 160, 320)), (2, (80, 160))])
def test_walks_are_played_off_against_each_other(monkeypatch: pytest.MonkeyPatch, repeats: int, last: tuple[int, ...]) -> None:
    """Half of them go on with twice as many moves, the last one in all ways to begin until it no longer helps or often enough."""
    problem = random_problem(0, 3, 4)
    tables, seen_moves = [Search(problem=problem).evaluate(random_table(np.random.default_rng(i), problem)) for i in range(4)], []
    steps_s = {
        id(one.table): [8.0 - number, 6.0 - number, 1.0, 0.9, 0.8, 0.8, 0.5, 0.5, 0.5, 0.4999, 0.4998]
        for number, one in enumerate(tables)
    }

    def walk(search: Search, best: Found, moves: int, begin: int, rng: np.random.Generator) -> Found:
        seen_moves.append((moves, [id(one.table) for one in tables].index(id(best.table)), begin))
        return replace(best, rank=(0, steps_s[id(best.table)].pop(0)))

    monkeypatch.setattr("planner.sites.walks._walk", walk)
    monkeypatch.setattr("planner.sites.walks.FEW", Pace(4, 10, 5, 5e-4, (2, 3, 5), repeats))
    improve_tables(Search(problem=problem), tables, 10, np.random.default_rng(0))
    played_off = [(10, 0, 2), (10, 1, 3), (10, 2, 5), (10, 3, 2), (20, 3, 3), (20, 2, 5)]
    assert seen_moves == [*played_off, *((moves, 3, begin) for moves in last for begin in (2, 3, 5))]


@pytest.mark.parametrize(
    ("share", "gain", "rounds"),
    [(0.1, 0.1, [1600]), (0.7, 0.1, [11200]), (0.8, 0.1, [6400] * 2), (3.0, 0.1, [16000] * 3), (3.0, 0.001, [16000])],
)
def test_walks_begin_again_with_more_time_where_they_help(
    monkeypatch: pytest.MonkeyPatch, share: float, gain: float, rounds: list[int]
) -> None:
    """From the same tables, with further random moves."""
    problem, seen_moves, seen_tables, draws = random_problem(0, 20, 4), [], [], []

    def improved(search: Search, tables: list[Found], moves: int, rng: np.random.Generator) -> None:
        assert search.best is not None
        seen_moves.append(moves)
        seen_tables.append([id(one) for one in tables])
        draws.append(rng.random())
        search.best = replace(tables[0], rank=(0, tables[0].rank[1] * (1 - gain)))

    monkeypatch.setattr("planner.sites.walks.improve_tables", improved)
    run(Search(problem=problem, max_evaluations=40, walks_share=share))
    assert seen_moves == rounds
    assert len(set(draws)) == len(rounds) and all(one == seen_tables[0] for one in seen_tables)


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
    once, often = (guide_of(problem, table, residency).work.unit_bytes for residency in (Residency.STEP, Residency.MICROBATCH))
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


@pytest.mark.parametrize("inside", Inside)
def test_room_is_about_what_tables_leave(inside: Inside) -> None:
    """What changes take by ``Room``'s numbers is about what they do take: less so where sites begin to serve, which had
    larger buffers for other things, and the more uneven ranks of a site become."""
    rng = np.random.default_rng(3)
    work = small_workload(rng, 32)
    model = work.model.model_copy(update={"num_layers": 12, "hidden_size": 64, "expert_ffn_size": 256, "top_k": 4})
    training = work.training.model_copy(update={"sequence_length": 256, "micro_batch_size": 8, "micro_batches": 4})
    problem = site_problem(uneven_cluster(rng, 8, 4, pairs=False), work.model_copy(update={"model": model, "training": training}))
    configuration = Configuration(inside=problem.everywhere(inside), residency=Residency.STEP)
    hubs = np.repeat(np.array([0, 0, 0, 3, 4, 4, 4, 7])[:, None], 32, axis=1)
    room, guide = room_of(problem, hubs, configuration), guide_of(problem, hubs, Residency.STEP)
    assert room.left_bytes.min() == pytest.approx(
        float(problem.compute.memory_bytes.min()) - site_cost(problem, hubs, configuration).memory_bytes
    )
    limit(guide, room)
    more, fewer = hubs.copy(), hubs.copy()
    more[6] = 3
    fewer[1:3, 8:20] = np.array([1, 2])[:, None]
    own = np.repeat(np.arange(8)[:, None], 32, axis=1)
    for other, most in ((more, 0.02), (own, 0.1), (fewer, 0.3)):
        changed = guide_of(problem, other, Residency.STEP)
        took = changed.flows.access[:, COPIES, 1] * room.copy_bytes + changed.state.served * room.choice_bytes
        exact = room_of(problem, other, configuration).left_bytes
        off = np.abs(guide.state.most_bytes - took - exact).max() / np.abs(exact - room.left_bytes).max()
        assert off < most


def test_moves_are_held_to_the_room_that_is_left() -> None:
    problem = random_problem(3, 5, 8, inside=1)
    configuration = Configuration(inside=problem.everywhere(Inside.ALL), residency=Residency.STEP)
    home = np.tile(problem.home_site, (5, 1))
    guide = guide_of(problem, home, Residency.STEP)
    room = room_of(problem, home, configuration)
    expert = int(np.flatnonzero(problem.home_site != 0)[0])
    for copies, fits in ((0.5, False), (2.5, True)):
        left = np.full(5, copies * room.copy_bytes + 5 * problem.rows_per_choice.max() * room.choice_bytes * (copies > 1))
        limit(guide, replace(room, left_bytes=left))
        guide.state.proposed[:, 0] = 0, expert, 0
        guide.state.number[0] = 1
        change(guide)
        assert has_room(guide) is fits
        undo(guide)


@pytest.mark.parametrize("sites", [8, 20, 40, 100])
def test_many_sites_walk_colder_and_longer(sites: int) -> None:
    pace = pace_of(few_kinds(0, sites, 8))
    assert pace.moves == {8: 2560, 20: 16000, 40: 12000, 100: 48000}[sites]
    assert (pace.warmth < 1e-5) == (sites == 100)


def test_walks_look_at_one_configuration_on_the_way_and_at_all_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(2, 8, 12)
    search, asked = Search(problem=problem), []
    evaluate, start = search.evaluate, random_table(np.random.default_rng(0), problem)
    first = evaluate(start)

    def noted(table: IntArray, configuration: Configuration | None = None) -> Found:
        asked.append(configuration)
        return evaluate(table, configuration)

    search.evaluate = noted  # type: ignore[method-assign]
    monkeypatch.setattr("planner.sites.walks.FEW", Pace(16, 2000, 20, 5e-4, (2, 5), 3))
    found = _walk(search, first, 2000, 2, np.random.default_rng(0))
    assert len(asked) > 2 and set(asked[:-1]) == {first.configuration} and asked[-1] is None
    assert found.rank == min(evaluate(found.table, one).rank for one in problem.configurations())
