"""The best serving table found between sites, and a proven bound on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from hybridep.arrays import IntArray
from hybridep.errors import NoSolutionError
from hybridep.plan import Objective
from hybridep.recompute import ALL, Recompute
from planner.clock import elapsed_s, now_s
from planner.price import step_usd
from planner.sites import oracle
from planner.sites.again import rank, walk_in_ways
from planner.sites.bound import Proof, prove
from planner.sites.classes import site_classes
from planner.sites.egress_bound import least_egress_usd
from planner.sites.exchange import between_sites
from planner.sites.others import OTHERS
from planner.sites.problem import SiteProblem
from planner.sites.relaxation import Relaxation
from planner.sites.search import Found, Search, at_quantile
from planner.sites.strategy import begin, is_large, walks_help

FEW_TABLES = 5000
"""Serving tables, where sites are ranks, or plans elsewhere, up to which all are tried."""
FEW_PER_S = 500
"""Plans for each second of the time limit up to which all are tried where they are costed one by one."""
MOST_BOXES = 100_000
"""Of one proof."""
SEARCHED = 0.6
"""Share of the time in which plans are looked for; the bound has what is left."""
PROVEN = 0.95
"""Share after which nothing is begun."""
AMPLE_S = 60.0
"""With less time walks make fewer moves in proportion, with more time more of them."""
MOST_MINUTES = 3
"""But no more than in so many minutes."""
PRICING_MERGED, PRICING = 0.5, 0.125
"""Share of a bound's time in which prices of visits are looked for, at most: where sites are merged, and where not."""
LEAST_PRICING_S = 0.3
"""With less time they are not."""
AGAIN = 1e-3
"""What a proof must gain by further prices, of the step, for more of them."""
FEW = 32
"""Up to so many sites that are not merged have programs which say more than prices."""
ENOUGH_GAP = 0.005
"""The bound is not improved below this gap."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteSolution:
    """A serving table and what is known about it."""

    problem: SiteProblem
    """What the table was found for, which computes again in one of ``Wishes.ways``."""
    found: Found
    bound_s: float
    bound_usd: float
    """No plan costs less per step."""
    proofs: tuple[Proof, ...]
    """One per scenario; none where every table was tried."""
    solve_s: float
    pool: tuple[Found, ...] = ()
    """The best plans that fit and differ, as many as were asked for."""

    @property
    def fits(self) -> bool:
        """What was found has room."""
        return self.found.rank[0] == 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Wishes:
    """What a plan between sites is asked for beside the shortest step."""

    time_limit_s: float = 60.0
    paced_by_s: float | None = None
    """Limit that walks are in proportion to, and tables that are all tried, where some of it is over already: how much is must
    not change the plan."""
    keep: int = 1
    """Different plans to keep."""
    scenarios: tuple[SiteProblem, ...] = ()
    """The same sites with other links; the step is then that at ``quantile`` of these."""
    quantile: float = 1.0
    """1 plans for the worst."""
    seeds: tuple[IntArray, ...] = ()
    """Tables to begin with."""
    proven: bool = True
    """Whether a bound is wanted."""
    ways: tuple[Recompute, ...] = ()
    """What all layers may compute again instead, where memory is short and sites are few enough for walks."""
    report: Callable[[str, float], None] | None = None
    """Told ("plan" or "bound", seconds) as either improves, but where dollars are the goal."""


def solve_sites(problem: SiteProblem, wishes: Wishes | None = None) -> SiteSolution:
    """The best serving table found and a proven bound on all; on KeyboardInterrupt the best so far, as when the time is over.
    Nothing is proven where none fits and more could still compute again (``SiteProblem.recompute``).
    Raises NoSolutionError when the time was over before one table was tried."""
    wishes = wishes or Wishes()
    few = _few_tables(problem, wishes.paced_by_s or wishes.time_limit_s)
    pricing_share = _pricing_share(problem, wishes.time_limit_s)
    started, asked_s, limit_s, report = now_s(), elapsed_s(), wishes.time_limit_s, wishes.report
    in_dollars = problem.goal.objective is Objective.DOLLARS
    if in_dollars:
        report = None
    search = Search(
        problem=problem,
        deadline_s=started + SEARCHED * limit_s,
        max_evaluations=_evaluations(problem),
        walks_share=min((wishes.paced_by_s or limit_s) / AMPLE_S, MOST_MINUTES),
        scenarios=wishes.scenarios,
        quantile=wishes.quantile,
        keep=wishes.keep,
    )
    if report is not None:
        search.report = lambda seconds: report("plan", seconds)
    exact = oracle.best_table(problem) if few and not wishes.scenarios else None
    if exact is not None:
        search.evaluate(exact[0])
    interrupted, searches = False, [search]
    try:
        if exact is None or wishes.keep > 1:
            _look(search, wishes.seeds)
            if walks_help(problem):
                for begun in walk_in_ways(search, () if few else wishes.ways):
                    searches.append(begun)
    except KeyboardInterrupt:
        interrupted = True
    best = min(searches, key=rank)
    if best is not search and report is not None and rank(best)[0] == 0:
        report("plan", rank(best)[1])
    search, problem = best, best.problem
    if exact is not None and search.best is not None:
        return SiteSolution(
            problem=problem,
            found=search.best,
            bound_s=0.0 if in_dollars else exact[2],
            bound_usd=exact[2] if in_dollars else least_usd(problem, 0.0),
            proofs=(),
            solve_s=elapsed_s() - asked_s,
            pool=tuple(search.pool),
        )
    if search.best is None:
        raise NoSolutionError(f"no plan was looked at within {limit_s:g} s; give it more time (--time-limit)")
    assert search.best.cost is not None
    best_s, scenarios = search.best.cost.step_s if in_dollars else search.best.rank[1], search.scenarios
    proofs: list[Proof] = []
    worth_proving = wishes.proven and (search.best.rank[0] == 0 or problem.recompute is ALL)
    for number, one in enumerate(scenarios if worth_proving else ()):
        share = SEARCHED + (PROVEN - SEARCHED) * (number + 1) / len(scenarios)
        deadline_s = -inf if interrupted else started + share * limit_s
        told = None if report is None or len(scenarios) > 1 else lambda seconds: report("bound", seconds)
        boxes = MOST_BOXES // len(scenarios)
        relaxation = Relaxation(problem=one)
        try:
            if pricing_share:
                from planner.sites import pricing

                rows, begun_s = between_sites(one, search.best.table).rows, now_s()
                until_s = begun_s + pricing_share * (deadline_s - begun_s)
                relaxation = pricing.with_prices(relaxation, best_s, (rows.line(one)[1], rows.reverse.line(one)[1]), until_s)
            begun_s = now_s()
            proof = prove(relaxation, best_s, enough_gap=ENOUGH_GAP, max_boxes=boxes, deadline_s=deadline_s, report=told)
            if pricing_share:
                proof = _with_more_prices(relaxation, proof, boxes, now_s() - begun_s, deadline_s, told)
        except KeyboardInterrupt:
            interrupted, proof = True, prove(relaxation, best_s, deadline_s=-inf)
        interrupted |= proof.interrupted
        proofs.append(proof)
    # Each step is at least its scenario's bound, so the steps at a quantile are at least the bounds there.
    bound_s = min(at_quantile([one.bound_s for one in proofs], wishes.quantile), best_s) if proofs else 0.0
    return SiteSolution(
        problem=problem,
        found=search.best,
        bound_s=bound_s,
        bound_usd=least_usd(problem, bound_s),
        proofs=tuple(proofs),
        solve_s=elapsed_s() - asked_s,
        pool=tuple(search.pool),
    )


def _few_tables(problem: SiteProblem, limit_s: float) -> bool:
    """Whether all can be tried; with any number of parts for tokens they are not."""
    if problem.most_chunks > 1:
        return False
    most = FEW_TABLES if oracle.at_once(problem) else min(FEW_TABLES, FEW_PER_S * limit_s) / len(problem.configurations())
    return bool(problem.num_sites * problem.num_experts * np.log(problem.num_sites) <= np.log(most))


def _with_more_prices(
    relaxation: Relaxation, proof: Proof, max_boxes: int, took_s: float, deadline_s: float, report: Callable[[float], None] | None
) -> Proof:
    """Begun again with prices for where least is proven, as long as that helps and there is as much time as it took before."""
    from planner.sites import pricing

    best_s = proof.best_s
    while not proof.interrupted and proof.bound_s < best_s * (1 - ENOUGH_GAP) and now_s() + took_s < deadline_s:
        begun_s = now_s()
        try:
            relaxation = pricing.with_prices_about(relaxation, proof.parts[0][0], best_s)
        except KeyboardInterrupt:
            return replace(proof, interrupted=True)
        told = _from(report, proof.bound_s)
        again = prove(relaxation, best_s, enough_gap=ENOUGH_GAP, max_boxes=max_boxes, deadline_s=deadline_s, report=told)
        helped = again.bound_s > proof.bound_s + AGAIN * best_s
        proof = replace(max(again, proof, key=lambda one: one.bound_s), interrupted=again.interrupted)
        if not helped:
            break
        took_s = now_s() - begun_s
    return proof


def _from(report: Callable[[float], None] | None, least_s: float) -> Callable[[float], None] | None:
    """Told no bound below one that is known."""
    return None if report is None else lambda seconds: report(max(seconds, least_s))


def _pricing_share(problem: SiteProblem, limit_s: float) -> float:
    """Of a bound's time, for prices: where many sites are merged, which are not all equal, or programs take too long."""
    if site_classes(problem).merged:
        share = 0.0 if walks_help(problem) or problem.equal_sites else PRICING_MERGED
    else:
        share = 0.0 if problem.num_sites <= FEW else PRICING
    return share if share * (PROVEN - SEARCHED) * limit_s >= LEAST_PRICING_S else 0.0


def least_usd(problem: SiteProblem, bound_s: float) -> float:
    """No plan costs less per step, if none is faster than ``bound_s``: what is paid for time and for bytes, each at its least."""
    return step_usd(problem.cluster.rent_usd_per_s, least_egress_usd(problem), bound_s)


def _look(search: Search, seeds: tuple[IntArray, ...]) -> None:
    problem = search.problem
    for table in seeds:
        search.evaluate(table)
    if not is_large(problem):
        # Never worse than what other planners would do.
        for other in OTHERS.values():
            for table in other(problem):
                if not search.over:
                    search.evaluate(np.ascontiguousarray(table))
    begin(search)


def _evaluations(problem: SiteProblem) -> int:
    """Tables to try before walks: fewer where one takes longer, which is so from about 16 sites on."""
    return int(np.clip(3000 * (16 / problem.num_sites) ** 1.5, 300, 6000))
