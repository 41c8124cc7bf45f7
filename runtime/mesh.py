"""One rank's place in the cluster, every check that can fail before a process group exists, and the process group itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridep.errors import TransportError, UserError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.traffic import Op
from hybridep.workload import Dtype
from runtime.device import CPU
from runtime.event_threads import waiting_their_turn
from runtime.sockets import between_ranks
from runtime.trainable import check_trainable

TORCH_DTYPE = {Dtype.FP64: torch.float64, Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16}

if TYPE_CHECKING:
    # torch.distributed offers them without naming them as exported.
    from torch._C._distributed_c10d import Store, TCPStore

_JOIN_S, _TRIPS = 240.0, 4
"""For all ranks to start: on a busy machine importing torch alone takes many seconds, and the launcher, which knows who has not
started, waits for less. Then each asks rank 0 where each other one is, in about three round trips."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A plan seen from one global rank. Raises UserError when the runtime cannot train the plan."""

    plan: Plan
    rank: int
    device: torch.device = CPU
    """Where the rank computes."""
    pipeline: PipelinePlan | None = None
    """Whose stage the plan is; ``rank`` counts in the stage then."""
    stage: int = 0

    def __post_init__(self) -> None:
        check_trainable(self.plan.workload)
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank {self.rank}: cluster {self.plan.cluster.name} has ranks 0 to {self.world_size - 1}")

    @property
    def world_size(self) -> int:
        """G."""
        return self.plan.cluster.num_gpus

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """SF_l, outermost level first."""
        return self.plan.cluster.sizes

    @cached_property
    def location(self) -> tuple[int, ...]:
        """Coordinate at each level."""
        return self.plan.cluster.location(self.rank)

    @property
    def whole(self) -> Plan | PipelinePlan:
        """What the run trains: the plan itself, or the pipeline that it is a stage of."""
        return self.pipeline or self.plan

    @property
    def num_stages(self) -> int:
        """1 without a pipeline."""
        return len(self.pipeline.stages) if self.pipeline is not None else 1

    @cached_property
    def run_ranks(self) -> tuple[int, ...]:
        """Of the ranks of this stage, what they are in the whole run."""
        return tuple(range(self.world_size)) if self.pipeline is None else tuple(self.pipeline.ranks[self.stage].tolist())

    @property
    def run_rank(self) -> int:
        """This rank in the whole run."""
        return self.run_ranks[self.rank]

    @property
    def first_moe_layer(self) -> int:
        """MoE layers of the whole model before this stage's."""
        part = self.plan.workload.model.part
        return part.first_moe_layer if part is not None else 0

    @property
    def dtype(self) -> torch.dtype:
        """Element type of tokens, experts and, on links, gradients."""
        return TORCH_DTYPE[self.plan.workload.training.dtype]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of gradients that add up over micro-batches."""
        return TORCH_DTYPE[self.plan.workload.training.gradient_dtype]

    def peer(self, level: int, coordinate: int) -> int:
        """The global rank that differs from this one only in its coordinate at ``level``."""
        return self._peers[level][coordinate]

    def label(self, op: Op, level: int) -> str:
        """``token_dispatch@dc``: the name under which a transfer's bytes and times are booked."""
        return self._labels[level][op]

    @property
    def label_numbers(self) -> dict[str, int]:
        """Of each label its number, the same on all ranks."""
        return {label: number for number, label in enumerate(label for labels in self._labels for label in labels.values())}

    @cached_property
    def _peers(self) -> list[list[int]]:
        """By level and coordinate. Asked for with every message: a table costs less than numpy's arithmetic on a few numbers."""
        peer = self.plan.cluster.peer
        return [[peer(self.rank, level, coordinate) for coordinate in range(size)] for level, size in enumerate(self.sizes)]

    @cached_property
    def _labels(self) -> list[dict[Op, str]]:
        return [{op: f"{op.value}@{level.name}" for op in Op} for level in self.plan.cluster.levels]


def mesh_of(plan: Plan | PipelinePlan, rank: int, device: torch.device = CPU) -> Mesh:
    """The plan, or the stage of a pipeline that the rank is in, seen from a rank of the whole run."""
    if isinstance(plan, Plan):
        return Mesh(plan=plan, rank=rank, device=device)
    stage, own = plan.seat(rank)
    return Mesh(plan=plan.plans[stage], rank=own, device=device, pipeline=plan, stage=stage)


def host_store(address: str, *, timeout_s: float) -> TCPStore:
    """Rank 0's rendezvous on a port that the operating system picks; others join at ``store.port``."""
    return _store(address, 0, is_master=True, timeout_s=timeout_s)


def join_store(address: str, port: int, *, timeout_s: float) -> TCPStore:
    """Join the rendezvous of ``host_store``. Raises TransportError when nobody answers within the timeout."""
    return _store(address, port, is_master=False, timeout_s=timeout_s)


def _store(address: str, port: int, *, is_master: bool, timeout_s: float) -> TCPStore:
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, None, is_master, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=False
        )
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"rendezvous at {address}:{port}", first_line(error)) from None


def join_timeout_s(cluster: Cluster) -> float:
    """For all of its ranks to open one process group."""
    return _JOIN_S + _TRIPS * 2 * float(cluster.site_latency_s.max()) * cluster.num_gpus


def open_process_group(store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
    """Join the gloo process group of all ranks. Raises TransportError when some rank does not come within the timeout."""
    try:
        with between_ranks(), waiting_their_turn():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransportError(f"process group of {world_size} ranks", f"rank {rank} could not join: {first_line(error)}") from None


def close_process_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
