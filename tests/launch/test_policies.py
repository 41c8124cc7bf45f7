"""Whom to blame: every way in which ranks fail, and what is said about it."""

from __future__ import annotations

import pytest

from hybridep.launch.policies import Patience, first_cause, is_time_to_judge
from hybridep.launch.worker_group import DcLost, Failed, FailureKind

DCS = ("a", "a", "b", "b", "c", "c")


def complaint(rank: int, peer: int | None) -> Failed:
    return Failed(rank=rank, kind=FailureKind.PEER, why=f"{rank} waited for {peer}", peer=peer)


def death(rank: int) -> Failed:
    return Failed(rank=rank, kind=FailureKind.DIED, why="was ended by SIGKILL")


def test_a_death_explains_complaints_that_came_before_it() -> None:
    cause = first_cause([complaint(0, 2), complaint(4, 2), death(2)], [], DCS)
    assert (cause.who, cause.why, cause.exit_code) == ("rank 2 in b", "was ended by SIGKILL", 5)


def test_when_all_ranks_of_a_datacenter_die_it_is_the_datacenter() -> None:
    cause = first_cause([death(3), complaint(0, 2), death(2)], [], DCS)
    assert cause.who == "b" and "all its ranks" in cause.why
    single = first_cause([death(1)], [], ("a", "b"))
    assert single.who == "rank 1 in b"


def test_a_lost_datacenter_explains_everything() -> None:
    cause = first_cause([complaint(0, 2), death(5)], [DcLost(dc="b", why="node gone")], DCS)
    assert (cause.who, cause.why) == ("b", "node gone")


def test_an_error_of_a_rank_keeps_its_exit_code() -> None:
    bug = Failed(rank=3, kind=FailureKind.ERROR, why="ValueError: x", exit_code=1)
    assert first_cause([complaint(0, 3), bug, death(2)], [], DCS).who == "rank 3 in b"
    user = Failed(rank=3, kind=FailureKind.ERROR, why="data.path: cannot be read", exit_code=2)
    cause = first_cause([user], [], DCS)
    assert (cause.who, cause.exit_code) == ("", 2)


@pytest.mark.parametrize(
    ("accusations", "who"),
    [
        ({0: 2, 4: 2, 3: 2}, "rank 2 in b"),  # everybody waits for the rank that hangs
        ({0: 2, 1: 3, 3: 2, 5: 1}, "rank 2 in b"),  # some wait for others that wait for it
        ({0: 2, 4: 3, 5: 3, 1: 3}, "b"),  # both ranks of b say nothing
        ({0: 2, 2: 0, 1: 3, 3: 5, 4: 2, 5: 3}, "b"),  # all complain; b is at one end of every accusation
        ({0: 2, 2: 0}, "a or b"),
        ({0: 1, 1: 0}, "rank 0 in a"),
        ({0: None}, "rank 0 in a"),
    ],
)
def test_complaints_alone_lead_to_the_silent_rank_or_the_common_link(accusations: dict[int, int | None], who: str) -> None:
    cause = first_cause([complaint(rank, peer) for rank, peer in accusations.items()], [], DCS)
    assert cause.who == who
    assert cause.exit_code == 5


def test_a_silent_rank_is_named_by_one_that_waits_for_it() -> None:
    assert first_cause([complaint(4, 3), complaint(3, 0)], [], DCS).why == "it stopped answering (3 waited for 0)"


def test_judgement_waits_longer_after_mere_complaints() -> None:
    patience = Patience(cause_s=1.0, complaint_s=3.0)
    assert not is_time_to_judge([], [], 100.0, patience)
    assert not is_time_to_judge([complaint(0, 1)], [], 2.9, patience)
    assert is_time_to_judge([complaint(0, 1)], [], 3.0, patience)
    assert not is_time_to_judge([complaint(0, 1), death(1)], [], 0.9, patience)
    assert is_time_to_judge([complaint(0, 1), death(1)], [], 1.0, patience)
    assert is_time_to_judge([], [DcLost(dc="b", why="")], 0.0, patience)
