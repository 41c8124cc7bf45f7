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

_PATIENCE_S, _HEAD_PATIENCE_S = 30.0, 300.0
"""For a lost site to be back before the others go on without it; and for Ray's head, without which none can."""
_SHUNNED_S = 1800.0
"""For a site that two losses in a row name, though it answers."""
_ASK_EVERY_S, _ASK_SELDOM_S = 10.0, 300.0
"""At first, and after many answers that nothing has changed: each takes a process on every node."""

OnStep = Callable[[StepRecord], None]


class _SitesBackError(Exception):
    """Sites that were lost can take part again."""


def train_on(job: Job, *, local: bool, restarts: int, on_step: OnStep) -> dict[str, Any]:
    """Train ``job`` to its end, through at most so many losses; returns the summary. After a loss the sites that are left train
    on the same global batch, by a plan for them. Raises what ``session.train`` raises, of a loss also where the others cannot go
    on."""
    whole, lost, made, steps = job, list[str](), Made(), 0
    plan: AnyPlan | None
    ray_address = None if local else os.environ.get("RAY_ADDRESS")
    sites = _Sites(ray_address, whole) if ray_address else None
    if sites is not None and restarts and job.resume:
        # As after a loss: what ended the run may have been one.
        job = replace(job, plan=_plan_for(whole, sites.wait()) or whole.plan)

    def counted_step(record: StepRecord) -> None:
        nonlocal steps
        steps += 1
        on_step(record)

    while True:
        step = _naming_unused(job.run.checkpoint_folder, counted_step) if job.resume else counted_step
        if sites is not None and job.plan is not whole.plan:
            step = _watching(sites, job, step)
        before = steps
        try:
            with backend_for(job, local=local) as backend:
                ranks, links = counted(job.plan.cluster.num_gpus, "rank"), "shaped" if backend.shaped else "unshaped"
                note(f"hybridep train: {ranks}, {backend.name}, {links}")
                return train(job, backend, step, lost=lost, made=made)
        except _SitesBackError:
            assert sites is not None
            note("hybridep train: lost sites are back")
            plan = _plan_for(whole, sites.at_hand()) or job.plan
        except (WorkerLostError, UserError) as error:
            if isinstance(error, UserError) and not (lost and sites is not None and sites.misses(job)):
                raise
            lost.append(str(error))
            if len(lost) > restarts:
                raise
            note(f"hybridep train: {error}; restart {len(lost)} of {restarts}, from the last checkpoint")
            plan = whole.plan
            if sites is not None:
                sites.blame(error.who if isinstance(error, WorkerLostError) else "", made_steps=steps > before)
                plan = _plan_for(whole, sites.wait())
                if plan is None and sites.forgive():
                    plan = _plan_for(whole, sites.wait())
            if plan is None:
                raise
        # Until a step is made, other sites may have the checkpoints of an earlier run where this one is to begin.
        resume = whole.resume or bool(made.losses)
        job = replace(whole, resume=resume, or_begin=resume and not whole.resume, plan=plan)


class _Sites:
    """Which of a job's sites can take part, as the Ray cluster at an address says, and as losses do."""

    def __init__(self, ray_address: str, whole: Job) -> None:
        self._ray_address, self._whole = ray_address, whole
        self._accused, self._shunned_until_s = set[str](), dict[str, float]()

    def at_hand(self) -> set[str]:
        """None of them where Ray cannot be reached."""
        cluster, use_gpus = self._whole.plan.cluster, self._whole.run.device is not Device.CPU
        try:
            return sites_at_hand(self._ray_address, cluster, use_gpus=use_gpus) - self._shunned
        except UserError:
            return set()

    def misses(self, job: Job) -> bool:
        """Whether one of the plan's sites does not answer: what ended a restarted run before its ranks had started is a loss,
        too."""
        # How many ranks a GPU takes is known of whole sites.
        return not self.at_hand().issuperset(job.plan.cluster.site_names)

    def wait(self) -> set[str]:
        """All of the job's sites, or after a while those at hand."""
        all_sites = set(self._whole.plan.cluster.site_names)
        until_s = (now_s := time.monotonic()) + _PATIENCE_S
        head_until_s = now_s + _HEAD_PATIENCE_S
        while True:
            found, now_s = self.at_hand(), time.monotonic()
            if found >= all_sites - self._shunned:
                return found
            if not found:
                # Not even this one's: the way to Ray's head is gone, and with it what others say.
                until_s = now_s + _PATIENCE_S
            if now_s > (until_s if found else head_until_s):
                return found
            time.sleep(1.0)

    def blame(self, who: str, *, made_steps: bool) -> None:
        """Of a loss. Where the one before names the same site, and no step was made in between, it is left out for a while:
        it answers Ray, and yet something does not pass."""
        cluster = self._whole.plan.cluster
        accused = {name for name in cluster.datacenters if name in who.split(" or ") or who.endswith(f" in {name}")}
        again = set() if made_steps else accused & self._accused
        self._accused = accused
        if again:
            # The first site has the run's output.
            shunned = max(again, key=cluster.datacenters.index)
            pods = [
                name for name, datacenter in zip(cluster.site_names, cluster.datacenters, strict=True) if datacenter == shunned
            ]
            self._shunned_until_s |= dict.fromkeys(pods, time.monotonic() + _SHUNNED_S)

    def forgive(self) -> bool:
        """No site is left out any more; whether one was."""
        had, self._shunned_until_s = bool(self._shunned), {}
        return had

    @property
    def _shunned(self) -> set[str]:
        return {name for name, until_s in self._shunned_until_s.items() if time.monotonic() < until_s}


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


def _watching(sites: _Sites, job: Job, on_step: OnStep) -> OnStep:
    """``on_step``; when a checkpoint has been made and lost sites are back, it raises _SitesBackError."""
    asking = _Asking(lambda: bool(sites.at_hand() - set(job.plan.cluster.site_names)))
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
        self._ask, self._answer, self._asked_s, self._every_s = ask, False, float("-inf"), _ASK_EVERY_S
        self._thread: threading.Thread | None = None

    def is_so(self) -> bool:
        """Whether the last answer was yes."""
        if (self._thread is None or not self._thread.is_alive()) and time.monotonic() - self._asked_s > self._every_s:
            self._asked_s, self._every_s = time.monotonic(), min(2 * self._every_s, _ASK_SELDOM_S)
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
