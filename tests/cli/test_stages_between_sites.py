"""What travels between stages: coded, and over trunks that sites share."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_cases import Call, Inputs, in_stages

from hybridep.pipeline import PipelinePlan, load_any_plan
from hybridep.plan import Plan
from planner.sites.others import OTHERS

pytestmark = pytest.mark.timeout(120)


@pytest.mark.turns(4)
def test_coded_activations_and_what_they_cost(inputs: Inputs, call: Call) -> None:
    codec = ("--codec", "dc.activations=int8")
    path, exact = in_stages(inputs, call, "--stages", "2", "--json")
    path, result = in_stages(inputs, call, "--stages", "2", *codec, "--json")
    assert result.code == 0, result.err
    assert result.json["wan_bytes"] < exact.json["wan_bytes"] and result.json["objective_s"] < exact.json["objective_s"]
    [lossy] = result.json["lossy_codecs"]
    assert (lossy["level"], lossy["kind"], lossy["codec"]) == ("dc", "activations", "int8")
    simulated = call("simulate", path, "--json", "--against", "ep")
    assert simulated.code == 0 and simulated.json["step_s"] == pytest.approx(result.json["simulated_s"])
    path, shown = in_stages(inputs, call, "--stages", "auto", *codec)
    assert shown.code == 0 and "lossy on dc: activations int8; final loss" in shown.out
    path, chosen = in_stages(inputs, call, "--stages", "2", "--max-loss", "0.5%", "--json")
    assert chosen.code == 0, chosen.err
    assert "activations" in [one["kind"] for one in chosen.json["lossy_codecs"]]
    assert chosen.json["objective_s"] <= result.json["objective_s"] * 1.001
    assert sum(max(one["final_loss"], 0.0) for one in chosen.json["lossy_codecs"]) <= 0.005
    path, fewer = in_stages(inputs, call, "--stages", "auto", "--fewer-sites", "--max-loss", "0.5%", "--json")
    assert fewer.code == 0, fewer.err


@pytest.mark.turns(2)
def test_codecs_by_their_loss_beside_other_wishes(inputs: Inputs, call: Call) -> None:
    """Several pipelines and the plan without stages, and rates that are not known."""
    loss = ("--max-loss", "0.5%", "--json")
    _, result = in_stages(inputs, call, "--stages", "auto", "--top", "3", *loss)
    assert result.code == 0, result.err
    plans = [load_any_plan(Path(one["output"])) for one in result.json["plans"]]
    assert 1 < len(plans) == len({one.digest for one in plans})
    for entry, plan in zip(result.json["plans"], plans, strict=True):
        lossy = {kind for codecs in plan.codecs.values() for kind in codecs.lossy}
        assert {one["kind"] for one in entry["lossy_codecs"]} == lossy
        # Each stage is one of the two sites.
        assert ("activations" in lossy) == isinstance(plan, PipelinePlan) and ("experts" in lossy) <= isinstance(plan, Plan)
    _, shown = in_stages(inputs, call, "--stages", "auto", "--top", "2", "--max-loss", "0.5%")
    assert shown.code == 0 and "     codecs: dc: activations int8\n" in shown.out
    _, within = in_stages(inputs, call, "--stages", "2", "--within", "0.3", *loss)
    assert within.code == 0, within.err
    _, exact = in_stages(inputs, call, "--stages", "2", "--within", "0.3", "--json")
    assert within.json["robust"]["bound_s"] < exact.json["robust"]["bound_s"]
    assert within.json["robust"]["bound_s"] <= within.json["robust"]["step_s"] < exact.json["robust"]["step_s"]
    assert [one["kind"] for one in within.json["lossy_codecs"]] == ["activations"]
    _, either = in_stages(inputs, call, "--stages", "auto", "--within", "0.3", *loss)
    assert either.code == 0 and either.json["robust"]["step_s"] <= within.json["robust"]["step_s"] * 1.001


def test_other_planners_beside_stages(inputs: Inputs, call: Call) -> None:
    path, result = in_stages(inputs, call, "--stages", "2", "--compare", "--json")
    assert result.code == 0, result.err
    told, plan = result.json["planners"], load_any_plan(path)
    assert set(told) == set(OTHERS) and told["full_gather"]["step_s"] == pytest.approx(result.json["baselines"]["full_gather"])
    assert all(one["gain"] == pytest.approx(one["step_s"] / plan.predicted.step) for one in told.values())
    _, shown = in_stages(inputs, call, "--stages", "2", "--compare")
    assert "other planners, without stages, by who serves whom" in shown.out and "\n  faster_moe: " in shown.out


def test_stages_over_the_trunks_of_a_fabric(inputs: Inputs, call: Call) -> None:
    fabric = inputs.write("fabric.yaml", "name: narrow\nwan: {hub: {bandwidth: 100 kbps}}\n")
    bare, _ = in_stages(inputs, call, "--stages", "2")
    alone = call("simulate", bare, "--json").json["step_s"]
    over = call("simulate", bare, "--json", "--fabric", fabric, "--against", "pipeline")
    path, result = in_stages(inputs, call, "--stages", "2", "--fabric", fabric, "--json")
    assert result.code == 0 and over.code == 0, (result.err, over.err)
    assert load_any_plan(path).cluster.trunks[0].name == "trunk dc0 -> hub"
    simulated = call("simulate", path, "--json").json["step_s"]
    assert simulated == pytest.approx(result.json["simulated_s"], rel=1e-9)
    assert alone < simulated <= over.json["step_s"] * (1 + 1e-9)
