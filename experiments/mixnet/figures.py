"""Figures of the three parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

Rows = list[dict[str, Any]]


def per_dollar(rows: Rows) -> dict[tuple[str, str, str, str], float]:
    """(source, model, rate, fabric) -> performance per dollar over a fat-tree's."""
    value = {
        (row["source"], row["model"], row["gbps"], row["fabric"]): 1 / (float(row["iteration_s"]) * float(row["network_usd"]))
        for row in rows
    }
    return {key: each / value[(*key[:3], "fat_tree")] for key, each in value.items() if (*key[:3], "fat_tree") in value}


def draw_dollars(path: Path, rows: Rows) -> None:
    gains = per_dollar(rows)
    models = list(dict.fromkeys(row["model"] for row in rows))
    axes = plt.subplots(1, len(models), figsize=(3.2 * len(models), 3), sharey=True, squeeze=False, layout="constrained")[1]
    for panel, model in zip(axes[0], models, strict=True):
        for (source, fabric), style in {
            ("published", "mixnet"): "k-o",
            ("simulated", "mixnet_simulator"): "C0--^",
            ("simulated", "mixnet"): "C0-o",
            ("simulated", "mixnet_foreseen"): "C2-s",
            ("simulated", "mixnet_kept"): "C3-d",
            ("simulated", "fat_tree_3to1"): "C1:x",
        }.items():
            points = sorted(
                (int(key[2]), gain) for key, gain in gains.items() if (key[0], key[1], key[3]) == (source, model, fabric)
            )
            if points:
                panel.plot(*zip(*points, strict=True), style, label=f"{source}: {fabric}", markersize=4, linewidth=1)
        panel.set(title=model, xlabel="Gbps", xscale="log", xticks=[100, 200, 400, 800], xticklabels=["100", "200", "400", "800"])
        panel.minorticks_off()
    axes[0, 0].set_ylabel("performance per dollar,\nfat-tree = 1")
    axes[0, -1].legend(fontsize=6)
    save(path)


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def draw_delay(path: Path, rows: Rows) -> None:
    models = list(dict.fromkeys(row["model"] for row in rows))
    axes = plt.subplots(1, len(models), figsize=(3.2 * len(models), 3), squeeze=False, layout="constrained")[1]
    for panel, model in zip(axes[0], models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        least = min(float(row["iteration_s"]) for row in mine)
        for fabric in dict.fromkeys(row["fabric"] for row in mine):
            points = sorted(
                (max(seconds(row["delay"]), 1e-6), float(row["iteration_s"]) / least) for row in mine if row["fabric"] == fabric
            )
            panel.loglog(*zip(*points, strict=True), "-o", label=fabric, markersize=3, linewidth=1)
        panel.axvline(0.025, color="grey", linewidth=0.5)
        panel.set(title=model, xlabel="reconfiguration, s")
    axes[0, 0].set_ylabel("iteration, over the shortest")
    axes[0, -1].legend(fontsize=6)
    save(path)


def draw_sites(path: Path, rows: Rows) -> None:
    settings = list(dict.fromkeys((row["between_gbps"], row["inside_gbps"]) for row in rows))
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    fabrics = list(dict.fromkeys(row["fabric"] for row in rows))
    axes = plt.subplots(1, len(settings), figsize=(2.6 * len(settings), 3), squeeze=False, layout="constrained")[1]
    for panel, setting in zip(axes[0], settings, strict=True):
        for at, fabric in enumerate(fabrics):
            steps = {
                row["plan"]: float(row["step_s"])
                for row in rows
                if row["fabric"] == fabric and (row["between_gbps"], row["inside_gbps"]) == setting
            }
            where = [number + at / (len(fabrics) + 1) for number in range(len(plans))]
            panel.bar(where, [steps[plan] for plan in plans], 1 / (len(fabrics) + 1), label=fabric)
        panel.set_xticks([number + 0.4 for number in range(len(plans))], plans, fontsize=7)
        panel.set_title(f"{setting[0]} Gbps between,\n{setting[1]} per GPU inside", fontsize=8)
    axes[0, 0].set_ylabel("step, s")
    axes[0, -1].legend(fontsize=6)
    save(path)


def save(path: Path) -> None:
    plt.savefig(path, dpi=110)
    plt.close()


DRAW: dict[str, Callable[[Path, Rows], None]] = {"dollars": draw_dollars, "delay": draw_delay, "sites": draw_sites}
