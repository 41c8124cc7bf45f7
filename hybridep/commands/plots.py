"""Figures of a comparison (losses, step times, one step's timeline) and of a plan, as PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none may be opened

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hybridep.errors import UserError
from hybridep.pipeline import PipelinePlan

if TYPE_CHECKING:
    from hybridep.arrays import FloatArray
    from hybridep.pipeline import AnyPlan
    from planner import PlanMatrices
    from planner.stages.matrices import StageMatrices

# Names are no formulas, whatever is between two dollar signs in them.
matplotlib.rcParams["text.parse_math"] = False

MAX_ROWS = 40
"""A timeline with more rows than this shows the first ones only."""


def plot_losses(path: Path, losses: Mapping[str, Sequence[float]]) -> None:
    """One curve per plan over the steps. Equal curves lie on each other, so later ones are drawn thinner."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for index, (name, values) in enumerate(losses.items()):
        axes.plot(range(1, len(values) + 1), values, label=name, linewidth=7.0 / (1 + 1.5 * index))
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_step_times(path: Path, times_s: Mapping[str, Mapping[str, float]]) -> None:
    """Grouped bars: ``times_s[plan][measured | predicted | simulated]`` in seconds."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    kinds = list(dict.fromkeys(kind for times in times_s.values() for kind in times))
    width = 0.8 / max(len(kinds), 1)
    for index, kind in enumerate(kinds):
        places = [position + (index - (len(kinds) - 1) / 2) * width for position in range(len(times_s))]
        bars = axes.bar(places, [times.get(kind, 0.0) for times in times_s.values()], width=width, label=kind)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(times_s)), list(times_s))
    axes.set_ylabel("step time (s)")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_timeline(path: Path, trace: Path, title: str) -> None:
    """A Chrome trace as one row per thread, coloured by kind of operation; a kind's backward has the same colour."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    threads = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    rows = list(dict.fromkeys((event["pid"], event["tid"]) for event in spans))[:MAX_ROWS]
    kinds = list(dict.fromkeys(_kind(event["cat"]) for event in spans))
    colours = dict(zip(kinds, plt.get_cmap("tab20").colors, strict=False))  # type: ignore[attr-defined]
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.22 * len(rows)), layout="constrained")
    for height, row in enumerate(rows):
        for kind in kinds:
            bars = [
                (event["ts"] / 1e3, event["dur"] / 1e3)
                for event in spans
                if (event["pid"], event["tid"]) == row and _kind(event["cat"]) == kind
            ]
            axes.broken_barh(bars, (height - 0.4, 0.8), color=colours.get(kind, "black"), label="_" if height else kind)
    handles = [Patch(color=colours.get(kind, "black")) for kind in kinds]
    axes.legend(handles, kinds, loc="upper left", bbox_to_anchor=(1, 1), fontsize=7, frameon=False)
    axes.set_yticks(range(len(rows)), [f"{processes[pid]} {threads[tid]}" for pid, tid in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="ms", title=title)
    _save(figure, path)


def draw(path: Path, plan: AnyPlan) -> None:
    """A plan, in stages or without. Raises UserError where the file cannot be written."""
    import planner

    try:
        if isinstance(plan, PipelinePlan):
            plot_stages(path, planner.stage_matrices(plan))
        else:
            plot_plan(path, planner.plan_matrices(plan))
    except OSError as error:
        raise UserError(f"--figure {path}: cannot be written ({error})") from None


def plot_plan(path: Path, matrices: PlanMatrices) -> None:
    """Who computes for whom, who copies from whom, and how long links between sites are busy in a step, site by site."""
    figure, panels, names = _site_panels(matrices.sites)
    titles = (
        ("experts computed at ... for tokens of", "computed at", "tokens of", matrices.served),
        ("copies of experts from ... held at", "held at", "home", matrices.copied),
    )
    for axes, (title, across, down, values) in zip(panels, titles, strict=False):
        _matrix(axes, values, label="experts per layer", title=title, xlabel=across, ylabel=down)
        _name_sites(axes, names, both=True)
    _busy_links(panels[2], names, matrices)
    _save(figure, path)


def plot_stages(path: Path, matrices: StageMatrices) -> None:
    """Which layers each site has, who sends how much to whom, and how long links between sites are busy in a step; sites in the
    order of the stages."""
    figure, panels, names = _site_panels(matrices.sites)
    axes = panels[0]
    _matrix(axes, 100 * matrices.layers, label="% of the sequences", title="layers of each site", xlabel="layer", ylabel="site")
    axes.set_aspect("auto")
    _name_sites(axes, names, both=False)
    axes = panels[1]
    _matrix(axes, matrices.sent_bytes / 1e9, label="GB", title="bytes sent in a step", xlabel="to", ylabel="from")
    _name_sites(axes, names, both=True)
    _busy_links(panels[2], names, matrices)
    for border in np.flatnonzero(np.diff(matrices.stage)) + 0.5:
        for axes in panels:
            axes.axhline(border, color="0.6", linewidth=0.6)
    _save(figure, path)


def _site_panels(sites: Sequence[str]) -> tuple[Figure, Sequence[Axes], Sequence[str]]:
    """(A figure, its three panels for so many sites, their names; none where these are too many)."""
    named = len(sites) <= MAX_ROWS
    side = max(4.0, 0.22 * len(sites)) if named else 6.0
    figure, panels = plt.subplots(1, 3, figsize=(3 * side + 2, side + 1), layout="constrained")
    return figure, panels, sites if named else ()


def _matrix(axes: Axes, values: FloatArray, *, label: str, colours: str = "viridis", **texts: str) -> None:
    """Values by colour, those of zero in none."""
    image = axes.imshow(np.ma.masked_equal(values, 0.0), cmap=colours, interpolation="nearest", vmin=0)
    axes.set(**texts)
    axes.figure.colorbar(image, ax=axes, shrink=0.7, label=label)


def _busy_links(axes: Axes, names: Sequence[str], matrices: PlanMatrices | StageMatrices) -> None:
    """Seconds of a step: of links per pair where there are any, else of access links."""
    if matrices.pair_s is not None:
        title = "seconds that links are busy in a step"
        _matrix(axes, matrices.pair_s, label="s", colours="magma", title=title, xlabel="to", ylabel="from")
    else:
        places = np.arange(len(matrices.sites))
        axes.barh(places - 0.2, matrices.up_s, 0.4, label="up")
        axes.barh(places + 0.2, matrices.down_s, 0.4, label="down")
        axes.invert_yaxis()
        axes.set(title="access links, per step", xlabel="seconds busy")
        axes.legend(frameon=False)
    _name_sites(axes, names, both=matrices.pair_s is not None)


def _name_sites(axes: Axes, sites: Sequence[str], *, both: bool) -> None:
    if sites:
        axes.set_yticks(range(len(sites)), list(sites), fontsize=6)
        if both:
            axes.set_xticks(range(len(sites)), list(sites), fontsize=6, rotation=90)


def _kind(category: str) -> str:
    return category.removesuffix("_backward") if category not in ("combine_backward", "dispatch_backward") else category


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
