"""The codec kernels on a device; the same functions as ``reference_codecs``. Nothing here waits for the device."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hybridep.codecs import SPAN, TILE
from runtime.kernels import launch as lay
from runtime.kernels.driver import Argument, Driver, Launch
from runtime.kernels.errors import KernelInputError
from runtime.kernels.launch import checked, pointer, require, u32
from runtime.kernels.reference import Route
from runtime.kernels.reference_codecs import ChangeCode, Code, Residual

_INT = (torch.int32,)
NARROW = (torch.bfloat16, torch.float16, torch.float32)
"""Element types that are worth coding."""
_SPANS_PER_UNIT = 4
"""Stretches of 128 elements that one warp handles at a time."""
_STARTS_THREADS = 1024
_MOST_KEPT = 512
"""Entries that a tile of the sparse residual keeps at most until it is known where they belong: work space of a quarter of bf16
values' bytes. A tile with more, which is hardly sparse, is read twice."""


class CodecKernels:
    """Launches through ``driver``. All tensors of a call lie on one device and are contiguous."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def quantize(self, x: Tensor, route: Route, num_rows: int, code: Code, *, multiple: int = 1) -> tuple[Tensor, Tensor]:
        """See ``reference_codecs.quantize``; rows that are neither in a group nor its padding are not written."""
        require("quantize", "x", x, NARROW, (None, None), x.device)
        rows, hidden = x.shape
        width, spans = 4 * lay.ceil_div(hidden, 4), lay.ceil_div(hidden, SPAN)
        codes = x.new_empty(num_rows, width, dtype=code.dtype)
        scales = x.new_empty(num_rows, spans, dtype=torch.float32)
        whole = hidden % 4 == 0 and lay.alignment([x]) >= 4 * x.element_size()
        arguments = (
            *(pointer(x), pointer(route.slot), pointer(codes), pointer(scales)),
            *_rows_arguments("quantize", route, rows, hidden, whole, multiple, x.device),
        )
        self._run_rows(f"quantize_{lay.ELEMENTS[x.dtype]}_{code.name.lower()}", rows, hidden, route, multiple, arguments, x)
        return codes, scales

    def dequantize(
        self, codes: Tensor, scales: Tensor, route: Route, num_rows: int, hidden: int, dtype: torch.dtype, *, multiple: int = 1
    ) -> Tensor:
        """See ``reference_codecs.dequantize``; rows that are neither in a group nor its padding are not written."""
        code = Code.INT8 if codes.dtype is torch.int8 else Code.FP8
        rows = codes.shape[0]
        require("dequantize", "codes", codes, (code.dtype,), (None, 4 * lay.ceil_div(hidden, 4)), codes.device)
        require("dequantize", "scales", scales, (torch.float32,), (rows, lay.ceil_div(hidden, SPAN)), codes.device)
        out = codes.new_empty(num_rows, hidden, dtype=dtype)
        require("dequantize", "dtype", out, NARROW, (None, None), codes.device)
        whole = hidden % 4 == 0 and lay.alignment([out]) >= 4 * out.element_size()
        arguments = (
            *(pointer(codes), pointer(scales), pointer(route.slot), pointer(out)),
            *_rows_arguments("dequantize", route, rows, hidden, whole, multiple, codes.device),
        )
        self._run_rows(f"dequantize_{lay.ELEMENTS[dtype]}_{code.name.lower()}", rows, hidden, route, multiple, arguments, codes)
        return out

    def change_encode(self, now: Tensor, copy: Tensor, code: ChangeCode) -> tuple[Tensor, Tensor]:
        """See ``reference_codecs.change_encode``; ``copy`` is updated in place."""
        length = _require_flat("change_encode", now, copy)
        _, span = code.value
        quads = lay.ceil_div(length, 4)
        codes = now.new_empty(quads * (2 if code is ChangeCode.INT4 else 4), dtype=torch.uint8)
        scales = now.new_empty(lay.ceil_div(length, span), dtype=torch.float32)
        tensors = (now, copy, codes, scales)
        self._run_change("change_encode", code, now, tensors, length, lay.alignment([now, copy]))
        return codes, scales

    def change_decode(self, codes: Tensor, scales: Tensor, copy: Tensor, code: ChangeCode) -> None:
        """See ``reference_codecs.change_decode``; ``copy`` is updated in place."""
        length = _require_flat("change_decode", copy)
        _, span = code.value
        quad_bytes = 2 if code is ChangeCode.INT4 else 4
        require("change_decode", "codes", codes, (torch.uint8,), (lay.ceil_div(length, 4) * quad_bytes,), copy.device)
        require("change_decode", "scales", scales, (torch.float32,), (lay.ceil_div(length, span),), copy.device)
        self._run_change("change_decode", code, copy, (codes, scales, copy), length, lay.alignment([copy]))

    def residual_encode(self, value: Tensor, shared: Tensor, threshold: Tensor, capacity: int) -> Residual:
        """See ``reference_codecs.residual_encode``; entries past the last are not written."""
        length = _require_flat("residual_encode", value, shared)
        require("residual_encode", "threshold", threshold, (torch.float32,), (1,), value.device)
        checked("residual_encode", "capacity", capacity)
        tiles = checked("residual_encode", "tiles", lay.ceil_div(length, TILE))
        new = value.new_empty
        values, places = new(capacity), new(capacity, dtype=torch.uint16)
        starts, status, found = new(tiles + 1, dtype=torch.int32), new(2, dtype=torch.int32), new(tiles, dtype=torch.int32)
        room = min(_MOST_KEPT, lay.ceil_div(4 * capacity, max(1, tiles)))
        kept = new(tiles * room), new(tiles * room, dtype=torch.uint16)
        whole = u32(lay.alignment([value, shared]) == 16)
        data: tuple[Argument, ...] = (*map(pointer, (value, shared, threshold, *kept, found)),)
        size, results = ctypes.c_int64(length), map(pointer, (starts, values, places))
        moving: tuple[Argument, ...] = (*data, *results, size, u32(tiles), u32(room), whole)
        self._run_tiles("residual_find", value, tiles, (*data, size, u32(room), whole))
        starting: tuple[Argument, ...] = (*map(pointer, (found, starts, status)), u32(tiles), u32(capacity))
        launch = Launch(stem="residual", kernel="residual_starts", grid=1, block=_STARTS_THREADS, arguments=starting)
        self._driver.launch(launch, value.device)
        self._run_tiles("residual_move", value, lay.ceil_div(tiles, lay.WARPS_PER_BLOCK), moving)
        return Residual(values, places, starts, status)

    def residual_decode(self, shared: Tensor, residual: Residual) -> Tensor:
        """See ``reference_codecs.residual_decode``."""
        length = _require_flat("residual_decode", shared)
        tiles = checked("residual_decode", "tiles", lay.ceil_div(length, TILE))
        require("residual_decode", "values", residual.values, (shared.dtype,), (None,), shared.device)
        require("residual_decode", "places", residual.places, (torch.uint16,), (len(residual.values),), shared.device)
        require("residual_decode", "starts", residual.starts, _INT, (tiles + 1,), shared.device)
        out = torch.empty_like(shared)
        arguments = (
            *(pointer(shared), pointer(residual.values), pointer(residual.places), pointer(residual.starts), pointer(out)),
            *(ctypes.c_int64(length), u32(lay.alignment([shared, out]) == 16)),
        )
        self._run_tiles("residual_decode", shared, tiles, arguments)
        return out

    def _run_rows(
        self,
        kernel: str,
        rows: int,
        hidden: int,
        route: Route,
        multiple: int,
        arguments: tuple[Argument, ...],
        like: Tensor,
    ) -> None:
        units = (rows + len(route.counts) * (multiple - 1)) * _chunks(hidden)
        grid = lay.warp_grid("quantize", units)
        launch = Launch(stem="quantize", kernel=kernel, grid=grid, block=lay.BLOCK, arguments=arguments)
        self._driver.launch(launch, like.device)

    def _run_change(
        self, name: str, code: ChangeCode, like: Tensor, tensors: tuple[Tensor, ...], length: int, aligned_to: int
    ) -> None:
        whole = length % 4 == 0 and aligned_to >= 4 * like.element_size()
        units = lay.ceil_div(length, SPAN * _SPANS_PER_UNIT)
        grid = max(1, min(lay.ceil_div(units, lay.WARPS_PER_BLOCK), lay.MAX_BLOCKS))
        kernel = f"{name}_{lay.ELEMENTS[like.dtype]}_{code.name.lower()}"
        arguments: tuple[Argument, ...] = (*map(pointer, tensors), ctypes.c_int64(length), u32(whole))
        launch = Launch(stem="change", kernel=kernel, grid=grid, block=lay.BLOCK, arguments=arguments)
        self._driver.launch(launch, like.device)

    def _run_tiles(self, name: str, like: Tensor, blocks: int, arguments: tuple[Argument, ...]) -> None:
        if blocks:
            kernel = f"{name}_{lay.ELEMENTS[like.dtype]}"
            launch = Launch(stem="residual", kernel=kernel, grid=blocks, block=lay.BLOCK, arguments=arguments)
            self._driver.launch(launch, like.device)


def _chunks(hidden: int) -> int:
    return max(1, lay.ceil_div(hidden, SPAN * _SPANS_PER_UNIT))


def _rows_arguments(
    where: str, route: Route, rows: int, hidden: int, whole: bool, multiple: int, device: torch.device
) -> tuple[Argument, ...]:
    """The common tail of quantize and dequantize, after the checks."""
    require(where, "slot", route.slot, _INT, (rows, None), device)
    require(where, "counts", route.counts, _INT, (None,), device)
    require(where, "offsets", route.offsets, _INT, (len(route.counts) + 1,), device)
    top_k = route.slot.shape[1]
    lay.require_top_k(where, top_k)
    return (
        *(pointer(route.counts), pointer(route.offsets), u32(rows), u32(top_k), u32(hidden), u32(whole)),
        *(u32(_chunks(hidden)), u32(len(route.counts)), u32(multiple)),
    )


def _require_flat(where: str, *tensors: Tensor) -> int:
    """Length of flat tensors of one type and size."""
    if tensors[0].dim() != 1:
        raise KernelInputError(where, "argument 0", f"has shape {list(tensors[0].shape)}, must be flat")
    for position, tensor in enumerate(tensors):
        dtypes = NARROW if position == 0 else (tensors[0].dtype,)
        require(where, f"argument {position}", tensor, dtypes, (tensors[0].numel(),), tensors[0].device)
    return tensors[0].numel()
