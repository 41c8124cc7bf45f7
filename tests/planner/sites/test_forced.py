"""What rules force plans to send is sent by every plan that keeps them, and bounds under rules count it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from site_cases import box_of, random_problem, random_table

import planner
from hybridep.arrays import IntArray
from hybridep.commands.inputs import cluster_and_workload
from hybridep.errors import HybridEPError
from planner.constraints import Constraints, binding
from planner.sites.forced import Forced, forced
from planner.sites.oracle import best_table
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.solution import Wishes, solve_sites

KINDS = ("keep_tokens", "forbid", "pin", "no_link")


def random_rules(rng: np.random.Generator, problem: SiteProblem) -> Constraints | None:
    """One to three rules that some plan keeps, and that bar something; None where the draw has none."""
    names, entries = problem.cluster.site_names, list[dict[str, Any]]()
    for number in range(int(rng.integers(1, 4))):
        kind = str(rng.choice(KINDS))
        sites = sorted(rng.choice(names, size=int(rng.integers(1, len(names))), replace=False).tolist())
        entry: dict[str, Any] = {"name": f"r{number}", "kind": kind, "sites": sites}
        if kind in ("forbid", "pin"):
            entry["experts"] = f"0-{rng.integers(problem.num_experts)}"
        entries.append(entry)
        if number == 0 and rng.random() < 0.5:
            # Its tokens, and its experts, have several places to go to.
            entries = [{"name": "r0", "kind": "forbid", "sites": names[:1]}]
    found = Constraints.model_validate({"rules": entries})
    try:
        return found if binding(problem.cluster, problem.num_experts, found) is not None else None
    except HybridEPError:
        return None


def ruled(seed: int, sites: int, experts: int) -> SiteProblem:
    """A random problem with the first such rules that are drawn for it."""
    free, rng = random_problem(seed, sites, experts), np.random.default_rng(seed)
    while (rules := random_rules(rng, free)) is None:
        pass
    return site_problem(free.cluster, free.workload, free.schedule, rules)


def least_of(problem: SiteProblem) -> Forced:
    relaxation = Relaxation(problem=problem)
    label = relaxation.classes.label
    return forced(problem, *(one[label][:, label] for one in (relaxation.classes.latency_s, relaxation.token_latency_s)))


def nearby(problem: SiteProblem) -> list[IntArray]:
    """Tables in which tokens, or copies, go no farther than they must."""
    rules, far_s = problem.permissions, problem.latency_s
    assert rules is not None
    possible = rules.serve[:, :, None] & rules.hold
    way_s = 3 * far_s + 2 * far_s.T
    tokens = np.where(possible, way_s[:, :, None], np.inf).argmin(axis=1)
    copies = np.where(possible, far_s[problem.home_site].T, np.inf).argmin(axis=1)
    return [tokens, copies]


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(48))
def test_every_plan_that_keeps_the_rules_sends_as_much(seed: int) -> None:
    problem, rng = ruled(seed, 3 + seed % 4, 1 + seed % 7), np.random.default_rng(seed)
    assert problem.permissions is not None
    relaxation = Relaxation(problem=problem)
    roots = relaxation.roots()
    tables = [problem.permissions.repaired(random_table(rng, problem), problem.home_site) for _ in range(40)]
    for table in (*tables, *nearby(problem)):
        for configuration in problem.configurations():
            box = box_of(relaxation, table, configuration)
            assert any(box.inside(root) for root in roots), (box, roots)


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_stays_below_the_best_table_under_rules(seed: int) -> None:
    problem = ruled(seed, *[(3, 1), (2, 3), (3, 2), (4, 1)][seed % 4])
    best = best_table(problem)
    if best is not None:
        assert solve_sites(problem, Wishes(time_limit_s=2.0)).bound_s <= best[2] * (1 + 1e-9)


def test_something_is_forced() -> None:
    """In draws as above: of each kind, in some."""
    least = np.array([least_of(ruled(seed, 3 + seed % 4, 1 + seed % 7)) for seed in range(16)])
    assert (least.max(axis=0) > 0).all() and (least.min(axis=0) == 0).all()


def test_plans_under_a_rule_that_leaves_no_choice_are_nearly_proven() -> None:
    """All tokens go to one site, and back; the gap had been that of plans which keep nothing."""
    rules = Constraints.model_validate({"rules": [{"name": "all-there", "kind": "pin", "sites": ["us-east-1"]}]})
    cluster, workload = cluster_and_workload("aws-9", "gpt-medium", ("model.num_layers=2",))
    made = planner.plan(cluster, workload, constraints=rules, time_limit_s=3)
    free = planner.plan(cluster, workload, time_limit_s=3)
    assert made.solver is not None and free.solver is not None
    assert made.solver.bound > 1.5 * free.predicted.step and made.solver.gap < 0.2
