"""Netlink half of the lab: namespaces, a bridge, veth pairs and token buckets, without ``ip`` and ``tc``."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pyroute2 import IPRoute

from hybridep.errors import LabUnavailableError

Result = TypeVar("Result")

BRIDGE = "lab0"
UPLINK = "uplink"
"""Name of the one interface (beside loopback) that a process in a datacenter sees."""

_CLONE_NEWNET = 0x40000000
_TBF_HANDLE = 0x10000
# What a bucket has saved up during a pause passes at once: an exchange of 400 kB over 50 Mbit/s took 0.8 of its bytes over
# the rate with 80 kB. So buckets are small, and so are the pieces (GSO) that TCP hands over, which must fit: else the
# kernel cuts them up and the CPU becomes the bottleneck. At high rates it would be, too, with small pieces.
_BURST_S = 2.5e-4
_SMALLEST_BURST_BYTES = 6_000
_SEGMENT_SHARE = 0.8
_LARGEST_SEGMENT_BYTES = 65_536
# Far above what the senders' windows can put in flight: a queue that drops would measure loss recovery, not bandwidth.
_QUEUE_BYTES = 512_000_000
MAX_BANDWIDTH_BYTES_PER_S = 4_000_000_000
"""The token bucket keeps its rate in 32 bits."""


def dc_port(index: int) -> str:
    """Name of the bridge's interface that leads to the datacenter with this index."""
    return f"dc{index}"


def new_namespace() -> int:
    """Make an empty network namespace and return an open file that keeps it alive (the caller stays where it was)."""

    def leave() -> int:
        _libc_call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    return _in_thread(leave)


def in_namespace(path: str, work: Callable[[], Result]) -> Result:
    """Run ``work()`` inside the network namespace at ``path``, in a thread of its own: setns moves one thread only."""

    def enter() -> Result:
        enter_namespace(path)
        return work()

    return _in_thread(enter)


def enter_namespace(path: str) -> None:
    """Move this thread, and those that it starts from now on, into the network namespace at ``path``."""
    namespace = os.open(path, os.O_RDONLY)
    try:
        _libc_call("setns", namespace, _CLONE_NEWNET)
    finally:
        os.close(namespace)


def add_bridge(address: str, prefix_length: int) -> None:
    """Make the bridge that joins all datacenters and give it the driver's address."""
    with IPRoute() as netlink:
        netlink.link("set", index=_index(netlink, "lo"), state="up")
        netlink.link("add", ifname=BRIDGE, kind="bridge")
        bridge = _index(netlink, BRIDGE)
        netlink.addr("add", index=bridge, address=address, prefixlen=prefix_length)
        netlink.link("set", index=bridge, state="up")


def attach(port: str, namespace: str, address: str, prefix_length: int) -> None:
    """Join the namespace to the bridge by a veth pair: ``port`` on the bridge, ``uplink`` (with ``address``) inside."""
    namespace_file = os.open(namespace, os.O_RDONLY)
    try:
        with IPRoute() as netlink:
            netlink.link("add", ifname=port, kind="veth", peer={"ifname": UPLINK, "net_ns_fd": namespace_file})
            netlink.link("set", index=_index(netlink, port), master=_index(netlink, BRIDGE), state="up")
    finally:
        os.close(namespace_file)

    def inside() -> None:
        with IPRoute() as netlink:
            netlink.link("set", index=_index(netlink, "lo"), state="up")
            uplink = _index(netlink, UPLINK)
            netlink.addr("add", index=uplink, address=address, prefixlen=prefix_length)
            netlink.link("set", index=uplink, state="up")
        # Loss-based everywhere: a host that defaults to BBR shares a bucket unevenly and adds up to 30 % to exchanges.
        # Reno is the one algorithm that every kernel has and every user may choose.
        with suppress(OSError), open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as setting:
            setting.write("reno")

    in_namespace(namespace, inside)


def shape(interface: str, bandwidth_bytes_per_s: float) -> None:
    """Limit what leaves ``interface`` of the current namespace; a second call replaces the rate."""
    burst_bytes = max(_SMALLEST_BURST_BYTES, int(bandwidth_bytes_per_s * _BURST_S))
    segment_bytes = min(_LARGEST_SEGMENT_BYTES, int(burst_bytes * _SEGMENT_SHARE))
    with IPRoute() as netlink:
        index = _index(netlink, interface)
        netlink.link("set", index=index, IFLA_GSO_MAX_SIZE=segment_bytes)
        netlink.tc(
            "replace",
            kind="tbf",
            index=index,
            handle=_TBF_HANDLE,
            rate=int(bandwidth_bytes_per_s),
            burst=burst_bytes,
            limit=_QUEUE_BYTES,
        )


def received_bytes(interface: str) -> int:
    """What ``interface`` of the current namespace has received."""
    with IPRoute() as netlink:
        return int(netlink.get_links(_index(netlink, interface))[0].get_attr("IFLA_STATS64")["rx_bytes"])


def _index(netlink: IPRoute, interface: str) -> int:
    found = netlink.link_lookup(ifname=interface)
    if not found:
        raise LabUnavailableError(f"network interface {interface!r} does not exist in this namespace")
    return int(found[0])


def _libc_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise LabUnavailableError(f"{name}(CLONE_NEWNET) was refused: {os.strerror(code)}")


def _in_thread(work: Callable[[], Result]) -> Result:
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="lab-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
