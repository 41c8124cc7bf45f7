"""Measures how fast codecs are with all ranks busy at once, on payloads of the workload's sizes, with the code that trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridep.codecs import Codecs, ExpertCodec, GradientCodec, TokenCodec
from hybridep.workload import Workload
from runtime.codecs import expert_coder, gradient_coder, row_coder
from runtime.codecs.experts import ChangeCoder
from runtime.codecs.messages import Message
from runtime.mesh import TORCH_DTYPE
from runtime.probe_compute import Timing

_LEAST_S = 0.01
"""Of what is timed at once: ranks that share processors must all be at it at the same time."""
_CHANGE = 1e-3
"""By how much weights differ from their copy, as after an optimizer step."""

Pair = tuple[Callable[[], Message], Callable[[Message], object]]
"""Coding of one payload, and decoding of what comes out."""


@dataclass(frozen=True, kw_only=True)
class CodecProbe:
    """``hybridep.codecs.Speed`` of one codec."""

    kind: str
    codec: str
    encode_bytes_per_s: float
    decode_bytes_per_s: float


def probe_codecs(workload: Workload, timed: Timing) -> tuple[CodecProbe, ...]:
    """All ranks call it; the slowest counts. Sparse codecs keep what ``Codecs`` has them keep by default."""
    dtype = TORCH_DTYPE[workload.training.dtype]
    tokens = torch.randn(int(workload.training.tokens), workload.model.hidden_size).to(timed.device, dtype)
    expert = torch.randn(workload.model.expert_params).to(timed.device, dtype)
    wanted = [
        *(("tokens", codec.value, row_pair(codec, tokens), tokens) for codec in TokenCodec),
        *(("experts", codec.value, expert_pair(Codecs(experts=codec), expert), expert) for codec in ExpertCodec),
        *(("gradients", codec.value, gradient_pair(Codecs(gradients=codec), expert), expert) for codec in GradientCodec),
    ]
    found = []
    for kind, codec, pair, payload in wanted:
        if pair is None or codec == "exact":
            continue
        encode, decode = pair
        message = encode()
        found.append(
            CodecProbe(
                kind=kind,
                codec=codec,
                encode_bytes_per_s=_bytes_per_s(payload, encode, timed),
                decode_bytes_per_s=_bytes_per_s(payload, lambda decode=decode, message=message: decode(message), timed),  # type: ignore[misc]
            )
        )
    return tuple(found)


def row_pair(codec: TokenCodec, rows_NH: Tensor) -> Pair:
    """Of token rows."""
    coder = row_coder(codec)
    return lambda: coder.message(coder.encode(rows_NH), (), rows_NH), lambda message: coder.rows_of(
        message, len(rows_NH), (), rows_NH
    )


def expert_pair(codecs: Codecs, expert_P: Tensor) -> Pair | None:
    """Of one expert; None for the exact codec."""
    shared, copy = torch.zeros_like(expert_P), expert_P.clone()
    coder = expert_coder(codecs, len(expert_P), expert_P.dtype, lambda: shared)
    if coder is None:
        return None
    if isinstance(coder, ChangeCoder):
        coder.sent[0] = expert_P + _CHANGE * torch.randn_like(expert_P)
    return lambda: coder.encode(0, expert_P), lambda message: coder.decode(message, copy)


def gradient_pair(codecs: Codecs, gradient_P: Tensor) -> Pair | None:
    """Of one gradient; None for the exact codec."""
    coder = gradient_coder(codecs, gradient_P.dtype)
    if coder is None:
        return None
    length, dtype = len(gradient_P), gradient_P.dtype
    return lambda: coder.encode(0, gradient_P), lambda message: coder.decode(message, length, dtype)


def _bytes_per_s(payload: Tensor, work: Callable[[], object], timed: Timing) -> float:
    rounds = max(1, math.ceil(_LEAST_S / max(timed.once(work), 1e-7)))

    def repeated() -> None:
        for _ in range(rounds):
            work()

    return rounds * payload.numel() * payload.element_size() / timed(repeated)
