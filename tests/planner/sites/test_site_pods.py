"""Plans between sites of several pods: against every table, and with rules for whole sites."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from site_cases import run, small_workload, uneven_cluster

import planner
from hybridep.config import build
from hybridep.topology import Cluster
from hybridep.units import Dimension, exact
from planner.check import check
from planner.constraints import Constraints, permissions
from planner.cost import step_cost
from planner.difference import scaled
from planner.sites.bound import prove, verify
from planner.sites.oracle import best_table
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.search import Search

SHAPES = [((2, 1), 2, 0), ((3, 1), 1, 0), ((2, 1), 1, 2)]
"""Pods of each site, experts, ranks of a pod (0: a level less)."""
TIGHT = [11, 18, 37, 43]
"""Seeds at which a bound that counts too much on a trunk, or leaves slow gathers out, exceeds the optimum."""


def pod_cluster(rng: np.random.Generator, pods: tuple[int, ...], inside: int) -> Cluster:
    """Random sites whose pods are joined several times as fast as sites are."""
    data: dict[str, Any] = uneven_cluster(rng, len(pods), inside, pairs=rng.random() < 0.5).model_dump(
        mode="json", exclude_none=True
    )
    data["levels"][0]["pods"] = {"bandwidth": f"{rng.uniform(500, 5000):.3f} Mbps", "latency": f"{rng.uniform(0, 0.2):.3f} ms"}
    for site, number in zip(data["sites"], pods, strict=True):
        site["pods"] = number
    return build(Cluster, data, "test")


def pod_problem(seed: int, pods: tuple[int, ...], experts: int, inside: int) -> SiteProblem:
    rng = np.random.default_rng(seed)
    return site_problem(pod_cluster(rng, pods, inside), small_workload(rng, experts))


@pytest.mark.parametrize("seed", TIGHT)
def test_bound_and_search_against_every_table(seed: int) -> None:
    problem = pod_problem(seed, *SHAPES[seed % len(SHAPES)])
    search = Search(problem=problem, max_evaluations=150)
    run(search)
    found = best_table(problem)
    assert found is not None and search.best is not None
    optimum_s, best_s = found[2], search.best.rank[1]
    proof = prove(Relaxation(problem=problem), best_s, max_boxes=12)
    assert 0.35 * optimum_s < proof.bound_s <= optimum_s * (1 + 1e-9)
    assert verify(Relaxation(problem=problem), proof) == pytest.approx(proof.bound_s, rel=1e-12)
    assert optimum_s * (1 - 1e-9) <= best_s <= optimum_s * 1.05


def test_the_bound_knows_the_access_link_that_pods_share() -> None:
    """Three pods behind one link: no pair of pods is slow, only all together. Without that link: 0.54 of this plan's step."""
    problem = pod_problem(4, (3, 1), 4, 0)
    search = Search(problem=problem, max_evaluations=60)
    run(search)
    assert search.best is not None
    best_s = search.best.rank[1]
    assert 0.7 * best_s < prove(Relaxation(problem=problem), best_s, max_boxes=8).bound_s <= best_s


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(12))
def test_no_bound_exceeds_what_a_long_search_finds(seed: int) -> None:
    problem = pod_problem(seed, ((3, 1), (2, 2, 1), (4, 2, 1, 1))[seed % 3], 8, 2)
    search = Search(problem=problem)
    run(search)
    assert search.best is not None
    assert prove(Relaxation(problem=problem), search.best.rank[1] * 1.0001, max_boxes=60).bound_s <= search.best.rank[1] * (
        1 + 1e-9
    )


def test_plans_are_checked_and_never_worse_than_what_needs_no_search() -> None:
    rng = np.random.default_rng(3)
    cluster, workload = pod_cluster(rng, (3, 1, 2), 2), small_workload(rng, 12)
    made = planner.plan(cluster, workload, time_limit_s=0.5)
    check(made)
    assert made.prediction is not None and made.solver is not None
    for name in ("ep", "full_gather"):
        assert made.prediction.step <= planner.baseline(cluster, workload, name).prediction.step * (1 + 1e-9)
    assert made.solver.bound <= made.prediction.step


def test_a_rule_for_a_site_means_all_of_its_pods() -> None:
    rng = np.random.default_rng(0)
    cluster = pod_cluster(rng, (2, 1, 1), 2)
    rules = [{"name": "stay", "kind": "keep_tokens", "sites": ["s0"]}, {"name": "no", "kind": "forbid", "sites": ["s1"]}]
    kept = permissions(cluster, 4, Constraints.model_validate({"rules": rules}).rules)
    assert kept.serve.tolist() == [[True, True, False, False]] * 2 + [[True] * 4] * 2
    assert kept.hold.all(axis=1).tolist() == [True, True, False, True] and not kept.hold[2].any()


def test_bytes_between_pods_of_a_site_are_not_between_sites() -> None:
    cluster, workload = (given := pod_problem(5, (2, 1), 6, 2)).cluster, given.workload
    plan = planner.baseline(cluster, workload, "ep")
    cost, table = step_cost(plan), cluster.link_table
    loads = {link.name: number for link, number in zip(table, cost.link_bytes, strict=True)}
    assert cost.wan_bytes == pytest.approx(loads["s0 up"] + loads["s1 up"])
    faster = {link.name: link.bandwidth_bytes_per_s for link in scaled(cluster, 2.0).link_table}
    for link in table:
        between = link.name.startswith(("s0 ", "s1 ")) or " -> s1" in link.name
        assert faster[link.name] == link.bandwidth_bytes_per_s * (2.0 if between else 1.0)


def test_what_joins_pods_does_not_vary() -> None:
    cluster = pod_cluster(np.random.default_rng(0), (2, 1), 1)
    for varied in planner.interval_scenarios(cluster, 0.3):
        assert varied.sites[0] == cluster.sites[0] and varied.links[0] == cluster.links[0]
        assert varied.trunks != cluster.trunks and varied.sites[2] != cluster.sites[2]


def test_trunks_are_bought_where_sites_have_pods() -> None:
    """And nothing that is inside a site."""
    rng = np.random.default_rng(0)
    cluster = pod_cluster(rng, (2, 1), 1)
    upgrades = planner.upgrades(planner.baseline(cluster, small_workload(rng, 4), "ep"), top=9)
    bought = {one.name for one in upgrades}
    assert {f"trunk {trunk.name}" for trunk in cluster.trunks} <= bought and not any("pod" in name for name in bought)
    assert any(one.gain_s > 0 for one in upgrades if one.name.startswith("trunk"))


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", [9, 11])
def test_access_links_are_bought_whole_beside_pods(seed: int) -> None:
    """As if the file had said so: what joins a site to pods widens with it, and is not for sale by itself."""
    rng = np.random.default_rng(seed)
    data = uneven_cluster(rng, 3, 1, pairs=False).model_dump(mode="json", exclude_none=True)
    data["levels"][0]["pods"] = {"bandwidth": "5 Gbps", "latency": "0.1 ms"}
    data["sites"][0]["pods"] = 2
    cluster, workload = build(Cluster, data, "test"), small_workload(rng, int(rng.choice([2, 4, 8])))
    plan = planner.plan(cluster, workload, time_limit_s=0.5)
    upgrades = {one.name: one for one in planner.upgrades(plan, top=9)}
    assert not any(name.startswith("link ") for name in upgrades)
    for site in (1, 2):
        for way, rates in zip(("up", "down"), cluster.access_bytes_per_s, strict=True):
            faster = copy.deepcopy(data)
            faster["sites"][site][way] = exact(2 * float(rates[site + 1]), Dimension.BANDWIDTH)
            bought = plan.model_copy(update={"cluster": build(Cluster, faster, "test")})
            told = upgrades[f"{way} link of {data['sites'][site]['name']}"]
            assert told.as_it_is_s == pytest.approx(step_cost(bought).step_s, rel=1e-12)
