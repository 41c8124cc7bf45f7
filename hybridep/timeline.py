"""One timeline format for simulated and measured steps: the Chrome trace event format (open in ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hybridep.config import write_text


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time. ``process`` and ``thread`` are shown as groups and rows (a DC; a rank's stream)."""

    name: str
    category: str
    process: str
    thread: str
    start_s: float
    duration_s: float


def chrome_trace(spans: Iterable[Span]) -> dict[str, object]:
    """Complete ("X") events in microseconds, with names for processes and threads."""
    spans = list(spans)
    processes = {name: index for index, name in enumerate(dict.fromkeys(span.process for span in spans))}
    rows = {key: index for index, key in enumerate(dict.fromkeys((span.process, span.thread) for span in spans))}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": index, "args": {"name": name}} for name, index in processes.items()
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": processes[process], "tid": index, "args": {"name": thread}}
        for (process, thread), index in rows.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.category,
            "pid": processes[span.process],
            "tid": rows[span.process, span.thread],
            "ts": span.start_s * 1e6,
            "dur": span.duration_s * 1e6,
        }
        for span in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, spans: Iterable[Span]) -> None:
    """Write ``chrome_trace`` as JSON, atomically."""
    write_text(path, json.dumps(chrome_trace(spans)))
