"""Functions over arrays that are compiled to machine code when they are first called, and kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function, inline: Literal["never", "always"] = "never") -> _Function:
    """Compile a function of arrays and numbers. The first call on a machine takes seconds, a later process a fraction of one.

    Division follows numpy (no exception for zero), sums keep their order.
    """
    config: Any = numba.config
    before, folder = config.CACHE_DIR, _cache_folder(function.__module__.partition(".")[0])
    # numba looks at a function's own file only, and would go on using callers of a function that has changed.
    config.CACHE_DIR = folder or ""
    try:
        return cast(_Function, numba.njit(cache=folder is not None, error_model="numpy", inline=inline)(function))
    finally:
        config.CACHE_DIR = before


def inlined(function: _Function) -> _Function:
    """As ``compiled``, with a copy wherever it is called: to pass tuples of arrays takes longer than short functions do."""
    return compiled(function, "always")


@cache
def _cache_folder(package: str) -> str | None:
    """A folder of the user's for exactly those sources of a package that speak of compiled code: those that have some, or what it
    uses. None where none can be made, and every process compiles anew."""
    sources = hashlib.sha256()
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
