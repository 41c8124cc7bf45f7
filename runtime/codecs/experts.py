"""Experts on their way to the ranks that copy them. An expert is coded once at its sender, and all receivers of one level get the
same message, so their copies are the same to the bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from hybridep.codecs import INT4_SPAN, SPAN, Codecs, ExpertCodec, expert_bytes, is_shortened
from runtime.codecs.formats import change_decode, change_encode
from runtime.codecs.lossless import VectorFormat
from runtime.codecs.messages import pack, unpack
from runtime.codecs.sparse import decode_largest, encode_largest
from runtime.kernels.reference_codecs import ChangeCode


class ExpertCoder(ABC):
    """Both ends of one layer's copies at one level."""

    def __init__(self, codecs: Codecs, length: int, dtype: torch.dtype) -> None:
        self.message_bytes = expert_bytes(codecs, length, dtype.itemsize)
        """Of one expert; lossless ones may be longer."""
        self.most_bytes = self.message_bytes

    @abstractmethod
    def encode(self, expert: int, row_P: Tensor) -> Tensor:
        """uint8 [message_bytes]: called once per gather for each expert that this rank sends."""

    @abstractmethod
    def decode(self, message: Tensor, row_P: Tensor) -> None:
        """Fill ``row``, which holds the copy of the last gather."""

    def apart(self, messages: Tensor, number: int) -> Sequence[Tensor]:
        """So many that came as one."""
        return torch.split(messages, self.message_bytes)


def expert_coder(codecs: Codecs, length: int, dtype: torch.dtype, shared: Callable[[], Tensor]) -> ExpertCoder | None:
    """The coder of a plan's codec; None where experts travel as they are. ``shared`` gives the layer's shared expert [P] where
    one is kept."""
    match codecs.experts:
        case ExpertCodec.LOSSLESS if is_shortened(dtype.itemsize):
            return _Lossless(codecs, length, dtype)
        case ExpertCodec.BF16:
            return _Bf16(codecs, length, dtype)
        case ExpertCodec.SHARED_RESIDUAL:
            return _SharedResidual(codecs, length, dtype, shared)
        case ExpertCodec.CHANGE_INT8:
            return ChangeCoder(codecs, length, dtype, ChangeCode.INT8)
        case ExpertCodec.CHANGE_INT4:
            return ChangeCoder(codecs, length, dtype, ChangeCode.INT4)
    return None


class _Lossless(ExpertCoder):
    def __init__(self, codecs: Codecs, length: int, dtype: torch.dtype) -> None:
        super().__init__(codecs, length, dtype)
        self._format = VectorFormat("experts", length, dtype)
        self.most_bytes = self._format.most_bytes

    def encode(self, expert: int, row_P: Tensor) -> Tensor:
        return self._format.encode(row_P)

    def decode(self, message: Tensor, row_P: Tensor) -> None:
        row_P.copy_(self._format.decode(message))

    def apart(self, messages: Tensor, number: int) -> Sequence[Tensor]:
        return self._format.apart(messages, number)


class _Bf16(ExpertCoder):
    def encode(self, expert: int, row_P: Tensor) -> Tensor:
        return pack([row_P.to(torch.bfloat16)])

    def decode(self, message: Tensor, row_P: Tensor) -> None:
        row_P.copy_(message.view(torch.bfloat16))


class _SharedResidual(ExpertCoder):
    """HybridEP's SR: the difference from the shared expert, its largest elements only."""

    def __init__(self, codecs: Codecs, length: int, dtype: torch.dtype, shared: Callable[[], Tensor]) -> None:
        super().__init__(codecs, length, dtype)
        self._keep, self._shared = codecs.experts_keep, shared

    def encode(self, expert: int, row_P: Tensor) -> Tensor:
        return encode_largest(row_P, self._shared(), self._keep)

    def decode(self, message: Tensor, row_P: Tensor) -> None:
        row_P.copy_(decode_largest(message, self._shared(), self._keep))


class ChangeCoder(ExpertCoder):
    """The change since the receivers' copy, which the sender keeps too. What rounding leaves of one change is part of the
    next, so the copy follows the expert and errors do not add up (EF21, arXiv:2106.05203)."""

    def __init__(self, codecs: Codecs, length: int, dtype: torch.dtype, code: ChangeCode) -> None:
        super().__init__(codecs, length, dtype)
        self._code = code
        padded = -(-length // 4) * 4
        int4 = code is ChangeCode.INT4
        self._parts = [
            (torch.uint8, padded // 2 if int4 else padded),
            (torch.float32, -(-length // (INT4_SPAN if int4 else SPAN))),
        ]
        self.sent: dict[Hashable, Tensor] = {}
        """Expert -> the copy that its receivers have; put there before the first gather."""

    def encode(self, expert: int, row_P: Tensor) -> Tensor:
        return pack(change_encode(row_P, self.sent[expert], self._code))

    def decode(self, message: Tensor, row_P: Tensor) -> None:
        codes, scales = unpack(message, self._parts)
        change_decode(codes, scales, row_P, self._code)
