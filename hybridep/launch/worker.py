"""One rank: joins the others, trains (or measures), and reports. Runs in a process of its own or inside a Ray actor."""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridep.config import build, require_writable, write_text
from hybridep.errors import HybridEPError, TransportError, WorkerLostError
from hybridep.launch.host import allow_open_files, interface_of
from hybridep.launch.reports import Rendezvous, Report
from hybridep.launch.worker_group import Failed, FailureKind, Finished, Started, Stepped
from hybridep.pipeline import AnyPlan, build_plan
from hybridep.run import Run, StepReport

RENDEZVOUS_TIMEOUT_S = 180.0
"""All ranks must have imported torch by then, several of them on one core in an emulation."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of a run share."""

    run: Run
    plan: AnyPlan
    resume: bool = False
    or_begin: bool = False
    """To resume without a checkpoint is to begin."""
    probe_s: float | None = None
    """Instead of training, measure links and computation, each for about this long."""
    thorough: bool = False
    """Measure pairs of sites, and contention, too."""
    trials: tuple[AnyPlan, ...] = ()
    """Instead of training ``plan``, train each of these for the run's steps and report times only."""
    recorded_steps: int = 0
    """Trials keep every choice of so many steps, the first ones."""

    @property
    def dcs(self) -> tuple[str, ...]:
        """Name of the datacenter of each rank."""
        return self.plan.cluster.rank_datacenters

    def to_json(self) -> str:
        """One line of JSON."""
        plan = self.plan.model_dump(mode="json", exclude={"provenance"}, exclude_none=True)
        trials = [one.model_dump(mode="json", exclude={"provenance"}, exclude_none=True) for one in self.trials]
        more = {name: getattr(self, name) for name in ("resume", "or_begin", "probe_s", "thorough", "recorded_steps")}
        return json.dumps({"run": self.run.model_dump(mode="json"), "plan": plan, "trials": trials, **more})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Inverse of :meth:`to_json`."""
        fields = json.loads(text)
        run, plan = build(Run, fields.pop("run"), "run"), build_plan(fields.pop("plan"), "plan")
        trials = tuple(build_plan(trial, f"trial {number}") for number, trial in enumerate(fields.pop("trials")))
        return cls(run=run, plan=plan, trials=trials, **fields)

    def write(self) -> Path:
        """Into the output folder, beside a folder for logs; returns the file. Raises UserError."""
        path = self.run.output / "job.json"
        write_text(path, self.to_json())
        require_writable("output", self.driver_log.parent)
        return path

    def log(self, rank: int) -> Path:
        """File with what a rank printed, and its traceback."""
        return self.run.output / "logs" / f"rank-{rank}.log"

    @property
    def driver_log(self) -> Path:
        """File with what Ray's driver printed."""
        return self.log(0).with_name("ray-driver.log")


def run_rank(
    job: Job, rank: int, *, dc: str, address: str, report: Callable[[Report], None], meet: Callable[[], Rendezvous]
) -> None:
    """Train as one rank and report everything, also the failure. ``dc`` is where this process found itself, ``meet``
    waits for the place where rank 0 listens."""
    try:
        from runtime.mesh import host_store, join_store
        from runtime.trainer import train

        allow_open_files()
        # Gloo would take the interface of the host's name, which often is loopback, and NCCL any.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(address)}")
        report(Started(rank=rank, dc=dc, address=address, pid=os.getpid()))
        if rank == 0:
            store = host_store(address, timeout_s=RENDEZVOUS_TIMEOUT_S)
            report(Rendezvous(address=address, port=store.port))
        else:
            place = meet()
            store = join_store(place.address, place.port, timeout_s=RENDEZVOUS_TIMEOUT_S)
        result = None
        if job.trials:
            from runtime.trials import Trial, run_trials

            done = list(run_trials(job.run, job.trials, rank=rank, store=store, probe_s=job.probe_s, recorded=job.recorded_steps))
            trials = [asdict(one) for one in done if isinstance(one, Trial)]
            probes = [asdict(one) for one in done if not isinstance(one, Trial)]
            result = {"trials": trials, "probes": probes}
        elif job.probe_s is not None:
            from runtime.probe import probe

            found = probe(
                job.plan.cluster,
                job.plan.workload,
                rank=rank,
                store=store,
                seconds=job.probe_s,
                thorough=job.thorough,
                device=job.run.device,
            )
            result = asdict(found)
        else:

            def on_step(step: StepReport) -> None:
                report(Stepped(report=step))

            train(job.run, job.plan, rank=rank, store=store, on_step=on_step, resume=job.resume, or_begin=job.or_begin)
        report(Finished(rank=rank, result=result))
    except Exception as error:
        _keep_traceback(job, rank)
        report(failure_of(rank, error, job.log(rank)))


def failure_of(rank: int, error: Exception, log: Path) -> Failed:
    """What the launcher needs to know of an exception that ended a rank."""
    line = " ".join(str(error).split())
    if isinstance(error, TransportError):
        accused = re.fullmatch(r"rank (\d+)", error.who)
        return Failed(rank=rank, kind=FailureKind.PEER, why=error.why, peer=int(accused[1]) if accused else None)
    if isinstance(error, WorkerLostError):
        return Failed(rank=rank, kind=FailureKind.ERROR, why=line)
    if isinstance(error, HybridEPError):
        return Failed(rank=rank, kind=FailureKind.ERROR, why=line, exit_code=error.exit_code)
    why = f"{type(error).__name__}: {line} (traceback in {log})"
    return Failed(rank=rank, kind=FailureKind.ERROR, why=why, exit_code=HybridEPError.exit_code)


def _keep_traceback(job: Job, rank: int) -> None:
    try:
        job.log(rank).parent.mkdir(parents=True, exist_ok=True)
        with job.log(rank).open("a", encoding="utf-8") as stream:
            traceback.print_exc(file=stream)
    except OSError:
        with suppress(OSError):  # what a rank prints may end on the same full disk, and its report must go out
            traceback.print_exc()
