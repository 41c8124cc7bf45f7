"""Ranks as Ray actors, seen from the launcher: a driver process does what needs Ray and reports for all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from hybridep.launch.ray_nodes import DETECTION
from hybridep.launch.reports import Rendezvous, ReportReader
from hybridep.launch.worker import Job
from hybridep.launch.worker_group import DcLost, Event, Failed

_STOP_S = 8.0
"""For the driver to end its actors; afterwards Ray does it, once it notices that the driver is gone."""


class RayGroup:
    """A worker group on the Ray cluster at ``address``; ``own_dc`` names the datacenter whose node the driver uses, ``prefix``
    are the words that start a process there."""

    def __init__(self, job: Job, address: str, own_dc: str, prefix: Sequence[str] = ()) -> None:
        self._job, self._address, self._own_dc, self._prefix = job, address, own_dc, tuple(prefix)
        self._reader = ReportReader()
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = False

    def start(self) -> None:
        command = [*self._prefix, sys.executable, "-m", "hybridep.launch.ray_backend", "drive"]
        arguments = [str(self._job.write()), self._address]
        if not self._job.resume:
            self._job.driver_log.unlink(missing_ok=True)
        self._process = self._reader.start(0, command, arguments, self._job.driver_log, environment=DETECTION)

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for _, report in self._reader.read(timeout_s):
            if report is None:
                if not self._failed:
                    why = f"Ray's driver there lost its node (its output: {self._job.driver_log})"
                    events.append(DcLost(dc=self._own_dc, why=why))
            elif not isinstance(report, Rendezvous):
                self._failed |= isinstance(report, Failed | DcLost)
                events.append(report)
        return events

    def abort(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._reader.close()
