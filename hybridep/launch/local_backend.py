"""Ranks as processes of this machine; in a lab each in its datacenter's namespace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict

from hybridep.launch.host import adopt_orphans, child_environment
from hybridep.launch.lab import Lab
from hybridep.launch.local_ranks import Place
from hybridep.launch.reports import Rendezvous, ReportReader
from hybridep.launch.worker import Job
from hybridep.launch.worker_group import Event, Failed, FailureKind, Finished, Started

LOOPBACK = "127.0.0.1"
_END_S = 5.0


class LocalGroup:
    """A worker group of processes that one process forks (``local_ranks``). They end when this process ends, even by SIGKILL."""

    def __init__(self, job: Job, lab: Lab | None) -> None:
        self._job, self._lab, self._dcs = job, lab, job.dcs
        self._forking: subprocess.Popen[bytes] | None = None
        """It leads the process group of all ranks."""
        self._pids: dict[int, int] = {}
        """Of ranks that have begun."""
        self._tell: list[int] = []
        """[rank]: file descriptors of what each is told through."""
        self._reader = ReportReader()
        self._settled: set[int] = set()
        """Ranks that have finished or failed in their own words."""

    def start(self) -> None:
        job_file, theirs, places = self._job.write(), list[int](), list[Place]()
        try:
            for rank, dc in enumerate(self._dcs):
                self._job.log(rank).write_bytes(b"")
                namespace, address = (self._lab.site(dc).namespace, self._lab.site(dc).address) if self._lab else (None, LOOPBACK)
                told, tell = os.pipe()
                theirs.append(told)
                self._tell.append(tell)
                theirs.append(report := self._reader.pipe(rank))
                places.append(Place(rank=rank, dc=dc, address=address, namespace=namespace, report=report, told=told))
            adopt_orphans(True)
            command = [sys.executable, "-m", "hybridep.launch.local_ranks", str(os.getpid()), str(job_file)]
            with self._job.log(0).open("ab") as log:
                self._forking = subprocess.Popen(
                    [*command, json.dumps([asdict(place) for place in places])],
                    env=child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=theirs,
                    # A session of its own: Ctrl-C is for the launcher alone, which then stops what it started.
                    start_new_session=True,
                )
        finally:
            for file in theirs:
                os.close(file)

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for rank, report in self._reader.read(timeout_s):
            if isinstance(report, Rendezvous):
                self._pass_on(report)
            elif report is not None:
                if isinstance(report, Started):
                    self._pids[rank] = report.pid
                if isinstance(report, Finished | Failed):
                    self._settled.add(rank)
                events.append(report)
            elif rank not in self._settled:
                events.append(self._died(rank))
        return events

    def _pass_on(self, place: Rendezvous) -> None:
        for file in self._tell[1:]:
            with suppress(BrokenPipeError):  # its end is reported by its own pipe
                os.write(file, json.dumps(asdict(place)).encode() + b"\n")

    def _died(self, rank: int) -> Failed:
        pid, log = self._pids.get(rank), self._job.log(rank)
        if pid is None:
            # What forks the ranks writes into that of the first.
            log = log if log.stat().st_size else self._job.log(0)
            return Failed(rank=rank, kind=FailureKind.DIED, why=f"its process ended before it began (its output: {log})")
        code = self._exit_code(pid)
        if code is None:
            return Failed(rank=rank, kind=FailureKind.DIED, why=f"process {pid} closed its reports but has not ended")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Failed(rank=rank, kind=FailureKind.DIED, why=f"process {pid} {how} (its output: {log})")

    def _exit_code(self, pid: int) -> int | None:
        """Minus the signal that ended it; None if it goes on."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            # It is no child of this process before the one that has forked it has ended.
            with suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return None

    def abort(self) -> None:
        if self._forking is not None:
            group = self._forking.pid
            # Once nothing is left of it, its number may be another's.
            while self._forking.poll() is None or _has_children(group):
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
                time.sleep(0.005)
            self._forking = None
        adopt_orphans(False)
        while self._tell:
            os.close(self._tell.pop())
        self._reader.close()


def _has_children(group: int) -> bool:
    """Whether children of this process in a process group are left; takes note of one that has ended."""
    try:
        os.waitpid(-group, os.WNOHANG)
    except ChildProcessError:
        return False
    return True
