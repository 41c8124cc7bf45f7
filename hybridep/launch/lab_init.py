"""First process inside the lab's namespaces: builds the links, runs the command, passes signals and exit code on.

Started by :func:`hybridep.launch.lab.run_in_lab`, never by hand. It is process 1 of its PID namespace, so when it ends
the kernel ends every process of the lab with it, and it has to reap orphans.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from hybridep.launch import lab_links
from hybridep.launch.lab import BUILT, LAB_VARIABLE, Lab, LabSite, LabSpec, interrupted_by_terminal

_SUBNET = "10.77.0"
_PREFIX_LENGTH = 24
_FIRST_DC_ADDRESS = 10


def build(spec: LabSpec) -> Lab:
    """Make the namespaces and links of ``spec`` from inside fresh user, network and PID namespaces."""
    lab_links.add_bridge(f"{_SUBNET}.1", _PREFIX_LENGTH)
    sites = []
    for index, dc in enumerate(spec.dcs):
        # The open file holds the namespace, and others reach it through this process: no mount and no file to clean up.
        namespace = f"/proc/{os.getpid()}/fd/{lab_links.new_namespace()}"
        address = f"{_SUBNET}.{_FIRST_DC_ADDRESS + index}"
        site = LabSite(name=dc.name, namespace=namespace, address=address, port=lab_links.dc_port(index))
        lab_links.attach(site.port, namespace, address, _PREFIX_LENGTH)
        sites.append(site)
    lab = Lab(sites=tuple(sites), driver_address=f"{_SUBNET}.1")
    for dc in spec.dcs:
        lab.set_bandwidth(dc.name, up_bytes_per_s=dc.up_bytes_per_s, down_bytes_per_s=dc.down_bytes_per_s)
    return lab


def run_as_init(argv: list[str], environment: dict[str, str], ready: Callable[[], None]) -> int:
    """Run ``argv``, forward signals to it, reap every orphan, and return its exit code (128 + n for signal n). ``ready`` is
    called once no signal is lost any more."""
    command: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if interrupted_by_terminal(number):
            return
        if command is None:
            early.append(number)
        else:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(command.pid, number)

    # Before the command starts: the kernel drops what a namespace's first process has no handler for.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    ready()
    try:
        command = subprocess.Popen(argv, env=environment)
    except OSError as error:
        print(f"hybridep lab: cannot run {argv[0]!r}: {error.strerror}", file=sys.stderr)
        return 127
    for early_number in tuple(early):
        with suppress(ProcessLookupError):
            os.kill(command.pid, early_number)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == command.pid:
            command.returncode = os.waitstatus_to_exitcode(status)
            return command.returncode if command.returncode >= 0 else 128 - command.returncode


def main() -> int:
    """``python -m hybridep.launch.lab_init REPORT_FILE_DESCRIPTOR SPEC_JSON COMMAND...``."""
    report, spec, argv = int(sys.argv[1]), LabSpec.from_json(sys.argv[2]), sys.argv[3:]
    try:
        lab = build(spec)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # whatever refused the lab is the outer half's to raise
        os.write(report, f"{type(error).__name__}: {error}".splitlines()[0].encode())
        return 1

    def tell() -> None:
        os.write(report, BUILT.encode())
        os.close(report)

    return run_as_init(argv, {**os.environ, LAB_VARIABLE: lab.to_json()}, tell)


if __name__ == "__main__":
    sys.exit(main())
