"""What each verb prints and writes; the ones that start ranks are in test_train.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_cases import FIVE_SITES, Call, Inputs

from hybridep.cli import VERBS
from hybridep.codecs import ExpertCodec
from hybridep.commands.inputs import cluster_and_workload
from hybridep.launch.host import child_environment
from hybridep.pipeline import load_any_plan
from hybridep.plan import Plan
from hybridep.routing import RoutingRecord
from hybridep.shares import batch_sequences
from simulator.step import simulate_step


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom hybridep import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([name for name in ('torch', 'ray', 'pulp', 'numpy', 'rich', 'matplotlib', 'tokenizers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.endswith("[]\n")
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(call: Call, verb: str) -> None:
    result = call(verb, "--help")
    assert result.code == 0 and "--json" in result.out


def test_plan_keys_of_the_contract(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "plan.yaml"
    result = call("plan", inputs.cluster, inputs.workload, "-o", path, "--json", "--set", "training.micro_batches=4")
    assert result.code == 0 and result.err == ""
    wanted = {"status", "objective_s", "bound_s", "gap", "solve_s", "domains", "baselines", "memory_bytes"}
    assert wanted <= set(result.json)
    assert set(result.json["baselines"]) == {"ep", "full_gather"} and result.json["status"] == "optimal"
    plan = load_any_plan(path)
    assert plan.workload.training.micro_batches == 4 and plan.digest == result.json["digest"]


def test_standard_output_is_one_json_object(inputs: Inputs) -> None:
    """In a process of its own: solvers that are not Python could print past what ``call`` captures."""
    words = ["plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml", "--json"]
    command = [sys.executable, "-m", "hybridep.cli", *map(str, words)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["status"] == "optimal"


def test_plan_explains_itself(inputs: Inputs, call: Call) -> None:
    result = call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml")
    assert result.code == 0
    for word in ("optimal", "ep", "full_gather", "busiest links", "memory of the fullest rank", "no schedule of this plan"):
        assert word in result.out, result.out


def test_plan_reads_a_matrix(inputs: Inputs, call: Call) -> None:
    matrix = inputs.write("pairs.csv", "src,dst,gbps,rtt_ms\nparis,oslo,5,20\noslo,rome,2,30\nrome,paris,3,25\n")
    options = ("--set", "levels.gpu.size=2", "--json")
    result = call("plan", matrix, inputs.workload, "-o", inputs.folder / "plan.yaml", *options)
    assert result.code == 0, result.err
    plan = load_any_plan(inputs.folder / "plan.yaml")
    assert [site.name for site in plan.cluster.sites] == ["paris", "oslo", "rome"] and plan.cluster.num_gpus == 6
    assert plan.prediction is not None and plan.prediction.expected_s == pytest.approx(result.json["expected_s"])
    assert result.json["lower_bound_s"] <= result.json["expected_s"] <= result.json["step_s"]


def test_simulate_keys_of_the_contract(inputs: Inputs, call: Call) -> None:
    path, trace = inputs.folder / "plan.yaml", inputs.folder / "trace.json"
    assert call("plan", inputs.cluster, inputs.workload, "-o", path).code == 0
    result = call("simulate", path, "--against", "ep,full_gather", "--trace", trace, "--json")
    assert result.code == 0
    assert {"step_s", "wall_s", "baselines", "busiest_link"} <= set(result.json)
    assert set(result.json["baselines"]) == {"ep", "full_gather"}
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert "busiest links" in call("simulate", path).out


def test_plans_are_kept_when_questions_about_them_are_interrupted(
    inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.upgrades", interrupted)
    path = inputs.folder / "plan.yaml"
    result = call("plan", inputs.cluster, inputs.workload, "--upgrades", "--top", "2", "-o", path)
    assert result.code == 130 and f"interrupted; plan written to {path}" in result.err and not result.out
    assert all(load_any_plan(one).cluster.name == "two" for one in (path, path.with_stem("plan-2")))


def test_simulate_within_a_tolerance(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "plan.yaml"
    rates = "sites: [{name: a, up: 50 Mbps}, {name: b, down: 51 Mbps}]\n"
    inputs.cluster.write_text(inputs.cluster.read_text(encoding="utf-8") + rates, encoding="utf-8")
    assert call("plan", inputs.cluster, inputs.workload, "-o", path).code == 0
    exact, near, same = (call("simulate", path, "--json", *more) for more in ((), ("--tolerance", 0.05), ("--tolerance", 0)))
    assert near.json["step_s"] == pytest.approx(exact.json["step_s"], rel=0.05) and same.json["step_s"] == exact.json["step_s"]
    loose = inputs.write("loose.yaml", f"plan: {path}\ntolerance: 0.05\n")
    assert call("simulate", loose, "--json").json["step_s"] == near.json["step_s"]
    assert call("simulate", loose, "--json", "--tolerance", 0).json["step_s"] == exact.json["step_s"]
    refused = call("simulate", path, "--tolerance", 0.2)
    assert refused.code == 2 and "0.2 is not in the range" in refused.err


def test_simulate_with_one_rank_per_site(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "plan.yaml"
    assert call("plan", inputs.cluster, inputs.workload, "-o", path).code == 0
    merged = call("simulate", path, "--json", "--one-rank-per-site", "--against", "ep")
    assert merged.json["step_s"] == pytest.approx(call("simulate", path, "--json").json["step_s"], rel=0.01)
    scenario = inputs.write("merged.yaml", f"plan: {path}\none_rank_per_site: true\nrouting: zipf:1\n")
    for refused in (call("simulate", path, "--one-rank-per-site", "--routing", "zipf:1"), call("simulate", scenario)):
        assert refused.code == 2 and "one_rank_per_site: only where tokens go as expected" in refused.err


def test_doctor_finds_what_this_suite_needs(call: Call) -> None:
    result = call("doctor", "--json")
    assert result.code == 0 and result.json["ok"]
    verdicts = {check["name"]: check["verdict"] for check in result.json["checks"]}
    assert verdicts["python"] == verdicts["torch"] == verdicts["solvers"] == "good"
    assert all(check["fix"] for check in result.json["checks"] if check["verdict"] != "good")


def test_reproduce_lists_claims(call: Call) -> None:
    result = call("reproduce", "--json")
    assert result.code == 0 and result.json["claims"]


def test_a_bug_shows_its_traceback_and_ends_with_1() -> None:
    program = (
        "from hybridep import cli\nfrom hybridep.commands import doctor\n"
        "def fail():\n    raise ValueError('a bug')\n"
        "doctor.run_checks = fail\ncli.main(['doctor'])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" in done.stderr and "ValueError: a bug" in done.stderr


PRICED = ("--set", "levels.dc.egress=0.02 $/GB", "--set", "gpu.price=0.001 $/h")


def test_plan_in_dollars(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "plan.yaml"
    result = call("plan", inputs.cluster, inputs.workload, "-o", path, *PRICED, "--objective", "dollars", "--json")
    assert result.code == 0, result.err
    price = result.json["step_usd"]
    assert result.json["minimised"] == "dollars" and 0 < result.json["cost_bound_usd"] <= price * (1 + 1e-9)
    prediction = load_any_plan(path).prediction
    assert prediction is not None and prediction.cost == price
    shown = call("plan", inputs.cluster, inputs.workload, "-o", path, *PRICED, "--budget", f"{2 * price} $")
    assert shown.code == 0 and "fastest within" in shown.out and "price of a step" in shown.out
    poor = call("plan", inputs.cluster, inputs.workload, "-o", path, *PRICED, "--budget", f"{price / 2} $")
    assert poor.code == 3 and f"the cheapest costs {price:.4g} $" in poor.err


def test_plan_chooses_codecs_by_their_loss(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "plan.yaml"
    result = call("plan", inputs.cluster, inputs.workload, "-o", path, "--max-loss", "0.5%", "--json")
    assert result.code == 0, result.err
    losses = [one["final_loss"] for one in result.json["lossy_codecs"]]
    assert losses and sum(max(loss, 0.0) for loss in losses) <= 0.005
    shown = call("plan", inputs.cluster, inputs.workload, "-o", path, "--codec", "dc.tokens=int8", "--codec", "dc.experts=sr")
    assert "tokens int8; final loss -0.50% (experiments/codec-loss" in shown.out
    assert "experts sr, keep 0.02; final loss not measured" in shown.out or "experts sr" not in shown.out


def test_fewer_bytes_without_loss(inputs: Inputs, call: Call) -> None:
    path, wide = inputs.folder / "plan.yaml", ("--set", "model.hidden_size=256", "--set", "model.expert_ffn_size=128")
    exact = call("plan", inputs.cluster, inputs.workload, "-o", path, *wide, "--json").json
    found = call("plan", inputs.cluster, inputs.workload, "-o", path, *wide, "--max-loss", "0", "--json").json
    kinds = found["lossless"]["dc"]
    assert kinds and not found["lossy_codecs"] and not exact["lossless"] and found["step_s"] < exact["step_s"]
    shown = call("plan", inputs.cluster, inputs.workload, "-o", path, *wide, "--max-loss", "0%")
    assert f"lossless on dc: {', '.join(kinds)}\n" in shown.out and load_any_plan(path).codecs["dc"].lossless == kinds
    wrong = call("plan", inputs.cluster, inputs.workload, "-o", path, "--codec", "gpu.tokens=lossless")
    assert wrong.code == 2 and "--codec gpu.tokens=lossless: it is for links between sites; give dc.tokens" in wrong.err


@pytest.mark.turns(4)
def test_codecs_by_their_loss_beside_other_wishes(inputs: Inputs, call: Call) -> None:
    """Several plans, rates that are not known, and plans chosen by a simulation."""
    path, loss = inputs.folder / "plan.yaml", ("--max-loss", "0.5%")
    result = call("plan", inputs.cluster, inputs.workload, "-o", path, *loss, "--top", "4", "--json")
    assert result.code == 0, result.err
    plans = result.json["plans"]
    assert [one["step_s"] for one in plans] == sorted(one["step_s"] for one in plans) and len(plans) == 4
    assert plans[0]["lossy_codecs"] == result.json["lossy_codecs"]
    files = [load_any_plan(Path(one["output"])) for one in plans]
    assert len({one.digest for one in files}) == 4
    for entry, plan in zip(plans, files, strict=True):
        assert {(one["kind"], one["codec"]) for one in entry["lossy_codecs"]} == {
            (kind, codec) for codecs in plan.codecs.values() for kind, codec in codecs.lossy.items()
        }
        assert sum(max(one["final_loss"], 0.0) for one in entry["lossy_codecs"]) <= 0.005
    shown = call("plan", inputs.cluster, inputs.workload, "-o", path, *loss, "--top", "2")
    told = ", ".join(f"{one['kind']} {one['codec']}" for one in plans[0]["lossy_codecs"])
    assert f"     codecs: {'dc: ' + told if told else 'exact'}\n" in shown.out
    assert "codecs: " not in call("plan", inputs.cluster, inputs.workload, "-o", path, "--top", "2").out
    simulated = call("plan", inputs.cluster, inputs.workload, "-o", path, *loss, "--top", "4", "--simulate", "--json")
    assert simulated.code == 0, simulated.err
    steps_s = [one["simulated_s"] for one in simulated.json["plans"]]
    assert steps_s == sorted(steps_s) and {one["step_s"] for one in simulated.json["plans"]} == {one["step_s"] for one in plans}
    rates = ("--within", "0.5", "--time-limit", "2", "--json")
    within = call("plan", inputs.cluster, inputs.workload, "-o", path, *loss, *rates)
    assert within.code == 0, within.err
    exact = call("plan", inputs.cluster, inputs.workload, "-o", path, *rates).json["robust"]
    assert within.json["robust"]["bound_s"] <= within.json["robust"]["step_s"] < exact["step_s"] and within.json["lossy_codecs"]


def test_plan_chooses_connections_where_one_has_a_window(inputs: Inputs, call: Call) -> None:
    path, long = inputs.folder / "plan.yaml", ("--set", "levels.dc.latency=50 ms", "--set", "levels.dc.window=4 KB")
    chosen = call("plan", inputs.cluster, inputs.workload, "-o", path, *long)
    number = load_any_plan(path).schedule.streams["dc"]
    assert number > 1 and f"connections per pair of ranks: dc {number}, each with 4 kB per round trip" in chosen.out
    given = call("plan", inputs.cluster, inputs.workload, "-o", path, *long, "--streams", "dc=1", "--json")
    assert given.json["streams"] == {"dc": 1}


def test_plan_sends_copies_ahead_on_demand(inputs: Inputs, call: Call) -> None:
    # Computation to hide copies under, and tokens to send them beside.
    shape = [f"--set={key}" for key in ("gpu.throughput=300 MFLOPS", "training.micro_batches=2")]
    path, steps = inputs.folder / "plan.yaml", []
    for options in ((), ("--prefetch",)):
        result = call("plan", inputs.cluster, inputs.workload, "-o", path, *shape, *options, "--json")
        assert result.code == 0, result.err
        steps.append(result.json["step_s"])
    assert steps[1] < steps[0] and load_any_plan(path).schedule.prefetch > 0


def test_plan_cuts_tokens_in_parts_on_demand(inputs: Inputs, call: Call) -> None:
    path, steps = inputs.folder / "plan.yaml", []
    for options in ((), ("--chunks", "8")):
        result = call("plan", "paper-s", "llama-tiny", "-o", path, *options, "--json")
        assert result.code == 0, result.err
        steps.append(result.json["step_s"])
    plan = load_any_plan(path)
    assert steps[1] < 0.9 * steps[0] and result.json["chunks"] == plan.schedule.chunks > 1
    assert call("simulate", path, "--json").json["step_s"] == pytest.approx(steps[1])
    shown = call("plan", "paper-s", "llama-tiny", "-o", path, "--chunks", "8")
    assert f"tokens travel in {plan.schedule.chunks} parts" in shown.out and "tokens in one piece" in shown.out


def test_plan_over_the_trunks_of_a_fabric(inputs: Inputs, call: Call) -> None:
    fabric = inputs.write("fabric.yaml", "name: narrow\nwan: {hub: {bandwidth: 10 Mbps}}\n")
    path = inputs.folder / "plan.yaml"
    result = call("plan", inputs.cluster, inputs.workload, "-o", path, "--fabric", fabric, "--json")
    assert result.code == 0, result.err
    assert load_any_plan(path).cluster.trunks[0].name == "trunk dc0 -> hub"
    simulated = call("simulate", path, "--json")
    assert simulated.json["step_s"] == pytest.approx(result.json["step_s"], rel=0.1)
    leaves = inputs.write("leaves.yaml", "name: leaves\ninside: {fat_tree: {workers_per_leaf: 1}}\n")
    refused = call("plan", inputs.cluster, inputs.workload, "-o", path, "--fabric", leaves)
    assert refused.code == 2 and "nothing of what is inside" in refused.err


@pytest.mark.turns(2)
def test_plan_without_some_sites(inputs: Inputs, call: Call) -> None:
    """For the whole batch; it is read as the cluster's own."""
    plan = inputs.folder / "plan.yaml"
    found = call("plan", "pods-4dc", "tiny", "--without", "middle", "--without", "small-a", "-o", plan, "--time-limit", 1)
    assert found.code == 0, found.err
    whole, other = cluster_and_workload("pods-4dc", "tiny", [])
    made = load_any_plan(plan, cluster=whole, workload=other)
    left = [dc for dc in range(whole.sizes[0]) if not {"middle", "small-a"} & set(whole.site_labels(dc))]
    assert 0 < len(left) < whole.sizes[0] - 2 and made.cluster.site_names == tuple(whole.site_name(dc) for dc in left)
    sequences = [
        batch_sequences(cluster, workload) * workload.training.micro_batches
        for cluster, workload in ((whole, other), (made.cluster, made.workload))
    ]
    assert sequences[0] == sequences[1]
    for names, words in (
        (("s9",), "--without s9: pods-4dc has no such site; "),
        (("large", "middle", "small-a", "small-b"), "--without small-b: no site of pods-4dc is left"),
    ):
        options = [word for name in names for word in ("--without", name)]
        refused = call("plan", "pods-4dc", "tiny", *options, "-o", inputs.folder / "none.yaml")
        assert refused.code == 2 and words in refused.err and not (inputs.folder / "none.yaml").exists()


def test_plan_for_scenarios(inputs: Inputs, call: Call) -> None:
    """A scenario has the given cluster's GPUs, and its fabric; errors name its file."""
    text = inputs.cluster.read_text(encoding="utf-8")
    slow = inputs.write("slow.yaml", text.replace("100 Mbps", "20 Mbps").replace("size: 1", "size: 2"))
    fabric = inputs.write("fabric.yaml", "name: narrow\nwan: {hub: {bandwidth: 10 Mbps}}\n")
    path = inputs.folder / "plan.yaml"
    steps_s = []
    for more in ((), ("--set", "gpu.throughput=1 MFLOPS"), ("--fabric", fabric)):
        result = call("plan", inputs.cluster, inputs.workload, "-o", path, "--scenario", slow, "--json", *more)
        assert result.code == 0, result.err
        steps_s.append(result.json["robust"]["step_s"])
    assert steps_s[1] > 10 * steps_s[0] and steps_s[2] > 1.2 * steps_s[0]
    three = inputs.write("three.yaml", text.replace("size: 2", "size: 3"))
    refused = call("plan", inputs.cluster, inputs.workload, "-o", path, "--scenario", three)
    assert refused.code == 2 and f"--scenario {three}: site dc2 is only in it" in refused.err
    # What is left out of the cluster may be in a scenario's file or not.
    also = inputs.write("also.yaml", slow.read_text(encoding="utf-8").replace("size: 2", "size: 3"))
    for scenario in (also, slow):
        options = ("--without", "dc2", "--scenario", scenario, "--json")
        left = call("plan", three, inputs.workload, "--set", "training.micro_batch_size=2", "-o", path, *options)
        assert left.code == 0, left.err
        steps_s.append(left.json["robust"]["step_s"])
    assert steps_s[-2] == steps_s[-1] > 0 and len(load_any_plan(path).cluster.site_names) == 2


def test_plan_chooses_by_simulation(inputs: Inputs, call: Call) -> None:
    """Eight ranks on two processors: the plan that is predicted to be the fastest is not."""
    wishes = ("--set", "gpu.sharing=4", "--set", "levels.dc.bandwidth=400 Mbps", "--top", "4", "--json")
    path = inputs.folder / "plan.yaml"
    predicted, simulated = (
        call("plan", "lab-4dc", "tiny", "--set", "model.num_layers=2", "-o", path, *wishes, *more).json
        for more in ((), ("--simulate",))
    )
    steps_s = [one["simulated_s"] for one in simulated["plans"]]
    assert steps_s == sorted(steps_s) and len(steps_s) == 4
    assert {one["step_s"] for one in predicted["plans"]} == {one["step_s"] for one in simulated["plans"]}
    assert simulated["digest"] != predicted["digest"] and load_any_plan(path).digest == simulated["digest"]
    assert simulate_step(load_any_plan(path)).step_s == steps_s[0]
    # Domains in rank order cost as little as the plan predicted to be the fastest, so nothing else costs no more.
    compared = call("plan", "lab-4dc", "tiny", "--set", "model.num_layers=2", "-o", path, *wishes, "--simulate", "--compare").json
    assert compared["digest"] == predicted["digest"]
    assert compared["plans"][0]["step_s"] <= min(one["step_s"] for one in compared["planners"].values()) * (1 + 1e-9)
    assert [one["simulated_s"] for one in compared["plans"][1:]] == [
        one for one in steps_s if one != compared["plans"][0]["simulated_s"]
    ]


@pytest.mark.turns(2)
def test_plan_makes_a_pool(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "plan.yaml"
    faster = ("--set", "levels.dc.bandwidth=200 Mbps")
    result = call("plan", inputs.cluster, inputs.workload, "-o", path, "--pool", "32", "--json", *faster)
    assert result.code == 0, result.err
    pool = result.json["pool"]
    assert pool[0]["pays_from"] == pytest.approx(1 / 32) and pool[-1]["pays_to"] == pytest.approx(32)
    assert all(load_any_plan(Path(one["output"])).digest == one["digest"] for one in pool)
    now = next(one for one in pool if one["pays_from"] <= 1 <= one["pays_to"])
    assert len(pool) > 1 and now is not pool[0]
    assert result.json["digest"] == now["digest"] == load_any_plan(path).digest
    assert result.json["output"] == now["output"] == str(path)
    assert "a switch moves no weights" in call("plan", inputs.cluster, inputs.workload, "-o", path, "--pool", "2").out


@pytest.mark.turns(2)
@pytest.mark.parametrize("more", [(), ("--stages", "auto", "--set", "model.num_layers=1"), ("--routing",)])
def test_experts_of_a_pool_live_where_links_are_fast(more: tuple[str, ...], inputs: Inputs, call: Call) -> None:
    """At the same sites in all its plans."""
    cluster, file = inputs.write("five.yaml", FIVE_SITES), inputs.folder / "routing.npz"
    RoutingRecord(chosen=np.array([[4, 16, 4, 8], [16, 4, 8, 4]])).save(file)
    large = ("--set", "model.expert_ffn_size=512", "--set", "training.micro_batches=16", "--time-limit", "9")
    more = (*more, file) if more == ("--routing",) else more
    result = call("plan", cluster, inputs.workload, "-o", inputs.folder / "p.yaml", "--pool", "4096", "--json", *large, *more)
    assert result.code == 0, result.err
    made = [load_any_plan(Path(one["output"])) for one in result.json["pool"]]
    assert len(made) > 1 and all(isinstance(one, Plan) for one in made)
    homes = [[placement.home.tolist() for placement in one.placements] for one in made if isinstance(one, Plan)]
    assert isinstance(made[0], Plan) and made[0].layers[0].homes and all(one[0] == homes[0][0] for one in homes)
    assert file not in more or all(one[1] == homes[0][1] != homes[0][0] for one in homes)


def test_popular_experts_are_said_to_be_spread(inputs: Inputs, call: Call) -> None:
    """Once for all layers, also at one site."""
    file = inputs.folder / "routing.npz"
    RoutingRecord(chosen=np.array([[14, 14, 2, 2], [15, 13, 2, 2]])).save(file)
    large = ("--set", "model.expert_ffn_size=4096", "--set", "levels.gpu.size=2", "--set", "levels.gpu.bandwidth=2 Mbps")
    result = call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "p.yaml", "--routing", file, *large)
    assert result.code == 0, result.err
    assert result.out.count("experts' homes are chosen: popular ones are spread over sites and ranks") == 1
    alone = call(
        "plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "p.yaml", "--routing", file, "--without", "dc1", *large
    )
    assert alone.code == 0, alone.err
    assert "popular ones are spread over sites and ranks" in alone.out


def test_plan_simulates_recorded_steps(inputs: Inputs, call: Call) -> None:
    """Plans are ordered by the mean over all recorded steps."""
    path, file = inputs.folder / "plan.yaml", inputs.folder / "routing.npz"
    words = ("plan", inputs.cluster, inputs.workload, "-o", path, "--top", "2", "--simulate", "--routing", file, "--json")
    words += ("--codec", "dc.experts=change-int8")
    chosen = np.array([[16, 8, 4, 4], [8, 8, 8, 8]])
    RoutingRecord(chosen=chosen).save(file)
    first = call(*words)
    assert first.code == 0, first.err
    model, training = load_any_plan(path).workload.model, load_any_plan(path).workload.training
    ranks, rng = load_any_plan(path).cluster.num_gpus, np.random.default_rng(0)
    choices = {
        (layer, batch): rng.integers(0, 2 + batch, size=(ranks, training.tokens, model.top_k))
        for layer in range(model.num_moe_layers)
        for batch in range(2 * training.micro_batches)
    }
    record = RoutingRecord(chosen=chosen, choices=choices)
    record.save(file)
    result = call(*words)
    assert result.code == 0, result.err
    found = [one["simulated_s"] for one in result.json["plans"]]
    assert found == sorted(found)
    for one, step_s in zip(result.json["plans"], found, strict=True):
        made = load_any_plan(Path(one["output"]))
        assert made.level_codecs[0].experts is ExpertCodec.CHANGE_INT8
        steps = record.steps(made.workload)
        assert len(steps) == 2 and step_s == pytest.approx(sum(simulate_step(made, each).step_s for each in steps) / 2)
    fewer = {key: ids[:1] for key, ids in choices.items()}
    RoutingRecord(chosen=chosen, choices=fewer).save(file)
    refused = call(*words)
    assert refused.code == 2 and "record with the same batch and number of ranks" in refused.err


def test_plan_knows_recorded_popularity(inputs: Inputs, call: Call) -> None:
    path, record = inputs.folder / "plan.yaml", inputs.folder / "routing.npz"
    RoutingRecord(chosen=np.array([[16, 8, 4, 4], [8, 8, 8, 8]])).save(record)
    result = call("plan", inputs.cluster, inputs.workload, "-o", path, "--routing", record, "--json")
    assert result.code == 0, result.err
    assert load_any_plan(path).popularity == ((0.5, 0.25, 0.125, 0.125), (0.25,) * 4)
    RoutingRecord(chosen=np.ones((3, 4), dtype=np.int64)).save(record)
    refused = call("plan", inputs.cluster, inputs.workload, "-o", path, "--routing", record)
    assert refused.code == 2 and "(3, 4), this model has (2, 4)" in refused.err
