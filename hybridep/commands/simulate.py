"""``hybridep simulate``: what a step of a plan takes, by flow-level simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridep.commands.common import emit, set_option, verb
from hybridep.errors import UserError

if TYPE_CHECKING:
    from simulator.report import Report

_SHOWN_LINKS = 5


@verb(name="simulate")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--against",
    default="",
    metavar="NAMES",
    help="Baselines to simulate too, comma separated: ep, full_gather, ep_in_dc, ep_in_node.",
)
@click.option(
    "--routing",
    type=click.Path(path_type=Path),
    help="What `hybridep train` recorded (routing.npz): the traced step's choices, or else the popularity of experts.",
)
@click.option("--trace", type=click.Path(path_type=Path), help="Write the step's timeline (open in ui.perfetto.dev).")
@set_option
def command(
    plan: Path, against: str, routing: Path | None, trace: Path | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Simulate one training step of PLAN, a file that `hybridep plan` wrote. With --set, for example
    cluster.levels.dc.bandwidth='1 Gbps' or workload.training.micro_batches=4, the same placement under other conditions.
    """
    from hybridep.baselines import Baseline
    from hybridep.plan import load_plan
    from hybridep.routing import load_routing
    from hybridep.timeline import write_chrome_trace
    from simulator.report import simulate

    known = {baseline.value: baseline for baseline in Baseline}
    names = [name.strip() for name in against.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"--against {name}: no such baseline; there are {', '.join(known)}")
    loaded, choices = load_plan(plan, overrides=overrides), None
    if routing is not None:
        record = load_routing(routing)
        record.require(loaded, routing)
        loaded, choices = loaded.with_popularity(record.popularity()), record.choices or None
    report = simulate(loaded, [known[name] for name in names], choices)
    if trace is not None:
        write_chrome_trace(trace, report.step.spans())
    if as_json:
        emit(report.as_dict())
    else:
        _show(report)
        if trace is not None:
            click.echo(f"timeline written to {trace}")


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from hybridep.units import format_bytes, format_seconds

    console = Console(highlight=False, soft_wrap=True)
    step_s = report.step.step_s
    console.print(f"step [bold]{format_seconds(step_s)}[/bold] (simulated in {format_seconds(report.wall_s)})")
    for baseline, other_s in report.baselines.items():
        console.print(f"  {baseline.value}: {format_seconds(other_s)} (x {other_s / step_s:.2f})")
    prediction = report.step.plan.prediction
    if prediction is not None:
        console.print(f"  the plan's own prediction: {format_seconds(prediction.step)}")
    parts = sorted(report.step.parts.items(), key=lambda item: -item[1])
    console.print("critical path: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value > 0))
    links = Table("busiest links", "bytes", "busy", "load", box=None, pad_edge=False)
    for link in sorted(report.step.links, key=lambda link: -link.load)[:_SHOWN_LINKS]:
        links.add_row(link.name, format_bytes(link.size_bytes), format_seconds(link.busy_s), f"{link.load:.0%}")
    console.print(links)
