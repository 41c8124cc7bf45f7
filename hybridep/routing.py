"""What the gates chose in training: written by the runtime, read by the planner (popularity) and the simulator (choices)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridep.arrays import IntArray
from hybridep.config import write_bytes
from hybridep.errors import UserError
from hybridep.pipeline import AnyPlan
from hybridep.shares import site_sequences
from hybridep.workload import Workload

Routing = Mapping[tuple[int, int], IntArray]
"""(MoE layer, micro-batch) -> [G, T, K] expert ids of one step, -1 for a dropped choice. Where ranks have different numbers of
tokens, T is the largest, and -1 fills the rows that a rank lacks."""

_CHOSEN = "chosen"


@dataclass(frozen=True, kw_only=True)
class RoutingRecord:
    """Measured routing of a run."""

    chosen: IntArray
    """[MoE layers, E]: how often each expert was chosen, before any drops, all ranks and recorded steps together."""
    choices: Routing = field(default_factory=dict)
    """Every choice of the steps that were recorded in full, one after the other: step n begins with micro-batch n times those of
    a step. Empty when there are none."""

    def popularity(self) -> tuple[tuple[float, ...], ...]:
        """Per MoE layer the share of each expert, as ``Plan.popularity`` takes it."""
        total = self.chosen.sum(axis=1, keepdims=True)
        even = np.full(self.chosen.shape, 1 / self.chosen.shape[1])
        shares = np.where(total > 0, self.chosen / np.maximum(total, 1), even)
        return tuple(tuple(float(share) for share in row) for row in shares)

    def steps(self, workload: Workload) -> list[Routing]:
        """The choices step by step; empty when none was recorded in full."""
        found: list[dict[tuple[int, int], IntArray]] = []
        for (layer, batch), ids in sorted(self.choices.items()):
            step, micro_batch = divmod(batch, workload.training.micro_batches)
            found += [{} for _ in range(step + 1 - len(found))]
            found[step][layer, micro_batch] = ids
        return list(found)

    def save(self, path: Path) -> None:
        """Write as a compressed numpy archive, atomically. Raises UserError."""
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {_CHOSEN: self.chosen}
        for (layer, batch), ids in self.choices.items():
            arrays[f"layer{layer}.micro_batch{batch}"] = ids.astype(np.int32)
        np.savez_compressed(buffer, **arrays)
        write_bytes(path, buffer.getvalue())

    def require_model(self, workload: Workload, where: Path) -> None:
        """Raises UserError when the record is of another model."""
        wanted, top_k = (workload.model.num_moe_layers, workload.model.num_experts), workload.model.top_k
        if self.chosen.shape != wanted:
            raise UserError(f"{where}: (MoE layers, experts) are {self.chosen.shape}, this model has {wanted}")
        for layer, shares in enumerate(self.popularity()):
            if max(shares) * top_k > 1 + 1e-6:
                raise UserError(
                    f"{where}: in MoE layer {layer} one expert has {max(shares):.1%} of the choices, and where tokens choose "
                    f"{top_k} experts (model.top_k) none can have over {1 / top_k:.1%}; record with this model"
                )

    def require(self, plan: AnyPlan, where: Path) -> None:
        """Raises UserError when the record is of another model, or its choices are of another batch or number of ranks."""
        model, training = plan.workload.model, plan.workload.training
        self.require_model(plan.workload, where)
        most = max(site_sequences(plan.cluster, plan.workload)) * training.sequence_length
        shape = (plan.cluster.num_gpus, most, model.top_k)
        keys = {(layer, batch) for layer in range(model.num_moe_layers) for batch in range(training.micro_batches)}
        steps = self.steps(plan.workload)
        if any(set(step) != keys or any(ids.shape != shape for ids in step.values()) for step in steps):
            found = next(iter(self.choices.values())).shape
            raise UserError(
                f"{where}: the recorded steps have (ranks, tokens, top_k) {found} in {len(self.choices)} exchanges, the plan "
                f"{shape} in {len(keys)} a step; record with the same batch and number of ranks"
            )


def load_routing(path: Path) -> RoutingRecord:
    """Inverse of :meth:`RoutingRecord.save`. Raises UserError when the file is none."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            choices = {}
            for name in archive.files:
                if name != _CHOSEN:
                    layer, _, batch = name.removeprefix("layer").partition(".micro_batch")
                    choices[int(layer), int(batch)] = archive[name].astype(np.int64)
            chosen = archive[_CHOSEN].astype(np.int64)
    except (OSError, ValueError, KeyError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        # Of what is no such file numpy says how to load it unsafely.
        why = f" ({error})" if isinstance(error, OSError) else ""
        raise UserError(f"{path}: is no record of routing, which `hybridep train` writes as routing.npz{why}") from None
    if chosen.ndim != 2 or (chosen < 0).any():
        raise UserError(f"{path}: is no record of routing (counts of shape {chosen.shape})")
    return RoutingRecord(chosen=chosen, choices=choices)
