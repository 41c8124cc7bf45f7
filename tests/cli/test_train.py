"""``hybridep train --local`` as users run it: results, resuming, lost ranks, interrupts; and nothing left running."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cli_cases import FIVE_SITES, Call, Inputs, shell

from hybridep.baselines import Baseline, baseline_plan
from hybridep.commands import inputs as commands_inputs
from hybridep.commands.inputs import cluster_and_workload, load_workload
from hybridep.launch.host import child_environment
from hybridep.pipeline import load_any_plan
from hybridep.plan import Plan
from hybridep.routing import load_routing
from hybridep.run import Run

pytestmark = pytest.mark.timeout(120)

PUBLIC = Path(__file__).parents[1] / "runtime" / "public_models"


def left_running(inputs: Inputs) -> list[psutil.Process]:
    """Processes whose command line names the test's folder."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(inputs.folder) in word for word in p.info["cmdline"] or [])]


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_its_files_and_resuming(inputs: Inputs) -> None:
    whole = shell("train", inputs.run, "--local", "--json", "--set", "trace_step=2", "--set", "choice_steps=2")
    assert whole.code == 0, whole.err
    summary = whole.json
    assert len(summary["losses"]) == 4 and summary["status"] == "finished" and summary["shaped"] is False
    assert summary["step_s"]["median"] > 0 and summary["tokens_per_s"] > 0 and summary["predicted_step_s"] > 0
    made = load_any_plan(inputs.output / "plan.yaml")
    computed = summary["tokens_per_s"] * made.workload.flops_per_token / made.cluster.num_gpus
    assert summary["model_flops_per_s_per_gpu"] == pytest.approx(computed)
    assert summary["wan_bytes_per_step"] == pytest.approx(summary["planned_wan_bytes_per_step"], rel=0.2)
    for name in ("plan.yaml", "steps.jsonl", "summary.json", "trace.json", "routing.npz", "checkpoints"):
        assert (inputs.output / name).exists(), name
    record, plan = load_routing(inputs.output / "routing.npz"), load_any_plan(inputs.output / "plan.yaml")
    record.require(plan, inputs.output)
    model, training = plan.workload.model, plan.workload.training
    choices = plan.cluster.num_gpus * training.tokens * training.micro_batches * model.top_k
    assert (record.chosen.sum(axis=1) == 4 * choices).all() and sum(ids.size for ids in record.choices.values()) == (
        2 * choices * model.num_moe_layers
    )
    assert len(record.steps(plan.workload)) == 2, "steps 2 and 3"
    steps = lines(inputs.output / "steps.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["loss"] for step in steps] == summary["losses"]
    assert "step 4/4" in whole.err

    # The same steps in two parts, the second one under another plan, and the last checkpoint in between damaged.
    parts = ("--set", f"output={inputs.folder / 'parts'}")
    less = ("--set", "steps=2", "--set", "trace_step=3", "--set", "checkpoints.every_steps=1")
    first = shell("train", inputs.run, "--local", "--json", *parts, *less)
    assert first.code == 0 and first.json["losses"] == summary["losses"][:2]
    assert "no timeline, since trace_step 3 is beyond the last of 2 steps" in first.err
    (dense := inputs.folder / "parts" / "checkpoints" / "step-00000002" / "dense-00000-00000.pt").unlink()
    second = shell("train", inputs.run, "--local", "--json", *parts, "--set", "plan=full_gather", "--resume")
    assert second.code == 0, second.err
    assert f"checkpoint {dense.parent}: {dense.name} is gone (rank 0)\n" in second.err
    assert "goes on from step-00000001; step-00000002 is not whole, or older, and will be replaced" in second.err
    assert second.json["first_step"] == 2 and second.json["losses"] == pytest.approx(summary["losses"][1:], rel=1e-4)
    assert [step["step"] for step in lines(inputs.folder / "parts" / "steps.jsonl")] == [1, 2, 3, 4]
    assert left_running(inputs) == []


@pytest.mark.turns(2)
def test_a_killed_rank_is_named(inputs: Inputs) -> None:
    began_s = time.monotonic()
    result = shell("train", inputs.run, "--local", environment={"HYBRIDEP_FAULT": "kill:rank=1,step=2"})
    assert result.code == 5 and time.monotonic() - began_s < 60
    last = result.err.splitlines()[-1]
    assert last.startswith("hybridep train: rank 1 in dc1 lost: ") and "SIGKILL" in last
    summary = json.loads((inputs.output / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "failed" and summary["exit"] == 5 and "rank 1" in summary["error"]
    assert left_running(inputs) == []


@pytest.mark.turns(3)
def test_a_run_goes_on_after_a_rank_was_killed(inputs: Inputs) -> None:
    """With the losses of one in which none was; the next loss ends it."""
    words = [sys.executable, "-m", "hybridep.cli", "train", str(inputs.run), "--local", "--max-restarts", "1"]
    sets = ["--set", "steps=100000", "--set", "checkpoints.every_steps=10", "--set", "checkpoints.keep=2"]
    log, last, killed = inputs.output / "steps.jsonl", 0, []
    with subprocess.Popen([*words, *sets], env=child_environment(), stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            steps = [line["step"] for line in lines(log)] if log.exists() and log.read_text().endswith("\n") else []
            ranks = [one for one in left_running(inputs) if "hybridep.launch.local_ranks" in one.info["cmdline"]]
            if steps and steps[-1] > last + 12 and len(ranks) == 2:
                last = int(steps[-1])
                ranks[len(killed)].kill()
                killed.append(last)
            time.sleep(0.05)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 5 and "restart 1 of 1, from the last checkpoint" in said and len(killed) == 2, said
    made = lines(log)
    assert [line["step"] for line in made] == list(range(1, len(made) + 1)) and len(made) >= killed[1]
    summary = json.loads((inputs.output / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["lost"]) == 1 and "rank 0 in dc0 lost" in summary["lost"][0] and "rank 1 in dc1 lost" in summary["error"]
    whole = shell("train", inputs.run, "--local", "--json", "--set", "steps=20", "--set", f"run.output={inputs.folder / 'whole'}")
    assert whole.json["losses"] == [line["loss"] for line in made[:20]]
    assert left_running(inputs) == []


@pytest.mark.turns(2)
def test_a_rank_that_hangs_is_named(inputs: Inputs) -> None:
    result = shell("train", inputs.run, "--local", environment={"HYBRIDEP_FAULT": "hang:rank=0,step=2"})
    assert result.code == 5
    assert result.err.splitlines()[-1].startswith("hybridep train: rank 0 in dc0 lost: it stopped answering")
    assert left_running(inputs) == []


def test_an_error_in_a_rank_is_a_bug_with_its_traceback_kept(inputs: Inputs) -> None:
    result = shell("train", inputs.run, "--local", "--json", environment={"HYBRIDEP_FAULT": "raise:rank=1,step=1"})
    assert result.code == 1 and "rank 1 in dc1: RuntimeError: fault injected" in result.json["error"]
    assert "Traceback" in (inputs.output / "logs" / "rank-1.log").read_text(encoding="utf-8")


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_whatever_ends_the_launcher_ends_the_ranks(inputs: Inputs, number: signal.Signals, code: int) -> None:
    words = ["train", str(inputs.run), "--local", "--set", "steps=100000"]
    command = [sys.executable, "-m", "hybridep.cli", *words]
    process = subprocess.Popen(command, env=child_environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            # One of them while the ranks still start.
            if line.startswith("step " if number != signal.SIGTERM else "hybridep train: 2 ranks"):
                break
        deadline = time.monotonic() + 30
        while len(left_running(inputs)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(left_running(inputs)) >= 3  # one more while it is forked
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(timeout=20) == code
        assert "Traceback" not in rest
        if number != signal.SIGKILL:
            summary = json.loads((inputs.output / "summary.json").read_text(encoding="utf-8"))
            assert (summary["status"], summary["exit"]) == ("stopped", code)
        deadline = time.monotonic() + 10
        while left_running(inputs) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left_running(inputs) == []
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_interrupts_planning_ends_the_command(
    inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """Searches take an interrupt for the end of their time, and give the best so far."""

    def searched(run: Run) -> Plan:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        return baseline_plan(*cluster_and_workload(run.cluster, run.workload, run.overrides), Baseline.EP)

    monkeypatch.setattr(commands_inputs, "resolve_plan", searched)
    before = signal.getsignal(signal.SIGINT)
    assert call("train", inputs.run, "--local").code == code
    assert signal.getsignal(signal.SIGINT) is before and not (inputs.output / "logs").exists()


def test_experts_that_live_where_links_are_fast_are_trained_as_others(inputs: Inputs, call: Call) -> None:
    where = ["--set", f"cluster={inputs.write('five.yaml', FIVE_SITES)}"]
    large = ["--set", "model.expert_ffn_size=8192", "--set", "training.micro_batches=16"]
    plan = inputs.folder / "homes.yaml"
    told = call("plan", inputs.folder / "five.yaml", inputs.workload, "-o", plan, "--time-limit", 3, *large)
    assert told.code == 0 and "experts' homes are chosen, none at a, b\n" in told.out, told.err
    found = [
        shell(
            "train",
            inputs.run,
            "--local",
            "--json",
            *where,
            *large,
            "--set",
            f"run.plan={one}",
            "--set",
            "steps=2",
            "--set",
            f"run.output={inputs.folder / name}",
        ).json
        for name, one in (("homes", plan), ("ep", "ep"))
    ]
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-6)
    assert found[0]["wan_bytes_per_step"] == pytest.approx(found[0]["planned_wan_bytes_per_step"], rel=0.2)


@pytest.mark.turns(2)
def test_from_public_weights_and_back(inputs: Inputs, call: Call, tmp_path: Path) -> None:
    public, written = PUBLIC / "mixtral", tmp_path / "written"
    settings = ["--set", f"workload={public}", "--set", f"weights={public}", "--set", "steps=1", "--set", "plan=ep"]
    settings += ["--set", "training.sequence_length=16", "--set", "training.micro_batches=1"]
    nothing = call("train", inputs.run, "--export", str(written), *settings)
    assert nothing.code == 2 and "holds no complete checkpoint; train first" in nothing.err
    other = shell("train", inputs.run, "--local", *settings, "--set", "model.rope_theta=5.0")
    assert other.code == 2 and "is of a model with rope_theta 1000000.0, the workload's has 5.0" in other.err
    assert not (inputs.output / "checkpoints").exists()
    held_out = ["--set", "validation={data: {suffixes: [.py]}, every_steps: 5}", "--set", "optimizer.max_gradient_norm=0.1"]
    first = shell("train", inputs.run, "--local", "--json", *settings, *held_out)
    assert first.code == 0, first.err
    step = lines(inputs.output / "steps.jsonl")[0]
    assert first.json["validation_loss"] == step["validation_loss"] and 5 < step["validation_loss"] < 50
    assert f"(validation {step['validation_loss']:.4f})" in first.err and step["gradient_norm"] > 0.1
    done = shell("train", inputs.run, "--export", str(written), "--json", *settings)
    assert done.code == 0 and done.json["parameters"] == load_workload(str(written)).model.total_params
    assert sorted(path.name for path in written.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    again = call("train", inputs.run, "--export", str(written), *settings)
    assert again.code == 2 and "exists; name a new folder" in again.err
    gone = f"weights={tmp_path / 'gone'}"
    on = shell("train", inputs.run, "--local", "--json", *settings, "--set", "steps=2", "--set", gone, "--resume")
    assert on.code == 0 and on.json["first_step"] == 2, on.err
    both = call("train", inputs.run, "--export", str(written), "--resume", *settings)
    assert both.code == 2 and "leave out --resume" in both.err
