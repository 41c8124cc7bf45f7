"""What planning and simulating say while they run, where stderr is no terminal."""

from __future__ import annotations

import pytest

from hybridep.commands.plan_progress import PlanProgress
from hybridep.commands.progress import SimulationProgress


def test_lines_tell_of_compiling_at_once_and_of_gaps_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    with PlanProgress() as progress:
        progress("compiling", 20.0)
        progress("plan", 4.0)
        assert progress.gap == 1.0
        now_s += 2.5
        progress("bound", 3.0)
        progress("bound", 3.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "planning: compiling the search, once on this machine (20 s)",
        "planning: step 4 s, bound 3 s, gap 25.0%",
    ]
    assert progress.gap == pytest.approx(0.125)


def test_short_simulations_say_nothing_and_long_ones_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    with SimulationProgress() as progress:
        progress("plan", 0.3)
        now_s += 9
        progress("plan", 0.4)
        now_s += 2
        progress("plan", 0.5)
        progress("ep", 0.1)
    assert capsys.readouterr().err.splitlines() == ["simulating plan: 50.0%"]
