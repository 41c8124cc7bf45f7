"""Checkpoints that outlive their plan: one file per rank with its home experts, one with the dense parameters (of each
pipeline stage), one manifest.

A checkpoint is written into a hidden folder that gets its name only when every rank has finished, so what is found under
a checkpoint's name is complete. Experts are stored by number: another plan, or another number of ranks, reads them back.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridep.config import write_text
from hybridep.errors import UserError
from hybridep.pipeline import PipelinePlan
from hybridep.placement import IntArray
from hybridep.plan import Plan
from hybridep.workload import Workload
from runtime.mesh import Mesh
from runtime.optimizer import HomeOptimizer

MANIFEST = "manifest.json"
_SCHEMA_VERSION = 2
DENSE = "dense.pt"

CodecState = dict[str, dict[str, Tensor]]
"""Part of the model -> what its codecs keep, by name."""


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    mesh: Mesh,
    dense: list[str],
    optimizer: HomeOptimizer,
    codecs: CodecState,
    barrier: Callable[[], None],
) -> Path:
    """Write the state after ``step`` steps; all ranks call it. ``dense`` names the parameters that all ranks hold alike,
    ``codecs`` is what this rank's codecs keep, ``barrier`` returns once all ranks have called it. Raises UserError when the
    folder cannot be written."""
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _save(optimizer, [name for name in optimizer.parameters if name not in dense], partial / _shard(mesh.run_rank))
        if codecs:
            kept = {part: {name: value.cpu() for name, value in values.items()} for part, values in codecs.items()}
            torch.save(kept, partial / _codec_shard(mesh.run_rank))
        if mesh.rank == 0:
            _save(optimizer, dense, partial / _dense_shard(mesh.stage))
        barrier()
        if mesh.run_rank == 0:
            _complete(partial, final, step, mesh.whole)
    except (OSError, RuntimeError) as error:
        raise UserError(f"checkpoints.folder: {folder} cannot be written ({_one_line(error)})") from None
    barrier()
    return final


def _save(optimizer: HomeOptimizer, names: list[str], path: Path) -> None:
    # From host memory, so that a file does not remember which device it came from.
    torch.save({name: {key: value.cpu() for key, value in optimizer.state(name).items()} for name in names}, path)


def _complete(partial: Path, final: Path, step: int, plan: Plan | PipelinePlan) -> None:
    missing = [_shard(rank) for rank in range(plan.cluster.num_gpus) if not (partial / _shard(rank)).exists()]
    if missing:
        raise UserError(
            f"checkpoints.folder: {partial.parent} lacks {missing[0]}; it must be on a file system that all ranks share"
        )
    manifest = {
        "schema_version": _SCHEMA_VERSION,
        "step": step,
        "num_ranks": plan.cluster.num_gpus,
        "homes": [home.tolist() for home in layer_homes(plan)],
        "dense": [_dense_shard(stage) for stage in range(1 if isinstance(plan, Plan) else len(plan.stages))],
        "workload": plan.workload.model_dump(mode="json"),
        "plan": plan.digest,
    }
    write_text(partial / MANIFEST, json.dumps(manifest, indent=1))
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)


def latest_checkpoint(folder: Path) -> Path:
    """The complete checkpoint with the most steps. Raises UserError when there is none."""
    found = sorted(path for path in folder.glob("step-*") if (path / MANIFEST).is_file())
    if not found:
        raise UserError(f"checkpoints.folder: {folder} holds no complete checkpoint; start without --resume")
    return found[-1]


def load_checkpoint(path: Path, *, mesh: Mesh, dense: list[str], optimizer: HomeOptimizer) -> int:
    """Restore weights and moments; returns the number of steps made. Only files with this rank's experts are read.

    Raises UserError when the checkpoint was made for another model or element type, or cannot be read.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["schema_version"] != _SCHEMA_VERSION:
            raise UserError(f"checkpoint {path}: is of schema {manifest['schema_version']}, this version reads {_SCHEMA_VERSION}")
        _require_same_model(path, manifest["workload"], mesh.whole.workload)
        step = int(manifest["step"])
        state = {name: value for shard in manifest.get("dense", [DENSE]) for name, value in _read(path / shard).items()}
        for name in dense:
            optimizer.load(name, state[name])
        _load_experts(path, mesh, optimizer)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise UserError(f"checkpoint {path}: cannot be read ({_one_line(error)})") from None
    return step


def load_codecs(path: Path, mesh: Mesh) -> CodecState | None:
    """What this rank's codecs kept; None where the checkpoint was written under another plan or without such codecs."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        shard = path / _codec_shard(mesh.run_rank)
        return _read(shard) if manifest["plan"] == mesh.whole.digest and shard.exists() else None
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise UserError(f"checkpoint {path}: cannot be read ({_one_line(error)})") from None


class SavedExperts:
    """Experts out of a checkpoint, at home anywhere."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._homes: list[list[int]] = json.loads((path / MANIFEST).read_text())["homes"]
        self._shards: dict[int, Any] = {}

    def state(self, layer: int, expert: int) -> dict[str, Tensor]:
        """Weight and moments of one expert, each [P]."""
        homes = self._homes[layer]
        if homes[expert] not in self._shards:
            self._shards[homes[expert]] = _read(self._path / _shard(homes[expert]))
        saved, row = self._shards[homes[expert]][expert_name(layer)], homes[:expert].count(homes[expert])
        return {key: value[row] for key, value in saved.items()}


def _load_experts(path: Path, mesh: Mesh, optimizer: HomeOptimizer) -> None:
    saved = SavedExperts(path)
    for own, _, placement in mesh.plan.each_layer():
        layer = mesh.first_moe_layer + own
        name = expert_name(layer)
        state = {key: torch.empty_like(value) for key, value in optimizer.state(name).items()}
        for row, expert in enumerate(np.flatnonzero(placement.home == mesh.rank)):
            for key, value in saved.state(layer, int(expert)).items():
                state[key][row] = value
        optimizer.load(name, state)


def expert_name(layer: int) -> str:
    """Name of a layer's home experts [n_home, P] among the parameters of a rank."""
    return f"layer{layer}.experts"


def layer_homes(plan: Plan | PipelinePlan) -> list[IntArray]:
    """[E] for each MoE layer of the model: the rank of the run at which each expert lives."""
    if isinstance(plan, Plan):
        return [placement.home for _, _, placement in plan.each_layer()]
    return [ranks[home] for ranks, one in zip(plan.ranks, plan.plans, strict=True) for home in layer_homes(one)]


def _require_same_model(path: Path, saved: dict[str, Any], workload: Workload) -> None:
    now = workload.model_dump(mode="json")
    pairs = [("model", key) for key in now["model"]] + [("training", "dtype")]
    for section, key in pairs:
        if saved[section].get(key) != now[section][key]:
            raise UserError(
                f"checkpoint {path}: {section}.{key} was {saved[section].get(key)!r} when it was written, now it is "
                f"{now[section][key]!r}; continue with the old value or start without --resume"
            )


def _shard(rank: int) -> str:
    return f"experts-{rank:05d}.pt"


def _dense_shard(stage: int) -> str:
    return f"dense-{stage:05d}.pt" if stage else DENSE


def _codec_shard(rank: int) -> str:
    return f"codecs-{rank:05d}.pt"


def _read(path: Path) -> Any:
    # Only tensors are ever loaded: a checkpoint from elsewhere cannot run code. mmap reads just the rows that are used.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
