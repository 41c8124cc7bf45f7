"""Rules that plans keep, and the smallest sets of rules that clash."""

from __future__ import annotations

import numpy as np
import pytest
from site_cases import random_table, run, small_workload, uneven_cluster

import planner
from hybridep.commands.inputs import cluster_and_workload
from hybridep.errors import ConfigError, InfeasibleError, PlacementError, UserError
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.constraints import Constraints, Rule, permissions, smallest_clash
from planner.sites.oracle import best_table
from planner.sites.problem import site_problem
from planner.sites.search import Search
from planner.sites.solution import solve_sites


@pytest.fixture
def given() -> tuple[Cluster, Workload]:
    rng = np.random.default_rng(2)
    return uneven_cluster(rng, 5, 2), small_workload(rng, 8)


def rules(*entries: dict[str, object]) -> Constraints:
    return Constraints.model_validate({"rules": [{"name": f"r{i}", **entry} for i, entry in enumerate(entries)]})


KEPT = rules(
    {"kind": "keep_tokens", "sites": ["s0", "s1"]},
    {"kind": "forbid", "sites": ["s3"], "experts": "0-2"},
    {"kind": "pin", "sites": ["s0", "s[34]"], "experts": "7"},
    {"kind": "no_link", "sites": ["s2"], "to": ["s4"]},
)


def test_plans_keep_every_rule(given: tuple[Cluster, Workload]) -> None:
    cluster, workload = given
    plan = planner.plan(cluster, workload, constraints=KEPT, time_limit_s=3)
    serve = plan.placements[0].serve[0]
    assert np.isin(serve[:2], [0, 1]).all()
    assert not (serve[:, :3] == 3).any()
    assert np.isin(serve[:, 7], [0, 3, 4]).all()
    assert not (serve[2] == 4).any() and not (serve[4] == 2).any()
    home = plan.placements[0].home_coordinates[0]
    assert not (serve[:, home == 2] == 4).any() and not (serve[:, home == 4] == 2).any()
    assert plan.solver is not None
    free = planner.plan(cluster, workload, time_limit_s=3)
    assert free.prediction is not None and free.prediction.step <= plan.solver.objective
    planner.check(plan, KEPT)
    planner.check(free)
    with pytest.raises(planner.CheckError, match=r"layers: some expert is computed or held where a rule forbids it"):
        planner.check(free, KEPT)


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        (
            (0,),
            {
                "r0": {"sites": ["s1"]},
                "r1": {"sites": ["s3"]},
                "r2": {"sites": ["s3", "s4"]},
                "r3": {"sites": ["s2"], "to": ["s4"]},
            },
        ),
        ((0, 1, 4), {"r1": {"sites": ["s3"]}, "r2": {"sites": ["s3"]}}),
        ((0, 3, 4), {"r0": {"sites": ["s1"]}, "r2": {"sites": ["s1", "s2"], "kind": "forbid"}}),
    ],
)
def test_rules_among_the_sites_that_take_part(
    given: tuple[Cluster, Workload], gone: tuple[int, ...], expected: dict[str, dict[str, object]]
) -> None:
    """They permit among these what they permitted; what is pinned where none is left is forbidden to all."""
    cluster, workload = given
    left = [site for site in range(5) if site not in gone]
    one, _ = on_sites(cluster, workload, [cluster.site_names[site] for site in left])
    found = planner.constraints_among(cluster, KEPT, one.site_names)
    assert [rule.name for rule in found.rules] == list(expected)
    for rule in found.rules:
        said = rule.model_dump(mode="json", exclude_defaults=True)
        before = next(one for one in KEPT.rules if one.name == rule.name).model_dump(mode="json", exclude_defaults=True)
        assert said == before | expected[rule.name]
    serve = [permissions(*where, 8, rules).serve for where, rules in (((cluster,), KEPT.rules), ((one,), found.rules))]
    np.testing.assert_array_equal(serve[1], serve[0][np.ix_(left, left)])


@pytest.mark.parametrize("seed", range(4))
def test_the_best_plan_under_rules_against_every_table(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = rules({"kind": "keep_tokens", "sites": ["s0", "s1"]}, {"kind": "forbid", "sites": [f"s{seed % 2}"], "experts": "1"})
    problem = site_problem(uneven_cluster(rng, 3, 0), small_workload(rng, 2), constraints=kept)
    optimum = best_table(problem)
    assert optimum is not None and problem.permissions is not None and problem.permissions.keeps(optimum[0])
    free = best_table(site_problem(problem.cluster, problem.workload))
    assert free is not None and free[2] <= optimum[2]
    search = Search(problem=problem, max_evaluations=500)
    run(search)
    assert search.best is not None and problem.permissions.keeps(search.best.table)
    assert search.best.rank[1] == pytest.approx(optimum[2], rel=1e-9)
    assert solve_sites(problem).bound_s <= optimum[2] * (1 + 1e-12)


def test_repaired_tables_keep_the_rules_and_change_nothing_else(given: tuple[Cluster, Workload]) -> None:
    problem = site_problem(*given, constraints=KEPT)
    allowed = problem.permissions
    assert allowed is not None
    for seed in range(20):
        table = random_table(np.random.default_rng(seed), problem)
        repaired = allowed.repaired(table, problem.home_site)
        assert allowed.keeps(repaired)
        rows, experts = np.arange(5)[:, None], np.arange(8)
        good = allowed.serve[rows, table] & allowed.hold[table, experts]
        assert (repaired[good] == table[good]).all() and not good.all()


def test_the_smallest_clash_is_named(given: tuple[Cluster, Workload]) -> None:
    cluster, workload = given
    clashing = rules(
        {"kind": "forbid", "sites": ["s0"], "experts": "5"},
        {"kind": "keep_tokens", "sites": ["s2", "s3"]},
        {"kind": "no_link", "sites": ["s4"], "to": ["s0"]},
        {"kind": "pin", "sites": ["s0", "s1"], "experts": "3-4"},
    )
    with pytest.raises(InfeasibleError, match=r"'r1' and 'r3' clash: expert 3 can be computed nowhere for tokens of s2"):
        planner.plan(cluster, workload, constraints=clashing)
    # Sets from which no rule can be left out, also where there are too many rules to try all sets.
    more = (*clashing.rules, *(Rule.model_validate({"name": f"x{i}", "kind": "forbid", "sites": ["s4"]}) for i in range(20)))
    assert {rule.name for rule in smallest_clash(cluster, 8, more)} == {"r1", "r3"}


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ({"kind": "pin", "sites": ["mars"]}, UserError, "no site is called 'mars'; there are s0"),
        ({"kind": "pin", "sites": ["s0"], "experts": "9"}, PlacementError, "rule r0.*stay below 8"),
        ({"kind": "pin", "sites": ["s1"], "experts": "0"}, None, ""),
    ],
)
def test_rules_about_nothing(
    given: tuple[Cluster, Workload], entry: dict[str, object], error: type[Exception] | None, message: str
) -> None:
    if error is None:
        assert permissions(given[0], 8, rules(entry).rules).possible
        return
    with pytest.raises(error, match=message):
        permissions(given[0], 8, rules(entry).rules)


def test_a_name_with_brackets_is_no_pattern_only(given: tuple[Cluster, Workload]) -> None:
    sites = tuple(site.model_copy(update={"name": f"{site.name}[eu]"}) for site in given[0].named_sites)
    cluster = given[0].model_copy(update={"sites": sites, "links": ()})
    barred = ~permissions(cluster, 8, rules({"kind": "forbid", "sites": ["s3[eu]"]}).rules).hold.any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(barred), [3])


def test_files_are_strict(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text("rules:\n- {name: a, kind: keep_tokens, sites: [s0], experts: 0-1}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rules.yaml:2: rules.0: rule a: 'experts' belongs to pin and forbid"):
        planner.load_constraints(path)
    path.write_text("rules:\n- {name: a, kind: pinned, sites: [s0]}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="kind"):
        planner.load_constraints(path)


@pytest.mark.parametrize("entries", [[], [{"kind": "pin", "sites": ["*"]}]])
def test_rules_that_forbid_nothing_cost_nothing(entries: list[dict[str, object]]) -> None:
    """Here memory is so tight that layers have different domains, which plans that keep rules do not."""
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", ["gpu.memory=43.6 MB"])
    free, kept = (planner.plan(cluster, workload, constraints=one, time_limit_s=1) for one in (None, rules(*entries)))
    assert len(free.layers) > 1 and kept.digest == free.digest


def test_a_rule_that_keeps_no_sites_apart_is_refused(given: tuple[Cluster, Workload]) -> None:
    with pytest.raises(UserError, match="rule r0: no_link from all sites"):
        planner.plan(*given, constraints=rules({"kind": "no_link", "sites": ["*"]}))
