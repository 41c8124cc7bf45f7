"""``hybridep simulate``: what a step of a plan, a run or a grid of them takes, by flow-level simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridep.commands.common import OUTPUT, Finite, emit, note, require_place, set_option, stdout_console, verb
from hybridep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.memory import MemoryUse
    from simulator.many_steps import RunResult
    from simulator.report import Report
    from simulator.scenario import Point, Scenario

_SHOWN_LINKS = _SHOWN_NOT_MET = 5


@verb(name="simulate")
@click.argument("what", metavar="PLAN|SCENARIO", type=click.Path(path_type=Path))
@click.option(
    "--against",
    default="",
    metavar="NAMES",
    help="What to simulate too, comma separated: baselines ep, full_gather, ep_in_dc, ep_in_node; schedules of other systems "
    "flat_ep, tutel, faster_moe, smart_moe, pipeline.",
)
@click.option(
    "--routing",
    metavar="uniform|zipf:S|FILE",
    help="What tokens choose; uniform: what the plan expects, which may know how popular experts are; FILE as `hybridep train` "
    "records it (routing.npz).",
)
@click.option("--fabric", metavar="FILE|NAME", help="What joins the sites, and the machines inside each (see docs/scenarios.md).")
@click.option(
    "--tolerance",
    type=Finite(min=0, max=0.1, max_open=True),
    metavar="SHARE",
    help="Let transfers end together that differ by at most this share of their bytes, for example 0.005: for speed among "
    "thousands of different sites.  [default: exact]",
)
@click.option(
    "--one-rank-per-site",
    is_flag=True,
    help="Take the ranks of each site for alike (mean bytes between sites, the busiest rank's inside): plans among a thousand "
    "different sites are simulated several times as fast, as a rule within one percent.",
)
@click.option("--trace", type=OUTPUT, help="Write the step's timeline (open in ui.perfetto.dev).")
@click.option("--out", type=OUTPUT, help="CSV of a sweep.  [default: the scenario's name, .csv]")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes of a sweep.  [default: one per core]")
@set_option
def command(
    what: Path,
    against: str,
    routing: str | None,
    fabric: str | None,
    tolerance: float | None,
    one_rank_per_site: bool,
    trace: Path | None,
    out: Path | None,
    jobs: int | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int | None:
    """Simulate one training step of PLAN, a file that `hybridep plan` wrote, with or without stages. With --set, for example
    cluster.levels.dc.bandwidth='1 Gbps' or workload.training.micro_batches=4, the same placement under other conditions.

    Or a SCENARIO (see docs/scenarios.md): a plan or what to plan, conditions that change, a run of many steps; with a grid,
    every combination in parallel into a table, which a later call goes on with.
    """
    from hybridep.commands.fabrics import unknown_to_plans
    from hybridep.config import read_yaml
    from simulator.scenario import Scenario, points

    # All are YAML; what holds placed layers, or stages of them, is a plan.
    data = read_yaml(what)
    is_plan = bool({"layers", "schema_version"} & set(data))
    names = tuple(name.strip() for name in against.split(",") if name.strip())
    options = {"routing": routing, "fabric": fabric, "tolerance": tolerance, "one_rank_per_site": one_rank_per_site or None}
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if names:
        given["against"] = names
    if is_plan:
        grid: list[tuple[Point, Scenario]] = [({}, Scenario(plan=str(what), overrides=overrides).model_copy(update=given))]
    else:
        grid = list(points(what, overrides, given))
        for words in unknown_to_plans(one for _, one in grid):
            note(f"hybridep simulate: plans made now know nothing of {words}; it is simulated")
    if grid[0][0] or out is not None:
        if trace is not None:
            raise UserError(f"--trace {trace}: a sweep has no single timeline")
        if out is not None:
            require_place("--out", out)
        return _sweep(grid, out or Path(f"{what.stem}.csv"), jobs, as_json)
    if jobs is not None:
        raise UserError(f"--jobs {jobs}: processes of a sweep, and {what} has no grid; leave it out")
    if trace is not None:
        require_place("--trace", trace)
    _one(grid[0][1], trace, as_json)
    return None


def _one(scenario: Scenario, trace: Path | None, as_json: bool) -> None:
    from hybridep.commands.progress import ShareProgress
    from hybridep.commands.scenarios import simulate_scenario
    from hybridep.timeline import write_chrome_trace

    with ShareProgress("simulating") as progress:
        result = simulate_scenario(scenario, progress)
    if trace is not None:
        write_chrome_trace(trace, result.report.step.spans())
    if as_json:
        emit(result.as_dict())
        return
    _show(result.report)
    if result.memory is not None:
        click.echo(_memory_text(result.memory))
    if result.run is not None:
        _show_run(result.run)
    if result.not_met:
        more = f" and {len(result.not_met) - _SHOWN_NOT_MET} more" if len(result.not_met) > _SHOWN_NOT_MET else ""
        stdout_console().print("ends before: " + ", ".join(result.not_met[:_SHOWN_NOT_MET]) + more)
    if trace is not None:
        click.echo(f"timeline written to {trace}")


def _sweep(grid: Sequence[tuple[Point, Scenario]], table: Path, jobs: int | None, as_json: bool) -> int:
    from hybridep.commands.sweeps import as_data, default_jobs, shown, sweep
    from hybridep.units import counted

    rows = sweep(grid, table, jobs or default_jobs())
    failed = [row for row in rows if row.get("error")]
    if as_json:
        emit({"table": str(table), "points": len(rows), "failed": len(failed), "rows": [as_data(row) for row in rows]})
    else:
        for row in rows:
            click.echo("  ".join(shown(row)))
        click.echo(f"{counted(len(rows), 'point')} in {table}" + (f", {len(failed)} failed" if failed else ""))
    return 2 if failed else 0


def _memory_text(memory: MemoryUse) -> str:
    from hybridep.units import format_bytes

    needs, has = format_bytes(memory.fullest_bytes), format_bytes(memory.capacity_bytes)
    if memory.fits:
        return f"memory of the fullest rank ({memory.fullest_name}): {needs} of {has}"
    return f"does not fit: {memory.fullest_name} needs {needs} of memory and has {has}; simulated as if it had enough"


def _show_run(run: RunResult) -> None:
    from hybridep.units import counted, format_seconds

    data = run.as_dict()
    parts = {what: data[f"{what}_total_s"] for what in ("step", "checkpoint", "replan", "loss", "return")}
    spent = ", ".join(f"{what} {format_seconds(value)}" for what, value in parts.items() if value > 0)
    steps, plans = counted(data["steps_run"], "step"), counted(len(data["plans"]), "plan")
    click.echo(f"run {format_seconds(run.total_s)}: {steps} under {plans}; {spent}")


def _show(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from hybridep.units import format_bytes, format_seconds

    console, step_s = stdout_console(), report.step.step_s
    console.print(Text.assemble("step ", (format_seconds(step_s), "bold"), f" (simulated in {format_seconds(report.wall_s)})"))
    for baseline, other_s in report.baselines.items():
        chosen = f", {report.choices[baseline]}" if baseline in report.choices else ""
        console.print(f"  {baseline}: {format_seconds(other_s)} (x {other_s / step_s:.2f}{chosen})")
    for baseline, why in report.do_not_fit.items():
        console.print(f"  {baseline}: does not fit: {why.removeprefix(f'{baseline}: ')}")
    prediction = report.step.plan.prediction
    if prediction is not None:
        console.print(f"  the plan's own prediction: {format_seconds(prediction.expected_s)}")
    parts = sorted(report.step.parts.items(), key=lambda item: -item[1])
    if report.pipeline is not None:
        one = report.pipeline
        parts_s = {"busiest stage": one.work_s, "bubble": one.bubble_s, "activations": one.transfers_s}
        console.print(", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts_s.items()))
    console.print("critical path: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value > 0))
    links = Table("busiest links", "bytes", "busy", "load", box=None, pad_edge=False)
    for link in sorted(report.step.links, key=lambda link: -link.load)[:_SHOWN_LINKS]:
        links.add_row(link.name, format_bytes(link.size_bytes), format_seconds(link.busy_s), f"{link.load:.0%}")
    console.print(links)
