"""Several pipelines, pools, figures, reasons, differences, what to buy next, and plans for rates that are not known."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import yaml
from cli_cases import CLUSTER, Call, Inputs, Result

from hybridep.commands.sites_choice import Asked, Staged
from hybridep.commands.stage_choice import StageChoice
from hybridep.commands.stage_explain_text import show_explanation
from hybridep.pipeline import PipelinePlan, StagePlan, load_any_plan
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.units import format_seconds
from hybridep.workload import Workload
from planner import StageWishes, compare_pipelines, explain_pipeline, load_constraints, plan_pipeline
from planner.stages.costs import costed

pytestmark = [pytest.mark.timeout(120), pytest.mark.turns(3)]


FOUR = CLUSTER.replace("100 Mbps", "1 Mbps").replace("name: dc, size: 2", "name: dc, size: 4")
BATCH = ("--set", "training.micro_batches=4", "--set", "model.num_layers=4")


def planned(inputs: Inputs, call: Call, *more: object, cluster: str = FOUR) -> Result:
    site = inputs.write("four.yaml", cluster)
    path = inputs.folder / "plan.yaml"
    return call("plan", site, inputs.workload, *BATCH, "-o", path, "--time-limit", "3", *more)


def test_a_pool_keeps_the_stages_of_the_plan(inputs: Inputs, call: Call) -> None:
    short, path = ("--time-limit", "1"), inputs.folder / "plan.yaml"
    far = ("--set", "training.micro_batches=32", "--set", "levels.dc.latency=20 ms")
    result = planned(inputs, call, "--stages", "2", "--pool", "32", "--max-loss", "0.5%", "--json", *far, "--time-limit", "7")
    assert result.code == 0, result.err
    pool = result.json["pool"]
    assert pool[0]["pays_from"] == pytest.approx(1 / 32) and pool[-1]["pays_to"] == pytest.approx(32) and len(pool) > 1
    made = [load_any_plan(Path(one["output"])) for one in pool]
    assert [one.digest for one in made] == [one["digest"] for one in pool]
    stages = [[(stage.sites, stage.num_layers) for stage in one.stages] for one in made if isinstance(one, PipelinePlan)]
    assert len(stages) == len(made) and all(one == stages[0] for one in stages)
    now = next(one for one in pool if one["pays_from"] <= 1 <= one["pays_to"])
    assert result.json["digest"] == now["digest"] and result.json["output"] == now["output"] == str(path)
    assert {one["kind"] for one in now["lossy_codecs"]} == {one["kind"] for one in result.json["lossy_codecs"]} != set()
    shown = planned(inputs, call, "--stages", "2", "--pool", "32", *short, *far)
    assert shown.code == 0 and "a switch moves no weights" in shown.out and " ahead\n     inside stage 0" in shown.out
    # One layer is no two stages', so all are without; and one site alone has no links to others.
    without = planned(inputs, call, "--stages", "auto", "--pool", "4", "--json", *short, "--set", "model.num_layers=1")
    assert without.code == 0 and without.json["stages"] == [], without.err
    assert without.json["digest"] in [one["digest"] for one in without.json["pool"]]
    alone = planned(inputs, call, "--stages", "auto", "--pool", "4", "--fewer-sites", "--json", *short)
    [only] = alone.json["pool"]
    assert len(alone.json["left_out"]) == 3 and (only["pays_from"], only["pays_to"]) == (0.25, 4.0)


def test_several_pipelines_are_written_the_best_first(inputs: Inputs, call: Call) -> None:
    result = planned(inputs, call, "--stages", "auto", "--top", "3", "--json")
    assert result.code == 0, result.err
    told = result.json["plans"]
    files = [inputs.folder / name for name in ("plan.yaml", "plan-2.yaml", "plan-3.yaml")]
    assert [one["output"] for one in told] == [str(path) for path in files] == sorted(map(str, files), key=len)
    made = [load_any_plan(path) for path in files]
    assert len({one.digest for one in made}) == 3
    assert [one["step_s"] for one in told] == [one.predicted.expected_s for one in made]
    # Those that are expected to take much longer than the best are not simulated.
    simulated = [one["simulated_s"] for one in told if one["simulated_s"] is not None]
    assert simulated == sorted(simulated) and simulated[0] == result.json["simulated_s"] == told[0]["simulated_s"]
    rest = [one["step_s"] for one in told[len(simulated) :]]
    assert rest == sorted(rest)
    again = [call("simulate", path, "--json").json["step_s"] for path in files[: len(simulated)]]
    assert again == pytest.approx(simulated)
    # Four stages of like sites are one plan, and the only one that was asked for is one of several, too.
    only = planned(inputs, call, "--stages", "4", "--top", "3", "--json").json
    assert only["plans"][0] == {name: only[name] for name in ("step_s", "simulated_s", "lossy_codecs", "lossless", "output")}
    shown = planned(inputs, call, "--stages", "2", "--top", "2")
    assert shown.code == 0 and f"2. {files[1]}: " in shown.out and "sites and layers: dc" in shown.out, shown.err
    assert all(len(load_any_plan(path).stages) == 2 for path in files[:2])  # type: ignore[union-attr]


def test_what_was_not_simulated_comes_last_and_nothing_twice(inputs: Inputs, call: Call) -> None:
    assert planned(inputs, call, "--stages", "2").code == 0
    plan = load_any_plan(inputs.folder / "plan.yaml")
    assert isinstance(plan, PipelinePlan)
    asked = Asked(cluster=plan.cluster, workload=plan.workload, wishes=StageWishes())

    def taking(expected_s: float, stages: tuple[StagePlan, ...] = plan.stages) -> PipelinePlan:
        prediction = plan.predicted.model_copy(update={"expected": expected_s})
        return plan.model_copy(update={"prediction": prediction, "stages": stages})

    best, slow, guess, late = (taking(expected_s) for expected_s in (1.0, 4.0, 2.0, 3.0))
    others = (StageChoice(plan=late), StageChoice(plan=best), StageChoice(plan=guess), StageChoice(plan=slow, simulated_s=2.0))
    staged = Staged(asked=asked, chosen=StageChoice(plan=best, simulated_s=1.0, others=others), without=None)
    assert [one.plan for one in staged.top(9)] == [best, slow, guess, late]
    assert [one.plan for one in staged.top(2)] == [best, slow] and [one.plan for one in staged.top(1)] == [best]
    # All sites are alike, so it is no other plan where they change places; with other layers it is.
    last = dict(zip(plan.cluster.site_names, plan.cluster.site_names[::-1], strict=True))
    turned = tuple(stage.model_copy(update={"sites": tuple(map(last.__getitem__, stage.sites))}) for stage in plan.stages)
    again = tuple(stage.model_copy(update={"num_layers": stage.num_layers + 1}) for stage in plan.stages)
    like, different = taking(2.0, turned), taking(2.0, again)
    chosen = StageChoice(plan=best, others=tuple(StageChoice(plan=one) for one in (like, different, guess)))
    found = [one.plan for one in Staged(asked=asked, chosen=chosen, without=None).top(9)]
    assert found == [best, like, different]


@pytest.mark.turns(2)
def test_stages_are_drawn_and_so_is_what_has_none(inputs: Inputs, call: Call) -> None:
    drawn = inputs.folder / "drawn.png"
    assert planned(inputs, call, "--stages", "2", "--figure", drawn).code == 0
    size = drawn.stat().st_size
    assert drawn.read_bytes().startswith(b"\x89PNG") and size > 10_000
    busy = inputs.write("busy.yaml", CLUSTER.replace("100 Mbps", "80 Gbps").replace("10 GFLOPS", "0.01 GFLOPS"))
    options = ("--stages", "auto", "--figure", drawn, "--time-limit", "3", "--json")
    result = call("plan", busy, inputs.workload, "-o", inputs.folder / "plan.yaml", *options)
    assert result.code == 0 and result.json["stages"] == [] and load_any_plan(inputs.folder / "plan.yaml"), result.err
    assert drawn.read_bytes().startswith(b"\x89PNG") and drawn.stat().st_size != size
    names = [f"dc{site}" for site in range(4)]
    pairs = [{"src": src, "dst": dst, "bandwidth": "2 Mbps", "latency": "1 ms"} for src, dst in permutations(names, 2)]
    links = yaml.safe_dump({"sites": [{"name": name} for name in names], "links": pairs})
    vector = inputs.folder / "drawn.svg"
    assert planned(inputs, call, "--stages", "2", "--figure", vector, cluster=FOUR + links).code == 0
    # A matrix of links per pair, in place of bars with a legend of their own.
    assert "legend" not in vector.read_text(encoding="utf-8")


def test_what_to_buy_next_for_a_pipeline(inputs: Inputs, call: Call) -> None:
    slow = FOUR + "sites: [{name: a, up: 0.2 Mbps}, {name: b}, {name: c}, {name: d}]\n"
    result = planned(inputs, call, "--stages", "2", "--upgrades", "--json", cluster=slow)
    assert result.code == 0, result.err
    first, *others = result.json["upgrades"]
    assert first["name"] == "up link of a" and first["gain_s"] > max(one["gain_s"] for one in others)
    assert (first["before"], first["after"]) == ("200 kbps", "400 kbps")
    # A plan for it, made from nothing, takes about as long.
    bought = slow.replace("up: 0.2 Mbps", "up: 0.4 Mbps")
    anew = planned(inputs, call, "--stages", "2", "--json", cluster=bought)
    assert first["planned_anew_s"] == pytest.approx(anew.json["step_s"], rel=0.05)
    shown = planned(inputs, call, "--stages", "2", "--upgrades", cluster=slow)
    assert shown.code == 0 and "what to buy next" in shown.out and "up link of a, 200 kbps to 400 kbps: " in shown.out
    assert "stage  sites" in shown.out and "plan written to" in shown.out


def poor_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is found in the time limit is a pipeline of two stages."""

    found: list[PipelinePlan] = []

    def poor(cluster: Cluster, workload: Workload, wishes: StageWishes, number: int, **_: object) -> list[PipelinePlan]:
        if not found:
            found.append(plan_pipeline(cluster, workload, replace(wishes, stages=2), time_limit_s=60))
        return list(found)

    monkeypatch.setattr("planner.plan_pipelines", poor)


def test_what_is_found_without_an_upgrade_is_written(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    poor_search(monkeypatch)
    first = inputs.folder / "first.yaml"
    before = planned(inputs, call, "--stages", "auto", "--json", "-o", first)
    assert len(before.json["stages"]) == 2, before.err
    drawn, options = inputs.folder / "drawn.png", ("--stages", "auto", "--upgrades", "--explain", "--top", "2")
    result = planned(inputs, call, *options, "--figure", drawn, "--json")
    assert result.code == 0 and drawn.exists(), result.err
    path, told = inputs.folder / "plan.yaml", result.json
    written = load_any_plan(path)
    assert isinstance(written, PipelinePlan) and len(written.stages) == len(told["stages"]) > 2
    now_s, before_s = (one["simulated_s"] for one in (told, before.json))
    assert f"searched on for upgrades: a step of {format_seconds(now_s)} in place of {format_seconds(before_s)}" in result.err
    assert now_s < before_s and now_s == pytest.approx(call("simulate", path, "--json").json["step_s"])
    # All that is told is told of what is written; what it is better than comes next.
    own_s = costed(written).times.step_s
    assert told["step_s"] == written.predicted.expected_s == pytest.approx(own_s) and told["bound_s"] <= own_s
    assert [one["output"] for one in told["plans"]] == [str(path), str(inputs.folder / "plan-2.yaml")]
    assert load_any_plan(inputs.folder / "plan-2.yaml").digest == load_any_plan(first).digest
    assert told["explanation"] == json.loads(json.dumps(explain_pipeline(written).to_json()))
    for one in told["upgrades"]:
        assert one["as_it_is_s"] <= own_s * (1 + 1e-9) and one["present_s"] == pytest.approx(own_s)


@pytest.mark.turns(2)
def test_what_takes_longer_in_simulation_is_not_written(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    poor_search(monkeypatch)
    simulated: list[int] = []

    def simulated_s(plan: PipelinePlan) -> float:
        simulated.append(len(plan.stages))
        return float(len(plan.stages))

    for module in ("stage_choice", "sites_choice"):
        monkeypatch.setattr(f"hybridep.commands.{module}.simulated_s", simulated_s)
    result = planned(inputs, call, "--stages", "auto", "--upgrades", "--json")
    assert result.code == 0 and simulated[0] == 2 < simulated[-1], result.err
    assert len(load_any_plan(inputs.folder / "plan.yaml").stages) == len(result.json["stages"]) == 2  # type: ignore[union-attr]
    assert "searched on" not in result.err
    assert result.json["upgrades"][0]["present_s"] < 0.99 * result.json["step_s"]


def test_what_to_buy_next_where_stages_do_not_pay(inputs: Inputs, call: Call) -> None:
    busy = CLUSTER.replace("100 Mbps", "80 Gbps").replace("10 GFLOPS", "0.01 GFLOPS")
    result = planned(inputs, call, "--stages", "auto", "--upgrades", "--within", "0.1", "--json", cluster=busy)
    assert result.code == 0 and result.json["stages"] == [], result.err
    assert {one["name"] for one in result.json["upgrades"]} >= {"up link of dc0", "memory of every rank"}
    assert len(result.json["robust"]["steps_s"]) == 9


def test_an_interrupted_search_for_upgrades_leaves_the_plan(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("planner.pipeline_upgrades", "planner.searched_on"):
        monkeypatch.setattr(name, interrupted)
        result = planned(inputs, call, "--stages", "2", "--upgrades")
        assert result.code == 130 and "interrupted; plan written" in result.err
        (inputs.folder / "plan.yaml").unlink()


@pytest.mark.turns(2)
def test_pipelines_for_rates_that_are_not_known(inputs: Inputs, call: Call) -> None:
    other = inputs.write("other.yaml", FOUR.replace("bandwidth: 1 Mbps", "bandwidth: 0.3 Mbps"))
    result = planned(inputs, call, "--stages", "2", "--scenario", other, "--within", "0.5", "--quantile", "0.9", "--json")
    assert result.code == 0, result.err
    told = result.json["robust"]
    assert len(told["steps_s"]) == len(told["nominal_steps_s"]) == 10 and told["quantile"] == 0.9
    assert told["bound_s"] <= told["step_s"] <= told["nominal_step_s"] and told["step_s"] == sorted(told["steps_s"])[8]
    assert told["steps_s"][0] == max(told["steps_s"]) > 2 * result.json["step_s"]
    plan = load_any_plan(inputs.folder / "plan.yaml")
    assert isinstance(plan, PipelinePlan) and plan.cluster.levels[0].bandwidth == 1e6 / 8
    shown = planned(inputs, call, "--stages", "auto", "--within", "0.5")
    assert shown.code == 0 and "over 9 scenarios, at quantile 1: " in shown.out and "(no pipeline below " in shown.out
    assert "the plan for the nominal rates: " in shown.out, shown.err


@pytest.mark.parametrize("option", ["--upgrades", "--within=0.2", "--scenario=other.yaml"])
def test_which_sites_pay_is_asked_of_links_as_they_are(inputs: Inputs, call: Call, option: str) -> None:
    result = planned(inputs, call, "--stages", "auto", "--fewer-sites", option)
    assert result.code == 2 and f"--fewer-sites: not with {option.split('=')[0]}: which sites pay" in result.err
    assert not (inputs.folder / "plan.yaml").exists()


def test_reasons_for_a_pipeline_are_told(inputs: Inputs, call: Call) -> None:
    rules = inputs.write("rules.yaml", "rules: [{name: apart, kind: no_link, sites: [dc0], to: [dc3]}]\n")
    result = planned(inputs, call, "--stages", "2", "--explain", "--json", "--constraints", rules)
    assert result.code == 0, result.err
    plan, told = load_any_plan(inputs.folder / "plan.yaml"), result.json["explanation"]
    assert isinstance(plan, PipelinePlan)
    assert told == json.loads(json.dumps(explain_pipeline(plan, load_constraints(rules)).to_json()))
    assert told["plan"]["step_s"] == result.json["step_s"] and told["plan"]["allowed"] and told["alternatives"]
    assert "explanation" not in planned(inputs, call, "--stages", "2", "--json").json
    shown = planned(inputs, call, "--stages", "2", "--explain", "--constraints", rules)
    assert shown.code == 0, shown.err
    # Found by a search with a time limit, it may be another plan.
    plan = load_any_plan(inputs.folder / "plan.yaml")
    assert isinstance(plan, PipelinePlan)
    again = explain_pipeline(plan, load_constraints(rules))
    for one in again.alternatives:
        lines = [line for line in shown.out.splitlines() if line.strip().startswith(one.name)]
        assert any(format_seconds(one.step_s) in line and f"x {one.ratio:.2f}" in line for line in lines), one.name
        assert any(f"{one.name}: " in line and any(word in line for word in ("longer", "shorter", "fast")) for line in lines)
    assert f"what binds: {again.binds}; busiest stage: {again.stage.number}, for" in shown.out
    assert again.links[0].name in shown.out and f"({again.fullest_rank}, stage {again.fullest_stage})" in shown.out
    plain = planned(inputs, call, "--stages", "2").out
    assert "what binds" not in plain and "alternatives" not in plain


def test_reasons_where_no_stages_are_better(inputs: Inputs, call: Call) -> None:
    busy = CLUSTER.replace("100 Mbps", "80 Gbps").replace("10 GFLOPS", "0.01 GFLOPS")
    site, path = inputs.write("busy.yaml", busy), inputs.folder / "plan.yaml"
    words = ("plan", site, inputs.workload, "-o", path, "--time-limit", "2", "--stages", "auto")
    assert "longer" not in call(*words).out
    whole = call(*words, "--explain")
    assert whole.code == 0 and "longer: " in whole.out and "without stages" in whole.out
    told = call(*words, "--explain", "--json").json
    assert told["stages"] == [] and {"neighbours", "baselines"} <= set(told["explanation"])
    assert "explanation" not in call(*words, "--json").json


def test_what_would_be_better_is_said(capfd: pytest.CaptureFixture[str], inputs: Inputs, call: Call) -> None:
    """Of a plan that runs less far ahead than it should, and of one for dollars."""
    assert planned(inputs, call, "--stages", "4").code == 0
    made = load_any_plan(inputs.folder / "plan.yaml")
    assert isinstance(made, PipelinePlan)
    found = explain_pipeline(made.running_ahead(1))
    best = min(found.alternatives, key=lambda one: one.step_s)
    slow = replace(found, better=(best.name,), plan=replace(found.plan, step_s=best.step_s + 2.0))
    show_explanation(slow)
    assert f"{best.name} is expected to be faster by 2 s: the search" in capfd.readouterr().out
    cheap = replace(best, step_s=found.plan.step_s + 1, step_usd=1.0)
    none = replace(cheap, step_usd=0.5, fits=False, allowed=False)
    dear = replace(found.plan, step_usd=3.0)
    # One that is possible and one that is not may have the same name.
    show_explanation(replace(found, better=(cheap.name,), plan=dear, alternatives=(cheap, none)))
    out = capfd.readouterr().out
    assert f"{cheap.name} is expected to be cheaper by 2 $" in out and "does not fit breaks a rule" in out and "price" in out
    assert out.count("is expected to be") == 1


def test_plans_in_stages_are_compared_with_any(inputs: Inputs, call: Call) -> None:
    path, other, soon = inputs.folder / "plan.yaml", inputs.folder / "other.yaml", ("--time-limit", "1")
    assert planned(inputs, call, *soon, "--stages", "4").code == 0
    path.rename(other)
    assert planned(inputs, call, *soon, "--stages", "2").code == 0
    first, second = load_any_plan(other), load_any_plan(path)
    found = call("plan", "--compare", other, path, "--json")
    assert found.code == 0, found.err
    assert found.json == json.loads(json.dumps(compare_pipelines(first, second).to_json()))
    assert found.json["stages"] == [4, 2] and found.json["step_s"][0] == first.predicted.expected_s
    shown = call("plan", "--compare", other, path)
    for words in ("other.yaml", "plan.yaml", "micro-batches", "forwards ahead", "(stage 2) -> ", "at other sites", "fast"):
        assert words in shown.out, words
    flat = inputs.folder / "flat.yaml"
    assert call("plan", inputs.folder / "four.yaml", inputs.workload, *BATCH, "-o", flat, *soon).code == 0
    mixed = call("plan", "--compare", flat, path)
    assert mixed.code == 0 and "-> layer" in mixed.out and "stage_work" in mixed.out and "pre_expert" in mixed.out
    fewer = planned(inputs, call, *soon, "--stages", "auto", "--fewer-sites", "--json")
    assert fewer.json["left_out"]
    less = call("plan", "--compare", other, path)
    assert less.code == 0 and "-> left out" in less.out, less.err
    one = load_any_plan(path)
    assert isinstance(one, Plan)
    less = call("plan", "--compare", flat, path, "--json")
    assert less.code == 0 and less.json["sites"] == [4, len(one.cluster.site_names)], less.err
    assert [*less.json["stages"], *less.json["ahead"]] == [1, 1, None, None]
    assert less.json["step_s"][1] == one.predicted.expected_s
    refused = call("plan", "--compare", other, path, "--stages", "2")
    assert refused.code == 2 and "not where --compare is given two plan files" in refused.err
    assert planned(inputs, call, *soon, "--stages", "2", "--set", "model.num_experts=8").code == 0
    refused = call("plan", "--compare", other, path)
    assert refused.code == 2 and "num_experts" in refused.err and len(refused.err.strip().splitlines()) == 1
