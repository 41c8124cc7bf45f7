"""`hybridep simulate` on scenarios: runs under conditions, and sweeps that go on where they stopped."""

from __future__ import annotations

import csv
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import Call, Inputs

from hybridep.baselines import Baseline, baseline_plan
from hybridep.codecs import Codecs, TokenCodec
from hybridep.commands import sweeps
from hybridep.commands.inputs import load_cluster, load_workload, resolve_plan
from hybridep.commands.named_plans import named_plan
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.plan import Plan, Popularity, Schedule
from hybridep.routing import RoutingRecord
from hybridep.run import Run
from hybridep.shares import batch_sequences, on_sites
from hybridep.topology import Cluster, cluster_data, only_sites
from hybridep.workload import Workload
from simulator.scenario import Scenario, points


@pytest.fixture
def scenario(inputs: Inputs) -> Callable[..., object]:
    def write(*lines: str) -> object:
        head = f"cluster: {inputs.cluster}\nworkload: {inputs.workload}\n"
        return inputs.write("scenario.yaml", head + "\n".join(lines) + "\n")

    return write


def test_a_run_that_loses_a_site(scenario: Callable[..., object], call: Call) -> None:
    conditions = "conditions: {goodput: 0.95, changes: [{links: 'dc0 up', factor: 0.5}]}"
    lines = ("plan: ep", "against: [full_gather]", "routing: zipf:1.0", conditions)
    step_s = call("simulate", scenario(*lines), "--json").json["step_s"]
    course = f"{{steps: 9, checkpoint_every: 3, restart: 5 s, losses: [{{site: dc1, at: {4.5 * step_s} s}}]}}"
    result = call("simulate", scenario(*lines, f"course: {course}"), "--json")
    assert result.code == 0, result.err
    assert set(result.json["baselines"]) == {"full_gather"}
    # The routing of each step is drawn anew, so steps take about as long as the first.
    assert 9 < result.json["run"]["steps_run"] < 12 and result.json["run"]["loss_total_s"] > 5
    assert len(result.json["run"]["plans"]) == 2
    assert "under 2 plans" in call("simulate", scenario(*lines, f"course: {course}")).out


@pytest.mark.parametrize("shares", [False, True])
def test_sites_that_are_left_share_out_the_batch(
    inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """Of three sites with eight sequences one is lost, also where that had half of them."""
    cluster = inputs.write("four.yaml", inputs.cluster.read_text().replace("name: dc, size: 2", "name: dc, size: 4"))
    workload = inputs.write("two.yaml", inputs.workload.read_text().replace("micro_batch_size: 1", "micro_batch_size: 2"))
    three = on_sites(load_cluster(str(cluster)), load_workload(str(workload)), ("dc0", "dc1", "dc2"))
    if shares:
        sites = [{"name": name, "tokens": tokens} for name, tokens in (("dc0", 2), ("dc1", 1), ("dc2", 1))]
        three = (Cluster.model_validate(cluster_data(three[0]) | {"sites": sites}), three[1])
    baseline_plan(*three, Baseline.EP).save(inputs.folder / "plan.yaml")
    batches = [batch_sequences(*three) * three[1].training.micro_batches]

    def planned(name: str, cluster: Cluster, workload: Workload, **options: Any) -> AnyPlan:
        batches.append(batch_sequences(cluster, workload) * workload.training.micro_batches)
        return named_plan(name, cluster, workload, **options)

    monkeypatch.setattr("hybridep.commands.scenarios.named_plan", planned)
    course = "course: {steps: 3, losses: [{site: dc0, at: 0 s}]}"
    result = call("simulate", inputs.write("lost.yaml", f"plan: {inputs.folder / 'plan.yaml'}\n{course}\n"), "--json")
    assert result.code == 0 and len(result.json["run"]["plans"]) == 2, result.err
    assert batches == [8, 8]


def test_sites_that_are_left_without_room_are_named(scenario: Callable[..., object], inputs: Inputs, call: Call) -> None:
    """Both together have the room that one alone lacks."""
    inputs.workload.write_text(inputs.workload.read_text().replace("size: 16}", "size: 8192}"))
    course = "course: {steps: 3, losses: [{site: dc0, at: 0 s}]}"
    for memory, words in (
        ("1 GiB", ""),
        ("50 MB", "hybridep simulate: course: a plan anew for dc1: no plan fits: dc1/gpu0 needs"),
    ):
        lines = ("planning_time: 2", f"overrides: [cluster.gpu.memory={memory}]")
        assert call("simulate", scenario(*lines), "--json").code == 0
        result = call("simulate", scenario(*lines, course), "--json")
        assert (result.code, words in result.err) == (3 if words else 0, True), result.err


def test_sweeps_go_on_where_they_stopped(scenario: Callable[..., object], inputs: Inputs, call: Call) -> None:
    table = inputs.folder / "table.csv"
    grid = "grid: {plan: [ep, full_gather], cluster.levels.dc.bandwidth: [%s]}"
    options = ("--out", table, "--json")
    first = call("simulate", scenario(grid % "50 Mbps"), *options, "--jobs", "2")
    assert first.code == 0 and first.json["points"] == 2, first.err
    marked = table.read_text().replace("dc0 up", "marked")
    table.write_text(marked)
    second = call("simulate", scenario(grid % "50 Mbps, 200 Mbps, 0 Mbps"), *options, "--jobs", "1")
    assert second.code == 2 and (second.json["points"], second.json["failed"]) == (6, 2)
    text = call("simulate", scenario(grid % "50 Mbps"), *options[:-1]).out.splitlines()
    assert re.fullmatch(
        r"plan ep  cluster.levels.dc.bandwidth 50 Mbps  step [\d.]+ m?s  busiest_link marked  busiest_load 0.\d+", text[0]
    )
    assert text[-1].startswith("2 points in ")
    # A row that was read back says what it said at first, and nothing of the columns that only the others have.
    again = call("simulate", scenario(grid % "50 Mbps"), *options).json["rows"]
    assert again == [row | {"busiest_link": "marked"} for row in first.json["rows"]]
    rows = list(csv.DictReader(table.open()))
    steps = {(row["plan"], row["cluster.levels.dc.bandwidth"]): row["step_s"] for row in rows if not row["error"]}
    assert len(steps) == 4
    for plan in ("ep", "full_gather"):
        assert float(steps[plan, "50 Mbps"]) > 2 * float(steps[plan, "200 Mbps"])
    # Rows of the first call were kept, not made again.
    assert sum(row["busiest_link"] == "marked" for row in rows) == marked.count("marked") > 0
    assert "bandwidth" in next(row["error"] for row in rows if row["error"])


def rows_of(table: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(table.open()))


def test_sweeps_know_what_files_hold_and_keep_other_rows(scenario: Callable[..., object], inputs: Inputs, call: Call) -> None:
    table = inputs.folder / "table.csv"
    options = ("--out", table, "--jobs", 1, "--json")
    first = call("simulate", scenario("routing: zipf:1", "grid: {seed: [1], plan: [ep]}"), *options).json
    # Numbers are numbers, and a grid of one point is a sweep.
    assert first["points"] == 1 and first["rows"][0]["step_s"] > 0 and first["rows"][0]["seed"] == 1
    assert call("simulate", scenario("routing: zipf:1", "grid: {seed: [2], plan: [ep]}"), *options).json["points"] == 1
    assert [row["seed"] for row in rows_of(table)] == ["1", "2"]
    inputs.cluster.write_text(inputs.cluster.read_text().replace("100 Mbps", "50 Mbps"))
    again = call("simulate", scenario("routing: zipf:1", "grid: {seed: [1], plan: [ep]}"), *options).json["rows"][0]
    assert again["step_s"] > 1.5 * first["rows"][0]["step_s"]
    assert [row["seed"] for row in rows_of(table)] == ["2", "1"]
    for text in ("a note\n", "point,step_s\n{},1,2\n"):
        table.write_text(text)
        refused = call("simulate", scenario("routing: zipf:1", "grid: {seed: [1], plan: [ep]}"), *options)
        assert refused.code == 2 and "no table of a sweep" in refused.err and table.read_text() == text


def test_a_file_that_cannot_be_read_is_its_points_error(scenario: Callable[..., object], inputs: Inputs, call: Call) -> None:
    there, table = "/proc/self/mem", inputs.folder / "table.csv"
    grid = scenario("plan: ep", f"grid: {{cluster: [{there}, {inputs.cluster}]}}")
    result = call("simulate", grid, "--out", table, "--jobs", 1, "--json")
    assert result.code == 2 and result.json["failed"] == 1, result.err
    assert f"{there}: cannot be read" in result.json["rows"][0]["error"] and result.json["rows"][1]["step_s"] > 0


def test_a_table_that_a_spreadsheet_has_saved_is_gone_on_with(
    scenario: Callable[..., object], inputs: Inputs, call: Call
) -> None:
    table = inputs.folder / "table.csv"
    grid, options = scenario("plan: ep", "grid: {plan: [ep]}"), ("--out", table, "--jobs", 1, "--json")
    row = call("simulate", grid, *options).json["rows"][0]
    table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes().replace(b"\n", b"\r\n"))
    assert call("simulate", grid, *options).json["rows"] == [row]
    # Some write numbers in another way.
    load = f"{row['busiest_load']:.9g}"
    table.write_text(table.read_text().replace(load, f'"{load.replace(".", ",")}"'))
    assert call("simulate", grid, *options).json["rows"] == [row | {"busiest_load": load.replace(".", ",")}]


def _long_after_the_first(scenario: Scenario) -> dict[str, str]:
    time.sleep(1e5 * scenario.tolerance)
    return {}


def test_an_interrupted_sweep_does_not_simulate_the_rest(
    scenario: Callable[..., Path], inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(table: Path, rows: object) -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(sweeps, "_simulate", _long_after_the_first)
    monkeypatch.setattr(sweeps, "_write", interrupted)
    grid = list(points(scenario("plan: ep", "grid: {tolerance: [0, 0.001, 0.002, 0.003]}")))
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweeps.sweep(grid, inputs.folder / "table.csv", 2)
    assert time.monotonic() - began_s < 60


def _ends_its_process(scenario: Scenario) -> dict[str, str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_lost_process_of_a_sweep_is_no_bug(scenario: Callable[..., Path], call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "_simulate", _ends_its_process)
    result = call("simulate", scenario("plan: ep", "grid: {tolerance: [0, 0.001]}"), "--jobs", 2)
    assert result.code == 5 and "process of the sweep lost" in result.err and "--jobs" in result.err


def test_what_varies_over_a_grid_is_not_given_beside_it(scenario: Callable[..., object], call: Call) -> None:
    grid = "grid: {routing: [uniform, 'zipf:1.5'], plan: [ep], conditions: [{goodput: 0.9}]}"
    for given in (("--routing", "uniform"), ("--set", "plan=full_gather"), ("--set", "conditions.seed=1")):
        result = call("simulate", scenario(grid), *given)
        assert result.code == 2 and f"{given[1].partition('=')[0] if given[0] == '--set' else 'routing'} is given" in result.err
    result = call("simulate", scenario("plan: ep"), "--set", "cluster.levels.dc.bandwidth=1 Gbps")
    assert result.code == 2 and "in `overrides` or in its grid" in result.err
    result = call("simulate", scenario("plan: ep"), "--jobs", 2)
    assert result.code == 2 and "--jobs 2: processes of a sweep" in result.err
    assert call("simulate", scenario("plan: ep", "tolerance: 0"), "--json").code == 0


def test_overrides_of_a_grid_keep_its_other_keys(scenario: Callable[..., object]) -> None:
    grid = "grid: {cluster.name: [a], overrides: [['workload.name=b'], ['workload.name=c']]}"
    made = points(Path(str(scenario("overrides: [workload.name=d]", grid))))
    assert [one.overrides for _, one in made] == [(f"workload.name={name}", 'cluster.name="a"') for name in "bc"]


def test_what_varies_inside_what_varies_counts(scenario: Callable[..., object]) -> None:
    for keys in (("conditions", "conditions.goodput"), ("conditions.goodput", "conditions")):
        values = {"conditions": "[{goodput: 0.9, window: 3 B}]", "conditions.goodput": "[0.5]"}
        grid = ", ".join(f"{key}: {values[key]}" for key in keys)
        ((_, one),) = points(Path(str(scenario(f"grid: {{{grid}}}"))))
        assert (one.conditions.goodput, one.conditions.window) == (0.5, 3)


def test_baselines_have_as_many_connections_as_plans(inputs: Inputs) -> None:
    inputs.cluster.write_text(inputs.cluster.read_text().replace("latency: 0.2 ms", "latency: 20 ms, window: 1 KiB"))
    cluster, workload = load_cluster(str(inputs.cluster)), load_workload(str(inputs.workload))
    made = named_plan("ep", cluster, workload)
    assert isinstance(made, Plan)
    assert made.schedule.streams["dc"] > 1
    run = Run(name="trial", cluster=str(inputs.cluster), workload=str(inputs.workload), plan="ep", output=inputs.folder, steps=1)
    assert resolve_plan(run).schedule == made.schedule


def test_new_plans_keep_codecs_and_parts(inputs: Inputs) -> None:
    cluster, workload = load_cluster(str(inputs.cluster)), load_workload(str(inputs.workload))
    before = baseline_plan(
        cluster, workload, Baseline.EP, schedule=Schedule(chunks=2, overlap=False), codecs={"dc": Codecs(tokens=TokenCodec.FP8)}
    )
    made = named_plan("best.yaml", cluster, workload, before=before)
    assert made.codecs == before.codecs and not made.schedule.overlap
    # Parts are wished for, and given where they bring something.
    asked = dict[str, object]()

    def plan(*_: object, **wishes: object) -> Plan:
        asked.update(wishes)
        return before

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("planner.plan", plan)
        named_plan("best.yaml", cluster, workload, before=before)
    assert asked["most_chunks"] == 2


def test_a_pipeline_whose_sites_are_lost_ends_without_stages(inputs: Inputs) -> None:
    cluster, workload = load_cluster(str(inputs.cluster)), load_workload(str(inputs.workload))
    before = named_plan("stages", cluster, workload)
    assert isinstance(before, PipelinePlan)
    assert isinstance(named_plan("stages", only_sites(cluster, {"dc0"}), workload, before=before), Plan)


def test_plans_made_now_are_what_plan_makes(scenario: Callable[..., object], inputs: Inputs, call: Call) -> None:
    rates = "sites: [{name: a, up: 50 Mbps}, {name: b, down: 51 Mbps}]\n"
    inputs.cluster.write_text(inputs.cluster.read_text() + rates)
    calls = list[float]()

    def planned(cluster: Cluster, workload: Workload, time_limit_s: float, *, free_homes: bool, popularity: Popularity) -> Plan:
        assert free_homes and not popularity
        calls.append(time_limit_s)
        return baseline_plan(cluster, workload, Baseline.EP)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hybridep.commands.plan_choice.planned", planned)
        assert call("simulate", scenario("planning_time: 3"), "--json").code == 0
    assert calls == [3.0]


def test_bad_scenarios_name_the_place(scenario: Callable[..., object], call: Call) -> None:
    for line, expected in (
        ("step: 3", "unknown key"),
        ("plan: best.yaml", "leave them out"),
        ("plan: fullgather", "plan 'fullgather': no such plan; did you mean 'full_gather'?, or give the path of a plan file"),
        ("against: [magic]", "no such baseline"),
        ("routing: zip:1", "zipf:1.2"),
        ("conditions: {changes: [{links: 'x up', factor: 1}]}", "changes: no link is named 'x up'"),
        ("conditions: {jitter: [{links: 'x up', spread: 0.1, period: 1 s}]}", "jitter: no link is named 'x up'"),
        ("conditions: {jitter: [{spread: 0.1, period: 1 us}]}", "jitter.0.period: Input should be greater than or equal to"),
        ("conditions: {stragglers: [{worker: x, slowdown: 2}]}", "no worker 'x'"),
        ("grid: {drift: [0.1, 3]}", "drift=3"),
        ("grid: {seed: [2020-01-01]}", "put a date in quotes"),
        ("grid: {seed: [0, 1, 0]}", "grid.seed: has 0 twice"),
        ("against: !!set {ep}", "put a date in quotes"),
        ("seed: -1", "seed"),
        ("conditions: {seed: -1}", "conditions.seed"),
        ("course: {steps: 1, losses: [{site: x, at: 9 h}]}", "losses: no site 'x'"),
        # What would do nothing.
        ("conditions: {streams: 8}", "conditions.streams: 8 connections"),
        ("drift: 0.1", "drift: 0.1 moves what routing: zipf"),
        ("drift: 0.1\nrouting: zipf:1", "drift: 0.1 moves popularity from step to step"),
        ("grid: {seed: [0, 1, 2]}", "seed: 2 draws what tokens choose"),
        ("conditions: {seed: 3}", "conditions.seed: 3 draws jitter"),
        ("course: {steps: 3, restart: 2 min}", "course.restart: 120 s follows a loss"),
        ("course: {steps: 3, switch: 2 s}", "course.switch: 2 s is the price"),
        ("plan: auto\ncourse: {steps: 3, replan_every: 3}", "course.replan_every: 3 steps"),
        ("course: {steps: 3, replan_every: 2}", "course.replan_every: plan: ep stays as it is"),
    ):
        result = call("simulate", scenario(line if line.startswith("plan:") else f"plan: ep\n{line}"))
        assert result.code == 2 and expected in result.err, (line, result.err)


def test_what_some_points_of_a_grid_use_is_not_refused_at_the_others(scenario: Callable[..., Path]) -> None:
    lines = ("course: {steps: 2, restart: 1 s}", "seed: 1", "drift: 0.1")
    varied = "{routing: [uniform, 'zipf:1'], plan: [ep, full_gather], course.losses: [[], [{site: dc1, at: 1 s}]]}"
    assert len(list(points(scenario(*lines, f"grid: {varied}")))) == 8


def test_what_a_simulation_does_not_meet_is_said(scenario: Callable[..., object], call: Call) -> None:
    late = "{links: 'dc0 up', factor: 0.5, start: 10 min}"
    stragglers = "[{worker: dc0, slowdown: 2, start: 11 min}, {worker: dc1, slowdown: 2}]"
    lines = ("plan: ep", f"conditions: {{changes: [{late}], stragglers: {stragglers}}}")
    met = scenario(*lines, "course: {steps: 2, losses: [{site: dc1, at: 9 h}]}")
    expected = ["'dc0 up' changes at 600 s", "dc0 is slow from 660 s on", "dc1 is lost at 32400 s"]
    assert call("simulate", met, "--json").json["not_met"] == expected
    assert "ends before: " + ", ".join(expected) in " ".join(call("simulate", met).out.split())
    assert call("simulate", scenario(*lines), "--json").json["not_met"] == expected[:2]
    assert call("simulate", scenario("plan: ep"), "--json").json["not_met"] == []


def test_who_is_slow_while_no_step_begins_is_not_met(scenario: Callable[..., object], call: Call) -> None:
    step_s = call("simulate", scenario("plan: ep"), "--json").json["step_s"]
    for begins, course, expected in (
        (0.5, "", ["dc0 is slow from 5 s on, within a step"]),
        (0.5, "course: {steps: 2}", []),
        (1.5, "course: {steps: 2}", ["dc0 is slow from 5 s on, within a step"]),
    ):
        slow = f"conditions: {{stragglers: [{{worker: dc0, slowdown: 9, start: {begins * step_s} s}}]}}"
        result = call("simulate", scenario("plan: ep", slow, course), "--json").json
        assert [re.sub(r"from .* on", "from 5 s on", one) for one in result["not_met"]] == expected
        assert (result.get("run", {}).get("total_s", 0) > 2.01 * step_s) == (course != "" and not expected)


def test_a_pipeline_that_does_not_fit_is_said_beside_the_rest(
    scenario: Callable[..., object], inputs: Inputs, call: Call
) -> None:
    three = inputs.cluster.read_text().replace("name: dc, size: 2", "name: dc, size: 3")
    inputs.cluster.write_text(three)
    lines = ("plan: ep", "against: [pipeline, full_gather]", "overrides: [workload.model.num_layers=2]")
    result = call("simulate", scenario(*lines), "--json")
    assert result.code == 0, result.err
    assert set(result.json["baselines"]) == {"full_gather"} and "no number of stages" in result.json["do_not_fit"]["pipeline"]
    shown = call("simulate", scenario(*lines)).out
    assert "  pipeline: does not fit: no number of stages" in shown and "  full_gather: " in shown


def test_plans_without_room_are_simulated_and_it_is_said(
    scenario: Callable[..., object], inputs: Inputs, call: Call, tmp_path: Path
) -> None:
    path = inputs.folder / "plan.yaml"
    for stages in ((), ("--stages", "2")):
        made = call("plan", inputs.cluster, inputs.workload, "-o", path, "--time-limit", 1, "--json", *stages)
        known = call("simulate", path, "--json").json["memory"]
        assert known["bytes"] == made.json["memory_bytes"] and known["fits"] and known["capacity_bytes"] == 2**30
    assert f"memory of the fullest rank ({known['fullest_rank']}): " in call("simulate", path).out
    least = ("plan: ep", "overrides: [gpu.memory=1 KB]")
    lacking = call("simulate", scenario(*least), "--json")
    assert lacking.code == 0 and lacking.json["step_s"] > 0 and not lacking.json["memory"]["fits"]
    assert "does not fit: dc0/gpu0 needs " in call("simulate", scenario(*least)).out
    grid = scenario("plan: ep", "grid: {cluster.gpu.memory: [1 KB, 1 GB]}")
    rows = call("simulate", grid, "--out", tmp_path / "table.csv", "--json").json["rows"]
    assert [row["fits"] for row in rows] == [False, True]
    assert rows[0]["memory_bytes"] == pytest.approx(lacking.json["memory"]["bytes"], rel=1e-8)
    lines = call("simulate", grid, "--out", tmp_path / "table.csv").out.splitlines()
    assert lines[0].endswith("  fits false") and "fits" not in lines[1]


def test_a_link_that_stays_cut_is_the_users(scenario: Callable[..., object], call: Call) -> None:
    result = call("simulate", scenario("plan: ep", "conditions: {changes: [{links: 'dc0 up', factor: 0}]}"))
    assert result.code == 2 and "waits for a cut link: dc0 up" in result.err


def test_recorded_choices_are_simulated_as_they_were(scenario: Callable[..., object], inputs: Inputs, call: Call) -> None:
    even = call("simulate", scenario("plan: ep"), "--json").json["step_s"]
    model = load_workload(str(inputs.workload)).model
    # All tokens of both ranks choose the experts of the second site.
    choices = np.tile(np.array([2, 3]), (2, 16, 1))
    chosen = np.zeros((model.num_moe_layers, model.num_experts), dtype=np.int64)
    chosen[:, 2:] = 16
    for name, record in (
        ("choices", RoutingRecord(chosen=chosen, choices={(layer, 0): choices for layer in range(model.num_moe_layers)})),
        ("popularity", RoutingRecord(chosen=chosen)),
    ):
        path = inputs.folder / f"{name}.npz"
        record.save(path)
        result = call("simulate", scenario("plan: ep", f"routing: {path}"), "--json")
        assert result.code == 0, result.err
        assert result.json["step_s"] > even * 1.001, name
        assert result.json["step_s"] == call("simulate", scenario("plan: ep"), "--routing", path, "--json").json["step_s"]
    assert "no such file" in call("simulate", scenario("plan: ep", "routing: missing.npz")).err


def test_a_run_goes_round_the_recorded_steps(scenario: Callable[..., object], inputs: Inputs, call: Call) -> None:
    model = load_workload(str(inputs.workload)).model
    crowded, apart = np.tile(np.array([2, 3]), (2, 16, 1)), np.array([[0, 1], [2, 3]])[:, None, :].repeat(16, axis=1)
    chosen = np.ones((model.num_moe_layers, model.num_experts), dtype=np.int64)
    alone_s = []
    for ids in (crowded, apart):
        path = inputs.folder / "one.npz"
        RoutingRecord(chosen=chosen, choices={(layer, 0): ids for layer in range(model.num_moe_layers)}).save(path)
        alone_s.append(call("simulate", scenario("plan: ep", f"routing: {path}"), "--json").json["step_s"])
    path = inputs.folder / "two.npz"
    choices = {(layer, step): ids for layer in range(model.num_moe_layers) for step, ids in enumerate((crowded, apart))}
    RoutingRecord(chosen=chosen, choices=choices).save(path)
    result = call("simulate", scenario("plan: ep", f"routing: {path}", "course: {steps: 3}"), "--json")
    assert result.code == 0, result.err
    assert alone_s[0] > 1.001 * alone_s[1]
    step_s = result.json["run"]["step_s"]
    # Crowded, apart, crowded.
    assert [step_s["min"], step_s["median"], step_s["max"]] == pytest.approx([alone_s[1], alone_s[0], alone_s[0]])


@pytest.mark.turns(4)
def test_a_plan_on_a_mixnet(inputs: Inputs, call: Call) -> None:
    levels = "\n".join(
        f"- {{name: {name}, size: {size}, bandwidth: 8 Gbps, latency: 0.1 ms}}"
        for name, size in (("dc", 2), ("node", 2), ("gpu", 2))
    )
    gpu = "gpu: {throughput: 10 GFLOPS, memory: 1 GiB, memory_bandwidth: 5 GB/s}"
    cluster = inputs.write("nodes.yaml", f"name: nodes\nlevels:\n{levels}\n{gpu}\n")
    plan = inputs.folder / "nodes-plan.yaml"
    workload = load_workload(str(inputs.workload), ["model.num_experts=8"])
    baseline_plan(load_cluster(str(cluster)), workload, Baseline.EP).save(plan)
    options = ("--routing", "zipf:1", "--json")
    plain = call("simulate", plan, *options).json["step_s"]
    fabric = inputs.write("mixnet.yaml", "name: optics\ninside: {mixnet: {reconfiguration: 7 s}}\n")
    slow = call("simulate", plan, "--fabric", fabric, *options)
    assert slow.code == 0, slow.err
    assert slow.json["parts"]["reconfiguration"] >= 7 - 0.1
    assert slow.json["step_s"] > plain + 6
    assert call("simulate", plan, "--fabric", "mixnet", *options).code == 0
    for lines, key in (("{mixnet: {reconfiguration: 7}}", "reconfiguration"), ("{mixnet: {region: 3}}", "region: 3")):
        wrong = call("simulate", plan, "--fabric", inputs.write("wrong.yaml", f"name: wrong\ninside: {lines}\n"))
        assert (wrong.code, key in wrong.err) == (2, True), wrong.err
