"""Rows of tokens, of partial sums and of their gradients. Every row is coded by itself and nothing is kept between steps, because
the rows of two steps have nothing to do with each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridep.codecs import SPAN, TokenCodec
from runtime.kernels.reference_codecs import Code, dequantize_rows, quantize_rows


class RowCoder(ABC):
    """Rows [N, H] as blocks [N, *] that can be cut and joined by rows."""

    @abstractmethod
    def encode(self, x_NH: Tensor) -> list[Tensor]:
        """The blocks."""

    @abstractmethod
    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        """Type and width of each block."""

    @abstractmethod
    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype) -> Tensor:
        """[N, H]."""


def row_coder(codec: TokenCodec) -> RowCoder:
    """The coder of a plan's codec."""
    match codec:
        case TokenCodec.EXACT:
            return _Exact()
        case TokenCodec.BF16:
            return _Bf16()
        case TokenCodec.FP8:
            return _Scaled(Code.FP8)
    return _Scaled(Code.INT8)


class _Exact(RowCoder):
    def encode(self, x_NH: Tensor) -> list[Tensor]:
        return [x_NH]

    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        return [(dtype, hidden)]

    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype) -> Tensor:
        return blocks[0]


class _Bf16(RowCoder):
    def encode(self, x_NH: Tensor) -> list[Tensor]:
        return [x_NH.to(torch.bfloat16)]

    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        return [(torch.bfloat16, hidden)]

    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype) -> Tensor:
        return blocks[0].to(dtype)


class _Scaled(RowCoder):
    """One byte per element and a fp32 scale per ``SPAN`` of them."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def encode(self, x_NH: Tensor) -> list[Tensor]:
        return list(quantize_rows(x_NH, self._code))

    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        return [(torch.uint8, -(-hidden // 4) * 4), (torch.float32, -(-hidden // SPAN))]

    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype) -> Tensor:
        return dequantize_rows(blocks[0].view(self._code.dtype), blocks[1], hidden, dtype)
