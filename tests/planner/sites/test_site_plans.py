"""Whole plans between sites: checked, repeatable, honest under time limits and bad profiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from site_cases import small_workload, uneven_cluster

import planner
from hybridep.config import build
from hybridep.errors import ConfigError, InfeasibleError
from hybridep.recompute import ALL, Recompute
from hybridep.topology import Cluster
from planner.constraints import Constraints, Kind, Rule
from planner.sites.cost import site_cost
from planner.sites.oracle import best_table
from planner.sites.others import rank_order_domains
from planner.sites.plans import chosen_table
from planner.sites.problem import site_problem
from planner.sites.search import Search
from planner.sites.solution import AMPLE_S
from simulator.step import simulate_step


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(4))
def test_plans_check_and_beat_equal_domains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster, workload = uneven_cluster(rng, 6, 2), small_workload(rng, 12)
    made = planner.plan(cluster, workload, time_limit_s=3)
    assert made.solver is not None and made.prediction is not None
    planner.check(made)
    assert made.solver.bound <= made.solver.objective
    domains = planner.plan_domains(cluster, workload)
    assert made.prediction.step <= domains.predicted.step * (1 + 1e-9)
    assert made.prediction.step <= min(made.prediction.baselines.values()) * (1 + 1e-9)


def test_a_short_time_limit_still_gives_an_honest_plan() -> None:
    rng = np.random.default_rng(3)
    made = planner.plan(uneven_cluster(rng, 24, 2), small_workload(rng, 32), time_limit_s=1)
    assert made.solver is not None and made.solver.solve < 4
    assert 0 <= made.solver.gap <= 1
    planner.check(made)


def test_memory_that_fits_nothing_says_what_is_missing() -> None:
    rng = np.random.default_rng(3)
    with pytest.raises(InfeasibleError, match="missing"):
        planner.plan(uneven_cluster(rng, 4, 2, memory="10 kB"), small_workload(rng, 8), time_limit_s=5)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("sites", "experts", "shared"), [(3, 2, 0), (5, 12, 500), (5, 12, 0), (3, 2, 500)])
def test_experts_compute_again_where_nothing_fits_otherwise(sites: int, experts: int, shared: int) -> None:
    """All tables tried, and searched; with a wide shared expert, too."""
    rng = np.random.default_rng(3)
    workload = small_workload(rng, experts)
    training = workload.training.model_copy(update={"micro_batch_size": 64})
    model = workload.model.model_copy(update={"shared_ffn_size": shared})
    workload = workload.model_copy(update={"training": training, "model": model})

    def planned(memory: str) -> planner.Plan:
        made = planner.plan(uneven_cluster(np.random.default_rng(5), sites, 1, memory=memory), workload, time_limit_s=2)
        planner.check(made)
        return made

    roomy = planned("1 TB")
    assert not roomy.recomputes
    chosen = chosen_table(roomy)
    assert chosen is not None
    problem = site_problem(roomy.cluster, workload)
    tables = [*rank_order_domains(problem), chosen[0]]
    least = min(site_cost(problem, one, each).memory_bytes for one in tables for each in problem.configurations())
    tight = planned(f"{0.8 * least:.0f} B")
    assert tight.recomputes and tight.predicted.memory_bytes <= 0.8 * least * (1 + 1e-4)
    assert tight.predicted.step >= roomy.predicted.step and tight.solver is not None
    if sites == 3:
        # All tables, whatever computes again.
        small = site_problem(tight.cluster, workload)
        ways = [best_table(replace(small, recompute=again)) for again in (Recompute.NOTHING, *ALL, ALL)]
        assert tight.solver.bound <= min(best[2] for best in ways if best is not None) * (1 + 1e-12)
    assert tight.solver.bound <= tight.solver.objective


@pytest.mark.turns(2)
def test_memory_that_forbids_copies_is_respected() -> None:
    rng = np.random.default_rng(11)
    workload = small_workload(rng, 12)
    ample = planner.plan(uneven_cluster(np.random.default_rng(3), 5, 2), workload, time_limit_s=2)
    tight_bytes = ample.predicted.memory_bytes * 0.995
    tight = planner.plan(uneven_cluster(np.random.default_rng(3), 5, 2, memory=f"{tight_bytes:.0f} B"), workload, time_limit_s=2)
    assert tight.predicted.memory_bytes <= tight_bytes * (1 + 1e-4)
    assert tight.predicted.step >= ample.predicted.step
    planner.check(tight)


@pytest.mark.turns(4)
def test_sites_of_several_levels() -> None:
    """Planned site by site, too, with rules or without; faster than equal domains here."""
    rng = np.random.default_rng(17)
    cluster, workload = uneven_cluster(rng, 5, 2, nodes=(2,)), small_workload(rng, 12)
    made = planner.plan(cluster, workload, time_limit_s=6)
    planner.check(made)
    domains = planner.plan_domains(cluster, workload)
    assert made.solver is not None and made.prediction is not None and domains.prediction is not None
    assert made.solver.bound <= made.prediction.step < 0.99 * domains.prediction.step
    assert simulate_step(made).step_s <= made.prediction.step * 1.05
    kept = Rule(name="here", kind=Kind.KEEP_TOKENS, sites=("s0",))
    ruled = planner.plan(cluster, workload, time_limit_s=2.5, constraints=Constraints(rules=(kept,)))
    assert (ruled.placed[0].placement.serve[0][0] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda links: links[1:], "no link s0 -> s1"),
        (lambda links: [*links, links[0]], "given twice"),
        (lambda links: [{**links[0], "bandwidth": "0 Gbps"}, *links[1:]], "above zero"),
        (lambda links: [{**links[0], "dst": "s0"}, *links[1:]], "does not join two"),
    ],
)
def test_bad_profiles(change: object, message: str) -> None:
    assert callable(change)
    data = uneven_cluster(np.random.default_rng(0), 3, 2).model_dump(mode="json", exclude_none=True)
    data["links"] = change(data["links"])
    with pytest.raises(ConfigError, match=message):
        build(Cluster, data, "test")


@pytest.mark.turns(6)
@pytest.mark.parametrize("seed", range(3))
def test_few_tables_are_all_tried_for_several_plans_too(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster, workload = uneven_cluster(rng, 2, 2), small_workload(rng, 3)
    one, several = planner.plan(cluster, workload), planner.plans(cluster, workload, 4)
    assert several[0].prediction == one.prediction and several[0].solver is not None and several[0].solver.gap < 1e-9
    steps_s = [made.prediction.step for made in several if made.prediction is not None]
    assert len(steps_s) > 1 and steps_s == sorted(steps_s) and len({made.digest for made in several}) == len(several)


@pytest.mark.turns(2)
def test_what_is_over_of_the_limit_changes_no_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks are in proportion to the whole limit: two runs make the same plans, however long what comes before them takes."""
    shares: list[float] = []

    def noted(**given: Any) -> Search:
        shares.append(given["walks_share"])
        return Search(**given)

    monkeypatch.setattr("planner.sites.solution.Search", noted)
    rng = np.random.default_rng(0)
    planner.plan(uneven_cluster(rng, 6, 2), small_workload(rng, 12), time_limit_s=3)
    assert shares == [3 / AMPLE_S]
