"""Whoever waits for functions to compile is told, once."""

from __future__ import annotations

import logging
import time

import numba
import pytest

from hybridep import compiled
from hybridep.cli import _ToStderr


@pytest.fixture(autouse=True)
def _shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled._COMPILING, "_notice", None)
    monkeypatch.setattr(compiled.LOG, "handlers", [_ToStderr()])
    monkeypatch.setattr(compiled.LOG, "propagate", False)
    compiled.LOG.setLevel(logging.INFO)


def compile_slowly() -> None:
    """Some 0.1 s or more."""

    @numba.njit  # type: ignore[untyped-decorator]
    def cubed(number: float) -> float:
        return number**3

    assert cubed(1.5) == 1.5**3


def test_of_what_takes_long_a_process_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled, "TOLD_AFTER_S", 0.0)
    compile_slowly()
    compile_slowly()
    time.sleep(0.05)
    assert capsys.readouterr().err == "hybridep: compiling, once on this machine (10 to 30 seconds)\n"


def test_of_what_takes_short_it_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiled, "TOLD_AFTER_S", 60.0)
    compile_slowly()
    assert capsys.readouterr().err == "" and compiled._COMPILING._notice is None
