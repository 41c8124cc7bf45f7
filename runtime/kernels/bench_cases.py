"""What the bench runs: each kernel on published shapes, beside what torch offers for the same result.

A case is a list of equal runs on different data, enough of them that no run finds its data in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from hybridep.codecs import SPAN
from runtime.kernels.codecs import CodecKernels
from runtime.kernels.launch import worst_case_rows
from runtime.kernels.reference import Route
from runtime.kernels.reference_codecs import ChangeCode, Code, sample_threshold
from runtime.kernels.tokens import TokenKernels

Run = Callable[[], object]
CACHE_BYTES = 256 * 2**20
"""More than any GPU's L2."""
KEEP = 0.02
"""Share of a sparse residual: 50x fewer values."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One dispatch on one GPU."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    multiple: int = 8
    source: str = ""
    """Who publishes figures for it."""

    @property
    def label(self) -> str:
        return f"{self.tokens} x {self.top_k} of {self.experts} x {self.hidden}"


SHAPES = (
    Shape(tokens=4096, top_k=8, experts=128, hidden=7168, source="TileOPs (2.40 TB/s on H200), vLLM"),
    Shape(tokens=4096, top_k=2, experts=8, hidden=4096, source="TileOPs (2.37 TB/s on H200)"),
    Shape(tokens=2048, top_k=2, experts=8, hidden=4096, source="TileOPs unpermute (2.95 TB/s on H200)"),
    *(Shape(tokens=tokens, top_k=8, experts=128, hidden=7168) for tokens in (32, 128, 512, 2048, 8192, 16384)),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to time."""

    name: str
    what: str
    """Shape, for people."""
    moved_bytes: int
    """The fewest bytes that must be read and written: each input once, each result once."""
    runs: list[Run]


def copy_cases(device: torch.device, num_bytes: int = 2**30) -> Iterator[Case]:
    """Device copies: the faster is the ceiling that the others are held against. torch's own asks the driver, which may leave
    a good part of the bandwidth unused; the other is an elementwise kernel."""
    pairs = [(_random(num_bytes // 4, device=device, seed=i), torch.empty(num_bytes // 4, device=device)) for i in range(2)]
    ways: tuple[tuple[str, Callable[[Tensor, Tensor], object]], ...] = (
        ("device copy", lambda source, target: target.copy_(source)),
        ("device copy by a kernel", lambda source, target: torch.neg(source, out=target)),
    )
    for name, way in ways:
        runs: list[Run] = [partial(way, source, target) for source, target in pairs]
        yield Case(name=name, what=f"{num_bytes} bytes", moved_bytes=2 * num_bytes, runs=runs)


def token_cases(kernels: TokenKernels, shape: Shape, device: torch.device) -> Iterator[Case]:
    """Route, dispatch, combine and the backward of combine in bf16, and torch's index_select and index_add."""
    row_bytes = 2 * shape.hidden
    pairs = shape.tokens * shape.top_k
    once, copies = shape.tokens * row_bytes, pairs * row_bytes
    sets = [_TokenData(kernels, shape, device, seed) for seed in range(_sets(once + copies))]

    def case(name: str, moved_bytes: int, run: Callable[[_TokenData], object]) -> Case:
        return Case(name=name, what=shape.label, moved_bytes=moved_bytes, runs=[partial(run, data) for data in sets])

    multiple, capacity = shape.multiple, sets[0].capacity
    yield case("route", 3 * 4 * pairs, lambda d: d.new_route())
    yield case("dispatch", once + copies, lambda d: kernels.dispatch(d.x, d.route, capacity, multiple=multiple))
    yield case("combine", once + copies, lambda d: kernels.combine(d.y, d.route.slot, d.weights))
    yield case(
        "combine backward",
        once + 2 * copies,
        lambda d: kernels.combine_backward(d.x, d.y, d.route, d.weights, multiple=multiple),
    )
    yield case("torch index_select", once + copies, lambda d: d.x.index_select(0, d.sorted_rows))
    if device.type == "cuda" and find_spec("triton") is not None:
        # Where Triton is installed only, hence not at the top.
        from runtime.kernels.bench_triton import gather

        yield case("triton gather", once + copies, lambda d: gather(d.x, d.sorted_rows))
    yield case(
        "torch index_add",
        once + copies,
        lambda d: torch.zeros_like(d.x).index_add_(0, d.sorted_rows, d.y[:pairs] * d.sorted_weights),
    )


class _TokenData:
    def __init__(self, kernels: TokenKernels, shape: Shape, device: torch.device, seed: int) -> None:
        self.x = _random(shape.tokens, shape.hidden, device=device, seed=seed).bfloat16()
        scores = _random(shape.tokens, shape.experts, device=device, seed=seed + 1000)
        weights, ids = scores.topk(shape.top_k, dim=1)
        self.weights, self.ids = weights.softmax(dim=1).bfloat16(), ids.int()
        self.groups = torch.arange(shape.experts, dtype=torch.int32, device=device)
        self.capacity = worst_case_rows(ids.numel(), shape.experts, shape.multiple)
        self.new_route: Callable[[], Route] = lambda: kernels.route(
            self.ids, self.groups, shape.experts, multiple=shape.multiple, capacity=self.capacity
        )
        self.route = self.new_route()
        self.y = kernels.dispatch(self.x, self.route, self.capacity, multiple=shape.multiple)
        order = ids.flatten().argsort(stable=True)
        self.sorted_rows, self.sorted_weights = order // shape.top_k, self.weights.flatten()[order, None]


def quantised_cases(kernels: TokenKernels, codecs: CodecKernels, shape: Shape, device: torch.device) -> Iterator[Case]:
    """Dispatch fused with quantisation, and the way back to bf16."""
    pairs, coded = shape.tokens * shape.top_k, shape.hidden + 4 * -(-shape.hidden // SPAN)
    sets = [_TokenData(kernels, shape, device, seed) for seed in range(_sets(pairs * shape.hidden))]
    capacity, multiple = sets[0].capacity, shape.multiple
    rows = torch.arange(shape.tokens, dtype=torch.int32, device=device)
    straight = Route(rows[:, None].contiguous(), rows[:1], rows[:2], rows[:2])
    for code in Code:
        name, moved_bytes = code.name.lower(), shape.tokens * 2 * shape.hidden + pairs * coded
        runs: list[Run] = [partial(codecs.quantize, d.x, d.route, capacity, code, multiple=multiple) for d in sets]
        yield Case(name=f"dispatch to {name}", what=shape.label, moved_bytes=moved_bytes, runs=runs)
        sent = [(d.route, *codecs.quantize(d.x, straight, shape.tokens, code)) for d in sets]
        widen = partial(codecs.dequantize, num_rows=capacity, hidden=shape.hidden, dtype=torch.bfloat16, multiple=multiple)
        runs = [partial(widen, codes, scales, route) for route, codes, scales in sent]
        moved_bytes = shape.tokens * coded + pairs * 2 * shape.hidden
        yield Case(name=f"dispatch from {name}", what=shape.label, moved_bytes=moved_bytes, runs=runs)


def codec_cases(codecs: CodecKernels, elements: int, device: torch.device) -> Iterator[Case]:
    """Sparse residual and change coding of bf16 weights."""
    what = f"{elements} elements of bf16"

    def flat(seed: int) -> Tensor:
        return _random(elements, device=device, seed=seed).bfloat16()

    sets = [(flat(2 * i), flat(2 * i + 1)) for i in range(_sets(4 * elements))]
    threshold = sample_threshold(*sets[0], KEEP)
    capacity = round(1.1 * KEEP * elements) + 64
    kept_bytes = round(KEEP * elements) * 4
    runs: list[Run] = [partial(codecs.residual_encode, value, shared, threshold, capacity) for value, shared in sets]
    yield Case(name="residual encode", what=what, moved_bytes=4 * elements + kept_bytes, runs=runs)
    coded = [(shared, codecs.residual_encode(value, shared, threshold, capacity)) for value, shared in sets]
    runs = [partial(codecs.residual_decode, shared, residual) for shared, residual in coded]
    yield Case(name="residual decode", what=what, moved_bytes=4 * elements + kept_bytes, runs=runs)
    for code in ChangeCode:
        name, (_, span) = code.name.lower(), code.value
        coded_bytes = (elements // 2 if code is ChangeCode.INT4 else elements) + 4 * elements // span
        runs = [partial(codecs.change_encode, now, copy, code) for now, copy in sets]
        yield Case(name=f"change encode {name}", what=what, moved_bytes=6 * elements + coded_bytes, runs=runs)
        changes = [(copy, *codecs.change_encode(now, copy, code)) for now, copy in sets]
        runs = [partial(codecs.change_decode, codes, scales, copy, code) for copy, codes, scales in changes]
        yield Case(name=f"change decode {name}", what=what, moved_bytes=4 * elements + coded_bytes, runs=runs)


def _sets(num_bytes: int) -> int:
    """Data sets to go round, so that their sum leaves the cache."""
    return max(1, min(16, -(-CACHE_BYTES // max(num_bytes, 1))))


def _random(*shape: int, device: torch.device, seed: int) -> Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed))
