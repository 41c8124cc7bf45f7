"""Weights of public models, as Hugging Face keeps them: read into this project's transformer, and written from its checkpoints.

A folder holds ``config.json`` (``hybridep.hugging_face``) and the weights in one or more safetensors files. Every weight there
is one of ours, or one matrix of one of ours: feed-forward networks that are flat rows here (``runtime.experts``) are three there.
Latent attention's rotated elements are in pairs of neighbours there, and here in two halves (``runtime.rotary``).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybridep.attention import LatentSizes
from hybridep.config import write_text
from hybridep.errors import UserError
from hybridep.hugging_face import CONFIG_FILE, MTP_LAYERS, QUANTIZATION, Architecture, fp8_block, read_config, require_same_model
from hybridep.hugging_face_export import architecture_for, config_for, dtype_keys
from hybridep.workload import Model
from runtime.checkpoint_files import SavedWeights
from runtime.experts import split_row
from runtime.mesh import TORCH_DTYPE

_NAMES = ("gate_proj", "up_proj", "down_proj")
_INDEX = "model.safetensors.index.json"
_SCALE = "_scale_inv"
"""Behind the name of a fp8 weight: what each of its blocks is to be multiplied by."""
_SHARD_BYTES = 5 * 10**9
_BESIDE = (
    "tokenizer*",
    "*_token*.json",
    "tiktoken.model",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*.py",
)
"""Files of a public model that hold for whatever it is trained on; code, too, which ``config.json`` may name (``auto_map``)."""


class Matrix(NamedTuple):
    """One weight of a public checkpoint: a parameter of ours, or one of the matrices of a flat row."""

    name: str
    ours: str | tuple[int, int]
    """The parameter's name; of an expert its MoE layer and its number."""
    part: int | None = None
    """Which matrix of the row: gate, up or down."""
    rotated: tuple[int, int] | None = None
    """Of each so many rows the last so many are rotated, as pairs of neighbours there."""
    wide: bool = False
    """In fp32 at least, whatever the other weights are."""


def matrices(model: Model) -> Iterator[Matrix]:
    """All weights of a public checkpoint of a whole model. Raises UserError where it is of no public architecture."""
    kind = architecture_for(model)
    yield Matrix("model.embed_tokens.weight", "embedding.weight")
    for layer in range(model.num_layers):
        yield from _layer(model, kind, layer)
    yield Matrix("model.norm.weight", "norm.weight")
    if not model.tie_embeddings:
        yield Matrix("lm_head.weight", "head.weight")


def _layer(model: Model, kind: Architecture, layer: int) -> Iterator[Matrix]:
    theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
    yield Matrix(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
    yield from _attention(model, f"{theirs}.self_attn", f"{ours}.attention")
    yield Matrix(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feed_forward_norm.weight")
    if layer < model.num_dense_layers:
        yield from _row(f"{theirs}.mlp", f"{ours}.feed_forward.row")
        return
    block = f"{theirs}.block_sparse_moe" if kind is Architecture.MIXTRAL else f"{theirs}.mlp"
    yield Matrix(f"{block}.gate.weight", f"{ours}.feed_forward.gate.weight")
    if model.expert_bias_update_rate is not None:
        yield Matrix(f"{block}.gate.e_score_correction_bias", f"{ours}.feed_forward.gate.expert_bias", wide=True)
    if model.shared_expert_gate:
        yield from _row(f"{block}.shared_expert", f"{ours}.feed_forward.shared.row")
        yield Matrix(f"{block}.shared_expert_gate.weight", f"{ours}.feed_forward.shared_gate.weight")
    elif model.shared_ffn_size:
        yield from _row(f"{block}.shared_experts", f"{ours}.feed_forward.shared.row")
    names = ("w1", "w3", "w2") if kind is Architecture.MIXTRAL else _NAMES
    for expert in range(model.num_experts):
        yield from _row(f"{block}.experts.{expert}", (layer - model.num_dense_layers, expert), names)


def _attention(model: Model, theirs: str, ours: str) -> Iterator[Matrix]:
    if model.latent_attention is not None:
        yield from _latent_attention(model.latent_attention, theirs, ours)
        return
    for their_name, our_name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
        for one in ("weight", "bias") if model.attention_bias and their_name != "o" else ("weight",):
            yield Matrix(f"{theirs}.{their_name}_proj.{one}", f"{ours}.{our_name}.{one}")
        if model.qk_norm and their_name in "qk":
            yield Matrix(f"{theirs}.{their_name}_norm.weight", f"{ours}.{our_name}_norm.weight")


def _latent_attention(sizes: LatentSizes, theirs: str, ours: str) -> Iterator[Matrix]:
    rope = sizes.rope_head_dim
    query, key = (sizes.key_head_dim, rope), (sizes.kv_rank + rope, rope)
    if sizes.query_rank is None:
        yield Matrix(f"{theirs}.q_proj.weight", f"{ours}.query.weight", rotated=query)
    else:
        yield Matrix(f"{theirs}.q_a_proj.weight", f"{ours}.query_down.weight")
        yield Matrix(f"{theirs}.q_a_layernorm.weight", f"{ours}.query_norm.weight")
        yield Matrix(f"{theirs}.q_b_proj.weight", f"{ours}.query_up.weight", rotated=query)
    yield Matrix(f"{theirs}.kv_a_proj_with_mqa.weight", f"{ours}.kv_down.weight", rotated=key)
    yield Matrix(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_norm.weight")
    yield Matrix(f"{theirs}.kv_b_proj.weight", f"{ours}.kv_up.weight")
    yield Matrix(f"{theirs}.o_proj.weight", f"{ours}.output.weight")


def _row(theirs: str, ours: str | tuple[int, int], names: tuple[str, ...] = _NAMES) -> Iterator[Matrix]:
    for part, name in enumerate(names):
        yield Matrix(f"{theirs}.{name}.weight", ours, part)


class PublicWeights:
    """The weights of a public model in a folder, as ``runtime.initial_weights.InitialWeights``; read when they are asked for."""

    def __init__(self, folder: Path, model: Model) -> None:
        """Raises UserError where the folder cannot be read or lacks weights of the model."""
        self._folder, self._model = folder, model
        self._parts: dict[str | tuple[int, int], list[Matrix]] = {}
        self._block = fp8_block(read_config(folder / CONFIG_FILE), folder / CONFIG_FILE)
        with self._reading():
            self._files = self._find()
        for matrix in matrices(model):
            if matrix.name not in self._files:
                raise UserError(f"weights: {folder} has no {matrix.name}, which the model needs")
            self._parts.setdefault(matrix.ours, []).append(matrix)
        self._open: dict[str, Any] = {}

    def dense(self, name: str, shape: torch.Size) -> Tensor:
        """As ``InitialWeights.dense``. Raises UserError where it has another shape."""
        return self._value(name, shape)

    def expert(self, layer: int, expert: int) -> Tensor:
        """As ``InitialWeights.expert``. Raises UserError where it has another shape."""
        return self._value((layer, expert), torch.Size([self._model.expert_params]))

    def _value(self, name: str | tuple[int, int], shape: torch.Size) -> Tensor:
        parts = [self._read(part) for part in self._parts[name]]
        value = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
        if value.shape != shape:
            first, found = self._parts[name][0].name, "x".join(map(str, parts[0].shape))
            raise UserError(f"weights: {self._folder}: {first} is {found}, which does not suit the model's sizes")
        return value

    def _find(self) -> dict[str, str]:
        """Name of each weight -> file."""
        index = self._folder / _INDEX
        if index.exists():
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return files
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise UserError(f"weights: {self._folder} holds no *.safetensors file")
        found: dict[str, str] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path.name)
        return found

    def _read(self, matrix: Matrix) -> Tensor:
        tensor = self._tensor(matrix.name)
        if tensor.dtype.itemsize == 1:
            if self._block is None or tensor.dtype is not torch.float8_e4m3fn:
                kind = str(tensor.dtype).removeprefix("torch.")
                message = f"{matrix.name} is {kind}, of which {CONFIG_FILE} does not tell the values"
                raise UserError(f"weights: {self._folder}: {message}")
            tensor = self._scaled(matrix.name, tensor, *self._block)
        if matrix.rotated is None or len(tensor) % matrix.rotated[0]:
            return tensor
        return _rotated_moved(tensor, *matrix.rotated, to_halves=True)

    def _tensor(self, name: str) -> Tensor:
        file = self._files[name]
        with self._reading():
            if file not in self._open:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        return tensor

    def _scaled(self, name: str, codes: Tensor, rows: int, columns: int) -> Tensor:
        """fp32: the values of a fp8 matrix, which has a scale for each block of so many rows and columns."""
        if name + _SCALE not in self._files:
            raise UserError(f"weights: {self._folder} has no {name}{_SCALE}, which {name} in fp8 needs")
        scales = self._tensor(name + _SCALE).float()
        if scales.shape != tuple(-(-size // each) for size, each in zip(codes.shape, (rows, columns), strict=True)):
            found = " and ".join("x".join(map(str, one.shape)) for one in (scales, codes))
            raise UserError(
                f"weights: {self._folder}: {name}{_SCALE} and {name} are {found}, which blocks of {rows}x{columns} "
                f"({CONFIG_FILE}, {QUANTIZATION}.weight_block_size) do not make"
            )
        each = scales.repeat_interleave(rows, dim=0)[: len(codes)].repeat_interleave(columns, dim=1)
        return codes.float() * each[:, : codes.shape[1]]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"weights: {self._folder} cannot be read ({error})") from None


def export_weights(checkpoint: Path, folder: Path, like: Path | None) -> int:
    """Write a checkpoint's weights as a public model's into ``folder``, which must not exist; returns how many parameters.
    ``like``: the folder of the public model that training began with, whose ``config.json`` and tokenizer go along. Raises
    UserError where the model is of no public architecture, weights are not here, or something cannot be read or written."""
    saved = SavedWeights(checkpoint)
    workload = saved.workload
    model, dtype = workload.model, TORCH_DTYPE[workload.training.dtype]
    if like is None:
        config = config_for(workload)
    else:
        # The run may name other weights by now than those that training began with.
        require_same_model(like, model)
        config = read_config(like / CONFIG_FILE)
        config.pop(QUANTIZATION, None)
        config |= dtype_keys(workload.training.dtype) | ({MTP_LAYERS: 0} if MTP_LAYERS in config else {})
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        if folder.exists():
            raise UserError(f"--export {folder}: exists; name a new folder")
        partial.mkdir(parents=True)
        files, count, size = _write_shards(partial, saved, model, dtype)
        if len(set(files.values())) > 1:
            sizes = {"total_size": size}
            write_text(partial / _INDEX, json.dumps({"metadata": sizes, "weight_map": files}, indent=1))
        write_text(partial / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        for path in sorted(like.iterdir()) if like is not None else ():
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _BESIDE):
                shutil.copyfile(path, partial / path.name)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--export {folder}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return count


def _write_shards(folder: Path, saved: SavedWeights, model: Model, dtype: torch.dtype) -> tuple[dict[str, str], int, int]:
    """(name of each weight -> file, number of parameters, bytes of all). One file's weights at a time are in memory."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = count = total = 0

    def write() -> None:
        shards.append(list(held))
        save_file(held, folder / f"{len(shards)}", metadata={"format": "pt"})
        held.clear()

    for matrix in matrices(model):
        # Master weights of bf16 ones are rounded as they are for training.
        kept = torch.promote_types(dtype, torch.float32) if matrix.wide else dtype
        value = _matrix(saved, matrix, model).to(kept, copy=True)
        if size + value.nbytes > _SHARD_BYTES and held:
            write()
            size = 0
        held[matrix.name] = value
        size, total = size + value.nbytes, total + value.nbytes
        # Biases of experts are no parameters: no gradient moves them.
        count += 0 if matrix.wide else value.numel()
    write()
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}").rename(folder / name)
        files |= dict.fromkeys(names, name)
    return files, count, total


def _matrix(saved: SavedWeights, matrix: Matrix, model: Model) -> Tensor:
    value = saved.dense(matrix.ours) if isinstance(matrix.ours, str) else saved.expert(*matrix.ours)
    if matrix.rotated is not None:
        return _rotated_moved(value, *matrix.rotated, to_halves=False)
    return value if matrix.part is None else split_row(value, ffn=model.ffn, hidden_size=model.hidden_size)[matrix.part]


def _rotated_moved(weight: Tensor, each: int, last: int, *, to_halves: bool) -> Tensor:
    """A copy of a matrix: of each so many rows the last, from pairs of neighbours to two halves, or back."""
    rest, rotated = torch.split(weight.view(-1, each, weight.shape[-1]), [each - last, last], dim=1)
    pairs = rotated.reshape(len(rotated), *((-1, 2) if to_halves else (2, -1)), weight.shape[-1])
    return torch.cat([rest, pairs.transpose(1, 2).flatten(1, 2)], dim=1).flatten(0, 1)
