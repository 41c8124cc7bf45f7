"""The torch operators: gradients, shapes for tracing, and what a program that captures graphs sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import Case, make_ids, make_rows
from kernel_emulator import EmulatingDriver
from torch import Tensor

from runtime.kernels import ops
from runtime.kernels.grouped import ALIGNED_ROWS, grouped_mm
from runtime.kernels.tokens import TokenKernels

CASE = Case(name="", rows=7, top_k=3, experts=5, hidden=6)


def make_problem(case: Case = CASE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, groups = make_ids(case), torch.arange(case.experts, dtype=torch.int32)
    x = make_rows(case.rows, case.hidden, torch.float64).requires_grad_()
    weights = make_rows(case.rows, case.top_k, torch.float64, seed=5).requires_grad_()
    return x, weights, ids, groups


def test_gradients_of_each_operator() -> None:
    x, weights, ids, groups = make_problem()
    route = ops.route(ids, groups, 5, multiple=4)
    rows = int(route.offsets[-1])
    y = make_rows(rows, 6, torch.float64, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.dispatch(x, route, rows, multiple=4), (x,))
    assert torch.autograd.gradcheck(lambda y: ops.combine(y, route), (y,))
    assert torch.autograd.gradcheck(lambda y, w: ops.combine(y, route, w), (y, weights))


def test_layer_equals_a_loop_over_tokens() -> None:
    x, weights, ids, groups = make_problem()
    experts = make_rows(5 * 6, 6, torch.float64, seed=7).view(5, 6, 6).requires_grad_()

    def through_kernels(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        route = ops.route(ids, groups, 5, multiple=4)
        rows = ops.dispatch(x, route, int(route.offsets[-1]), multiple=4)
        return ops.combine(grouped_mm(rows, experts, route.offsets).tanh(), route, weights, multiple=4)

    def by_token(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return torch.stack(
            [sum(weights[n, k] * (x[n] @ experts[ids[n, k]]).tanh() for k in range(3)) for n in range(7)]  # type: ignore[misc]
        )

    inputs = (x, weights, experts)
    torch.testing.assert_close(through_kernels(*inputs), by_token(*inputs))
    found = torch.autograd.grad(through_kernels(*inputs).square().sum(), inputs)
    wanted = torch.autograd.grad(by_token(*inputs).square().sum(), inputs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows", [0, 40])
def test_grouped_product_in_bf16_equals_the_loop(rows: int) -> None:
    ids, groups = make_ids(Case(name="", rows=rows, routing="few")), torch.arange(8, dtype=torch.int32)
    route = ops.route(ids, groups, 8, multiple=ALIGNED_ROWS)
    used = int(route.offsets[-1])
    x = ops.dispatch(make_rows(rows, 32, torch.bfloat16), route, used, multiple=ALIGNED_ROWS).requires_grad_()
    weights = make_rows(8 * 32, 16, torch.bfloat16).view(8, 32, 16).requires_grad_()
    y = grouped_mm(x, weights, route.offsets)
    wanted = grouped_mm(x.float(), weights.float(), route.offsets)
    torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(y.float().square().sum(), (x, weights))
    exact = torch.autograd.grad(wanted.square().sum(), (x, weights))
    for a, b in zip(grads, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=0.5)


def test_operators_keep_their_contract() -> None:
    """torch's own checker: schema, shapes under tracing, registration of gradients."""
    x, weights, ids, groups = make_problem()
    route = ops.route(ids, groups, 5, multiple=4)
    slot, counts, offsets, _ = route
    rows = int(route.offsets[-1])
    y = make_rows(rows, 6, torch.float64, seed=6).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    names = torch.ops.hybridep
    calls = (
        (names.route.default, (ids, groups, 5, 4, 64)),
        (names.dispatch.default, (x, slot, counts, offsets, rows, 4)),
        (names.combine.default, (y, slot, counts, offsets, weights, 4)),
        (names.combine.default, (y, slot, counts, offsets, None, 4)),
        (names.combine_backward.default, (x.detach(), y.detach(), slot, counts, offsets, weights.detach(), 4)),
    )
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=tests)


def test_a_captured_graph_holds_the_operators() -> None:
    _, _, ids, groups = make_problem()

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            route = ops.route(ids, groups, 5, multiple=8)
            rows = ops.dispatch(x, route, 64, multiple=8)
            return ops.combine(torch.relu(rows), route, weights, multiple=8)

    x, weights = make_rows(7, 6, torch.float32), make_rows(7, 3, torch.float32)
    exported = torch.export.export(Layer(), (x, weights))
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {f"hybridep.{name}.default" for name in ("route", "dispatch", "combine")} <= called
    torch.testing.assert_close(exported.module()(x, weights), Layer()(x, weights))
    compiled = torch.compile(Layer(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weights), Layer()(x, weights))


def test_importing_touches_nothing() -> None:
    """No device, no compiler and no driver library when the package is imported and used on CPU."""
    code = (
        "import ctypes, torch; loaded = []; real = ctypes.CDLL  # torch's CUDA builds load libraries of their own\n"
        "ctypes.CDLL = lambda name, *a, **k: (loaded.append(str(name)), real(name, *a, **k))[1]\n"
        "import subprocess; subprocess.Popen = None\n"
        "from runtime.kernels import ops\n"
        "x = torch.ones(2, 4); r = ops.route(torch.zeros(2, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 1)\n"
        "ops.combine(ops.dispatch(x, r, 2), r)\n"
        "assert not any('cuda' in n or 'nvrtc' in n for n in loaded), loaded\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_cuda_forms_equal_the_cpu_forms(compiled_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered for CUDA, called with CPU tensors and the emulator in the driver's place."""
    monkeypatch.setattr(ops, "_kernels", lambda: TokenKernels(EmulatingDriver(folder=compiled_kernels)))
    x, weights, ids, groups = (tensor.detach() for tensor in make_problem())
    for arguments in ((ids, groups, 5, 4, 64), (ids, groups, 5, 1, 7)):
        for a, b in zip(ops._route_cuda(*arguments), ops._route(*arguments), strict=True):
            assert torch.equal(a, b)
    way = ops.route(ids, groups, 5, multiple=4)
    parts, rows = way[:3], int(way.offsets[-1])
    y = ops._dispatch(x, *parts, rows, 4)
    assert torch.equal(ops._dispatch_cuda(x, *parts, rows, 4), y)
    for given in (weights, None):
        torch.testing.assert_close(ops._combine_cuda(y, *parts, given, 4), ops._combine(y, *parts, given, 4))
    found, wanted = (form(x, y, *parts, weights, 4) for form in (ops._combine_backward_cuda, ops._combine_backward_op))
    torch.testing.assert_close(tuple(found), tuple(wanted))
