"""Functions over arrays that are compiled to machine code when they are first called, and kept on disk."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar, cast

import numba
from numba.core.event import Event, Listener, register

_Function = TypeVar("_Function", bound=Callable[..., object])

LOG = logging.getLogger(__name__)
TOLD_AFTER_S = 1.0
"""Of compiling that takes so long the log is told, once in a process."""


class _Compiling(Listener):
    """Of whatever is compiled, with all that it calls: what it takes by several clocks, and a line in the log."""

    def __init__(self) -> None:
        self.clocks: list[Callable[[], float]] = []
        self.total_s: list[float] = []
        self._begun_s: list[float] = []
        self._depth = 0
        self._notice: Timer | None = None

    def on_start(self, event: Event) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._begun_s = [clock() for clock in self.clocks]
        if self._notice is None:
            self._notice = Timer(TOLD_AFTER_S, LOG.info, ["compiling, once on this machine (10 to 30 seconds)"])
            self._notice.daemon = True
            self._notice.start()

    def on_end(self, event: Event) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        for number, (clock, begun_s) in enumerate(zip(self.clocks, self._begun_s, strict=True)):
            self.total_s[number] += clock() - begun_s
        if self._notice is not None and self._notice.is_alive():
            self._notice.cancel()
            self._notice = None


_COMPILING = _Compiling()
register("numba:compile", _COMPILING)  # type: ignore[no-untyped-call]


def seconds_compiling(clock: Callable[[], float]) -> Callable[[], float]:
    """For modules: how many of the clock's seconds compiling takes from now on; what is kept from an earlier process takes
    none."""
    number = len(_COMPILING.clocks)
    _COMPILING.clocks.append(clock)
    _COMPILING.total_s.append(0.0)
    return lambda: _COMPILING.total_s[number]


def compiled(function: _Function) -> _Function:
    """Compile a function of numbers and of arrays that its callers keep: it makes and returns none. The first call on a machine
    takes seconds, a later process a fraction of one.

    A number that is handed on begins as ``int(np.int64(0))``: numba would compile what takes it for a 0 as well. Division
    follows numpy (no exception for zero), sums keep their order. Nobody counts who uses an array: numba does that by
    atomic operations wherever one leaves a tuple or is handed on, which were two thirds of a walk's time.
    """
    return _compiled(function, _nrt=False)


def inlined(function: _Function) -> _Function:
    """Compile a short function as ``compiled`` does, with a copy of it wherever it is called, so that no tuples are passed."""
    return _compiled(function, _nrt=False, inline="always")


def allocating(function: _Function) -> _Function:
    """Compile a function that makes arrays, or calls what does; here numba counts who uses them."""
    return _compiled(function, _nrt=True)


def _compiled(function: _Function, **options: Any) -> _Function:
    config: Any = numba.config
    before, folder = config.CACHE_DIR, _cache_folder(function.__module__.partition(".")[0])
    # numba looks at a function's own file only, and would go on using callers of a function that has changed.
    config.CACHE_DIR = folder or ""
    try:
        # Nothing here is called from C.
        options |= {"cache": folder is not None, "error_model": "numpy", "no_cfunc_wrapper": True}
        return cast(_Function, numba.njit(**options)(function))
    finally:
        config.CACHE_DIR = before


@cache
def _cache_folder(package: str) -> str | None:
    """A folder of the user's for exactly this file and those sources of a package that speak of compiled code: those that have
    some, or what it uses. None where none can be made, and every process compiles anew."""
    sources = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted((Path(__file__).parent.parent / package).rglob("*.py")):
        text = path.read_bytes()
        if b"compiled" in text:
            sources.update(text)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "hybridep" / f"compiled-{package}-{sources.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None
