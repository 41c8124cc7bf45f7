"""Connections between ranks keep a sender's order, and their threads wait their turn; others of the process are left alone."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from rank_pool import RankPool

from runtime.event_threads import waiting_their_turn
from runtime.sockets import UNSENT_BYTES, between_ranks

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
        with between_ranks():
            meanwhile = socket.create_connection(server.getsockname())
        with meanwhile, socket.create_connection(server.getsockname()) as after:
            assert _limit_bytes(meanwhile) == UNSENT_BYTES != usual_bytes
            assert _limit_bytes(before) == _limit_bytes(after) == usual_bytes
            kept = [one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for one in (before, meanwhile, after)]
            assert kept == [0, 1, 0]
            # Sooner than firewalls forget a connection.
            assert meanwhile.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 120
            meanwhile.sendall(b"still open")


def _policies_of_gloo(rank: int) -> set[int]:
    """How the threads that serve this rank's connections are scheduled."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]
    return {os.sched_getscheduler(int(task.name)) for task in tasks}


@pytest.mark.skipif(os.sched_getscheduler(0) != os.SCHED_OTHER, reason="this process is scheduled in a way of its own")
def test_the_threads_of_connections_wait_their_turn() -> None:
    with RankPool(2) as ranks:
        assert ranks.run(_policies_of_gloo) == [{os.SCHED_BATCH}] * 2


@pytest.mark.skipif(os.sched_getscheduler(0) != os.SCHED_OTHER, reason="this process is scheduled in a way of its own")
def test_only_threads_started_meanwhile_wait_their_turn() -> None:
    leave = threading.Event()
    threads = [threading.Thread(target=leave.wait, daemon=True) for _ in range(3)]
    threads[0].start()
    with waiting_their_turn():
        threads[1].start()
    threads[2].start()
    found = [os.sched_getscheduler(thread.native_id or 0) for thread in threads]
    leave.set()
    assert found == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]
