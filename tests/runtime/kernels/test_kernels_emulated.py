"""The token kernels' own source, compiled for the CPU and launched through the product's launch code, against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_cases import CASES, DTYPES, Case, check_sums, make_ids, make_rows
from kernel_emulator import EmulatingDriver
from torch import Tensor

from runtime.kernels import reference
from runtime.kernels.launch import Peers, worst_case_rows
from runtime.kernels.reference import Route
from runtime.kernels.tokens import TokenKernels


def equal_routes(found: Route, wanted: Route) -> None:
    for name, a, b in zip(Route._fields, found, wanted, strict=True):
        assert torch.equal(a, b), name


def route_both(kernels: TokenKernels, case: Case) -> tuple[Route, int]:
    ids, groups = make_ids(case), torch.arange(case.experts, dtype=torch.int32)
    capacity = worst_case_rows(ids.numel(), case.experts, case.multiple)
    found = kernels.route(ids, groups, case.experts, multiple=case.multiple, capacity=capacity)
    equal_routes(found, reference.route(ids, groups, case.experts, multiple=case.multiple, capacity=capacity))
    return found, int(found.offsets[-1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_route(case: Case, compiled_kernels: Path) -> None:
    """In three orders of threads between barriers: a missing one would show."""
    for order in (0, 1, 11):
        route_both(TokenKernels(EmulatingDriver(folder=compiled_kernels, order=order)), case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dispatch_and_combine(case: Case, emulator: EmulatingDriver) -> None:
    kernels = TokenKernels(emulator)
    route, rows = route_both(kernels, case)
    for dtype in DTYPES:
        x = make_rows(case.rows, case.hidden, dtype)
        y = kernels.dispatch(x, route, rows, multiple=case.multiple)
        # Every row up to the last offset is in a group or padding, so nothing may be left unwritten.
        assert torch.equal(y, reference.dispatch(x, route, rows))
        weights = make_rows(case.rows, case.top_k, dtype, seed=2)
        for given in (None, weights):
            found, wanted = kernels.combine(y, route.slot, given), reference.combine(y, route.slot, given)
            check_sums(found, wanted, y, route.slot, given)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_combine_backward(case: Case, emulator: EmulatingDriver) -> None:
    kernels = TokenKernels(emulator)
    route, rows = route_both(kernels, case)
    for dtype in DTYPES:
        grad, y = make_rows(case.rows, case.hidden, dtype), make_rows(rows, case.hidden, dtype, seed=2)
        weights = make_rows(case.rows, case.top_k, dtype, seed=3)
        found = kernels.combine_backward(grad, y, route, weights, multiple=case.multiple)
        wanted = reference.combine_backward(grad, y, route, weights)
        assert torch.equal(found[0], wanted[0])
        # The dot product over a row is summed in another order.
        torch.testing.assert_close(found[1], wanted[1], rtol=2e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_deduplicated_hop(case: Case, emulator: EmulatingDriver) -> None:
    """A hop to 3 destinations: a row goes once to each, with the ids and weights that are served there."""
    kernels = TokenKernels(emulator)
    ids = make_ids(case)
    group_of = torch.arange(case.experts, dtype=torch.int32) % 4 - 1  # a quarter of the experts is served nowhere
    route = kernels.route(ids, group_of, 3, capacity=ids.numel(), deduplicate=True)
    equal_routes(route, reference.route(ids, group_of, 3, capacity=ids.numel(), deduplicate=True))
    destinations = [{int(group_of[e]) for e in row if e >= 0} - {-1} for row in ids.tolist()]
    assert route.counts.tolist() == [sum(g in found for found in destinations) for g in range(3)]
    rows = int(route.offsets[-1])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        weights = make_rows(case.rows, case.top_k, dtype)
        found = kernels.carry(ids, weights, group_of, route.slot, rows)
        wanted = reference.carry(ids, weights, group_of, route.slot, rows)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        # Weights that were carried come back as they were; the others have no gradient.
        back = kernels.carry_back(found[1], ids, group_of, route.slot)
        assert torch.equal(back, reference.carry_back(found[1], ids, group_of, route.slot))
        served = torch.where(ids >= 0, group_of[ids.long().clamp(min=0)], -1) >= 0
        assert torch.equal(back, torch.where(served, weights, torch.zeros_like(weights)))


def test_full_buffer_drops_and_reports(emulator: EmulatingDriver) -> None:
    kernels, case = TokenKernels(emulator), Case(name="", rows=60, multiple=8)
    ids, groups = make_ids(case), torch.arange(8, dtype=torch.int32)
    for capacity in (0, 5, 64, 150, 239, 400):
        route = kernels.route(ids, groups, 8, multiple=8, capacity=capacity)
        equal_routes(route, reference.route(ids, groups, 8, multiple=8, capacity=capacity))
        assert int(route.slot.max()) < max(capacity, 1)
        assert int(route.status[0]) == 240 - int((route.slot >= 0).sum())
        kept = route.slot[route.slot >= 0]
        assert len(kept.unique()) == len(kept) == int(route.counts.sum())


def test_other_placements_of_rows(emulator: EmulatingDriver) -> None:
    """Regions of fixed size per destination, and rows that arrived in regions of which only the first ones are valid."""
    kernels, case = TokenKernels(emulator), Case(name="", rows=60, routing="gaps")
    ids, groups = make_ids(case), torch.arange(8, dtype=torch.int32)
    for limit in (3, 60):
        keywords = {"capacity": limit, "stride": 200, "first": 120}
        equal_routes(kernels.route(ids, groups, 8, **keywords), reference.route(ids, groups, 8, **keywords))
    sources = {"source_counts": torch.tensor([20, 0, 7], dtype=torch.int32), "source_rows": 20}
    found = kernels.route(ids, groups, 8, capacity=240, **sources)
    equal_routes(found, reference.route(ids, groups, 8, capacity=240, **sources))
    assert (found.slot[20:40] < 0).all()
    assert (found.slot[47:] < 0).all()


def peers_of(buffers: list[Tensor]) -> Peers:
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return Peers(addresses=addresses, rows=len(buffers[0]), alignment=16)


def test_four_ranks_exchange_through_each_others_memory(emulator: EmulatingDriver) -> None:
    """Each rank pushes rows into its region of every peer's buffer and pulls partial sums back: what one process per GPU
    does with symmetric memory. The ranks' buffers are ordinary tensors here; the address arithmetic is the same."""
    kernels, ranks, tokens, hidden = TokenKernels(emulator), 4, 13, 24
    case = Case(name="", rows=tokens, top_k=3, experts=8)
    group_of = torch.arange(8, dtype=torch.int32) // 2
    x = [make_rows(tokens, hidden, torch.float32, seed=rank) for rank in range(ranks)]
    ids = [make_ids(case, seed=rank) for rank in range(ranks)]
    weights = [make_rows(tokens, 3, torch.float32, seed=10 + rank) for rank in range(ranks)]
    rows = [torch.full((ranks * tokens, hidden), float("nan")) for _ in range(ranks)]
    row_ids = [torch.full((ranks * tokens, 3), 77, dtype=torch.int32) for _ in range(ranks)]
    row_weights = [torch.full((ranks * tokens, 3), float("nan")) for _ in range(ranks)]
    routes = []
    for rank in range(ranks):
        region = {"capacity": tokens, "stride": ranks * tokens, "first": rank * tokens}
        route = kernels.route(ids[rank], group_of, ranks, deduplicate=True, **region)
        kernels.dispatch(x[rank], route, 0, peers=peers_of(rows))
        kernels.carry(ids[rank], weights[rank], group_of, route.slot, 0, peers=(peers_of(row_ids), peers_of(row_weights)))
        routes.append(route)
    counts = torch.stack([route.counts for route in routes])  # [from, to]
    results = []
    for rank in range(ranks):
        here = torch.where(group_of == rank, torch.arange(8, dtype=torch.int32) % 2, -1).to(torch.int32)
        sources = {"source_counts": counts[:, rank].contiguous(), "source_rows": tokens}
        local = kernels.route(row_ids[rank], here, 2, capacity=3 * ranks * tokens, **sources)
        expert_rows = kernels.dispatch(rows[rank], local, int(local.offsets[-1]))
        for expert in range(2):  # expert e multiplies by e + 1
            expert_rows[int(local.offsets[expert]) : int(local.offsets[expert + 1])] *= 2 * rank + expert + 1
        results.append(kernels.combine(expert_rows, local.slot, row_weights[rank].nan_to_num()))
    for rank in range(ranks):
        found = kernels.combine(results[rank], routes[rank].slot, peers=peers_of(results))
        scale = (weights[rank] * (ids[rank] + 1)).sum(dim=1, keepdim=True)
        torch.testing.assert_close(found, x[rank] * scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_misaligned_tensors_take_narrower_accesses(shift: int, emulator: EmulatingDriver) -> None:
    kernels, case = TokenKernels(emulator), Case(name="", rows=9, top_k=2)
    route, rows = route_both(kernels, case)
    x = make_rows(1, 9 * 64 + shift, torch.bfloat16)[0, shift:].view(9, 64)
    y = kernels.dispatch(x, route, rows)
    assert torch.equal(y, reference.dispatch(x, route, rows))
    shifted = torch.empty(y.numel() + shift, dtype=y.dtype)[shift:].view_as(y).copy_(y)
    check_sums(kernels.combine(shifted, route.slot), reference.combine(y, route.slot), y, route.slot)


def test_addresses_beyond_two_to_the_31_elements(compiled_kernels: Path) -> None:
    """Only the rows that are touched take memory: the buffer is far larger than what is resident."""
    kernels, hidden = TokenKernels(EmulatingDriver(folder=compiled_kernels)), 65536
    num_rows = 2**31 // hidden + 64
    big = torch.empty(num_rows, hidden, dtype=torch.bfloat16)
    assert big.numel() > 2**31
    slot = torch.tensor([[0, num_rows - 1], [2**31 // hidden, -1]], dtype=torch.int32)
    empty = torch.zeros(1, dtype=torch.int32)
    route = Route(slot, empty, torch.zeros(2, dtype=torch.int32), empty)
    x = make_rows(2, hidden, torch.bfloat16)
    kernels.dispatch(x, route, num_rows, out=big)
    for row, at in ((0, 0), (0, num_rows - 1), (1, 2**31 // hidden)):
        assert torch.equal(big[at], x[row])
    weights = torch.ones(2, 2, dtype=torch.bfloat16)
    assert torch.equal(kernels.combine(big, slot, weights), torch.stack([2 * x[0], x[1]]))
    grad_y, grad_weights = kernels.combine_backward(x, big, route, weights)
    assert torch.equal(grad_y[num_rows - 1], x[0])
    assert grad_weights[1, 1] == 0


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_block_scan_over_many_groups(order: int, compiled_kernels: Path) -> None:
    """More groups than one block has threads: the scan's shared memory is used again and again."""
    kernels = TokenKernels(EmulatingDriver(folder=compiled_kernels, order=order))
    route_both(kernels, Case(name="", rows=40, top_k=8, experts=1700, multiple=4))
