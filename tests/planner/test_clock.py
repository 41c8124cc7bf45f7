"""Time limits count wall time, unless the caller gives another clock."""

from __future__ import annotations

import time
from contextvars import Context

import numba
import pytest

from planner import clock
from planner.clock import elapsed_s, now_s, timed_by


def test_the_clock_is_wall_time_until_another_one_is_given() -> None:
    def slept_s() -> float:
        began_s = now_s()
        time.sleep(0.05)
        return now_s() - began_s

    assert Context().run(slept_s) >= 0.05  # one in which no clock was ever given


def test_a_given_clock_counts_until_its_end_however_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_compiling_s", lambda: 0.0)

    def nested() -> float:
        with timed_by(lambda: 5.0):
            with pytest.raises(KeyboardInterrupt), timed_by(lambda: 7.0):
                assert now_s() == 7.0
                raise KeyboardInterrupt
            assert now_s() == elapsed_s() == 5.0
            with timed_by(lambda: 7.0, reported=lambda: 6.0):
                assert (now_s(), elapsed_s()) == (7.0, 6.0)
        return now_s()

    assert Context().run(nested) == pytest.approx(time.perf_counter(), abs=60)


def test_no_clock_counts_what_is_compiled() -> None:
    @numba.njit  # type: ignore[untyped-decorator]
    def twice(number: float) -> float:
        return number + number

    @numba.njit  # type: ignore[untyped-decorator]
    def compiled_with_another(number: float) -> float:
        return twice(number) + 1

    with timed_by(time.perf_counter):
        raw_s, began_s, asked_s = time.perf_counter(), now_s(), elapsed_s()
        assert compiled_with_another(1.5) == 4
        took_s = time.perf_counter() - raw_s
        assert took_s > 0.02
        assert now_s() - began_s < took_s / 4 and elapsed_s() - asked_s < took_s / 4
        assert compiled_with_another(2.5) == 6
        began_s = now_s()
        time.sleep(0.02)
        assert now_s() - began_s >= 0.02
