"""Tables of rows as CSV files, which a later call goes on with, and where what is in them comes from."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridep.config import write_text
from hybridep.provenance import provenance


def read_rows(table: Path) -> list[dict[str, str]]:
    """Nothing where there is no such file."""
    return list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"), newline=""))) if table.exists() else []


def write_rows(table: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Atomically, these columns, or all that rows have; empty where a row has none of a column."""
    text = io.StringIO(newline="")
    names = dict.fromkeys(name for row in rows for name in row) if columns is None else columns
    writer = csv.DictWriter(text, list(names), restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(table, text.getvalue())


def write_provenance(folder: Path) -> None:
    """``provenance.json`` of results in ``folder``."""
    write_text(folder / "provenance.json", json.dumps(provenance(), indent=1))
