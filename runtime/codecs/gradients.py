"""Gradients of copies on their way home, and parts of the dense gradients. The same elements come in every step, so what a sparse
message leaves out can be kept and sent later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from hybridep.codecs import SPAN, Codecs, GradientCodec, gradient_bytes, is_shortened
from runtime.codecs.lossless import VectorFormat
from runtime.codecs.messages import pack, unpack
from runtime.codecs.sparse import decode_largest, encode_largest
from runtime.kernels.reference_codecs import Code, dequantize_rows, quantize_rows


class GradientCoder(ABC):
    """Both ends at one level."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs

    def message_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Of ``length`` elements; lossless ones may be longer."""
        return gradient_bytes(self._codecs, length, dtype.itemsize)

    def most_bytes(self, length: int, dtype: torch.dtype) -> int:
        """That ``length`` elements may take."""
        return self.message_bytes(length, dtype)

    @abstractmethod
    def encode(self, key: Hashable, gradient_P: Tensor) -> Tensor:
        """uint8. ``key`` says which gradient it is; it is coded once per step or micro-batch."""

    @abstractmethod
    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """[P]."""

    def apart(self, messages: Tensor, number: int, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """So many that came as one."""
        return torch.split(messages, self.message_bytes(length, dtype))


def gradient_coder(codecs: Codecs, dtype: torch.dtype) -> GradientCoder | None:
    """The coder of a plan's codec; None where gradients of this type travel as they are."""
    match codecs.gradients:
        case GradientCodec.LOSSLESS if is_shortened(dtype.itemsize):
            return _Lossless(codecs)
        case GradientCodec.BF16:
            return _Bf16(codecs)
        case GradientCodec.INT8:
            return _Int8(codecs)
        case GradientCodec.TOP_K:
            return TopKCoder(codecs)
    return None


class _Lossless(GradientCoder):
    def most_bytes(self, length: int, dtype: torch.dtype) -> int:
        return VectorFormat("gradients", length, dtype).most_bytes

    def encode(self, key: Hashable, gradient_P: Tensor) -> Tensor:
        return VectorFormat("gradients", len(gradient_P), gradient_P.dtype).encode(gradient_P)

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return VectorFormat("gradients", length, dtype).decode(message)

    def apart(self, messages: Tensor, number: int, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
        return VectorFormat("gradients", length, dtype).apart(messages, number)


class _Bf16(GradientCoder):
    def encode(self, key: Hashable, gradient_P: Tensor) -> Tensor:
        return pack([gradient_P.to(torch.bfloat16)])

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return message.view(torch.bfloat16).to(dtype)


class _Int8(GradientCoder):
    def encode(self, key: Hashable, gradient_P: Tensor) -> Tensor:
        return pack(quantize_rows(gradient_P[None], Code.INT8))

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        codes, scales = unpack(message, [(torch.int8, -(-length // 4) * 4), (torch.float32, -(-length // SPAN))])
        return dequantize_rows(codes[None], scales[None], length, dtype)[0]


class TopKCoder(GradientCoder):
    """The largest elements; the others wait and are added to the next gradient of the same key (error feedback, Stich et al.,
    arXiv:1809.07599)."""

    def __init__(self, codecs: Codecs) -> None:
        super().__init__(codecs)
        self.unsent: dict[Hashable, Tensor] = {}
        """Key -> what was left out so far, in fp32 at least: bf16 would lose it bit by bit."""

    def encode(self, key: Hashable, gradient_P: Tensor) -> Tensor:
        wide = torch.promote_types(gradient_P.dtype, torch.float32)
        due = gradient_P.to(wide)
        if key in self.unsent:
            due = due + self.unsent[key]
        narrow = due.to(gradient_P.dtype)
        message = encode_largest(narrow, torch.zeros_like(narrow), self._codecs.gradients_keep)
        self.unsent[key] = due - self.decode(message, len(due), gradient_P.dtype).to(wide)
        return message

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return decode_largest(message, torch.zeros(length, dtype=dtype, device=message.device), self._codecs.gradients_keep)
