"""Pipeline plans on the command line: ``hybridep plan --stages``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridep.commands.common import emit, note, stdout_console
from hybridep.errors import UserError
from hybridep.plan import Objective

if TYPE_CHECKING:
    from hybridep.commands.sites_choice import Staged
    from hybridep.commands.stage_choice import StageChoice
    from hybridep.pipeline import AnyPlan, PipelinePlan
    from hybridep.plan import Plan
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from planner import Goal, StageWishes

AUTO = "auto"


def write_in_stages(
    cluster: Cluster,
    workload: Workload,
    text: str,
    output: Path,
    wishes: StageWishes,
    *,
    fewer: bool,
    time_limit_s: float,
    as_json: bool,
) -> None:
    """``--stages TEXT``: the pipeline is written and shown, or a plan without stages where that is better and no number was asked
    for. ``fewer``: for the sites that pay only."""
    import planner
    from hybridep.commands.sites_choice import Asked, plan_sites
    from hybridep.shares import unequal_shares

    asked = Asked(cluster=cluster, workload=workload, wishes=replace(wishes, stages=_read_stages(text)))
    made = plan_sites(
        asked,
        or_without=text == AUTO,
        fewer=fewer,
        time_limit_s=time_limit_s,
        tell=lambda words: note(f"hybridep plan: {words}"),
        shown=True,
    )
    made.best.save(output)
    least, alone, wishes = None, None, asked.wishes
    try:
        if fewer and len(asked.sites) > 1 and not unequal_shares(cluster):
            least = planner.least_of_any(cluster, workload, wishes)
        if len(made.asked.sites) > 1:
            # Of all sites and their micro-batches: what fewer sites have are smaller, and would slow it down.
            alone = planner.alone(
                cluster, workload, popularity=wishes.popularity, goal=wishes.goal, constraints=wishes.constraints
            )
    except KeyboardInterrupt:
        note(f"hybridep plan: interrupted; plan written to {output}")
        raise
    told = _Told(made=made, alone=alone, least=least, goal=asked.wishes.goal)
    if as_json:
        emit(told.to_json() | {"output": str(output)})
    else:
        told.show(output)


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What was planned, and what is told of it."""

    made: Staged
    alone: Plan | None
    """One site by itself; None where that is not possible, or all there is."""
    least: float | None
    """What no choice of sites is better than, if that was asked for: seconds, or dollars where the goal is these."""
    goal: Goal
    """Of all sites: those that were chosen may have no prices."""

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        import planner
        from hybridep.commands.codecs import lossy_codecs
        from hybridep.pipeline import PipelinePlan

        made, best = self.made, self.made.best
        more: dict[str, Any] = {"left_out": list(made.left_out), "alone_s": _expected_s(self.alone)}
        if self.least is not None:
            more[f"least_of_any_sites_{'usd' if self.goal.objective is Objective.DOLLARS else 's'}"] = self.least
        if not isinstance(best, PipelinePlan):
            return {**planner.summary(best), "stages": [], "digest": best.digest, **more, "lossy_codecs": lossy_codecs(best)}
        more |= {"without_stages_s": _expected_s(made.without), "simulated_s": made.chosen.simulated_s}
        return {**planner.pipeline_summary(best), **more, "lossy_codecs": lossy_codecs(best)}

    def show(self, output: Path) -> None:
        """Prints it for people."""
        import planner
        from hybridep.commands import plan_text
        from hybridep.commands.codecs import codec_lines
        from hybridep.pipeline import PipelinePlan
        from hybridep.units import format_dollars

        made, best = self.made, self.made.best
        if not isinstance(best, PipelinePlan):
            plan_text.show(best, planner.explain(best, made.asked.wishes.constraints, one_site=self.alone))
            for line in codec_lines(best):
                click.echo(line)
            self._show_least()
            click.echo(f"\nplan written to {output}, without stages")
            return
        others_s = {"without stages": _expected_s(made.without)}
        if self.alone is not None:
            others_s[f"{self.alone.cluster.site_name(0)} alone"] = _expected_s(self.alone)
        _show_pipeline(best, made.chosen, {name: other_s for name, other_s in others_s.items() if other_s is not None})
        self._show_least()
        if self.alone is not None and made.asked.worth(self.alone) < made.worth:
            dollars = made.asked.wishes.goal.objective is Objective.DOLLARS
            better = f"cheaper ({format_dollars(self.alone.predicted.cost_usd)})" if dollars else "faster"
            click.echo(f"{self.alone.cluster.site_name(0)} alone is {better}: the other sites do not pay {plan_text.FEWER}")
        click.echo(f"\nplan written to {output}")

    def _show_least(self) -> None:
        from hybridep.units import format_dollars, format_seconds

        if self.least is None:
            return
        best, least, dollars = self.made.best, self.least, self.goal.objective is Objective.DOLLARS
        value = self.goal.value(best.predicted.expected_s, best.predicted.cost_usd)
        text = f"cheaper than {format_dollars(least)}" if dollars else f"faster than {format_seconds(least)}"
        # One site may cost nothing where only bytes have a price.
        gap = 1 - least / value if value > 0 else 0.0
        click.echo(f"no plan for any of the sites is {text} (gap {gap:.0%})")


def _expected_s(plan: AnyPlan | None) -> float | None:
    return None if plan is None or plan.prediction is None else plan.prediction.expected_s


def _read_stages(text: str) -> int | None:
    """A number of stages from 2, or ``auto`` (None). Raises UserError."""
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) < 2:
        raise UserError(f"--stages {text}: write auto, or a number from 2")
    return int(text)


def _show_pipeline(plan: PipelinePlan, choice: StageChoice, others_s: dict[str, float]) -> None:
    """Print it for people; ``choice``: the same, as it was simulated. ``others_s``: steps of other plans."""
    from rich.table import Table

    from hybridep.commands.codecs import codec_lines
    from hybridep.commands.plan_text import few, placed_text
    from hybridep.units import counted, format_bytes, format_dollars, format_seconds
    from planner.stages.report import pipeline_summary

    found, console = pipeline_summary(plan), stdout_console()
    cluster, step_s = plan.cluster, found["step_s"]
    console.print(
        f"[bold]{plan.workload.name}[/bold] on [bold]{cluster.name}[/bold]: {counted(cluster.num_gpus, 'rank')}, "
        f"{counted(len(plan.stages), 'stage')}, {counted(plan.micro_batches, 'micro-batch')}, "
        f"each stage up to {counted(plan.ahead, 'forward')} ahead for each stage behind it"
    )
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
    inside: dict[str, list[str]] = {}
    for number, one in enumerate(plan.stages):
        text = " | ".join(placed_text(cluster.levels[0].name, group) for group in one.layers)
        inside.setdefault(text, []).append(str(number))
    for text, stages in inside.items():
        console.print(f"  inside stage {', '.join(stages)}: {text}")
    parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in found["parts_s"].items())
    console.print(f"step [bold]{format_seconds(step_s)}[/bold]: {parts}")
    if choice.simulated_s is not None:
        among = f", the best of {choice.simulated} pipelines" if choice.simulated > 1 else ""
        console.print(f"  simulated: {format_seconds(choice.simulated_s)}{among}")
    else:
        console.print("  not simulated here; hybridep simulate does it")
    fit = {*found["baselines_that_fit"], *others_s}
    for name, other_s in (dict(found["baselines"]) | others_s).items():
        console.print(f"  {name}: {format_seconds(other_s)} (x {other_s / step_s:.2f}){'' if name in fit else ', does not fit'}")
    if found["lower_bound_s"] is not None:
        console.print(f"no schedule of this plan is faster than {format_seconds(found['lower_bound_s'])}")
    console.print(f"no pipeline is faster than {format_seconds(found['bound_s'])} (gap {found['gap']:.0%})")
    console.print(
        f"WAN {format_bytes(found['wan_bytes'])} per step; memory of the fullest rank {format_bytes(found['memory_bytes'])}"
    )
    if plan.prediction is not None and plan.prediction.cost is not None:
        console.print(f"price of a step: {format_dollars(plan.prediction.cost)}")
    for line in codec_lines(plan):
        click.echo(line)
