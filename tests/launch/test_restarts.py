"""Runs that go on after losses, with ranks that only play events and sites that are at hand as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_cases import make_job

from hybridep.commands import restarts
from hybridep.commands.restarts import train_on
from hybridep.config import build
from hybridep.errors import InfeasibleError, UserError, WorkerLostError
from hybridep.launch.controller import add_up
from hybridep.launch.session import Backend, Made
from hybridep.launch.worker import Job
from hybridep.launch.worker_group import DcLost, Event, Failed, FailureKind, Finished, Stepped
from hybridep.pipeline import PipelinePlan
from hybridep.run import StepReport
from hybridep.shares import batch_sequences
from hybridep.topology import Cluster

DCS = ["dc0", "dc1", "dc2", "dc3"]


class Played:
    """All ranks of a job report steps, from one on, and then do ``end``; without it they finish. Checkpoints are complete so many
    steps ``late``."""

    def __init__(self, job: Job, steps: range, end: Event | None = None, late: int = 0) -> None:
        ranks = range(job.plan.cluster.num_gpus)
        self._events: list[list[Event]] = []
        for step in steps:
            complete = (step - 1 - late) // every * every if (every := job.run.checkpoints.every_steps) else 0
            checkpoint = complete if complete >= steps[0] else None
            self._events.append([Stepped(report=report(rank, step, checkpoint)) for rank in ranks])
        self._events.append([end] if end is not None else [Finished(rank=rank) for rank in ranks])

    def start(self) -> None: ...

    def abort(self) -> None: ...

    def poll(self, timeout_s: float) -> list[Event]:
        return self._events.pop(0) if self._events else []


def report(rank: int, step: int, checkpoint: int | None) -> StepReport:
    return StepReport(rank=rank, step=step, loss_sum=1.0, balance_loss=0.0, tokens=1, step_s=1.0, checkpoint=checkpoint)


Attempt = Callable[[Job], Played]


class Stage:
    """On which attempts are played, and what is asked for meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, attempts: list[Attempt], at_hand: list[list[str]]) -> None:
        self.jobs: list[Job] = []
        self._attempts, self._at_hand = attempts, at_hand
        monkeypatch.setattr(restarts, "backend_for", self._backend)
        monkeypatch.setattr(restarts, "sites_at_hand", self._sites)
        monkeypatch.setattr(restarts, "_PATIENCE_S", 0.0)
        monkeypatch.setattr(restarts, "_HEAD_PATIENCE_S", 0.0)
        monkeypatch.setenv("RAY_ADDRESS", "somewhere")

    @contextmanager
    def _backend(self, job: Job, *, local: bool) -> Iterator[Backend]:
        self.jobs.append(job)
        yield Backend(name="played", group=self._attempts.pop(0)(job), shaped=False)

    def _sites(self, address: str, cluster: Cluster, *, use_gpus: bool) -> set[str]:
        assert (address, cluster.ranks_per_site, use_gpus) == ("somewhere", 2, True)
        return set(self._at_hand.pop(0) if len(self._at_hand) > 1 else self._at_hand[0])


def lose(dc: str, steps: range) -> Attempt:
    return lambda job: Played(job, steps, DcLost(dc=dc, why="it is gone"))


def finish(steps: range, late: int = 0) -> Attempt:
    return lambda job: Played(job, steps, late=late)


def job_of(folder: Path, **changes: Any) -> Job:
    """Of four sites of two ranks, with a checkpoint after every second of ten steps."""
    job = make_job(folder, resume=False)
    values = {"name": "r", "cluster": "lab-4dc", "workload": "tiny", "output": str(folder), "steps": 10, "plan": "ep"}
    return replace(job, run=build(type(job.run), values | {"checkpoints": {"every_steps": 2}} | changes, "run"))


def test_the_others_go_on_with_the_same_batch_and_all_once_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restarts._Asking, "is_so", lambda self: self._ask())
    # Back as soon as the others have gone on.
    attempts = [lose("dc0", range(1, 4)), finish(range(3, 11)), finish(range(5, 11))]
    stage = Stage(monkeypatch, attempts, [DCS[1:], DCS])
    job, shown = job_of(tmp_path), list[int]()
    summary = train_on(job, local=False, restarts=1, on_step=lambda record: shown.append(record.step))
    first, second, third = stage.jobs
    assert first is job and third.plan is job.plan
    assert second.plan.cluster.site_names == ("dc1", "dc2", "dc3")
    assert [(one.resume, one.or_begin) for one in stage.jobs] == [(False, False), (True, True), (True, True)]
    sequences = [
        batch_sequences(one.plan.cluster, one.plan.workload) * one.plan.workload.training.micro_batches for one in stage.jobs
    ]
    assert sequences[0] == sequences[1]
    # The checkpoint of step 2 was not made by this attempt; that of step 4 is done when step 5 is reported.
    assert shown == [1, 2, 3, 3, 4, 5, *range(5, 11)]
    lines = (tmp_path / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))
    assert summary["lost"] == ["dc0 lost: it is gone"] and summary["status"] == "finished"
    # Of the whole course, each step as it was made last.
    assert (summary["first_step"], summary["steps"], len(summary["losses"])) == (1, 10, 10)
    said = capsys.readouterr().err
    assert "dc0 lost: it is gone; restart 1 of 1" in said and "goes on without dc0\n" in said and "lost sites are back" in said


def test_a_checkpoint_that_is_still_written_is_nothing_to_take_sites_back_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one from which others have gone on for steps."""
    monkeypatch.setattr(restarts._Asking, "is_so", lambda self: self._ask())
    # Back when step 8 is asked for.
    attempts, asked = [lose("dc0", range(1, 4)), finish(range(3, 11), late=1), finish(range(7, 11))], [DCS[1:]] * 6
    stage, shown = Stage(monkeypatch, attempts, [*asked, DCS]), list[int]()
    train_on(job_of(tmp_path), local=False, restarts=1, on_step=lambda record: shown.append(record.step))
    # That of step 4 was complete when step 6 was reported, that of step 6 with step 8.
    assert shown == [1, 2, 3, *range(3, 9), *range(7, 11)]
    assert stage.jobs[2].plan is stage.jobs[0].plan


@pytest.mark.parametrize("local", [False, True])
def test_all_sites_go_on_by_their_plan_where_all_are_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """As they are wherever they are on this machine."""
    stage = Stage(monkeypatch, [lose("dc2", range(1, 4)), finish(range(3, 11))], [DCS[:2] if local else DCS])
    job = job_of(tmp_path)
    train_on(job, local=local, restarts=3, on_step=lambda record: None)
    assert [one.plan is job.plan for one in stage.jobs] == [True, True]


@pytest.mark.parametrize(("restarts_left", "resume"), [(1, True), (0, True), (1, False)])
def test_a_resumed_run_goes_on_with_the_sites_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts_left: int, resume: bool
) -> None:
    stage = Stage(monkeypatch, [finish(range(3, 11))], [DCS[1:]])
    job = replace(job_of(tmp_path), resume=resume)
    train_on(job, local=False, restarts=restarts_left, on_step=lambda record: None)
    [first] = stage.jobs
    assert first.plan.cluster.sizes[0] == (3 if restarts_left and resume else 4)
    assert first.resume is resume and not first.or_begin, "a resumed run needs a checkpoint"


@pytest.mark.parametrize(("at_hand", "restarts_left"), [(DCS, False), ([], True), (["elsewhere"], True)])
def test_what_cannot_go_on_ends_with_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_hand: list[str], restarts_left: bool
) -> None:
    attempts = [lose("dc1", range(1, 4)), lose("dc2", range(3, 6)), lose("dc3", range(3, 7))]
    stage = Stage(monkeypatch, attempts, [at_hand])
    with pytest.raises(WorkerLostError, match="dc1 lost" if restarts_left else "dc3 lost"):
        train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "failed" and summary["exit"] == 5 and len(stage.jobs) == (1 if restarts_left else 3)


@pytest.mark.parametrize("error", [InfeasibleError("too large"), UserError("unequal")])
def test_where_no_plan_for_the_others_is_possible_the_loss_is_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    Stage(monkeypatch, [lose("dc1", range(1, 4))], [DCS[:1]])
    monkeypatch.setattr(restarts, "named_plan", fails)
    with pytest.raises(WorkerLostError, match="dc1 lost"):
        train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)
    assert f"the others cannot go on: {error}" in capsys.readouterr().err


def test_other_errors_end_a_run_that_has_restarts_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(job: Job) -> Played:
        raise UserError("no such thing")

    Stage(monkeypatch, [wrong], [DCS])
    with pytest.raises(UserError, match="no such thing"):
        train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)


def test_a_pipeline_is_followed_by_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridep.commands.inputs import cluster_and_workload
    from hybridep.commands.named_plans import named_plan

    cluster, workload = cluster_and_workload("lab-4dc", "tiny", [])
    pipeline = named_plan("stages", cluster, workload, time_limit_s=1.0)
    job = replace(job_of(tmp_path, plan=str(tmp_path / "plan.yaml")), plan=pipeline)
    monkeypatch.setattr(restarts, "named_plan", lambda *what, before: named_plan(*what, before=before, time_limit_s=1.0))
    stage = Stage(monkeypatch, [lose("dc1", range(1, 4)), finish(range(3, 11))], [["dc0", "dc2", "dc3"]])
    train_on(job, local=False, restarts=1, on_step=lambda record: None)
    after = stage.jobs[1].plan
    assert isinstance(after, PipelinePlan) and "dc1" not in after.cluster.site_names
    assert (
        batch_sequences(after.cluster, after.workload) * after.workload.training.micro_batches
        == batch_sequences(cluster, workload) * workload.training.micro_batches
    )


def test_asking_goes_on_beside_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked, go = [False, True], threading.Event(), threading.Event()

    def ask() -> bool:
        asked.set()
        assert go.wait(10)
        go.clear()
        return answers.pop(0)

    monkeypatch.setattr(restarts, "_ASK_EVERY_S", 0.0)
    asking = restarts._Asking(ask)
    for expected in (False, True):
        asked.clear()
        assert not asking.is_so() and asked.wait(10) and not asking.is_so()
        go.set()
        assert asking._thread is not None
        asking._thread.join(10)
        assert asking._answer is expected


def test_a_loss_before_the_first_step_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sites may still have the checkpoints of an earlier run in its place."""
    stage = Stage(monkeypatch, [lose("dc0", range(1, 1)), lose("dc0", range(1, 2)), finish(range(1, 11))], [DCS])
    summary = train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)
    assert [(one.resume, one.or_begin) for one in stage.jobs] == [(False, False), (False, False), (True, True)]
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["lost"] == summary["lost"] != []


@pytest.mark.parametrize("who", ["dc2", "rank 5 in dc2", "dc1 or dc2"])
def test_a_site_that_answers_and_is_lost_again_at_once_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Something does not pass between it and others that Ray does not need. After a while it may come back."""
    monkeypatch.setattr(restarts._Asking, "is_so", lambda self: self._ask())
    attempts = lose(who, range(1, 4)), lose(who, range(3, 3)), finish(range(3, 11))
    stage = Stage(monkeypatch, list(attempts), [DCS])
    train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)
    assert [one.plan.cluster.site_names for one in stage.jobs] == [tuple(DCS)] * 2 + [("dc0", "dc1", "dc3")]
    monkeypatch.setattr(restarts, "_SHUNNED_S", 0.0)
    stage = Stage(monkeypatch, list(attempts), [DCS])
    train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)
    assert [one.plan.cluster.sizes[0] for one in stage.jobs] == [4, 4, 4]


def test_nobody_is_left_out_without_whom_there_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise InfeasibleError("too large")

    monkeypatch.setattr(restarts, "named_plan", fails)
    stage = Stage(monkeypatch, [lose("dc2", range(1, 4)), lose("dc2", range(3, 3)), finish(range(3, 11))], [DCS])
    train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)
    assert [one.plan.cluster.sizes[0] for one in stage.jobs] == [4, 4, 4]


def test_the_head_may_be_away_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so sites, which it tells of: all are there when it is."""
    monkeypatch.setattr(restarts.time, "sleep", lambda seconds: None)
    stage = Stage(monkeypatch, [lose("dc0", range(1, 4)), finish(range(3, 11))], [[], [], [], DCS])
    monkeypatch.setattr(restarts, "_HEAD_PATIENCE_S", 60.0)
    train_on(job_of(tmp_path), local=False, restarts=1, on_step=lambda record: None)
    assert [one.plan.cluster.sizes[0] for one in stage.jobs] == [4, 4]


def test_a_resumed_run_never_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss may have taken its only checkpoint along."""
    stage = Stage(monkeypatch, [lose("dc0", range(5, 5)), lose("dc0", range(5, 6)), finish(range(5, 11))], [DCS])
    train_on(replace(job_of(tmp_path), resume=True), local=False, restarts=2, on_step=lambda record: None)
    assert [(one.resume, one.or_begin) for one in stage.jobs] == [(True, False)] * 3


def test_a_step_counts_as_it_was_made_last() -> None:
    made = Made()
    for step, loss in ((3, 5.0), (4, 4.0), (5, 3.0), (4, 4.5), (5, 3.5)):
        made.add(add_up([replace(report(0, step, None), loss_sum=loss, step_s=loss, wan_bytes=step)]))
    assert (made.first_step, made.losses, made.times_s, made.wan_bytes) == (3, [5.0, 4.5, 3.5], [5.0, 4.5, 3.5], [3, 4, 5])
    # The reports of steps 6 to 8 went with a machine, not their checkpoint.
    for step in (9, 10, 9):
        made.add(add_up([replace(report(0, step, None), loss_sum=float(step))]))
    assert (made.first_step, made.losses) == (3, [5.0, 4.5, 3.5, 9.0])
    made.add(add_up([report(0, 2, None)]))
    assert (made.first_step, made.losses) == (2, [1.0])


def refuse(why: str) -> Attempt:
    return lambda job: Played(job, range(1, 1), Failed(rank=0, kind=FailureKind.ERROR, why=why, exit_code=UserError.exit_code))


def test_a_site_that_is_lost_while_others_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [lose("dc0", range(1, 4)), refuse("no Ray node is labelled dc=dc1"), finish(range(3, 11))]
    stage = Stage(monkeypatch, attempts, [DCS[1:], DCS[2:]])
    summary = train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)
    assert [one.plan.cluster.site_names for one in stage.jobs] == [tuple(DCS), tuple(DCS[1:]), tuple(DCS[2:])]
    assert len(summary["lost"]) == 2 and summary["lost"][1].endswith("no Ray node is labelled dc=dc1")


@pytest.mark.parametrize("first", [True, False])
def test_what_is_wrong_with_the_input_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    attempts = [refuse("the loss of step 1 is not finite")]
    Stage(monkeypatch, attempts if first else [lose("dc0", range(1, 4)), *attempts], [DCS[1:]])
    with pytest.raises(UserError, match="the loss of step 1 is not finite"):
        train_on(job_of(tmp_path), local=False, restarts=2, on_step=lambda record: None)


def test_a_restart_with_nothing_left_to_do_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Stage(monkeypatch, [lose("dc0", range(1, 11)), finish(range(11, 11))], [DCS])
    train_on(job_of(tmp_path), local=False, restarts=1, on_step=lambda record: None)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and len(summary["lost"]) == 1 and summary["steps"] == 10


def test_a_checkpoint_that_is_not_made_yet_is_nothing_to_go_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checkpoints but at the end the others train on to it."""
    monkeypatch.setattr(restarts._Asking, "is_so", lambda self: True)
    stage = Stage(monkeypatch, [lose("dc0", range(1, 4)), finish(range(1, 11))], [DCS[1:]])
    job = job_of(tmp_path, checkpoints={"every_steps": 0})
    train_on(job, local=False, restarts=1, on_step=lambda record: None)
    assert len(stage.jobs) == 2
