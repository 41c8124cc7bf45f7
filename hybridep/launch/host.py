"""What a process must know of its machine: its interface, its environment, and how to end with its parent."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

import hybridep
from hybridep.errors import UserError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0


def interface_of(address: str) -> str:
    """Name of the network interface that carries an IPv4 address; UserError when this machine has no such address, or another one
    comes first there: connections are told the interface only, and take that."""
    interfaces = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        found = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if address in found[:1]:
            return name
        if address in found:
            raise UserError(
                f"network interface {name} has the address {found[0]} before {address}, and ranks would listen there; start this "
                f"machine's Ray node with --node-ip-address={found[0]}, or make {address} the first"
            )
    if ipaddress.ip_address(address).is_loopback:
        # The whole of 127/8 is this machine, though only one address of it is listed.
        loopback = [n for n, entries in interfaces.items() if any(entry.address == "127.0.0.1" for entry in entries)]
        if loopback:
            return loopback[0]
    known = sorted(entry.address for entries in interfaces.values() for entry in entries if entry.family == socket.AF_INET)
    raise UserError(f"no network interface here has the address {address}; there are {', '.join(known)}")


def allow_open_files() -> None:
    """As many as the system lets this process have: a rank has a connection to each other one for each of its groups."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where more than that is not allowed after all it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_port(address: str) -> int:
    """A TCP port that the operating system picked on ``address`` a moment ago, for programs that cannot pick their own."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


_OF_RANKS = {"OMP_NUM_THREADS": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
"""Unless they are set. Both capacities are 1024 otherwise, which came to hundreds of megabytes a rank."""


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child of another folder or namespace: the packages stay importable, several ranks of one
    machine do not start a thread per core each, and torch does not keep code for every number of rows that a bf16 product had."""
    root = str(Path(hybridep.__file__).resolve().parent.parent)
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
    }
    return {**_OF_RANKS, **environment, **(extra or {})}


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however that ends; ends it now if the parent is
    gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans(adopt: bool) -> None:
    """Whether processes below this one whose parents end become its children, instead of process 1's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def supervise(argv: Sequence[str], parent_pid: int) -> int:
    """Run a command and return its exit code (128 + n for signal n); whatever it has started ends with it, and with the
    parent of this process: also what has put itself in the background."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    adopt_orphans(True)
    die_with_parent(parent_pid, signal.SIGTERM)
    command = subprocess.Popen(argv)
    try:
        code = command.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_descendants()
    return code if code >= 0 else 128 - code


def _end_descendants() -> None:
    deadline = time.monotonic() + _END_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
