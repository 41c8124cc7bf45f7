"""What ``hybridep plan --stages`` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hybridep.commands.common import stdout_console

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

    from hybridep.commands.stage_choice import StageChoice
    from hybridep.pipeline import PipelinePlan


def show_pipeline(plan: PipelinePlan, choice: StageChoice, others_s: dict[str, float]) -> None:
    """Print it for people; ``choice``: the same, as it was simulated. ``others_s``: steps of other plans."""
    from rich.table import Table
    from rich.text import Text

    from hybridep.commands.codecs import codec_lines
    from hybridep.commands.plan_text import few
    from hybridep.units import counted, format_bytes, format_dollars, format_seconds
    from planner.stages.report import pipeline_summary

    found, console = pipeline_summary(plan), stdout_console()
    cluster, step_s = plan.cluster, found["step_s"]
    counts = (
        f": {counted(cluster.num_gpus, 'rank')}, "
        f"{counted(len(plan.stages), 'stage')}, {counted(plan.micro_batches, 'micro-batch')}, "
        f"each stage up to {counted(plan.ahead, 'forward')} ahead for each stage behind it"
    )
    console.print(Text.assemble((plan.workload.name, "bold"), " on ", (cluster.name, "bold"), counts))
    table = Table("stage", "sites", "layers", "a micro-batch", "sequences", "in flight", "memory", box=None, pad_edge=False)
    for number, stage in enumerate(found["stages"]):
        both_s = stage["forward_s"] + stage["backward_s"]
        cells = (
            str(number),
            few(stage["sites"]),
            str(stage["num_layers"]),
            format_seconds(both_s),
            " or ".join(str(number) for number in sorted(set(stage["sequences"]))),
            str(stage["in_flight"]),
        )
        table.add_row(*cells, format_bytes(stage["memory_bytes"]))
    console.print(table)
    console.print(_inside(plan))
    parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in found["parts_s"].items())
    console.print(Text.assemble("step ", (format_seconds(step_s), "bold"), f": {parts}"))
    if choice.simulated_s is not None:
        among = f", the best of {choice.simulated} pipelines" if choice.simulated > 1 else ""
        console.print(f"  simulated: {format_seconds(choice.simulated_s)}{among}")
    else:
        console.print("  not simulated here; hybridep simulate does it")
    fit = {*found["baselines_that_fit"], *others_s}
    beside = Table("beside it", "step", "", "", box=None, pad_edge=False)
    for name, other_s in (dict(found["baselines"]) | others_s).items():
        note = "" if name in fit else "does not fit"
        beside.add_row(name, format_seconds(other_s), f"x {other_s / step_s:.2f}", note)
    console.print(beside)
    if found["lower_bound_s"] is not None:
        console.print(f"no schedule of this plan is faster than {format_seconds(found['lower_bound_s'])}")
    least = f"faster than {format_seconds(found['bound_s'])}"
    if (least_usd := found["cost_bound_usd"]) is not None:
        least = f"cheaper than {format_dollars(least_usd)}"
    console.print(f"no pipeline is {least} (gap {found['gap']:.0%})")
    console.print(
        f"WAN {format_bytes(found['wan_bytes'])} per step; memory of the fullest rank {format_bytes(found['memory_bytes'])}"
    )
    if plan.prediction is not None and plan.prediction.cost is not None:
        console.print(f"price of a step: {format_dollars(plan.prediction.cost)}")
    for line in codec_lines(plan):
        click.echo(line)


def _inside(plan: PipelinePlan) -> Table:
    """Who computes what inside stages: a row for each group of layers, stages that are alike together."""
    from rich.table import Table

    from hybridep.commands.plan_text import cell_text, layers_text
    from hybridep.plan import Residency

    wide = [place for place in range(len(plan.cluster.levels)) if any(one.cluster.sizes[place] > 1 for one in plan.plans)]
    names = [plan.cluster.levels[place].name for place in wide]
    alike = dict[tuple[tuple[str, ...], ...], list[str]]()
    for number, (stage, one) in enumerate(zip(plan.stages, plan.plans, strict=True)):
        rows = []
        for group in stage.layers:
            places = [cell_text(group, name, one.cluster.sizes[place]) for place, name in zip(wide, names, strict=True)]
            lasting = "micro-batch" if group.residency is Residency.MICROBATCH else "step"
            rows.append((layers_text(group), *places, lasting, " and ".join(group.recompute.names)))
        alike.setdefault(tuple(rows), []).append(str(number))
    again = any(row[-1] for group_rows in alike for row in group_rows)
    columns = ("inside", "layers of it", *names, "copies live for a", *(["computes again"] if again else []))
    table = Table(*columns, box=None, pad_edge=False)
    for group_rows, numbers in alike.items():
        for place, row in enumerate(group_rows):
            table.add_row(", ".join(numbers) if place == 0 else "", *row[: len(columns) - 1])
    return table


def show_top(found: Sequence[StageChoice], files: Sequence[Path]) -> None:
    """The chosen plan and the next ones, each with its file, and their codecs."""
    from hybridep.commands.codecs import codecs_text
    from hybridep.commands.plan_text import few
    from hybridep.pipeline import PipelinePlan
    from hybridep.units import counted, format_bytes, format_dollars, format_seconds

    for number, (one, path) in enumerate(zip(found, files, strict=True), start=1):
        plan, said = one.plan, one.plan.predicted
        simulated = "" if one.simulated_s is None else f", simulated {format_seconds(one.simulated_s)}"
        price = "" if said.cost is None else f", {format_dollars(said.cost)}"
        told = f"{format_seconds(said.expected_s)}{simulated}{price}, memory {format_bytes(said.memory_bytes)}"
        click.echo(f"  {number}. {path}: {told}")
        if isinstance(plan, PipelinePlan):
            stages = " | ".join(f"{few(stage.sites)}: {stage.num_layers}" for stage in plan.stages)
            click.echo(f"     {counted(plan.micro_batches, 'micro-batch')}, {plan.ahead} ahead; sites and layers: {stages}")
        else:
            click.echo("     without stages")
        if text := codecs_text([other.plan for other in found], plan):
            click.echo(f"     codecs: {text}")
