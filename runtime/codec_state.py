"""Codec state in checkpoints: one file per rank, read back under the same plan; under another one both ends start from the
checkpoint's experts, and what error feedback had not sent yet is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from runtime.checkpoint import CodecState, load_codecs
from runtime.checkpoint_files import SavedExperts
from runtime.codecs.gradients import TopKCoder
from runtime.dense_reduce import DenseReduce
from runtime.mesh import Mesh
from runtime.routed import DistributedExperts


def codec_state(routed: Sequence[DistributedExperts], dense: DenseReduce) -> CodecState:
    """Of one rank, by part of the model; empty where no codec keeps anything."""
    state = {f"layer{layer}": experts.exchange.codec_state() for layer, experts in enumerate(routed)}
    state["dense"] = {
        f"{level}.{key}": value
        for level, coder in enumerate(dense.coders)
        if isinstance(coder, TopKCoder)
        for key, value in coder.unsent.items()
    }
    return {part: values for part, values in state.items() if values}


def restore_codecs(path: Path, mesh: Mesh, routed: Sequence[DistributedExperts], dense: DenseReduce) -> None:
    """Continue from a checkpoint: as if nothing had happened where it was written under this plan."""
    state = load_codecs(path, mesh)
    saved = SavedExperts(path)
    for layer, experts in enumerate(routed):
        if state is not None and f"layer{layer}" in state:
            experts.exchange.load_codec_state(state[f"layer{layer}"])
        else:
            experts.exchange.prime(partial(_weight, saved, mesh.first_moe_layer + layer))
    for level, coder in enumerate(dense.coders):
        if isinstance(coder, TopKCoder):
            for name, value in (state or {}).get("dense", {}).items():
                at, _, key = name.partition(".")
                if int(at) == level:
                    coder.unsent[key] = value.to(mesh.device, copy=True)


def _weight(saved: SavedExperts, layer: int, expert: int) -> Tensor:
    return saved.state(layer, expert)["weight"]
