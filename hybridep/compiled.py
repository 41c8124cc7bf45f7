"""Functions over arrays that are compiled to machine code when they are first called, and kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar, cast

import numba
from numba.core.event import Event, Listener, register

_Function = TypeVar("_Function", bound=Callable[..., object])


LOADING_S = 1.5
"""What loading compiled functions takes at most, once they are kept."""


@contextmanager
def told_of_compiling(report: Callable[[str, float], None] | None, seconds: float) -> Iterator[None]:
    """``report`` is told ("compiling", ``seconds``) where what is inside takes longer than loading does."""
    told = Timer(LOADING_S, report or (lambda what, seconds: None), ("compiling", seconds))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


class _Stopwatch(Listener):
    """Adds up what compiling takes; what is compiled for something that is being compiled counts once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.total_s = self._begun_s = 0.0
        self._clock, self._depth = clock, 0

    def on_start(self, event: Event) -> None:
        if self._depth == 0:
            self._begun_s = self._clock()
        self._depth += 1

    def on_end(self, event: Event) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.total_s += self._clock() - self._begun_s


def seconds_compiling(clock: Callable[[], float]) -> Callable[[], float]:
    """How many of the clock's seconds compiling took since this call; what is kept from an earlier process takes none."""
    stopwatch = _Stopwatch(clock)
    register("numba:compile", stopwatch)  # type: ignore[no-untyped-call]
    return lambda: stopwatch.total_s


def compiled(function: _Function) -> _Function:
    """Compile a function of numbers and of arrays that its callers keep: it makes and returns none. The first call on a machine
    takes seconds, a later process a fraction of one.

    Division follows numpy (no exception for zero), sums keep their order. Nobody counts who uses an array: numba does that by
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
        return cast(_Function, numba.njit(cache=folder is not None, error_model="numpy", **options)(function))
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
