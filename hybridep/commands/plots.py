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

if TYPE_CHECKING:
    from planner import PlanMatrices

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


def plot_plan(path: Path, matrices: PlanMatrices) -> None:
    """Who computes for whom, who copies from whom, and how long links between sites are busy in a step, site by site."""
    size = len(matrices.sites)
    named = size <= MAX_ROWS
    side = max(4.0, 0.22 * size) if named else 6.0
    figure, panels = plt.subplots(1, 3, figsize=(3 * side + 2, side + 1), layout="constrained")
    titles = (
        ("experts computed at ... for tokens of", "computed at", "tokens of", matrices.served),
        ("copies of experts from ... held at", "held at", "home", matrices.copied),
    )
    for axes, (title, across, down, values) in zip(panels, titles, strict=False):
        image = axes.imshow(np.ma.masked_equal(values, 0.0), cmap="viridis", interpolation="nearest", vmin=0)
        axes.set(title=title, xlabel=across, ylabel=down)
        figure.colorbar(image, ax=axes, shrink=0.7, label="experts per layer")
        _name_sites(axes, matrices.sites if named else (), both=True)
    axes = panels[2]
    if matrices.pair_s is not None:
        image = axes.imshow(np.ma.masked_equal(matrices.pair_s, 0.0), cmap="magma", interpolation="nearest", vmin=0)
        axes.set(title="seconds that links are busy in a step", xlabel="to", ylabel="from")
        figure.colorbar(image, ax=axes, shrink=0.7, label="s")
        _name_sites(axes, matrices.sites if named else (), both=True)
    else:
        places = np.arange(size)
        axes.barh(places - 0.2, matrices.up_s, 0.4, label="up")
        axes.barh(places + 0.2, matrices.down_s, 0.4, label="down")
        axes.invert_yaxis()
        axes.set(title="access links, per step", xlabel="seconds busy")
        axes.legend(frameon=False)
        _name_sites(axes, matrices.sites if named else (), both=False)
    _save(figure, path)


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
