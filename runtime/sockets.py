"""How much of a message the operating system may hold before it leaves.

A send counts as done when the kernel has taken the bytes, and it takes megabytes. Then the order in which a rank sends is not
the order in which the network sees its messages: those of all peers lie in sockets side by side and share the link as TCP
pleases, and the last to finish keep other links idle. With little unsent data the sender's order holds
(experiments/link-use measures both).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNSENT_BYTES = 64 << 10
"""Per connection; a link of 10 Gbit/s takes 50 us to send them, about what it takes to wake the sender."""
_OPEN_FILES = Path("/proc/self/fd")


@contextmanager
def keeping_little_unsent() -> Iterator[None]:
    """Of all TCP connections that this process opens meanwhile; without effect where the system has no such limit."""
    before = _sockets()
    yield
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is None:
        return
    for inode, descriptor in _sockets().items():
        if inode not in before:
            # Another descriptor of the same connection, so that closing it closes nothing; not all sockets are TCP's.
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


def _sockets() -> dict[int, int]:
    """Inode -> descriptor of this process's sockets."""
    found = {}
    for entry in _OPEN_FILES.iterdir() if _OPEN_FILES.is_dir() else ():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                found[entry.stat().st_ino] = int(entry.name)
    return found
