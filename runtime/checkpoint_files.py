"""A checkpoint's files: their names, what is wrong with them, and the weights and moments in them, for any plan to read.

One file per rank has its home experts by number, one has each part of the dense parameters (``runtime.dense_shard``) of each
pipeline stage; version 2 had those of a stage in one file. The manifest says which there are, and how large each is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridep.checkpoint_folders import MANIFEST, checkpoint_name, checkpoints
from hybridep.errors import UserError
from hybridep.workload import Model, Workload
from runtime.mesh import first_line
from runtime.optimizer import MOMENTS

SCHEMA_VERSION = 3
_READ_VERSIONS = (2, SCHEMA_VERSION)
_NEEDED = {"plan", "workload", "homes"}
_DENSE_2 = "dense.pt"
CHOSEN = "chosen.pt"
"""File with what all gates chose so far; where rank 0 is."""
EXPERT_BIAS = "expert_bias"
"""In the manifest, where gates have biases: [MoE layers][E]."""
LAYOUT = "layout"
"""In a file of dense parameters: where each is in the part, by name."""
_KEPT = ("weight", *MOMENTS)
_ELSEWHERE = "another site wrote it: copy what the sites' folders of this name hold into one"
_WITHOUT = "move the checkpoint away, and the one before it counts"


class UnreadableError(UserError):
    """A checkpoint's contents are not what was written."""

    def __str__(self) -> str:
        return f"{self.args[0]}; {_WITHOUT}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong inside becomes a UserError that names the file, or the checkpoint."""
    try:
        yield
    except UnpicklingError:  # whose advice is to trust the file
        raise UnreadableError(f"checkpoint {path}: is damaged") from None
    except OSError as error:
        raise UserError(f"checkpoint {path}: cannot be read ({first_line(error)})") from None
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError) as error:
        # What torch goes on to say is about how it was built.
        raise UnreadableError(f"checkpoint {path}: cannot be read ({first_line(error).split('. ')[0]})") from None


def read_manifest(path: Path) -> dict[str, Any]:
    """Of the checkpoint in a folder. Raises UnreadableError where it is damaged, UserError where the folder is misnamed."""
    with reading(path / MANIFEST):
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        step, number, attempt = int(manifest["step"]), int(manifest.get("number", 0)), int(manifest.get("attempt", 0))
        sizes, dense = dict(manifest.get("bytes", {})), list(manifest.get("dense", [_DENSE_2]))
        if manifest.get("schema_version") in _READ_VERSIONS and (missing := _NEEDED - manifest.keys()):
            raise KeyError(min(missing))
    if path.name != checkpoint_name(step):
        raise UserError(f"checkpoint {path}: is of step {step}; name it {checkpoint_name(step)}")
    return manifest | {"step": step, "number": number, "attempt": attempt, "bytes": sizes, "dense": dense}


def damage_of(path: Path) -> str | None:
    """What of a checkpoint's files is not as it was written; their contents are not read."""
    sizes = read_manifest(path)["bytes"]
    with reading(path):
        for name, size in sizes.items():
            if not os.path.lexists(path / name):
                return f"checkpoint {path}: {name} is gone"
            found = (path / name).stat().st_size
            if found != size:
                return f"checkpoint {path}: {name} has {found} bytes, and had {size}"
    return None


def is_whole(path: Path) -> bool:
    """Whether all of a checkpoint's files are as they were written, as far as their sizes tell."""
    try:
        return damage_of(path) is None
    except UserError:
        return False


def last_with_all(folder: Path) -> Path | None:
    """The checkpoint that was written last (by when its run was started, then by steps) of those that have all files here; where
    none has, of all that can be read; None where none can. Raises UserError for one of
    another version."""
    found = list[tuple[bool, int, int, Path]]()
    for path in checkpoints(folder):
        with suppress(UnreadableError):
            manifest = read_manifest(path)
            require_known_version(path, manifest)
            found.append((needed_files(manifest) <= whole_files(path).keys(), manifest["attempt"], manifest["step"], path))
    return max(found)[-1] if found else None


def whole_files(path: Path) -> dict[str, int]:
    """Those that are here, and as they were written as far as their sizes tell: how many bytes each has."""
    sizes = read_manifest(path)["bytes"]
    with reading(path):
        here = {one.name: one.stat().st_size for one in sorted(path.glob("*.pt")) if one.exists()}
    return {name: size for name, size in here.items() if sizes.get(name, size) == size}


def needed_files(manifest: Mapping[str, Any]) -> set[str]:
    """Without which a model is not whole."""
    return {expert_shard(rank) for rank in {rank for homes in manifest["homes"] for rank in homes}} | set(manifest["dense"])


def dense_pieces(file: Path) -> dict[str, tuple[int, int]]:
    """What of which parameter, as one row, is in a file of dense parameters: the first element, and the one after the last."""
    content = read_file(file)
    if LAYOUT not in content:
        return {name: (0, kept["weight"].numel()) for name, kept in content.items()}
    return {name: (at["first"], at["first"] + at["end"] - at["begin"]) for name, at in content[LAYOUT].items()}


def read_expert_bias(path: Path, manifest: Mapping[str, Any], model: Model) -> Tensor:
    """fp64 [MoE layers, E]: the biases of all gates, which are in the manifest. What had fewer bits is as it was."""
    with reading(path):
        found = torch.tensor(manifest[EXPERT_BIAS], dtype=torch.float64)
        return found.view(model.num_moe_layers, model.num_experts)


def require_known_version(path: Path, manifest: dict[str, Any]) -> None:
    """Raises UserError for a checkpoint that this version cannot read."""
    if manifest["schema_version"] not in _READ_VERSIONS:
        read = " and ".join(map(str, _READ_VERSIONS))
        raise UserError(f"checkpoint {path}: is of schema {manifest['schema_version']}, this version reads {read}")


def require_same_model(path: Path, saved: dict[str, Any], workload: Workload) -> None:
    """Raises UserError for the checkpoint of another model or element type."""
    # With what older versions did not write.
    before, now = (Workload.model_validate(saved).model_dump(mode="json"), workload.model_dump(mode="json"))
    pairs = [("model", key) for key in now["model"]] + [("training", "dtype")]
    for section, key in pairs:
        if before[section][key] != now[section][key]:
            raise UserError(
                f"checkpoint {path}: {section}.{key} was {before[section][key]!r} when it was written, now it is "
                f"{now[section][key]!r}; continue with the old value or start without --resume"
            )


def changed_settings(path: Path, manifest: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What there is to say of a checkpoint of a run with other settings (``Run.settings``); older versions wrote none."""
    before = manifest.get("settings", {})
    changed = [f"{key} {before[key]!r} (now {now[key]!r})" for key in now if key in before and before[key] != now[key]]
    return [f"{path.name} was written with {', '.join(changed)}; the steps after it are made with what is given now"] * bool(
        changed
    )


class SavedExperts:
    """Experts out of a checkpoint, at home anywhere."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._homes: list[list[int]] = read_manifest(path)["homes"]
        self._shards: dict[int, Any] = {}

    def state(self, layer: int, expert: int) -> dict[str, Tensor]:
        """Weight and moments of one expert, each [P]."""
        homes = self._homes[layer]
        if homes[expert] not in self._shards:
            shard = self._path / expert_shard(homes[expert])
            if not shard.exists():
                raise UserError(f"checkpoint {self._path}: {shard.name} is not here; {_ELSEWHERE}")
            self._shards[homes[expert]] = read_file(shard)
        saved, row = self._shards[homes[expert]][expert_name(layer)], homes[:expert].count(homes[expert])
        return {key: value[row] for key, value in saved.items()}


class _Piece(NamedTuple):
    """Of one parameter, as one row."""

    first: int
    shape: torch.Size
    """Of the whole parameter."""
    values: dict[str, Tensor]
    """[n]: weight and moments."""


class SavedDense:
    """Dense parameters out of a checkpoint, in whatever parts they were written."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self._path = path
        self._pieces: dict[str, list[_Piece]] = {}
        for file in (path / name for name in manifest["dense"]):
            content = read_file(file) if file.exists() else {}
            if LAYOUT in content:
                for name, at in content[LAYOUT].items():
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
        manifest, self._path = read_manifest(path), path
        if (damage := damage_of(path)) is not None:
            raise UserError(f"{damage}; {_WITHOUT}")
        with reading(path):
            require_known_version(path, manifest)
            self.workload = Workload.model_validate(manifest["workload"])
        model, self._biases = self.workload.model, dict[str, Tensor]()
        if model.expert_bias_update_rate is not None:
            for layer, bias_E in enumerate(read_expert_bias(path, manifest, model), start=model.num_dense_layers):
                self._biases[f"layers.{layer}.feed_forward.gate.expert_bias"] = bias_E
        self._experts, self._dense = SavedExperts(path), SavedDense(path, manifest)

    def dense(self, name: str) -> Tensor:
        """Of a parameter outside the routed experts, or the biases of a gate (fp64)."""
        if name in self._biases:
            return self._biases[name]
        with reading(self._path):
            shape, dtype = self._dense.shape_and_type(name)
            weight = torch.empty(shape.numel(), dtype=dtype)
            self._dense.copy_to(name, 0, {"weight": weight})
            return weight.view(shape)

    def expert(self, layer: int, expert: int) -> Tensor:
        """[P]: of one expert of a MoE layer."""
        return self._experts.state(layer, expert)["weight"]


def expert_name(layer: int) -> str:
    """Name of a layer's home experts [n_home, P] among the parameters of a rank."""
    return f"layer{layer}.experts"


def expert_shard(rank: int) -> str:
    """Name of the file with the experts at home on a rank of the run."""
    return f"experts-{rank:05d}.pt"


def dense_shard(stage: int, part: int) -> str:
    """Name of the file with one part of a stage's dense parameters."""
    return f"dense-{stage:05d}-{part:05d}.pt"


def codec_shard(rank: int) -> str:
    """Name of the file with what a rank's codecs keep."""
    return f"codecs-{rank:05d}.pt"


def is_codec_shard(name: str) -> bool:
    """Whether a file is one of these."""
    return name.startswith("codecs-")


def read_file(path: Path) -> Any:
    """What a file holds. Only tensors are ever loaded: a checkpoint from elsewhere cannot run code. Just rows that are used are
    read. Raises UserError."""
    with reading(path):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
