"""Folders of a run: each held by one run at a time, or for as long as it takes."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridep.errors import HybridEPError, UserError
from hybridep.launch.lab import LAB_VARIABLE

LOCK_FILE = ".hybridep.lock"


@contextmanager
def held(key: str, folder: Path) -> Iterator[None]:
    """No other process has ``folder`` meanwhile. Raises UserError that begins with ``key`` where one has it already, or its disk
    is full. The kernel lets go when this process ends, however that ends; a lock file that was left is no obstacle."""
    path = folder / LOCK_FILE
    lock = _locked(key, path)
    try:
        with _writing(key, path):
            os.ftruncate(lock, 0)
            # In a lab processes have other numbers than outside.
            if LAB_VARIABLE not in os.environ:
                os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def _writing(key: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be written ({error.strerror})") from None


def _locked(key: str, path: Path) -> int:
    """File descriptor of the lock file, locked."""
    while True:
        with _writing(key, path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(lock, 256, 0).decode(errors="replace")
            os.close(lock)
            by = f"another run ({who})" if who else "another run"
            raise UserError(f"{key}: {path.parent} is in use by {by}; wait for its end, or give another folder") from None
        except OSError:
            return lock  # a file system without locks
        # Whoever held it before may have removed the file since it was opened here.
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            return lock
        os.close(lock)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, which stays where an error names something in it: the log of a rank."""
    folder, is_named = Path(tempfile.mkdtemp(prefix="hybridep-")), False
    try:
        yield folder
    except HybridEPError as error:
        is_named = str(folder) in str(error)
        raise
    finally:
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)
