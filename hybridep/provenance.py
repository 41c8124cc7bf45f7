"""Where a result comes from: versions, commit, host and time, to be stored beside it."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

_PACKAGES = ("hybridep", "torch", "ray", "PuLP", "highspy", "numpy")


def provenance() -> dict[str, str | int]:
    """Facts of this process; packages that are not installed are left out."""
    facts: dict[str, str | int] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    commit = _commit()
    return facts | _versions() | ({"commit": commit} if commit else {})


@cache
def _versions() -> dict[str, str]:
    """Versions of installed packages by their names in small letters; looked for once, since a search makes dozens of plans and
    this takes 25 ms."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package.lower()] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _commit() -> str:
    """Commit of the source tree, with ``+`` when it has changes; empty outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip()
