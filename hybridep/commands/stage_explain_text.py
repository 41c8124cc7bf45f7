"""What ``hybridep plan`` prints of why a plan is in these stages, and of how two plans differ of which some are in stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridep.commands.common import stdout_console
from hybridep.commands.plan_text import largest, memory_text, reason, show_links, switch_text
from hybridep.units import counted, format_bytes, format_dollars, format_seconds

if TYPE_CHECKING:
    from planner import PipelineAlternative, PipelineDifference, PipelineExplanation
    from planner.stages.difference import SiteLayers

_MOST_SITES = 12
"""Sites that moved, of which each has a line."""


def show_explanation(found: PipelineExplanation) -> None:
    """The alternatives and why each was rejected, what binds, the busiest links, and memory."""
    from rich.table import Table
    from rich.text import Text

    console, chosen = stdout_console(), found.plan
    priced = chosen.step_usd is not None
    table = Table("\nalternatives", "step", "", *(["price"] if priced else []), "memory", box=None, pad_edge=False)

    def row(option: PipelineAlternative, style: str | None = None) -> None:
        price = [format_dollars(option.step_usd or 0.0)] if priced else []
        cells = (option.name, format_seconds(option.step_s), f"x {option.ratio:.2f}", *price)
        table.add_row(*cells, memory_text(option), style=style)

    row(chosen, "bold")
    for option in found.alternatives:
        row(option)
    console.print(table)
    for option in found.alternatives:
        console.print(f"  {option.name}: {reason(chosen, option)}")
    for option in found.alternatives:
        # One that is not possible may have the same name.
        if option.name in found.better and option.fits and option.allowed:
            told = (
                f" is expected to be {_better_by(chosen, option)}: the search did not try it, or a simulation preferred the plan"
            )
            console.print(Text.assemble((option.name, "bold"), told))
    stage, busy = found.stage, f"{format_seconds(found.stage.busy_s)}, {found.stage.share:.0%} of the step"
    console.print(f"\nwhat binds: {found.binds}; busiest stage: {stage.number}, for {busy}")
    show_links(found.links)
    memory = ", ".join(f"{name} {format_bytes(value)}" for name, value in largest(found.memory_parts_bytes) if value > 0)
    console.print(
        f"memory of the fullest rank ({found.fullest_rank}, stage {found.fullest_stage}): {format_bytes(chosen.memory_bytes)} of "
        f"{format_bytes(found.memory_capacity_bytes)}: {memory}"
    )


def show_pipeline_difference(names: tuple[str, str], difference: PipelineDifference) -> None:
    """Two plans side by side."""
    from rich.table import Table

    table = Table("", *names, box=None, pad_edge=False)
    table.add_row("step", *map(format_seconds, difference.step_s), style="bold")
    for name, both in difference.parts_s.items():
        table.add_row(name, *("" if seconds is None else format_seconds(seconds) for seconds in both))
    table.add_row("WAN bytes", *map(format_bytes, difference.wan_bytes))
    table.add_row("memory of the fullest rank", *map(format_bytes, difference.memory_bytes))
    table.add_row("sites", *map(str, difference.sites))
    table.add_row("stages", *map(str, difference.stages))
    table.add_row("micro-batches", *map(str, difference.micro_batches))
    table.add_row("forwards ahead", *("" if ahead is None else str(ahead) for ahead in difference.ahead))
    console = stdout_console()
    console.print(table)
    moved = list(difference.sites_moved.items())
    layers = f"{counted(difference.layers_moved, 'layer')} at other sites"
    console.print(f"{layers}, {counted(len(moved), 'site')} with other layers{':' if moved else ''}")
    for name, (first, second) in moved[:_MOST_SITES]:
        console.print(f"  {name}: {_held(first)} -> {_held(second)}")
    if len(moved) > _MOST_SITES:
        console.print(f"  and {len(moved) - _MOST_SITES} more")
    console.print(switch_text(difference.switch_at))


def _better_by(chosen: PipelineAlternative, option: PipelineAlternative) -> str:
    if option.step_s < chosen.step_s:
        return f"faster by {format_seconds(chosen.step_s - option.step_s)}"
    return f"cheaper by {format_dollars((chosen.step_usd or 0.0) - (option.step_usd or 0.0))}"


def _held(site: SiteLayers | None) -> str:
    if site is None:
        return "left out"
    last = site.first_layer + site.num_layers - 1
    layers = f"layers {site.first_layer}-{last}" if last > site.first_layer else f"layer {last}"
    return layers if site.stage is None else f"{layers} (stage {site.stage})"
