"""What ``hybridep plan`` prints for people."""

from __future__ import annotations

import pytest
from cli_cases import Call, Inputs

from hybridep.commands.inputs import cluster_and_workload
from hybridep.commands.plan_choice import SimulatedChoice
from hybridep.commands.plan_text import show, show_choice
from hybridep.config import build
from planner import Constraints, baseline, explain


def test_one_site_alone_has_a_price_where_plans_for_all_have_one(inputs: Inputs, call: Call) -> None:
    """Nothing, where what costs is links, of which it has none."""
    links = [f"{{src: {src}, dst: {dst}, bandwidth: 50 Mbps, latency: 1 ms, egress: 0.02 $/GB}}" for src, dst in ("ab", "ba")]
    sites = f"sites: [{{name: a}}, {{name: b}}]\nlinks: [{', '.join(links)}]\n"
    priced = inputs.write("priced.yaml", inputs.cluster.read_text(encoding="utf-8") + sites)
    result = call("plan", priced, inputs.workload, "-o", inputs.folder / "plan.yaml", "--time-limit", "2")
    assert result.code == 0, result.err
    row = next(line for line in result.out.splitlines() if line.startswith("a alone "))
    assert "  0 $  " in row and row.index("0 $") < row.index("0 B")


def test_reasons_of_what_only_saves(capsys: pytest.CaptureFixture[str]) -> None:
    """Copies ahead of their blocks lengthen nothing."""
    plan = baseline(*cluster_and_workload("lab-4dc", "tiny", ()), "full_gather")
    show(plan, explain(plan), whole=True)
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  copies ahead (--prefetch): ")]
    shorter, _, saves = told.partition(" shorter: ")
    assert saves == f"saves {shorter.rpartition(': ')[2]}"


def test_what_the_plan_that_costs_least_costs_less(capsys: pytest.CaptureFixture[str]) -> None:
    plan = baseline(*cluster_and_workload("lab-4dc", "tiny", ()), "ep")
    show_choice(SimulatedChoice(plan=plan, simulated=2, shorter=0.5, dearer=0.25))
    assert "which costs 20.0% less" in capsys.readouterr().out


def test_rows_are_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    plan = baseline(*cluster_and_workload("lab-4dc", "tiny", ()), "full_gather")
    rules = build(Constraints, {"rules": [{"name": "a", "kind": "forbid", "sites": ["dc0"], "experts": "0-3"}]}, "rules")
    show(plan, explain(plan, rules))
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("copies ahead (--prefetch)  ")]
    assert " breaks a rule  " in row


def test_names_are_shown_as_they_are(inputs: Inputs, call: Call) -> None:
    """With what rich would take for markup, which it leaves out or stumbles over, or for emoji; and figures for formulas."""
    sites = "sites: [{name: 'eu[1]'}, {name: 'b[/x]:smile:$\\q$', up: 50 Mbps}]\n"
    cluster = inputs.write(
        "names.yaml", inputs.cluster.read_text(encoding="utf-8").replace("name: two", "name: two[bold]") + sites
    )
    named = ("--set", "workload.name=small[base]", "--time-limit", "0.5", "--explain")
    for stages in ((), ("--stages", "2")):
        path = inputs.folder / f"plan{len(stages)}.yaml"
        result = call("plan", cluster, inputs.workload, "-o", path, *named, *stages, "--figure", path.with_suffix(".png"))
        assert result.code == 0 and result.out.startswith("small[base] on two[bold]: 2 ranks"), result.err
        assert "eu[1] alone" in result.out and "b[/x]:smile:$\\q$ up " in result.out
        assert "b[/x]:smile:$\\q$ up " in call("simulate", path).out
    compared = call("plan", "--compare", inputs.folder / "plan0.yaml", inputs.folder / "plan2.yaml")
    assert compared.code == 0 and "  b[/x]:smile:$\\q$: layers 0-1 -> layer" in compared.out, compared.err
