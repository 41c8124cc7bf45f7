"""Ranks as processes of this machine; in a lab each in its datacenter's namespace."""

from __future__ import annotations

from hybridep.launch.lab import Lab
from hybridep.launch.local_ranks import Place
from hybridep.launch.rank_processes import RankProcesses
from hybridep.launch.reports import Rendezvous
from hybridep.launch.worker import Job
from hybridep.launch.worker_group import Event

LOOPBACK = "127.0.0.1"


class LocalGroup:
    """A worker group of this process's own ranks."""

    def __init__(self, job: Job, lab: Lab | None) -> None:
        self._ranks = RankProcesses(job, {rank: _place(dc, lab) for rank, dc in enumerate(job.dcs)})

    def start(self) -> None:
        self._ranks.start()

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for report in self._ranks.poll(timeout_s):
            if isinstance(report, Rendezvous):
                self._ranks.meet(report)
            else:
                events.append(report)
        return events

    def abort(self) -> None:
        self._ranks.stop()


def _place(dc: str, lab: Lab | None) -> Place:
    if lab is None:
        return Place(dc=dc, address=LOOPBACK)
    return Place(dc=dc, address=lab.site(dc).address, namespace=lab.site(dc).namespace)
