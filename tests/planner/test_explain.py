"""What a plan is explained with."""

from __future__ import annotations

import json

import numpy as np
import pytest
from planner_cases import make_cluster, make_workload, mixing_case

import planner
from hybridep.config import build
from hybridep.plan import Objective, Plan
from hybridep.topology import Cluster
from planner.cost import step_cost
from planner.goal import Goal


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planner.plan(*mixing_case())


def test_neighbours_are_one_move_away_and_slower(plan: Plan) -> None:
    explained = planner.explain(plan)
    *placed, _, _, _ = explained.neighbours
    assert {other.name for other in placed} == {"l0 1", "l0 4", "l1 1", "copies per microbatch"}
    assert [other.name for other in explained.baselines] == ["ep", "full_gather"]
    for other in (*placed, *explained.baselines):
        assert other.step_s >= explained.plan.step_s
    assert explained.plan.domains == plan.layers[0].domains
    assert explained.plan.copies_per_rank == 6  # a domain of 2 x 2 ranks with 2 experts each, less its own


def test_copies_ahead_are_shown_and_their_plan_without(plan: Plan) -> None:
    ahead = plan.with_schedule(prefetch=1)
    for one, name, other in ((plan, "copies ahead (--prefetch)", ahead), (ahead, "copies with their blocks", plan)):
        [shown] = [one for one in planner.explain(one).neighbours if one.name.startswith("copies ") and "per" not in one.name]
        assert shown.name == name and shown.step_s == step_cost(other).step_s
    assert step_cost(ahead).step_s < step_cost(plan).step_s
    group = plan.layers[0].model_copy(update={"domains": {}, "migration": {}})
    without_copies = plan.model_copy(update={"layers": (group,), "prediction": None, "solver": None})
    assert not any("ahead" in one.name for one in planner.explain(without_copies).neighbours)


def test_tokens_in_parts_are_shown_and_their_plan_in_one_piece(plan: Plan) -> None:
    parts = plan.with_schedule(chunks=2)
    for one, name, other in ((plan, "tokens in 2 parts (--chunks)", parts), (parts, "tokens in one piece", plan)):
        [shown] = [one for one in planner.explain(one).neighbours if one.name.startswith("tokens")]
        assert shown.name == name and shown.step_s == step_cost(other).step_s
    assert step_cost(parts).step_s != step_cost(plan).step_s
    assert not any("ahead" in one.name for one in planner.explain(parts).neighbours), "a schedule has one of them"


def test_alternatives_meet_experts_as_popular(plan: Plan) -> None:
    shares = tuple(float(share) for share in np.arange(1, 17) / 136)
    known = planner.plan(plan.cluster, plan.workload, popularity=(shares,) * len(list(plan.each_layer())))
    explained = planner.explain(known)
    found = {other.name: other.step_s for other in explained.baselines}
    assert found == pytest.approx(dict(known.predicted.baselines), rel=1e-9)
    assert found != pytest.approx({other.name: other.step_s for other in planner.explain(plan).baselines}, rel=1e-3)


def test_links_and_bound(plan: Plan) -> None:
    explained = planner.explain(plan)
    assert explained.lower_bound_s == pytest.approx(plan.predicted.bound)
    assert explained.lower_bound_by == explained.binds == explained.links[0].name == "l00 up"
    busy = [link.busy_s for link in explained.links]
    assert busy == sorted(busy, reverse=True)
    assert busy[0] == pytest.approx(explained.lower_bound_s)
    assert sum(explained.parts_s.values()) == pytest.approx(explained.plan.step_s)
    assert sum(explained.memory_parts_bytes.values()) == pytest.approx(explained.plan.memory_bytes)


def test_computation_binds_where_links_are_fast() -> None:
    cluster = make_cluster(2, 2, bandwidths=["100 Gbps", "100 Gbps"], throughput="1 GFLOPS")
    explained = planner.explain(planner.plan(cluster, make_workload()))
    assert explained.binds == explained.lower_bound_by == "computation"


def test_json_is_plain(plan: Plan) -> None:
    data = planner.explain(plan).to_json()
    assert json.loads(json.dumps(data)) == data | {key: list(data[key]) for key in ("baselines", "neighbours", "links")}


def test_summary_is_the_contract(plan: Plan) -> None:
    summary = planner.summary(plan)
    assert set(summary) >= {
        "status", "objective_s", "bound_s", "gap", "solve_s", "domains", "baselines", "memory_bytes"
    }  # fmt: skip
    assert summary["status"] == "feasible" and 0 < summary["gap"] < 0.01
    assert summary["domains"] == {"l0": 2, "l1": 2}
    assert set(summary["baselines"]) == {"ep", "full_gather"}
    assert summary["objective_s"] == pytest.approx(summary["step_s"])
    assert json.loads(json.dumps(summary)) == summary


def test_summary_of_layers_that_differ_lists_groups() -> None:
    cluster, workload = make_cluster(4, 2), make_workload(layers=3)
    data = planner.baseline(cluster, workload, "ep").model_dump(mode="json")
    group = data["layers"][0]
    data["layers"] = [group | {"num_layers": 1}, group | {"first_layer": 1, "num_layers": 2, "domains": {"l0": 2, "l1": 1}}]
    data["prediction"] = None
    mixed = Plan.model_validate(data)
    assert [entry["num_layers"] for entry in planner.summary(mixed)["domains"]] == [1, 2]
    assert "same in all layers" in {other.name for other in planner.explain(mixed).neighbours}


def test_one_site_alone_is_shown_with_the_whole_batch(plan: Plan) -> None:
    found = planner.explain(plan).alone
    assert found is not None and found.name.endswith(" alone") and found.wan_bytes == 0 and found.fits
    own = planner.alone(plan.cluster, plan.workload)
    assert own is not None and own.prediction is not None and found.step_s == own.prediction.step
    training = plan.workload.training
    batch = training.micro_batch_size * training.micro_batches * plan.cluster.num_gpus
    assert own.workload.training.micro_batch_size * own.workload.training.micro_batches * own.cluster.num_gpus == batch
    assert own.cluster.sizes[0] == 1 and planner.alone(own.cluster, own.workload) is None
    first, second = plan.cluster.site_name(0), plan.cluster.site_name(1)
    for rule, name in (
        ({"kind": "forbid", "sites": [first]}, f"{second} alone"),
        ({"kind": "keep_tokens", "sites": [first]}, None),
    ):
        rules = build(planner.Constraints, {"rules": [{"name": "a"} | rule]}, "rules")
        found = planner.explain(plan, rules).alone
        assert (found and found.name) == name
    # The fastest GPUs count.
    sites = [{"name": "slow", "gpu": {"throughput": "1 GFLOPS"}}, {"name": "fast"}, *({"name": name} for name in "cd")]
    uneven = plan.cluster.model_dump(mode="json") | {"sites": sites[: plan.cluster.sizes[0]]}
    best = planner.alone(build(Cluster, uneven, "c"), plan.workload)
    assert best is not None and best.cluster.site_name(0) == "fast"


def test_one_site_alone_is_the_best_for_the_goal(plan: Plan) -> None:
    """The fastest GPUs are not the cheapest ones."""
    data = plan.cluster.model_dump(mode="json", exclude_none=True)
    data["gpu"]["price"] = "1 $/h"
    fast = {"name": "fast", "gpu": {"throughput": "2 TFLOPS", "price": "90 $/h"}}
    data["sites"] = [fast, *({"name": f"cheap{number}"} for number in range(1, data["levels"][0]["size"]))]
    cluster, alone = build(Cluster, data, "c"), {}
    for objective in Objective:
        made = planner.plan(cluster, plan.workload, goal=Goal(objective=objective), time_limit_s=0.5)
        alone[objective] = planner.explain(made).alone
    cheap, fast_one = alone[Objective.DOLLARS], alone[Objective.TIME]
    assert cheap is not None and fast_one is not None
    assert cheap.name.startswith("cheap") and fast_one.name == "fast alone" and cheap.step_s > fast_one.step_s
