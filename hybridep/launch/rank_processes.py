"""Ranks as processes of this machine, seen from the process that has them started and that they end with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict

from hybridep.config import write_text
from hybridep.launch.host import adopt_orphans, child_environment
from hybridep.launch.local_ranks import Files, Place
from hybridep.launch.reports import Rendezvous, Report, ReportReader
from hybridep.launch.worker import Job
from hybridep.launch.worker_group import Failed, FailureKind, Finished, Started

_END_S = 5.0


class RankProcesses:
    """Some of a job's ranks, forked by one process (``local_ranks``). They end when this process ends, even by SIGKILL."""

    def __init__(self, job: Job, places: Mapping[int, Place]) -> None:
        """``places``: where each runs, by rank."""
        self._job, self._places = job, dict(places)
        self._forking: subprocess.Popen[bytes] | None = None
        """It leads the process group of all ranks."""
        self._pids: dict[int, int] = {}
        """Of ranks that have begun."""
        self._tell: dict[int, int] = {}
        """Rank -> the file descriptor of what it is told through."""
        self._printed_bytes: dict[int, int] = {}
        """Of each rank's log, before it began."""
        self._reader = ReportReader()
        self._settled: set[int] = set()
        """Ranks that have finished or failed in their own words."""

    def start(self) -> None:
        """Begin to bring them up; returns at once. Raises UserError when the output folder cannot be written."""
        job_file, files = self._job.write(), dict[int, Files]()
        try:
            for rank in self._places:
                printed = self._job.log(rank)
                if not self._job.resume or not printed.exists():
                    # What a run that goes on has printed before may tell what it was lost by.
                    write_text(printed, "")
                self._printed_bytes[rank] = printed.stat().st_size
                report = self._reader.pipe(rank)
                told, self._tell[rank] = os.pipe()
                files[rank] = Files(report=report, told=told)
            theirs = [one for pair in files.values() for one in (pair.report, pair.told)]
            ranks = [[rank, asdict(place), asdict(files[rank])] for rank, place in self._places.items()]
            adopt_orphans(True)
            with self._job.log(self._first).open("ab") as log:
                self._forking = subprocess.Popen(
                    [sys.executable, "-m", "hybridep.launch.local_ranks", str(os.getpid()), str(job_file), json.dumps(ranks)],
                    env=child_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=theirs,
                    # A session of its own: Ctrl-C is for the launcher alone, which then stops what it started.
                    start_new_session=True,
                )
        finally:
            for pair in files.values():
                os.close(pair.report)
                os.close(pair.told)

    @property
    def _first(self) -> int:
        """The rank in whose log is also what the forking process prints."""
        return min(self._places)

    def poll(self, timeout_s: float) -> list[Report]:
        """What has been reported since the last call, in order; waits up to ``timeout_s`` for the first."""
        reports: list[Report] = []
        for rank, report in self._reader.read(timeout_s):
            if report is not None:
                if isinstance(report, Started):
                    self._pids[rank] = report.pid
                if isinstance(report, Finished | Failed):
                    self._settled.add(rank)
                reports.append(report)
            elif rank not in self._settled:
                reports.append(self._died(rank))
        return reports

    def meet(self, place: Rendezvous) -> None:
        """Tell every rank but 0, whose own it is, where that listens."""
        for rank, file in self._tell.items():
            if rank:
                with suppress(BrokenPipeError):  # its end is reported by its own pipe
                    os.write(file, json.dumps(asdict(place)).encode() + b"\n")

    def _died(self, rank: int) -> Failed:
        pid, log = self._pids.get(rank), self._job.log(rank)
        if pid is None:
            log = log if log.stat().st_size > self._printed_bytes[rank] else self._job.log(self._first)
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

    def stop(self) -> None:
        """End every rank that is left, at once. Harmless when called again."""
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
            os.close(self._tell.popitem()[1])
        self._reader.close()


def _has_children(group: int) -> bool:
    """Whether children of this process in a process group are left; takes note of one that has ended."""
    try:
        os.waitpid(-group, os.WNOHANG)
    except ChildProcessError:
        return False
    return True
