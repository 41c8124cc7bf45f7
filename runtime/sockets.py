"""What the operating system does with the connections between ranks.

How much of a message it may hold before it leaves. A send counts as done when the kernel has taken the bytes, and it takes
megabytes. Then the order in which a rank sends is not the order in which the network sees its messages: those of all peers lie
in sockets side by side and share the link as TCP pleases, and the last to finish keep other links idle. With little unsent data
the sender's order holds (experiments/link-use measures both).

And it says now and then that an idle connection is in use. Firewalls and address translation forget those that are silent for
minutes, as ranks that meet at checkpoints only are; what is sent then is lost without a word.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNSENT_BYTES = 64 << 10
"""Per connection; a link of 10 Gbit/s takes 50 us to send them, about what it takes to wake the sender."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 20}
"""Seconds of silence, between words to who does not answer, and how many of these: until nobody waits any more (``barrier``)."""
_OPEN_FILES = Path("/proc/self/fd")


@contextmanager
def between_ranks() -> Iterator[None]:
    """All TCP connections that this process opens meanwhile keep little unsent and stay known on the way; where the system does
    not know such an option, without it."""
    before = _sockets()
    yield
    wanted = {"TCP_NOTSENT_LOWAT": UNSENT_BYTES, **_KEEP_ALIVE}
    options = [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]
    for inode, descriptor in _sockets().items():
        if inode not in before:
            # Another descriptor of the same connection, so that closing it closes nothing; not all sockets are TCP's.
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                for option, value in options:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _sockets() -> dict[int, int]:
    """Inode -> descriptor of this process's sockets."""
    found = {}
    for entry in _OPEN_FILES.iterdir() if _OPEN_FILES.is_dir() else ():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                found[entry.stat().st_ino] = int(entry.name)
    return found
