"""The driver process of a run over Ray, and the process that holds a node.

    python -m hybridep.launch.ray_backend drive PARENT_PID REPORT_FILE_DESCRIPTOR JOB_FILE ADDRESS
    python -m hybridep.launch.ray_backend node PARENT_PID OPTIONS_OF_RAY_START...

The driver is a process of its own because Ray prints to its stdout and ends it when the head node is lost.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridep.errors import HybridEPError, UserError
from hybridep.launch.host import die_with_parent
from hybridep.launch.local_ranks import Place
from hybridep.launch.rank_processes import RankProcesses
from hybridep.launch.ray_cluster import LABEL, connect, first_line
from hybridep.launch.ray_placing import Machine, Share, shares_of
from hybridep.launch.reports import Rendezvous, Report, ReportWriter
from hybridep.launch.worker import Job, failure_of
from hybridep.launch.worker_group import DcLost, Failed, FailureKind, Finished
from hybridep.run import Device

_PLACE_TIMEOUT_S = 60.0
_LONG_POLL_S = 5.0
_NODE_CHECK_S = 1.0
_UNREACHABLE_S = 8.0
"""An actor out of reach is dead, or its node is: Ray knows which after some missed health checks."""


class MachineActor:
    """Some ranks of a job, as processes of the node that this Ray actor is on."""

    def start(self, job_text: str, ranks: Sequence[int]) -> list[Report]:
        """Begin to bring them up. A failure is a report, not an exception."""
        dc = str(ray.get_runtime_context().get_node_labels().get(LABEL, ""))
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        job = Job.from_json(job_text)
        self._ranks = RankProcesses(job, dict.fromkeys(ranks, Place(dc=dc, address=address)))
        try:
            self._ranks.start()
        except HybridEPError as error:
            return [failure_of(ranks[0], error, job.log(ranks[0]))]
        return []

    def meet(self, place: Rendezvous) -> None:
        """Tell them where rank 0 listens."""
        self._ranks.meet(place)

    def poll(self) -> list[Report]:
        """What has happened since the last call; waits a few seconds for something."""
        return self._ranks.poll(_LONG_POLL_S)


class Driver:
    """Places the actors of one job, and passes on what they report and what happens to their nodes."""

    def __init__(self, job: Job, report: Callable[[Report], None]) -> None:
        self._job, self._report, self._dcs = job, report, job.dcs
        self._shares: list[Share] = []
        self._actors: list[Any] = []
        """One for each share."""
        self._node_of: dict[int, str] = {}
        """Share -> Ray's id of the node where it is."""
        self._refs: dict[Any, int] = {}
        """Pending call -> the share whose actor it is for."""
        self._up: set[int] = set()
        """Shares whose actors have started their ranks."""
        self._place: Rendezvous | None = None
        """Where rank 0 listens."""
        self._left = set(range(len(self._dcs)))
        """Ranks."""
        self._lost: set[str] = set()
        self._unreachable: dict[int, tuple[float, str]] = {}
        """Share -> (since when, why)."""

    def drive(self) -> None:
        """Run until all ranks have finished or failed."""
        group, text = self._reserve(), self._job.to_json()
        actor: Any = ray.remote(MachineActor)
        for number, share in enumerate(self._shares):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            # Its CPUs are the ranks' own. Were they the actor's, Ray would tell each rank to use as many threads.
            handle = actor.options(num_cpus=0, num_gpus=share.gpus, max_concurrency=4, scheduling_strategy=place).remote()
            self._actors.append(handle)
            self._refs[handle.start.remote(text, share.ranks)] = number
        checked_s = time.monotonic()
        while self._left:
            for ref in ray.wait(list(self._refs), timeout=0.2)[0]:
                self._take(ref, self._refs.pop(ref))
            if time.monotonic() - checked_s > _NODE_CHECK_S:
                checked_s = time.monotonic()
                self._check_nodes()
                for number, (since_s, why) in self._unreachable.items():
                    if checked_s - since_s > _UNREACHABLE_S:
                        self._fail(number, FailureKind.DIED, why)

    def _reserve(self) -> PlacementGroup:
        """What each share needs on a node of its datacenter. Raises UserError when the cluster has no such place."""
        deadline = time.monotonic() + _PLACE_TIMEOUT_S
        while missing := self._share_out():
            if time.monotonic() > deadline:
                raise UserError(missing)
            time.sleep(0.5)
        # Each share was made for a machine of its own.
        group: PlacementGroup = placement_group(
            [share.resources for share in self._shares],
            strategy="SPREAD",
            bundle_label_selector=[{LABEL: share.dc} for share in self._shares],
        )
        try:
            ray.get(group.ready(), timeout=_PLACE_TIMEOUT_S)
        except GetTimeoutError:
            needs = ", ".join(dict.fromkeys(f"{_in_words(share.resources)} in {share.dc}" for share in self._shares))
            raise UserError(f"Ray has no room for every rank after {_PLACE_TIMEOUT_S:g} s (on one node each: {needs})") from None
        self._node_of = placement_group_table(group)["bundles_to_node_id"]
        return group

    def _share_out(self) -> str:
        """Which ranks go to one machine; or what is missing for that, in words."""
        cluster, nodes, self._shares = self._job.plan.cluster, self._nodes(), []
        use_gpus, ranks_of = self._job.run.device is not Device.CPU, dict[str, list[int]]()
        for rank, dc in enumerate(self._dcs):
            ranks_of.setdefault(dc, []).append(rank)
        for dc, ranks in ranks_of.items():
            machines = nodes.get(dc, [])
            if not machines:
                found = ", ".join(sorted(name for name, alive in nodes.items() if alive)) or "none"
                return (
                    f"no Ray node is labelled {LABEL}={dc} (labels found: {found}); start one there with "
                    f"`ray start --address=... --labels={LABEL}={dc}`"
                )
            shares = shares_of(dc, ranks, min(cluster.ranks_per_site, cluster.sizes[-1]), machines, use_gpus=use_gpus)
            if shares is None:
                has = ", ".join(_in_words({"CPU": one.cpus, "GPU": one.gpus}) for one in machines)
                those = "nodes with GPUs" if use_gpus and any(one.gpus for one in machines) else "nodes"
                return f"{dc}: its Ray {those} have too few CPUs for {len(ranks)} ranks, one for each (nodes there: {has})"
            self._shares += shares
        return ""

    def _nodes(self) -> dict[str, list[Machine]]:
        """Datacenter -> its nodes that are alive."""
        alive: dict[str, list[Machine]] = {}
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            dc, has = node["Labels"].get(LABEL), node["Resources"]
            if dc is not None:
                alive.setdefault(dc, [])
                if node["Alive"]:
                    alive[dc].append(Machine(cpus=int(has.get("CPU", 0)), gpus=int(has.get("GPU", 0))))
        return alive

    def _check_nodes(self) -> None:
        for dc, alive in self._nodes().items():
            if not alive and dc in self._dcs and dc not in self._lost:
                self._lost.add(dc)
                self._report(DcLost(dc=dc, why="its Ray node is gone or does not answer"))

    def _take(self, ref: Any, number: int) -> None:
        """Take the result of a call to a share's actor, and call it again."""
        try:
            result = ray.get(ref)
        except ActorUnavailableError as error:
            why = f"its Ray actor is out of reach: {first_line(error)}"
            self._unreachable.setdefault(number, (time.monotonic(), why))
            return
        except RayActorError as error:
            self._fail(number, FailureKind.DIED, self._node_lost(number) or f"its Ray actor is gone: {_death(error)}")
            return
        except RayError as error:
            self._fail(number, FailureKind.ERROR, f"its Ray actor failed: {first_line(error)}")
            return
        if number not in self._up:
            # An actor's calls may run side by side: before its ranks are there none of them would be told.
            self._up.add(number)
            if self._place is not None:
                self._actors[number].meet.remote(self._place)
        for report in result:
            if isinstance(report, Rendezvous):
                self._place = report
                for there in self._up:
                    self._actors[there].meet.remote(report)
                continue
            if isinstance(report, Finished | Failed):
                self._left.discard(report.rank)
            self._report(report)
        if not self._left.isdisjoint(self._shares[number].ranks):
            self._refs[self._actors[number].poll.remote()] = number

    def _node_lost(self, number: int) -> str:
        """Why the node of a share is no more; empty if it is, also a moment later: Ray may know of an actor's end first."""
        deadline = time.monotonic() + _NODE_CHECK_S
        while True:
            for node in ray.nodes():  # type: ignore[no-untyped-call]
                if node["NodeID"] == self._node_of[number] and not node["Alive"]:
                    return f"its Ray node at {node['NodeManagerAddress']} is gone or does not answer"
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.1)

    def _fail(self, number: int, kind: FailureKind, why: str) -> None:
        for rank in self._shares[number].ranks:
            if rank in self._left:
                self._left.discard(rank)
                self._report(Failed(rank=rank, kind=kind, why=why))

    def stop(self) -> None:
        """End all actors at once."""
        for handle in self._actors:
            ray.kill(handle)


def _in_words(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{number:g} {name}{'s' * (number != 1)}" for name, number in resources.items() if number)


def _death(error: RayActorError) -> str:
    """What Ray knows of an actor's end, without its list of common causes."""
    told = [line.strip() for line in str(error).splitlines() if "is dead because" in line]
    return (
        told[0].partition(" There are some potential root causes")[0].partition(" Some common causes")[0]
        if told
        else first_line(error)
    )


def drive(report_file: str, job_file: str, address: str) -> None:
    """The driver process: a run from start to end."""
    report = ReportWriter(int(report_file))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    job = Job.from_json(Path(job_file).read_text(encoding="utf-8"))
    driver = Driver(job, report)
    try:
        connect(address)
        driver.drive()
        # The launcher ends this process when it has decided what the reports mean.
        while True:
            time.sleep(1.0)
    except HybridEPError as error:
        report(failure_of(0, error, job.driver_log))
    finally:
        driver.stop()
        ray.shutdown()


def main() -> None:
    """Entry point of both processes."""
    what, parent, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    if what == "drive":
        drive(*arguments)
    else:
        from ray.scripts.scripts import main as ray_main

        sys.argv = ["ray", "start", *arguments]
        sys.exit(ray_main())  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
