"""The ranks of one machine, forked from one process that has imported torch and the runtime once, which takes seconds of a core.

python -m hybridep.launch.local_ranks LAUNCHER_PID JOB_FILE RANKS

It ends once all are forked: the launcher (``rank_processes``), which adopts orphans meanwhile, is then their parent.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridep.launch.host import die_with_parent
from hybridep.launch.lab import DC_VARIABLE
from hybridep.launch.lab_links import enter_namespace
from hybridep.launch.reports import Rendezvous, ReportWriter
from hybridep.launch.worker import Job, run_rank
from hybridep.run import LOCAL_RANK


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs: the datacenter and address it is at, and the network namespace to enter."""

    dc: str
    address: str
    namespace: str | None = None


@dataclass(frozen=True, kw_only=True)
class Files:
    """The file descriptors by which a rank reports, and is told."""

    report: int
    told: int


def fork_rank(rank: int, number: int, place: Place, files: Files, others: list[Files], job: Job, launcher_pid: int) -> None:
    """Returns in the parent; the child becomes the rank, and ends with its work or with the launcher. ``number``: of the rank
    among those here."""
    parent_pid = os.getpid()
    if os.fork():
        return
    for other in others:
        os.close(other.report)
        os.close(other.told)
    log = os.open(job.log(rank), os.O_WRONLY | os.O_APPEND)
    for file, standard in ((files.told, 0), (log, 1), (log, 2)):
        os.dup2(file, standard)
    while os.getppid() == parent_pid:
        time.sleep(0.001)
    die_with_parent(launcher_pid)
    if place.namespace is not None:
        enter_namespace(place.namespace)
        os.environ[DC_VARIABLE] = place.dc
    os.environ[LOCAL_RANK] = str(number)

    def meet() -> Rendezvous:
        return Rendezvous(**json.loads(sys.stdin.readline()))

    run_rank(job, rank, dc=place.dc, address=place.address, report=ReportWriter(files.report), meet=meet)
    sys.stdout.flush()
    # A failed exchange leaves threads of gloo behind that nothing can join.
    os._exit(0)


def main() -> None:
    """Entry point."""
    launcher_pid, job_file = int(sys.argv[1]), Path(sys.argv[2])
    die_with_parent(launcher_pid)
    job = Job.from_json(job_file.read_text(encoding="utf-8"))
    ranks = [(rank, Place(**place), Files(**files)) for rank, place, files in json.loads(sys.argv[3])]
    # What is wrong with them each rank finds by itself, and reports.
    with suppress(Exception):
        import runtime.probe
        import runtime.trainer
        import runtime.trials  # noqa: F401
    # Collections would write to, and so copy, what ranks share.
    gc.collect()
    gc.freeze()
    for number, (rank, place, files) in enumerate(ranks):
        fork_rank(rank, number, place, files, [one[2] for one in ranks[number + 1 :]], job, launcher_pid)
        os.close(files.report)
        os.close(files.told)
    os._exit(0)


if __name__ == "__main__":
    main()
