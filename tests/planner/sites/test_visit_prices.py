"""Prices of visits: their tables against enumeration, and that no plan needs fewer copies than they say."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from site_cases import access_cluster, box_of, few_kinds, random_problem, random_table

from hybridep.arrays import FloatArray, IntArray
from hybridep.config import build
from hybridep.plan import Residency
from hybridep.traffic import gathers_and_returns
from hybridep.workload import Workload
from planner.clock import now_s, timed_by
from planner.sites import priced, pricing, solution
from planner.sites.bound import prove, verify
from planner.sites.boxes import Box
from planner.sites.cost import site_cost
from planner.sites.exchange import between_sites, held_by_site
from planner.sites.hubs import best_hubs, served_table
from planner.sites.narrowing import narrowed
from planner.sites.oracle import best_table
from planner.sites.priced import Priced, needed_by_prices, per_copy_s, priced_s
from planner.sites.pricing import with_prices
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.search import Search
from planner.sites.solution import Wishes, solve_sites
from planner.sites.visit_prices import FINE, Sites, VisitPrices, find_prices, visit_prices

HIT = 1 - np.array([1.0, 0.6, 0.34, 0.18, 0.08, 0.02, 0.0])


def rising(rng: np.random.Generator, experts: int) -> FloatArray:
    """Any prices."""
    return np.append(0.0, np.cumsum(rng.exponential(size=experts)))


def sets_of_visits(hit: FloatArray, rows: float, largest: int) -> Iterator[tuple[int, ...]]:
    """All whose rows fit."""
    most = int(rows / hit[1] * (1 + 1e-9))
    for number in range(most + 1):
        for visits in combinations_with_replacement(range(1, largest + 1), number):
            if sum(hit[one] for one in visits) <= rows * (1 + 1e-9):
                yield visits


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tables_against_all_sets_of_visits(seed: int, fine: bool) -> None:
    """Never dearer to find and never less to earn than the best set of whole visits; and no more than rounding of rows apart."""
    rng = np.random.default_rng(seed)
    price, experts = rising(rng, 6), 6
    made = visit_prices(price, HIT, fine)
    for rows in (0.3, 0.45, 0.7, 1.1, 1.6):
        some = np.array([rows])
        for held in range(experts + 1):
            here = np.array([float(held)])
            paid = [price[list(one)].sum() for one in sets_of_visits(HIT, rows, experts) if sum(one) >= experts - held]
            earned = max(price[list(one)].sum() for one in sets_of_visits(HIT, rows, held)) if held else 0.0
            least = held + min(paid, default=np.inf) - earned
            assert made.needed(some, some, here, here)[0] <= least + 1e-9
        looser = some * (1 + 1 / (3 * (FINE if fine else 1))) + HIT[1]
        paid = [price[list(one)].sum() for one in sets_of_visits(HIT, float(looser[0]), experts) if sum(one) >= experts]
        zero, nothing = np.zeros(1), np.zeros(1)
        assert made.needed(some, zero, nothing, nothing)[0] >= min(paid, default=np.inf) - 1e-9


def test_fine_steps_leave_less_out() -> None:
    """Of 24 experts, rooms for rows of all sizes: more is proven in all, and what fine steps allow coarse ones do, too."""
    rng, hit = np.random.default_rng(5), np.concatenate([[0.0], 1 - 0.8 ** np.arange(1, 25)])
    price, sent = rising(rng, 24), rng.uniform(0.2, 3, 400)
    received, held = rng.uniform(0, 6, 400), rng.integers(0, 25, 400).astype(np.float64)
    coarse, fine = (visit_prices(price, hit, one).needed(sent, received, held, np.full(400, 24.0)) for one in (False, True))
    some = np.isfinite(coarse) & np.isfinite(fine)
    assert some.sum() > 200
    assert fine[some].sum() > coarse[some].sum() + 0.1 * some.sum()
    assert np.isfinite(coarse)[np.isfinite(fine)].all()


@pytest.mark.parametrize("fine", [False, True])
def test_more_rows_than_are_told_apart_earn_more(fine: bool) -> None:
    """Never less than with fewer, and linearly in the end: no holder's earnings are cut off."""
    price = rising(np.random.default_rng(0), 6)
    made = visit_prices(price, HIT, fine)
    rows = np.array([1.0, 100.0, 150.0, 500.0, 5000.0])
    needed = made.needed(np.full(5, 9.0), rows, np.full(5, 6.0), np.full(5, 6.0))
    assert (np.diff(needed) < 0).all()
    each = max(price[1:] / HIT[1:])
    assert (6 - needed >= 0.99 * rows * each - price[-1]).all()


def plans_of(seed: int, problem: SiteProblem) -> list[IntArray]:
    """Random tables, ones that are mostly full gather or expert parallelism, and hubs."""
    rng, size = np.random.default_rng(seed), problem.num_sites
    own, home = np.repeat(np.arange(size)[:, None], problem.num_experts, axis=1), np.tile(problem.home_site, (size, 1))
    tables = [random_table(rng, problem) for _ in range(4)]
    for base in (own, home, own // 2 * 2):
        tables.append(base)
        tables += [np.where(rng.random(base.shape) < 0.2, random_table(rng, problem), base) for _ in range(3)]
    return tables


def any_prices(seed: int, relaxation: Relaxation) -> Relaxation:
    """Not even good ones."""
    rng, homes = np.random.default_rng(seed), relaxation.classes.kinds.homes
    made = []
    for number in range(3):
        some = homes if number == 0 else homes * (rng.random(len(homes)) < 0.6)
        if some.any():
            price = rising(rng, round(float(some @ relaxation.classes.kinds.count)))
            made.append(pricing.priced(relaxation, price, some, fine=number == 1))
    return replace(relaxation, prices=tuple(made))


def rows_of(problem: SiteProblem, table: IntArray) -> tuple[float, float]:
    rows = between_sites(problem, table).rows
    return rows.line(problem)[1], rows.reverse.line(problem)[1]


@pytest.fixture
def _all_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that prove most far from the known plan are kept, too: more to go wrong."""
    monkeypatch.setattr(pricing, "NEAR", np.inf)
    monkeypatch.setattr(pricing, "WINDOW", (0.25, 2.0))


CASES = [(0, 7, 10), (1, 5, 8), (2, 12, 6), (3, 9, 20)]


def problem_of(seed: int, sites: int, experts: int) -> SiteProblem:
    return few_kinds(seed, sites, experts) if seed % 2 else random_problem(seed, sites, experts)


@pytest.mark.turns(4)
@pytest.mark.usefixtures("_all_prices")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("good", [False, True])
def test_no_plan_needs_fewer_copies(case: tuple[int, int, int], good: bool) -> None:
    """What prices say of a plan's own box: copies of each group of homes, its narrowing and its step."""
    problem = problem_of(*case)
    plain, tables, told = Relaxation(problem=problem), plans_of(case[0], problem), 0
    costs = [(table, one, site_cost(problem, table, one)) for table in tables for one in problem.configurations()]
    longest_s = max(cost.step_s for *_, cost in costs)
    relaxation = with_prices(plain, longest_s, rows_of(problem, tables[-1])) if good else any_prices(case[0], plain)
    kinds = relaxation.classes.kinds
    for table, configuration, cost in costs:
        if not cost.fits:
            continue
        box, held = box_of(relaxation, table, configuration), held_by_site(problem, table)
        for one in relaxation.prices:
            about = (one.homes[kinds.place] > 0)[problem.home_site]
            copies = held[:, about].sum() - about.sum()
            needed = float(needed_by_prices(relaxation, one, box, relaxation.limits(box)))
            assert needed <= copies + 1e-6
            told += needed > 0
        narrow = narrowed(relaxation, box, cost.step_s * 1.001)
        assert narrow is not None
        layers_s = relaxation.num_layers * priced_s(relaxation, narrow)
        assert relaxation.base_s + layers_s <= cost.step_s * (1 + 1e-9)
    assert told or not good


def check_bound(seed: int) -> None:
    """With good prices and with any, of sites that differ and of a few kinds."""
    check_bound_of(seed, random_problem(seed, *[(3, 2), (4, 1), (2, 4), (3, 3)][seed % 4]))
    check_bound_of(seed, few_kinds(2 * seed + 1, *[(3, 2), (4, 1), (2, 4), (3, 3)][seed % 4]))


def check_bound_of(seed: int, problem: SiteProblem) -> None:
    best = best_table(problem)
    assert best is not None
    plain, within_s = Relaxation(problem=problem), best[2] * 1.05
    for relaxation in (with_prices(plain, within_s, rows_of(problem, best[0])), any_prices(seed, plain)):
        proof = prove(relaxation, within_s, max_boxes=40)
        assert proof.bound_s <= best[2] * (1 + 1e-9)
        assert verify(plain, proof) == pytest.approx(proof.bound_s, rel=1e-12)


@pytest.mark.turns(4)
@pytest.mark.usefixtures("_all_prices")
@pytest.mark.parametrize("seed", [1, 2, 8, 12, 1029])
def test_bound_with_prices_against_every_table(seed: int) -> None:
    check_bound(seed)


@pytest.mark.usefixtures("_all_prices")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 1300, 30))
def test_three_hundred_bounds_with_prices(first: int) -> None:
    for seed in range(first, first + 30):
        check_bound(seed)


def test_copies_cost_no_more_than_any_two_times_say() -> None:
    """However long gathers and returns are, what homes can send in them costs as much at least."""
    relaxation = Relaxation(problem=random_problem(4, 8, 12))
    kinds, wire, rng = relaxation.classes.kinds, relaxation.problem.wire, np.random.default_rng(0)
    homes = kinds.homes * (rng.random(len(kinds.homes)) < 0.7)
    cost_s, closest = per_copy_s(relaxation, homes), np.inf
    for residency in (Residency.STEP, Residency.MICROBATCH):
        gathers, returns = gathers_and_returns(residency, relaxation.problem.workload.training.micro_batches)
        for gather_s, return_s in 10 ** rng.uniform(-3, 0, (2000, 2)):
            there = kinds.up_bytes_per_s * gather_s / wire.expert_bytes
            back = kinds.down_bytes_per_s * return_s / wire.expert_gradient_bytes
            copies = float((np.minimum(there, back) * kinds.count)[homes > 0].sum())
            closest = min(closest, (gathers * gather_s + returns * return_s) / (copies * cost_s[residency]))
    assert 1 - 1e-9 <= closest < 1.01


def test_a_gather_is_never_found_too_long() -> None:
    """What homes send in that time, each no more than it may, is at most what is needed; and hardly less."""
    rng = np.random.default_rng(1)
    rates, most, count = rng.uniform(1, 9, 6), rng.uniform(0, 9, (40, 6)), np.arange(1.0, 7.0)
    needed = most @ count * rng.uniform(0.05, 0.99, 40)
    time_s = priced._shortest_s(needed, rates, most, count)
    sent = (np.minimum(rates * time_s[:, None], most) * count).sum(axis=1)
    assert (sent <= needed * (1 + 1e-9)).all()
    assert (sent >= needed * 0.95).all()


def classes(rng: np.random.Generator, number: int) -> Sites:
    return Sites(
        count=rng.integers(1, 40, number).astype(np.float64),
        sent=rng.uniform(1.05, 2, number),
        received=rng.uniform(0.5, 6, number),
        most=np.full(number, 24.0),
    )


def needed_of(prices: VisitPrices, sites: Sites) -> float:
    return float(prices.needed(sites.sent, sites.received, np.zeros(len(sites.count)), sites.most) @ sites.count)


def test_good_prices_prove_more_than_any_others() -> None:
    rng = np.random.default_rng(2)
    sites, hit = classes(rng, 5), np.concatenate([[0.0], 1 - 0.8 ** np.arange(1, 25)])
    price, holdings = find_prices(sites, hit)
    good = visit_prices(price, hit)
    others = [visit_prices(scale * rising(rng, 24), hit) for scale in 10 ** rng.uniform(-2, 1, 30)]
    others += [visit_prices(scale * hit, hit) for scale in np.linspace(0.5, 24, 20)]
    assert needed_of(good, sites) > max(needed_of(one, sites) for one in others)
    again, _ = find_prices(sites, hit, holdings)
    assert needed_of(visit_prices(again, hit), sites) == pytest.approx(needed_of(good, sites), rel=5e-3)
    assert np.array_equal(find_prices(sites, hit)[0], price)


def test_ways_are_kept_where_they_fit() -> None:
    rng = np.random.default_rng(3)
    sites, hit = classes(rng, 4), np.concatenate([[0.0], 1 - 0.8 ** np.arange(1, 25)])
    loose, holdings = find_prices(sites, hit)
    tighter = replace(sites, sent=sites.sent * 0.95, received=sites.received * 0.8)
    found = (find_prices(tighter, hit, holdings)[0], find_prices(tighter, hit)[0], loose)
    from_known, alone, before = (visit_prices(one, hit) for one in found)
    assert needed_of(from_known, tighter) == pytest.approx(needed_of(alone, tighter), rel=5e-3)
    assert needed_of(from_known, tighter) > needed_of(before, tighter)


def test_proofs_with_lying_prices_are_found_out() -> None:
    """Tables are made anew from prices, which must not fall and be about all experts of whole homes."""
    problem = random_problem(2, 6, 6)
    table = np.tile(problem.home_site, (6, 1))
    step_s = min(site_cost(problem, table, one).step_s for one in problem.configurations())
    plain = Relaxation(problem=problem)
    relaxation = any_prices(0, plain)
    proof = prove(relaxation, step_s, max_boxes=40)
    one = relaxation.prices[0]
    dear = replace(one, prices=replace(one.prices, find=one.prices.find + 1e6))
    lie = prove(replace(plain, prices=(dear,)), step_s, max_boxes=40)
    assert verify(plain, lie) < lie.bound_s
    falling = replace(one, prices=replace(one.prices, price=one.prices.price[::-1]))
    for wrong in (falling, replace(one, homes=one.homes * 0.5), replace(one, homes=np.zeros_like(one.homes))):
        with pytest.raises(ValueError, match=r"prices are not about|lower price"):
            verify(plain, replace(proof, prices=(wrong,)))


def names(prices: Sequence[Priced]) -> list[int]:
    return [one.prices.experts for one in prices]


def test_prices_for_the_slowest_homes_alone() -> None:
    """Of half of the experts, five eighths and three quarters, where homes differ."""
    problem = random_problem(0, 16, 16)
    table = np.repeat(np.arange(16)[:, None] // 4 * 4, 16, axis=1)
    step_s = site_cost(problem, table, problem.configurations()[0]).step_s
    made = with_prices(Relaxation(problem=problem), step_s, rows_of(problem, table)).prices
    assert made and set(names(made)) <= {8, 10, 12}
    assert with_prices(Relaxation(problem=problem), step_s, rows_of(problem, table), deadline_s=-np.inf).prices == ()


def many_sites(number: int, kinds: int | None = None) -> SiteProblem:
    """All different, or of so many kinds, without links of pairs."""
    rates = np.random.default_rng(0).uniform(5, 28, (kinds or number, 2))
    model = {
        "num_layers": 4,
        "hidden_size": 2048,
        "num_heads": 16,
        "vocab_size": 32000,
        "num_experts": 64,
        "top_k": 8,
        "expert_ffn_size": 512,
    }
    training = {"sequence_length": 4096, "micro_batch_size": 1, "micro_batches": 4, "dtype": "bf16"}
    workload = build(Workload, {"name": "test", "model": model, "training": training}, "test")
    return site_problem(access_cluster(number, rates, gpus=8, memory="80 GB"), workload)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("sites", "kinds", "limit_s", "looked_for"),
    [(400, None, 10, True), (400, 10, 10, True), (400, 10, 1, False), (400, 1, 10, False), (300, None, 10, False)],
)
def test_prices_are_looked_for_among_many_sites_that_are_not_equal(
    sites: int, kinds: int | None, limit_s: float, looked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[float]()

    def without(relaxation: Relaxation, best_s: float, rows_s: tuple[float, float], until_s: float) -> Relaxation:
        asked.append(until_s)
        return relaxation

    monkeypatch.setattr(pricing, "with_prices", without)
    monkeypatch.setattr(solution, "_look", lambda search, seeds: search.evaluate(np.tile(search.problem.home_site, (sites, 1))))
    monkeypatch.setattr(solution, "MOST_BOXES", 1)
    solve_sites(many_sites(sites, kinds), Wishes(time_limit_s=limit_s))
    assert bool(asked) == looked_for


@pytest.mark.turns(4)
def test_many_different_sites_are_bounded_more_closely() -> None:
    """Than by programs over merged sites, with fewer boxes; and a planner uses prices there."""
    problem = many_sites(400)
    plan = best_hubs(problem, problem.num_sites)
    assert plan is not None
    table = served_table(problem, plan)
    step_s = Search(problem=problem).evaluate(table).rank[1]
    plain = Relaxation(problem=problem)
    relaxation = with_prices(plain, step_s, rows_of(problem, table))
    bounds_s = [prove(one, step_s, max_boxes=boxes).bound_s for one, boxes in ((relaxation, 200), (plain, 400))]
    assert bounds_s[0] > 1.05 * bounds_s[1]
    with timed_by(time.process_time):
        solved = solve_sites(problem, Wishes(time_limit_s=4.0))
    assert 1.05 * bounds_s[1] < solved.bound_s <= solved.found.rank[1]


@pytest.mark.turns(2)
def test_prices_are_added_where_least_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the proof made anew with them, until that no longer helps, is interrupted, or there is too little time."""
    problem = many_sites(400)
    plan = best_hubs(problem, problem.num_sites)
    assert plan is not None
    step_s = Search(problem=problem).evaluate(served_table(problem, plan)).rank[1]
    plain = Relaxation(problem=problem)
    proof = prove(plain, step_s, max_boxes=60)
    told = list[float]()
    better = solution._with_more_prices(plain, proof, 60, 0.0, np.inf, told.append)
    assert min(told) == proof.bound_s
    assert better.prices and not better.interrupted
    assert better.bound_s > proof.bound_s + solution.AGAIN * step_s
    assert verify(plain, better) == pytest.approx(better.bound_s, rel=1e-12)
    assert solution._with_more_prices(plain, proof, 60, 10.0, now_s() + 5, None) is proof

    def stop(relaxation: Relaxation, box: Box, best_s: float) -> Relaxation:
        raise KeyboardInterrupt

    monkeypatch.setattr(pricing, "with_prices_about", stop)
    stopped = solution._with_more_prices(plain, proof, 60, 0.0, np.inf, None)
    assert stopped.interrupted and stopped.bound_s == proof.bound_s and stopped.parts == proof.parts
