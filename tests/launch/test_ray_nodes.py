"""Ray nodes of our own on loopback, where no lab is possible; gone with whoever started them, however that ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_cases import left_running

from hybridep.errors import UserError
from hybridep.launch.host import child_environment
from hybridep.launch.lab import probe_lab
from hybridep.launch.ray_nodes import RayNodes, RayStartError, gpus_of, places_on_loopback, require_labels

pytestmark = pytest.mark.timeout(150)

OWNER = """
import sys, time
import psutil
from hybridep.launch.ray_nodes import RayNodes, places_on_loopback
with RayNodes(places_on_loopback(["oslo", "rome"]), 1) as nodes:
    print(nodes.address, *(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
"""


@pytest.mark.turns(3)
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


def test_a_node_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", partial(misled, subprocess.Popen))
    with pytest.raises(RayStartError, match=r"node of oslo at 127\.0\.0\.2 ended with 7: it is broken; try --local"):
        RayNodes(places_on_loopback(["oslo"]), 1).__enter__()
    assert list(tmp_path.iterdir()) == []


def misled(popen: Callable[..., Any], command: list[str], **settings: Any) -> Any:
    """Starts a holder that says something, takes its folder along and ends."""
    folder = command[command.index("hold") + 2]
    return popen(["sh", "-c", 'echo "it is broken"; rm -r "$1"; exit 7', "sh", folder], **settings)


def test_nodes_of_one_machine_share_out_its_gpus() -> None:
    def shared(nodes: int, *gpus: str) -> list[str]:
        return [gpus_of(index, nodes, gpus)["CUDA_VISIBLE_DEVICES"] for index in range(nodes)]

    assert shared(2, *"01234567") == ["0,2,4,6", "1,3,5,7"] and shared(3, *"0123") == ["0,3", "1", "2"]
    assert shared(4, "5", "7") == ["5", "7", "5", "7"] and gpus_of(0, 4, []) == {}


@pytest.mark.parametrize("name", ["São Paulo", "-x", "x.", "a b", "x" * 64, "a\n"])
def test_sites_that_ray_cannot_label_are_named(name: str) -> None:
    with pytest.raises(UserError, match=r"Ray labels nodes with the names of sites.*--local") as caught:
        RayNodes(places_on_loopback(["oslo", name]), 1).__enter__()
    assert f"site {name!r}" in str(caught.value)
    require_labels(["oslo", "us-east_1.a", "x" * 63, "7"])


@pytest.mark.turns(3)
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
