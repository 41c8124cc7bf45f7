"""Folders of checkpoints: their names, which are complete, and what is cleared away or put aside."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hybridep.errors import UserError

MANIFEST = "manifest.json"
"""In the folder of a checkpoint that is complete."""
PREVIOUS = "previous"
"""Inside a folder of checkpoints: those of the run before."""


def checkpoint_name(step: int) -> str:
    """Of the folder with the state after so many steps."""
    return f"step-{step:08d}"


def is_checkpoint(path: Path) -> bool:
    """Whether it is the folder of a complete checkpoint."""
    return re.fullmatch(r"step-\d{8,}", path.name) is not None and (path / MANIFEST).is_file()


def checkpoints(folder: Path) -> list[Path]:
    """Complete ones on this machine."""
    return [path for path in folder.glob("step-*") if is_checkpoint(path)]


def superseded(folder: Path) -> list[Path]:
    """Those whose name another of as many steps has taken since a run went on from that, as where a site had been away."""
    found = folder.glob("step-*.other-*")
    return [path for path in found if re.fullmatch(r"step-\d{8,}\.other-[0-9a-f]+", path.name) and (path / MANIFEST).is_file()]


def steps_of(path: Path) -> int:
    """Of a checkpoint, by its name."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def clear_partial(folder: Path) -> None:
    """Remove what runs left in a folder of checkpoints that ended while they wrote or replaced one."""
    for path in folder.glob(".step-*.partial*"):
        if path.is_symlink():
            path.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def put_aside(folder: Path) -> None:
    """A run from the start must never be resumed from checkpoints that another one left: they move into ``previous``, in place of
    those there. Whatever else the folder holds stays as it is. Raises UserError where that is not possible."""
    ours, previous = checkpoints(folder) + superseded(folder), folder / PREVIOUS
    if not ours:
        return
    try:
        previous.mkdir(exist_ok=True)
        for old in checkpoints(previous) + superseded(previous):
            if old.is_symlink():
                old.unlink()
            else:
                shutil.rmtree(old)
        for path in ours:
            path.rename(previous / path.name)
    except OSError as error:
        raise UserError(f"checkpoints.folder: {error.filename} cannot be put aside ({error.strerror})") from None
