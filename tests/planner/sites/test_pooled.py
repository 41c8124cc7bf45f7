"""Programs over classes of many sites: close to plans of all sorts from below, and worth their visits."""

from __future__ import annotations

import numpy as np
import pytest
from site_cases import access_cluster, box_of, many_experts

from planner.sites import narrowing
from planner.sites.bound import prove, proven_s, verify
from planner.sites.linear import Duals
from planner.sites.lp import box_program
from planner.sites.narrowing import narrowed
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.search import Found, Search
from planner.sites.strategy import try_best_hubs

SITES = 240


def problem_of(kinds: int, *, tied: bool = False) -> SiteProblem:
    """Access links of so many kinds; as fast up as down if ``tied``."""
    rates = np.random.default_rng(3).uniform(2, 16, (kinds, 2))
    if tied:
        rates[:, 1] = rates[:, 0]
    return site_problem(access_cluster(SITES, rates), many_experts())


def plans_of(problem: SiteProblem) -> list[Found]:
    """Hubs with ever fewer users, all at home, everything everywhere, and domains of a few sites."""
    search = Search(problem=problem)
    try_best_hubs(search)
    sites = np.arange(SITES)[:, None]
    for domain in (1, 2, 8, SITES):
        search.evaluate(problem.home_site // domain * domain + sites % domain)
    return search.best_apart(100, 0.0)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("kinds", "tied"), [(3, True), (3, False), (SITES, False)])
def test_programs_are_close_below_every_plan(kinds: int, tied: bool) -> None:
    problem = problem_of(kinds, tied=tied)
    relaxation, plans = Relaxation(problem=problem), plans_of(problem)
    assert relaxation.classes.merged and relaxation.tied is tied and len(plans) > 8
    for one in plans:
        assert one.configuration is not None and one.cost is not None
        box, step_s = box_of(relaxation, one.table, one.configuration), one.cost.step_s
        narrow = narrowed(relaxation, box, 1.5 * step_s)
        assert narrow is not None and box.inside(narrow)
        program = box_program(relaxation, narrow)
        assert program is not None
        duals = program.solve()
        assert duals is not None
        assert 0.9 < proven_s(relaxation, box, duals, 1.5 * step_s) / step_s <= 1 + 1e-9


def test_counting_visits_proves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(3)
    best_s = min(one.cost.step_s for one in plans_of(problem) if one.cost is not None)
    relaxation = Relaxation(problem=problem)
    proof = prove(relaxation, best_s, max_boxes=300)
    assert any(isinstance(evidence, Duals) for _, evidence in proof.parts)
    assert verify(relaxation, proof) == pytest.approx(proof.bound_s, rel=1e-9)
    monkeypatch.setattr(narrowing, "copies_for_visits_s", lambda *given: (0.0, 0.0))
    assert prove(Relaxation(problem=problem), best_s, max_boxes=300).bound_s < proof.bound_s
