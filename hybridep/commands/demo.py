"""``hybridep demo``: one tour over everything, ending with a table that sets three answers side by side."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from hybridep.commands.common import again_in_lab, emit, note, set_option, stdout_console, verb
from hybridep.errors import UserError
from hybridep.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from hybridep.plan import Plan
    from hybridep.run import Run
    from hybridep.topology import Cluster
    from hybridep.workload import Workload

LOSS_TOLERANCE = 1e-5
"""Plans add numbers in different orders; in fp32 the losses of a short run drift apart by less than this, relatively."""

COMPARED_STEPS = 10
"""Later, rounding tips a token's choice of experts over now and then, and fp32 runs part ways (fp64 ones do not)."""

TABLE_WIDTH = 140
"""Columns that the table needs; a narrower terminal wraps its lines."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One plan's row of the table."""

    name: str
    domains: str
    measured_s: float
    """Median over the steps but the first."""
    spread_s: float
    """Standard deviation of the same steps."""
    predicted_s: float
    simulated_s: float
    wan_bytes: float
    """Counted by the ranks, per step."""
    wire_bytes: float | None
    """Counted by the kernel on the sites' access links over the whole run, start and Ray's own traffic included, per step."""
    planned_wan_bytes: float
    """Expected by the plan under uniform routing, per step."""
    losses: tuple[float, ...]

    @property
    def final_loss(self) -> float:
        """After the last step."""
        return self.losses[-1]


@verb(name="demo")
@click.option("--run", "run_name", default="demo", show_default=True, help="Run config: its cluster, model, data and steps.")
@set_option
def command(run_name: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Emulate datacenters behind slow links, measure them, plan, and train the same model three ways: expert parallelism,
    full gather, and the plan. Ends with one table: measured, predicted and simulated step times, WAN bytes, losses."""
    from hybridep.commands.inputs import Kind, cluster_and_workload, load_run, sort_overrides
    from hybridep.launch.backends import in_lab
    from runtime.trainable import check_run

    for override in sort_overrides(overrides, (Kind.CLUSTER, Kind.WORKLOAD, Kind.RUN))[Kind.RUN]:
        if override.startswith("plan="):
            raise UserError(f"--set {override}: the demo trains under plans of its own; `hybridep train` takes one")
    run = load_run(run_name, overrides)
    cluster, workload = cluster_and_workload(run.cluster, run.workload, run.overrides)
    check_run(run, workload)
    if not in_lab():
        ray = [sys.executable, "-m", "hybridep.launch.ray_nodes", str(cluster.ranks_per_site)]
        code = again_in_lab("demo", ["--run", run_name], cluster, overrides, as_json, before=ray)
        if code is not None:
            return code
    with _ray_nodes(cluster):
        outcomes, measured = _tour(run, cluster, workload)
    result = _result(run, measured, outcomes, shaped=in_lab())
    if as_json:
        emit(result)
    else:
        _show(result, outcomes)
    if not result["losses_equal"]:
        note("hybridep demo: the losses differ: this is a bug")
        return 1
    return 0


@contextmanager
def _ray_nodes(cluster: Cluster) -> Iterator[None]:
    """Ray nodes for all trainings of the tour, unless there are some already."""
    from hybridep.launch.ray_nodes import RayNodes, places_on_loopback

    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    with RayNodes(places_on_loopback(cluster.datacenters), cluster.ranks_per_site) as nodes:
        os.environ["RAY_ADDRESS"] = nodes.address
        try:
            yield
        finally:
            del os.environ["RAY_ADDRESS"]


def _tour(run: Run, cluster: Cluster, workload: Workload) -> tuple[list[Outcome], Cluster]:
    from hybridep.commands.probe import measured_cluster
    from planner import baseline, plan

    note("1/3 measuring links and computation with all ranks at once")
    cluster = measured_cluster(cluster, workload)
    for level in cluster.levels:
        note(
            f"    {level.name}: {format_seconds(level.latency)}, {format_bytes(level.bandwidth)}/s per {level.name} and direction"
        )
    note("2/3 planning")
    plans = {
        "ep": baseline(cluster, workload, "ep"),
        "full_gather": baseline(cluster, workload, "full_gather"),
        "plan": plan(cluster, workload),
    }
    note(f"3/3 training {counted(run.steps, 'step')} under each of {', '.join(plans)}")
    return [_train(run, name, made) for name, made in plans.items()], cluster


def _train(run: Run, name: str, made: Plan) -> Outcome:
    """Train one plan; its folder gets plan, log, summary, traces and the timelines as pictures."""
    from hybridep.commands.plots import plot_timeline
    from hybridep.commands.progress import TrainingProgress
    from hybridep.launch.backends import backend_for
    from hybridep.launch.session import train
    from hybridep.launch.worker import Job
    from hybridep.timeline import write_chrome_trace
    from simulator.report import simulate

    mine = _own(run, name)
    folder = mine.output
    note(f"    {name}: {_domains(made)}")
    report = simulate(made)
    write_chrome_trace(folder / "trace-simulated.json", report.step.spans())
    plot_timeline(folder / "timeline-simulated.png", folder / "trace-simulated.json", f"{name}: simulated step")
    job = Job(run=mine, plan=made, resume=False)
    before_bytes = _wire_bytes()
    with backend_for(job, local=False) as backend, TrainingProgress(run.steps) as progress:
        summary = train(job, backend, progress)
        wire_bytes = _wire_bytes() or 0
    if (folder / "trace.json").exists():
        plot_timeline(folder / "timeline.png", folder / "trace.json", f"{name}: measured step {run.trace_step}")
    return Outcome(
        name=name,
        domains=_domains(made),
        measured_s=summary["step_s"]["median"],
        spread_s=summary["step_s"]["stdev"],
        predicted_s=made.predicted.expected_s,
        simulated_s=report.step.step_s,
        wan_bytes=summary["wan_bytes_per_step"],
        wire_bytes=None if before_bytes is None else (wire_bytes - before_bytes) / run.steps,
        planned_wan_bytes=made.predicted.wan_bytes,
        losses=tuple(summary["losses"]),
    )


def _own(run: Run, name: str) -> Run:
    """The run of one plan, with folders of its own."""
    kept = run.checkpoints.folder
    checkpoints = run.checkpoints.model_copy(update={"folder": kept and kept / name})
    return run.model_copy(update={"name": f"{run.name}-{name}", "output": run.output / name, "checkpoints": checkpoints})


def _wire_bytes() -> int | None:
    """Bytes that have left the emulated sites so far; None outside the lab."""
    from hybridep.launch.backends import in_lab
    from hybridep.launch.lab import Lab

    if not in_lab():
        return None
    lab = Lab.current()
    return sum(lab.sent_bytes(site.name) for site in lab.sites)


def _domains(made: Plan) -> str:
    groups = dict.fromkeys(" ".join(f"{name} {size}" for name, size in group.domains.items()) for group in made.layers)
    return "domains " + " / ".join(groups)


def _result(run: Run, cluster: Cluster, outcomes: list[Outcome], *, shaped: bool) -> dict[str, Any]:
    """Write figures and ``comparison.json``; returns what ``--json`` prints."""
    import json

    from hybridep.commands.plots import plot_losses, plot_step_times
    from hybridep.config import write_text, write_yaml
    from hybridep.provenance import provenance

    plot_losses(run.output / "losses.png", {outcome.name: outcome.losses for outcome in outcomes})
    times = {one.name: {what: getattr(one, f"{what}_s") for what in ("measured", "predicted", "simulated")} for one in outcomes}
    plot_step_times(run.output / "step-times.png", times)
    write_yaml(run.output / "cluster.yaml", cluster.model_dump(mode="json", exclude_none=True))
    first, *others = (outcome.losses[:COMPARED_STEPS] for outcome in outcomes)
    equal = all(abs(a - b) <= LOSS_TOLERANCE * abs(b) for losses in others for a, b in zip(losses, first, strict=True))
    result = {
        "shaped": shaped,
        "losses_equal": equal,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "output": str(run.output),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_text(run.output / "comparison.json", json.dumps({**result, "provenance": provenance()}, indent=1))
    return result


def _show(result: dict[str, Any], outcomes: list[Outcome]) -> None:
    from rich.table import Table

    console = stdout_console(TABLE_WIDTH)
    best_s = min(outcome.measured_s for outcome in outcomes)
    times = ("measured step", "", "predicted", "simulated")
    table = Table("", "placement", *times, "WAN counted", "planned", "on the wire", "final loss", box=None, pad_edge=False)
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            outcome.domains,
            f"{format_seconds(outcome.measured_s)} ± {format_seconds(outcome.spread_s)}",
            f"x {outcome.measured_s / best_s:.2f}",
            format_seconds(outcome.predicted_s),
            format_seconds(outcome.simulated_s),
            format_bytes(outcome.wan_bytes),
            format_bytes(outcome.planned_wan_bytes),
            "-" if outcome.wire_bytes is None else f"{outcome.wire_bytes / outcome.wan_bytes - 1:+.1%}",
            f"{outcome.final_loss:.5f}",
        )
    console.print(table)
    steps = len(outcomes[0].losses)
    links, medians = "shaped" if result["shaped"] else "NOT shaped", counted(steps - 1, "step")
    console.print(f"links {links}; medians of {medians} ± standard deviation; per step")
    equal = "equal" if result["losses_equal"] else "NOT equal"
    console.print(
        f"losses of the first {counted(min(steps, COMPARED_STEPS), 'step')} are {equal} (within {LOSS_TOLERANCE:g}, fp32)"
    )
    output = result["output"]
    console.print(
        f"figures: {output}/losses.png, {output}/step-times.png, {output}/*/timeline.png (measured), timeline-simulated.png"
    )
    console.print(f"Chrome traces (ui.perfetto.dev): {output}/*/trace.json, trace-simulated.json")
