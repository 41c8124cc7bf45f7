"""Six questions that a planner of infrastructure would ask, each a scenario file beside this script.

    .venv/bin/python experiments/what-if/run.py [--only lose-site]

Each can also be run alone: hybridep simulate experiments/what-if/lose-site.yaml. Tables and a figure land in results/; points
that are in a table already are not simulated again.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from hybridep.commands.sweeps import Row, sweep
from hybridep.commands.tables import write_provenance, write_rows
from simulator.scenario import points

HERE = Path(__file__).resolve().parent
COLUMNS = ("scenario", "point", "plan", "step_s", "run_s", "busiest_link", "busiest_load", "error")


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="A scenario's name.  [default: all]")
@click.option("--jobs", default=1, show_default=True)
@click.option("--results", type=click.Path(path_type=Path), default=HERE / "results")
def main(only: tuple[str, ...], jobs: int, results: Path) -> None:
    results.mkdir(parents=True, exist_ok=True)
    names = only or tuple(path.stem for path in sorted(HERE.glob("*.yaml")))
    tables = {name: sweep(list(points(HERE / f"{name}.yaml")), results / f"{name}.csv", jobs) for name in names}
    every = [row | {"scenario": name, "point": label(row)} for name, rows in tables.items() for row in rows]
    write_rows(results / "rows.csv", every, COLUMNS)
    for row in every:
        click.echo(f"{row['scenario']:14} {row['point']}: {row.get('run_s') or row.get('step_s') or row['error']}")
    write_provenance(results)
    draw(results / "what-if.png", tables)


def label(row: Row) -> str:
    """What is different at this point, in few words."""
    words = []
    for key, value in json.loads(row["point"])["point"].items():
        short = key.rpartition(".")[2] if key.startswith("c") else key
        if isinstance(value, list):
            value = "; ".join(map(brief, value)) or "none"
        words.append(f"{short} {value}")
    return ", ".join(words)


def brief(entry: object) -> str:
    if isinstance(entry, dict):
        return " ".join(str(value) for value in entry.values())
    return str(entry).removeprefix("workload.model.")


def draw(path: Path, tables: dict[str, list[Row]]) -> None:
    """A panel per question: step times, or whole runs."""
    figure, axes = plt.subplots(len(tables), 1, figsize=(11, 2.6 * len(tables)), layout="constrained", squeeze=False)
    for panel, (name, rows) in zip(axes[:, 0], tables.items(), strict=True):
        good = [row for row in rows if not row.get("error")]
        key = "run_s" if any(row.get("run_s") for row in good) else "step_s"
        bars = panel.barh(range(len(good)), [float(row[key]) for row in good])
        panel.bar_label(bars, fmt="%.4g", fontsize=7)
        panel.set_yticks(range(len(good)), [label(row)[:110] for row in good], fontsize=6)
        panel.invert_yaxis()
        panel.set(title=name, xlabel="seconds of the run" if key == "run_s" else "seconds per step")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
