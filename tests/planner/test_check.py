"""The checker accepts what the planner makes and names what is wrong with anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planner_cases import make_cluster, make_workload, mixing_case, random_cluster, random_workload

import planner
from hybridep.config import build
from hybridep.errors import ConfigError, UserError
from hybridep.plan import Plan, Status
from planner.check import CheckError, check


@pytest.fixture(scope="module")
def good() -> Plan:
    return planner.plan(*mixing_case())


def mutated(plan: Plan, path: str, value: Any) -> Plan:
    """As if somebody had edited the file."""
    data = plan.model_dump(mode="json")
    node: Any = data
    *parents, last = path.split(".")
    for parent in parents:
        node = node[int(parent) if parent.isdigit() else parent]
    node[last] = value
    return build(Plan, data, "edited.yaml")


@pytest.mark.turns(2)
def test_every_plan_of_the_planner_is_accepted() -> None:
    rng = np.random.default_rng(5)
    for index in range(16):
        cluster, workload = random_cluster(rng), random_workload(rng)
        check(planner.plan(cluster, workload, solver="cbc" if index % 8 == 0 else "highs"))
        check(planner.baseline(cluster, workload, "full_gather"))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("solver.objective", "0.5 s", "solver.objective: claims 500 ms"),
        ("solver.bound", "0.9 s", "solver.bound: 0.9 s exceeds the objective"),
        ("solver.bound", "0.1 s", "solver.gap: claims 0"),
        ("solver.gap", 0.25, "solver.gap: claims 0.25"),
        ("solver.status", "infeasible", "solver.status: is infeasible, yet there is a plan"),
        ("prediction.step", "0.5 s", r"prediction.step: claims 0.5, recomputed 0.8"),
        ("prediction.bound", "0.1 s", "prediction.bound: claims 0.1"),
        ("prediction.memory_bytes", 1.0, "prediction.memory_bytes: claims 1, recomputed"),
        ("prediction.wan_bytes", 1.0, "prediction.wan_bytes: claims 1, recomputed"),
        ("prediction.parts.experts", "0 s", "prediction.parts.experts: claims 0"),
        ("prediction.parts.magic", "1 s", "prediction.parts.magic: is nothing that the cost model knows"),
        ("prediction.baselines.ep", "9 s", "prediction.baselines.ep: claims 9"),
        ("layers.0.domains.l0", 4, "prediction.step: claims"),
        ("layers.0.residency", "microbatch", "prediction.step: claims"),
        ("cluster.gpu.memory", "40 MB", r"layers: l00/l10 needs 44.17 MB and has 40 MB: 4.166 MB are missing"),
        ("cluster.levels.0.bandwidth", "100 Mbps", "prediction.step: claims"),
    ],
)
def test_one_wrong_value_is_named(good: Plan, path: str, value: Any, words: str) -> None:
    with pytest.raises(CheckError, match=words.replace("+", r"\+")) as caught:
        check(mutated(good, path, value))
    assert isinstance(caught.value, UserError) and caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_domain_that_does_not_divide_is_named_even_in_a_copy(good: Plan) -> None:
    """``model_copy`` validates nothing."""
    group = good.layers[0].model_copy(update={"domains": {"l0": 3, "l1": 1}})
    with pytest.raises(ConfigError, match=r"layers\.0\.domains\.l0: size 3 must divide the level's size 4; use 1, 2, 4"):
        check(good.model_copy(update={"layers": (group,)}))


def test_missing_layers_are_named(good: Plan) -> None:
    group = good.layers[0].model_copy(update={"num_layers": 3})
    with pytest.raises(ConfigError, match="3 layers are placed, the model has 4"):
        check(good.model_copy(update={"layers": (group,)}))


def test_a_missing_prediction_is_named(good: Plan) -> None:
    with pytest.raises(CheckError, match=r"plan\.prediction: is missing"):
        check(good.model_copy(update={"prediction": None}))


def test_a_lying_bound_is_noticed() -> None:
    """A slow plan that claims, consistently in all its own numbers, that nothing is faster."""
    cluster, workload = mixing_case()
    honest, slow = planner.plan_domains(cluster, workload), planner.baseline(cluster, workload, "ep")
    assert honest.solver is not None and slow.prediction is not None
    report = honest.solver.model_copy(update={"objective": slow.prediction.step, "bound": slow.prediction.step})
    with pytest.raises(CheckError, match=r"solver\.bound: claims that no plan is faster .* domains l0 2, l1 2"):
        check(slow.model_copy(update={"solver": report}))
    assert planner.summary(slow)["status"] == "feasible"


def test_optimal_needs_a_closed_gap(good: Plan) -> None:
    assert good.solver is not None
    bound = good.solver.objective * 0.9
    gap = (good.solver.objective - bound) / good.solver.objective
    report = good.solver.model_copy(update={"status": Status.OPTIMAL, "bound": bound, "gap": gap})
    with pytest.raises(CheckError, match=r"solver\.status: claims optimal with a gap of 0\.1"):
        check(good.model_copy(update={"solver": report}))


def test_random_edits_of_domains_never_pass() -> None:
    """Another domain size changes times; a plan that keeps its old numbers is refused."""
    rng = np.random.default_rng(11)
    made = planner.plan(make_cluster(4, 2), make_workload())
    own = made.layers[0].domains
    for _ in range(10):
        domains = {"l0": int(rng.choice([1, 2, 4])), "l1": int(rng.choice([1, 2]))}
        if domains != own:
            with pytest.raises(CheckError):
                check(mutated(made, "layers.0.domains", domains))
