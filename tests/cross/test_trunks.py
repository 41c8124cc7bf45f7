"""Plans over trunks that sites share: predicted and simulated agree, and the planner's choice knows the trunks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import planner
from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.check import check
from planner.cost import step_cost
from planner.evaluate import evaluate
from planner.sites import solution
from planner.sites.bound import prove
from planner.sites.cost import site_cost
from planner.sites.evaluate import evaluate_sites
from planner.sites.plans import table_plan
from planner.sites.problem import site_problem
from planner.sites.relaxation import Relaxation
from simulator.fabric_file import FabricFile, Wan
from simulator.routes import with_fabric
from simulator.step import simulate_step

FABRICS = {
    "ring": {"ring": {"bandwidth": "2 Gbps", "routing": "ecmp"}},
    "ring one way": {"ring": {"bandwidth": "1 Gbps", "latency": "3 ms"}},
    "hub": {"hub": {"bandwidth": "1 Gbps"}},
    "hub at a site": {"hub": {"bandwidth": "2 Gbps", "at": "dc1", "latency": "4 ms"}},
}
"""Between sites whose access links carry 4 Gbps, so that trunks bind."""


def wan(name: str) -> Wan:
    return build(Wan, FABRICS[name], name)


def sites(num: int, inside: int = 2) -> Cluster:
    return load_cluster("lab-4dc", [f"levels.dc.size={num}", f"levels.gpu.size={inside}", "levels.dc.bandwidth=4 Gbps"])


def small(*overrides: str) -> Workload:
    return load_workload("tiny", ["model.num_layers=2", "model.vocab_size=256", *overrides])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches end after so many tables and boxes, long before their time limit: with the same plan on every machine."""
    monkeypatch.setattr(solution, "_evaluations", lambda problem: 200)
    monkeypatch.setattr(solution, "MOST_BOXES", 4)


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("which", ["plan", "ep", "full_gather"])
@pytest.mark.usefixtures("counted")
def test_predicted_and_simulated_steps_agree_within_a_tenth(name: str, which: str) -> None:
    cluster, workload = with_fabric(sites(5), wan(name)), small("model.num_experts=20", "training.micro_batches=2")
    made = planner.plan(cluster, workload) if which == "plan" else planner.baseline(cluster, workload, which)
    check(made)
    simulated = simulate_step(made)
    assert made.predicted.step == pytest.approx(simulated.step_s, rel=0.1)
    # The fabric itself, on the cluster without trunks, is the same network.
    bare = build(type(made), made.model_dump(mode="json") | {"cluster": sites(5).model_dump(mode="json")}, "bare")
    fabric = FabricFile(name="test", wan=wan(name))
    assert simulate_step(bare, fabric=fabric).step_s == pytest.approx(simulated.step_s, rel=1e-9)
    # Without them a prediction would be off where tokens travel.
    assert which != "ep" or step_cost(bare).step_s < 0.97 * made.predicted.step
    loaded = {link.name: link.size_bytes for link in simulated.links}
    for link, total in zip(cluster.link_table, evaluate(made)[0].link_bytes, strict=True):
        if link.name.startswith("trunk "):
            assert loaded[link.name] == pytest.approx(total, rel=1e-9), link.name


@pytest.mark.parametrize("name", ["ring one way", "hub"])
def test_every_cost_and_the_bound_know_trunks(name: str) -> None:
    cluster = with_fabric(sites(2, 1), wan(name))
    problem = site_problem(cluster, small("model.num_experts=3", "model.top_k=2"))
    costs = []
    for number, entries in enumerate(product(range(2), repeat=6)):
        table = np.array(entries).reshape(2, 3)
        for configuration in problem.configurations():
            cost = site_cost(problem, table, configuration)
            costs.append(cost.step_s)
            if number % 13 == 5:
                plan = table_plan(problem, table, configuration)
                found = evaluate_sites(plan)
                assert found is not None and plan.prediction is not None
                assert cost.step_s == pytest.approx(plan.prediction.step, rel=1e-12)
                assert found[0].step_s == pytest.approx(cost.step_s, rel=1e-12)
    assert prove(Relaxation(problem=problem), min(costs), max_boxes=20).bound_s <= min(costs) * (1 + 1e-9)
    made = planner.plan(cluster, problem.workload)
    assert made.prediction is not None and made.prediction.step <= min(costs) * (1 + 1e-9)


@pytest.mark.usefixtures("counted")
def test_the_choice_knows_trunks() -> None:
    """Two pairs of sites and one narrow cable between the pairs, of which access links alone tell nothing."""
    cluster = sites(4)
    crossing = [f"dc{a} -> dc{b}" for a, b in ((0, 2), (0, 3), (1, 2), (1, 3))]
    back = [f"dc{b} -> dc{a}" for a, b in ((0, 2), (0, 3), (1, 2), (1, 3))]
    data = cluster.model_dump(mode="json", exclude_none=True)
    data["trunks"] = [
        {"name": f"trunk {way}", "bandwidth": "100 Mbps", "carries": dict.fromkeys(pairs, 1.0)}
        for way, pairs in (("out", crossing), ("back", back))
    ]
    narrow, workload = build(Cluster, data, "test"), small("model.num_experts=16", "training.micro_batches=4")
    aware, blind = planner.plan(narrow, workload), planner.plan(cluster, workload)
    unaware = blind.model_copy(update={"cluster": narrow})
    assert aware.prediction is not None and aware.prediction.step < 0.9 * step_cost(unaware).step_s
    assert simulate_step(aware).step_s < 0.95 * simulate_step(unaware).step_s


@pytest.mark.parametrize("pair", ["dc0 -> dc9", "dc0", "dc1 -> dc1"])
def test_trunks_join_sites_that_are_there(pair: str) -> None:
    data = sites(2).model_dump(mode="json", exclude_none=True)
    data["trunks"] = [{"name": "cable", "bandwidth": "1 Gbps", "carries": {pair: 1.0}}]
    with pytest.raises(ConfigError, match="of two sites"):
        build(Cluster, data, "test")
