"""What can go wrong around the kernels, each with the knob to turn."""

from __future__ import annotations

from hybridep.errors import HybridEPError, UserError


class KernelInputError(UserError):
    """A tensor that a kernel cannot take: which argument, what it is, what it must be."""

    def __init__(self, where: str, argument: str, problem: str) -> None:
        super().__init__(where, argument, problem)
        self.where, self.argument, self.problem = where, argument, problem

    def __str__(self) -> str:
        return f"{self.where}: {self.argument}: {self.problem}"


class KernelBuildError(HybridEPError):
    """A kernel could not be compiled or loaded; ``log`` is the compiler's own text."""

    def __init__(self, what: str, why: str, log: str = "") -> None:
        super().__init__(what, why, log)
        self.what, self.why, self.log = what, why, log

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" + (f"\n{self.log}" if self.log else "")
