"""Is a long link's speed a window per round trip for each connection, and do several connections add up?

Two ranks in network namespaces of their own, joined by a delay line: a program that takes packets from one TUN device and hands
them to the other after half a round trip. The kernel's TCP does the rest; its receive window is held at ``window_bytes``.
Beside each time stands the planner's, for a cluster file as ``hybridep probe`` would write it from the measured rates. Then, with
the window that TCP has by default, exchanges beside those in the background.
Needs the right to make network namespaces and TUN devices (root does).
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pyroute2 import IPRoute

from hybridep.commands.tables import write_provenance, write_rows
from hybridep.config import build
from hybridep.topology import Cluster
from hybridep.traffic import Op, OpLevel
from planner.exchange import ExchangeTimes
from runtime.probe_links import STREAMS, window

HERE = Path(__file__).resolve().parent
COLUMNS = ["round_trip_ms", "window_bytes", "message_bytes", "streams", "seconds", "least_s", "most_s"]
COLUMNS += ["bytes_per_s", "cap_bytes_per_s", "predicted_s"]
BACKGROUND_COLUMNS = ["round_trip_ms", "window_bytes", "message_bytes", "streams", "seconds", "background_s"]
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 9000
_RANK = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from runtime.transport import Transport
rank, address, port, size, repeats, streams = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:7])
send = sys.argv[7]
torch.set_num_threads(1)
store = dist.TCPStore(address, port, None, rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
transport = Transport(timeout_s=60, streams={"far": streams})
message = torch.arange(size, dtype=torch.int64).to(torch.uint8)
for repeat in range(repeats + 1):
    arrived = torch.zeros_like(message)
    dist.barrier()
    start = time.perf_counter()
    if rank == 0:
        getattr(transport, send)({1: message}, {}, "message@far")
    else:
        getattr(transport, send)({}, {0: arrived}, "message@far")
        assert torch.equal(arrived, message)
        if repeat:
            print(time.perf_counter() - start)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="one case each: does it run?")
    given = parser.parse_args()
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    rows = []
    for round_trip_s in config["round_trips_s"]:
        line = DelayLine(round_trip_s / 2, config["window_bytes"])
        here = []
        try:
            for number, streams in enumerate(config["streams"]):
                taken = line.measure(config["message_bytes"], config["repeats"], streams, port=20_000 + number)
                here.append(row(config, round_trip_s, streams, taken))
        finally:
            line.close()
        for one, predicted in zip(here, predicted_s(here, round_trip_s), strict=True):
            rows.append(one | {"predicted_s": round(predicted, 4)})
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    write_rows(given.results / "rows.csv", rows, COLUMNS)
    write_rows(given.results / "background.csv", background_rows(config), BACKGROUND_COLUMNS)
    write_provenance(given.results)
    return 0


def background_rows(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Each message as an exchange, and in the background as copies that set out early, in turn."""
    rows = []
    for round_trip_s in config["round_trips_s"]:
        line = DelayLine(round_trip_s / 2, config["background"]["window_bytes"])
        try:
            for streams in config["background"]["streams"]:
                case = {"message_bytes": config["background"]["message_bytes"], "repeats": config["repeats"], "streams": streams}
                plain_s, background_s = (
                    statistics.median(line.measure(**case, port=20_000 + 2 * streams + number, send=send))
                    for number, send in enumerate(("exchange", "exchange_in_background"))
                )
                rows.append(
                    {
                        "round_trip_ms": round(round_trip_s * 1e3, 3),
                        "window_bytes": config["background"]["window_bytes"],
                        "message_bytes": case["message_bytes"],
                        "streams": streams,
                        "seconds": round(plain_s, 4),
                        "background_s": round(background_s, 4),
                    }
                )
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        finally:
            line.close()
    return rows


def row(config: dict[str, Any], round_trip_s: float, streams: int, taken: list[float]) -> dict[str, Any]:
    seconds = statistics.median(taken)
    return {
        "round_trip_ms": round(round_trip_s * 1e3, 3),
        "window_bytes": config["window_bytes"],
        "message_bytes": config["message_bytes"],
        "streams": streams,
        "seconds": round(seconds, 4),
        "least_s": round(min(taken), 4),
        "most_s": round(max(taken), 4),
        "bytes_per_s": round(config["message_bytes"] / seconds),
        "cap_bytes_per_s": round(config["window_bytes"] * streams / round_trip_s),
    }


def predicted_s(rows: list[dict[str, Any]], round_trip_s: float) -> list[float]:
    """What the planner expects of each row's message, with the window and the rate that a probe finds in the rows."""
    rates = {one["streams"]: one["message_bytes"] / (one["seconds"] - round_trip_s / 2) for one in rows}
    probed = {streams: rate for streams, rate in rates.items() if streams in STREAMS}
    held = window(probed, round_trip_s)
    level = {"name": "far", "size": 2, "bandwidth": f"{max(probed.values())} B/s", "latency": f"{round_trip_s / 2} s"}
    level |= {} if held is None else {"window": f"{held} B"}
    gpu = {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 TB/s"}
    cluster = build(Cluster, {"name": "far", "levels": [level], "gpu": gpu}, "far")
    return [
        ExchangeTimes(cluster=cluster, streams={"far": one["streams"]}).exchange_s(
            OpLevel(Op.EXPERT_GATHER, 0), np.array([[0.0, one["message_bytes"]], [0.0, 0.0]])
        )
        for one in rows
    ]


class DelayLine:
    """Two network namespaces, and a process that carries packets between them, ``delay_s`` each way."""

    def __init__(self, delay_s: float, window_bytes: int) -> None:
        self._ends = [_end(number, window_bytes) for number in range(2)]
        self._carrier = os.fork()
        if not self._carrier:
            _carry([tun for _, tun in self._ends], delay_s)
            os._exit(0)

    def measure(self, message_bytes: int, repeats: int, streams: int, port: int, send: str = "exchange") -> list[float]:
        """Seconds of each message from the first rank to the second; ``send``: which of a transport's ways."""
        return [float(line) for line in self.run_ranks(_RANK, port, message_bytes, repeats, streams, send)[1].split()]

    def run_ranks(self, program: str, port: int, *further: object) -> list[str]:
        """What ``program`` prints as each rank; its arguments: rank, address and port of the rendezvous, and ``further`` ones."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "far", "PYTHONPATH": str(HERE.parents[1])}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, *map(str, (rank, _address(0), port, *further))],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda namespace=namespace: _enter(namespace),
            )
            for rank, (namespace, _) in enumerate(self._ends)
        ]
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed: see above")
        return outputs

    def close(self) -> None:
        """End the carrier; the namespaces go with their last file."""
        os.kill(self._carrier, 15)
        os.waitpid(self._carrier, 0)
        for files in self._ends:
            for file in files:
                os.close(file)


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _end(number: int, window_bytes: int) -> tuple[int, int]:
    """(open namespace, open TUN device inside it)."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise SystemExit("this experiment needs the right to make network namespaces")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"far", _IFF_TUN | _IFF_NO_PI))
    with IPRoute() as netlink:
        netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
        far = netlink.link_lookup(ifname="far")[0]
        netlink.addr("add", index=far, address=_address(number), prefixlen=24)
        netlink.link("set", index=far, state="up", mtu=_MTU, txqlen=10_000)
    # Half of the buffer is for the kernel's own records (tcp_adv_win_scale 1): the window that it announces is the other half.
    for name in ("tcp_rmem", "tcp_wmem"):
        Path(f"/proc/sys/net/ipv4/{name}").write_text(f"4096 {2 * window_bytes} {2 * window_bytes}\n")
    _enter(home)
    os.close(home)
    return namespace, tun


def _carry(tuns: list[int], delay_s: float) -> None:
    """Packets of each device to the other one, each after the delay; for ever."""
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        now_s = time.monotonic()
        due_s = [queue[0][0] for queue in waiting if queue]
        select.select(tuns, [], [], max(min(due_s) - now_s, 0.0) if due_s else None)
        for tun, queue in zip(tuns, waiting, strict=True):
            try:
                while True:
                    queue.append((time.monotonic() + delay_s, os.read(tun, _MTU)))
            except BlockingIOError:
                pass
        now_s = time.monotonic()
        for queue, other in zip(waiting, reversed(tuns), strict=True):
            while queue and queue[0][0] <= now_s:
                os.write(other, queue.popleft()[1])


if __name__ == "__main__":
    sys.exit(main())
