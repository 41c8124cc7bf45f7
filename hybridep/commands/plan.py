"""``hybridep plan``: cluster and model -> plan file, with the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridep.commands.common import emit, set_option, verb
from hybridep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridep.plan import LayerGroup, Plan
    from planner import Alternative, Explanation


@verb(name="plan")
@click.argument("cluster")
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("plan.yaml"), show_default=True, help="Plan file.")
@click.option("--solver", type=click.Choice(["highs", "cbc"]), default="highs", show_default=True)
@click.option("--compare", is_flag=True, help="Also cost what other planners would do (clusters planned site by site).")
@click.option(
    "--routing",
    type=click.Path(path_type=Path),
    help="What `hybridep train` recorded (routing.npz): how popular each expert is.",
)
@click.option("--time-limit", "time_limit_s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    metavar="LEVEL.KIND=CODEC",
    help="Code a level's payloads, for example dc.experts=change-int8 or dc.experts_keep=0.05; exact without. Repeatable.",
)
@set_option
def command(
    cluster: str,
    model: str,
    output: Path,
    solver: str,
    compare: bool,
    routing: Path | None,
    time_limit_s: float,
    codecs: tuple[str, ...],
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Plan the training of MODEL on CLUSTER: which experts travel to the tokens, and which tokens to the experts.

    CLUSTER is a shipped config's name, a YAML file, or a CSV matrix with the columns src,dst,gbps,rtt_ms. MODEL is a shipped
    config's name or a YAML file.
    """
    from dataclasses import asdict

    from hybridep.commands.codecs import codec_lines, read_codecs
    from hybridep.commands.inputs import cluster_and_workload
    from hybridep.routing import load_routing
    from hybridep.units import format_seconds
    from planner import compare_planners, explain, plan, summary

    if codecs and routing is not None:
        raise UserError("--codec and --routing: plans layer by layer know exact bytes only; leave one out")
    inputs = cluster_and_workload(cluster, model, overrides)
    popularity: tuple[tuple[float, ...], ...] = ()
    if routing is not None:
        record = load_routing(routing)
        record.require_model(inputs[1], routing)
        popularity = record.popularity()
    coded = read_codecs(codecs, [level.name for level in inputs[0].levels])
    made = plan(*inputs, solver=solver, time_limit_s=time_limit_s, popularity=popularity, codecs=coded)
    made.save(output)
    explanation = explain(made)
    others = compare_planners(made) if compare else {}
    if as_json:
        compared = {"planners": {name: asdict(other) for name, other in others.items()}} if compare else {}
        emit({**summary(made), **compared, "explanation": explanation.to_json(), "digest": made.digest, "output": str(output)})
    else:
        show(made, explanation)
        for line in codec_lines(made):
            click.echo(line)
        for name, other in others.items():
            note = "" if other.fits else " (does not fit)"
            click.echo(f"  {name}: {format_seconds(other.step_s)}, x {other.gain:.2f}{note}")
        click.echo(f"\nplan written to {output}")


def show(made: Plan, explanation: Explanation) -> None:
    """Print the choice, its alternatives, where the time goes, the busiest links, the bound and the memory."""
    from rich.console import Console
    from rich.table import Table

    from hybridep.units import format_bytes, format_seconds

    console = Console(highlight=False, soft_wrap=True)
    cluster, chosen = made.cluster, explanation.plan
    console.print(
        f"[bold]{made.workload.name}[/bold] on [bold]{cluster.name}[/bold]: {cluster.num_gpus} ranks in {cluster.sizes[0]} sites"
        f", {made.workload.model.num_moe_layers} MoE layers of {made.workload.model.num_experts} experts"
    )
    for group in made.layers:
        last = group.first_layer + group.num_layers - 1
        parts = [_serving(cluster.levels[0].name, group)] if group.serving else []
        parts += [_level(name, size, group.migration.get(name, 1.0)) for name, size in group.domains.items()]
        console.print(f"  layers {group.first_layer}-{last}: {'; '.join(parts)}; copies live for one {group.residency.value}")
    if made.solver is not None:
        report = made.solver
        console.print(f"  {report.status.value} ({report.solver}, gap {report.gap:.2%}, {format_seconds(report.solve)})\n")

    table = Table("", "step", "", "WAN bytes", "memory", "copies", box=None, pad_edge=False)

    def row(option: Alternative, style: str | None = None) -> None:
        memory = format_bytes(option.memory_bytes) + ("" if option.fits else " does not fit")
        times = f"x {option.step_s / chosen.step_s:.2f}"
        cells = (option.name, format_seconds(option.step_s), times, format_bytes(option.wan_bytes), memory)
        table.add_row(*cells, f"{option.copies_per_rank:.3g}", style=style)

    row(chosen, "bold")
    for option in (*explanation.baselines, *explanation.neighbours):
        row(option)
    console.print(table)
    console.print("(copies: experts that a rank holds of others, per layer)")

    bound, binds = format_seconds(explanation.lower_bound_s), explanation.binds
    console.print(f"\nno schedule of this plan is faster than {bound} ({explanation.lower_bound_by}); what binds: {binds}")
    for title, parts_s in (("step", explanation.parts_s), ("hidden", explanation.hidden_s)):
        shown = [f"{name} {format_seconds(value)}" for name, value in _largest(parts_s) if value > 0]
        if shown:
            console.print(f"{title}: {', '.join(shown)}")
    links = Table("busiest links", "bytes", "busy", "of the step", box=None, pad_edge=False)
    for link in explanation.links:
        links.add_row(link.name, format_bytes(link.total_bytes), format_seconds(link.busy_s), f"{link.share:.0%}")
    console.print(links)
    memory = ", ".join(f"{name} {format_bytes(value)}" for name, value in _largest(explanation.memory_parts_bytes) if value > 0)
    console.print(
        f"memory of the fullest rank ({explanation.fullest_rank}): {format_bytes(chosen.memory_bytes)} of "
        f"{format_bytes(explanation.memory_capacity_bytes)}: {memory}"
    )


def _level(name: str, size: int, ratio: float) -> str:
    if size == 1 or ratio == 0:
        return f"{name}: tokens travel"
    whole = "all experts" if ratio == 1 else f"{ratio:.0%} of the experts"
    return f"{name}: {whole} copied within domains of {size}"


def _serving(name: str, group: LayerGroup) -> str:
    """The outermost level of a plan with a serving table, its largest groups first."""
    groups = sorted(group.serving, key=lambda one: -len(one.sites))
    shown = [f"{_few(one.sites)} find experts at {_few(list(one.holders))}" for one in groups[:4]]
    more = f" and {len(groups) - 4} more" if len(groups) > 4 else ""
    return f"{name}: {len(groups)} groups of sites: {', '.join(shown)}{more}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _largest(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda item: -item[1])
