"""Checkpoints that outlive their plan: one file per rank with its home experts, one with each part of the dense parameters (of
each pipeline stage), one manifest; where rank 0 is, one with what the gates chose so far.

A checkpoint is written into a hidden folder that gets its name only when every rank has finished and the power may fail, so what
is found under a checkpoint's name is complete. What copying or a disk did to it later shows in the sizes of its files, which the
manifest has: such a one is passed over. Sites need not share a file system: then each holds what its ranks wrote, with the dense
parameters and a manifest of its own, and ranks agree on the last checkpoint that all of them have whole. Experts are stored by
number: another plan, or another number of ranks, reads them back, if they are in one folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridep.config import sync, sync_folder, write_text
from hybridep.errors import UserError
from hybridep.pipeline import PipelinePlan
from hybridep.placement import IntArray
from hybridep.plan import Plan
from hybridep.run import MANIFEST, checkpoint_name, clear_partial, is_checkpoint
from hybridep.workload import Workload
from runtime.barrier import Barrier
from runtime.dense_shard import SHARD, DenseShard
from runtime.mesh import Mesh, first_line
from runtime.optimizer import MOMENTS, HomeOptimizer

_SCHEMA_VERSION = 3
_READ_VERSIONS = (2, _SCHEMA_VERSION)
"""Version 2 had the dense parameters of a stage in one file."""
_DENSE_2 = "dense.pt"
_LAYOUT = "layout"
_KEPT = ("weight", *MOMENTS)
_CHOSEN = "chosen.pt"
_ELSEWHERE = "another site wrote it: copy what the sites' folders of this name hold into one, or go on under the plan as it was"
_WITHOUT = "move the checkpoint away, and the one before it counts"
_TOGETHER = "give all sites one that was written together, or start without --resume"
_KNOWN = 64
"""Checkpoints of a folder of which others are told, the last ones."""

CodecState = dict[str, dict[str, Tensor]]
"""Part of the model -> what its codecs keep, by name."""


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    mesh: Mesh,
    shard: DenseShard,
    optimizer: HomeOptimizer,
    codecs: CodecState,
    chosen: Tensor | None,
    barrier: Barrier,
) -> Path:
    """Write the state after ``step`` steps; all ranks call it. ``shard`` is of the parameters that all ranks hold alike,
    ``codecs`` is what this rank's codecs keep, ``chosen`` (at rank 0) how often all ranks chose each expert, ``barrier`` joins
    all ranks of the run. Raises UserError when the folder cannot be written."""
    clear_partial(folder)
    # The same number at all sites, and no other checkpoint's, also of this step. All ranks have cleared when they have it.
    number = int(barrier.agree(float(random.SystemRandom().getrandbits(52))))
    final = folder / checkpoint_name(step)
    partial = folder / f".{final.name}.partial-{number:x}"
    with _all_ranks(folder, partial, barrier):
        partial.mkdir(parents=True, exist_ok=True)
        if codecs:
            kept = {part: {name: value.cpu() for name, value in values.items()} for part, values in codecs.items()}
            _write(kept, partial / _codec_shard(mesh.run_rank))
        if chosen is not None:
            _write(chosen, partial / _CHOSEN)
        _write_once(_state(optimizer, [name for name in optimizer.parameters if name != SHARD]), partial / _shard(mesh.run_rank))
    with _all_ranks(folder, partial, barrier):
        here = [rank for rank in range(mesh.whole.cluster.num_gpus) if (partial / _shard(rank)).exists()]
        own = _dense_place(mesh.whole, mesh.run_rank)
        if mesh.run_rank == min(rank for rank in here if _dense_place(mesh.whole, rank) == own):
            _write_once(_dense_state(shard, optimizer), partial / _dense_shard(*own))
    with _all_ranks(folder, partial, barrier):
        if mesh.run_rank == here[0]:
            sizes = {path.name: path.stat().st_size for path in sorted(partial.glob("*.pt"))}
            write_text(partial / MANIFEST, json.dumps(_manifest(step, number, mesh.whole) | {"bytes": sizes}, indent=1))
    with _all_ranks(folder, partial, barrier):
        if mesh.run_rank == here[0]:
            _give_name(partial, final, number)
    return final


@contextmanager
def _all_ranks(folder: Path, partial: Path, barrier: Barrier) -> Iterator[None]:
    """Ends when all ranks have written what they write inside. Where one cannot, nothing of the checkpoint stays, since the next
    one may need the room."""
    failed = None
    try:
        yield
    except (OSError, RuntimeError, UserError) as error:
        failed = UserError(f"checkpoints.folder: {folder} cannot be written ({first_line(error)})")
    if barrier.most([failed is not None])[0]:
        shutil.rmtree(partial, ignore_errors=True)
        barrier.wait()
        if failed is not None:
            raise failed
        barrier.wait()  # for the rank that ends the run


def _state(optimizer: HomeOptimizer, names: list[str]) -> dict[str, dict[str, Tensor]]:
    # From host memory, so that a file does not remember which device it came from.
    return {name: {key: value.cpu() for key, value in optimizer.state(name).items()} for name in names}


def _dense_state(shard: DenseShard, optimizer: HomeOptimizer) -> dict[str, Any]:
    """What the optimizer keeps of the part, and where what parameters are in it."""
    state = _state(optimizer, [SHARD])[SHARD]
    layout = {
        piece.name: {"first": piece.first, "begin": piece.where.start, "end": piece.where.stop, "shape": list(piece.shape)}
        for piece in shard.pieces()
    }
    # A view of all weights would be written with all of them.
    whole = {key: value if value.untyped_storage().nbytes() == value.nbytes else value.clone() for key, value in state.items()}
    return {_LAYOUT: layout, **whole}


def _write_once(state: Any, path: Path) -> None:
    # Whole or not at all: of ranks that see each other's files late several may write the same one.
    own = path.with_suffix(f".{os.getpid()}")
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
        "schema_version": _SCHEMA_VERSION,
        "step": step,
        "number": number,
        "num_ranks": plan.cluster.num_gpus,
        "homes": [home.tolist() for home in layer_homes(plan)],
        "dense": [
            _dense_shard(stage, part)
            for stage in range(1 if isinstance(plan, Plan) else len(plan.stages))
            for part in range(plan.cluster.ranks_per_site)
        ],
        "workload": plan.workload.model_dump(mode="json"),
        "plan": plan.digest,
    }


def _give_name(partial: Path, final: Path, number: int) -> None:
    with suppress(UserError):
        if _read_manifest(final)["number"] == number:
            return  # another rank has been here, which did not see this one's files yet
    if os.path.lexists(final):
        # Before it is deleted, so that what has the name is complete at any time; what never was a checkpoint stays.
        final.rename(partial.with_name(f"{partial.name}-before" if is_checkpoint(final) else f"{final.name}.other-{number:x}"))
    sync_folder(partial)
    partial.rename(final)
    sync_folder(final.parent)
    clear_partial(final.parent)


class LastCheckpoint(NamedTuple):
    """What to go on from."""

    path: Path
    damaged: list[str]
    """What is wrong with later ones, as this rank sees them."""


def last_checkpoint(folder: Path, barrier: Barrier) -> LastCheckpoint:
    """The checkpoint with the most steps that all ranks have whole; all ranks call it. Raises UserError when there is none."""
    mine, damage = dict[int, int](), dict[str, str]()
    for path in folder.glob("step-*"):
        if is_checkpoint(path):
            try:
                manifest = _read_manifest(path)
                mine[manifest["step"]] = manifest["number"]
            except _UnreadableError as error:
                damage[path.name] = error.args[0]
    while True:
        told = torch.full((_KNOWN, 2), -1, dtype=torch.int64)
        for place, one in enumerate(sorted(mine.items())[-_KNOWN:]):
            told[place] = torch.tensor(one)
        everyone = barrier.gather(told)
        step = int(barrier.agree(-1.0 if everyone is None else float(_last_of_all(everyone))))
        name = checkpoint_name(step)
        if step < 0:
            break
        # Of this one only: stores of many checkpoints hold many files.
        wrong = _damage(folder / name)
        if wrong is not None:
            damage[name] = wrong
        if not barrier.most([wrong is not None])[0]:
            return LastCheckpoint(folder / name, [damage[later] for later in sorted(damage) if later > name])
        del mine[step]
    if barrier.most([bool(damage)])[0] and not damage:
        barrier.wait()  # for the rank that ends the run
    if damage:
        found = "; ".join(damage[name] for name in sorted(damage))
        raise UserError(f"checkpoints.folder: {folder} holds no checkpoint that all ranks have whole ({found}); {_TOGETHER}")
    if not mine:
        raise UserError(f"checkpoints.folder: {folder} holds no complete checkpoint; start without --resume")
    steps = ", ".join(map(str, sorted(mine)))
    raise UserError(f"checkpoints.folder: {folder} holds checkpoints of steps {steps}, none of which all ranks have; {_TOGETHER}")


def _damage(path: Path) -> str | None:
    """What of a checkpoint's files is not as it was written; their contents are not read."""
    sizes = _read_manifest(path)["bytes"]
    with _reading(path):
        for name, size in sizes.items():
            if not os.path.lexists(path / name):
                return f"checkpoint {path}: {name} is gone"
            found = (path / name).stat().st_size
            if found != size:
                return f"checkpoint {path}: {name} has {found} bytes, and had {size}"
    return None


def keep_last(folder: Path, number: int, step: int) -> None:
    """Remove checkpoints of up to ``step`` steps that are older than the last ``number`` whole ones. Several ranks may do so at
    once; what has a checkpoint's name is complete at any time."""
    found = {int(path.name.removeprefix("step-")): path for path in folder.glob("step-*") if is_checkpoint(path)}
    whole = sorted(one for one in found if one <= step and _is_whole(found[one]))
    for old in [one for one in found if one < whole[-number]] if len(whole) >= number else []:
        with suppress(OSError):  # another rank has been here
            found[old].rename(folder / f".{found[old].name}.partial-old")
    clear_partial(folder)


def _is_whole(path: Path) -> bool:
    try:
        return _damage(path) is None
    except UserError:
        return False


def _last_of_all(everyone: Sequence[Tensor]) -> int:
    """Step of the last checkpoint that all ranks have, or -1. everyone: [K, 2] steps and numbers of each rank's."""
    common = set.intersection(*({(int(step), int(number)) for step, number in one if step >= 0} for one in everyone))
    return max((step for step, _ in common), default=-1)


class _UnreadableError(UserError):
    """A checkpoint's contents are not what was written."""

    def __str__(self) -> str:
        return f"{self.args[0]}; {_WITHOUT}"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What goes wrong inside becomes a UserError that names the file, or the checkpoint."""
    try:
        yield
    except UnpicklingError:  # whose advice is to trust the file
        raise _UnreadableError(f"checkpoint {path}: is damaged") from None
    except OSError as error:
        raise UserError(f"checkpoint {path}: cannot be read ({first_line(error)})") from None
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError) as error:
        # What torch goes on to say is about how it was built.
        raise _UnreadableError(f"checkpoint {path}: cannot be read ({first_line(error).split('. ')[0]})") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    with _reading(path / MANIFEST):
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        step, number = int(manifest["step"]), int(manifest.get("number", 0))
        sizes = dict(manifest.get("bytes", {}))
    if path.name != checkpoint_name(step):
        raise UserError(f"checkpoint {path}: is of step {step}; name it {checkpoint_name(step)}")
    return manifest | {"step": step, "number": number, "bytes": sizes}


def load_checkpoint(path: Path, *, mesh: Mesh, shard: DenseShard, optimizer: HomeOptimizer) -> int:
    """Restore weights and moments, of dense parameters those of this rank's part; returns the number of steps made. Only files
    with this rank's experts are read, and those of dense parameters that are here.

    Raises UserError when the checkpoint was made for another model or element type, or cannot be read.
    """
    manifest = _read_manifest(path)
    with _reading(path):
        _require_known_version(path, manifest)
        _require_same_model(path, manifest["workload"], mesh.whole.workload)
        saved = _SavedDense(path, manifest)
        state = optimizer.state(SHARD)
        for piece in shard.pieces():
            saved.copy_to(piece.name, piece.first, {key: value[piece.where] for key, value in state.items()})
        optimizer.load(SHARD, state)
        _load_experts(path, mesh, optimizer)
    return int(manifest["step"])


def load_codecs(path: Path, mesh: Mesh) -> CodecState | None:
    """What this rank's codecs kept; None where the checkpoint was written under another plan or without such codecs."""
    manifest, shard = _read_manifest(path), path / _codec_shard(mesh.run_rank)
    with _reading(path):
        return _read(shard) if manifest["plan"] == mesh.whole.digest and shard.exists() else None


def load_chosen(path: Path) -> Tensor | None:
    """How often all ranks had chosen each expert; None where the checkpoint does not say so here."""
    return _read(path / _CHOSEN) if (path / _CHOSEN).exists() else None


class SavedExperts:
    """Experts out of a checkpoint, at home anywhere."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._homes: list[list[int]] = _read_manifest(path)["homes"]
        self._shards: dict[int, Any] = {}

    def state(self, layer: int, expert: int) -> dict[str, Tensor]:
        """Weight and moments of one expert, each [P]."""
        homes = self._homes[layer]
        if homes[expert] not in self._shards:
            shard = self._path / _shard(homes[expert])
            if not shard.exists():
                raise UserError(f"checkpoint {self._path}: {shard.name} is not here; {_ELSEWHERE}")
            self._shards[homes[expert]] = _read(shard)
        saved, row = self._shards[homes[expert]][expert_name(layer)], homes[:expert].count(homes[expert])
        return {key: value[row] for key, value in saved.items()}


class _Piece(NamedTuple):
    """Of one parameter, as one row."""

    first: int
    shape: torch.Size
    """Of the whole parameter."""
    values: dict[str, Tensor]
    """[n]: weight and moments."""


class _SavedDense:
    """Dense parameters out of a checkpoint, in whatever parts they were written."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self._path = path
        self._pieces: dict[str, list[_Piece]] = {}
        for file in (path / name for name in manifest.get("dense", [_DENSE_2])):
            content = _read(file) if file.exists() else {}
            if _LAYOUT in content:
                for name, at in content[_LAYOUT].items():
                    values = {key: content[key][at["begin"] : at["end"]] for key in _KEPT}
                    self._add(name, _Piece(at["first"], torch.Size(at["shape"]), values))
            else:
                for name, kept in content.items():
                    self._add(name, _Piece(0, kept["weight"].shape, {key: kept[key].flatten() for key in _KEPT}))

    def _add(self, name: str, piece: _Piece) -> None:
        self._pieces.setdefault(name, []).append(piece)

    def shape_and_type(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Of a parameter."""
        piece = self._of(name)[0]
        return piece.shape, piece.values["weight"].dtype

    def copy_to(self, name: str, first: int, into: Mapping[str, Tensor]) -> None:
        """What is kept of a parameter, as one row, from one element on: as many as ``into`` ([n] each) has."""
        at, last = first, first + len(next(iter(into.values())))
        for piece in sorted(self._of(name), key=lambda piece: piece.first):
            end = min(piece.first + len(piece.values["weight"]), last)
            if piece.first <= at < end:
                for key, target in into.items():
                    target[at - first : end - first].copy_(piece.values[key][at - piece.first : end - piece.first])
                at = end
        if at < last:
            raise UserError(f"checkpoint {self._path}: {name} is not here; {_ELSEWHERE}")

    def _of(self, name: str) -> list[_Piece]:
        if name not in self._pieces:
            raise UserError(f"checkpoint {self._path}: {name} is not here; {_ELSEWHERE}")
        return self._pieces[name]


class SavedWeights:
    """All weights of a checkpoint, as a whole model's: master weights where the model's own are bf16."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where it cannot be read, or other sites have parts of it."""
        manifest, self._path = _read_manifest(path), path
        if (damage := _damage(path)) is not None:
            raise UserError(f"{damage}; {_WITHOUT}")
        with _reading(path):
            _require_known_version(path, manifest)
            self.workload = Workload.model_validate(manifest["workload"])
        self._experts, self._dense = SavedExperts(path), _SavedDense(path, manifest)

    def dense(self, name: str) -> Tensor:
        """Of a parameter outside the routed experts."""
        with _reading(self._path):
            shape, dtype = self._dense.shape_and_type(name)
            weight = torch.empty(shape.numel(), dtype=dtype)
            self._dense.copy_to(name, 0, {"weight": weight})
            return weight.view(shape)

    def expert(self, layer: int, expert: int) -> Tensor:
        """[P]: of one expert of a MoE layer."""
        return self._experts.state(layer, expert)["weight"]


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


def _require_known_version(path: Path, manifest: dict[str, Any]) -> None:
    if manifest["schema_version"] not in _READ_VERSIONS:
        read = " and ".join(map(str, _READ_VERSIONS))
        raise UserError(f"checkpoint {path}: is of schema {manifest['schema_version']}, this version reads {read}")


def _require_same_model(path: Path, saved: dict[str, Any], workload: Workload) -> None:
    # With what older versions did not write.
    before, now = (Workload.model_validate(saved).model_dump(mode="json"), workload.model_dump(mode="json"))
    pairs = [("model", key) for key in now["model"]] + [("training", "dtype")]
    for section, key in pairs:
        if before[section][key] != now[section][key]:
            raise UserError(
                f"checkpoint {path}: {section}.{key} was {before[section][key]!r} when it was written, now it is "
                f"{now[section][key]!r}; continue with the old value or start without --resume"
            )


def _shard(rank: int) -> str:
    return f"experts-{rank:05d}.pt"


def _dense_shard(stage: int, part: int) -> str:
    return f"dense-{stage:05d}-{part:05d}.pt"


def _codec_shard(rank: int) -> str:
    return f"codecs-{rank:05d}.pt"


def _read(path: Path) -> Any:
    # Only tensors are ever loaded: a checkpoint from elsewhere cannot run code. mmap reads just the rows that are used.
    with _reading(path):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
