"""Faults on purpose, for tests of what happens when ranks are lost: ``HYBRIDEP_FAULT=kill:rank=1,step=3``."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from enum import Enum

from hybridep.errors import UserError

VARIABLE = "HYBRIDEP_FAULT"
_HANG_S = 3600.0


class FaultKind(Enum):
    """What happens to the rank."""

    RAISE = "raise"
    """An exception that nobody expects."""
    KILL = "kill"
    """The process dies at once."""
    HANG = "hang"
    """The process stays but does nothing more."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault at the start of a rank's step (counted from 1)."""

    kind: FaultKind
    rank: int
    step: int

    def strike(self, rank: int, step: int) -> None:
        """Do it, if this is the place and time."""
        if (rank, step) != (self.rank, self.step):
            return
        if self.kind is FaultKind.RAISE:
            raise RuntimeError(f"fault injected at rank {rank}, step {step}")
        if self.kind is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_HANG_S)


def fault_from_environment() -> Fault | None:
    """The fault that the environment asks for. Raises UserError when it is not written as above."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    match = re.fullmatch(r"(raise|kill|hang):rank=(\d+),step=(\d+)", text)
    if match is None:
        raise UserError(f"{VARIABLE}={text}: write it as kill:rank=1,step=3 (or raise, hang)")
    return Fault(kind=FaultKind(match[1]), rank=int(match[2]), step=int(match[3]))
