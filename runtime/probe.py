"""Measures what a cluster file must know: links by level, and computation, with all ranks busy at once.

The numbers are those of the cost model's formulas, taken with the code that trains: throughput and block overhead are the
slope and the intercept of real forward and backward passes over their FLOPs, memory bandwidth is that of real optimizer
steps, latency and bandwidth are those of real exchanges among all ranks that differ at a level.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybridep.plan import LayerGroup, Plan
from hybridep.run import Optimizer
from hybridep.topology import Cluster
from hybridep.workload import Workload
from runtime.barrier import Barrier
from runtime.build import RankModel, build_rank_model
from runtime.expert_exchange import CopyStream
from runtime.mesh import JOIN_TIMEOUT_S, Mesh, close_process_group, open_process_group
from runtime.optimizer import HomeOptimizer
from runtime.spans import SpanRecorder
from runtime.transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SMALL_BYTES, _FIRST_BYTES, _LARGEST_BYTES = 8, 2**15, 2**26
_REPEATS = 5
_LARGEST_BATCH = 64
"""Sequences per rank, where growth ends for models so small that computation never outweighs the overhead."""


@dataclass(frozen=True, kw_only=True)
class LevelProbe:
    """One level's links."""

    name: str
    latency_s: float
    """Of one exchange of almost no bytes among all ranks that differ at the level."""
    bandwidth_bytes_per_s: float
    """Of one worker's up link while all ranks send."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was measured; levels of one worker have no links and are left out."""

    levels: tuple[LevelProbe, ...]
    throughput_flops_per_s: float
    block_overhead_s: float
    """Of one MoE block's forward."""
    memory_bandwidth_bytes_per_s: float


def probe(
    cluster: Cluster, workload: Workload, *, rank: int, store: Store, seconds: float = 0.3, timeout_s: float = 60.0
) -> Probe:
    """Measure as one rank; all ranks of ``cluster`` call it. ``seconds`` is about how long each measurement of a link or of
    computation lasts. ``store`` is the rendezvous, as for ``trainer.train``. Raises TransportError when a peer is gone."""
    torch.set_num_threads(1)
    # Every rank holds all experts, so that the passes are pure computation: no token leaves, no copy is exchanged.
    everything = {level.name: level.size for level in cluster.levels}
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains=everything, migration={})
    mesh = Mesh(plan=Plan(cluster=cluster, workload=workload, layers=(group,)), rank=rank)
    open_process_group(store, rank=rank, world_size=mesh.world_size, timeout_s=JOIN_TIMEOUT_S)
    try:
        barrier = Barrier(rank=rank, world_size=mesh.world_size, timeout_s=timeout_s)
        transport = Transport(timeout_s=timeout_s)
        levels = [_level(mesh, transport, barrier, level, seconds) for level, size in enumerate(mesh.sizes) if size > 1]
        stream = CopyStream(overlap=False)
        model = build_rank_model(mesh, transport, stream, SpanRecorder(mesh), seed=0)
        throughput, overhead_s = _computation(mesh, model, barrier, seconds)
        memory_bandwidth = _optimizer(mesh, model, barrier)
    finally:
        close_process_group()
    return Probe(
        levels=tuple(levels),
        throughput_flops_per_s=throughput,
        block_overhead_s=overhead_s,
        memory_bandwidth_bytes_per_s=memory_bandwidth,
    )


def summarise(probes: Sequence[Probe]) -> Probe:
    """One cluster's numbers from those of all its ranks: medians, so that one rank's hiccup does not decide."""
    levels = [
        LevelProbe(
            name=same[0].name,
            latency_s=statistics.median(level.latency_s for level in same),
            bandwidth_bytes_per_s=statistics.median(level.bandwidth_bytes_per_s for level in same),
        )
        for same in zip(*(each.levels for each in probes), strict=True)
    ]
    return Probe(
        levels=tuple(levels),
        throughput_flops_per_s=statistics.median(each.throughput_flops_per_s for each in probes),
        block_overhead_s=statistics.median(each.block_overhead_s for each in probes),
        memory_bandwidth_bytes_per_s=statistics.median(each.memory_bandwidth_bytes_per_s for each in probes),
    )


def _timed(barrier: Barrier, work: Callable[[], object], repeats: int) -> float:
    """Seconds of one ``work`` when all ranks start it together: the median."""
    work()
    taken = []
    for _ in range(repeats):
        barrier.wait()
        start_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)


def _level(mesh: Mesh, transport: Transport, barrier: Barrier, level: int, seconds: float) -> LevelProbe:
    name = mesh.plan.cluster.levels[level].name
    peers = [mesh.peer(level, c) for c in range(mesh.sizes[level]) if c != mesh.location[level]]

    def exchange(size_bytes: int) -> Callable[[], None]:
        sends = {peer: torch.zeros(size_bytes, dtype=torch.uint8) for peer in peers}
        receives = {peer: torch.zeros(size_bytes, dtype=torch.uint8) for peer in peers}
        return lambda: transport.exchange(sends, receives, f"probe@{name}")

    latency_s = _timed(barrier, exchange(_SMALL_BYTES), 10 * _REPEATS)
    size_bytes, taken_s = _FIRST_BYTES, 0.0
    while True:
        # All ranks must send the same: rank 0's clock decides.
        taken_s = barrier.agree(_timed(barrier, exchange(size_bytes), 1))
        if taken_s >= seconds or size_bytes >= _LARGEST_BYTES:
            break
        size_bytes = min(size_bytes * 4, _LARGEST_BYTES)
    taken_s = _timed(barrier, exchange(size_bytes), _REPEATS)
    below = mesh.world_size
    for size in mesh.sizes[: level + 1]:
        below //= size
    sent_bytes = below * len(peers) * size_bytes
    return LevelProbe(name=name, latency_s=latency_s, bandwidth_bytes_per_s=sent_bytes / max(taken_s - latency_s, 1e-9))


def _computation(mesh: Mesh, model: RankModel, barrier: Barrier, seconds: float) -> tuple[float, float]:
    """(FLOPs per second, block overhead): time = FLOPs / throughput + 3 * blocks * overhead, a backward costing two forwards."""
    workload = mesh.plan.workload
    for experts in model.routed:
        # Gradients of copies would otherwise set out to their homes.
        experts.exchange.last_micro_batch = False

    def measure(number: int) -> tuple[float, float]:
        batch = workload.model_copy(update={"training": workload.training.model_copy(update={"micro_batch_size": number})})
        tokens = torch.zeros(number, workload.training.sequence_length, dtype=torch.int64)
        tokens += torch.arange(workload.training.sequence_length) % workload.model.vocab_size

        def work() -> None:
            loss, balance = model.transformer(tokens, tokens)
            (loss + balance).backward()

        once_s = barrier.agree(_timed(barrier, work, 1))
        taken_s = _timed(barrier, work, max(3, min(20, int(seconds / max(once_s, 1e-6)))))
        return _pass_flops(batch), taken_s

    number = 1
    few, few_s = many, many_s = measure(number)
    # Two points far apart: where overhead dominates, a small difference of times would be noise.
    while number < _LARGEST_BATCH and barrier.agree(many_s / few_s) < 2:
        number *= 4
        many, many_s = measure(number)
    if many_s <= few_s:
        return many / many_s, 0.0
    throughput = (many - few) / (many_s - few_s)
    overhead_s = (few_s - few / throughput) / (3 * workload.model.num_moe_layers)
    return throughput, max(overhead_s, 0.0)


def _pass_flops(workload: Workload) -> float:
    """Forward and backward of one micro-batch on one rank."""
    model = workload.model
    block = workload.pre_expert_flops + workload.training.tokens * model.top_k * workload.expert_flops_per_row
    return 3 * (model.num_moe_layers * block + workload.head_flops)


def _optimizer(mesh: Mesh, model: RankModel, barrier: Barrier) -> float:
    """Bytes per second at which AdamW reads weight, gradient and states and writes weight and states."""
    optimizer = HomeOptimizer(Optimizer(), {**model.transformer.dense_parameters(), **model.home_parameters()})
    dtype = mesh.plan.workload.training.dtype
    elements = sum(parameter.numel() for parameter in optimizer.parameters.values())

    def work() -> None:
        optimizer.step(1)

    return elements * (3 * dtype.num_bytes + 2 * dtype.state_bytes) / _timed(barrier, work, _REPEATS)
