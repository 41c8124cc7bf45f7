"""Connections between ranks keep a sender's order; others of the process are left alone."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from rank_pool import RankPool

from runtime.sockets import UNSENT_BYTES, keeping_little_unsent

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system has no such limit"),
]


def _limit_bytes(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


def _peers_limits_bytes(rank: int) -> list[int]:
    """Of this rank's connections to others; pipes, listening sockets and the rendezvous have no such limit."""
    limits = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            if one.type == socket.SOCK_STREAM and one.family == socket.AF_INET and _limit_bytes(one) == UNSENT_BYTES:
                limits.append(one.getpeername()[1])
    return limits


def test_ranks_reach_each_other_over_limited_connections() -> None:
    with RankPool(3) as ranks:
        assert all(len(peers) == 2 for peers in ranks.run(_peers_limits_bytes))


def test_only_what_is_opened_meanwhile_is_limited() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as before:
        usual_bytes = _limit_bytes(before)
        with keeping_little_unsent():
            meanwhile = socket.create_connection(server.getsockname())
        with meanwhile, socket.create_connection(server.getsockname()) as after:
            assert _limit_bytes(meanwhile) == UNSENT_BYTES != usual_bytes
            assert _limit_bytes(before) == _limit_bytes(after) == usual_bytes
            meanwhile.sendall(b"still open")
