"""Measures what a cluster file must know: links by level, and computation, with all ranks busy at once.

The numbers are those of the cost model's formulas, taken with the code that trains. A bandwidth has in it what it takes to
pack and unpack.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hybridep.baselines import Baseline, baseline_plan
from hybridep.run import Device
from hybridep.topology import Cluster
from hybridep.traffic import Op
from hybridep.workload import Workload
from runtime.barrier import Barrier
from runtime.device import choose_device, settle
from runtime.device_links import device_links
from runtime.mesh import Mesh, close_process_group, join_timeout_s, open_process_group
from runtime.probe_codecs import CodecProbe, probe_codecs
from runtime.probe_compute import ComputeProbe, Timing, probe_compute, seconds_of, square
from runtime.probe_links import (
    STREAMS,
    AccessProbe,
    Contention,
    PairPoint,
    PairProbe,
    probe_access,
    probe_contention,
    probe_pairs,
)
from runtime.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_Measured = TypeVar("_Measured", "LevelProbe", ComputeProbe, CodecProbe, Contention)

_TIMEOUT_S = 60.0
"""After which an exchange has failed. While one pair's messages take as long the other ranks wait at a barrier."""
_SMALL_BYTES, _FIRST_BYTES, _LARGEST_BYTES = 8, 2**15, 2**26
_REPEATS = 5
_BANDWIDTH_REPEATS = 9
"""More than of the others: TCP needs some exchanges to recover when packets were lost."""
_IN_A_ROW = 8
"""Exchanges of almost nothing that are timed together, so that what ranks take to meet counts little."""
_CODEC_SHARE = 0.1
"""Of the time of other measurements: there are many codecs."""
_ALTERNATIONS = 10
"""Of computation and an exchange of almost nothing."""
_PRODUCTS = 4
"""Before an exchange: about 2 ms on one core, 8 where four ranks share it. After shorter ones
ranks are less far apart than in a training; after longer ones no farther (7.7, 8.2 and 7.2 ms more after 8, 30 and 90 ms)."""


@dataclass(frozen=True, kw_only=True)
class LevelProbe:
    """One level's links."""

    name: str
    latency_s: float
    """Of one exchange in which every rank sends one message of almost no bytes, all ranks at once."""
    bandwidth_bytes_per_s: float
    """Of one worker's up link while all ranks send."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was measured; levels of one worker have no links and are left out, and so is the outermost one where sites have pods,
    of which ``pairs`` and ``access`` tell."""

    levels: tuple[LevelProbe, ...]
    message_overhead_s: float
    """Of each message of an exchange beyond a rank's first."""
    jitter_s: float
    """What an exchange that follows computation takes longer."""
    compute: ComputeProbe
    """Of one rank that of its site, if that was asked for; of all together that of the slowest."""
    codecs: tuple[CodecProbe, ...] = ()
    pairs: tuple[PairProbe, ...] = ()
    """Of sites, each pod by itself; of one rank those that it is the source of. Measured only when asked for, as is what
    follows."""
    access: tuple[AccessProbe, ...] = ()
    """Of sites."""
    site_compute: tuple[tuple[str, ComputeProbe], ...] = ()
    """Of each site, where it was asked for; of all ranks together only."""
    several: LevelProbe | None = None
    """The outermost level over as many connections per pair of ranks as pairs were measured with at most."""
    contention: Contention | None = None

    @property
    def window_bytes(self) -> float | None:
        """What one connection between sites has under way, where that held some pair: the median of these."""
        held = [pair.window_bytes for pair in self.pairs if pair.window_bytes is not None]
        return statistics.median(held) if held else None


def probe(
    cluster: Cluster,
    workload: Workload,
    *,
    rank: int,
    store: Store,
    seconds: float = 0.3,
    thorough: bool = False,
    device: Device = Device.AUTO,
) -> Probe:
    """Measure as one rank; all ranks of ``cluster`` call it. ``seconds`` is about how long each measurement of a link or of
    computation lasts; ``thorough`` measures pairs of sites and contention, too. ``store`` is the rendezvous and ``device`` where
    the rank computes, as for ``trainer.train``. Raises TransportError when a peer is gone."""
    torch.set_num_threads(1)
    open_process_group(store, rank=rank, world_size=cluster.num_gpus, timeout_s=join_timeout_s(cluster))
    try:
        return _probe(cluster, workload, rank=rank, seconds=seconds, thorough=thorough, device=device)
    finally:
        close_process_group()


def _probe(
    cluster: Cluster,
    workload: Workload,
    *,
    rank: int,
    seconds: float,
    thorough: bool,
    device: Device,
) -> Probe:
    """As ``probe``, in a process group that is open."""
    workload = workload.for_one_rank()
    mesh = Mesh(plan=baseline_plan(cluster, workload, Baseline.EP), rank=rank, device=choose_device(device, rank))
    barrier = Barrier(rank=rank, world_size=mesh.world_size)
    links, numbers = device_links(mesh, timeout_s=_TIMEOUT_S), mesh.label_numbers
    transport = Transport(timeout_s=_TIMEOUT_S, device_links=links, numbers=numbers)
    # What joins pods of one site, and what joins sites, an exchange of all of them would tell of together.
    first = 0 if len({*cluster.datacenters}) == mesh.sizes[0] else 1
    found = [
        _level(mesh, transport, barrier, level, seconds) for level, size in enumerate(mesh.sizes) if size > 1 and level >= first
    ]
    alike = [other for other, site in enumerate(cluster.rank_datacenters) if site == cluster.rank_datacenters[rank]]
    compute = probe_compute(
        cluster,
        workload,
        rank=rank,
        barrier=barrier,
        transport=transport,
        seconds=seconds,
        device=mesh.device,
        ranks=alike if thorough else None,
    )
    codecs = probe_codecs(workload, Timing(barrier, seconds * _CODEC_SHARE, mesh.device, least=2))
    pairs: tuple[PairProbe, ...] = ()
    access: tuple[AccessProbe, ...] = ()
    several: LevelProbe | None = None
    contention: Contention | None = None
    if thorough and mesh.sizes[0] > 1:
        pairs = probe_pairs(mesh, barrier, seconds=seconds, timeout_s=_TIMEOUT_S)
        access = probe_access(mesh, barrier, pairs, seconds=seconds, timeout_s=_TIMEOUT_S)
        if not first:
            many = Transport(timeout_s=_TIMEOUT_S, streams={cluster.levels[0].name: STREAMS[-1]}, numbers=numbers)
            several, _, _ = _level(mesh, many, barrier, 0, seconds)
        contention = probe_contention(mesh, barrier, seconds=seconds, timeout_s=_TIMEOUT_S)
    further_s = [each_s for _, each_s, _ in found if each_s is not None]
    return Probe(
        levels=tuple(level for level, _, _ in found),
        jitter_s=statistics.fmean(each_s for _, _, each_s in found) if found else 0.0,
        message_overhead_s=statistics.fmean(further_s) if further_s else 0.0,
        compute=compute,
        codecs=codecs,
        pairs=pairs,
        access=access,
        several=several,
        contention=contention,
    )


def probe_of(fields: dict[str, Any]) -> Probe:
    """Inverse of ``dataclasses.asdict``."""
    levels = tuple(LevelProbe(**level) for level in fields["levels"])
    codecs = tuple(CodecProbe(**codec) for codec in fields["codecs"])
    pairs = tuple(
        PairProbe(**{**pair, "points": tuple(PairPoint(**point) for point in pair["points"])}) for pair in fields["pairs"]
    )
    access = tuple(AccessProbe(**site) for site in fields["access"])
    inner = {"levels": levels, "compute": ComputeProbe(**fields["compute"]), "codecs": codecs, "pairs": pairs, "access": access}
    several = fields["several"] and LevelProbe(**fields["several"])
    contention = fields["contention"] and Contention(**fields["contention"])
    return Probe(**{**fields, **inner, "site_compute": (), "several": several, "contention": contention})


def summarise(probes: Sequence[Probe], sites: Sequence[str] = ()) -> Probe:
    """One cluster's numbers from those of all its ranks: medians, so that one rank's hiccup does not decide. ``sites``: of each
    rank, where each measured what computation takes at its own."""
    by_site: dict[str, list[ComputeProbe]] = {}
    for site, one in zip(sites, probes, strict=False):
        by_site.setdefault(site, []).append(one.compute)
    site_compute = {site: _medians(same) for site, same in by_site.items()}
    slowest = min(site_compute.values(), key=lambda one: one.throughput_flops_per_s, default=None)
    several = [one.several for one in probes if one.several is not None]
    contentions = [one.contention for one in probes if one.contention is not None]
    return Probe(
        levels=tuple(_medians(same) for same in zip(*(each.levels for each in probes), strict=True)),
        jitter_s=statistics.median(one.jitter_s for one in probes),
        message_overhead_s=statistics.median(one.message_overhead_s for one in probes),
        compute=slowest or _medians([one.compute for one in probes]),
        codecs=tuple(_medians(same) for same in zip(*(each.codecs for each in probes), strict=True)),
        pairs=tuple(sorted((pair for one in probes for pair in one.pairs), key=lambda pair: (pair.src, pair.dst))),
        access=probes[0].access,
        site_compute=tuple(site_compute.items()),
        several=_medians(several) if several else None,
        contention=_medians(contentions) if contentions else None,
    )


def _medians(same: Sequence[_Measured]) -> _Measured:
    """Of every number."""
    numbers = (field.name for field in fields(same[0]) if isinstance(getattr(same[0], field.name), float))
    return replace(same[0], **{name: statistics.median(getattr(one, name) for one in same) for name in numbers})


def _timed(barrier: Barrier, device: torch.device, work: Callable[[], object], repeats: int, rounds: int = 1) -> float:
    """Seconds of one ``work`` when all ranks start ``rounds`` of them together, as this rank saw it: the median. Ranks leave a
    barrier one after the other, so the first to leave would count that as part of an exchange."""

    def several() -> None:
        for _ in range(rounds):
            work()

    work()
    settle(device)
    taken = []
    for _ in range(repeats):
        barrier.wait()
        taken.append(seconds_of(several, device) / rounds)
    return statistics.median(taken)


def _level(
    mesh: Mesh, transport: Transport, barrier: Barrier, level: int, seconds: float
) -> tuple[LevelProbe, float | None, float]:
    """The level's links; what each further message of an exchange takes, where a rank has more than one peer; and what
    an exchange takes longer that follows computation."""
    name, size, own = mesh.plan.cluster.levels[level].name, mesh.sizes[level], mesh.location[level]
    # As tokens travel in training: between GPUs of a site perhaps by links of their own.
    label, timed = mesh.label(Op.TOKEN_DISPATCH, level), partial(_timed, barrier, mesh.device)

    def exchange(distances: Sequence[int], size_bytes: int, rounds: int = 1) -> Callable[[], None]:
        to = [mesh.peer(level, (own + distance) % size) for distance in distances]
        come_from = [mesh.peer(level, (own - distance) % size) for distance in distances]
        content = torch.zeros(size_bytes, dtype=torch.uint8, device=mesh.device)

        def work() -> None:
            awaited = []
            for _ in range(rounds):
                receives = {peer: torch.empty_like(content) for peer in come_from}
                awaited.append((receives, transport.post(receives, label)))
            for receives, posted in awaited:
                # As copies are: laid one after the other here, and added up there.
                posted.exchange({peer: content.clone() for peer in to})
                total = torch.zeros_like(content)
                for message in receives.values():
                    total += message

        return work

    everybody = range(1, size)
    # In training most receives are posted an exchange ahead, which spares half a round trip.
    latency_s, ahead_s = (
        timed(exchange(distances, _SMALL_BYTES, _IN_A_ROW), _REPEATS) / _IN_A_ROW for distances in ([1], everybody)
    )
    further_s = max(ahead_s - latency_s, 0.0) / (size - 2) if size > 2 else None
    all_s = timed(exchange(everybody, _SMALL_BYTES), _REPEATS, _IN_A_ROW)
    jitter_s = max(_amid_computation(barrier, mesh.device, exchange(everybody, _SMALL_BYTES)) - all_s, 0.0)
    size_bytes, taken_s = _FIRST_BYTES, 0.0
    while True:
        # All ranks must send the same: rank 0's clock decides.
        taken_s = barrier.agree(timed(exchange(everybody, size_bytes), 1))
        if taken_s >= seconds or size_bytes >= _LARGEST_BYTES:
            break
        size_bytes = min(size_bytes * 4, _LARGEST_BYTES)
    taken_s = timed(exchange(everybody, size_bytes), _BANDWIDTH_REPEATS)
    below = mesh.world_size
    for number in mesh.sizes[: level + 1]:
        below //= number
    bandwidth = below * (size - 1) * size_bytes / max(taken_s - all_s, 1e-9)
    return LevelProbe(name=name, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth), further_s, jitter_s


def _amid_computation(barrier: Barrier, device: torch.device, exchange: Callable[[], None]) -> float:
    """Seconds that one exchange adds to computation before it, when all ranks do the same."""
    a = square(device)

    def alternate(between: Callable[[], object]) -> Callable[[], None]:
        def work() -> None:
            for _ in range(_ALTERNATIONS):
                for _ in range(_PRODUCTS):
                    torch.mm(a, a)
                between()
            settle(device)
            barrier.wait()

        return work

    alone_s = _timed(barrier, device, alternate(lambda: None), _REPEATS)
    return (_timed(barrier, device, alternate(exchange), _REPEATS) - alone_s) / _ALTERNATIONS
