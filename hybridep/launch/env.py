"""Environment variables and ports that processes of a run need; nothing here starts anything."""

from __future__ import annotations

import ipaddress
import math
import socket

import psutil

from hybridep.errors import UserError


def interface_of(address: str) -> str:
    """Name of the network interface that carries ``address`` in the current network namespace.

    Raises :class:`UserError` that lists the addresses there are.
    """
    wanted = ipaddress.ip_address(address)
    present: list[str] = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            plain = entry.address.partition("%")[0]  # an IPv6 link-local address ends in %interface
            if ipaddress.ip_address(plain) == wanted:
                return name
            present.append(f"{plain} ({name})")
    raise UserError(f"no interface of this machine has the address {address}; it has {', '.join(present) or 'none'}")


def free_port(address: str) -> int:
    """A TCP port that is free on ``address`` now. Raises :class:`UserError` if the machine does not have the address.

    Another process may take it before it is used: whoever binds it must be ready to ask for the next one.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise UserError(f"cannot bind a port of {address}: {error.strerror}") from error
        return int(probe.getsockname()[1])


def rank_environment(address: str) -> dict[str, str]:
    """Variables of a process that exchanges data under ``address`` of this machine; set before the process group.

    Without the interface, gloo takes the one that the host's name resolves to, often loopback. One thread for numerics: a
    run has a process per rank, and threads of several ranks on the same cores only get into each other's way.
    """
    return {"GLOO_SOCKET_IFNAME": interface_of(address), "OMP_NUM_THREADS": "1"}


def ray_head_environment(detection_s: float, round_trip_s: float = 0.0) -> dict[str, str]:
    """Variables of Ray's head node so that a frozen node is given up after about ``detection_s`` seconds (default: 66 s).

    Three missed checks are needed, and each check may take three round trips: a shorter ``detection_s`` is lengthened,
    since taking a slow link for a dead node would stop the run.
    """
    if not detection_s > 0 or not round_trip_s >= 0:
        raise UserError(f"detection_s must be positive and round_trip_s not negative, got {detection_s} and {round_trip_s}")
    failures = 3
    # A check starts `period` after the last one ended and fails after `timeout`; the two share the time equally.
    interval_s = max(detection_s / (2 * failures), 3 * round_trip_s)
    interval_ms = str(math.ceil(interval_s * 1000))
    prefix = "RAY_health_check_"
    return {
        f"{prefix}initial_delay_ms": interval_ms,
        f"{prefix}period_ms": interval_ms,
        f"{prefix}timeout_ms": interval_ms,
        f"{prefix}failure_threshold": str(failures),
    }
