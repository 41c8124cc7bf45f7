"""Grids, word sizes and checks on shapes far too large to allocate; nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_cases import RESOURCES
from kernel_emulator import RecordingDriver, check_arguments, library_for
from torch import Tensor

from runtime.kernels import launch, resources
from runtime.kernels.codecs import CodecKernels
from runtime.kernels.errors import KernelInputError
from runtime.kernels.launch import Peers
from runtime.kernels.reference import Route
from runtime.kernels.reference_codecs import ChangeCode, Code
from runtime.kernels.tokens import TokenKernels, tile_pairs


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def meta_route(rows: int, top_k: int, groups: int) -> Route:
    ints = [meta(*shape, dtype=torch.int32) for shape in ((rows, top_k), (groups,), (groups + 1,), (2,))]
    return Route(*ints)


@pytest.mark.parametrize("rows", [0, 1, 32, 4096, 16384, 1_000_000])
@pytest.mark.parametrize("hidden", [1, 7, 4096, 7168])
def test_launches_of_all_sizes(rows: int, hidden: int) -> None:
    """Up to 57 billion elements: every launch within the hardware's limits and enough threads for every unit."""
    driver = RecordingDriver()
    tokens, codecs = TokenKernels(driver), CodecKernels(driver)
    x, route = meta(rows, hidden), meta_route(rows, 8, 128)
    tokens.route(route.slot, meta(128, dtype=torch.int32), 128, multiple=8, capacity=launch.worst_case_rows(8 * rows, 128, 8))
    y = tokens.dispatch(x, route, launch.worst_case_rows(8 * rows, 128, 8), multiple=8)
    weights = meta(rows, 8)
    tokens.combine(y, route.slot, weights)
    tokens.combine_backward(x, y, route, weights, multiple=8)
    tokens.carry(route.slot, weights, meta(128, dtype=torch.int32), route.slot, rows)
    sent = codecs.quantize(x, route, rows, Code.INT8, multiple=8)
    codecs.dequantize(*sent, route, len(y), hidden, x.dtype, multiple=8)
    flat, copy = meta(rows * hidden), meta(rows * hidden)
    codecs.change_decode(*codecs.change_encode(flat, copy, ChangeCode.INT4), copy, ChangeCode.INT4)
    found = codecs.residual_encode(flat, copy, meta(1, dtype=torch.float32), rows * hidden // 100 % 2**31)
    codecs.residual_decode(copy, found)
    by_kernel = {item.kernel: item for item in driver.launches}
    grid = by_kernel["dispatch_16" if hidden % 8 == 0 else "dispatch_2"].grid
    assert grid == max(1, min(2**20, -(-(rows + 128 * 7) * max(1, -(-hidden // (1024 if hidden % 8 == 0 else 128))) // 8)))


@pytest.mark.turns(4)
def test_every_kernel_of_the_table_has_a_launch(compiled_kernels: Path) -> None:
    """All element types, access widths and codes: no kernel is compiled that nothing launches, none launched that is not
    compiled, and each gets the arguments that it declares."""
    driver = RecordingDriver()
    tokens, codecs = TokenKernels(driver), CodecKernels(driver)
    route, group_of = meta_route(16, 2, 4), meta(4, dtype=torch.int32)
    tokens.route(route.slot, group_of, 4, capacity=32)
    for width in (1, 2, 4, 8, 16):
        tokens.dispatch(meta(16, width, dtype=torch.uint8), route, 32)
    for dtype in launch.ELEMENTS:
        weights = meta(16, 2, dtype=dtype)
        for hidden in (64, 63):
            x, y = meta(16, hidden, dtype=dtype), meta(32, hidden, dtype=dtype)
            tokens.combine(y, route.slot, weights)
            tokens.combine(y, meta_route(16, 3, 4).slot, meta(16, 3, dtype=dtype))
            tokens.combine_backward(x, y, route, weights)
        tokens.carry(route.slot, weights, group_of, route.slot, 16)
        tokens.carry_back(weights, route.slot, group_of, route.slot)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        flat, copy = meta(1000, dtype=dtype), meta(1000, dtype=dtype)
        for code in Code:
            coded = codecs.quantize(meta(16, 64, dtype=dtype), route, 32, code)
            codecs.dequantize(*coded, meta_route(32, 1, 1), 32, 64, dtype)
        for change in ChangeCode:
            codecs.change_decode(*codecs.change_encode(flat, copy, change), copy, change)
        codecs.residual_decode(copy, codecs.residual_encode(flat, copy, meta(1, dtype=torch.float32), 100))
    _, table = resources.read_table(RESOURCES)
    assert {item.kernel for item in driver.launches} == {kernel for kernel, _ in table}
    for item in driver.launches:
        check_arguments(library_for(compiled_kernels, item.stem), item)


def test_word_is_the_largest_that_fits() -> None:
    assert [launch.word_bytes(size, 16) for size in (14336, 24, 20, 6, 7, 0)] == [16, 8, 4, 2, 1, 16]
    assert [launch.word_bytes(64, aligned) for aligned in (16, 8, 2)] == [16, 8, 2]
    rows = torch.empty(100, dtype=torch.bfloat16)
    assert [launch.alignment([rows[start:]]) for start in (0, 8, 4, 2, 1)] == [16, 16, 8, 4, 2]
    peers = Peers(addresses=torch.zeros(2, dtype=torch.int64), rows=4, alignment=4)
    assert launch.alignment([rows, None, peers]) == 4


def test_route_tiles_cover_every_pair() -> None:
    for pairs in (0, 1, 255, 256, 257, 131072, 10**6, 2**31 - 1):
        tile = tile_pairs(pairs)
        assert tile % 32 == 0
        # The counts of all tiles are added up by one block.
        assert pairs > 10**6 or -(-pairs // tile) <= 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": torch.zeros(4, 2, dtype=torch.int64)}, r"dispatch: slot: is torch\.int64, must be torch\.int32"),
        ({"slot": torch.zeros(5, 2, dtype=torch.int32)}, r"dispatch: slot: has shape \[5, 2\], must be \[4, \*\]"),
        ({"slot": torch.zeros(4, 33, dtype=torch.int32)}, r"dispatch: slot: 33 pairs per row; the kernels take 1 to 32"),
        ({"slot": torch.zeros(2, 4, dtype=torch.int32).t()}, r"dispatch: slot: must be contiguous"),
        ({"offsets": torch.zeros(3, dtype=torch.int32)}, r"dispatch: offsets: has shape \[3\], must be \[2\]"),
        ({"slot": meta(4, 2, dtype=torch.int32)}, r"dispatch: slot: is on meta, must be on cpu"),
    ],
)
def test_wrong_tensors_are_refused_by_name(change: dict[str, Tensor], message: str) -> None:
    one, two = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    route = Route(torch.zeros(4, 2, dtype=torch.int32), one, two, two)._replace(**change)
    driver = RecordingDriver()
    with pytest.raises(KernelInputError, match=message):
        TokenKernels(driver).dispatch(torch.zeros(4, 8), route, 8)
    assert not driver.launches


def test_too_large_batches_are_refused_with_the_way_out() -> None:
    tokens = TokenKernels(RecordingDriver())
    with pytest.raises(KernelInputError, match=r"route: rows x top_k: 2400000000 must lie in .*; split the batch"):
        tokens.route(meta(300_000_000, 8, dtype=torch.int32), meta(8, dtype=torch.int32), 8, capacity=2**31 - 1)
    with pytest.raises(KernelInputError, match="num_groups: 20000"):
        tokens.route(meta(4, 2, dtype=torch.int32), meta(8, dtype=torch.int32), 20000, capacity=8)
    with pytest.raises(KernelInputError, match="rows x chunks"):
        tokens.combine(meta(100, 7168), meta(200_000_000, 4, dtype=torch.int32))
    with pytest.raises(KernelInputError, match=r"combine: y: is torch\.int8, must be torch\.bfloat16"):
        tokens.combine(meta(4, 8, dtype=torch.int8), meta(4, 2, dtype=torch.int32))
