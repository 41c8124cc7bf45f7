"""Training that outlasts losses: it goes on from the last checkpoint with the sites at hand, and with more once they are back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridep.checkpoint_folders import checkpoint_name, checkpoints
from hybridep.commands.common import note
from hybridep.commands.inputs import MADE_FOR_RUNS, cluster_and_workload
from hybridep.commands.named_plans import named_plan
from hybridep.errors import InfeasibleError, NoSolutionError, UserError, WorkerLostError
from hybridep.launch.backends import backend_for
from hybridep.launch.controller import StepRecord
from hybridep.launch.ray_sites import sites_at_hand
from hybridep.launch.session import Made, train
from hybridep.launch.worker import Job
from hybridep.pipeline import AnyPlan
from hybridep.run import Device
from hybridep.shares import on_sites
from hybridep.units import counted

_PATIENCE_S = 30.0
"""For a lost site to be back before the others go on without it."""
_ASK_EVERY_S = 10.0

OnStep = Callable[[StepRecord], None]


class _SitesBackError(Exception):
    """Sites that were lost can take part again."""


def train_on(job: Job, *, local: bool, restarts: int, on_step: OnStep) -> dict[str, Any]:
    """Train ``job`` to its end, through at most so many losses; returns the summary. After a loss the sites that are left train
    on the same global batch, by a plan for them. Raises what ``session.train`` raises, of a loss also where the others cannot go
    on."""
    whole, lost, made = job, list[str](), Made()
    plan: AnyPlan | None
    ray_address = None if local else os.environ.get("RAY_ADDRESS")
    if ray_address and restarts and job.resume:
        # As after a loss: what ended the run may have been one.
        job = replace(job, plan=_plan_for(whole, _wait_for_sites(ray_address, whole)) or whole.plan)
    while True:
        step = _naming_unused(job.run.checkpoint_folder, on_step) if job.resume else on_step
        if ray_address and job.plan is not whole.plan:
            step = _watching(ray_address, job, whole, step)
        try:
            with backend_for(job, local=local) as backend:
                ranks, links = counted(job.plan.cluster.num_gpus, "rank"), "shaped" if backend.shaped else "unshaped"
                note(f"hybridep train: {ranks}, {backend.name}, {links}")
                return train(job, backend, step, lost=lost, made=made)
        except _SitesBackError:
            assert ray_address is not None
            note("hybridep train: lost sites are back")
            plan = _plan_for(whole, _at_hand(ray_address, whole)) or job.plan
        except (WorkerLostError, UserError) as error:
            if isinstance(error, UserError) and not (lost and ray_address and _is_gone(ray_address, whole, job)):
                raise
            lost.append(str(error))
            if len(lost) > restarts:
                raise
            note(f"hybridep train: {error}; restart {len(lost)} of {restarts}, from the last checkpoint")
            plan = _plan_for(whole, _wait_for_sites(ray_address, whole)) if ray_address else whole.plan
            if plan is None:
                raise
        # Until a step is made, other sites may have the checkpoints of an earlier run where this one is to begin.
        resume = whole.resume or bool(made.losses)
        job = replace(whole, resume=resume, or_begin=resume and not whole.resume, plan=plan)


def _at_hand(ray_address: str, job: Job) -> set[str]:
    return sites_at_hand(ray_address, job.plan.cluster, use_gpus=job.run.device is not Device.CPU)


def _is_gone(ray_address: str, whole: Job, job: Job) -> bool:
    """Whether one of the plan's sites does not answer: what ended a restarted run before its ranks had started is a loss, too."""
    # How many ranks a GPU takes is known of whole sites.
    return not _at_hand(ray_address, whole).issuperset(job.plan.cluster.site_names)


def _wait_for_sites(ray_address: str, job: Job) -> set[str]:
    """All of the job's sites, or after a while those at hand."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        found = _at_hand(ray_address, job)
        if found.issuperset(job.plan.cluster.site_names) or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def _plan_for(job: Job, sites: set[str]) -> AnyPlan | None:
    """The job's plan, or one like it for those of its sites; None where none is possible."""
    names = job.plan.cluster.site_names
    here = [name for name in names if name in sites]
    if len(here) == len(names):
        return job.plan
    if not here:
        note("hybridep train: no site is left")
        return None
    note(f"hybridep train: goes on without {', '.join(name for name in names if name not in sites)}")
    run = job.run
    name = run.plan if run.plan in MADE_FOR_RUNS else "auto"
    try:
        return named_plan(name, *on_sites(*cluster_and_workload(run.cluster, run.workload, run.overrides), here), before=job.plan)
    except (UserError, InfeasibleError, NoSolutionError) as error:
        note(f"hybridep train: the others cannot go on: {error}")
        return None


def _watching(ray_address: str, job: Job, whole: Job, on_step: OnStep) -> OnStep:
    """``on_step``; when a checkpoint has been made and lost sites are back, it raises _SitesBackError."""
    lost = set(whole.plan.cluster.site_names) - set(job.plan.cluster.site_names)
    asking = _Asking(lambda: bool(lost & _at_hand(ray_address, whole)))
    newest: int | None = None

    def watched(record: StepRecord) -> None:
        nonlocal newest
        on_step(record)
        before, newest = newest, record.checkpoint
        if asking.is_so() and newest != before:
            raise _SitesBackError

    return watched


class _Asking:
    """Asks something slow again and again, beside what else goes on."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask, self._answer, self._asked_s = ask, False, float("-inf")
        self._thread: threading.Thread | None = None

    def is_so(self) -> bool:
        """Whether the last answer was yes."""
        if (self._thread is None or not self._thread.is_alive()) and time.monotonic() - self._asked_s > _ASK_EVERY_S:
            self._asked_s = time.monotonic()
            # One that nobody waits for when the run ends.
            self._thread = threading.Thread(target=self._run, name="sites", daemon=True)
            self._thread.start()
        return self._answer

    def _run(self) -> None:
        self._answer = self._ask()


def _naming_unused(folder: Path, on_step: OnStep) -> OnStep:
    """``on_step``; before the first step checkpoints are named that are damaged, or of later steps on this machine."""
    here = sorted(path.name for path in checkpoints(folder))

    def named(record: StepRecord) -> None:
        for what, rank in record.remarks.items():
            note(f"hybridep train: {what} (rank {rank})")
        later = [name for name in here if name >= checkpoint_name(record.step)]
        if later:
            which = f"{', '.join(later)} {'is' if len(later) == 1 else 'are'} not whole, or older, and will be replaced"
            note(f"hybridep train: goes on from {checkpoint_name(record.step - 1)}; {which}")
        here.clear()
        on_step(record)

    return named
