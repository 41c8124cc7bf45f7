"""What this machine has: memory for ranks, and what torch finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from hybridep.errors import UserError
from hybridep.launch.worker import Job
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Plan
from hybridep.run import Device
from hybridep.units import format_bytes
from hybridep.workload import Dtype

PROCESS_BYTES = 150e6
"""What a rank's process takes before it has a model: Python, torch and gloo, without what processes share; rather less."""


def require_room(job: Job) -> None:
    """Raises UserError where all ranks of a job are to start on this machine and it has too little memory for them."""
    ranks, held = job.plan.cluster.num_gpus, memory_bytes()
    copied = copied_bytes(job)
    needed = ranks * PROCESS_BYTES + copied
    prediction = job.plan.prediction
    # The fullest rank's memory says in most cases that all have room, without the planner, which takes a second to load.
    if job.probe_s is None and (prediction is None or needed + ranks * prediction.memory_bytes > held):
        needed += _model_bytes(job)
    if needed > held:
        beside = f" ({format_bytes(copied)} of it for checkpoints.async_save)" if copied else ""
        raise UserError(
            f"{ranks} ranks on this machine take at least {format_bytes(needed)} of memory{beside}, and may have "
            f"{format_bytes(held)} (of it, swap included, or of this process's control group); give a smaller cluster or "
            "model, or start Ray on several machines (RAY_ADDRESS)"
        )


def copied_bytes(job: Job) -> float:
    """Weights and moments that all ranks together copy to the machine's memory to write checkpoints beside steps; what codecs
    keep is not counted."""
    if not job.run.checkpoints.async_save or job.probe_s is not None or job.trials:
        return 0.0
    copied = 0
    for plan in _plans(job):
        model, dtype = plan.workload.model, plan.workload.training.dtype
        # The weight that is kept is the fp32 master where there is one, which the optimizer's state has.
        width = dtype.state_bytes + (0 if dtype is Dtype.BF16 else dtype.num_bytes)
        experts = model.num_moe_layers * model.num_experts * model.expert_params
        copied += (experts + plan.cluster.sizes[0] * model.dense_params) * width
    return float(copied)


def memory_bytes(own_groups: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """What processes started here may take together: of the machine, swap included, or as much as this process's control groups
    (Linux, both versions), and those about them, allow. own_groups, groups: files that say which these are, and their limits."""
    memory, swap, both = float(psutil.virtual_memory().total), float(psutil.swap_memory().total), float("inf")
    for group in _memory_groups(own_groups, groups):
        memory = min(memory, _limit_bytes(group / "memory.max"), _limit_bytes(group / "memory.limit_in_bytes"))
        swap = min(swap, _limit_bytes(group / "memory.swap.max"))
        both = min(both, _limit_bytes(group / "memory.memsw.limit_in_bytes"))
    return min(memory + swap, both)


def _memory_groups(own_groups: Path, groups: Path) -> Iterator[Path]:
    """Folders of the groups that limit memory, from that of this process outwards. In a container the first ones may not be
    there: the outermost is then its own."""
    for line in own_groups.read_text(encoding="utf-8").splitlines() if own_groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            own = PurePosixPath(name)
            for each in (own, *own.parents):
                yield groups / controllers / each.relative_to("/")


def _limit_bytes(file: Path) -> float:
    """Infinite where there is none."""
    text = file.read_text(encoding="utf-8").strip() if file.exists() else "max"
    return float("inf") if text == "max" else float(text)


def _model_bytes(job: Job) -> float:
    """Of all ranks together, in the machine's memory."""
    if job.run.device is not Device.CPU and torch_facts().cuda_devices:
        return 0.0
    from planner import memory_use

    return float(sum(memory_use(plan).total_bytes.sum() for plan in _plans(job)))


def _plans(job: Job) -> Sequence[Plan]:
    """The plan, or those of a pipeline's stages."""
    return job.plan.plans if isinstance(job.plan, PipelinePlan) else (job.plan,)


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The installed torch and the devices that it can use."""

    version: str
    has_gloo: bool
    cuda_devices: tuple[str, ...]


def torch_facts() -> TorchFacts:
    """Import torch and ask it."""
    import torch
    import torch.distributed

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchFacts(
        version=torch.__version__,
        has_gloo=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        cuda_devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
    )
