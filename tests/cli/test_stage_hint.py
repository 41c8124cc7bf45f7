"""``hybridep plan`` without stages says what a pipeline would take: beside the plan, and where no plan fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_cases import CLUSTER, SLOW, Call, Inputs, Result, in_stages

from hybridep.pipeline import load_any_plan

pytestmark = pytest.mark.timeout(120)


def plan(inputs: Inputs, call: Call, *more: str, cluster: str = SLOW) -> tuple[Path, Result]:
    path = inputs.folder / "plan.yaml"
    return path, call("plan", inputs.write("slow.yaml", cluster), inputs.workload, "-o", path, "--time-limit", "5", *more)


def test_what_stages_would_take_stands_beside_the_plan(inputs: Inputs, call: Call) -> None:
    path, told = plan(inputs, call, "--json")
    hint = told.json["in_stages"]
    assert hint["num_stages"] == 2 and hint["step_usd"] is None
    searched_path, searched = in_stages(inputs, call, "--stages", "2", "--json")
    pipeline = load_any_plan(searched_path)
    # A search begins where the look ends.
    assert searched.json["objective_s"] <= hint["step_s"] < told.json["step_s"]
    assert 0 < hint["wan_bytes"] < told.json["wan_bytes"] and 0 < hint["memory_bytes"] <= pipeline.cluster.gpu.memory
    shown = plan(inputs, call)[1]
    [row] = [line for line in shown.out.splitlines() if line.startswith("2 stages (--stages auto)")]
    assert re.search(rf"x {hint['step_s'] / told.json['step_s']:.2f}\b", row) and "stages are faster" in shown.out
    assert load_any_plan(path).digest == told.json["digest"], "it changes nothing"


def test_slower_stages_are_not_advised(inputs: Inputs, call: Call) -> None:
    busy = CLUSTER.replace("100 Mbps", "80 Gbps").replace("10 GFLOPS", "0.01 GFLOPS")
    shown = plan(inputs, call, cluster=busy)[1]
    assert "2 stages (--stages auto)" in shown.out and "stages are" not in shown.out


def test_where_no_plan_fits_stages_that_do_are_named(inputs: Inputs, call: Call) -> None:
    path, none = plan(inputs, call, "--set", "gpu.memory=1 kB")
    assert none.code == 3 and "In stages" not in none.err, "nor does a pipeline fit"
    [least_kb] = re.findall(r"needs ([\d.]+) kB with the configuration that needs least", none.err)
    least = "--set", f"gpu.memory={0.98 * float(least_kb)} kB"
    told = plan(inputs, call, *least)[1]
    assert told.code == 3 and "In stages it is possible: a short look finds a step of " in told.err and not path.exists()
    assert in_stages(inputs, call, "--stages", "auto", *least)[1].code == 0


def test_nothing_is_said_of_stages_that_cannot_be(inputs: Inputs, call: Call) -> None:
    alone = CLUSTER.replace("name: dc, size: 2", "name: dc, size: 1")
    tied = inputs.workload.read_text(encoding="utf-8").replace("model: {", "model: {tie_embeddings: true, ")
    for more, cluster in (((), alone), (("--pool", "4"), SLOW), (("--within", "0.1"), SLOW), (("--max-loss", "0"), SLOW)):
        assert plan(inputs, call, *more, "--json", cluster=cluster)[1].json["in_stages"] is None, more
    inputs.workload.write_text(tied, encoding="utf-8")
    told = plan(inputs, call, "--json")[1]
    assert told.code == 0 and told.json["in_stages"] is None, told.err
