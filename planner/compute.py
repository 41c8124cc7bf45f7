"""How long computations take when each rank has its own GPU: per phase the slowest rank counts, since exchanges wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.recompute import Recompute, again_flops, dense_again_flops
from hybridep.shares import site_shares
from hybridep.topology import Cluster
from hybridep.traffic import dense_shard_params
from hybridep.workload import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class Compute:
    """Seconds of computations on each rank. Arrays over ranks are [G], or [D, 1] where they stand for [D, n]."""

    workload: Workload
    sharing: float
    share: FloatArray
    """Tokens as a multiple of the mean."""
    flops_per_s: FloatArray
    pre_expert_s: FloatArray
    """Forward of one layer and micro-batch before the routed experts, without ``overhead_s``."""
    overhead_s: FloatArray
    """Fixed cost of one block's forward."""
    expert_s_per_row: FloatArray
    """Forward of one expert on one row."""
    expert_overhead_s: FloatArray
    """Fixed cost of each expert held."""
    head_s: FloatArray
    """Forward of one micro-batch outside the MoE layers, without ``pass_overhead_s``."""
    pass_overhead_s: FloatArray
    optimizer_s_per_parameter: FloatArray
    dense_shard: int
    """Dense parameters that a rank updates."""
    memory_bytes: FloatArray
    """What each rank has."""

    @property
    def others_s(self) -> FloatArray:
        """Forward of one layer and micro-batch before the routed experts, all told."""
        return self.pre_expert_s + self.overhead_s

    @property
    def slowest(self) -> int:
        """Index of the rank that is last before the routed experts."""
        return int(self.others_s.argmax())

    def expert_s(self, served: FloatArray, held: FloatArray | IntArray) -> FloatArray:
        """Forward of the routed experts of one layer and micro-batch: ``served`` rows, experts ``held``."""
        return shared_s(served * self.expert_s_per_row + held * self.expert_overhead_s, self.sharing)

    def again_s(self, recompute: Recompute) -> FloatArray:
        """What backward computes a second time of one layer and micro-batch, but of routed experts."""
        overhead_s = self.overhead_s if Recompute.ATTENTION in recompute else 0.0
        return self.share * (again_flops(self.workload, recompute) / self.flops_per_s) + overhead_s

    def head_again_s(self, recompute: Recompute) -> FloatArray:
        """And of layers without experts, all together."""
        return self.share * (dense_again_flops(self.workload, recompute) / self.flops_per_s)

    def heads_s(self, recompute: Recompute) -> FloatArray:
        """Forward and backward of what lies outside the MoE layers, all micro-batches of a step."""
        once_s = 3 * (self.head_s + self.pass_overhead_s) + self.head_again_s(recompute)
        return np.asarray(self.workload.training.micro_batches * once_s)

    def optimizer_s(self, home_experts: IntArray) -> FloatArray:
        """One step of the optimizer; ``home_experts``: experts at home, all layers together."""
        params = self.dense_shard + home_experts * float(self.workload.model.expert_params)
        return np.asarray(params * self.optimizer_s_per_parameter)


def compute_of_ranks(cluster: Cluster, workload: Workload) -> Compute:
    """Arrays [G]."""
    return _compute(cluster, workload, cluster.ranks_per_site)


def compute_of_sites(cluster: Cluster, workload: Workload) -> Compute:
    """Arrays [D, 1]: all ranks of a site are alike."""
    return _compute(cluster, workload, 0)


def _compute(cluster: Cluster, workload: Workload, ranks: int) -> Compute:
    gpus, share = cluster.site_gpus, site_shares(cluster, workload)

    def spread(values: Sequence[float] | FloatArray) -> FloatArray:
        each = np.array(values, dtype=np.float64)
        return np.repeat(each, ranks) if ranks else each[:, None]

    optimizer_bytes = optimizer_bytes_per_parameter(workload)
    pre_expert_flops, head_flops, row_flops = workload.pre_expert_flops, workload.head_flops, workload.expert_flops_per_row
    return Compute(
        workload=workload,
        sharing=cluster.gpu.sharing,
        share=spread(share),
        flops_per_s=spread([gpu.throughput for gpu in gpus]),
        pre_expert_s=spread([pre_expert_flops * own / gpu.throughput for own, gpu in zip(share, gpus, strict=True)]),
        overhead_s=spread([gpu.block_overhead for gpu in gpus]),
        expert_s_per_row=spread([row_flops / gpu.expert_flops_per_s for gpu in gpus]),
        expert_overhead_s=spread([gpu.expert_overhead for gpu in gpus]),
        head_s=spread([head_flops * own / gpu.throughput for own, gpu in zip(share, gpus, strict=True)]),
        pass_overhead_s=spread([gpu.pass_overhead for gpu in gpus]),
        optimizer_s_per_parameter=spread([optimizer_bytes / gpu.memory_bandwidth for gpu in gpus]),
        dense_shard=dense_shard_params(workload.model, cluster.sizes),
        memory_bytes=spread([gpu.memory for gpu in gpus]),
    )


def shared_s(alone_s: FloatArray, sharing: float) -> FloatArray:
    """When each rank is done (any shape), if it computes for ``alone_s`` while all do. Ranks that share processors
    (``Gpu.sharing``) also wait for each other, so part of it is the mean."""
    return np.asarray(alone_s / sharing + alone_s.mean() * (1 - 1 / sharing))


def optimizer_bytes_per_parameter(workload: Workload) -> int:
    """Memory traffic of AdamW: weight and states read and written, gradient read."""
    dtype = workload.training.dtype
    return 2 * (dtype.num_bytes + dtype.state_bytes) + workload.training.gradient_dtype.num_bytes
