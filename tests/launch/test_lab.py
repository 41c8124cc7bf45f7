"""Emulated datacenters: shaping, counters, exit codes, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil
import pytest

from hybridep.errors import ConfigError, LabUnavailableError
from hybridep.launch.host import child_environment
from hybridep.launch.lab import Lab, LabSpec, run_in_lab

pytestmark = pytest.mark.timeout(60)

PRELUDE = """
import socket, sys, time
from hybridep.launch.lab import Lab
lab = Lab.current()
PYTHON = sys.executable

# A sink in datacenter b that reports how long n bytes took from the first to the last.
SINK = '''
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    peer, _ = server.accept()
    got, begin = 0, time.perf_counter()
    while piece := peer.recv(1 << 20):
        got += len(piece)
    print(got, time.perf_counter() - begin, flush=True)
'''
SOURCE = '''
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).sendall(bytes(int(sys.argv[3])))
'''

def sink(dc):
    process = lab.spawn(dc, [PYTHON, "-c", SINK, lab.site(dc).address], stdout=-1, text=True)
    return process, process.stdout.readline().strip()

def send(dc, to, port, size):
    return lab.spawn(dc, [PYTHON, "-c", SOURCE, lab.site(to).address, port, str(size)])
"""


def run_inside(program: str, tmp_path: Path) -> int:
    script = tmp_path / "inside.py"
    script.write_text(PRELUDE + textwrap.dedent(program))
    return run_in_lab([sys.executable, str(script)], LabSpec.uniform(["a", "b"], 20e6))


@pytest.mark.lab
def test_links_are_shaped_and_counted(tmp_path: Path) -> None:
    program = """
        size = 8_000_000
        process, port = sink("b")
        before = lab.sent_bytes("a")
        send("a", "b", port, size).wait()
        got, seconds = process.stdout.readline().split()
        after = lab.sent_bytes("a")
        ideal_s = size / 20e6
        assert int(got) == size
        assert 0.9 * ideal_s < float(seconds) < 1.5 * ideal_s, seconds
        assert size <= after - before <= 1.02 * size, (before, after)

        # The driver on the bridge reaches b, through b's downlink only.
        lab.set_bandwidth("b", up_bytes_per_s=40e6, down_bytes_per_s=10e6)
        socket.create_connection((lab.site("b").address, int(port))).sendall(bytes(size))
        seconds = float(process.stdout.readline().split()[1])
        assert 0.9 * size / 10e6 < seconds < 1.5 * size / 10e6, seconds

        # Neighbours in one datacenter do not cross the access link.
        before = lab.sent_bytes("b")
        send("b", "b", port, size).wait()
        assert float(process.stdout.readline().split()[1]) < 0.1 * ideal_s
        assert lab.sent_bytes("b") - before < 0.02 * size
    """
    assert run_inside(program, tmp_path) == 0


@pytest.mark.lab
def test_exit_codes_pass_through() -> None:
    spec = LabSpec.uniform(["a"], 1e6)
    assert run_in_lab(["sh", "-c", "exit 7"], spec) == 7
    assert run_in_lab(["sh", "-c", "kill -KILL $$"], spec) == 128 + signal.SIGKILL
    assert run_in_lab(["/no/such/program"], spec) == 127


OUTER = """
import sys
from hybridep.launch.lab import LabSpec, run_in_lab
sys.exit(run_in_lab(["sh", "-c", sys.argv[1], "sh", *sys.argv[2:]], LabSpec.uniform(["a", "b"], 1e6)))
"""


def _start_outer(*arguments: str) -> subprocess.Popen[str]:
    """A process that holds a lab, once the lab's command has said that it is up."""
    command = [sys.executable, "-c", OUTER, *arguments]
    outer = subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert outer.stdout is not None and outer.stdout.readline() == "up\n"
    return outer


@pytest.mark.lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_command(number: signal.Signals) -> None:
    # Not a loop in the shell: dash now and then loses a SIGINT that comes while it starts a command.
    exits = "import signal, sys, time; [signal.signal(n, lambda *_: sys.exit(3)) for n in (2, 15)]; print('up', flush=True)"
    outer = _start_outer('exec "$1" -c "$2"', sys.executable, f"{exits}; time.sleep(1000)")
    try:
        outer.send_signal(number)
        assert outer.wait(timeout=20) == 3
    finally:
        outer.kill()
        outer.communicate()


@pytest.mark.lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.0, 0.15])
def test_no_signal_is_lost_while_a_lab_is_built(number: signal.Signals, after_s: float) -> None:
    """Its first process has no handlers then, and the kernel drops what has none there."""
    marker = uuid.uuid4().hex
    command = [sys.executable, "-c", OUTER, "exec sleep 1000", marker]
    outer = subprocess.Popen(command, env=child_environment(), stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while len(_marked(marker)) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(after_s)
        outer.send_signal(number)
        assert outer.wait(timeout=10) == 128 + number
        while _marked(marker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _marked(marker) == []
    finally:
        outer.kill()
        outer.wait()


@pytest.mark.lab
def test_nothing_is_left_after_the_outer_process_is_killed() -> None:
    marker = uuid.uuid4().hex
    # Orphans: one of them in a session of its own inside a datacenter: no group, parent or terminal ties it to us.
    spin = "sh -c 'while :; do sleep 0.1; done' $1 >/dev/null 2>&1 &"
    outer = _start_outer(f"(setsid nsenter --net=/proc/1/fd/$2 {spin}); ({spin}); echo up; wait; sleep 1000", marker, "3")
    try:
        deadline, namespaces = time.monotonic() + 20, set[str]()
        # Outer, unshare, first process, command, and the orphans, of which one enters a datacenter after it has started.
        while (len(_marked(marker)) < 5 or len(namespaces) < 2) and time.monotonic() < deadline:
            time.sleep(0.05)
            namespaces = {_network_namespace(process) for process in _marked(marker)} - {_network_namespace(psutil.Process()), ""}
        assert len(_marked(marker)) >= 5 and len(namespaces) >= 2
        outer.kill()
        outer.wait(timeout=10)
        while _marked(marker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _marked(marker) == []
        # A marked shell's own `sleep 0.1` may end a moment later than it.
        while (left := namespaces & _network_namespaces()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    finally:
        outer.kill()
        outer.communicate()


def _network_namespaces() -> set[str]:
    return {_network_namespace(process) for process in psutil.process_iter()}


def _marked(marker: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if marker in (process.info["cmdline"] or [])]


def _network_namespace(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/net")
    except OSError:
        return ""


@pytest.mark.lab
def test_a_refusing_kernel_is_reported_in_one_line() -> None:
    program = (
        "from hybridep.launch.lab import *\n"
        "try:\n    run_in_lab(['true'], LabSpec.uniform(['a'], 1e6))\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    # In a user namespace whose own limit of further user namespaces is zero, the kernel refuses for real.
    refuse = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", refuse, sys.executable, program]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith("LabUnavailableError this machine does not allow user and network namespaces")
    assert done.stdout.count("\n") == 1


def test_wrong_specs_name_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unique"):
        LabSpec.uniform(["a", "a"], 1e6)
    with pytest.raises(ConfigError, match=r"a\.up_bytes_per_s"):
        LabSpec.uniform(["a"], 0)
    spec = LabSpec.uniform(["a", "b"], 1e6)
    assert LabSpec.from_json(spec.to_json()) == spec
    monkeypatch.delenv("HYBRIDEP_LAB", raising=False)
    with pytest.raises(LabUnavailableError, match="not inside a lab"):
        Lab.current()
