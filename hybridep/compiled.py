"""Functions over arrays that are compiled to machine code when they are first called, and kept on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Timer
from types import FrameType
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
        made: Any = numba.njit(**options)(function)
    finally:
        config.CACHE_DIR = before
    compile_for = made.compile

    def compile_undisturbed(*arguments: Any) -> Any:
        with _signals_wait():
            return compile_for(*arguments)

    made.compile = compile_undisturbed
    return cast(_Function, made)


_handlers: dict[int, Any] = {}
"""Of Ctrl-C and SIGTERM, while something is compiled, ..."""
_taken: list[int] = []
"""... and those that came meanwhile."""


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM come when a function, or one that it calls, has been compiled. LLVM calls Python back, where an
    exception that a handler raises is lost, and with it the signal and the function's code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    now: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Whoever ignores a signal, or is ended by it at once, still is.
    ours = {number: handler for number, handler in now.items() if callable(handler) and handler is not _take}
    _handlers.update(ours)
    try:
        for number in ours:
            signal.signal(number, _take)
        yield
    finally:
        for number, handler in ours.items():
            if signal.getsignal(number) is _take:  # else one that came has changed what the next one does
                signal.signal(number, handler)
        _hand_over()


def _hand_over() -> None:
    if _taken:
        number = _taken.pop(0)
        try:
            _handlers[number](number, None)
        finally:
            _hand_over()


def _take(number: int, _frame: FrameType | None) -> None:
    _taken.append(number)


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
