"""Rows of tokens, of partial sums and of their gradients. Every row is coded by itself and nothing is kept between steps, because
the rows of two steps have nothing to do with each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridep.codecs import SPAN, TokenCodec, is_shortened, lossless_fixed_bytes, written_out_bytes
from runtime.codecs.lossless import Shortened, restore, shorten
from runtime.codecs.messages import Message, message_of, pack, room, tensor_of, unpack
from runtime.kernels.reference_codecs import Code, dequantize_rows, quantize_rows


class Rows(NamedTuple):
    """Coded rows."""

    blocks: list[Tensor]
    """[N, *] each."""
    shortened: Shortened | None = None
    """Whose first part is the one block, where what follows the blocks depends on the rows."""

    def take(self, rows_M: Tensor) -> Rows:
        """Some of them, in any order."""
        if self.shortened is None:
            return Rows([block.index_select(0, rows_M) for block in self.blocks])
        shortened = self.shortened.take(rows_M)
        return Rows([shortened.fixed_NB], shortened)


class RowCoder(ABC):
    """Rows [N, H] as blocks [N, *] that can be cut and joined by rows."""

    @abstractmethod
    def encode(self, x_NH: Tensor) -> Rows:
        """Coded."""

    @abstractmethod
    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        """Type and width of each block."""

    @abstractmethod
    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype, behind: Tensor | None = None) -> Tensor:
        """[N, H]; ``behind``: what follows the blocks."""

    def behind_bytes(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        """Of each row, what follows the blocks of all rows at least, and at most."""
        return 0, 0

    def message(self, rows: Rows, beside: Sequence[Tensor], like: Tensor) -> Message:
        """The blocks' elements, one block after the other, then those of blocks ``beside`` them, then what follows; the rows are
        of a tensor's width and type."""
        blocks = [*rows.blocks, *beside]
        message = pack(blocks) if len(blocks) > 1 else blocks[0].contiguous()
        if rows.shortened is None:
            return message
        behind = rows.shortened.written_out
        agreed_bytes = len(blocks[0]) * self.behind_bytes(like.shape[-1], like.dtype)[0]
        agreed = message.nbytes + agreed_bytes
        return message_of(torch.cat([message.view(-1), F.pad(behind, (0, max(agreed_bytes - len(behind), 0)))]), agreed)

    def room(self, number: int, beside: Sequence[tuple[torch.dtype, int]], like: Tensor) -> Message:
        """For such a message of so many rows, of a tensor's width and type, with such blocks beside them."""
        hidden, dtype = like.shape[-1], like.dtype
        row_bytes = sum(each.itemsize * width for each, width in (*self.blocks(hidden, dtype), *beside))
        least, most = self.behind_bytes(hidden, dtype)
        return room(number, row_bytes + least, row_bytes + most, like.device)

    def rows_of(self, message: Message, number: int, beside: Sequence[tuple[torch.dtype, int]], like: Tensor) -> list[Tensor]:
        """[N, H] and the blocks ``beside`` of a message that has come, on ``like``'s device."""
        hidden, dtype = like.shape[-1], like.dtype
        shapes = [*self.blocks(hidden, dtype), *beside]
        tensor = tensor_of(message).view(-1).view(torch.uint8)
        behind_at = number * sum(each.itemsize * width for each, width in shapes)
        parts = unpack(tensor[:behind_at].to(like.device), [(each, number * width) for each, width in shapes])
        blocks = [part.view(number, width) for part, (_, width) in zip(parts, shapes, strict=True)]
        coded = len(blocks) - len(beside)
        return [self.decode(blocks[:coded], hidden, dtype, tensor[behind_at:]), *blocks[coded:]]

    def through(self, x_NH: Tensor) -> Tensor:
        """What arrives of it."""
        return self.rows_of(self.message(self.encode(x_NH), (), x_NH), len(x_NH), (), x_NH)[0]


def row_coder(codec: TokenCodec) -> RowCoder:
    """The coder of a plan's codec."""
    match codec:
        case TokenCodec.EXACT:
            return _Exact()
        case TokenCodec.LOSSLESS:
            return _Lossless()
        case TokenCodec.BF16:
            return _Bf16()
        case TokenCodec.FP8:
            return _Scaled(Code.FP8)
    return _Scaled(Code.INT8)


class _Exact(RowCoder):
    def encode(self, x_NH: Tensor) -> Rows:
        return Rows([x_NH])

    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        return [(dtype, hidden)]

    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype, behind: Tensor | None = None) -> Tensor:
        return blocks[0]


class _Lossless(RowCoder):
    """Fewer bytes for the same bits; other types than bf16 and fp32 as they are."""

    def encode(self, x_NH: Tensor) -> Rows:
        if not is_shortened(x_NH.dtype.itemsize):
            return Rows([x_NH])
        shortened = shorten(x_NH)
        return Rows([shortened.fixed_NB], shortened)

    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        size = dtype.itemsize
        return [(torch.uint8, lossless_fixed_bytes(hidden, size)) if is_shortened(size) else (dtype, hidden)]

    def behind_bytes(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        return (written_out_bytes("rows", hidden, dtype.itemsize), hidden) if is_shortened(dtype.itemsize) else (0, 0)

    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype, behind: Tensor | None = None) -> Tensor:
        if not is_shortened(dtype.itemsize):
            return blocks[0]
        assert behind is not None
        return restore(blocks[0], behind, hidden, dtype)


class _Bf16(RowCoder):
    def encode(self, x_NH: Tensor) -> Rows:
        return Rows([x_NH.to(torch.bfloat16)])

    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        return [(torch.bfloat16, hidden)]

    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype, behind: Tensor | None = None) -> Tensor:
        return blocks[0].to(dtype)


class _Scaled(RowCoder):
    """One byte per element and a fp32 scale per ``SPAN`` of them."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def encode(self, x_NH: Tensor) -> Rows:
        return Rows(list(quantize_rows(x_NH, self._code)))

    def blocks(self, hidden: int, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        return [(torch.uint8, -(-hidden // 4) * 4), (torch.float32, -(-hidden // SPAN))]

    def decode(self, blocks: Sequence[Tensor], hidden: int, dtype: torch.dtype, behind: Tensor | None = None) -> Tensor:
        return dequantize_rows(blocks[0].view(self._code.dtype), blocks[1], hidden, dtype)
