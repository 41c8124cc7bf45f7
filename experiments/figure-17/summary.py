"""Gains out of step times, and the figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

Row = dict[str, str]
OTHERS = ("flat_ep", "tutel", "faster_moe", "full_gather", "ep")
"""What a gain is over: the best of these, whichever it is."""


def gains(rows: Sequence[Row]) -> list[Row]:
    """Per setting: step time of plain expert parallelism over that of each scheme, and of the best other over the planned."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        times.setdefault((row["workload"], row["sites"], row["bandwidth"]), {})[row["scheme"]] = float(row["step_s"])
    found = []
    for (workload, sites, bandwidth), step_s in times.items():
        if "flat_ep" not in step_s or "planned" not in step_s:
            continue
        row = {"workload": workload, "sites": sites, "bandwidth": bandwidth}
        plain = step_s["flat_ep"]
        row |= {f"{name} over flat_ep": f"{plain / value:.3f}" for name, value in step_s.items() if name != "flat_ep"}
        best = min((name for name in OTHERS if name in step_s), key=lambda name: step_s[name])
        row["best other"] = best
        row["planned over best other"] = f"{step_s[best] / step_s['planned']:.3f}"
        # What Megatron calls EP size: groups of G / S sites, replicated S times. Here of the sizes that were tried.
        groups = [value for name, value in step_s.items() if name.endswith(", a row per choice")]
        row["planned over best size, a row per choice"] = (
            f"{min([plain, step_s['full_gather'], *groups]) / step_s['planned']:.3f}"
        )
        row["planned over ep"] = f"{step_s['ep'] / step_s['planned']:.3f}"
        for coded in ("int8", "top-k 2 %"):
            if f"planned, {coded}" in step_s:
                other = min(step_s[f"ep, {coded}"], step_s[f"full_gather, {coded}"])
                row[f"planned over best other, both {coded}"] = f"{other / step_s[f'planned, {coded}']:.3f}"
        found.append(row)
    names = list(dict.fromkeys(name for row in found for name in row))
    return [{name: row.get(name, "") for name in names} for row in found]


def draw(path: Path, paper: Sequence[Row], found: Sequence[Row]) -> None:
    """Left: the paper's model at the most sites, each setting's range over bandwidths. Then a panel per workload."""
    workloads = list(dict.fromkeys(row["workload"] for row in found))
    figure, axes = plt.subplots(1, 1 + len(workloads), figsize=(4.2 * (1 + len(workloads)), 4.2), layout="constrained")
    panel = axes[0]
    most = max(int(row["sites"]) for row in paper)
    rows = [row for row in paper if int(row["sites"]) == most]
    kinds = list(dict.fromkeys(row["fixed"] for row in rows))
    for at, kind in enumerate(kinds):
        for ratio, colour in (("1", "tab:red"), ("50", "tab:blue")):
            mine = [row for row in rows if row["fixed"] == kind and row["compression"] == ratio]
            shift = -0.15 if ratio == "1" else 0.15
            for row in mine:
                panel.plot([at + shift] * 2, [float(row["least_gain"]), float(row["most_gain"])], color=colour, alpha=0.25, lw=4)
    for low, high, first, last in ((1.05, 1.45, -0.4, 2.4), (1.31, 3.76, 2.6, 5.4)):
        panel.fill_between([first, last], low, high, color="0.85", zorder=0)
    panel.set_xticks(range(len(kinds)), kinds)
    panel.set(yscale="log", ylim=(0.05, 6), ylabel="gain over expert parallelism", title=f"Eq. 10, {most} sites (grey: Fig. 17)")
    lines = {
        "planned over flat_ep": "planned, over plain EP",
        "planned over ep": "over EP with deduplication",
        "planned over best other": "over the best other",
        "planned over best other, both int8": "over the best other, both int8",
        "planned over best other, both top-k 2 %": "over the best other, both top-k",
    }
    for panel, workload in zip(axes[1:], workloads, strict=True):
        for (column, label), marker in zip(lines.items(), "os^vD", strict=True):
            for bandwidth, style in zip(dict.fromkeys(row["bandwidth"] for row in found), ("-", "--", ":"), strict=False):
                mine = [row for row in found if row["workload"] == workload and row["bandwidth"] == bandwidth and row[column]]
                colour = f"C{list(lines).index(column)}"
                named = label if style == "-" else None
                panel.plot(
                    [int(row["sites"]) for row in mine],
                    [float(row[column]) for row in mine],
                    style,
                    marker=marker,
                    ms=4,
                    color=colour,
                    label=named,
                )
        panel.set(xscale="log", yscale="log", xlabel="datacenters", title=workload)
        panel.axhline(1, color="0.7", lw=0.8)
    axes[1].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
