"""The largest elements of a difference, found without sorting it, as one message of fixed size."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridep.codecs import TILE, kept
from runtime.codecs.formats import residual_decode, residual_encode
from runtime.codecs.messages import pack, unpack
from runtime.kernels.reference_codecs import Residual, sample_threshold

_SPARE = 1.25
"""How many times the wanted number the sampled threshold aims at: the exact one is then found among few candidates."""
_SAMPLES = 65536


def encode_largest(value_P: Tensor, base_P: Tensor, keep: float) -> Tensor:
    """``value - base`` (flat): its ``kept(P, keep)`` largest elements with their places. uint8, always the same size."""
    number = kept(len(value_P), keep)
    residual = residual_encode(value_P, base_P, _threshold(value_P, base_P, number), number)
    return pack([residual.starts, residual.values, residual.places])


def decode_largest(message: Tensor, base_P: Tensor, keep: float) -> Tensor:
    """[P]: ``base`` plus the elements of a message."""
    number, tiles = kept(len(base_P), keep), -(-len(base_P) // TILE)
    parts = [(torch.int32, tiles + 1), (base_P.dtype, number), (torch.uint16, number)]
    starts, values, places = unpack(message, parts)
    return residual_decode(base_P, Residual(values, places, starts, starts[:0]))


def _threshold(value_P: Tensor, base_P: Tensor, number: int) -> Tensor:
    """[1]: the magnitude of the ``number``-th largest element: a threshold from a sample leaves few candidates, and only
    those are sorted. Ties beyond ``number`` are cut by place."""
    sizes = (value_P.float() - base_P.float()).abs()
    if len(sizes) > _SAMPLES:
        aim = min(1.0, _SPARE * number / len(sizes))
        candidates = sizes[sizes >= sample_threshold(value_P, base_P, aim, samples=_SAMPLES)]
        if len(candidates) >= number:
            sizes = candidates
    return sizes.topk(number).values[-1:]
