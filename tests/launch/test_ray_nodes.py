"""Ray nodes of our own: labelled, one per datacenter, and gone with whoever started them, however that ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from hybridep.launch.host import child_environment

pytestmark = pytest.mark.timeout(150)

OWNER = """
import sys, time
import psutil
from hybridep.launch.ray_nodes import RayNodes, places_on_loopback
with RayNodes(places_on_loopback(["oslo", "rome"]), 1) as nodes:
    print(nodes.address, *(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("by_kill", [False, True])
def test_nothing_outlives_the_owner(by_kill: bool) -> None:
    command = [sys.executable, "-c", OWNER]
    owner = subprocess.Popen(command, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdin is not None
        address, *pids = owner.stdout.readline().split()
        assert address.startswith("127.0.0.2:")
        family = [psutil.Process(int(pid)) for pid in pids]
        names = [process.name() for process in family]
        assert names.count("raylet") == 2 and names.count("gcs_server") == 1
        if by_kill:
            owner.send_signal(signal.SIGKILL)
        else:
            owner.stdin.close()
        assert owner.wait(timeout=30) == (-signal.SIGKILL if by_kill else 0)
        deadline = time.monotonic() + 30
        while any(process.is_running() for process in family) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [process for process in family if process.is_running()] == []
    finally:
        owner.kill()
        owner.wait()
