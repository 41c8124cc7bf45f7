"""Sweeps: every point of a scenario's grid, in parallel processes, into one table that a later call goes on with."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybridep.commands.scenarios import simulate_scenario
from hybridep.config import write_text
from hybridep.errors import HybridEPError, UserError

if TYPE_CHECKING:
    from simulator.scenario import Point, Scenario

Row = dict[str, str]

_POINT = "point"
"""Column with the whole point as JSON: what makes a row that of a point."""


def sweep(grid: Sequence[tuple[Point, Scenario]], table: Path, jobs: int) -> list[Row]:
    """Simulate the points that `table` (CSV) does not have yet, and write it anew after each. Returns all rows in the grid's
    order. A point that cannot be simulated has its error in the row, and is tried again by a later call.
    """
    done = {row[_POINT]: row for row in _read(table) if not row.get("error")}
    keys = [_key(point, scenario) for point, scenario in grid]
    missing = [(key, *entry) for key, entry in zip(keys, grid, strict=True) if key not in done]
    if missing:
        with _progress(len(grid)) as progress:
            task = progress.add_task("points", total=len(grid), completed=len(grid) - len(missing))
            for key, point, row in _results(missing, min(jobs, len(missing))):
                done[key] = {_POINT: key, **{name: _text(value) for name, value in point.items()}, **row}
                _write(table, [done[each] for each in keys if each in done])
                progress.advance(task)
    return [done[key] for key in keys]


def _results(missing: Sequence[tuple[str, Point, Scenario]], jobs: int) -> Iterator[tuple[str, Point, Row]]:
    """(key, point, row) of each missing scenario, in the order in which they are ready."""
    if jobs == 1:
        for key, point, scenario in missing:
            yield key, point, _simulate(scenario)
        return
    # Started afresh: a fork would copy whatever threads hold at the moment.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_simulate, scenario): (key, point) for key, point, scenario in missing}
        for finished in as_completed(running):
            yield *running[finished], finished.result()


def _key(point: Point, scenario: Scenario) -> str:
    """A point is known by all that is simulated, so that a row of a changed scenario is not taken for one of the new."""
    return json.dumps({"point": point, "scenario": scenario.model_dump(mode="json", exclude_defaults=True)}, sort_keys=True)


def _simulate(scenario: Scenario) -> Row:
    try:
        result = simulate_scenario(scenario).as_dict()
    except HybridEPError as error:
        return {"error": " ".join(str(error).split())}
    columns: dict[str, Any] = {
        "step_s": result["step_s"],
        **{f"{name}_s": step_s for name, step_s in result["baselines"].items()},
        "busiest_link": result["busiest_link"]["name"],
        "busiest_load": result["busiest_link"]["load"],
        "largest_cut": result["largest_cut"],
        "plan_digest": result["plan_digest"],
        "wall_s": result["wall_s"],
    }
    if "run" in result:
        columns |= {"run_s": result["run"]["total_s"], "plans": len(result["run"]["plans"])}
    return {name: _text(value) for name, value in columns.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.9g}" if isinstance(value, float) else json.dumps(value)


def _read(table: Path) -> list[Row]:
    if not table.exists():
        return []
    try:
        rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table}: cannot be read ({error}); name another file with --out") from None
    if rows and _POINT not in rows[0]:
        raise UserError(f"{table}: is no table of a sweep (no column {_POINT!r}); name another file with --out")
    return rows


def _write(table: Path, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row if name != _POINT))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*columns, _POINT], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(table, text.getvalue())


def _progress(total: int) -> Progress:
    columns = [TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=20)]
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty() or total == 0)


def default_jobs() -> int:
    """One process per core that this one may use."""
    return len(os.sched_getaffinity(0))
