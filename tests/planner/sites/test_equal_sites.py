"""Equal sites: a serving table where their number leaves equal domains little choice, and a bound that holds for tables, too."""

from __future__ import annotations

import pytest

from hybridep.commands.inputs import cluster_and_workload
from hybridep.errors import InfeasibleError, NoSolutionError
from planner import check, plan
from planner.plans import plan_domains
from planner.sites.oracle import best_table
from planner.sites.others import other_plan
from planner.sites.problem import site_problem

pytestmark = pytest.mark.timeout(120)
SMALL = ("gpu.memory=1 GB", "levels.gpu.size=1", "model.num_layers=2")


@pytest.mark.parametrize(("sites", "experts"), [(3, 2), (4, 2), (5, 1), (3, 3)])
@pytest.mark.parametrize("rate", ["20 Mbps", "400 Mbps"])
def test_the_plan_lies_within_its_gap_of_the_best_table(sites: int, experts: int, rate: str) -> None:
    """The bound had been that of equal domains, which a table may beat."""
    changes = (f"levels.dc.size={sites}", f"levels.dc.bandwidth={rate}", f"model.num_experts={experts}", "model.top_k=1", *SMALL)
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", changes)
    made, best = plan(cluster, workload, time_limit_s=5), best_table(site_problem(cluster, workload))
    assert made.solver is not None and best is not None
    assert made.solver.bound <= best[2] * (1 + 1e-9)
    # Mixtures of equal domains may be better than any one table.
    assert made.solver.bound <= made.predicted.step <= best[2] * (1 + 1e-9)
    check(made)


@pytest.mark.parametrize(("sites", "least", "most"), [(3, 0.94, 0.97), (5, 0.83, 0.87), (7, 0.77, 0.82)])
def test_where_sites_have_few_divisors_tables_are_shorter(sites: int, least: float, most: float) -> None:
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", (f"levels.dc.size={sites}", "levels.dc.bandwidth=50 Mbps"))
    made, domains = plan(cluster, workload, time_limit_s=5), plan_domains(cluster, workload)
    assert made.solver is not None and made.layers[0].serving
    assert least < made.predicted.step / domains.predicted.step < most
    assert made.solver.gap < 0.2
    check(made)


@pytest.mark.parametrize(("model", "sites"), [("gpt-large", 200), ("gpt-large", 256), ("mixtral-8x7b", 1000)])
def test_among_more_sites_than_experts_no_equal_domains_are_shorter(model: str, sites: int) -> None:
    """Groups' holders had been taken to be all their members: plans were up to 1.7 times as long as domains in rank order."""
    changes = (f"levels.dc.size={sites}", "levels.dc.bandwidth=5 Gbps", "levels.dc.latency=30 ms", "gpu.memory=400 GiB")
    cluster, workload = cluster_and_workload("h100-4dc", model, (*changes, "levels.node.size=1", "model.num_layers=4"))
    made = plan(cluster, workload, time_limit_s=10)
    others = [other_plan(site_problem(cluster, workload), name) for name in ("ep", "full_gather", "rank_order_domains")]
    fitting = [one.rank[1] for one in others if one.rank[0] == 0]
    assert fitting and made.predicted.step <= min(fitting) * (1 + 1e-9)
    assert made.solver is not None and made.solver.gap < 0.05


def test_where_no_equal_domains_fit_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal sites no table is looked for then."""
    monkeypatch.setattr("planner.sites.plans.solve_sites", lambda *_: pytest.fail("a table is looked for"))
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", ("gpu.memory=1 MB",))
    with pytest.raises(InfeasibleError, match="the configuration that needs least"):
        plan(cluster, workload)


def test_where_the_solver_has_no_time_a_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal domains have a part of the limit only, which may be over before the solver has a plan."""

    def late(*_: object, **__: object) -> None:
        raise NoSolutionError("time is over")

    monkeypatch.setattr("planner.sites.plans.plan_domains", late)
    cluster, workload = cluster_and_workload("lab-4dc", "tiny", ())
    made = plan(cluster, workload, time_limit_s=2)
    assert made.layers[0].serving
    check(made)
