"""Plans that a simulation chooses."""

from __future__ import annotations

import numpy as np
import pytest
from cli_cases import Call, Inputs

import planner
from hybridep.commands.inputs import cluster_and_workload
from hybridep.commands.plan_choice import (
    CANDIDATES,
    SHORT_LAYERS,
    choose,
    decides,
    least_of_others_s,
    most_simulated,
    planned,
    reported,
    shortened,
)
from hybridep.config import build
from hybridep.pipeline import load_any_plan
from hybridep.plan import Plan, Status
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import now_s
from planner.sites.popular import least_with_homes_s
from simulator.step import simulate_step

SHORT = ("--set", "model.num_layers=2")


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Between six sites whose links differ tenfold, for a model of four layers."""
    rng, names = np.random.default_rng(3), [f"s{number}" for number in range(6)]
    rates = rng.uniform(0.5, 5.0, size=(6, 6))
    data = {
        "name": "six",
        "levels": [{"name": "dc", "size": 6, "bandwidth": "1 Gbps", "latency": "0 s"}],
        "gpu": {"throughput": "100 TFLOPS", "memory": "1 TB", "memory_bandwidth": "2 TB/s"},
        "sites": [{"name": name, "up": "4 Gbps", "down": "4 Gbps"} for name in names],
        "links": [
            {"src": a, "dst": b, "bandwidth": f"{rates[i, j]} Gbps", "latency": "20 ms"}
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if a != b
        ],
    }
    _, work = cluster_and_workload("dtfm-10", "gpt-large", ["model.num_layers=4", "model.num_experts=12"])
    return planner.plans(build(Cluster, data, "six"), work, 16, time_limit_s=10)


def simulated_s(one: Plan) -> float:
    return simulate_step(one).step_s


def cost_s(one: Plan) -> float:
    return one.predicted.step


def test_the_choice_is_simulated_fastest_of_those_that_cost_no_more_than_others(plans: list[Plan]) -> None:
    allowed = [one for one in plans if cost_s(one) <= least_of_others_s(plans[0], None)]
    steps_s = [simulated_s(one) for one in shortened(allowed)]
    fastest = int(np.argmin(steps_s))
    assert len(allowed) > 2 and fastest > 0, "nothing to choose: take another seed"
    choice = choose(plans, None)
    assert choice.plan.digest == allowed[fastest].digest and choice.simulated == len(allowed)
    assert choice.shorter == pytest.approx(1 - steps_s[fastest] / steps_s[0])
    assert choice.dearer == pytest.approx(cost_s(allowed[fastest]) / cost_s(plans[0]) - 1)
    first, report = plans[0].solver, choice.plan.solver
    assert first is not None and report is not None and report.status is Status.FEASIBLE
    assert (report.objective, report.bound) == (cost_s(choice.plan), first.bound)
    assert report.gap == pytest.approx(1 - first.bound / report.objective)


def test_runs_that_leave_the_plan_open_get_the_same_one(plans: list[Plan]) -> None:
    assert planned(plans[0].cluster, plans[0].workload, 10.0, free_homes=False).digest == choose(plans, None).plan.digest
    equal, work = cluster_and_workload("lab-4dc", "tiny", [])
    assert planned(equal, work).digest == planner.plan(equal, work).digest


def test_after_the_time_limit_only_two_are_simulated(plans: list[Plan]) -> None:
    assert choose(plans, None, until_s=now_s()).simulated == 2


def test_how_many_are_simulated_depends_on_the_limit_and_which_on_what_is_expected(plans: list[Plan]) -> None:
    counts = [most_simulated(plans, limit_s) for limit_s in (1e-3, 1.0, 60.0)]
    assert counts[0] == 2 < counts[1] < counts[2] == CANDIDATES
    allowed = [one for one in plans if cost_s(one) <= least_of_others_s(plans[0], None)]
    steps_s = [simulated_s(one) for one in shortened(allowed)]
    expected = [
        one.model_copy(update={"prediction": one.predicted.model_copy(update={"expected": step_s})})
        for one, step_s in zip(allowed, steps_s, strict=True)
    ]
    fastest = int(np.argmin(steps_s))
    assert 0 < fastest < len(allowed) - 1, "the fastest is tried anyway: take another seed"
    two = choose([expected[0], *expected[:0:-1]], None, most=2)
    assert two.simulated == 2 and two.plan.layers == allowed[fastest].layers


def test_shortened_plans_differ_in_nothing_but_layers(plans: list[Plan]) -> None:
    """A step of few layers puts plans in about the order of all."""
    for one, short in zip(plans, shortened(plans), strict=True):
        assert short.workload.model.num_layers == SHORT_LAYERS
        assert [p.serve[0].tolist() for p in short.placements] == [p.serve[0].tolist() for p in one.placements]
    whole, few = [np.argsort([simulated_s(one) for one in some]) for some in (plans, shortened(plans))]
    assert np.corrcoef(np.argsort(whole), np.argsort(few))[0, 1] > 0.9


def test_plans_of_several_placements_are_simulated_whole(plans: list[Plan]) -> None:
    group = plans[0].layers[0]
    split = tuple(group.model_copy(update={"first_layer": first, "num_layers": 2}) for first in (0, 2))
    mixed = [plans[0].model_copy(update={"layers": split}), plans[1]]
    assert shortened(mixed) == mixed


def test_a_chosen_plan_with_other_homes_has_a_bound_for_these(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proven for the homes of the plan that costs least says nothing of others'."""
    first, *_, other = planner.plans(
        plans[0].cluster, plans[0].workload, 8, popularity=skewed(4, 12), time_limit_s=6, free_homes=True
    )
    assert first.solver is not None and other.solver is None
    homes = [np.array([layers.placement.home for layers in one.placed]) for one in (first, other)]
    assert (homes[0] != homes[1]).any()
    report, least_s = reported(other, first).solver, least_with_homes_s(other, now_s() + 0.5)
    assert report is not None and report.bound <= min(first.solver.bound, report.objective)
    assert 0 < least_s <= report.objective and report.gap == pytest.approx(1 - report.bound / report.objective)
    monkeypatch.setattr("planner.sites.popular.least_with_homes_s", lambda *_: 0.5 * first.solver.bound)
    report = reported(other, first).solver
    assert report is not None and report.bound == 0.5 * first.solver.bound
    same = first.model_copy(update={"solver": None})
    report = reported(same, first).solver
    assert report is not None and report.bound == first.solver.bound


def skewed(layers: int, experts: int) -> tuple[tuple[float, ...], ...]:
    """Popularity, other in each layer."""
    drawn = np.random.default_rng(0).dirichlet(np.full(experts, 2.0), size=layers)
    return tuple(tuple(row.tolist()) for row in drawn)


def test_plan_chooses_by_simulation_where_sites_differ(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "plan.yaml"
    words = ("plan", "dtfm-10", "gpt-large", *SHORT, "-o", path, "--time-limit", "4")
    found = call(*words, "--compare", "--json").json
    assert found["choice"]["simulated"] >= 2 and found["choice"]["shorter"] >= 0
    assert found["objective_s"] <= min(one["step_s"] for one in found["planners"].values()) * (1 + 1e-9)
    assert found["gap"] == pytest.approx(1 - found["bound_s"] / found["objective_s"]) and found["solver"] is not None
    assert load_any_plan(path).digest == found["digest"] and not list(inputs.folder.glob("plan-*.yaml"))
    assert "choice" not in call(*words, "--no-simulate", "--json").json


@pytest.mark.parametrize("top", [1, 3])
def test_an_interrupt_of_the_first_simulation_leaves_the_plans_by_cost(
    inputs: Inputs, call: Call, plans: list[Plan], monkeypatch: pytest.MonkeyPatch, top: int
) -> None:
    asked = list[int]()

    def made(_cluster: Cluster, _workload: Workload, count: int, **_: object) -> list[Plan]:
        return plans[:count]

    def interrupted(*_: object) -> None:
        asked.append(top)
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.plans", made)
    monkeypatch.setattr("simulator.step.simulate_step", interrupted)
    path = inputs.folder / "plan.yaml"
    result = call("plan", "dtfm-10", "gpt-large", *SHORT, "-o", path, "--simulate", "--top", top, "--json")
    assert result.code == 0 and len(asked) == 1 and "choice" not in result.json, result.err
    files = [path, *(path.with_stem(f"plan-{number}") for number in range(2, top + 1))]
    assert [load_any_plan(one).digest for one in files] == [one.digest for one in plans[:top]]
    assert [one["step_s"] for one in result.json.get("plans", [])] == [cost_s(one) for one in plans[: top * (top > 1)]]


def test_nothing_is_chosen_by_simulation_where_the_cost_knows_as_much(inputs: Inputs, call: Call) -> None:
    equal = cluster_and_workload("h100-4dc", "mixtral-8x7b", [])
    shared = cluster_and_workload("dtfm-10", "gpt-large", ["gpu.sharing=2"])
    uneven = cluster_and_workload("dtfm-10", "gpt-large", [])
    endless = cluster_and_workload("dtfm-10", "gpt-large", ["training.micro_batches=100000"])
    assert decides(*uneven) and not any(decides(*one) for one in (equal, shared, endless))
    assert "choice" not in call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml", "--json").json
    asked = call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml", "--json", "--simulate").json
    assert set(asked["choice"]) == {"simulated", "shorter", "dearer"}
