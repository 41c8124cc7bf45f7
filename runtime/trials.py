"""Short trainings of many plans in one process group: what an experiment measures without starting ranks anew each time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hybridep.pipeline import AnyPlan
from hybridep.run import Run, StepReport
from runtime.barrier import Barrier
from runtime.between import process_groups
from runtime.device import choose_device
from runtime.gate import Gated
from runtime.mesh import Mesh, join_timeout_s, mesh_of
from runtime.probe import Probe, probe
from runtime.trainer import RankTrainer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan's steps on one rank."""

    step_s: tuple[float, ...]
    wan_bytes: int
    """Sent over the outermost level in the last step."""
    parts_s: dict[str, float]
    """Of the last step, by operation ("@" and where), as this rank saw them; transfers may run beside computation."""
    choices: tuple[tuple[tuple[int, ...], ...], ...]
    """[steps][MoE layers][experts]: how often this rank's tokens chose each expert."""
    ids: tuple[tuple[list[list[int]], ...], ...]
    """[recorded steps][MoE layers x micro-batches] [T, K] expert ids of this rank, layer by layer within a micro-batch."""


def run_trials(
    run: Run, plans: Sequence[AnyPlan], *, rank: int, store: Store, probe_s: float | None = None, recorded: int = 0
) -> Iterator[Trial | Probe]:
    """Train each of ``plans`` for ``run.steps`` steps from the start, as one rank; all ranks call it with the same plans.
    With ``probe_s`` links and computation are measured before the first plan of each workload, for about that long each. Of the
    first ``recorded`` steps every choice is kept, but under a pipeline plan, whose micro-batches are others.
    Raises UserError for a plan that cannot be trained and TransportError when a peer is gone."""
    torch.set_num_threads(1)
    meshes = [mesh_of(plan, rank, choose_device(run.device, rank)) for plan in plans]
    before = None
    for number, (plan, mesh) in enumerate(zip(plans, meshes, strict=True)):
        # Each has connections of its own: ranks of a pipeline's stage are another group.
        own = PrefixStore(f"trial{number}", store)
        if probe_s is not None and plan.workload != before:
            yield probe(
                plan.cluster,
                plan.workload,
                rank=rank,
                store=PrefixStore("probe", own),
                seconds=probe_s,
                device=run.device,
            )
        before = plan.workload
        with process_groups(mesh, own, join_timeout_s(plan.cluster)) as groups:
            yield _trial(run, mesh, groups, recorded if mesh.pipeline is None else 0)


def _trial(run: Run, mesh: Mesh, groups: Sequence[dist.ProcessGroup], recorded: int) -> Trial:
    trainer = RankTrainer(run, mesh, groups)
    barrier = Barrier(rank=mesh.run_rank, world_size=mesh.whole.cluster.num_gpus, groups=groups)
    model = mesh.whole.workload.model
    counts = torch.zeros(run.steps, model.num_moe_layers, model.num_experts, dtype=torch.int64)
    reports: list[StepReport] = []
    ids: list[list[list[list[int]]]] = [[] for _ in range(recorded)]

    def count(layer: int, gated: Gated) -> None:
        if len(reports) < len(ids):
            ids[len(reports)].append(gated.ids_TK.tolist())
        counts[len(reports), layer] += torch.bincount(gated.chosen_TK.flatten(), minlength=model.num_experts).cpu()

    for block in trainer.model.transformer.moe_blocks():
        block.routing_hook = count
    try:
        # Ranks build their models at different speeds.
        barrier.wait()
        for step in range(1, run.steps + 1):
            trainer.spans.active = step == run.steps
            reports.append(trainer.step(step))
    finally:
        trainer.close()
    parts: defaultdict[str, float] = defaultdict(float)
    for span in trainer.spans.spans:
        row = span.thread.split(" ", 2)[-1]
        parts[f"{span.category}@{row}"] += span.duration_s
    return Trial(
        step_s=tuple(report.step_s for report in reports),
        wan_bytes=reports[-1].wan_bytes,
        parts_s=dict(parts),
        choices=tuple(tuple(tuple(row) for row in step) for step in counts.tolist()),
        ids=tuple(tuple(step) for step in ids),
    )
