"""What ``hybridep plan`` prints for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import click

from hybridep.commands.codecs import codec_lines, codecs_text
from hybridep.commands.common import stdout_console
from hybridep.homes import home_table
from hybridep.shares import alike_ranks, site_sequences
from hybridep.units import counted, format_bytes, format_dollars, format_seconds, format_throughput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hybridep.commands.plan_choice import SimulatedChoice
    from hybridep.commands.stage_hint import StageHint
    from hybridep.plan import LayerGroup, Plan, SolverReport
    from planner import (
        Alternative,
        Explanation,
        LinkLoad,
        OtherPlan,
        PipelineAlternative,
        PlanDifference,
        Upgrade,
    )
    from planner.robust import OverScenarios

FEWER = "(--stages auto --fewer-sites leaves out those that do not)"
"""Said where one site alone is faster than a plan for all."""
_Option = TypeVar("_Option", "Alternative", "PipelineAlternative")
_TOLD = 1e-3
"""Share of a step below which two figures need not both be shown."""


def show(made: Plan, explanation: Explanation, hint: StageHint | None = None, *, whole: bool = False) -> None:
    """Print the choice, its alternatives, where the time goes, the busiest links, the bound, the memory and lossy codecs.
    ``hint``: an alternative in stages; ``whole``: every group of sites, and why each alternative was rejected."""
    _show_placement(made, whole)
    _show_options(made, explanation, hint, whole)
    console, bound, binds = stdout_console(), format_seconds(explanation.lower_bound_s), explanation.binds
    console.print(f"\nno schedule of this plan is faster than {bound} ({explanation.lower_bound_by}); what binds: {binds}")
    for title, parts_s in (("step", explanation.parts_s), ("hidden", explanation.hidden_s)):
        shown = [f"{name} {format_seconds(value)}" for name, value in largest(parts_s) if value > 0]
        if shown:
            console.print(f"{title}: {', '.join(shown)}")
    show_links(explanation.links)
    memory = ", ".join(f"{name} {format_bytes(value)}" for name, value in largest(explanation.memory_parts_bytes) if value > 0)
    console.print(
        f"memory of the fullest rank ({explanation.fullest_rank}): {format_bytes(explanation.plan.memory_bytes)} of "
        f"{format_bytes(explanation.memory_capacity_bytes)}: {memory}"
    )
    for line in codec_lines(made):
        click.echo(line)


def _show_placement(made: Plan, whole: bool) -> None:
    """Who computes what for whom, and how that was found."""
    from rich.text import Text

    console, cluster = stdout_console(), made.cluster
    pods, sites = cluster.sizes[0], len({*cluster.datacenters})
    where = f"{pods} pods of {counted(sites, 'site')}" if sites != pods else "one site" if sites == 1 else f"{sites} sites"
    counts = (
        f": {counted(cluster.num_gpus, 'rank')} in {where}"
        f", {counted(made.workload.model.num_moe_layers, 'MoE layer')} of {counted(made.workload.model.num_experts, 'expert')}"
    )
    console.print(Text.assemble((made.workload.name, "bold"), " on ", (cluster.name, "bold"), counts))
    if not alike_ranks(cluster, made.workload):
        console.print(f"  {_ranks(made)}")
    said = ""
    for group in made.layers:
        console.print(f"  {placed_text(cluster.levels[0].name, group, served=not whole)}")
        homes = _homes(made, group) if group.homes else ""
        if homes and homes != said:
            console.print(f"    {homes}")
        said = homes
        for one in group.serving if whole else ():
            holders = ", ".join(f"{site} ({experts})" for site, experts in one.holders.items())
            console.print(f"    tokens of {', '.join(one.sites)}: experts at {holders}")
    if made.schedule.prefetch:
        console.print(f"  copies set out ahead of their blocks (prefetch {made.schedule.prefetch}) and give way to tokens")
    if made.schedule.chunks > 1:
        console.print(f"  tokens travel in {made.schedule.chunks} parts, each computed while others are on the links")
    if made.schedule.streams:
        console.print(f"  connections per pair of ranks: {_connections(made)}")
    if made.solver is not None:
        report = made.solver
        how = f"{report.solver}, gap {report.gap:.2%}, {format_seconds(report.solve)}"
        console.print(f"  {_minimised(report)}{report.status.value} ({how})\n")


def _show_options(made: Plan, explanation: Explanation, hint: StageHint | None, whole: bool) -> None:
    """The plan and its alternatives, and what else of the step there is to say beside them."""
    from rich.table import Table
    from rich.text import Text

    console, chosen = stdout_console(), explanation.plan
    priced = chosen.step_usd is not None
    table = Table("", "step", "", *(["price"] if priced else []), "WAN bytes", "memory", "copies", box=None, pad_edge=False)

    def row(option: Alternative | StageHint, memory: str, copies: str = "", style: str | None = None) -> None:
        times = f"x {option.step_s / chosen.step_s:.2f}"
        price = [format_dollars(option.step_usd or 0.0)] if priced else []
        cells = (option.name, format_seconds(option.step_s), times, *price, format_bytes(option.wan_bytes), memory)
        table.add_row(*cells, copies, style=style)

    alone = [] if explanation.alone is None else [explanation.alone]
    for option in (chosen, *explanation.baselines, *explanation.neighbours, *alone):
        row(option, memory_text(option), f"{option.copies_per_rank:.3g}", "bold" if option is chosen else None)
    if hint is not None:
        row(hint, format_bytes(hint.memory_bytes))
    console.print(table)
    console.print("(copies: experts that a rank holds of others, per layer)")
    better = "cheaper" if made.solver is not None and made.solver.cost_bound is not None else "faster"
    if hint is not None and _worth(made, hint) < _worth(made, chosen):
        found = f" are {better} (as the first few were found; --stages auto searches for the best)"
        console.print(Text.assemble(("stages", "bold"), found))
    if explanation.alone is not None and _worth(made, explanation.alone) < _worth(made, chosen):
        console.print(Text.assemble((explanation.alone.name, "bold"), f" is {better}: the other sites do not pay {FEWER}"))
    earlier = 1 - explanation.expected_s / chosen.step_s
    if earlier >= _TOLD:
        console.print(
            f"expected {format_seconds(explanation.expected_s)} ({earlier:.1%} less): in these steps each exchange waits for the "
            "slowest, but ranks that are done go on"
        )
    if chosen.step_usd is not None:
        rent_usd = chosen.step_usd - explanation.egress_usd
        console.print(
            f"price of a step: {format_dollars(explanation.egress_usd)} for bytes between sites, "
            f"{format_dollars(rent_usd)} for ranks"
        )
    for option in (*explanation.baselines, *explanation.neighbours) if whole else ():
        console.print(f"  {option.name}: {reason(chosen, option)}")


def show_links(links: Sequence[LinkLoad]) -> None:
    """The busiest links."""
    from rich.table import Table

    table = Table("busiest links", "bytes", "busy", "of the step", box=None, pad_edge=False)
    for link in links:
        table.add_row(link.name, format_bytes(link.total_bytes), format_seconds(link.busy_s), f"{link.share:.0%}")
    stdout_console().print(table)


def _worth(made: Plan, option: Alternative | StageHint) -> tuple[float, float]:
    """Of an alternative, by what the plan's search made small."""
    from planner.plans import goal_of

    return goal_of(made.solver).worth(option.step_s, option.step_usd or 0.0)


def _ranks(made: Plan) -> str:
    """Sites by what their ranks are and do."""
    cluster, kinds = made.cluster, dict[str, list[str]]()
    sequences = site_sequences(cluster, made.workload)
    for dc, (gpu, number) in enumerate(zip(cluster.site_gpus, sequences, strict=True)):
        text = f"{format_throughput(gpu.throughput)}, {format_bytes(gpu.memory)}, micro-batch of {number}"
        kinds.setdefault(text, []).append(cluster.site_name(dc))
    return "ranks: " + "; ".join(f"{few(names)} {text}" for text, names in kinds.items())


def _connections(made: Plan) -> str:
    """``dc 4, each with 4.194 MB per round trip``."""
    shown = []
    for level in made.cluster.levels:
        if (number := made.schedule.streams.get(level.name)) is not None:
            window = "" if level.window is None else f", each with {format_bytes(level.window)} per round trip"
            shown.append(f"{level.name} {number}{window}")
    return "; ".join(shown)


def _minimised(report: SolverReport) -> str:
    """What the search made small, where that is not the step alone."""
    if report.cost_bound is not None:
        return f"cheapest (no plan below {format_dollars(report.cost_bound)} per step): "
    return "" if report.budget is None else f"fastest within {format_dollars(report.budget)} per step: "


def _level(name: str, size: int, ratio: float) -> str:
    if size == 1 or ratio == 0:
        return f"{name}: tokens travel"
    whole = "all experts" if ratio == 1 else f"{ratio:.0%} of the experts"
    return f"{name}: {whole} copied within domains of {size}"


def _serving(name: str, group: LayerGroup) -> str:
    """The outermost level of a plan with a serving table, its largest groups first."""
    groups = sorted(group.serving, key=lambda one: -len(one.sites))
    shown = [f"({few(one.sites)} find experts at {few(list(one.holders))})" for one in groups[:4]]
    more = f" and {len(groups) - 4} more" if len(groups) > 4 else ""
    return f"{name}: {counted(len(groups), 'group')} of sites: {', '.join(shown)}{more}"


def _homes(made: Plan, group: LayerGroup) -> str:
    """At which sites no experts live, or how many do at others, or that it is the same at all."""
    cluster = made.cluster
    home = home_table(cluster, made.workload.model.num_experts, group.homes) // cluster.ranks_per_site
    numbers = Counter(dict.fromkeys(range(cluster.sizes[0]), 0) | Counter(home.tolist()))
    none = [cluster.site_name(site) for site, number in numbers.items() if not number]
    if none:
        return f"experts' homes are chosen, none at {few(none)}"
    if len({*numbers.values()}) == 1:
        return "experts' homes are chosen: popular ones are spread over sites and ranks"
    (most, number), *_, (least, other) = numbers.most_common()
    return f"experts' homes are chosen: {number} at {cluster.site_name(most)}, {other} at {cluster.site_name(least)}"


def few(names: Sequence[str]) -> str:
    """The first of many names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def largest(parts: dict[str, float]) -> list[tuple[str, float]]:
    """The parts of a sum, the largest first."""
    return sorted(parts.items(), key=lambda item: -item[1])


def reason(chosen: _Option, option: _Option) -> str:
    """Why an alternative was not chosen: it does not fit, or the parts of the step that grow most."""
    if not option.allowed and option.step_s < chosen.step_s:
        return f"faster by {format_seconds(chosen.step_s - option.step_s)}, but breaks a rule"
    if not option.fits and option.step_s < chosen.step_s:
        return f"faster by {format_seconds(chosen.step_s - option.step_s)}, but does not fit"
    grown = {name: seconds - chosen.parts_s.get(name, 0.0) for name, seconds in option.parts_s.items()}
    longer = [f"{name} +{format_seconds(more)}" for name, more in largest(grown)[:2] if more > 0]
    saved = -sum(more for more in grown.values() if more < 0)
    more = option.step_s - chosen.step_s
    if abs(more) <= 1e-9 * chosen.step_s:
        return "equally fast"
    told = [", ".join(longer)] if longer else []
    if saved > 1e-9 * chosen.step_s:
        told.append(f"saves {format_seconds(saved)}{' elsewhere' if longer else ''}")
    return f"{format_seconds(abs(more))} {'longer' if more > 0 else 'shorter'}: {'; '.join(told)}"


def show_others(others: Mapping[str, OtherPlan], what: str = "") -> None:
    """What other planners would do; ``what``: more of what that is."""
    if others:
        click.echo(f"other planners{what}, by who serves whom between sites, each with what is best for that inside sites:")
    for name, other in others.items():
        note = "" if other.fits else " (does not fit)"
        click.echo(f"  {name}: {format_seconds(other.step_s)}, x {other.gain:.2f}{note}")


def cell_text(group: LayerGroup, level: str, size: int) -> str:
    """What a group does at a level with so many workers, in a word or two."""
    domain, ratio = group.domains.get(level, 1), group.migration.get(level, 1.0)
    if size == 1:
        return "-"
    if group.serving and level not in group.domains:
        return counted(len(group.serving), "group")
    if domain == 1 or ratio == 0:
        return "tokens"
    return f"copies within {domain}" if ratio == 1 else f"{ratio:.0%} copies within {domain}"


def layers_text(group: LayerGroup) -> str:
    """``0-3``, or ``2``."""
    last = group.first_layer + group.num_layers - 1
    return f"{group.first_layer}-{last}" if last > group.first_layer else f"{last}"


def placed_text(outermost: str, group: LayerGroup, *, served: bool = True) -> str:
    """One layer group in a line; ``served``: also who computes for whom between sites."""
    parts = [_serving(outermost, group)] if group.serving and served else []
    parts += [_level(name, size, group.migration.get(name, 1.0)) for name, size in group.domains.items()]
    layers = f"layer{'s' if group.num_layers > 1 else ''} {layers_text(group)}"
    again = f"; {group.recompute.phrase}" if group.recompute else ""
    return f"{layers}: {'; '.join(parts)}; copies live for one {group.residency.value}{again}"


def show_choice(choice: SimulatedChoice) -> None:
    """What simulations have changed."""
    if choice.shorter > 0:
        click.echo(
            f"chosen by simulation among {choice.simulated} plans: its step is simulated to be {choice.shorter:.1%} shorter than "
            f"that of the plan that costs least, which costs {1 - 1 / (1 + choice.dearer):.1%} less"
        )
    elif choice.simulated > 1:
        click.echo(f"costs least, and is simulated to be the fastest of {choice.simulated} plans")


def show_top(plans: Sequence[Plan], simulated_s: Sequence[float] = ()) -> None:
    """The chosen plan and the next ones, with their simulated steps where they have some, and their codecs."""
    for number, one in enumerate(plans, start=1):
        simulated = f", simulated {format_seconds(simulated_s[number - 1])}" if simulated_s else ""
        price = "" if one.predicted.cost is None else f", {format_dollars(one.predicted.cost)}"
        step = format_seconds(one.predicted.step) + simulated + price
        click.echo(f"  {number}. {step}, memory {format_bytes(one.predicted.memory_bytes)}")
        for group in one.layers:
            click.echo(f"     {placed_text(one.cluster.levels[0].name, group)}")
        if text := codecs_text(plans, one):
            click.echo(f"     codecs: {text}")


def show_difference(names: tuple[str, str], difference: PlanDifference) -> None:
    """Two plans side by side."""
    from rich.table import Table

    table = Table("", *names, box=None, pad_edge=False)
    table.add_row("step", *map(format_seconds, difference.step_s), style="bold")
    for name, seconds in difference.parts_s.items():
        table.add_row(name, *map(format_seconds, seconds))
    table.add_row("WAN bytes", *map(format_bytes, difference.wan_bytes))
    table.add_row("memory of the fullest rank", *map(format_bytes, difference.memory_bytes))
    console = stdout_console()
    console.print(table)
    console.print(
        f"{difference.served_elsewhere:.1%} of (site, expert) are computed elsewhere; per layer {difference.copies_gained:g} "
        f"copies between sites come and {difference.copies_lost:g} go"
    )
    if not difference.same_popularity:
        console.print("made for experts of different popularity: both with that of the second, or of the one that has one")
    if difference.moved_experts:
        console.print(
            f"{difference.moved_experts:.3g} experts of a layer live elsewhere, on average: no switch between steps, but "
            "a training resumes under the other one"
        )
    if difference.most_changed:
        sites = ", ".join(f"{site} {share:.0%}" for site, share in difference.most_changed.items())
        console.print(f"most changed: {sites}")
    console.print(switch_text(difference.switch_at))


def memory_text(option: Alternative | PipelineAlternative) -> str:
    """An alternative's memory, and whether it is none."""
    said = format_bytes(option.memory_bytes) + ("" if option.fits else " does not fit")
    return said + ("" if option.allowed else " breaks a rule")


def switch_text(switch_at: float | None) -> str:
    """From which rates on the other one of two plans is the faster one."""
    if switch_at is None:
        return "the faster one stays faster however fast the links between sites are (1/64 to 64 times)"
    return f"equally fast with links between sites at {switch_at:.3g} times their rates"


def show_upgrades(found: Sequence[Upgrade]) -> None:
    """What to buy next."""
    click.echo(
        f"what to buy next (planned anew for each; searched on for as long without: {format_seconds(found[0].present_s)}):"
    )
    for one in found:
        saves = f"saves {format_seconds(one.gain_s)} ({one.gain_s / one.present_s:.1%})"
        click.echo(
            f"  {one.name}, {one.before} to {one.after}: {format_seconds(one.planned_anew_s)}, {saves}; with this plan as it is "
            f"{format_seconds(one.as_it_is_s)}"
        )


def show_robust(found: OverScenarios, what: str = "plan") -> None:
    """The plan for scenarios beside the one for the nominal rates; ``what``: of what kind none is below the bound."""
    worst = max(found.steps_s), max(found.nominal_steps_s)
    click.echo(
        f"over {counted(len(found.steps_s), 'scenario')}, at quantile {found.quantile:g}: {format_seconds(found.step_s)} "
        f"(no {what} below {format_seconds(found.bound_s)}, gap {found.gap:.1%}), worst {format_seconds(worst[0])}; the plan "
        f"for the nominal rates: {format_seconds(found.nominal_step_s)}, worst {format_seconds(worst[1])}"
    )
