"""What the controller knows of workers: one interface, and the events that come out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hybridep.run import StepReport


class FailureKind(Enum):
    """How a rank ended, in the order in which it explains the end of others."""

    ERROR = "error"
    """It raised something that is not about a peer."""
    DIED = "died"
    """Its process is gone without a word."""
    PEER = "peer"
    """An exchange with another rank failed: most likely the consequence of something else."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A rank is up. ``dc`` is where it really runs, as its own process found out."""

    rank: int
    dc: str
    address: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A rank completed an optimizer step."""

    report: StepReport


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A rank has done all steps and saved its share, or measured what it was asked to: ``result`` as plain data."""

    rank: int
    result: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A rank is lost. ``peer`` is whom it accuses; ``exit_code`` what the command line ends with if this is the cause."""

    rank: int
    kind: FailureKind
    why: str
    peer: int | None = None
    exit_code: int = 5


@dataclass(frozen=True, kw_only=True)
class DcLost:
    """All workers of a datacenter are out of reach."""

    dc: str
    why: str


Event = Started | Stepped | Finished | Failed | DcLost


class WorkerGroup(Protocol):
    """All ranks of one run. Used by one thread."""

    def start(self) -> None:
        """Begin to bring up all ranks; returns at once. Raises UserError where they cannot be placed."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call, in order; waits up to ``timeout_s`` for the first."""

    def abort(self) -> None:
        """Stop every rank that is left, at once. Harmless when there is none, and when called again."""
