"""What one rank measures of a step, in the timeline format that simulated steps have too."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hybridep.timeline import Span, write_chrome_trace
from runtime.device import settle
from runtime.mesh import Mesh

COMPUTE = "compute"
PRE_EXPERT = "pre_expert"
EXPERT = "expert"
HEAD = "head"
OPTIMIZER = "optimizer"
BACKWARD = "_backward"


class SpanRecorder:
    """Collects spans while ``active``; costs next to nothing otherwise. Several threads may record."""

    def __init__(self, mesh: Mesh) -> None:
        self.active = False
        self.spans: list[Span] = []
        self._open: tuple[str, str, float] | None = None
        cluster = mesh.plan.cluster
        self._device = mesh.device
        self._rank, self._process = mesh.run_rank, cluster.site_name(mesh.location[0])
        self._rows = {level.name: f"between {level.name}s" for level in cluster.levels}
        # Ranks on several machines share no monotonic clock; the wall clock is what they agree on, as well as NTP does.
        self._epoch_s = time.time() - time.perf_counter()

    def begin(self, name: str, detail: str = "") -> None:
        """A piece of computation starts, and what was open ends: a rank computes one thing at a time."""
        self.end()
        self._open = (name, detail, self._now_s())

    def end(self) -> None:
        """The computation under way ends, if there is any."""
        if self._open is not None:
            name, detail, start_s = self._open
            self._open = None
            self.add(name, COMPUTE, start_s, self._now_s(), detail)

    def _now_s(self) -> float:
        if self.active:
            settle(self._device)
        return time.perf_counter()

    def transfer(self, label: str, start_s: float, end_s: float) -> None:
        """Book an exchange ``operation@level``, as the transport reports it."""
        op, _, level = label.partition("@")
        self.add(op, self._rows.get(level, "other"), start_s, end_s)

    def add(self, name: str, row: str, start_s: float, end_s: float, detail: str = "") -> None:
        """Book a span; times are of ``time.perf_counter``."""
        if self.active:
            span = Span(
                name=f"{name} ({detail})" if detail else name,
                category=name,
                process=self._process,
                thread=f"rank {self._rank} {row}",
                start_s=self._epoch_s + start_s,
                duration_s=end_s - start_s,
            )
            self.spans.append(span)

    def dump(self) -> bytes:
        """This rank's spans, for ``save_trace`` at another."""
        return json.dumps([asdict(span) for span in self.spans]).encode()


def save_trace(dumped: Sequence[bytes], path: Path) -> None:
    """One trace of what ranks ``dump``; time starts with the first span."""
    spans = [Span(**entry) for one in dumped for entry in json.loads(one)]
    first_s = min((span.start_s for span in spans), default=0.0)
    shifted = [Span(**{**asdict(span), "start_s": span.start_s - first_s}) for span in spans]
    write_chrome_trace(path, sorted(shifted, key=lambda span: (span.process, span.thread, span.start_s)))
