"""One error tree. Each class carries the exit code of the command line that it ends.

Every error keeps its structured arguments in ``args`` so that it survives pickling (Ray sends errors between processes).
"""

from __future__ import annotations

from collections.abc import Sequence


class HybridEPError(Exception):
    """Base of all errors that this project raises on purpose; ``str(error)`` is one line a user can act on."""

    exit_code = 1


class UserError(HybridEPError):
    """The input is wrong: what, where, which value, which knob."""

    exit_code = 2


class ConfigError(UserError):
    """A config file does not hold what it must. ``where`` is a file (and line), ``key`` the dotted path inside it."""

    def __init__(self, where: str, key: str, problem: str) -> None:
        super().__init__(where, key, problem)
        self.where, self.key, self.problem = where, key, problem

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.problem}" if self.key else f"{self.where}: {self.problem}"


class QuantityError(UserError):
    """A text such as ``10 Gbps`` does not parse as the quantity expected."""


class PlacementError(UserError):
    """Domain sizes or migration ratios that the cluster cannot carry."""


class PlanMismatchError(UserError):
    """A plan was made for another cluster or model; ``differences`` names each value that differs."""

    def __init__(self, plan: str, differences: Sequence[str]) -> None:
        super().__init__(plan, list(differences))
        self.plan, self.differences = plan, list(differences)

    def __str__(self) -> str:
        more = len(self.differences) - 4
        shown = "; ".join(self.differences[:4]) + (f"; and {more} more" if more > 0 else "")
        return f"{self.plan}: was made for another cluster or model: {shown}. Make a new plan with `hybridep plan`"


class DataError(UserError):
    """Training data that cannot be read, are too short, or hold tokens that the model does not know."""


class LabUnavailableError(UserError):
    """This machine's kernel does not allow the emulated datacenters; says which call was refused."""


class InfeasibleError(HybridEPError):
    """No plan fits. ``missing`` says how much of what is missing where."""

    exit_code = 3


class NoSolutionError(HybridEPError):
    """The solver stopped at its limit before it had any plan."""

    exit_code = 4


class WorkerLostError(HybridEPError):
    """A rank or a whole datacenter is gone and training stopped."""

    exit_code = 5

    def __init__(self, who: str, why: str) -> None:
        super().__init__(who, why)
        self.who, self.why = who, why

    def __str__(self) -> str:
        return f"{self.who} lost: {self.why}"


class TransportError(WorkerLostError):
    """An exchange with a peer failed or did not end within its timeout."""
