"""Floating-point numbers in fewer bytes and without loss: of 16 bits bf16 needs 11.4, of 32 fp32 27.4.

Neighbouring numbers are of similar size. Of every span of elements the largest exponent is sent, and three bits for each element:
how far its exponent is below, up to six. Where it is further the exponent itself follows at the end of the message. Signs and
mantissas, which hardly repeat, travel as they are. So a message has a fixed part and one whose length depends on the numbers;
both ends know how long it is if few exponents are written out, which ``hybridep.codecs`` counts, and that it may be longer.

That exponents are what compresses in trained weights is known from ZipNN (arXiv:2411.05239) and DFloat11 (arXiv:2504.11651),
which code them by Huffman's method; codes of one length take a few passes over the numbers, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridep.codecs import (
    COUNT_BYTES,
    EXPONENT_SPAN,
    lossless_bytes,
    lossless_fixed_bytes,
    lossless_span_bytes,
    signs_and_mantissas,
)

_WRITTEN_OUT = 7
"""Code of an exponent that follows at the end."""
_PIECE = 1 << 18
"""Elements that are coded at once, in several times their room."""
_GROUP = 8
"""Codes that are put together at once, in the bytes of a 64-bit number."""


class Shortened(NamedTuple):
    """Rows of numbers."""

    fixed_NB: Tensor
    """uint8 [N, lossless_fixed_bytes(width)]."""
    written_out: Tensor
    """uint8 [sum of counts]: exponents, row by row."""
    counts_N: Tensor
    """int64: how many of each row."""

    def take(self, rows_M: Tensor) -> Shortened:
        """Some of the rows, in another order."""
        counts_M = self.counts_N.index_select(0, rows_M)
        # Place of each taken row's first exponent, less how many come before it in the result.
        begins = (self.counts_N.cumsum(0) - self.counts_N).index_select(0, rows_M) - (counts_M.cumsum(0) - counts_M)
        total = int(counts_M.sum())
        places = torch.arange(total, device=rows_M.device) + torch.repeat_interleave(begins, counts_M, output_size=total)
        return Shortened(self.fixed_NB.index_select(0, rows_M), self.written_out[places], counts_M)


def shorten(x_NH: Tensor) -> Shortened:
    """Rows of bf16 or fp32."""
    pieces = torch.split(x_NH.detach().contiguous(), _rows_at_once(x_NH.shape[1]))
    fixed, written_out, counts = zip(*(_shorten(piece) for piece in pieces), strict=True)
    return Shortened(torch.cat(fixed), torch.cat(written_out), torch.cat(counts))


def restore(fixed_NB: Tensor, written_out: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[N, width]: the inverse of ``shorten``; ``written_out`` may be followed by anything."""
    x_NH = torch.empty(len(fixed_NB), width, dtype=dtype, device=fixed_NB.device)
    at_once = _rows_at_once(width)
    for piece, rows in zip(torch.split(fixed_NB, at_once), torch.split(x_NH, at_once), strict=True):
        written_out = written_out[_restore(piece, written_out, rows) :]
    return x_NH


def _rows_at_once(width: int) -> int:
    return max(_PIECE // max(width, 1), 1)


def _shorten(x_NH: Tensor) -> Shortened:
    number, width = x_NH.shape
    exponents_NH, others = _apart(x_NH)
    spans = -(-width // EXPONENT_SPAN)
    padded = F.pad(exponents_NH, (0, spans * EXPONENT_SPAN - width)).view(number, spans, EXPONENT_SPAN)
    largest_NS = padded.amax(dim=2)
    codes = (largest_NS[..., None] - padded).clamp_(max=_WRITTEN_OUT).view(number, spans * EXPONENT_SPAN)
    codes[:, width:] = 0
    rows_W, places_W = (codes == _WRITTEN_OUT).nonzero(as_tuple=True)
    fixed_NB = torch.cat([*others, _packed(codes), largest_NS], dim=1)
    return Shortened(fixed_NB, exponents_NH[rows_W, places_W], torch.bincount(rows_W, minlength=number))


def _restore(fixed_NB: Tensor, written_out: Tensor, x_NH: Tensor) -> int:
    """Fills ``x``; says how many exponents were written out."""
    number, width = x_NH.shape
    element_bytes, spans = x_NH.element_size(), -(-width // EXPONENT_SPAN)
    assert fixed_NB.shape[1] == lossless_fixed_bytes(width, element_bytes)
    split = [width * signs_and_mantissas(element_bytes), spans * (lossless_span_bytes() - 1), spans]
    others, packed, largest_NS = fixed_NB.split_with_sizes(split, dim=1)
    codes_NH = _unpacked(packed)
    exponents = largest_NS[..., None] - codes_NH.view(number, spans, EXPONENT_SPAN)
    exponents_NH = exponents.view(number, spans * EXPONENT_SPAN)[:, :width]
    rows_W, places_W = (codes_NH[:, :width] == _WRITTEN_OUT).nonzero(as_tuple=True)
    exponents_NH[rows_W, places_W] = written_out[: len(rows_W)].to(x_NH.device)
    x_NH.copy_(_together(exponents_NH, others, x_NH.dtype))
    return len(rows_W)


@dataclass(frozen=True)
class VectorFormat:
    """Messages with one expert or gradient [P] each: how many exponents are written out, the fixed parts, these exponents."""

    kind: str
    """experts or gradients."""
    width: int
    """P."""
    dtype: torch.dtype

    @property
    def agreed_bytes(self) -> int:
        """What both ends know of a message's length."""
        return lossless_bytes(self.kind, self.width, self.dtype.itemsize)

    @property
    def most_bytes(self) -> int:
        """With every exponent written out."""
        return self._fixed_bytes + self.width

    @property
    def _fixed_bytes(self) -> int:
        return COUNT_BYTES + lossless_fixed_bytes(self.width, self.dtype.itemsize)

    def encode(self, row_P: Tensor) -> Tensor:
        """uint8, at least as long as agreed."""
        parts = [shorten(rows) for rows in _as_rows(row_P)]
        number = sum(len(part.written_out) for part in parts)
        count = torch.tensor([number], dtype=torch.int32).view(torch.uint8).to(row_P.device)
        fixed, behind = [part.fixed_NB.view(-1) for part in parts], [part.written_out for part in parts]
        padding = count.new_zeros(max(self.agreed_bytes - self._fixed_bytes - number, 0))
        return torch.cat([count, *fixed, *behind, padding])

    def decode(self, message: Tensor) -> Tensor:
        """[P]."""
        row_P = torch.empty(self.width, dtype=self.dtype, device=message.device)
        fixed, written_out = message[COUNT_BYTES : self._fixed_bytes], message[self._fixed_bytes :]
        for rows in _as_rows(row_P):
            here = fixed[: len(rows) * lossless_fixed_bytes(rows.shape[1], self.dtype.itemsize)].view(len(rows), -1)
            fixed = fixed[here.numel() :]
            for piece, row in zip(here, rows, strict=True):
                written_out = written_out[_restore(piece[None], written_out, row[None]) :]
        return row_P

    def apart(self, joined: Tensor, number: int) -> list[Tensor]:
        """So many messages, one behind the other."""
        found = []
        for _ in range(number):
            count = int(joined[:COUNT_BYTES].clone().view(torch.int32))
            length = max(self._fixed_bytes + count, self.agreed_bytes)
            found.append(joined[:length])
            joined = joined[length:]
        return found


def _as_rows(row_P: Tensor) -> list[Tensor]:
    """Rows of whole pieces, and what is left; together they take as many bytes as one row."""
    whole = len(row_P) // _PIECE * _PIECE
    row_P = row_P.detach().contiguous()
    return [rows for rows in (row_P[:whole].view(-1, _PIECE), row_P[None, whole:]) if rows.numel()]


def _apart(x_NH: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Exponents, uint8 [N, H], and bytes [N, *] of all else: the sign in place of the exponent's last bit, and the mantissa."""
    wide, low = x_NH.dtype is torch.float32, list[Tensor]()
    bits = x_NH.view(torch.int32 if wide else torch.int16)
    if wide:
        low = [x_NH.view(torch.int16)[:, ::2].clone(memory_format=torch.contiguous_format).view(torch.uint8)]
        exponents_NH = bits.bitwise_right_shift(23).to(torch.uint8)
        bits = bits.bitwise_right_shift(16)
    else:
        exponents_NH = bits.bitwise_right_shift(7).to(torch.uint8)
    sign = bits.bitwise_right_shift(8).bitwise_and_(0x80)
    return exponents_NH, [bits.bitwise_and(0x7F).bitwise_or_(sign).to(torch.uint8), *low]


def _together(exponents_NH: Tensor, others: Tensor, dtype: torch.dtype) -> Tensor:
    width, wide = exponents_NH.shape[1], dtype is torch.float32
    bits = others[:, :width].to(torch.int32 if wide else torch.int16)
    sign = bits.bitwise_and(0x80).bitwise_left_shift_(8)
    bits.bitwise_and_(0x7F).bitwise_or_(sign).bitwise_or_(exponents_NH.to(bits.dtype).bitwise_left_shift_(7))
    if not wide:
        return bits.view(dtype)
    # Copied, since a part of a message need not begin where a 16-bit number may.
    low = others[:, width:].clone(memory_format=torch.contiguous_format).view(torch.int16)
    return bits.bitwise_left_shift_(16).bitwise_or_(low.to(torch.int32).bitwise_and_(0xFFFF)).view(dtype)


def _packed(codes_NL: Tensor) -> Tensor:
    """[N, 3/8 L]: eight codes in three bytes."""
    number, length = codes_NL.shape
    x = codes_NL.view(torch.int64)
    x = x.bitwise_right_shift(5).bitwise_or_(x).bitwise_and_(0x003F003F003F003F)
    x = x.bitwise_right_shift(10).bitwise_or_(x).bitwise_and_(0x00000FFF00000FFF)
    x = x.bitwise_right_shift(20).bitwise_or_(x)
    return x.view(torch.uint8).view(number, length // _GROUP, _GROUP)[..., :3].reshape(number, length // _GROUP * 3)


def _unpacked(packed_NB: Tensor) -> Tensor:
    """[N, 8/3 B]: the inverse of ``_packed``."""
    number, groups = len(packed_NB), packed_NB.shape[1] // 3
    x = F.pad(packed_NB.reshape(number, groups, 3), (0, _GROUP - 3)).view(number, groups * _GROUP).view(torch.int64)
    x = x.bitwise_left_shift(20).bitwise_or_(x).bitwise_and_(0x00000FFF00000FFF)
    x = x.bitwise_left_shift(10).bitwise_or_(x).bitwise_and_(0x003F003F003F003F)
    x = x.bitwise_left_shift(5).bitwise_or_(x).bitwise_and_(0x0707070707070707)
    return x.view(torch.uint8)
