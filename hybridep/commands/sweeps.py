"""Sweeps: every point of a scenario's grid, in parallel processes, into one table that a later call goes on with."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybridep.commands.inputs import Kind, find
from hybridep.commands.scenarios import simulate_scenario
from hybridep.commands.tables import write_rows
from hybridep.errors import HybridEPError, UserError, WorkerLostError
from hybridep.units import format_seconds

if TYPE_CHECKING:
    from simulator.scenario import Point, Scenario

Row = dict[str, str]

_POINT = "point"
"""Column with the whole point as JSON: what makes a row that of a point."""


def sweep(grid: Sequence[tuple[Point, Scenario]], table: Path, jobs: int) -> list[Row]:
    """Simulate the points that `table` (CSV) does not have yet, and write it anew after each, behind its rows of other points.
    Returns the grid's rows in its order. A point that cannot be simulated has its error in the row, and is tried again by a later
    call; a row of the same point with files that have changed since is replaced.
    """
    rows, digests = _read(table), dict[Path, str]()
    keys = [_key(point, scenario, digests) for point, scenario in grid]
    ours = {_without_files(key) for key in keys}
    others = [row for row in rows if _without_files(row[_POINT]) not in ours]
    done = {row[_POINT]: row for row in rows if not row.get("error")}
    missing = [(key, *entry) for key, entry in zip(keys, grid, strict=True) if key not in done]
    if missing:
        with _progress(len(grid)) as progress:
            task = progress.add_task("points", total=len(grid), completed=len(grid) - len(missing))
            with closing(_results(missing, min(jobs, len(missing)))) as results:
                for key, point, row in results:
                    done[key] = {_POINT: key, **{name: _text(value) for name, value in point.items()}, **row}
                    _write(table, [*others, *(done[each] for each in keys if each in done)])
                    progress.advance(task)
    return [done[key] for key in keys]


def _results(missing: Sequence[tuple[str, Point, Scenario]], jobs: int) -> Generator[tuple[str, Point, Row]]:
    """(key, point, row) of each missing scenario, in the order in which they are ready. Closing it ends those under way."""
    if jobs == 1:
        for key, point, scenario in missing:
            yield key, point, _simulate(scenario)
        return
    # Started afresh: a fork would copy whatever threads hold at the moment.
    others = set(active_children())
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            running = {pool.submit(_simulate, scenario): (key, point) for key, point, scenario in missing}
            for finished in as_completed(running):
                yield *running[finished], finished.result()
        except BrokenProcessPool:
            why = "it was ended from outside, as for want of memory; give fewer --jobs: points that are done stay done"
            raise WorkerLostError("a process of the sweep", why) from None
        except BaseException:
            # The pool would wait until all are done, and nobody would have their results.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.terminate()
            raise


def as_data(row: Row) -> dict[str, Any]:
    """A row with its numbers as such, and values of its point as the grid has them. Cells that a table has empty are columns of
    other rows."""
    point = json.loads(row[_POINT])["point"]
    texts = ("busiest_link", "plan_digest", "error", _POINT)
    mine = {name: value for name, value in row.items() if value or name in point}
    return {name: point[name] if name in point else value if name in texts else _number(value) for name, value in mine.items()}


def shown(row: Row) -> list[str]:
    """A row for people: its point, and what came of it but for what tables keep for later."""
    point, kept = json.loads(row[_POINT])["point"], (_POINT, "largest_cut", "plan_digest", "memory_bytes", "wall_s")
    cells = [(name, value) for name, value in row.items() if value and name not in kept and (name, value) != ("fits", "true")]
    return [f"{name} {value}" if name in point else _cell(name, value) for name, value in cells]


def _cell(name: str, value: str) -> str:
    number = _number(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        return f"{name} {value}"
    return f"{name.removesuffix('_s')} {format_seconds(number)}" if name.endswith("_s") else f"{name} {number:.4g}"


def _number(text: str) -> Any:
    """A table may have been through a spreadsheet: what is no number any more stays as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _key(point: Point, scenario: Scenario, digests: dict[Path, str]) -> str:
    """A point is known by all that is simulated, what its files hold included, so that a row of a changed scenario is not taken
    for one of the new. ``digests``: of files that were read before."""
    files = {}
    for text, path in _files(scenario):
        if os.path.isfile(path):
            if path not in digests:
                try:
                    digests[path] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                except OSError:
                    # Its point says so.
                    continue
            files[text] = digests[path]
    plain = scenario.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"point": point, "scenario": plain, "files": files}, sort_keys=True)


def _without_files(key: str) -> str:
    try:
        data = json.loads(key)
    except ValueError:
        return key
    return json.dumps(data | {"files": None} if isinstance(data, dict) else data, sort_keys=True)


def _files(scenario: Scenario) -> Iterator[tuple[str, Path]]:
    """What a scenario names and may be a file, as it writes it and where it is."""
    for text in (scenario.plan, scenario.routing, scenario.conditions.trace):
        if text is not None:
            yield str(text), Path(text)
    named = {Kind.CLUSTER: scenario.cluster, Kind.WORKLOAD: scenario.workload, Kind.FABRIC: scenario.fabric}
    for kind, text in named.items():
        if text is not None:
            try:
                yield text, find(kind, text)
            except UserError:
                # Its point says so.
                continue


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
    if result["memory"] is not None:
        columns |= {"memory_bytes": result["memory"]["bytes"], "fits": result["memory"]["fits"]}
    if "run" in result:
        columns |= {"run_s": result["run"]["total_s"], "plans": len(result["run"]["plans"])}
    return {name: _text(value) for name, value in columns.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.9g}" if isinstance(value, float) else json.dumps(value)


def _read(table: Path) -> list[Row]:
    if not table.exists():
        return []
    try:
        reader = csv.DictReader(io.StringIO(table.read_text(encoding="utf-8-sig"), newline=""))
        rows, columns = list(reader), reader.fieldnames
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table}: cannot be read ({error}); name another file with --out") from None
    if columns and (_POINT not in columns or any(None in (*row, row[_POINT]) for row in rows)):
        raise UserError(f"{table}: is no table of a sweep (a column {_POINT!r} in every row); name another file with --out")
    return rows


def _write(table: Path, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row if name != _POINT))
    write_rows(table, rows, [*columns, _POINT])


def _progress(total: int) -> Progress:
    columns = [TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=20)]
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty() or total == 0)


def default_jobs() -> int:
    """One process per core that this one may use."""
    return len(os.sched_getaffinity(0))
