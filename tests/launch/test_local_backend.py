"""Ranks that are forked on this machine: whenever they are stopped, none is left, and whoever ends early is named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from launch_cases import left_running, make_job

from hybridep.errors import UserError
from hybridep.launch.local_backend import LocalGroup
from hybridep.launch.worker_group import Event, Failed, FailureKind, Started

pytestmark = pytest.mark.timeout(90)


def events_until(group: LocalGroup, kind: type[Event], number: int) -> list[Event]:
    """Until so many are of this kind."""
    found, deadline = list[Event](), time.monotonic() + 60
    while sum(isinstance(one, kind) for one in found) < number and time.monotonic() < deadline:
        found += group.poll(0.2)
    return found


def the_forking_one(folder: Path) -> psutil.Process:
    return next(one for one in left_running(folder / "x") if one.ppid() == os.getpid())


@pytest.mark.parametrize("when", ["at once", "while it imports", "once all have begun"])
def test_stopped_at_any_time_nothing_is_left(tmp_path: Path, when: str) -> None:
    files = sorted(os.listdir("/proc/self/fd"))
    group = LocalGroup(make_job(tmp_path, resume=False), None)
    group.start()
    if when == "while it imports":
        time.sleep(0.7)
    elif when == "once all have begun":
        begun = events_until(group, Started, 8)
        assert sorted(one.rank for one in begun if isinstance(one, Started)) == list(range(8))
        # They are this process's own by now, and each writes a log of its own.
        assert {one.pid for one in begun if isinstance(one, Started)} <= {one.pid for one in psutil.Process().children()}
        assert {path.name for path in (tmp_path / "logs").iterdir()} == {f"rank-{rank}.log" for rank in range(8)}
    for _ in range(2):
        group.abort()
        assert left_running(tmp_path / "x") == []
    assert sorted(os.listdir("/proc/self/fd")) == files


def test_whoever_ends_before_ranks_begin_is_told(tmp_path: Path) -> None:
    group = LocalGroup(make_job(tmp_path, resume=False), None)
    group.start()
    try:
        the_forking_one(tmp_path).kill()
        failed = [one for one in events_until(group, Failed, 8) if isinstance(one, Failed)]
        assert sorted(one.rank for one in failed) == list(range(8)) and {one.kind for one in failed} == {FailureKind.DIED}
        assert {one.why for one in failed} == {f"its process ended before it began (its output: {tmp_path}/logs/rank-0.log)"}
    finally:
        group.abort()


def test_a_log_that_cannot_be_written_is_named_before_anything_is_started(tmp_path: Path) -> None:
    files = sorted(os.listdir("/proc/self/fd"))
    (tmp_path / "logs" / "rank-3.log").mkdir(parents=True)
    group = LocalGroup(make_job(tmp_path, resume=False), None)
    try:
        with pytest.raises(UserError, match=r"rank-3\.log: cannot be written \(Is a directory\)"):
            group.start()
        assert left_running(tmp_path / "x") == []
    finally:
        group.abort()
    assert sorted(os.listdir("/proc/self/fd")) == files


def test_a_rank_that_is_killed_is_told_by_its_signal(tmp_path: Path) -> None:
    group = LocalGroup(make_job(tmp_path, resume=False), None)
    group.start()
    try:
        begun = {one.rank: one.pid for one in events_until(group, Started, 8) if isinstance(one, Started)}
        os.kill(begun[5], signal.SIGTERM)
        failed = [one for one in events_until(group, Failed, 1) if isinstance(one, Failed)]
        [why] = [one.why for one in failed if one.rank == 5]
        assert why.startswith(f"process {begun[5]} was ended by SIGTERM (its output: ")
    finally:
        group.abort()
    assert left_running(tmp_path / "x") == []
