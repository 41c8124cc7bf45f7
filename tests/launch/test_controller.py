"""The controller's state machine on a worker group that only plays events: milliseconds per test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hybridep.errors import HybridEPError, UserError, WorkerLostError
from hybridep.launch.controller import Controller, Phase, StepRecord, WorkerFailedError, add_up
from hybridep.launch.policies import Patience
from hybridep.launch.worker_group import Event, Failed, FailureKind, Finished, Started, Stepped
from hybridep.run import StepReport

DCS = ("a", "b")
PATIENCE = Patience(start_s=10.0, finish_s=5.0, cause_s=1.0, complaint_s=3.0)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class PlayedGroup:
    """Hands out prepared batches of events; each poll takes ``poll_s`` of the clock's time."""

    def __init__(self, clock: Clock, batches: Sequence[Sequence[Event]], poll_s: float = 0.5) -> None:
        self._clock, self._batches, self._poll_s = clock, list(batches), poll_s
        self.started = self.aborted = 0

    def start(self) -> None:
        self.started += 1

    def poll(self, timeout_s: float) -> list[Event]:
        self._clock.now_s += self._poll_s
        return list(self._batches.pop(0)) if self._batches else []

    def abort(self) -> None:
        self.aborted += 1


def report(rank: int, step: int, loss_sum: float = 2.0) -> Stepped:
    sent = {"token_dispatch@dc": 10 * (rank + 1)}
    return Stepped(
        report=StepReport(
            rank=rank, step=step, loss_sum=loss_sum, balance_loss=0.1, tokens=4, step_s=1.0 + rank, sent_bytes=sent, wan_bytes=7
        )
    )


STARTED = [Started(rank=rank, dc=dc, address="127.0.0.1", pid=1) for rank, dc in enumerate(DCS)]
FINISHED = [Finished(rank=0), Finished(rank=1)]


def play(*batches: Sequence[Event]) -> tuple[list[StepRecord], PlayedGroup, HybridEPError | None, float]:
    clock = Clock()
    group, records = PlayedGroup(clock, batches), list[StepRecord]()
    try:
        Controller(group, DCS, on_step=records.append, patience=PATIENCE, clock=clock).run()
    except HybridEPError as error:
        return records, group, error, clock.now_s
    return records, group, None, clock.now_s


def test_steps_are_added_up_once_all_ranks_have_reported() -> None:
    records, group, error, _ = play(STARTED, [report(0, 1), report(0, 2)], [report(1, 1, 6.0)], [report(1, 2)], FINISHED)
    assert error is None and [record.step for record in records] == [1, 2]
    first = records[0]
    assert first.loss == pytest.approx(8.0 / 8) and first.tokens == 8 and first.balance_loss == pytest.approx(0.2)
    assert first.step_s == 2.0 and first.tokens_per_s == 4.0
    assert first.wan_bytes == 14 and first.sent_bytes == {"token_dispatch@dc": 30}
    assert group.started == 1 and group.aborted >= 1


def test_phases() -> None:
    clock = Clock()
    controller = Controller(
        PlayedGroup(clock, [STARTED[:1], STARTED[1:], FINISHED]), DCS, on_step=lambda record: None, clock=clock
    )
    phases = [controller.step(), controller.step(), controller.step()]
    assert phases == [Phase.STARTING, Phase.RUNNING, Phase.FINISHED]


def test_a_death_ends_the_run_after_the_grace_and_names_it() -> None:
    dead = Failed(rank=1, kind=FailureKind.DIED, why="was ended by SIGKILL")
    complaint = Failed(rank=0, kind=FailureKind.PEER, why="connection reset", peer=1)
    records, group, error, ended_s = play(STARTED, [report(0, 1), report(1, 1)], [complaint], [dead])
    assert isinstance(error, WorkerLostError) and str(error) == "rank 1 in b lost: was ended by SIGKILL"
    assert error.exit_code == 5 and group.aborted >= 1 and len(records) == 1
    assert ended_s <= 1.5 + PATIENCE.cause_s + 0.5


def test_a_rank_in_the_wrong_place_is_the_users_to_fix() -> None:
    wrong = Started(rank=1, dc="a", address="10.0.0.1", pid=1)
    _, group, error, _ = play([STARTED[0], wrong])
    assert isinstance(error, UserError) and "rank 1 must run in b but runs in a" in str(error)
    assert group.aborted >= 1


def test_ranks_that_never_start_or_never_finish_are_named() -> None:
    _, _, error, ended_s = play(STARTED[:1])
    assert str(error) == "rank 1 in b lost: did not start within 10 s" and ended_s < 12
    _, _, error, ended_s = play(STARTED, [Finished(rank=1)])
    assert str(error) == "rank 0 in a lost: did not finish within 5 s of the first" and ended_s < 8


def test_a_bug_and_a_user_error_in_a_rank_keep_their_exit_codes() -> None:
    bug = Failed(rank=1, kind=FailureKind.ERROR, why="ValueError: boom", exit_code=1)
    _, _, error, _ = play(STARTED, [bug])
    assert isinstance(error, WorkerFailedError) and error.exit_code == 1 and "rank 1 in b: ValueError: boom" in str(error)
    user = Failed(rank=0, kind=FailureKind.ERROR, why="data.path: /x cannot be read", exit_code=2)
    _, _, error, _ = play(STARTED, [user])
    assert isinstance(error, UserError) and str(error) == "data.path: /x cannot be read"


def test_an_interrupt_stops_the_workers() -> None:
    class Interrupted(PlayedGroup):
        def poll(self, timeout_s: float) -> list[Event]:
            raise KeyboardInterrupt

    clock = Clock()
    group = Interrupted(clock, [])
    with pytest.raises(KeyboardInterrupt):
        Controller(group, DCS, on_step=lambda record: None, clock=clock).run()
    assert group.aborted == 1


def test_adding_up_keeps_the_fullest_rank_and_the_first_that_saw_damage() -> None:
    reports = [
        StepReport(rank=rank, step=3, loss_sum=1.0, balance_loss=0.0, tokens=1, step_s=0.5, peak_bytes=peak, remarks=remarks)
        for rank, (peak, remarks) in enumerate([(5, []), (9, ["a"]), (2, ["a", "b"])])
    ]
    assert add_up(reports).peak_bytes == 9 and add_up(reports).tokens_per_s == 6.0
    assert add_up(reports).remarks == {"a": 1, "b": 2} and "remarks" not in add_up(reports).as_dict()


def test_losses_are_the_same_to_the_bit_in_whatever_order_ranks_report() -> None:
    sums = [0.1, 0.2, 0.3]
    reports = [
        StepReport(
            rank=rank, step=3, loss_sum=one, balance_loss=one, tokens=1, step_s=0.5, validation_loss_sum=one, validation_tokens=1
        )
        for rank, one in enumerate(sums)
    ]
    assert sum(sums) != sum(reversed(sums))
    assert add_up(reports[::-1]) == add_up(reports)
