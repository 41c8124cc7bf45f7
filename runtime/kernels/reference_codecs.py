"""The codec kernels in plain torch: what each must compute bit for bit, and the path on CPU and for fp64."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from hybridep.codecs import INT4_SPAN, SPAN, TILE
from runtime.kernels.reference import Route

LEAST = 1e-30
"""Smallest maximum that a scale is made from: the reciprocal stays finite."""


class Code(Enum):
    """Element types of quantised tokens; the value is the largest magnitude."""

    INT8 = 127.0
    FP8 = 448.0

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes in memory."""
        return torch.int8 if self is Code.INT8 else torch.float8_e4m3fn


class ChangeCode(Enum):
    """Element types of a coded change; the value is (largest magnitude, elements that share a scale)."""

    INT8 = (127, SPAN)
    INT4 = (7, INT4_SPAN)


class Residual(NamedTuple):
    """The entries of ``value - shared`` that reach a threshold, in rising order of their element."""

    values: Tensor
    """[capacity]."""
    places: Tensor
    """[capacity] uint16: element within its tile."""
    starts: Tensor
    """[tiles + 1] int32: first entry of each tile."""
    status: Tensor
    """[2] int32: entries dropped for want of room, and entries found before dropping."""


def _spans(x: Tensor, span: int) -> Tensor:
    """[..., spans, span] fp32: the last dimension in spans, zeros past its end."""
    width = -(-x.shape[-1] // span) * span
    padded = torch.nn.functional.pad(x.float(), (0, width - x.shape[-1]))
    return padded.reshape(*x.shape[:-1], width // span, span)


def _scales(spans: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(scale, reciprocal), each [..., spans, 1]. A NaN shows in the scale."""
    size = spans.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST)
    # A scalar over a tensor, and on a GPU a tensor over a scalar, would be rounded twice: torch multiplies by the reciprocal.
    whole = torch.full_like(size, largest)
    return size / whole, whole / size


def quantize(x: Tensor, route: Route, num_rows: int, code: Code) -> tuple[Tensor, Tensor]:
    """Dispatch of ``x`` [N, H] in one byte per element: codes [R, ceil(H / 4) * 4], scales [R, ceil(H / 128)] fp32.
    Zeros in rows without a pair and past H."""
    codes, scales = quantize_rows(x, code)
    out_codes = codes.new_zeros(num_rows, codes.shape[1])
    out_scales = scales.new_zeros(num_rows, scales.shape[1])
    row, k = (route.slot >= 0).nonzero(as_tuple=True)
    at = route.slot[row, k].long()
    out_codes[at], out_scales[at] = codes[row], scales[row]
    return out_codes.view(code.dtype), out_scales


def quantize_rows(x: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """The format alone: each row of ``x`` [N, H] as codes [N, ceil(H / 4) * 4] uint8 and scales [N, ceil(H / 128)] fp32."""
    spans = _spans(x, SPAN)
    scale, reciprocal = _scales(spans, code.value)
    scaled = spans * reciprocal
    coded = (scaled.round() if code is Code.INT8 else scaled).clamp(-code.value, code.value).to(code.dtype)
    width = -(-x.shape[1] // 4) * 4
    return coded.flatten(1).view(torch.uint8)[:, :width], scale[:, :, 0]


def dequantize(codes: Tensor, scales: Tensor, route: Route, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """[R, H]: quantised rows [N, *] in full width at each of their slots, zeros elsewhere."""
    wide = dequantize_rows(codes, scales, hidden, dtype)
    out = wide.new_zeros(num_rows, hidden)
    row, k = (route.slot >= 0).nonzero(as_tuple=True)
    out[route.slot[row, k].long()] = wide[row]
    return out


def dequantize_rows(codes: Tensor, scales: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """[N, H]: what ``quantize_rows`` coded; ``codes`` in the code's own element type."""
    wide = codes.float() * scales.repeat_interleave(SPAN, dim=1)[:, : codes.shape[1]]
    return wide[:, :hidden].to(dtype)


def change_encode(now: Tensor, copy: Tensor, code: ChangeCode) -> tuple[Tensor, Tensor]:
    """Code ``now - copy`` (both flat) and move ``copy``, in place, by what was coded: (codes uint8, scales fp32).
    int8: one byte per element; int4: two elements a byte, the lower first; either padded to four elements."""
    largest, span = code.value
    spans = _spans(now.float() - copy.float(), span)
    scale, reciprocal = _scales(spans, largest)
    coded = (spans * reciprocal).round().clamp(-largest, largest).to(torch.int8).flatten()[: -(-len(now) // 4) * 4]
    scales = scale.flatten().clone()
    if code is ChangeCode.INT4:
        pairs = coded.view(torch.uint8).view(-1, 2) & 15
        codes = pairs[:, 0] | pairs[:, 1] << 4
    else:
        codes = coded.view(torch.uint8).clone()
    change_decode(codes, scales, copy, code)
    return codes, scales


def change_decode(codes: Tensor, scales: Tensor, copy: Tensor, code: ChangeCode) -> None:
    """Move ``copy``, in place, by a coded change. Product and sum are rounded one by one, so both ends agree exactly."""
    _, span = code.value
    if code is ChangeCode.INT4:
        low, high = (codes << 4).view(torch.int8) >> 4, codes.view(torch.int8) >> 4
        coded = torch.stack([low, high], dim=1).flatten()
    else:
        coded = codes.view(torch.int8)
    change = coded.float() * scales.repeat_interleave(span)[: len(coded)]
    copy.copy_((copy.float() + change[: len(copy)]).to(copy.dtype))


def sample_threshold(value: Tensor, shared: Tensor, keep: float, *, samples: int = 65536) -> Tensor:
    """[1] fp32: a magnitude that about the share ``keep`` of ``value - shared`` reaches, from evenly spaced samples (a
    full sort costs more than the transfer that it saves)."""
    step = max(1, len(value) // samples)
    sizes = (value[::step].float() - shared[::step].float()).abs()
    return sizes.topk(max(1, min(len(sizes), round(keep * len(sizes))))).values[-1:]


def residual_encode(value: Tensor, shared: Tensor, threshold: Tensor, capacity: int) -> Residual:
    """What reaches ``threshold`` of ``value - shared`` (both flat); a NaN is sent, not hidden."""
    residual = value.float() - shared.float()
    [at] = (~(residual.abs() < threshold)).nonzero(as_tuple=True)
    values, places = value.new_zeros(capacity), value.new_zeros(capacity, dtype=torch.uint16)
    kept = at[:capacity]
    values[: len(kept)] = residual[kept].to(value.dtype)
    places[: len(kept)] = (kept % TILE).to(torch.uint16)
    tiles = torch.arange(-(-len(value) // TILE) + 1, device=at.device) * TILE
    starts = torch.searchsorted(at, tiles).clamp(max=capacity).int()
    return Residual(values, places, starts, starts.new_tensor([len(at) - len(kept), len(at)]))


def residual_decode(shared: Tensor, residual: Residual) -> Tensor:
    """``shared`` plus the entries."""
    out = shared.clone()
    per_tile = (residual.starts[1:] - residual.starts[:-1]).long()
    number = int(per_tile.sum())
    tile = torch.repeat_interleave(torch.arange(len(per_tile), device=shared.device), per_tile)
    at = tile * TILE + residual.places[:number].to(torch.int64)
    out[at] = (shared[at].float() + residual.values[:number].float()).to(shared.dtype)
    return out
