"""Ray nodes of our own, one per datacenter, for clusters that are emulated on this machine.

    python -m hybridep.launch.ray_nodes RANKS_PER_DC COMMAND...     (inside a lab)

starts a node in each datacenter of the lab, the head in the first, and runs the command there with RAY_ADDRESS set: a Ray
driver must sit on one of the cluster's nodes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hybridep.errors import HybridEPError, UserError
from hybridep.launch.host import child_environment, free_port, supervise
from hybridep.launch.lab import Lab, interrupted_by_terminal
from hybridep.launch.lab_links import in_namespace

START_TIMEOUT_S = 120.0
_STOP_S = 15.0
_GPUS = "CUDA_VISIBLE_DEVICES"
_HOLD = "hold"
_LOG_BYTES = 1 << 20
_OBJECT_STORE_BYTES = 80_000_000
"""About the least that Ray accepts; nothing large passes through it."""

# Ray's defaults take over a minute to notice a node that is frozen or cut off, or that the head is gone. Several seconds
# per check, because eight ranks that start on two cores keep a healthy node from answering sooner.
DETECTION = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}

# Ray runs its workers at 15, where two other busy processes leave a rank on two cores a thirtieth of one: a step then takes
# seconds. Still above 0, so that nodes answer health checks while all ranks compute.
WORKERS = {"RAY_worker_niceness": "5"}


class RayStartError(HybridEPError):
    """A Ray node did not come up on this machine."""


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Where one node runs: its label, its address and, in a lab, the words that enter its namespace."""

    dc: str
    address: str
    prefix: tuple[str, ...] = ()
    namespace: str | None = None


def places_in_lab(lab: Lab) -> list[NodePlace]:
    """One place per datacenter of the lab."""
    return [
        NodePlace(dc=site.name, address=site.address, prefix=tuple(lab.process_prefix(site.name)), namespace=site.namespace)
        for site in lab.sites
    ]


def places_on_loopback(dcs: Sequence[str]) -> list[NodePlace]:
    """One loopback address per datacenter: 127.0.0.2, 127.0.0.3 and so on (Linux owns the whole of 127/8)."""
    return [NodePlace(dc=dc, address=f"127.0.{(i + 2) // 256}.{(i + 2) % 256}") for i, dc in enumerate(dcs)]


class RayNodes:
    """A context in which the nodes run; ``address`` is what Ray drivers connect to. The first place holds the head."""

    def __init__(self, places: Sequence[NodePlace], cpus_per_node: int) -> None:
        self._places, self._cpus = list(places), cpus_per_node
        self._folder = Path()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._logs: list[int] = []
        """File descriptors."""
        self.address = ""

    def __enter__(self) -> RayNodes:
        require_labels([place.dc for place in self._places])
        # A short path: Ray keeps Unix sockets deep below it, and the kernel allows them 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="hybridep-"))
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        head = self._places[0]
        port = in_namespace(head.namespace, lambda: free_port(head.address)) if head.namespace else free_port(head.address)
        self.address = f"{head.address}:{port}"
        self._nodes.append(self._start_node(0, ["--head", f"--port={port}", "--include-dashboard=false"]))
        deadline = time.monotonic() + START_TIMEOUT_S
        self._wait([0], deadline)
        for index in range(1, len(self._places)):
            self._nodes.append(self._start_node(index, [f"--address={self.address}"]))
        self._wait(range(1, len(self._places)), deadline)

    def _start_node(self, index: int, options: list[str]) -> subprocess.Popen[bytes]:
        place, folder = self._places[index], self._folder / str(index)
        folder.mkdir()
        words = [
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={place.address}",
            f"--labels=dc={place.dc}",
            f"--num-cpus={self._cpus}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            # Of its own: nodes that start together in one session folder take each other's sockets.
            f"--temp-dir={folder}",
            *options,
        ]
        holder = [sys.executable, "-m", "hybridep.launch.ray_nodes", _HOLD, str(os.getpid()), str(folder)]
        command = [*place.prefix, *holder, *words]
        # In memory: it is read when the node has ended, whose holder takes the folder along.
        self._logs.append(log := os.memfd_create("start.log"))
        return subprocess.Popen(
            command,
            env=child_environment(DETECTION | WORKERS | gpus_of(index, len(self._places), _gpus())),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _wait(self, indices: Sequence[int], deadline: float) -> None:
        """``ray start`` leaves the cluster's address in its folder once the node is up."""
        for index in indices:
            while not (self._folder / str(index) / "ray_current_cluster").exists():
                place, code = self._places[index], self._nodes[index].poll()
                if code is not None or time.monotonic() > deadline:
                    what = f"ended with {code}" if code is not None else f"was not up after {START_TIMEOUT_S:g} s"
                    log = os.pread(self._logs[index], _LOG_BYTES, 0).decode(errors="replace")
                    lines = [line for line in log.splitlines() if line.strip()] or ["no output"]
                    raise RayStartError(f"the Ray node of {place.dc} at {place.address} {what}: {lines[-1]}; try --local")
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            try:
                node.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        self._nodes = []
        while self._logs:
            os.close(self._logs.pop())
        shutil.rmtree(self._folder, ignore_errors=True)


def gpus_of(index: int, nodes: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment in which one of so many nodes of this machine finds its share of the machine's GPUs; they share them where
    there are fewer."""
    return {_GPUS: ",".join(gpus[index::nodes] or [gpus[index % len(gpus)]])} if gpus else {}


def _gpus() -> list[str]:
    """Those that this process may use, as CUDA names them."""
    given = os.environ.get(_GPUS)
    if given is not None:
        return [name for name in given.split(",") if name]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def require_labels(dcs: Sequence[str]) -> None:
    """Raises UserError for a site whose name Ray does not take as the value of a label."""
    for dc in dcs:
        if not re.fullmatch(r"(?=.{1,63}\Z)[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", dc):
            raise UserError(
                f"site {dc!r}: Ray labels nodes with the names of sites: at most 63 letters, digits, '-', '_' and '.', of which "
                "the first and the last are letters or digits; rename it, or do without Ray (--local)"
            )


def hold_node(parent: str, folder: str, options: Sequence[str]) -> int:
    """The process above one node: ends everything that the node started, and removes its folder."""
    try:
        command = [sys.executable, "-m", "hybridep.launch.ray_backend", "node", str(os.getpid()), *options]
        return supervise(command, int(parent))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the last node takes the common folder along, should its owner have been killed
            Path(folder).parent.rmdir()


def main() -> int:
    """Entry point inside a lab; see the module's docstring."""
    if sys.argv[1] == _HOLD:
        return hold_node(sys.argv[2], sys.argv[3], sys.argv[4:])
    ranks_per_dc, argv = int(sys.argv[1]), sys.argv[2:]
    lab = Lab.current()
    # Until the command is there to have them.
    for early in (signal.SIGINT, signal.SIGTERM):
        signal.signal(early, lambda number, _: sys.exit(128 + number))
    try:
        with RayNodes(places_in_lab(lab), ranks_per_dc) as nodes:
            command = [*lab.process_prefix(lab.sites[0].name), *argv]
            process = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": nodes.address})

            def forward(number: int, _frame: FrameType | None) -> None:
                if not interrupted_by_terminal(number):
                    process.send_signal(number)

            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, forward)
            code = process.wait()
    except HybridEPError as error:
        print(f"hybridep lab: {error}", file=sys.stderr)
        return error.exit_code
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
