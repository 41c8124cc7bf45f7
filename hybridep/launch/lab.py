"""Emulated datacenters on one Linux machine, for root and ordinary users alike.

Each datacenter is a network namespace joined to one bridge by a veth pair with a token bucket (tbf) at both ends:
what leaves the datacenter is limited to ``up_bytes_per_s``, what enters it to ``down_bytes_per_s``, counted with TCP/IP
and Ethernet headers; processes of the same datacenter talk over loopback, unlimited. There is no delay: the kernel's
netem is absent from many machines, so latencies in the lab are those of the host (tens of microseconds).

Outer half: :func:`run_in_lab` starts a command inside fresh user, mount, network and PID namespaces. When the calling
process ends, also by SIGKILL, the kernel ends every process of the lab and its interfaces vanish with the namespaces.
Inner half: the command finds the lab by :meth:`Lab.current`; it runs on the bridge, from where it reaches every
datacenter.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import psutil

from hybridep.errors import ConfigError, LabUnavailableError
from hybridep.launch import lab_links
from hybridep.launch.host import child_environment

LAB_VARIABLE = "HYBRIDEP_LAB"
"""Environment variable that describes the lab to processes inside, as JSON."""
DC_VARIABLE = "HYBRIDEP_LAB_DC"
"""Environment variable with the name of the datacenter that a process runs in."""
BUILT = "built"
"""What the lab's first process reports once all links are up."""
_MAX_DCS = 200
_BRIDGE_NAMESPACE = "/proc/1/ns/net"
"""Network namespace of the lab's first process, in which the bridge's ports are seen wherever in the lab one asks from."""


@dataclass(frozen=True, kw_only=True)
class LabDatacenter:
    """One emulated datacenter and its access link."""

    name: str
    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """The datacenters of a lab; raises :class:`ConfigError` for names or rates that the emulation cannot carry."""

    dcs: tuple[LabDatacenter, ...]

    def __post_init__(self) -> None:
        names = [dc.name for dc in self.dcs]
        if not 1 <= len(names) <= _MAX_DCS:
            raise ConfigError("lab", "dcs", f"needs 1 to {_MAX_DCS} datacenters, got {len(names)}")
        if len(set(names)) != len(names) or not all(names):
            raise ConfigError("lab", "dcs", f"names must be unique and not empty, got {names}")
        limit = lab_links.MAX_BANDWIDTH_BYTES_PER_S
        for dc in self.dcs:
            for key in ("up_bytes_per_s", "down_bytes_per_s"):
                if not 1 <= getattr(dc, key) <= limit:
                    raise ConfigError("lab", f"{dc.name}.{key}", f"must be 1 to {limit} bytes/s, got {getattr(dc, key)}")

    @classmethod
    def uniform(cls, names: Sequence[str], bandwidth_bytes_per_s: float) -> LabSpec:
        """A lab of these datacenters, each with one rate both up and down."""
        rate = bandwidth_bytes_per_s
        return cls(dcs=tuple(LabDatacenter(name=name, up_bytes_per_s=rate, down_bytes_per_s=rate) for name in names))

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LabSpec:
        """Inverse of :meth:`to_json`."""
        return cls(dcs=tuple(LabDatacenter(**dc) for dc in json.loads(text)["dcs"]))


@dataclass(frozen=True, kw_only=True)
class LabSite:
    """A datacenter of a running lab: where its namespace is, its address, and its port on the bridge."""

    name: str
    namespace: str
    address: str
    port: str


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The running lab, seen by a process inside it, on the bridge or in a datacenter."""

    sites: tuple[LabSite, ...]
    driver_address: str
    """Address of the bridge: reachable from, and able to reach, every datacenter."""

    @classmethod
    def current(cls) -> Lab:
        """The lab this process runs in; :class:`LabUnavailableError` outside of one."""
        text = os.environ.get(LAB_VARIABLE)
        if text is None:
            raise LabUnavailableError("not inside a lab: start the command with `hybridep lab -- COMMAND`")
        fields = json.loads(text)
        return cls(sites=tuple(LabSite(**site) for site in fields["sites"]), driver_address=fields["driver_address"])

    def to_json(self) -> str:
        """Value of the environment variable that :meth:`current` reads."""
        return json.dumps(asdict(self))

    def site(self, dc: str) -> LabSite:
        """The datacenter with this name; :class:`ConfigError` if there is none."""
        for site in self.sites:
            if site.name == dc:
                return site
        raise ConfigError("lab", dc, f"no such datacenter; there are {', '.join(site.name for site in self.sites)}")

    def process_prefix(self, dc: str) -> list[str]:
        """Words to put before a command line so that it runs inside ``dc``."""
        return ["nsenter", f"--net={self.site(dc).namespace}", "--", "env", f"{DC_VARIABLE}={dc}"]

    def spawn(self, dc: str, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` inside ``dc``; ``env`` replaces the environment, ``options`` go to ``Popen``."""
        return subprocess.Popen([*self.process_prefix(dc), *argv], env=env, **options)

    def sent_bytes(self, dc: str) -> int:
        """What ``dc`` sent over its access link since the lab began, as the kernel counts it.

        Linux hands TCP over in pieces that fit the token buckets, with one header each, so this is the payload plus 1 to 5 %,
        while the token buckets charge every 1500-byte packet its own header.
        """
        port = self.site(dc).port
        return lab_links.in_namespace(_BRIDGE_NAMESPACE, lambda: lab_links.received_bytes(port))

    def set_bandwidth(self, dc: str, *, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Change the rates of the access link of ``dc`` at once."""
        site = self.site(dc)
        lab_links.in_namespace(site.namespace, lambda: lab_links.shape(lab_links.UPLINK, up_bytes_per_s))
        lab_links.in_namespace(_BRIDGE_NAMESPACE, lambda: lab_links.shape(site.port, down_bytes_per_s))


def run_in_lab(argv: Sequence[str], spec: LabSpec, more: Mapping[str, str] | None = None) -> int:
    """Run ``argv`` on the bridge of a fresh lab and return its exit code. ``more``: variables beside those of
    ``host.child_environment``.

    The code is 128 + n if signal n ended the command, 127 if it was not found. SIGINT, SIGTERM and SIGHUP are passed on
    while it runs (if called from the main thread). Raises :class:`LabUnavailableError` with the reason, before the
    command has started, where the machine does not allow a lab.
    """
    early, built = list[int](), False
    outer: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if outer is None or not built:
            # The kernel drops what the lab's first process has no handler for yet.
            early.append(number)
            return
        if interrupted_by_terminal(number):
            return
        # unshare itself ignores these signals; its child is the lab's first process.
        process = psutil.Process(outer.pid)
        for target in process.children() or [process]:
            target.send_signal(number)

    reader, writer = os.pipe()
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, forward)
    said = b""
    try:
        with open(reader, "rb", buffering=0) as report:
            try:
                outer = subprocess.Popen(_command(argv, spec, writer), env=child_environment(more), pass_fds=(writer,))
            finally:
                os.close(writer)
            # It is open until the lab ends.
            while chunk := report.read(1 << 12):
                said += chunk
                built = said == BUILT.encode()
                if built and early:
                    # Not before: what unshare has just forked is not yet tied to it.
                    outer.kill()
        code = outer.wait()
    finally:
        if outer is not None:
            outer.kill()
            outer.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if early:
        return 128 + early[0]
    outcome = said.decode()
    if outcome == BUILT or code < 0 or code > 128:
        return code if code >= 0 else 128 - code
    raise LabUnavailableError(outcome or probe_lab() or f"the lab's first process ended with {code} before it began")


def probe_lab() -> str | None:
    """Build and drop a lab of one datacenter (0.3 s): None if that works, else the reason in one line."""
    try:
        command = _command(["true"], LabSpec.uniform(["probe"], 1_000_000), report=1)
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (LabUnavailableError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.stdout == BUILT:
        return None
    detail = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    knobs = "sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, a container's seccomp"
    return f"this machine does not allow user and network namespaces ({detail}); look at {knobs}"


def interrupted_by_terminal(number: int) -> bool:
    """True if the terminal has already sent this signal to every process of the foreground group."""
    try:
        return number == signal.SIGINT and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _command(argv: Sequence[str], spec: LabSpec, report: int) -> list[str]:
    """Command line of the lab; its first process writes ``BUILT`` or the reason why not to the file ``report``."""
    missing = [tool for tool in ("setpriv", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing or sys.platform != "linux":
        raise LabUnavailableError(f"the lab needs Linux and util-linux; not found: {', '.join(missing) or 'Linux'}")
    # setpriv ties unshare's life to ours and --kill-child ties the lab's first process to unshare's.
    isolate = ["--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    inner = [sys.executable, "-m", "hybridep.launch.lab_init", str(report), spec.to_json()]
    return ["setpriv", "--pdeathsig=KILL", "--", "unshare", *isolate, "--", *inner, *argv]
