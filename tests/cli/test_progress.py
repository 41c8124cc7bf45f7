"""What planning and simulating say while they run, where stderr is no terminal."""

from __future__ import annotations

import pytest

from hybridep.commands.plan_progress import PlanProgress
from hybridep.commands.progress import ShareProgress


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[1]: what the clock says."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_lines_tell_of_gaps_now_and_then(now_s: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with PlanProgress() as progress:
        progress("plan", 4.0)
        assert progress.gap == 1.0
        now_s[0] += 2.5
        progress("bound", 3.0)
        progress("bound", 3.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["planning: step 4 s, bound 3 s, gap 25.0%"]
    assert progress.gap == pytest.approx(0.125)


def test_simulations_say_how_far_they_are_every_ten_seconds(now_s: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ShareProgress("simulating") as progress:
        for later_s, what, done in ((0.0, "plan", 0.3), (9.0, "plan", 0.4), (2.0, "plan", 0.5), (1.0, "ep", 0.1)):
            now_s[0] += later_s
            progress(what, done)
    assert capsys.readouterr().err.splitlines() == ["simulating plan: 50.0%"]
