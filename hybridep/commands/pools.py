"""Pools of plans on the command line: the plan that pays now, files, and what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hybridep.commands.codecs import codecs_json, codecs_text
from hybridep.commands.plan_text import placed_text
from hybridep.pipeline import AnyPlan, PipelinePlan
from hybridep.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hybridep.commands.sites_choice import Staged, Tell
    from hybridep.plan import Plan
    from hybridep.topology import Cluster
    from planner import PooledPlan

_AnyPlan = TypeVar("_AnyPlan", bound=AnyPlan)


def plans_of(pool: Sequence[PooledPlan[_AnyPlan]]) -> list[_AnyPlan]:
    """Each plan once, though it may pay at slow and fast links and another one between."""
    return list({id(one.plan): one.plan for one in pool}.values())


def now(pool: Sequence[PooledPlan[_AnyPlan]]) -> _AnyPlan:
    """The plan that pays at the given rates."""
    return next(one.plan for one in pool if one.pays_from <= 1 <= one.pays_to)


def homes_of(plan: Plan) -> dict[str, Any]:
    """Arguments of ``planner.plan`` for plans with the same homes."""
    import numpy as np

    homes = np.array([placement.home for placement in plan.placements])
    chosen = any(group.homes for group in plan.layers)
    return {"free_homes": False, "home": (homes if plan.popularity else homes[0]) if chosen else None}


def of_stages(made: Staged, widest: float, time_limit_s: float, tell: Tell) -> tuple[Staged, list[PooledPlan[AnyPlan]]]:
    """(What was made, with that plan of the pool which pays at the given rates, the pool): all are pipelines with the same sites
    and layers in each stage, or plans without stages. Of a plan for one site, which has no links between sites, that one."""
    import planner
    from hybridep.commands.stage_choice import StageChoice
    from planner.stages.fewer import without_stages

    asked, best, said = made.asked, made.best, made.best.predicted
    pool: list[PooledPlan[AnyPlan]] = []
    if isinstance(best, PipelinePlan):
        pool += planner.pipeline_pool(best, asked.wishes, widest=widest, time_limit_s=time_limit_s)
    elif len(asked.sites) == 1:
        pool.append(
            planner.PooledPlan(plan=best, pays_from=1 / widest, pays_to=widest, step_s=said.step, memory_bytes=said.memory_bytes)
        )
    else:
        homes = homes_of(best)

        def make(cluster: Cluster, limit_s: float) -> Plan:
            return without_stages(cluster, asked.workload, asked.wishes, limit_s, **homes)

        pool += planner.plan_pool(make, asked.cluster, widest=widest, time_limit_s=time_limit_s, known=[best])
    plan = now(pool)
    if plan.digest == best.digest:
        return replace(made, chosen=replace(made.chosen, plan=plan)), pool
    expected = f"a step of {format_seconds(plan.predicted.step)} in place of {format_seconds(said.step)}"
    tell(f"at the given rates another plan of the pool pays: {expected}")
    return replace(made, chosen=StageChoice(plan=plan)), pool


def to_json(pool: Sequence[PooledPlan[AnyPlan]], plans: Sequence[AnyPlan], files: Sequence[Path]) -> list[dict[str, Any]]:
    """What ``--json`` prints of each range; ``files``: of the ``plans``."""
    path = {id(plan): str(file) for plan, file in zip(plans, files, strict=True)}
    return [one.to_json() | {**codecs_json(one.plan), "output": path[id(one.plan)]} for one in pool]


def show(pool: Sequence[PooledPlan[AnyPlan]], plans: Sequence[AnyPlan], files: Sequence[Path]) -> None:
    """Which plan pays at which rates; ``files``: of the ``plans``."""
    most_bytes = max(one.memory_bytes for one in pool)
    click.echo(f"plans by the rates between sites (a switch moves no weights; room for all: {format_bytes(most_bytes)} a rank):")
    path = {id(plan): file for plan, file in zip(plans, files, strict=True)}
    for one in pool:
        plan, step_s = one.plan, format_seconds(one.step_s)
        click.echo(f"  {one.pays_from:.3g} to {one.pays_to:.3g} times: {path[id(plan)]}, {step_s} at the given rates")
        for line in _placed(plan):
            click.echo(f"     {line}")
        if text := codecs_text(plans, plan):
            click.echo(f"     codecs: {text}")
        if one.begins_bytes:
            click.echo(f"     begins with {format_bytes(one.begins_bytes)} of exact copies between sites")


def _placed(plan: AnyPlan) -> list[str]:
    outermost = plan.cluster.levels[0].name
    if not isinstance(plan, PipelinePlan):
        return [placed_text(outermost, group) for group in plan.layers]
    return [f"{counted(plan.micro_batches, 'micro-batch')}, {plan.ahead} ahead", *inside_texts(plan)]


def inside_texts(plan: PipelinePlan) -> list[str]:
    """What is placed how inside stages, a line for those that are alike."""
    stages: dict[str, list[str]] = {}
    for number, one in enumerate(plan.stages):
        text = " | ".join(placed_text(plan.cluster.levels[0].name, group) for group in one.layers)
        stages.setdefault(text, []).append(str(number))
    return [f"inside stage {', '.join(numbers)}: {text}" for text, numbers in stages.items()]
