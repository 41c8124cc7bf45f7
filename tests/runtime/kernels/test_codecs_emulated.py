"""The codec kernels' own source, compiled for the CPU, against the reference: bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import Case, make_ids, make_rows
from kernel_emulator import EmulatingDriver
from torch import Tensor

from runtime.kernels import reference, reference_codecs
from runtime.kernels.codecs import CodecKernels
from runtime.kernels.driver import Launch
from runtime.kernels.launch import pointer, u32, worst_case_rows
from runtime.kernels.reference import Route
from runtime.kernels.reference_codecs import TILE, ChangeCode, Code

NARROW = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def kernels(compiled_kernels: Path) -> CodecKernels:
    return CodecKernels(EmulatingDriver(folder=compiled_kernels, order=5))


def make_route(case: Case) -> Route:
    ids, groups = make_ids(case), torch.arange(case.experts, dtype=torch.int32)
    capacity = worst_case_rows(ids.numel(), case.experts, case.multiple)
    return reference.route(ids, groups, case.experts, multiple=case.multiple, capacity=capacity)


def wild(rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Values of very different size, and a row of zeros."""
    x = make_rows(rows, hidden, torch.float64) * 10 ** (6 * make_rows(rows, 1, torch.float64, seed=9) / 3)
    x[rows // 2 :][:1] = 0
    return x.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.turns(2)
@pytest.mark.parametrize("code", list(Code))
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("hidden", [1, 3, 64, 128, 130, 640, 1160])
def test_quantised_dispatch(hidden: int, dtype: torch.dtype, code: Code, kernels: CodecKernels) -> None:
    case = Case(name="", rows=13, top_k=3, multiple=8, routing="gaps")
    route, x = make_route(case), wild(13, hidden, dtype)
    rows = int(route.offsets[-1])
    codes, scales = kernels.quantize(x, route, rows, code, multiple=8)
    wanted_codes, wanted_scales = reference_codecs.quantize(x, route, rows, code)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)
    # Quantised rows that arrived as they are, spread to their experts in full width.
    sent = reference_codecs.quantize(x, arrived_in_order(13), 13, code)
    y = kernels.dequantize(*sent, route, rows, hidden, dtype, multiple=8)
    assert torch.equal(y, reference_codecs.dequantize(*sent, route, rows, hidden, dtype))


def arrived_in_order(rows: int) -> Route:
    slot = torch.arange(rows, dtype=torch.int32)[:, None]
    counts = torch.tensor([rows], dtype=torch.int32)
    return Route(slot, counts, torch.tensor([0, rows], dtype=torch.int32), counts)


def test_not_a_number_survives_quantisation(kernels: CodecKernels) -> None:
    x = make_rows(4, 256, torch.float32)
    x[1, 5], x[2, 200] = float("nan"), float("inf")
    route = arrived_in_order(4)
    for code in Code:
        sent = kernels.quantize(x, route, 4, code)
        y = kernels.dequantize(*sent, route, 4, 256, torch.float32)
        assert y[1, :128].isnan().all()
        assert not y[2, 128:].isfinite().all()
        assert y[0].isfinite().all()
        assert y[1, 128:].isfinite().all()


@pytest.mark.turns(2)
@pytest.mark.parametrize("code", list(ChangeCode))
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("length", [0, 1, 31, 32, 128, 1000, 1027, 4096])
def test_change_coding(length: int, dtype: torch.dtype, code: ChangeCode, kernels: CodecKernels) -> None:
    now, start = wild(1, length, dtype)[0], make_rows(1, length, dtype, seed=4)[0]
    ends = [start.clone() for _ in range(4)]
    codes, scales = kernels.change_encode(now, ends[0], code)
    wanted = reference_codecs.change_encode(now, ends[1], code)
    assert torch.equal(codes, wanted[0])
    assert torch.equal(scales, wanted[1])
    kernels.change_decode(codes, scales, ends[2], code)
    reference_codecs.change_decode(codes, scales, ends[3], code)
    for end in ends[1:]:
        assert torch.equal(end, ends[0])


def test_misaligned_change(kernels: CodecKernels) -> None:
    now, copy = make_rows(1, 1001, torch.bfloat16)[0, 1:], make_rows(1, 1001, torch.bfloat16, seed=4)[0, 1:]
    other = copy.clone()
    found, wanted = (
        kernels.change_encode(now, copy, ChangeCode.INT8),
        reference_codecs.change_encode(now, other, ChangeCode.INT8),
    )
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(copy, other)


@pytest.mark.turns(3)
@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("length", [1, 7, 1000, TILE, TILE + 1, 40 * TILE + 333])
def test_sparse_residual(length: int, dtype: torch.dtype, order: int, compiled_kernels: Path) -> None:
    kernels = CodecKernels(EmulatingDriver(folder=compiled_kernels, order=order))
    value, shared = make_rows(1, length, dtype)[0], make_rows(1, length, dtype, seed=4)[0]
    for keep in (0.01, 0.5, 1.0):
        threshold = torch.zeros(1) if keep == 1.0 else reference_codecs.sample_threshold(value, shared, keep)
        for capacity in (length, length // 3):
            found = kernels.residual_encode(value, shared, threshold, capacity)
            wanted = reference_codecs.residual_encode(value, shared, threshold, capacity)
            number = int(wanted.starts[-1])
            assert torch.equal(found.starts, wanted.starts)
            assert torch.equal(found.status, wanted.status)
            assert torch.equal(found.values[:number], wanted.values[:number])
            assert torch.equal(found.places[:number].int(), wanted.places[:number].int())
            assert torch.equal(kernels.residual_decode(shared, found), reference_codecs.residual_decode(shared, wanted))
            assert int(found.status[0]) == max(0, int(found.status[1]) - capacity)


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("tiles", [1, 1000, 16 * 1024, 40_000])
def test_starts_of_many_tiles(tiles: int, order: int, compiled_kernels: Path) -> None:
    """Of more tiles than the one block counts at a time."""
    found = torch.randint(TILE + 1, (tiles,), generator=torch.Generator().manual_seed(tiles), dtype=torch.int32)
    starts, status = torch.empty(tiles + 1, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    capacity, total = TILE * tiles // 3, int(found.sum())
    arguments = (*map(pointer, (found, starts, status)), u32(tiles), u32(capacity))
    driver = EmulatingDriver(folder=compiled_kernels, order=order)
    driver.launch(Launch(stem="residual", kernel="residual_starts", grid=1, block=1024, arguments=arguments), found.device)
    assert torch.equal(starts, F.pad(found.cumsum(0), (1, 0)).clamp(max=capacity).int())
    assert status.tolist() == [total - min(total, capacity), total]


def test_residual_of_misaligned_and_empty_rows(kernels: CodecKernels) -> None:
    value, shared = make_rows(1, 5001, torch.bfloat16)[0, 1:], make_rows(1, 5001, torch.bfloat16, seed=4)[0, 1:]
    threshold = torch.tensor([1.5])
    found = kernels.residual_encode(value, shared, threshold, 5000)
    wanted = reference_codecs.residual_encode(value, shared, threshold, 5000)
    assert torch.equal(found.starts, wanted.starts)
    assert torch.equal(kernels.residual_decode(shared, found), reference_codecs.residual_decode(shared, wanted))
    empty = value[:0]
    nothing = kernels.residual_encode(empty, empty, threshold, 0)
    assert nothing.status.tolist() == [0, 0]
    assert kernels.residual_decode(empty, nothing).numel() == 0


def test_element_types_convert_as_in_torch(compiled_kernels: Path) -> None:
    """Every bf16 and f16 value, and floats around each rounding boundary, through a kernel that widens and narrows."""
    from runtime.kernels.tokens import TokenKernels

    kernels = TokenKernels(EmulatingDriver(folder=compiled_kernels))
    slot = torch.zeros(1, 1, dtype=torch.int32)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = every.view(dtype)[None]
        found = kernels.combine(x, slot)  # narrow(widen(x))
        assert torch.equal(found.isnan(), x.isnan())
        assert torch.equal(found[~x.isnan()], x[~x.isnan()])
    # Products of two f16 values fall between f16 values, below the least normal and above the largest one.
    for dtype in (torch.bfloat16, torch.float16):
        x = every[::7].view(dtype)[None]
        x = x[x.isfinite()][None]
        for factor in (1.0009765625, 0.33, 1 / 3000, 40.0, -1.0):
            weight = torch.tensor([[factor]], dtype=dtype)
            found, wanted = kernels.combine(x, slot, weight), (x.float() * weight.float() + 0.0).to(dtype)  # a sum has no -0
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
