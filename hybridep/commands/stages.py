"""Pipeline plans on the command line: ``hybridep plan --stages``."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridep.commands.common import emit, note
from hybridep.errors import HybridEPError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridep.commands.stage_choice import StageChoice
    from hybridep.pipeline import AnyPlan
    from hybridep.plan import Plan
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from planner import Goal, StageWishes

AUTO = "auto"
_SHARE = 0.5
"""Of the time limit, for a plan without stages."""


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
    from hybridep.commands import plan_text
    from hybridep.commands.codecs import lossy_codecs
    from hybridep.commands.plan_choice import planned
    from hybridep.commands.stage_choice import CHOOSING, in_stages
    from hybridep.pipeline import codecs_inside

    wishes, least, left_out = replace(wishes, stages=_read_stages(text)), None, list[str]()
    if fewer and cluster.sizes[0] > 1:
        every, began_s = _names(cluster), time.monotonic()
        found = _on_fewer(cluster, workload, wishes, text, time_limit_s=time_limit_s)
        if found is not None:
            least = planner.least_of_any(cluster, workload, wishes)
            cluster, workload, wishes = found
        time_limit_s = max(time_limit_s - (time.monotonic() - began_s), (1 - CHOOSING) * time_limit_s)
        left_out = [name for name in every if name not in _names(cluster)]
    if left_out:
        note(f"hybridep plan: for {plan_text.few(_names(cluster))}; without {plan_text.few(left_out)}")
    goal = wishes.goal
    alone = planner.alone(cluster, workload, popularity=wishes.popularity, goal=goal, constraints=wishes.constraints)

    def staged(limit_s: float) -> StageChoice:
        return in_stages(cluster, workload, wishes, time_limit_s=limit_s, shown=True)

    def in_one(limit_s: float) -> Plan:
        if wishes == planner.StageWishes(stages=wishes.stages):
            return planned(cluster, workload, time_limit_s=limit_s)
        return planner.plan(
            cluster,
            workload,
            solver=wishes.solver,
            time_limit_s=limit_s,
            schedule=wishes.schedule,
            constraints=wishes.constraints,
            popularity=wishes.popularity,
            codecs=codecs_inside(wishes.codecs),
            goal=goal,
        )

    choice: StageChoice | None = None
    plan: Plan | None = None
    if text == AUTO and cluster.sizes[0] == 1:
        plan = in_one(time_limit_s)
    elif text == AUTO:
        choice, plan = _with_and_without(time_limit_s=time_limit_s, in_stages=staged, in_one=in_one)
    else:
        choice = staged(time_limit_s)
    pipeline = None if choice is None else choice.plan
    without_s = _expected_s(plan)
    more: dict[str, Any] = {"left_out": left_out, "alone_s": _expected_s(alone), "output": str(output)}
    if least is not None:
        more |= {"least_of_any_sites": least}
    if pipeline is None or (plan is not None and _worth(plan, goal) <= _worth(pipeline, goal)):
        assert plan is not None
        plan.save(output)
        if as_json:
            emit({**planner.summary(plan), "stages": [], "digest": plan.digest, **more})
        else:
            plan_text.show(plan, planner.explain(plan, wishes.constraints))
            _show_least(least, plan, goal)
            click.echo(f"\nplan written to {output}, without stages")
        return
    assert choice is not None
    pipeline.save(output)
    if as_json:
        lossy = lossy_codecs(pipeline)
        more |= {"lossy_codecs": lossy, "without_stages_s": without_s, "simulated_s": choice.simulated_s}
        emit({**planner.pipeline_summary(pipeline), **more})
    else:
        others_s = {"without stages": without_s}
        if alone is not None:
            others_s[f"{alone.cluster.site_name(0)} alone"] = _expected_s(alone)
        _show_pipeline(choice, output, {name: other_s for name, other_s in others_s.items() if other_s is not None})
        _show_least(least, pipeline, goal)
        if alone is not None and _worth(alone, goal) < _worth(pipeline, goal):
            click.echo(f"{alone.cluster.site_name(0)} alone is better: the other sites do not pay {plan_text.FEWER}")


def _on_fewer(
    cluster: Cluster, workload: Workload, wishes: StageWishes, text: str, *, time_limit_s: float
) -> tuple[Cluster, Workload, StageWishes] | None:
    """The sites that pay and what is asked of them, found in a share of the time limit; None where ``--stages auto`` finds none
    and says why."""
    from hybridep.commands.stage_choice import CHOOSING, on_sites_that_pay

    try:
        return on_sites_that_pay(cluster, workload, wishes, time_limit_s=CHOOSING * time_limit_s, shown=True)
    except HybridEPError as error:
        if text != AUTO:
            raise
        note(f"hybridep plan: for all sites, since no others were found: {error}")
    return None


def _show_least(least: float | None, plan: AnyPlan, goal: Goal) -> None:
    """What no choice of sites is better than, if that was asked for."""
    from hybridep.units import format_dollars, format_seconds

    if least is None:
        return
    dollars = goal.objective.value == "dollars"
    _, value = _worth(plan, goal)
    text = f"cheaper than {format_dollars(least)}" if dollars else f"faster than {format_seconds(least)}"
    click.echo(f"no plan for any of the sites is {text} (gap {1 - least / value:.0%})")


def _names(cluster: Cluster) -> list[str]:
    return [cluster.site_name(site) for site in range(cluster.sizes[0])]


def _expected_s(plan: Plan | None) -> float | None:
    return None if plan is None or plan.prediction is None else plan.prediction.expected_s


def _worth(plan: AnyPlan, goal: Goal) -> tuple[float, float]:
    """The smaller the better."""
    assert plan.prediction is not None
    usd = plan.prediction.cost or 0.0
    return goal.overdraft(usd), goal.value(plan.prediction.expected_s, usd)


def _read_stages(text: str) -> int | None:
    """A number of stages from 2, or ``auto`` (None). Raises UserError."""
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) < 2:
        raise UserError(f"--stages {text}: write auto, or a number from 2")
    return int(text)


def _with_and_without(
    *, time_limit_s: float, in_stages: Callable[[float], StageChoice], in_one: Callable[[float], Plan]
) -> tuple[StageChoice | None, Plan | None]:
    """A pipeline and a plan without stages, each in its share of the time limit; None where one is not possible. Raises the
    reason of the latter where neither is."""
    began_s = time.monotonic()
    pipeline, why = _or_why_not(lambda: in_stages((1 - _SHARE) * time_limit_s))
    try:
        plan = in_one(max(time_limit_s - (time.monotonic() - began_s), 0.1 * time_limit_s))
    except (HybridEPError, KeyboardInterrupt) as error:
        if pipeline is None:
            raise
        note(f"hybridep plan: without stages: {str(error) or 'interrupted'}")
        return pipeline, None
    if why is not None:
        note(f"hybridep plan: {why}")
    return pipeline, plan


def _or_why_not(make: Callable[[], StageChoice]) -> tuple[StageChoice | None, HybridEPError | None]:
    try:
        return make(), None
    except HybridEPError as error:
        return None, error


def _show_pipeline(choice: StageChoice, path: Path, others_s: dict[str, float]) -> None:
    """Print it for people. ``others_s``: steps of other plans."""
    from rich.console import Console
    from rich.table import Table

    from hybridep.commands.codecs import codec_lines
    from hybridep.commands.plan_text import few, placed_text
    from hybridep.units import format_bytes, format_dollars, format_seconds
    from planner.stages.report import pipeline_summary

    plan = choice.plan
    found, console = pipeline_summary(plan), Console(highlight=False, soft_wrap=True)
    cluster, step_s = plan.cluster, found["step_s"]
    console.print(
        f"[bold]{plan.workload.name}[/bold] on [bold]{cluster.name}[/bold]: {cluster.num_gpus} ranks, {len(plan.stages)} stages, "
        f"{plan.micro_batches} micro-batches, each stage up to {plan.ahead} forwards ahead for each stage behind it"
    )
    table = Table("stage", "sites", "layers", "a micro-batch", "in flight", "memory", box=None, pad_edge=False)
    for number, stage in enumerate(found["stages"]):
        both_s = stage["forward_s"] + stage["backward_s"]
        cells = (
            str(number),
            few(stage["sites"]),
            str(stage["num_layers"]),
            format_seconds(both_s),
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
        console.print(f"  simulated: {format_seconds(choice.simulated_s)}, the best of {choice.simulated} pipelines")
    for name, other_s in (dict(found["baselines"]) | others_s).items():
        console.print(f"  {name}: {format_seconds(other_s)} (x {other_s / step_s:.2f})")
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
    click.echo(f"\nplan written to {path}")
