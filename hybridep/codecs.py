"""Codecs: what may travel in place of exact numbers on one level's links, and how many bytes that takes.

The one place that counts coded bytes; the formats themselves are ``runtime.codecs``. All codecs but ``exact`` and ``lossless``
lose something, so a plan carries beside each what it cost in final loss where that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from pydantic import Field, model_validator

from hybridep.config import Bandwidth, Strict
from hybridep.workload import Workload

SPAN = 128
"""Neighbouring elements that share a scale (fp8, int8)."""
INT4_SPAN = 32
"""Neighbouring elements of a four-bit change that share a scale."""
TILE = 4096
"""Elements whose places in a sparse message are counted from a common start, so that a place takes 16 bits."""
EXPONENT_SPAN = 64
"""Neighbouring elements whose exponents ``lossless`` counts from their largest."""
_CODE_BITS = 3
"""Of one exponent then: up to six below the largest; seven says that it is written out in a byte."""
_WRITTEN_OUT = {"rows": 1 / 32, "experts": 1 / 32, "gradients": 3 / 32}
"""Share of exponents for which a message has such bytes; it is longer where more are needed. Of normally distributed numbers
2.5 % are, of experts' gradients up to 9 (experiments/lossless)."""
COUNT_BYTES = 4
"""In front of a lossless expert or gradient: how many of its exponents are written out."""
_SCALE_BYTES = 4
_PLACE_BYTES = 2
_START_BYTES = 4
_BF16_BYTES = 2


class TokenCodec(Enum):
    """Formats of token rows and partial sums, and of their gradients on the way back."""

    EXACT = "exact"
    LOSSLESS = "lossless"
    """The same numbers to the bit in fewer bytes, as their exponents differ little; in fp64 as they are."""
    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3, one fp32 scale per 128 elements."""
    INT8 = "int8"
    """8-bit codes, one fp32 scale per 128 elements."""


class ExpertCodec(Enum):
    """Formats of experts on their way to the ranks that copy them."""

    EXACT = "exact"
    LOSSLESS = "lossless"
    """As of tokens."""
    BF16 = "bf16"
    SHARED_RESIDUAL = "sr"
    """The largest ``experts_keep`` of each expert's difference from the mean of its layer's experts (HybridEP's SR)."""
    CHANGE_INT8 = "change-int8"
    """The change since the receivers' copy, one scale per 128 elements; both ends keep that copy (EF21, arXiv:2106.05203)."""
    CHANGE_INT4 = "change-int4"
    """The change since the receivers' copy in four bits, one scale per 32 elements; both ends keep that copy."""

    @property
    def is_change(self) -> bool:
        """Both ends keep the copy, which therefore must live from step to step."""
        return self in (ExpertCodec.CHANGE_INT8, ExpertCodec.CHANGE_INT4)


class GradientCodec(Enum):
    """Formats of copies' gradients on their way home, and of dense gradients."""

    EXACT = "exact"
    LOSSLESS = "lossless"
    """As of tokens."""
    BF16 = "bf16"
    INT8 = "int8"
    """8-bit codes, one fp32 scale per 128 elements."""
    TOP_K = "top-k"
    """The largest ``gradients_keep`` of a gradient; the rest is added to the next one (error feedback, arXiv:1809.07599)."""


class LossGate(Strict):
    """What a codec cost in a training run, as far as it was measured."""

    relative: float
    """(final loss with the codec - exact) / exact, mean over seeds; negative where the coded runs ended lower."""
    source: str
    """Where and with which settings it was measured."""


class Codecs(Strict):
    """How payloads are coded on one level's links."""

    tokens: TokenCodec = TokenCodec.EXACT
    experts: ExpertCodec = ExpertCodec.EXACT
    gradients: GradientCodec = GradientCodec.EXACT
    activations: TokenCodec = TokenCodec.EXACT
    """How activations and their gradients are coded between pipeline stages; the outermost level only, as fast as tokens are."""
    experts_keep: float = Field(default=0.02, gt=0, le=1)
    """Share of an expert's elements that ``sr`` sends."""
    gradients_keep: float = Field(default=0.02, gt=0, le=1)
    """Share of a gradient's elements that ``top-k`` sends."""
    gates: dict[str, LossGate] = Field(default_factory=dict)
    """Kind of payload -> what its codec cost; absent where it was not measured."""

    @model_validator(mode="after")
    def _consistent(self) -> Codecs:
        for kind in self.gates:
            if kind not in PAYLOADS:
                raise ValueError(f"gates.{kind}: must be one of {', '.join(PAYLOADS)}")
        return self

    def without(self, kind: str) -> Codecs:
        """With that kind of payload exact."""
        gates = {other: gate for other, gate in self.gates.items() if other != kind}
        fields = {name: getattr(EXACT, name) for name in (kind, f"{kind}_keep") if name in Codecs.model_fields}
        return self.model_copy(update={**fields, "gates": gates})

    @property
    def coded(self) -> dict[str, str]:
        """Kind of payload -> its codec as text (``sr, keep 0.02``), where it does not travel as it is."""
        texts = {kind: getattr(self, kind).value for kind in PAYLOADS}
        if self.experts is ExpertCodec.SHARED_RESIDUAL:
            texts["experts"] += f", keep {self.experts_keep:g}"
        if self.gradients is GradientCodec.TOP_K:
            texts["gradients"] += f", keep {self.gradients_keep:g}"
        return {kind: text for kind, text in texts.items() if text != "exact"}

    @property
    def lossless(self) -> list[str]:
        """Kinds of payload that travel in fewer bytes and lose nothing."""
        return [kind for kind, text in self.coded.items() if text == "lossless"]

    @property
    def lossy(self) -> dict[str, str]:
        """Those of ``coded`` that lose something."""
        return {kind: text for kind, text in self.coded.items() if kind not in self.lossless}


class Speed(Strict):
    """How fast one rank codes and decodes with one codec while all ranks compute: bytes of exact payload per second."""

    encode: Bandwidth
    decode: Bandwidth


class Speeds(Strict):
    """How fast a rank codes and decodes, by kind of payload and codec; codecs that are left out take no time."""

    tokens: dict[TokenCodec, Speed] = Field(default_factory=dict)
    experts: dict[ExpertCodec, Speed] = Field(default_factory=dict)
    gradients: dict[GradientCodec, Speed] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Speeds:
        for kind in KINDS:
            if any(codec.value == "exact" for codec in getattr(self, kind)):
                raise ValueError(f"{kind}.exact: what is not coded takes no time; leave it out")
        return self

    def of(self, kind: str, codecs: Codecs) -> Speed | None:
        """Speed of the codec that ``codecs`` has for ``kind`` of payload; None where it takes no time."""
        found: Speed | None = getattr(self, kind).get(getattr(codecs, kind))
        return found


KINDS = ("tokens", "experts", "gradients")
"""Kinds of payload that travel inside a stage, or without stages."""
PAYLOADS = (*KINDS, "activations")
EXACT = Codecs()
LOSSLESS = Codecs(
    tokens=TokenCodec.LOSSLESS, experts=ExpertCodec.LOSSLESS, gradients=GradientCodec.LOSSLESS, activations=TokenCodec.LOSSLESS
)
LOSSLESS_OF = {kind: EXACT.model_copy(update={kind: getattr(LOSSLESS, kind)}) for kind in PAYLOADS}
"""Kind of payload -> it alone without loss."""


def codecs_for_others(codecs: Mapping[str, Codecs]) -> dict[str, Codecs]:
    """By level name, with which other placements are compared with a plan: where something is lossless, so is all that was exact.
    A plan's own codecs are those that bring it something."""
    found = {}
    for name, one in codecs.items():
        exact = [kind for kind in PAYLOADS if kind not in one.coded] if one.lossless else []
        found[name] = one.model_copy(update={kind: getattr(LOSSLESS, kind) for kind in exact})
    return found


def level_codecs(levels: Sequence[str], codecs: Mapping[str, Codecs]) -> tuple[Codecs, ...]:
    """[levels]: the codecs of each, exact where none are given by its name."""
    return tuple(codecs.get(name, EXACT) for name in levels)


def kept(length: int, keep: float) -> int:
    """How many of ``length`` elements a sparse message has room for; at least one."""
    return math.ceil(keep * length)


def sparse_bytes(length: int, keep: float, element_bytes: int) -> int:
    """Bytes of a sparse message: first entry of each tile (and the end), values, 16-bit places; 0 for no elements."""
    tiles = -(-length // TILE)
    return (tiles + 1) * _START_BYTES + kept(length, keep) * (element_bytes + _PLACE_BYTES) if length else 0


def scaled_bytes(length: int, span: int = SPAN, bits: int = 8) -> int:
    """Bytes of a scaled message: codes of ``bits``, padded to four elements, and a fp32 scale per ``span`` of elements."""
    return -(-length // 4) * 4 * bits // 8 + -(-length // span) * _SCALE_BYTES


def is_shortened(element_bytes: int) -> bool:
    """Whether ``lossless`` has a format for such elements: bf16 and fp32."""
    return element_bytes in (2, 4)


def signs_and_mantissas(element_bytes: int) -> int:
    """Bytes of one element without its exponent."""
    return element_bytes - 1


def lossless_span_bytes() -> int:
    """Of the exponents of ``EXPONENT_SPAN`` elements: the largest, and a code each."""
    return 1 + EXPONENT_SPAN * _CODE_BITS // 8


def lossless_fixed_bytes(length: int, element_bytes: int) -> int:
    """Bytes of a lossless message but for exponents that are written out, of which there is one each."""
    if not is_shortened(element_bytes):
        return length * element_bytes
    return length * signs_and_mantissas(element_bytes) + -(-length // EXPONENT_SPAN) * lossless_span_bytes()


def written_out_bytes(kind: str, length: int, element_bytes: int) -> int:
    """Bytes that a lossless message has at least for exponents that are written out; ``kind`` is rows, experts or gradients."""
    return math.ceil(length * _WRITTEN_OUT[kind]) if is_shortened(element_bytes) else 0


def lossless_bytes(kind: str, length: int, element_bytes: int) -> int:
    """Bytes of a lossless message where those for exponents that are written out suffice."""
    count_bytes = COUNT_BYTES if kind != "rows" and is_shortened(element_bytes) else 0
    return count_bytes + lossless_fixed_bytes(length, element_bytes) + written_out_bytes(kind, length, element_bytes)


def row_bytes(codec: TokenCodec, width: int, element_bytes: int) -> int:
    """Bytes of one row of ``width`` elements."""
    if codec is TokenCodec.LOSSLESS:
        return lossless_bytes("rows", width, element_bytes)
    if codec in (TokenCodec.FP8, TokenCodec.INT8):
        return scaled_bytes(width)
    return width * (_BF16_BYTES if codec is TokenCodec.BF16 else element_bytes)


def expert_bytes(codecs: Codecs, length: int, element_bytes: int) -> int:
    """Bytes of one expert of ``length`` parameters."""
    match codecs.experts:
        case ExpertCodec.LOSSLESS:
            return lossless_bytes("experts", length, element_bytes) if length else 0
        case ExpertCodec.SHARED_RESIDUAL:
            return sparse_bytes(length, codecs.experts_keep, element_bytes)
        case ExpertCodec.CHANGE_INT8:
            return scaled_bytes(length)
        case ExpertCodec.CHANGE_INT4:
            return scaled_bytes(length, INT4_SPAN, 4)
        case ExpertCodec.BF16:
            return length * _BF16_BYTES
    return length * element_bytes


def gradient_bytes(codecs: Codecs, length: int, element_bytes: int) -> int:
    """Bytes of ``length`` gradient elements in one message."""
    match codecs.gradients:
        case GradientCodec.LOSSLESS:
            return lossless_bytes("gradients", length, element_bytes) if length else 0
        case GradientCodec.TOP_K:
            return sparse_bytes(length, codecs.gradients_keep, element_bytes)
        case GradientCodec.INT8:
            return scaled_bytes(length)
        case GradientCodec.BF16:
            return length * _BF16_BYTES
    return length * element_bytes


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Bytes of a workload's payloads on one level's links."""

    workload: Workload
    codecs: Codecs = EXACT

    @cached_property
    def _width(self) -> int:
        return self.workload.training.dtype.num_bytes

    @cached_property
    def combine_row_bytes(self) -> int:
        """Bytes of one row of partial outputs, or of their gradient."""
        return row_bytes(self.codecs.tokens, self.workload.model.hidden_size, self._width)

    @cached_property
    def activation_row_bytes(self) -> int:
        """Bytes of one token's activations between pipeline stages, or of their gradient."""
        return row_bytes(self.codecs.activations, self.workload.model.hidden_size, self._width)

    @cached_property
    def dispatch_row_bytes(self) -> int:
        """Bytes of one token row on its way to the experts; gate weights and expert ids are never coded."""
        return self.workload.dispatch_row_bytes - self.workload.combine_row_bytes + self.combine_row_bytes

    @cached_property
    def dispatch_gradient_row_bytes(self) -> int:
        """Bytes of one dispatched row's gradient; that of the gate weights is never coded."""
        return self.workload.dispatch_gradient_row_bytes - self.workload.combine_row_bytes + self.combine_row_bytes

    @property
    def row_there_bytes(self) -> int:
        """Bytes of one token row on all its ways to the experts: itself, and in backward its partial output's gradient."""
        return self.dispatch_row_bytes + self.combine_row_bytes

    @property
    def row_back_bytes(self) -> int:
        """Bytes of one token row on all its ways from the experts: its partial output, and in backward its gradient."""
        return self.combine_row_bytes + self.dispatch_gradient_row_bytes

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights."""
        return expert_bytes(self.codecs, self.workload.model.expert_params, self._width)

    @cached_property
    def expert_gradient_bytes(self) -> int:
        """Bytes of one copy's gradient."""
        return gradient_bytes(self.codecs, self.workload.model.expert_params, self._width)

    def dense_bytes(self, lengths: np.ndarray) -> np.ndarray:
        """Bytes of messages of so many dense gradient elements."""
        values, where = np.unique(lengths, return_inverse=True)
        sizes = np.array([gradient_bytes(self.codecs, int(length), self._width) for length in values], dtype=np.float64)
        return np.asarray(sizes[where].reshape(np.shape(lengths)))


def wires(workload: Workload, codecs: Sequence[Codecs], num_levels: int) -> tuple[Wire, ...]:
    """[levels] of ``Wire``; ``codecs`` are those of ``level_codecs``, or empty for exact ones everywhere."""
    return tuple(Wire(workload=workload, codecs=one) for one in codecs or (EXACT,) * num_levels)
