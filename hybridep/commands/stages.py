"""Pipeline plans on the command line: ``hybridep plan --stages``."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    from planner import StageWishes

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
    from hybridep.commands.plan_text import few
    from hybridep.commands.stage_choice import CHOOSING, rather_all, rather_fewer
    from planner.clock import now_s

    wishes, least, left_out = replace(wishes, stages=_read_stages(text)), None, list[str]()
    began_s, limit_s, every, some = now_s(), time_limit_s, (cluster, workload, wishes), None
    if fewer and cluster.sizes[0] > 1:
        found = _on_fewer(cluster, workload, wishes, text, time_limit_s=time_limit_s)
        if found is not None:
            least = planner.least_of_any(cluster, workload, wishes)
            cluster, workload, wishes, some = found
        limit_s = max(time_limit_s - (now_s() - began_s), (1 - CHOOSING) * time_limit_s)
        left_out = [name for name in _names(every[0]) if name not in _names(cluster)]
    if left_out:
        note(f"hybridep plan: for {few(_names(cluster))}; without {few(left_out)}")
    choice, plan = _with_and_without(cluster, workload, wishes, text, limit_s)
    made = _Made(
        choice=choice, without=plan, alone=_alone(cluster, workload, wishes), least=least, left_out=left_out, wishes=wishes
    )
    if left_out:
        left_s = time_limit_s - (now_s() - began_s)
        choice = rather_all(*every, made.step_s, left_s=left_s, time_limit_s=time_limit_s, shown=True)
        if choice is not None:
            note("hybridep plan: for all sites after all")
            made = _Made(choice=choice, without=None, alone=_alone(*every), least=least, left_out=[], wishes=every[2])
    elif some is not None and rather_fewer(some, wishes, made.step_s):
        made = _for_fewer(some, every, least)
        note(f"hybridep plan: for {few(_names(some.cluster))} after all; without {few(made.left_out)}")
    made.best.save(output)
    if as_json:
        emit(made.to_json() | {"output": str(output)})
    else:
        made.show(output)


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What was planned, and what is told of it."""

    choice: StageChoice | None
    without: Plan | None
    """Without stages; one of both is there."""
    alone: Plan | None
    """One site by itself; None where that is not possible, or all there is."""
    least: float | None
    """What no choice of sites is better than, if that was asked for."""
    left_out: list[str]
    wishes: StageWishes

    @property
    def best(self) -> AnyPlan:
        """The pipeline, or the plan without stages where that is as good."""
        if self.choice is None:
            assert self.without is not None
            return self.without
        pipeline = self.choice.plan
        return self.without if self.without is not None and self._worth(self.without) <= self._worth(pipeline) else pipeline

    @property
    def step_s(self) -> float:
        """Of the best, simulated where it was."""
        best = self.best
        assert best.prediction is not None
        return self.choice.step_s if self.choice is not None and best is self.choice.plan else best.prediction.expected_s

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        import planner
        from hybridep.commands.codecs import lossy_codecs
        from hybridep.pipeline import PipelinePlan

        best, more = self.best, {"left_out": self.left_out, "alone_s": _expected_s(self.alone)}
        if self.least is not None:
            more["least_of_any_sites"] = self.least
        if not isinstance(best, PipelinePlan):
            return {**planner.summary(best), "stages": [], "digest": best.digest, **more}
        assert self.choice is not None
        more |= {"without_stages_s": _expected_s(self.without), "simulated_s": self.choice.simulated_s}
        return {**planner.pipeline_summary(best), **more, "lossy_codecs": lossy_codecs(best)}

    def show(self, output: Path) -> None:
        """Prints it for people."""
        import planner
        from hybridep.commands import plan_text
        from hybridep.pipeline import PipelinePlan

        best = self.best
        if not isinstance(best, PipelinePlan):
            plan_text.show(best, planner.explain(best, self.wishes.constraints))
            self._show_least()
            click.echo(f"\nplan written to {output}, without stages")
            return
        assert self.choice is not None
        others_s = {"without stages": _expected_s(self.without)}
        if self.alone is not None:
            others_s[f"{self.alone.cluster.site_name(0)} alone"] = _expected_s(self.alone)
        _show_pipeline(self.choice, {name: other_s for name, other_s in others_s.items() if other_s is not None})
        self._show_least()
        if self.alone is not None and self._worth(self.alone) < self._worth(best):
            click.echo(f"{self.alone.cluster.site_name(0)} alone is better: the other sites do not pay {plan_text.FEWER}")
        click.echo(f"\nplan written to {output}")

    def _show_least(self) -> None:
        from hybridep.plan import Objective
        from hybridep.units import format_dollars, format_seconds

        if self.least is None:
            return
        least, (_, value) = self.least, self._worth(self.best)
        dollars = self.wishes.goal.objective is Objective.DOLLARS
        text = f"cheaper than {format_dollars(least)}" if dollars else f"faster than {format_seconds(least)}"
        # One site may cost nothing where only bytes have a price.
        gap = 1 - least / value if value > 0 else 0.0
        click.echo(f"no plan for any of the sites is {text} (gap {gap:.0%})")

    def _worth(self, plan: AnyPlan) -> tuple[float, float]:
        """The smaller the better."""
        assert plan.prediction is not None
        usd, goal = plan.prediction.cost or 0.0, self.wishes.goal
        return goal.overdraft(usd), goal.value(plan.prediction.expected_s, usd)


def _on_fewer(
    cluster: Cluster, workload: Workload, wishes: StageWishes, text: str, *, time_limit_s: float
) -> tuple[Cluster, Workload, StageWishes, AnyPlan | None] | None:
    """What ``on_sites_that_pay`` finds in a share of the time limit; None where ``--stages auto`` finds none and says why."""
    from hybridep.commands.stage_choice import CHOOSING, on_sites_that_pay

    try:
        return on_sites_that_pay(cluster, workload, wishes, time_limit_s=CHOOSING * time_limit_s, shown=True)
    except HybridEPError as error:
        if text != AUTO:
            raise
        note(f"hybridep plan: for all sites, since no others were found: {error}")
    return None


def _for_fewer(plan: AnyPlan, every: tuple[Cluster, Workload, StageWishes], least: float | None) -> _Made:
    """A plan for fewer sites that was found when these were chosen."""
    from hybridep.commands.stage_choice import StageChoice, simulated_or_expected_s
    from hybridep.pipeline import PipelinePlan
    from planner.stages.fewer import among

    names = _names(plan.cluster)
    wishes, left_out = among(*every, tuple(names))[2], [name for name in _names(every[0]) if name not in names]
    if isinstance(plan, PipelinePlan):
        choice, without = StageChoice(plan=plan, simulated_s=simulated_or_expected_s(plan), simulated=1), None
    else:
        choice, without = None, plan
    alone = _alone(plan.cluster, plan.workload, wishes)
    return _Made(choice=choice, without=without, alone=alone, least=least, left_out=left_out, wishes=wishes)


def _alone(cluster: Cluster, workload: Workload, wishes: StageWishes) -> Plan | None:
    import planner

    return planner.alone(cluster, workload, popularity=wishes.popularity, goal=wishes.goal, constraints=wishes.constraints)


def _names(cluster: Cluster) -> list[str]:
    return [cluster.site_name(site) for site in range(cluster.sizes[0])]


def _expected_s(plan: Plan | None) -> float | None:
    return None if plan is None or plan.prediction is None else plan.prediction.expected_s


def _read_stages(text: str) -> int | None:
    """A number of stages from 2, or ``auto`` (None). Raises UserError."""
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) < 2:
        raise UserError(f"--stages {text}: write auto, or a number from 2")
    return int(text)


def _with_and_without(
    cluster: Cluster, workload: Workload, wishes: StageWishes, text: str, time_limit_s: float
) -> tuple[StageChoice | None, Plan | None]:
    """A pipeline, and for ``auto`` a plan without stages, each in its share of the time limit; None where one is not possible.
    Raises the reason of the latter where neither is."""
    from hybridep.commands.stage_choice import in_stages
    from planner.clock import now_s

    def staged(limit_s: float) -> StageChoice:
        return in_stages(cluster, workload, wishes, time_limit_s=limit_s, shown=True)

    if text != AUTO:
        return staged(time_limit_s), None
    if cluster.sizes[0] == 1:
        return None, _in_one(cluster, workload, wishes, time_limit_s)
    began_s = now_s()
    pipeline, why = _or_why_not(lambda: staged((1 - _SHARE) * time_limit_s))
    try:
        left_s = max(time_limit_s - (now_s() - began_s), 0.1 * time_limit_s)
        plan = _in_one(cluster, workload, wishes, left_s)
    except (HybridEPError, KeyboardInterrupt) as error:
        if pipeline is None:
            raise
        note(f"hybridep plan: without stages: {str(error) or 'interrupted'}")
        return pipeline, None
    if why is not None:
        note(f"hybridep plan: {why}")
    return pipeline, plan


def _in_one(cluster: Cluster, workload: Workload, wishes: StageWishes, time_limit_s: float) -> Plan:
    """Without stages."""
    import planner
    from hybridep.commands.plan_choice import planned
    from hybridep.pipeline import codecs_inside

    if wishes == planner.StageWishes(stages=wishes.stages):
        return planned(cluster, workload, time_limit_s=time_limit_s)
    return planner.plan(
        cluster,
        workload,
        solver=wishes.solver,
        time_limit_s=time_limit_s,
        schedule=wishes.schedule,
        constraints=wishes.constraints,
        popularity=wishes.popularity,
        codecs=codecs_inside(wishes.codecs),
        goal=wishes.goal,
    )


def _or_why_not(make: Callable[[], StageChoice]) -> tuple[StageChoice | None, HybridEPError | None]:
    try:
        return make(), None
    except HybridEPError as error:
        return None, error


def _show_pipeline(choice: StageChoice, others_s: dict[str, float]) -> None:
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
