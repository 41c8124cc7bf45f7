"""Plans in stages on the command line: planned, simulated, trained, and what does not go together."""

from __future__ import annotations

import json
import time
from itertools import permutations
from typing import Any

import pytest
from cli_cases import CLUSTER, SLOW, Call, Inputs, in_stages, shell

from hybridep.commands.sites_choice import Asked, Staged, _better, in_one, plan_sites
from hybridep.commands.stage_choice import StageChoice, best_simulated, simulated_s
from hybridep.commands.stage_choice import in_stages as stages_in_time
from hybridep.errors import InfeasibleError, UserError
from hybridep.pipeline import AnyPlan, PipelinePlan, load_any_plan
from hybridep.topology import Cluster
from hybridep.units import format_dollars, format_seconds
from hybridep.workload import Workload
from planner import StageWishes, alone
from planner.clock import now_s
from planner.goal import FASTEST
from planner.stages.fewer import Paying
from simulator.errors import PipelineError
from simulator.pipeline import simulate_any
from simulator.precision import EXACTLY, Precision

pytestmark = pytest.mark.timeout(120)


def test_a_pipeline_has_the_keys_of_the_contract(inputs: Inputs, call: Call) -> None:
    path, result = in_stages(inputs, call, "--stages", "2", "--json")
    assert result.code == 0, result.err
    wanted = {"status", "objective_s", "bound_s", "gap", "solve_s", "domains", "baselines", "memory_bytes", "output"}
    assert wanted <= set(result.json) and set(result.json["baselines"]) == {"ep", "full_gather"}
    plan = load_any_plan(path)
    assert isinstance(plan, PipelinePlan) and plan.digest == result.json["digest"]
    assert [stage["sites"] for stage in result.json["stages"]] == [list(stage.sites) for stage in plan.stages]
    simulated = call("simulate", path, "--json", "--against", "ep,pipeline", "--trace", inputs.folder / "trace.json")
    assert simulated.code == 0, simulated.err
    assert {"step_s", "wall_s", "baselines", "busiest_link"} <= set(simulated.json)
    assert simulated.json["step_s"] == pytest.approx(result.json["objective_s"], rel=0.02)
    assert set(simulated.json["baselines"]) == {"ep", "pipeline"}
    assert simulated.json["busiest_link"]["name"].endswith((" up", " down"))
    events = json.loads((inputs.folder / "trace.json").read_text())["traceEvents"]
    assert {"pre_expert", "expert_backward", "activations"} <= {event["cat"] for event in events if event["ph"] == "X"}
    other = call("simulate", path, "--json", "--set", "cluster.levels.dc.bandwidth='0.1 Mbps'")
    assert other.json["step_s"] > 2 * simulated.json["step_s"]


def test_stages_are_shown_to_people(inputs: Inputs, call: Call) -> None:
    path, result = in_stages(inputs, call, "--stages", "auto")
    assert result.code == 0, result.err
    for words in (
        "2 stages",
        "micro-batches",
        "in flight",
        "sequences",
        "without stages",
        "full_gather",
        "layers of it",
        "no pipeline is faster",
    ):
        assert words in result.out, words
    assert "does not fit" not in result.out
    plan = load_any_plan(path)
    assert isinstance(plan, PipelinePlan) and plan.prediction is not None
    room = f"gpu.memory={int(plan.prediction.memory_bytes) + 1} B"
    tight = in_stages(inputs, call, "--stages", "2", "--set", room)[1]
    assert tight.code == 0 and tight.out.count("does not fit") == 2, tight.out + tight.err
    shown = call("simulate", path, "--against", "full_gather")
    assert shown.code == 0 and "bubble" in shown.out and "the plan's own prediction" in shown.out


def test_auto_takes_no_stages_where_those_are_slower(inputs: Inputs, call: Call) -> None:
    # Computation is all that counts: what stages save is less than their bubble.
    busy = CLUSTER.replace("100 Mbps", "80 Gbps").replace("10 GFLOPS", "0.01 GFLOPS")
    path, result = in_stages(inputs, call, "--stages", "auto", "--json", cluster=busy)
    assert result.code == 0, result.err
    assert result.json["stages"] == [] and load_any_plan(path).digest == result.json["digest"]
    one_site = CLUSTER.replace("name: dc, size: 2", "name: dc, size: 1")
    path, result = in_stages(inputs, call, "--stages", "auto", "--json", cluster=one_site)
    assert result.code == 0 and result.json["stages"] == [] and load_any_plan(path).cluster.sizes[0] == 1


def test_the_cheapest_with_or_without_stages(inputs: Inputs, call: Call) -> None:
    priced = SLOW.replace("bandwidth: 1 Mbps", "bandwidth: 1 Mbps, egress: 0.05 $/GB")
    assert priced != SLOW
    free = in_stages(inputs, call, "--stages", "auto", "--fewer-sites", "--objective", "dollars", cluster=priced)[1]
    assert free.code == 0 and "is cheaper than 0 $ (gap 0%)" in free.out, free.out + free.err
    path, result = in_stages(inputs, call, "--stages", "auto", "--objective", "dollars", "--json", cluster=priced)
    assert result.code == 0, result.err
    plan = load_any_plan(path)
    assert plan.prediction is not None and plan.prediction.cost == pytest.approx(result.json["step_usd"])
    path, result = in_stages(inputs, call, "--stages", "2", "--objective", "dollars", "--json", cluster=priced)
    plan = load_any_plan(path)
    assert isinstance(plan, PipelinePlan) and plan.solver is not None and plan.solver.cost_bound is not None
    assert result.json["gap"] == plan.solver.gap != pytest.approx(1 - result.json["bound_s"] / result.json["step_s"])
    assert (result.json["minimised"], result.json["cost_bound_usd"]) == ("dollars", plan.solver.cost_bound)
    shown = in_stages(inputs, call, "--stages", "2", "--objective", "dollars", cluster=priced)[1]
    assert f"no pipeline is cheaper than {format_dollars(plan.solver.cost_bound)} (gap {plan.solver.gap:.0%})" in shown.out
    path, shown = in_stages(inputs, call, "--stages", "2", "--budget", "1 $", cluster=priced)
    assert shown.code == 0 and "price of a step: " in shown.out
    path.unlink()
    path, result = in_stages(inputs, call, "--stages", "2", "--budget", "0.0000000001 $", cluster=priced)
    assert result.code == 3 and "raise --budget" in result.err and not path.exists()


@pytest.mark.turns(2)
def test_rules_hold_in_stages_or_stages_are_left_out(inputs: Inputs, call: Call) -> None:
    def rules(text: str) -> tuple[str, str]:
        name = text.split(",")[0].split()[-1]
        return "--constraints", str(inputs.write(f"{name}.yaml", f"rules:\n  - {text}\n"))

    barred = rules("{name: not-here, kind: forbid, sites: [dc0], experts: 0-1}")
    path, result = in_stages(inputs, call, "--stages", "2", *barred)
    assert result.code == 3 and "in a stage of dc0, rule 'not-here' cannot be kept: expert 0" in result.err and not path.exists()
    path, result = in_stages(inputs, call, "--stages", "auto", "--json", *barred)
    assert result.code == 0 and result.json["stages"] == [] and "'not-here' cannot be kept" in result.err
    assert (load_any_plan(path).placed[0].placement.serve[0][:, :2] == 1).all()
    path.unlink()
    apart = rules("{name: repair, kind: no_link, sites: [dc0], to: [dc1]}")
    path, result = in_stages(inputs, call, "--stages", "2", *apart)
    assert result.code == 3 and "none passes tokens where rules ('repair') forbid it" in result.err and not path.exists()
    stays = rules("{name: stays, kind: keep_tokens, sites: [dc1]}")
    path, result = in_stages(inputs, call, "--stages", "2", *stays)
    assert result.code == 3 and "rule 'stays' cannot be kept in stages" in result.err and not path.exists()
    coded = ("--codec", "dc.tokens=int8")
    path, result = in_stages(inputs, call, "--stages", "auto", "--json", *stays, *coded)
    assert result.code == 0 and result.json["stages"] == [] and load_any_plan(path)
    assert [one["kind"] for one in result.json["lossy_codecs"]] == ["tokens"]
    assert "lossy on dc: tokens int8" in in_stages(inputs, call, "--stages", "auto", "--time-limit", "1", *stays, *coded)[1].out
    four = SLOW.replace("name: dc, size: 2", "name: dc, size: 4")
    path, result = in_stages(inputs, call, "--stages", "2", "--json", *barred, cluster=four)
    assert result.code == 0, result.err
    plan = load_any_plan(path)
    assert isinstance(plan, PipelinePlan)
    [stage] = [made for made, one in zip(plan.plans, plan.stages, strict=True) if "dc0" in one.sites]
    assert stage.cluster.sizes[0] > 1 and stage.layers[0].serving


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--stages", "1"), "--stages 1: write auto, or a number from 2"),
        (("--stages", "many"), "--stages many"),
        (("--stages", "3"), "3 stages for 2 sites"),
        (("--stages", "2", "--prefetch"), "--prefetch: not with --stages"),
        (("--stages", "2", "--chunks", "2"), "--chunks: not with --stages"),
        (("--stages", "2", "--pool", "2", "--top", "2"), "--top: not with --pool"),
        (("--stages", "2", "--compare", "--fewer-sites"), "--compare: not with --fewer-sites: other planners choose no sites"),
        (("--stages", "2", "--simulate"), "--simulate: not with --stages"),
        (("--stages", "2", "--no-simulate"), "--no-simulate: not with --stages"),
        (("--stages", "2", "--codec", "gpu.activations=int8"), "give dc.activations, and --stages"),
        (("--codec", "dc.activations=int8"), "give dc.activations, and --stages"),
        (("--stages", "2", "--objective", "dollars"), "nothing has a price"),
        (("--stages", "2", "--set", "gpu.memory=100 kB"), "raise gpu.memory"),
        (("--stages", "auto", "--set", "gpu.memory=100 kB"), "in stages neither: pipeline over two: no number of stages"),
    ],
)
def test_what_does_not_go_with_stages(inputs: Inputs, call: Call, options: tuple[str, ...], words: str) -> None:
    path, result = in_stages(inputs, call, *options)
    assert result.code in (2, 3) and words in result.err and not path.exists()
    assert len(result.err.strip().splitlines()) <= 2


@pytest.mark.turns(2)
def test_sites_that_do_not_pay_are_left_out(inputs: Inputs, call: Call) -> None:
    path, told = in_stages(inputs, call, "--stages", "auto")
    assert "dc0 alone is faster" in told.out and "--fewer-sites" in told.out and "dc0 alone   " in told.out
    shown = call("plan", inputs.folder / "slow.yaml", inputs.workload, "-o", path)
    assert "dc0 alone is faster" in shown.out and "--fewer-sites" in shown.out
    path, result = in_stages(inputs, call, "--stages", "auto", "--fewer-sites", "--json")
    assert result.code == 0, result.err
    assert result.json["left_out"] == ["dc1"] and "for dc0; without dc1" in result.err
    assert 0.5 * result.json["expected_s"] < result.json["least_of_any_sites_s"] <= result.json["expected_s"]
    plan = load_any_plan(path)
    assert plan.cluster.sizes[0] == 1 and plan.workload.training.micro_batches == 2 and result.json["wan_bytes"] == 0
    simulated = call("simulate", path, "--json")
    assert simulated.code == 0 and simulated.json["step_s"] == pytest.approx(result.json["expected_s"], rel=0.05)
    # Much to compute and fast links: all sites pay, and nothing is said.
    busy = CLUSTER.replace("100 Mbps", "80 Gbps").replace("10 GFLOPS", "0.01 GFLOPS")
    path, result = in_stages(inputs, call, "--stages", "auto", "--fewer-sites", cluster=busy)
    assert result.code == 0 and "alone is" not in result.out and "without dc" not in result.err
    assert "no plan for any of the sites is faster than" in result.out
    # Where there is nothing to leave out, the plan is for all.
    one_site = SLOW.replace("name: dc, size: 2", "name: dc, size: 1")
    path, result = in_stages(inputs, call, "--stages", "auto", "--fewer-sites", "--json", cluster=one_site)
    assert result.code == 0 and result.json["left_out"] == [] and load_any_plan(path), result.err
    uneven = SLOW + "sites: [{name: a, tokens: 3}, {name: b}]\n"
    options = ("--stages", "auto", "--fewer-sites", "--json", "--set", "training.micro_batch_size=2")
    path, result = in_stages(inputs, call, *options, cluster=uneven)
    # Also one that takes a share of its own: the other one has the whole batch.
    assert result.code == 0 and result.json["left_out"] == ["b"] and load_any_plan(path).cluster.site_names == ("a",), result.err
    assert 0 < result.json["least_of_any_sites_s"] <= result.json["expected_s"]
    # Rules choose: of two sites that are alike one may not have an expert, or its tokens may not leave it.
    rules = inputs.write("rules.yaml", "rules: [{name: not-here, kind: forbid, sites: [dc0], experts: '0'}]\n")
    options = ("--stages", "auto", "--fewer-sites", "--json", "--constraints", str(rules))
    path, result = in_stages(inputs, call, *options)
    assert result.code == 0 and result.json["left_out"] == ["dc0"], result.err
    rules.write_text("rules: [{name: stay, kind: keep_tokens, sites: [dc0]}]\n")
    path, result = in_stages(inputs, call, *options)
    assert result.code == 0 and result.json["left_out"] == [] and "'stay' cannot be kept in stages" in result.err, result.err
    assert result.json["alone_s"] is None
    path.unlink()
    for options, words in (
        (("--fewer-sites",), "--fewer-sites: give --stages, too"),
        (("--fewer-sites", "--stages", "2", "--constraints", str(rules)), "'stay' cannot be kept in stages"),
        (("--fewer-sites", "--stages", "3"), "3 stages for 2 sites"),
    ):
        path, result = in_stages(inputs, call, *options)
        assert result.code in (2, 3) and words in result.err and not path.exists()


def test_one_site_alone_is_of_all_sites_where_some_are_left_out(
    inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer sites have smaller micro-batches, in which one alone is slower."""
    three = CLUSTER.replace("size: 2", "size: 3").replace("5 GB/s", "5 GB/s, block_overhead: 10 ms")
    whole = list[Asked]()

    def for_two(asked: Asked, **_: object) -> Staged:
        whole.append(asked)
        two = asked.among(("dc0", "dc1"))
        return Staged(asked=two, chosen=StageChoice(plan=in_one(two, 1.0)), without=None, left_out=("dc2",))

    monkeypatch.setattr("hybridep.commands.sites_choice.plan_sites", for_two)
    options = ("--stages", "auto", "--fewer-sites", "--set", "training.micro_batch_size=4")
    result = in_stages(inputs, call, *options, "--json", cluster=three)[1]
    own = alone(whole[0].cluster, whole[0].workload)
    assert own is not None and result.json["alone_s"] == pytest.approx(own.predicted.expected_s, rel=1e-12)
    shown = in_stages(inputs, call, *options, cluster=three)[1].out
    [row] = [line.split() for line in shown.splitlines() if line.startswith("dc0 alone ")]
    assert " ".join(row[2:4]) == format_seconds(own.predicted.step)


@pytest.mark.turns(4)
def test_time_that_is_left_goes_to_all_sites(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the wrong ones were chosen; nothing is tried where no time is left."""
    busy = CLUSTER.replace("100 Mbps", "80 Gbps").replace("10 GFLOPS", "0.01 GFLOPS")
    asked = list[float]()

    def one_site(cluster: Cluster, workload: Workload, wishes: StageWishes, **limits: Any) -> Any:
        asked.append(limits["time_limit_s"])
        time.sleep(0.0 if len(asked) == 1 else 4.5)
        return Paying(sites=("dc0",), fewer=None)

    monkeypatch.setattr("planner.sites_that_pay", one_site)
    options = ("--stages", "auto", "--fewer-sites", "--json", "--set", "training.micro_batches=4")
    path, result = in_stages(inputs, call, *options, cluster=busy)
    assert result.code == 0 and "after all, for all sites" in result.err, result.err
    assert result.json["left_out"] == [] and isinstance(load_any_plan(path), PipelinePlan)
    assert result.json["objective_s"] < result.json["alone_s"]
    path, result = in_stages(inputs, call, *options, cluster=busy)
    assert result.code == 0 and result.json["left_out"] == ["dc1"] and "after all" not in result.err
    # An interrupt meanwhile loses nothing.
    asked.clear()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridep.commands.sites_choice.in_stages", interrupted)
    path, result = in_stages(inputs, call, *options, cluster=busy)
    assert result.code == 0 and result.json["left_out"] == ["dc1"] and load_any_plan(path).cluster.sizes[0] == 1


def test_the_plan_for_fewer_sites_counts_to_the_end(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all were chosen and one is faster after all."""

    def every_site(cluster: Cluster, workload: Workload, wishes: StageWishes, **_: Any) -> Any:
        return Paying(sites=("dc0", "dc1"), fewer=alone(cluster, workload))

    monkeypatch.setattr("planner.sites_that_pay", every_site)
    path, result = in_stages(inputs, call, "--stages", "auto", "--fewer-sites", "--json")
    assert result.code == 0 and "after all, for dc0; without dc1" in result.err, result.err
    assert result.json["left_out"] == ["dc1"] and load_any_plan(path).cluster.sizes[0] == 1 and result.json["alone_s"] is None
    shown = in_stages(inputs, call, "--stages", "2", "--fewer-sites")[1]
    assert "after all" in shown.err and "no pipeline of 2 stages or more for any of the sites is faster than" in shown.out
    busy = CLUSTER.replace("100 Mbps", "80 Gbps").replace("10 GFLOPS", "0.01 GFLOPS")
    path, result = in_stages(inputs, call, "--stages", "auto", "--fewer-sites", "--json", cluster=busy)
    assert result.json["left_out"] == [] and "after all" not in result.err


def test_simulations_of_stages_say_what_they_cannot(inputs: Inputs, call: Call) -> None:
    path, _ = in_stages(inputs, call, "--stages", "2")
    result = call("simulate", path, "--set", "micro_batches=7")
    assert result.code == 2 and "micro-batches leave" in result.err
    damaged = inputs.write("damaged.yaml", path.read_text().replace("num_layers: 1", "num_layers: 2", 1))
    result = call("simulate", damaged)
    assert result.code == 2 and "the model has 2" in result.err


@pytest.mark.turns(2)
def test_pipelines_in_scenarios(inputs: Inputs, call: Call) -> None:
    four = SLOW.replace("name: dc, size: 2", "name: dc, size: 4")
    path, _ = in_stages(inputs, call, "--stages", "2", cluster=four)
    plain = call("simulate", path, "--json", "--against", "tutel").json
    routed = call("simulate", path, "--json", "--routing", "zipf:1.2")
    assert routed.code == 0 and routed.json["step_s"] != plain["step_s"] and plain["baselines"]["tutel"] > 0
    half = "conditions: {changes: [{links: 'dc? *', factor: 0.5}]}"
    scenario = inputs.write("scenario.yaml", f"plan: {path}\n{half}\ncourse: {{steps: 3}}\n")
    found = call("simulate", scenario, "--json")
    assert found.code == 0, found.err
    assert found.json["step_s"] > 1.5 * plain["step_s"] and found.json["bubble_s"] >= 0
    assert found.json["run"]["steps_run"] == 3 and found.json["run"]["total_s"] == pytest.approx(3 * found.json["step_s"])
    table = inputs.folder / "table.csv"
    grid = f"plan: {path}\ngrid: {{cluster.levels.dc.bandwidth: [1 Mbps, 4 Mbps]}}\n"
    swept = call("simulate", inputs.write("grid.yaml", grid), "--json", "--out", table, "--jobs", "1")
    assert swept.code == 0 and float(swept.json["rows"][0]["step_s"]) == pytest.approx(plain["step_s"])
    anew = f"plan: stages\nplanning_time: 2 \ncluster: {inputs.folder / 'slow.yaml'}\nworkload: {inputs.workload}\n"
    made = call("simulate", inputs.write("anew.yaml", anew))
    assert made.code == 0 and "bubble" in made.out


@pytest.mark.turns(3)
def test_a_run_in_stages_and_resuming_without(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "stages.yaml"
    assert call("plan", inputs.cluster, inputs.workload, "-o", path, "--stages", "2").code == 0
    plain = shell("train", inputs.run, "--local", "--json", "--set", f"output={inputs.folder / 'plain'}")
    parts = ("--set", f"output={inputs.folder / 'parts'}")
    first = shell("train", inputs.run, "--local", "--json", *parts, "--set", "steps=2", "--set", f"plan={path}")
    assert first.code == 0, first.err
    assert first.json["losses"] == pytest.approx(plain.json["losses"][:2], rel=1e-5)
    assert first.json["wan_bytes_per_step"] == pytest.approx(first.json["planned_wan_bytes_per_step"], rel=1e-6)
    assert load_any_plan(inputs.folder / "parts" / "plan.yaml").digest == first.json["plan"]
    second = shell("train", inputs.run, "--local", "--json", *parts, "--set", "plan=ep", "--resume")
    assert second.code == 0, second.err
    assert second.json["losses"] == pytest.approx(plain.json["losses"][2:], rel=1e-4)
    lost = shell(
        "train",
        inputs.run,
        "--local",
        "--json",
        *parts,
        "--set",
        f"plan={path}",
        environment={"HYBRIDEP_FAULT": "kill:rank=1,step=3"},
    )
    assert lost.code == 5 and "rank 1" in lost.err


@pytest.mark.turns(3)
def test_a_run_that_plans_stages_and_one_on_fewer_sites(inputs: Inputs, call: Call) -> None:
    plain = shell("train", inputs.run, "--local", "--json", "--set", f"output={inputs.folder / 'plain'}")
    parts = ("--set", f"output={inputs.folder / 'parts'}")
    made = shell("train", inputs.run, "--local", "--json", *parts, "--set", "steps=1", "--set", "plan=stages")
    assert made.code == 0 and made.json["losses"] == pytest.approx(plain.json["losses"][:1], rel=1e-5)
    assert isinstance(load_any_plan(inputs.folder / "parts" / "plan.yaml"), PipelinePlan)
    fewer = inputs.folder / "fewer.yaml"
    assert call("plan", inputs.cluster, inputs.workload, "-o", fewer, "--stages", "auto", "--fewer-sites").code == 0
    assert load_any_plan(fewer).cluster.num_gpus == 1
    less = ("--set", f"output={inputs.folder / 'fewer'}")
    one = shell("train", inputs.run, "--local", "--json", *less, "--set", "steps=2", "--set", f"plan={fewer}")
    assert one.code == 0, one.err
    assert one.json["losses"] == pytest.approx(plain.json["losses"][:2], rel=1e-5)
    both = shell("train", inputs.run, "--local", "--json", *less, "--set", "plan=ep", "--resume")
    assert both.code == 0 and both.json["losses"] == pytest.approx(plain.json["losses"][2:], rel=1e-4)


def test_an_interrupt_after_planning_loses_nothing(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.alone", interrupted)
    path, result = in_stages(inputs, call, "--stages", "2")
    assert result.code == 130 and f"interrupted; plan written to {path}" in result.err and load_any_plan(path)
    # Nor one before the first plan for the sites that pay, once one for fewer is known.
    monkeypatch.undo()
    monkeypatch.setattr(
        "planner.sites_that_pay",
        lambda cluster, workload, *_, **__: Paying(sites=("dc0", "dc1"), fewer=alone(cluster, workload)),
    )
    monkeypatch.setattr("hybridep.commands.sites_choice._with_and_without", interrupted)
    path, result = in_stages(inputs, call, "--stages", "auto", "--fewer-sites", "--json")
    assert result.code == 0 and result.json["left_out"] == ["dc1"] and load_any_plan(path).cluster.sizes[0] == 1


def test_stages_or_none_by_what_is_simulated_of_both(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expected errs by a few percent either way, so it is not compared with what is simulated."""
    path, result = in_stages(inputs, call, "--stages", "2", "--json")
    assert result.code == 0, result.err
    pipeline = load_any_plan(path)
    asked = Asked(cluster=pipeline.cluster, workload=pipeline.workload, wishes=StageWishes())
    without = in_one(asked, 1.0)
    step_s = simulate_any(without).step_s

    def expected_to_take(plan: AnyPlan, share: float) -> AnyPlan:
        return plan.model_copy(update={"prediction": plan.predicted.model_copy(update={"expected": share * step_s})})

    for expected, simulated, is_simulated, stages in (
        (0.95, 0.98, True, True),
        (1.05, 1.02, True, False),
        (1.05, 1.1, False, True),
        (0.93, 0.92, False, False),
    ):
        monkeypatch.setattr("hybridep.commands.stage_choice.SECONDS_PER_PAIR", 0.0 if is_simulated else 1e6)
        ours = StageChoice(plan=expected_to_take(pipeline, 1.0), simulated_s=simulated * step_s, simulated=1)
        other = expected_to_take(without, expected)
        monkeypatch.setattr("hybridep.commands.sites_choice.in_stages", lambda *_, ours=ours, **__: ours)
        monkeypatch.setattr("hybridep.commands.sites_choice.in_one", lambda *_, other=other: other)
        made = plan_sites(asked)
        assert made.without is other and made.best is (ours.plan if stages else other)
        if is_simulated:
            assert made.worth[1] == pytest.approx(min(simulated, 1.0) * step_s)


def test_simulations_choose_in_a_lab(inputs: Inputs, call: Call) -> None:
    path, result = in_stages(inputs, call, "--stages", "2", "--set", "gpu.sharing=2", "--json")
    assert result.json["simulated_s"] == simulate_any(load_any_plan(path)).step_s


def test_pipelines_of_too_many_ranks_are_simulated_with_one_of_each_site(
    inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, result = in_stages(inputs, call, "--stages", "2", "--json")
    pipeline = load_any_plan(path)
    assert isinstance(pipeline, PipelinePlan)
    asked = list[bool]()

    def simulated(plan: PipelinePlan, precision: Precision = EXACTLY) -> Any:
        asked.append(precision.one_rank_per_site)
        if not precision.one_rank_per_site:
            raise PipelineError("too many ranks")
        return simulate_any(plan, precision=precision)

    monkeypatch.setattr("simulator.pipeline.simulate_any", simulated)
    assert simulated_s(pipeline) == pytest.approx(result.json["simulated_s"]) and asked == [False, True]

    def refused(plan: PipelinePlan, precision: Precision = EXACTLY) -> Any:
        raise PipelineError("too many ranks") if precision is EXACTLY else UserError("windows")

    monkeypatch.setattr("simulator.pipeline.simulate_any", refused)
    assert best_simulated([pipeline], FASTEST, until_s=now_s() + 60) is None
    # Nor is one for fewer sites, which counts as it is expected then.
    four = SLOW.replace("name: dc, size: 2", "name: dc, size: 4")
    paying = Paying(sites=("dc0", "dc1", "dc2", "dc3"), fewer=pipeline)
    monkeypatch.setattr("planner.sites_that_pay", lambda *_, **__: paying)
    result = in_stages(inputs, call, "--stages", "2", "--fewer-sites", "--json", cluster=four)[1]
    assert result.code == 0 and result.json["simulated_s"] is None and result.json["left_out"] == ["dc2", "dc3"], result.err


def test_a_pipeline_that_costs_nothing_is_no_bug(inputs: Inputs, call: Call) -> None:
    """It may avoid all links that have a price, which no plan without stages can."""
    three = SLOW.replace("name: dc, size: 2", "name: dc, size: 3") + "sites: [{name: a}, {name: b}, {name: c}]\nlinks:\n"
    for src, dst in permutations("abc", 2):
        price = ", egress: 0.1 $/GB" if {src, dst} == {"a", "c"} else ""
        three += f"- {{src: {src}, dst: {dst}, bandwidth: 1 Mbps, latency: 0.2 ms{price}}}\n"
    layers = ("--set", "model.num_layers=3", "--objective", "dollars")
    path, result = in_stages(inputs, call, "--stages", "auto", "--json", *layers, cluster=three)
    assert result.code == 0, result.err
    assert result.json["step_usd"] == 0 and isinstance(load_any_plan(path), PipelinePlan)


def test_a_budget_that_a_short_look_misses(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    priced, looks = SLOW.replace("bandwidth: 1 Mbps", "bandwidth: 1 Mbps, egress: 0.05 $/GB"), list[float]()

    def look(*arguments: Any, time_limit_s: float, **more: Any) -> Any:
        looks.append(time_limit_s)
        if len(looks) == 1:
            raise InfeasibleError("none is cheap enough")
        return stages_in_time(*arguments, time_limit_s=time_limit_s, **more)

    monkeypatch.setattr("hybridep.commands.sites_choice.in_stages", look)
    path, result = in_stages(inputs, call, "--stages", "auto", "--budget", "1 $", "--json", cluster=priced)
    assert result.code == 0 and looks[1] > looks[0], result.err
    assert isinstance(load_any_plan(path), PipelinePlan) and "cheap enough" not in result.err


def test_a_time_limit_too_short_for_simulations_is_kept(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the pipelines that are found nor one for fewer sites are simulated then; all are compared as expected."""
    monkeypatch.setattr("hybridep.commands.stage_choice._LAYER_S", 1e6)
    monkeypatch.setattr("simulator.pipeline.simulate_any", lambda *_, **__: pytest.fail("simulated"))
    path, result = in_stages(inputs, call, "--stages", "2")
    assert result.code == 0 and "not simulated here" in result.out, result.err
    four = SLOW.replace("name: dc, size: 2", "name: dc, size: 4")
    paying = Paying(sites=("dc0", "dc1", "dc2", "dc3"), fewer=load_any_plan(path))
    monkeypatch.setattr("planner.sites_that_pay", lambda *_, **__: paying)
    result = in_stages(inputs, call, "--stages", "2", "--fewer-sites", "--json", cluster=four)[1]
    assert result.code == 0 and result.json["simulated_s"] is None and result.json["left_out"] == ["dc2", "dc3"], result.err


def test_a_simulated_pipeline_is_kept_unless_another_is_expected_to_be_clearly_better(inputs: Inputs, call: Call) -> None:
    """What is expected errs by a few percent."""
    path, _ = in_stages(inputs, call, "--stages", "2")
    plan = load_any_plan(path)
    assert isinstance(plan, PipelinePlan)
    asked = Asked(cluster=plan.cluster, workload=plan.workload, wishes=StageWishes())
    known = StageChoice(plan=plan, simulated_s=1.1 * plan.predicted.expected_s, simulated=1)
    for share, chosen in ((0.97, False), (0.9, True)):
        prediction = plan.predicted.model_copy(update={"expected": share * plan.predicted.expected_s})
        guess = StageChoice(plan=plan.model_copy(update={"prediction": prediction}), simulated_s=None)
        for one, other in ((known, guess), (guess, known)):
            best = _better(asked, one, other)
            assert (best.plan is guess.plan) == chosen
            assert [one.plan for one in best.others] == [known.plan if chosen else guess.plan]
