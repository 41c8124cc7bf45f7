"""What a run leaves in its folders, with ranks that only play events: milliseconds per test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
from launch_cases import make_job

from hybridep.checkpoint_folders import put_aside
from hybridep.commands.restarts import _naming_unused
from hybridep.errors import HybridEPError, UserError, WorkerLostError
from hybridep.launch.controller import StepRecord
from hybridep.launch.folders import LOCK_FILE, held, scratch_folder
from hybridep.launch.host import child_environment
from hybridep.launch.session import Backend, StepLog, train
from hybridep.launch.worker_group import Event, Failed, FailureKind, Finished, Stepped
from hybridep.run import StepReport

RANKS = 8


class Played:
    """Eight ranks that report some steps with these losses, and then do ``end``."""

    def __init__(self, *losses: float, end: Callable[[], list[Event]] | None = None, first: int = 1) -> None:
        self._batches = [
            [Stepped(report=_report(rank, step, loss)) for rank in range(RANKS)] for step, loss in enumerate(losses, first)
        ]
        self._end = end or (lambda: [Finished(rank=rank) for rank in range(RANKS)])

    def start(self) -> None: ...

    def abort(self) -> None: ...

    def poll(self, timeout_s: float) -> list[Event]:
        return list(self._batches.pop(0)) if self._batches else self._end()


def _report(rank: int, step: int, loss: float) -> StepReport:
    return StepReport(rank=rank, step=step, loss_sum=loss, balance_loss=0.0, tokens=1, step_s=float(step), peak_bytes=rank)


def run_job(folder: Path, group: Played, *, resume: bool = False) -> dict[str, Any]:
    return train(make_job(folder, resume=resume), Backend(name="played", group=group, shaped=False), lambda record: None)


def read_strictly(text: str) -> Any:
    """JSON as every other reader takes it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def written(folder: Path) -> dict[str, Any]:
    found = read_strictly((folder / "summary.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def raising(error: BaseException) -> Callable[[], list[Event]]:
    def end() -> list[Event]:
        raise error

    return end


def failing() -> list[Event]:
    return [Failed(rank=1, kind=FailureKind.ERROR, why="no", exit_code=2)]


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (None, "finished", 0),
        (raising(KeyboardInterrupt()), "stopped", 130),
        (raising(SystemExit(143)), "stopped", 143),
        (raising(ZeroDivisionError("a bug")), "failed", 1),
        (failing, "failed", 2),
    ],
)
def test_a_summary_says_how_the_run_ended(tmp_path: Path, end: Callable[[], list[Event]] | None, status: str, code: int) -> None:
    """Also when all steps are made, and only the last checkpoint is not."""
    group = Played(3.0, 2.0, 1.0, end=end)
    (partial := tmp_path / "checkpoints" / ".step-00000003.partial-1").mkdir(parents=True)
    if end is None:
        run_job(tmp_path, group)
    else:
        with pytest.raises((HybridEPError, KeyboardInterrupt, SystemExit, ZeroDivisionError)):
            run_job(tmp_path, group)
    assert not partial.exists(), "of a checkpoint that ranks were writing"
    summary = written(tmp_path)
    assert (summary["status"], summary["exit"]) == (status, code)
    assert summary["losses"] == [3.0, 2.0, 1.0] and summary["first_step"] == 1 and summary["peak_bytes"] == RANKS - 1
    assert summary["step_s"]["median"] == 2.5, "of all steps but the first"


def test_a_resume_with_nothing_to_do_leaves_the_summary(tmp_path: Path) -> None:
    run_job(tmp_path, Played(3.0, 2.0, 1.0))
    before = written(tmp_path)
    assert run_job(tmp_path, Played(), resume=True)["status"] == "finished"
    assert written(tmp_path) == before


def test_losses_that_are_not_finite_are_written_as_json(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run_job(tmp_path, Played(1.0, float("nan"), end=failing))
    assert written(tmp_path)["losses"] == [1.0, None]
    lines = (tmp_path / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    assert [read_strictly(line)["loss"] for line in lines] == [1.0, None]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """As the cause, and not where it is another one."""
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"output: .*steps\.jsonl cannot be written \(No space left on device\)"):
        run_job(tmp_path, Played(3.0, 2.0))
    assert written(tmp_path)["exit"] == 2
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").symlink_to("/dev/full")
    with pytest.raises(WorkerLostError, match=r"rank 1 in .* lost: gone"):
        run_job(tmp_path, Played(end=lambda: [Failed(rank=1, kind=FailureKind.DIED, why="gone")]))
    (tmp_path / "steps.jsonl").unlink()
    with pytest.raises(UserError, match=r"summary\.json: cannot be written"):
        run_job(tmp_path, Played(3.0, 2.0))


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, balance_loss=0.0, tokens=1, step_s=1.0, tokens_per_s=1.0, wan_bytes=0, sent_bytes={}, peak_bytes=0
    )


def log_steps(path: Path, *steps: int, keep: bool) -> list[int]:
    log = StepLog(path, keep=keep)
    for step in steps:
        log.add(record(step))
    log.close()
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_resumed_log_keeps_only_earlier_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert log_steps(path, 1, 2, 3, 4, keep=False) == [1, 2, 3, 4]
    assert log_steps(path, 3, 4, 5, keep=True) == [1, 2, 3, 4, 5]
    assert log_steps(path, keep=True) == [1, 2, 3, 4, 5]
    assert log_steps(path, keep=False) == []


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "[]", "\0\0", "\udc80"])
def test_a_resumed_log_leaves_out_what_was_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(torn, encoding="utf-8", errors="surrogateescape")
    assert log_steps(path, 1, keep=True) == [1]
    log_steps(path, 1, 2, keep=False)
    with path.open("a", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(torn)
    assert log_steps(path, 3, keep=True) == [1, 2, 3]


def checkpoint(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "manifest.json").write_text("{}")
    return folder / name


def test_only_checkpoints_are_put_aside(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    checkpoint(folder, "step-00000002")
    (folder / "step-00000004").symlink_to(checkpoint(elsewhere, "4"))
    others = [checkpoint(folder, "step-00000002.bak"), checkpoint(folder, "mine")]
    others += [folder / "tokens.npy", folder / "step-00000006", folder / "previous" / "notes.txt"]
    checkpoint(folder / "previous", "step-00000001")
    checkpoint(folder / "previous", "step-00000001.other-2")
    checkpoint(folder, "step-00000002.other-1a")
    (folder / "step-00000006").mkdir()
    for path in (folder / "tokens.npy", folder / "previous" / "notes.txt"):
        path.write_text("precious")
    for _ in range(2):
        put_aside(folder)
        assert all(path.exists() for path in others)
        moved = ["step-00000002", "step-00000002.other-1a", "step-00000004"]
        assert [path.name for path in sorted((folder / "previous").glob("step-*"))] == moved
    assert not (folder / "step-00000002").exists() and not (folder / "step-00000004").is_symlink()
    checkpoint(folder, "step-00000008")
    put_aside(folder)
    assert [path.name for path in (folder / "previous").glob("step-*")] == ["step-00000008"]
    assert (elsewhere / "4").exists() and all(path.exists() for path in others)


def test_a_resume_names_checkpoints_that_it_does_not_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4, 6):
        checkpoint(tmp_path, f"step-0000000{step}")
    shown: list[StepRecord] = []
    on_step = _naming_unused(tmp_path, shown.append)
    on_step(replace(record(3), remarks={"step 6 is gone": 1}))
    on_step(record(4))
    assert [one.step for one in shown] == [3, 4]
    expected = "goes on from step-00000002; step-00000004, step-00000006 are not whole, or older, and will be replaced"
    assert capsys.readouterr().err == f"hybridep train: step 6 is gone (rank 1)\nhybridep train: {expected}\n"


def test_a_folder_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    # A file that was left is no obstacle.
    (tmp_path / LOCK_FILE).write_text("1")
    with held("output", tmp_path):
        with pytest.raises(UserError, match=rf"output: {tmp_path} is in use by another run \(process {os.getpid()} on "):
            run_job(tmp_path, Played())
        assert list(tmp_path.iterdir()) == [tmp_path / LOCK_FILE]
    assert list(tmp_path.iterdir()) == []
    # Nor is the lock of a process that was killed.
    program = f"from os import _exit; from pathlib import Path; folder = Path({str(tmp_path)!r})\n"
    program += "from hybridep.launch.folders import held\nwith held('output', folder): _exit(9)"
    assert subprocess.run([sys.executable, "-c", program], env=child_environment(), timeout=30).returncode == 9
    assert (tmp_path / LOCK_FILE).exists()
    run_job(tmp_path, Played(1.0))
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_folder_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with (
            pytest.raises(UserError, match=rf"output: {tmp_path / LOCK_FILE} cannot be written \(No space"),
            held("output", tmp_path),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_elsewhere_are_held_too(tmp_path: Path) -> None:
    job = make_job(tmp_path / "output")
    elsewhere = job.run.checkpoints.model_copy(update={"folder": tmp_path / "elsewhere"})
    job = replace(job, run=job.run.model_copy(update={"checkpoints": elsewhere}))
    (tmp_path / "elsewhere").mkdir()
    with held("output", tmp_path / "elsewhere"), pytest.raises(UserError, match=r"checkpoints\.folder: .*elsewhere is in use"):
        train(job, Backend(name="played", group=Played(), shaped=False), lambda record: None)


def test_a_scratch_folder_stays_where_an_error_points_to_it() -> None:
    with scratch_folder() as gone:
        (gone / "x").write_text("")
    with pytest.raises(UserError), scratch_folder() as also_gone:
        raise UserError("something else")
    with pytest.raises(UserError), scratch_folder() as kept:
        raise UserError(f"see {kept / 'log'}")
    assert not gone.exists() and not also_gone.exists() and kept.exists()
    kept.rmdir()
