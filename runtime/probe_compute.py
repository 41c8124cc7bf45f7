"""Measures computation with all ranks busy at once, on the workload's own sizes and with the code that trains.

The experts' part is measured at the two ends of what plans do with them: a rank's own experts alone (expert parallelism) and
all experts (full gather), with as many rows either way; what lies between is the line through both. What lies outside the
layers with experts is measured without them, and what then remains of a whole model's pass is shared out among them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hybridep.baselines import Baseline, baseline_plan
from hybridep.run import Optimizer, Run
from hybridep.topology import Cluster
from hybridep.workload import UNGROUPED, Workload
from runtime.barrier import Barrier
from runtime.build import RankModel, build_rank_model
from runtime.device import CPU, settle
from runtime.expert_exchange import CopyStream
from runtime.initial_weights import Seeded
from runtime.mesh import TORCH_DTYPE, Mesh
from runtime.moe import MoeBlock
from runtime.optimizer import HomeOptimizer
from runtime.spans import SpanRecorder
from runtime.trainer import RankTrainer
from runtime.transformer import Layer, Transformer
from runtime.transport import Transport

_REPEATS = 5
_MOST_REPEATS = 20
_WIDTH, _WIDTH_ON_GPU = 256, 2048
"""Of products that take a fraction of a millisecond on one core, and on a GPU."""
_ALONE_PRODUCTS = 100
"""About 0.1 s: what ranks take to meet must not count."""
_LEAST_PRODUCTS = 0.2
"""Share of a pass over a rank's own experts."""
_RUN = Run(name="probe", cluster="one rank", workload="as given", output=Path(), steps=1)
"""What a training of the probe's own reads beside the workload: nothing is written."""
_PASS = 3
"""A backward costs two forwards."""


@dataclass(frozen=True, kw_only=True)
class ComputeProbe:
    """What ``topology.Gpu`` says of computation; seconds are those of forward."""

    throughput_flops_per_s: float
    """Of plain matrix products."""
    block_overhead_s: float
    """Of one MoE block before its routed experts, beyond its FLOPs over the throughput, with its share of what remains of a
    pass."""
    pass_overhead_s: float
    """Of what lies outside the MoE blocks, likewise, for one micro-batch."""
    expert_throughput_flops_per_s: float
    """Of the routed experts' products."""
    expert_overhead_s: float
    """Of each expert that a rank holds."""
    memory_bandwidth_bytes_per_s: float
    """Of the optimizer."""
    sharing: float
    """How many times as fast one rank computes while the others wait."""


def probe_compute(
    cluster: Cluster,
    workload: Workload,
    *,
    rank: int,
    barrier: Barrier,
    transport: Transport,
    seconds: float,
    device: torch.device = CPU,
    ranks: Sequence[int] | None = None,
) -> ComputeProbe:
    """All ranks call it; each measurement lasts about ``seconds``. What is found is that of the slowest of ``ranks``, or of all,
    but for ``sharing``, which is the first site's."""
    timed = Timing(barrier, seconds, device, ranks=ranks)
    model, rows = workload.model, int(workload.training.tokens) * workload.model.top_k
    per_home = -(-model.num_experts // cluster.num_gpus)
    few_s = _experts(workload, per_home, rows, transport, timed)
    all_s = _experts(workload, model.num_experts, rows, transport, timed)
    expert_overhead_s, expert_throughput = _line(few_s, all_s, per_home, workload, rows)
    trainer = RankTrainer(_RUN, local_mesh(workload, device))
    # Without the optimizer, which may take longer than all else: what remains of a whole step is a small difference.
    pass_s = timed(lambda: trainer.gradients(1)) / workload.training.micro_batches / _PASS
    pre_expert_s = timed(_pre_expert(trainer.model, workload)) / _PASS
    outside_s = timed(_outside(trainer.model.transformer, workload)) / _PASS
    throughput = _products(workload, timed)
    memory_bandwidth = _optimizer(workload, per_home, transport, timed)
    # What is faster than plain products were just now leaves no overhead: its own speed counts then.
    throughput = max(throughput, workload.pre_expert_flops / pre_expert_s)
    outside_s = max(outside_s, workload.head_flops / throughput)
    # What is left belongs to the layers: a pipeline's stage has few of them, and passes many micro-batches.
    layer_s = (pass_s - outside_s) / model.num_moe_layers - all_s / _PASS
    trainer.close()
    return ComputeProbe(
        throughput_flops_per_s=throughput,
        block_overhead_s=max(layer_s - workload.pre_expert_flops / throughput, 0.0),
        pass_overhead_s=outside_s - workload.head_flops / throughput,
        expert_throughput_flops_per_s=expert_throughput,
        expert_overhead_s=expert_overhead_s,
        memory_bandwidth_bytes_per_s=memory_bandwidth,
        sharing=_sharing(rank, timed),
    )


class Timing:
    """Medians of repeated work that all ranks start together, of which the slowest counts: of all, or of some."""

    def __init__(
        self,
        barrier: Barrier,
        seconds: float,
        device: torch.device = CPU,
        least: int = _REPEATS,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """``device``: where the work is done. ``ranks``: those that count here; all if None."""
        self.barrier, self.seconds, self.device, self.least, self.ranks = barrier, seconds, device, least, ranks

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one ``work``, the same on all ranks."""
        self.barrier.wait()
        return self.barrier.agree(seconds_of(work, self.device))

    def __call__(self, work: Callable[[], object]) -> float:
        """Seconds of one ``work`` until all ranks that count have done theirs: the median."""
        seconds_of(work, self.device)
        repeats = max(self.least, min(_MOST_REPEATS, int(self.seconds / max(self.once(work), 1e-6))))
        taken = []
        for _ in range(repeats):
            self.barrier.wait()
            taken.append(seconds_of(work, self.device))
        everyone = self.barrier.share_json(self.barrier.gather_json(taken))
        counting = everyone if self.ranks is None else [everyone[rank] for rank in self.ranks]
        return float(statistics.median(max(same) for same in zip(*counting, strict=True)))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Until ``device`` has done what ``work`` gives it."""
    start_s = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start_s


def square(device: torch.device) -> torch.Tensor:
    """A matrix whose square takes a fraction of a millisecond there."""
    width = _WIDTH if device.type == "cpu" else _WIDTH_ON_GPU
    return torch.ones(width, width, device=device)


def _line(few_s: float, all_s: float, per_home: int, workload: Workload, rows: int) -> tuple[float, float]:
    """(overhead, throughput) with pass = 3 * (experts held * overhead + rows' FLOPs / throughput) at both ends."""
    experts = workload.model.num_experts
    overhead_s = max(all_s - few_s, 0.0) / (_PASS * (experts - per_home)) if experts > per_home else 0.0
    products_s = few_s / _PASS - per_home * overhead_s
    if products_s < _LEAST_PRODUCTS * few_s / _PASS:
        # Timing noise must not make the rows free.
        products_s = _LEAST_PRODUCTS * few_s / _PASS
        overhead_s = max(all_s / _PASS - products_s, 0.0) / experts
    return overhead_s, rows * workload.expert_flops_per_row / products_s


def local_mesh(workload: Workload, device: torch.device) -> Mesh:
    """A cluster of one rank: no token leaves, no copy comes."""
    fields = {
        "name": "one rank",
        "levels": ({"name": "gpu", "size": 1, "bandwidth": "1 Gbps", "latency": "0 s"},),
        "gpu": {"throughput": "1 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 GB/s"},
    }
    return Mesh(plan=baseline_plan(Cluster.model_validate(fields), workload, Baseline.EP), rank=0, device=device)


def _local_model(workload: Workload, transport: Transport, device: torch.device) -> RankModel:
    mesh = local_mesh(workload, device)
    return build_rank_model(mesh, transport, CopyStream(overlap=False), SpanRecorder(mesh), Seeded(workload.model, 0))


def _experts(workload: Workload, number: int, rows: int, transport: Transport, timed: Timing) -> float:
    """Seconds of forward and backward of ``number`` experts of one layer on ``rows`` rows, evenly spread."""
    changes = {"num_layers": 1, "num_dense_layers": 0, "num_experts": number, "top_k": 1, **UNGROUPED}
    # These rows, not as many as so few experts would be padded to, which may be less.
    changes |= {"pad_expert_input_to_capacity": False}
    one_layer = workload.model_copy(update={"model": workload.model.model_copy(update=changes)})
    experts = _local_model(one_layer, transport, timed.device).routed[0]
    home = experts.home
    hidden = torch.randn(rows, workload.model.hidden_size).to(home).requires_grad_()
    weights = torch.ones(rows, 1, dtype=home.dtype, device=home.device, requires_grad=True)
    ids = (torch.arange(rows, dtype=torch.int32, device=home.device) % number)[:, None]
    none = home.new_empty(0, home.shape[1])

    def work() -> None:
        y = experts.weighted(ids, hidden, weights, home, none)
        torch.autograd.grad(y, [hidden, weights, home], torch.ones_like(y))

    return timed(work)


def _pre_expert(model: RankModel, workload: Workload) -> Callable[[], None]:
    """One MoE layer before its routed experts: attention, norms, gate and shared expert."""
    layer = list(model.transformer.layers.values())[-1]
    assert isinstance(layer, Layer) and isinstance(layer.feed_forward, MoeBlock)
    block = layer.feed_forward
    shape = int(workload.training.micro_batch_size), workload.training.sequence_length, workload.model.hidden_size
    x = torch.randn(shape).to(model.transformer.norm.weight).requires_grad_()

    def work() -> None:
        y = x + layer.attention(layer.attention_norm(x))
        normed = layer.feed_forward_norm(y)
        gated = block.gate(normed)
        total = y.sum() + normed.sum() + gated.weights_TK.sum() + gated.balance_B.sum()
        (total if block.shared is None else total + block.shared(normed).sum()).backward()

    return work


def _outside(transformer: Transformer, workload: Workload) -> Callable[[], None]:
    """A pass of the model without its layers with experts."""
    kept = {name: layer for name, layer in transformer.layers.items() if not isinstance(layer.feed_forward, MoeBlock)}
    outside = copy.copy(transformer)
    outside.layers = nn.ModuleDict(kept)
    shape = int(workload.training.micro_batch_size), workload.training.sequence_length
    tokens = torch.zeros(shape, dtype=torch.long, device=transformer.norm.weight.device)

    def work() -> None:
        loss, _ = outside(tokens, tokens)
        loss.backward()

    return work


def _products(workload: Workload, timed: Timing) -> float:
    """FLOPs per second of plain matrix products of the model's width, forward and backward."""
    width, tokens = workload.model.hidden_size, int(workload.training.tokens)
    dtype = TORCH_DTYPE[workload.training.dtype]
    layer = nn.Linear(width, 4 * width, bias=False, dtype=dtype, device=timed.device)
    x = torch.randn(tokens, width).to(timed.device, dtype).requires_grad_()
    repeats = 8

    def work() -> None:
        for _ in range(repeats):
            layer(x).sum().backward()

    return repeats * _PASS * 2.0 * tokens * width * 4 * width / timed(work)


def _optimizer(workload: Workload, per_home: int, transport: Transport, timed: Timing) -> float:
    """Bytes per second at which AdamW reads weight, gradient and states and writes weight and states."""
    changes = {"num_experts": per_home, "top_k": 1, **UNGROUPED}
    few = workload.model_copy(update={"model": workload.model.model_copy(update=changes)})
    model = _local_model(few, transport, timed.device)
    parameters, dtype = {**model.transformer.dense_parameters(), **model.home_parameters()}, workload.training.dtype
    gradient_dtype = workload.training.gradient_dtype
    optimizer = HomeOptimizer(Optimizer(), parameters, gradient_dtype=TORCH_DTYPE[gradient_dtype])
    elements = sum(parameter.numel() for parameter in optimizer.parameters.values())

    def work() -> None:
        optimizer.step(1)

    return elements * (2 * dtype.num_bytes + gradient_dtype.num_bytes + 2 * dtype.state_bytes) / timed(work)


def _sharing(rank: int, timed: Timing) -> float:
    """How many times longer the same products take while all ranks compute than while rank 0 does alone."""
    a = square(timed.device)

    def work() -> None:
        for _ in range(_ALONE_PRODUCTS):
            torch.mm(a, a)

    together_s = timed.barrier.agree(timed(work))
    alone_s = []
    for _ in range(_REPEATS):
        # Rank 0's clock decides; the others wait for its answer.
        alone_s.append(timed.barrier.agree(seconds_of(work, timed.device) if rank == 0 else 0.0))
    return max(together_s / statistics.median(alone_s), 1.0)
