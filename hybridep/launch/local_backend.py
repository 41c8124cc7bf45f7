"""Ranks as processes of this machine; in a lab each in its datacenter's namespace."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from dataclasses import asdict

from hybridep.launch.lab import Lab
from hybridep.launch.reports import Rendezvous, ReportReader
from hybridep.launch.worker import Job
from hybridep.launch.worker_group import Event, Failed, FailureKind, Finished

LOOPBACK = "127.0.0.1"


class LocalGroup:
    """A worker group of subprocesses. They end when this process ends, even by SIGKILL."""

    def __init__(self, job: Job, lab: Lab | None) -> None:
        self._job, self._lab, self._dcs = job, lab, job.dcs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reader = ReportReader()
        self._settled: set[int] = set()
        """Ranks that have finished or failed in their own words."""

    def start(self) -> None:
        job_file = self._job.write()
        for rank, dc in enumerate(self._dcs):
            prefix, address = (self._lab.process_prefix(dc), self._lab.site(dc).address) if self._lab else ([], LOOPBACK)
            command = [*prefix, sys.executable, "-m", "hybridep.launch.worker"]
            arguments = [str(job_file), str(rank), dc, address]
            process = self._reader.start(rank, command, arguments, self._job.log(rank), stdin=subprocess.PIPE)
            self._processes.append(process)

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for rank, report in self._reader.read(timeout_s):
            if isinstance(report, Rendezvous):
                self._pass_on(report)
            elif report is not None:
                if isinstance(report, Finished | Failed):
                    self._settled.add(rank)
                events.append(report)
            elif rank not in self._settled:
                events.append(self._died(rank))
        return events

    def _pass_on(self, place: Rendezvous) -> None:
        for process in self._processes[1:]:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is reported by its own pipe
                process.stdin.write(json.dumps(asdict(place)).encode() + b"\n")
                process.stdin.flush()

    def _died(self, rank: int) -> Failed:
        process = self._processes[rank]
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return Failed(rank=rank, kind=FailureKind.DIED, why=f"process {process.pid} closed its reports but has not ended")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        why = f"process {process.pid} {how} (its output: {self._job.log(rank)})"
        return Failed(rank=rank, kind=FailureKind.DIED, why=why)

    def abort(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._processes = []
        self._reader.close()
