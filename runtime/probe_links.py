"""Measures each ordered pair of sites by itself, by message size and number of connections; what leaves and enters each site;
and how much computation and exchanges slow each other.

While a pair or a site is measured all other ranks wait, so what is found is what it gets where nothing else moves.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from hybridep.plan import MOST_STREAMS
from runtime.barrier import Barrier
from runtime.device import settle
from runtime.mesh import Mesh
from runtime.probe_compute import square
from runtime.transport import Transport

SIZES_BYTES = (2**16, 2**18, 2**20, 2**23)
STREAMS = (1, 2, MOST_STREAMS)
_MOST_BYTES = 2**26
_PINGS = 10
_MOST_REPEATS = 5
_CONTENTION_BYTES = 2**22
_ACCESS_REPEATS = 3
_ANSWER_BYTES = 8
_CLEARLY_FASTER = 1.5
"""Than one connection are several, where its window holds it; two are by some of that. Less may be noise."""


@dataclass(frozen=True, kw_only=True)
class PairPoint:
    """What messages of one size get over so many connections."""

    size_bytes: int
    streams: int
    bytes_per_s: float
    """With the latency in it."""


@dataclass(frozen=True, kw_only=True)
class PairProbe:
    """From one site to another; sites by number."""

    src: int
    dst: int
    latency_s: float
    """Half a round trip of almost no bytes."""
    bandwidth_bytes_per_s: float
    """Of the largest message over one connection, the latency left out; where several are clearly faster, over those."""
    points: tuple[PairPoint, ...]
    window_bytes: float | None = None
    """What one connection had under way, where several were clearly faster; None where one fills the link."""


@dataclass(frozen=True, kw_only=True)
class AccessProbe:
    """Rates of a site while nothing else moves."""

    site: str
    up_bytes_per_s: float | None
    """Of all that its ranks send to all other sites at once; None where there are none, as of what is next."""
    down_bytes_per_s: float | None
    pod_bytes_per_s: float | None
    """Of what each of its pods sends to all others of them at once; None for a site of one."""


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Of one rank, all ranks doing the same."""

    products_per_s: float
    products_per_s_beside: float
    """While exchanges between sites run."""
    bytes_per_s: float
    """Sent in exchanges between sites."""
    bytes_per_s_beside: float
    """While products run."""


def probe_pairs(mesh: Mesh, barrier: Barrier, *, seconds: float, timeout_s: float) -> tuple[PairProbe, ...]:
    """Pairs that this rank, the first of its site, is the source of. All ranks call it; each point takes about ``seconds``."""
    transport = Transport(timeout_s=timeout_s, streams={_level(streams): streams for streams in STREAMS})
    inner = mesh.world_size // mesh.sizes[0]
    found = []
    for src, dst in permutations(range(mesh.sizes[0]), 2):
        barrier.wait()
        if mesh.rank == src * inner:
            found.append(_source(transport, src, dst, dst * inner, seconds))
        elif mesh.rank == dst * inner:
            _destination(transport, src * inner)
    barrier.wait()
    return tuple(found)


def _level(streams: int) -> str:
    return f"pair over {streams}"


def _source(transport: Transport, src: int, dst: int, peer: int, seconds: float) -> PairProbe:
    def round_trip_s(size_bytes: int, streams: int) -> float:
        _tell(transport, peer, size_bytes, streams)
        message, answer = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(_ANSWER_BYTES, dtype=torch.uint8)
        start_s = time.perf_counter()
        transport.exchange({peer: message}, {peer: answer}, f"probe@{_level(streams)}")
        return time.perf_counter() - start_s

    round_trip_s(_ANSWER_BYTES, 1)
    pings_s = [round_trip_s(_ANSWER_BYTES, 1) for _ in range(_PINGS)]
    there_and_back_s = statistics.median(pings_s)
    latency_s = there_and_back_s / 2
    points: list[PairPoint] = []
    rates: dict[int, float] = {}
    for streams in STREAMS:
        for size_bytes in SIZES_BYTES:
            # The first one also opens the connections' windows.
            repeats = max(1, min(_MOST_REPEATS, int(seconds / round_trip_s(size_bytes, streams))))
            taken_s = statistics.median(round_trip_s(size_bytes, streams) for _ in range(repeats))
            # The answer is never the slower half, whatever the pings took.
            there_s = max(taken_s - latency_s, taken_s / 2)
            points.append(PairPoint(size_bytes=size_bytes, streams=streams, bytes_per_s=size_bytes / there_s))
            # Of pings that waited for a processor only the shortest says how long the way is.
            bytes_s = max(taken_s - there_and_back_s, (taken_s - min(pings_s)) / 2)
            rates[streams] = size_bytes / (bytes_s if bytes_s > 0 else there_s)
    _tell(transport, peer, 0, 1)
    window_bytes = window(rates, there_and_back_s)
    return PairProbe(
        src=src,
        dst=dst,
        latency_s=latency_s,
        bandwidth_bytes_per_s=rates[1] if window_bytes is None else max(rates.values()),
        points=tuple(points),
        window_bytes=window_bytes,
    )


def probe_access(
    mesh: Mesh, barrier: Barrier, pairs: Sequence[PairProbe], *, seconds: float, timeout_s: float
) -> tuple[AccessProbe, ...]:
    """Of each site; all ranks call it with the pairs that they have measured, and rank 0's clock counts. Messages are as long as
    the ways that they take are fast alone, so that a slow one of many does not decide. Each rate takes some times ``seconds``."""
    cluster, own, inner = mesh.plan.cluster, mesh.location[0], mesh.world_size // mesh.sizes[0]
    transport = Transport(timeout_s=timeout_s, streams={_level(STREAMS[-1]): STREAMS[-1]})
    gathered = barrier.gather_json([(pair.src, pair.dst, pair.bandwidth_bytes_per_s) for pair in pairs])
    alone = {(src, dst): rate for one in barrier.share_json(gathered) for src, dst, rate in one}

    def rate(ways: list[tuple[int, int]]) -> float:
        """All bytes from workers of the outermost level to others, a second."""
        fastest = max(alone[way] for way in ways)

        def size_of(way: tuple[int, int], most_bytes: int) -> int:
            return max(_ANSWER_BYTES, int(most_bytes * alone[way] / fastest))

        def taken_s(most_bytes: int) -> float:
            sends = {mesh.peer(0, dst): size_of((src, dst), most_bytes) for src, dst in ways if src == own}
            receives = {mesh.peer(0, src): size_of((src, dst), most_bytes) for src, dst in ways if dst == own}
            leaving, arriving = (
                {peer: torch.zeros(size, dtype=torch.uint8) for peer, size in sizes.items()} for sizes in (sends, receives)
            )
            barrier.wait()
            start_s = time.perf_counter()
            transport.exchange(leaving, arriving, f"probe@{_level(STREAMS[-1])}")
            barrier.wait()
            return barrier.agree(time.perf_counter() - start_s)

        most_bytes = SIZES_BYTES[0]
        while taken_s(most_bytes) < seconds and most_bytes < _MOST_BYTES:
            most_bytes *= 4
        empty_s, whole_s = (statistics.median(taken_s(size) for _ in range(_ACCESS_REPEATS)) for size in (0, most_bytes))
        return inner * sum(size_of(way, most_bytes) for way in ways) / max(whole_s - empty_s, 1e-9)

    found = []
    for site, pods in Counter(cluster.datacenters).items():
        to = {
            what: [way for way in alone if [cluster.datacenters[end] == site for end in way] == list(ends)]
            for what, ends in (("up", (True, False)), ("down", (False, True)), ("pods", (True, True)))
        }
        found.append(
            AccessProbe(
                site=site,
                up_bytes_per_s=rate(to["up"]) if to["up"] else None,
                down_bytes_per_s=rate(to["down"]) if to["down"] else None,
                pod_bytes_per_s=rate(to["pods"]) / pods if to["pods"] else None,
            )
        )
    return tuple(found)


def window(rates_bytes_per_s: Mapping[int, float], round_trip_s: float) -> float | None:
    """Bytes that one connection had under way, from the rates of so many connections; None where more of them are not clearly
    faster, as when one fills the link."""
    alone = rates_bytes_per_s[1]
    several = [rate / alone for streams, rate in sorted(rates_bytes_per_s.items()) if streams > 1]
    if max(several, default=0.0) < _CLEARLY_FASTER or several[0] < _CLEARLY_FASTER**0.5:
        return None
    return alone * round_trip_s


def _destination(transport: Transport, peer: int) -> None:
    order = torch.zeros(2, dtype=torch.int64)
    while True:
        transport.exchange({}, {peer: order}, "probe orders")
        size_bytes, streams = (int(number) for number in order)
        if not size_bytes:
            return
        label = f"probe@{_level(streams)}"
        transport.exchange({}, {peer: torch.zeros(size_bytes, dtype=torch.uint8)}, label)
        transport.exchange({peer: torch.zeros(_ANSWER_BYTES, dtype=torch.uint8)}, {}, label)


def _tell(transport: Transport, peer: int, size_bytes: int, streams: int) -> None:
    """The destination must post its receive before the clock runs."""
    transport.exchange({peer: torch.tensor([size_bytes, streams])}, {}, "probe orders")


def probe_contention(mesh: Mesh, barrier: Barrier, *, seconds: float, timeout_s: float) -> Contention:
    """All ranks call it; takes about three times ``seconds``."""
    transport = Transport(timeout_s=timeout_s)
    peers = [mesh.peer(0, coordinate) for coordinate in range(mesh.sizes[0]) if coordinate != mesh.location[0]]
    content = torch.zeros(_CONTENTION_BYTES, dtype=torch.uint8, device=mesh.device)
    a = square(mesh.device)

    def exchange() -> None:
        transport.exchange(dict.fromkeys(peers, content), {peer: torch.empty_like(content) for peer in peers}, "probe@contention")

    def products(until: threading.Event, done: list[float]) -> None:
        number, start_s = 0, time.perf_counter()
        while not until.is_set():
            torch.mm(a, a)
            settle(mesh.device)
            number += 1
        done.append(number / (time.perf_counter() - start_s))

    def exchanges_per_s(rounds: int) -> float:
        barrier.wait()
        start_s = time.perf_counter()
        for _ in range(rounds):
            exchange()
        return rounds / (time.perf_counter() - start_s)

    rates: list[float] = []
    barrier.wait()
    ended = threading.Timer(seconds, (alone := threading.Event()).set)
    ended.start()
    products(alone, rates)
    exchange()
    rounds = max(1, int(barrier.agree(seconds * exchanges_per_s(1))))
    moved = exchanges_per_s(rounds)
    worker = threading.Thread(target=products, args=(stop := threading.Event(), rates))
    barrier.wait()
    worker.start()
    moved_beside = exchanges_per_s(rounds)
    stop.set()
    worker.join()
    size_bytes = len(peers) * _CONTENTION_BYTES
    return Contention(
        products_per_s=rates[0],
        products_per_s_beside=rates[1],
        bytes_per_s=moved * size_bytes,
        bytes_per_s_beside=moved_beside * size_bytes,
    )
