"""Inputs in a temporary folder, and the command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_cases import Call, Inputs, Result

from hybridep import cli


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path)


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a verb in this process: for what starts no ranks."""

    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Result(code, captured.out, captured.err)

    return run
