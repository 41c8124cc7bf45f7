"""What a process must know of its machine: its interface, its environment, and how to end with its parent."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

import hybridep
from hybridep.errors import UserError

_PR_SET_PDEATHSIG = 1


def interface_of(address: str) -> str:
    """Name of the network interface that carries an IPv4 address; UserError when this machine has no such address."""
    interfaces = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    if ipaddress.ip_address(address).is_loopback:
        # The whole of 127/8 is this machine, though only one address of it is listed.
        loopback = [n for n, entries in interfaces.items() if any(entry.address == "127.0.0.1" for entry in entries)]
        if loopback:
            return loopback[0]
    known = sorted(entry.address for entries in interfaces.values() for entry in entries if entry.family == socket.AF_INET)
    raise UserError(f"no network interface here has the address {address}; there are {', '.join(known)}")


def free_port(address: str) -> int:
    """A TCP port that the operating system picked on ``address`` a moment ago, for programs that cannot pick their own."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child of another folder or namespace: the packages stay importable, and several
    ranks of one machine do not start a thread per core each."""
    root = str(Path(hybridep.__file__).resolve().parent.parent)
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return {**environment, **(extra or {})}


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that ends; ends it now if the parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
