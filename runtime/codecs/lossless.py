"""Floating-point numbers in fewer bytes and without loss: of 16 bits bf16 needs 11.4, of 32 fp32 27.4.

Neighbouring numbers are of similar size. Of every span of elements the largest exponent is sent, and three bits for each element:
how far its exponent is below, up to six. Where it is further the exponent itself follows at the end of the message. Signs and
mantissas, which hardly repeat, travel as they are. So a message has a fixed part and one whose length depends on the numbers;
both ends know how long it is if few exponents are written out, which ``hybridep.codecs`` counts, and that it may be longer.

That exponents are what compresses in trained weights is known from ZipNN (arXiv:2411.05239) and DFloat11 (arXiv:2504.11651),
which code them by Huffman's method; codes of one length take a few passes over the numbers, on any device.
"""

from __future__ import annotations

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
    number, width = x_NH.shape
    x_NH = x_NH.detach().contiguous()
    exponents_NH, others = _apart(x_NH)
    spans = -(-width // EXPONENT_SPAN)
    padded = F.pad(exponents_NH, (0, spans * EXPONENT_SPAN - width)).view(number, spans, EXPONENT_SPAN)
    largest_NS = padded.amax(dim=2)
    codes = (largest_NS[..., None] - padded).clamp_(max=_WRITTEN_OUT).view(number, spans * EXPONENT_SPAN)
    codes[:, width:] = 0
    rows_W, places_W = (codes == _WRITTEN_OUT).nonzero(as_tuple=True)
    fixed_NB = torch.cat([*others, _packed(codes), largest_NS], dim=1)
    return Shortened(fixed_NB, exponents_NH[rows_W, places_W], torch.bincount(rows_W, minlength=number))


def restore(fixed_NB: Tensor, written_out: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[N, width]: the inverse of ``shorten``; ``written_out`` may be followed by anything."""
    number, element_bytes = len(fixed_NB), dtype.itemsize
    assert fixed_NB.shape[1] == lossless_fixed_bytes(width, element_bytes)
    spans = -(-width // EXPONENT_SPAN)
    split = [width * signs_and_mantissas(element_bytes), spans * (lossless_span_bytes() - 1), spans]
    others, packed, largest_NS = fixed_NB.split_with_sizes(split, dim=1)
    codes_NH = _unpacked(packed)
    exponents = largest_NS[..., None] - codes_NH.view(number, spans, EXPONENT_SPAN)
    exponents_NH = exponents.view(number, spans * EXPONENT_SPAN)[:, :width]
    out_NH = codes_NH[:, :width] == _WRITTEN_OUT
    if written_out.device != fixed_NB.device:
        written_out = written_out[: int(out_NH.sum())].to(fixed_NB.device)
    exponents_NH = exponents_NH.masked_scatter(out_NH, written_out)
    return _together(exponents_NH, others, dtype)


class Lengths(NamedTuple):
    """Of messages with one row of a type each, in bytes. In front is how many exponents are written out."""

    agreed: int
    """What both ends know."""
    most: int
    fixed: int
    """Of these what comes before exponents that are written out."""

    @classmethod
    def of(cls, kind: str, width: int, dtype: torch.dtype) -> Lengths:
        """``kind``: experts or gradients."""
        fixed = COUNT_BYTES + lossless_fixed_bytes(width, dtype.itemsize)
        return cls(lossless_bytes(kind, width, dtype.itemsize), fixed + width, fixed)

    def message(self, row_P: Tensor) -> Tensor:
        """uint8: at least as long as agreed."""
        shortened = shorten(row_P[None])
        written_out = shortened.written_out
        count = torch.tensor([len(written_out)], dtype=torch.int32).view(torch.uint8).to(row_P.device)
        behind = F.pad(written_out, (0, max(self.agreed - self.fixed - len(written_out), 0)))
        return torch.cat([count, shortened.fixed_NB[0], behind])

    def apart(self, joined: Tensor, number: int) -> list[Tensor]:
        """So many messages, one behind the other."""
        found = []
        for _ in range(number):
            count = int(joined[:COUNT_BYTES].clone().view(torch.int32))
            length = max(self.fixed + count, self.agreed)
            found.append(joined[:length])
            joined = joined[length:]
        return found

    def row(self, message: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """[P]: what was made a message."""
        return restore(message[None, COUNT_BYTES : self.fixed], message[self.fixed :], width, dtype)[0]


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
