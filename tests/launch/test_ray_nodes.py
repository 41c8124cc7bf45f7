"""Ray nodes of our own on loopback, where no lab is possible; gone with whoever started them, however that ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch_cases import left_running

from hybridep.launch.host import child_environment
from hybridep.launch.lab import probe_lab

pytestmark = pytest.mark.timeout(150)

OWNER = """
import sys, time
import psutil
from hybridep.launch.ray_nodes import RayNodes, places_on_loopback
with RayNodes(places_on_loopback(["oslo", "rome"]), 1) as nodes:
    print(nodes.address, *(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
"""


@pytest.mark.turns(2)
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


def test_without_namespaces_training_goes_on_unshaped_and_says_so(run_file: Path) -> None:
    outside = [sys.executable, "-m", "hybridep.cli"]
    if probe_lab() is None:
        # In a user namespace whose own limit of further user namespaces is zero, the kernel refuses for real.
        refuse = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
        outside = ["unshare", "--user", "--map-root-user", "sh", "-c", refuse, "sh", *outside]
    train = [*outside, "train", str(run_file), "--json", "--set", "steps=2"]
    done = subprocess.run(train, env=child_environment(), capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["shaped"] is False and summary["backend"] == "ray" and "unshaped" in done.stderr
    assert left_running(run_file) == []
    done = subprocess.run([*outside, "lab", "--", "true"], env=child_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "does not allow user and network namespaces" in done.stderr
