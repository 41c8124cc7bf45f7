"""Checkpoints that outlive their plan: one file per rank with its home experts, one with each part of the dense parameters (of
each pipeline stage), one manifest, which has the gates' biases, too; where rank 0 is, one with what the gates chose so far.

A checkpoint is written into a hidden folder that gets its name only when every rank has finished and the power may fail, so what
is found under a checkpoint's name is complete. What copying or a disk did to it later shows in the sizes of its files, which the
manifest has: such files do not count. Sites need not share a file system: then each holds what its ranks wrote, with the dense
parameters and a manifest of its own, and as many other sites' files as are to outlive the loss of a site. Experts are stored by
number: another plan, or another number of ranks, reads them back (``runtime.checkpoint_search`` brings what a site lacks).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridep.arrays import IntArray
from hybridep.checkpoint_folders import MANIFEST, checkpoint_name, checkpoints, clear_partial, is_checkpoint, steps_of, superseded
from hybridep.config import sync, sync_folder, write_text
from hybridep.errors import UserError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import Plan
from hybridep.workload import Model
from runtime.barrier import Barrier
from runtime.checkpoint_files import (
    CHOSEN,
    EXPERT_BIAS,
    LAYOUT,
    SCHEMA_VERSION,
    SavedDense,
    SavedExperts,
    codec_shard,
    dense_shard,
    expert_name,
    expert_shard,
    is_whole,
    read_expert_bias,
    read_file,
    read_manifest,
    reading,
    require_known_version,
    require_same_model,
)
from runtime.checkpoint_travel import Roads, Transfer, arrival, carry, kept, together
from runtime.dense_shard import SHARD, DenseShard
from runtime.mesh import Mesh
from runtime.optimizer import HomeOptimizer
from runtime.transport import Transport

CodecState = dict[str, dict[str, Tensor]]
"""Part of the model -> what its codecs keep, by name."""


class RankState(NamedTuple):
    """What one rank writes, in host memory, so that a file does not remember which device it came from."""

    experts: Callable[[], dict[str, dict[str, Tensor]]]
    """Weight and moments of its home experts, by layer."""
    dense: Callable[[], dict[str, Any]]
    """What the optimizer keeps of its part of the dense parameters, and where what parameters are in it."""
    codecs: CodecState
    chosen: Tensor | None
    """At rank 0 how often all ranks chose each expert."""
    expert_bias: Tensor | None
    """fp64 [MoE layers of the model, E]: of the gates, for the manifest."""


def rank_state(
    shard: DenseShard,
    optimizer: HomeOptimizer,
    codecs: CodecState,
    chosen: Tensor | None,
    expert_bias: Tensor | None = None,
    *,
    apart: bool = False,
) -> RankState:
    """As it is when it is asked for; ``apart``: as it is now, whatever training does next."""

    def host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moved = {key: value.to("cpu", copy=apart) for key, value in values.items()}
        # A view would be written with all that it is a view of.
        return {key: one if one.untyped_storage().nbytes() == one.nbytes else one.clone() for key, one in moved.items()}

    def experts() -> dict[str, dict[str, Tensor]]:
        return {name: host(optimizer.state(name)) for name in optimizer.parameters if name != SHARD}

    def dense() -> dict[str, Any]:
        layout = {
            piece.name: {"first": piece.first, "begin": piece.where.start, "end": piece.where.stop, "shape": list(piece.shape)}
            for piece in shard.pieces()
        }
        return {LAYOUT: layout, **host(optimizer.state(SHARD))}

    kept = {part: host(values) for part, values in codecs.items()}
    if not apart:
        return RankState(experts, dense, kept, chosen, expert_bias)
    own_experts, own_dense = experts(), dense()
    return RankState(lambda: own_experts, lambda: own_dense, kept, chosen, expert_bias)


def save_checkpoint(
    folder: Path,
    step: int,
    state: RankState,
    *,
    mesh: Mesh,
    barrier: Barrier,
    transport: Transport,
    copies: int = 0,
    attempt: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the state after ``step`` steps; all ranks call it. ``barrier`` and ``transport`` join all ranks of the run, and so
    many other sites keep what one has written. ``attempt`` is when it was last started, ``settings`` are ``Run.settings``. Raises
    UserError when the folder cannot be written."""
    clear_partial(folder)
    # The same number at all sites, and no other checkpoint's, also of this step. All ranks have cleared when they have it.
    number = int(barrier.agree(float(random.SystemRandom().getrandbits(52))))
    final = folder / checkpoint_name(step)
    partial = folder / f".{final.name}.partial-{number:x}"
    with together(folder, barrier, partial):
        partial.mkdir(parents=True, exist_ok=True)
        if state.codecs:
            _write(state.codecs, partial / codec_shard(mesh.run_rank))
        if state.chosen is not None:
            _write(state.chosen, partial / CHOSEN)
        _write_once(state.experts(), partial / expert_shard(mesh.run_rank), mesh.run_rank)
    with together(folder, barrier, partial):
        here = [rank for rank in range(mesh.whole.cluster.num_gpus) if (partial / expert_shard(rank)).exists()]
        own = _dense_place(mesh.whole, mesh.run_rank)
        if mesh.run_rank == min(rank for rank in here if _dense_place(mesh.whole, rank) == own):
            _write_once(state.dense(), partial / dense_shard(*own), mesh.run_rank)
    if copies:
        transfers = _to_other_sites(partial, here, copies, mesh, barrier)
        with together(folder, barrier, partial):
            rank, cluster = mesh.run_rank, mesh.whole.cluster
            for one in carry(transfers, partial, partial, rank=rank, transport=transport, barrier=barrier, cluster=cluster):
                (partial / arrival(one.name, rank)).replace(partial / one.name)
    with together(folder, barrier, partial):
        if mesh.run_rank == here[0]:
            sizes = {path.name: path.stat().st_size for path in sorted(partial.glob("*.pt"))}
            manifest = _manifest(step, number, mesh.whole) | {"attempt": attempt, "bytes": sizes, "settings": settings or {}}
            if state.expert_bias is not None:
                # Every site has a manifest. Floats come back from its text as they were, to the bit.
                manifest[EXPERT_BIAS] = state.expert_bias.tolist()
            write_text(partial / MANIFEST, json.dumps(manifest, indent=1))
    with together(folder, barrier, partial):
        if mesh.run_rank == here[0]:
            _give_name(partial, final, number)
    return final


def _to_other_sites(partial: Path, here: list[int], copies: int, mesh: Mesh, barrier: Barrier) -> list[Transfer]:
    """Of all files, until so many sites beside one have each. ``here``: the ranks that see the folder."""
    mine = {path.name: path.stat().st_size for path in partial.glob("*.pt")} if mesh.run_rank == here[0] else {}
    told = barrier.gather_json([here[0], mine])
    transfers = list[Transfer]()
    if told is not None:
        roads = Roads(mesh.whole.cluster, [leader for leader, _ in told])
        for name, file in kept({rank: files for rank, (_, files) in enumerate(told)}).items():
            roads.copy(name, file, copies)
        transfers = roads.transfers
    return [Transfer(*one) for one in barrier.share_json(transfers)]


def _write_once(state: Any, path: Path, rank: int) -> None:
    # Whole or not at all: of ranks that see each other's files late several may write the same one.
    own = path.with_suffix(f".{rank}")
    _write(state, own)
    own.replace(path)


def _write(state: Any, path: Path) -> None:
    with path.open("wb") as stream:
        try:
            torch.save(state, stream)
            sync(stream)
        except RuntimeError as error:  # which torch makes of a full disk
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _dense_place(plan: Plan | PipelinePlan, rank: int) -> tuple[int, int]:
    """Stage of a rank, and its place in its worker of the outermost level: which part of the dense parameters it has."""
    return plan.seat(rank)[0] if isinstance(plan, PipelinePlan) else 0, rank % plan.cluster.ranks_per_site


def _manifest(step: int, number: int, plan: Plan | PipelinePlan) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "number": number,
        "num_ranks": plan.cluster.num_gpus,
        "homes": [home.tolist() for home in layer_homes(plan)],
        "dense": [
            dense_shard(stage, part)
            for stage in range(1 if isinstance(plan, Plan) else len(plan.stages))
            for part in range(plan.cluster.ranks_per_site)
        ],
        "workload": plan.workload.model_dump(mode="json"),
        "plan": plan.digest,
    }


def _give_name(partial: Path, final: Path, number: int) -> None:
    with suppress(UserError):
        if read_manifest(final)["number"] == number:
            return  # another rank has been here, which did not see this one's files yet
    if os.path.lexists(final):
        # Before it is deleted, so that what has the name is complete at any time; what never was a checkpoint stays.
        final.rename(partial.with_name(f"{partial.name}-before" if is_checkpoint(final) else f"{final.name}.other-{number:x}"))
    sync_folder(partial)
    partial.rename(final)
    sync_folder(final.parent)
    clear_partial(final.parent)


def keep_last(folder: Path, number: int, step: int) -> None:
    """Remove checkpoints of up to ``step`` steps that are older than the last ``number`` whole ones, superseded ones, too.
    Several ranks may do so at once; what has a checkpoint's name is complete at any time."""
    found = checkpoints(folder)
    whole = sorted(steps_of(path) for path in found if steps_of(path) <= step and is_whole(path))
    for old in found + superseded(folder) if len(whole) >= number else []:
        if steps_of(old) < whole[-number]:
            with suppress(OSError):  # another rank has been here
                old.rename(folder / f".{old.name}.partial-old")
    clear_partial(folder)


def load_checkpoint(path: Path, *, mesh: Mesh, shard: DenseShard, optimizer: HomeOptimizer) -> int:
    """Restore weights and moments, of dense parameters those of this rank's part; returns the number of steps made. Only files
    with this rank's experts are read, and those of dense parameters that are here.

    Raises UserError when the checkpoint was made for another model or element type, or cannot be read.
    """
    manifest = read_manifest(path)
    with reading(path):
        require_known_version(path, manifest)
        require_same_model(path, manifest["workload"], mesh.whole.workload)
        saved = SavedDense(path, manifest)
        state = optimizer.state(SHARD)
        for piece in shard.pieces():
            saved.copy_to(piece.name, piece.first, {key: value[piece.where] for key, value in state.items()})
        optimizer.load(SHARD, state)
        _load_experts(path, mesh, optimizer)
    return int(manifest["step"])


def load_codecs(path: Path, mesh: Mesh) -> CodecState | None:
    """What this rank's codecs kept; None where the checkpoint was written under another plan or without such codecs."""
    manifest, shard = read_manifest(path), path / codec_shard(mesh.run_rank)
    with reading(path):
        return read_file(shard) if manifest["plan"] == mesh.whole.digest and shard.exists() else None


def load_chosen(path: Path) -> Tensor | None:
    """How often all ranks had chosen each expert; None where the checkpoint does not say so here."""
    return read_file(path / CHOSEN) if (path / CHOSEN).exists() else None


def load_expert_bias(path: Path, model: Model) -> Tensor | None:
    """fp64 [MoE layers, E]: the biases of all gates; None where the model has none. Raises UserError."""
    if model.expert_bias_update_rate is None:
        return None
    return read_expert_bias(path, read_manifest(path), model)


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


def layer_homes(plan: Plan | PipelinePlan) -> list[IntArray]:
    """[E] for each MoE layer of the model: the rank of the run at which each expert lives."""
    if isinstance(plan, Plan):
        return [placement.home for _, _, placement in plan.each_layer()]
    return [ranks[home] for ranks, one in zip(plan.ranks, plan.plans, strict=True) for home in layer_homes(one)]
