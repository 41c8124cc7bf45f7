"""The bench's cases run, and count their bytes right; timing itself needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from kernel_emulator import EmulatingDriver

from runtime.kernels import bench, bench_cases, bench_layer
from runtime.kernels.bench_cases import Shape
from runtime.kernels.bench_layer import AS_TRAINED, Layer, LayerData
from runtime.kernels.codecs import CodecKernels
from runtime.kernels.tokens import TokenKernels

CPU = torch.device("cpu")


@pytest.mark.turns(4)
def test_every_case_runs(compiled_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cases, "CACHE_BYTES", 10_000)
    driver = EmulatingDriver(folder=compiled_kernels)
    tokens, codecs = TokenKernels(driver), CodecKernels(driver)
    shape = Shape(tokens=16, top_k=2, experts=4, hidden=256)
    cases = [
        *bench_cases.copy_cases(CPU, 4096),
        *bench_cases.token_cases(tokens, shape, CPU),
        *bench_cases.quantised_cases(tokens, codecs, shape, CPU),
        *bench_cases.codec_cases(codecs, 8192, CPU),
    ]
    for case in cases:
        for run in case.runs:
            run()
    moved = {case.name: case.moved_bytes for case in cases}
    assert moved["device copy"] == 2 * 4096
    assert moved["dispatch"] == moved["combine"] == moved["torch index_select"] == (16 + 32) * 512
    assert moved["combine backward"] == (16 + 32 + 32) * 512
    assert moved["dispatch to int8"] == 16 * 512 + 32 * (256 + 8)
    assert moved["residual decode"] == 4 * 8192 + round(0.02 * 8192) * 4
    assert {"residual_find_bf16", "change_decode_bf16_int4", "dequantize_bf16_fp8"} <= driver.kernels_run
    assert all(len(case.runs) >= 1 for case in cases)


def test_published_shape_counts_as_published() -> None:
    """TileOPs: 0.2204 ms at 2.40 TB/s."""
    shape = bench_cases.SHAPES[0]
    moved = (shape.tokens + shape.tokens * shape.top_k) * 2 * shape.hidden
    assert moved / 0.2204e-3 == pytest.approx(2.40e12, rel=0.005)


LAYER = Layer(tokens=24, top_k=2, experts=5, hidden=16, ffn=32, source="test")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_all_forms_of_the_layer_agree(dtype: torch.dtype) -> None:
    forms = bench_layer.forms(LayerData(LAYER, CPU, dtype))
    every = (forms[name] for name in ("plain torch", "kernels", AS_TRAINED))
    plain, *others = ((form.forward(), *form.forward_backward()) for form in every)
    bound = {"rtol": 5e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {}
    for results in others:
        for a, b in zip(results, plain, strict=True):
            torch.testing.assert_close(a, b, **bound)


def test_torchtitans_layer_computes_the_same() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: its layer is not compared")
    # fp32 inputs: both choose the same experts. Its products round to bf16.
    forms = bench_layer.forms(LayerData(LAYER, CPU, torch.float32))
    wanted, found = forms["kernels"], forms["torchtitan"]
    pairs = [(found.forward(), wanted.forward())]
    of_x, *of_weights = found.forward_backward()
    # Its weights are transposed.
    pairs += zip((of_x, *(gradient.mT for gradient in of_weights)), wanted.forward_backward(), strict=True)
    for a, b in pairs:
        assert a.shape == b.shape
        assert float((a - b).detach().norm() / b.detach().norm()) < 2e-2


def test_the_layers_parts_make_up_the_layer() -> None:
    data = LayerData(LAYER, CPU, torch.float64)
    runs = dict(bench_layer.parts(data))
    both = [f"{name}{way}" for name in ("gate", "dispatch", "experts", "combine") for way in ("", " backward")]
    assert list(runs) == ["route", *both]
    torch.testing.assert_close(runs["combine"](), bench_layer.with_kernels(data))
    for name in ("gate", "dispatch", "experts", "combine"):
        for gradient in runs[f"{name} backward"]():  # type: ignore[attr-defined]
            assert gradient.isfinite().all()


def test_without_a_gpu_the_bench_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(bench.main, [])
    assert result.exit_code != 0
    assert "the bench needs a CUDA device" in result.output
