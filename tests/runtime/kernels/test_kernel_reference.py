"""The references against the definition, written as loops over Python numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import CASES, DTYPES, Case, check_sums, make_ids, make_rows

from runtime.kernels import reference, reference_codecs
from runtime.kernels.launch import worst_case_rows
from runtime.kernels.reference_codecs import TILE, ChangeCode, Code


def slots_by_hand(
    ids: list[list[int]], groups: int, multiple: int, capacity: int
) -> tuple[list[list[int]], list[int], list[int]]:
    queues: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
    for row, experts in enumerate(ids):
        for k, expert in enumerate(experts):
            if expert >= 0:
                queues[expert].append((row, k))
    slot, counts, offsets, begin = [[-1] * len(experts) for experts in ids], [], [0], 0
    for queue in queues:
        end = min(begin + math.ceil(len(queue) / multiple) * multiple, capacity)
        kept = queue[: max(0, end - begin)]
        for place, (row, k) in enumerate(kept):
            slot[row][k] = begin + place
        counts.append(len(kept))
        begin = end
        offsets.append(begin)
    return slot, counts, offsets


@settings(max_examples=60)
@given(
    rows=st.integers(0, 12),
    top_k=st.integers(1, 5),
    experts=st.integers(1, 6),
    multiple=st.sampled_from([1, 2, 8]),
    data=st.data(),
)
def test_route_by_hand(rows: int, top_k: int, experts: int, multiple: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k)
    ids = data.draw(st.lists(row, min_size=rows, max_size=rows))
    capacity = data.draw(st.integers(0, worst_case_rows(rows * top_k, experts, multiple)))
    tensor = torch.tensor(ids, dtype=torch.int32).view(rows, top_k)
    groups = torch.arange(experts, dtype=torch.int32)
    found = reference.route(tensor, groups, experts, multiple=multiple, capacity=capacity)
    slot, counts, offsets = slots_by_hand(ids, experts, multiple, capacity)
    assert found.slot.tolist() == slot
    assert found.counts.tolist() == counts
    assert found.offsets.tolist() == offsets
    wanted = sum(expert >= 0 for row in ids for expert in row)
    assert found.status.tolist() == [wanted - sum(counts), wanted]
    if capacity == worst_case_rows(rows * top_k, experts, multiple):
        assert found.status[0] == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_identity_experts_return_their_input(case: Case) -> None:
    ids, groups = make_ids(case), torch.arange(case.experts, dtype=torch.int32)
    capacity = worst_case_rows(ids.numel(), case.experts, case.multiple)
    route = reference.route(ids, groups, case.experts, multiple=case.multiple, capacity=capacity)
    for dtype in DTYPES:
        x = make_rows(case.rows, case.hidden, dtype)
        y = reference.dispatch(x, route, int(route.offsets[-1]))
        chosen = (ids >= 0).sum(dim=1, keepdim=True)
        summed = reference.combine(y, route.slot)
        check_sums(summed, (x.double() * chosen).to(dtype), y, route.slot)
        # Each expert's rows are its tokens, in their order.
        for expert in range(min(case.experts, 10)):
            mine = y[int(route.offsets[expert]) :][: int(route.counts[expert])]
            assert torch.equal(mine, x[(ids == expert).nonzero()[:, 0]])


def test_combine_weighs_and_masks() -> None:
    y = torch.tensor([[1.0, 2.0], [10.0, 20.0], [float("nan"), 0.0]])
    slot = torch.tensor([[1, 0], [-1, 1], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 3.0], [float("nan"), 2.0], [1.0, 1.0]])
    assert reference.combine(y, slot, weights).tolist() == [[8.0, 16.0], [20.0, 40.0], [0.0, 0.0]]
    assert reference.combine(y, slot).tolist() == [[11.0, 22.0], [10.0, 20.0], [0.0, 0.0]]


def test_carried_routing_by_hand() -> None:
    group_of = torch.tensor([0, 0, 1, -1], dtype=torch.int32)
    ids = torch.tensor([[0, 2, 1], [3, -1, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    route = reference.route(ids, group_of, 2, capacity=6, deduplicate=True)
    assert route.slot.tolist() == [[0, 1, -1], [-1, -1, 2]]
    out_ids, out_weights = reference.carry(ids, weights, group_of, route.slot, 3)
    assert out_ids.tolist() == [[0, -1, 1], [-1, 2, -1], [-1, -1, 2]]
    torch.testing.assert_close(out_weights, torch.tensor([[0.1, 0, 0.3], [0, 0.2, 0], [0, 0, 0.6]]))
    back = reference.carry_back(torch.arange(9.0).view(3, 3), ids, group_of, route.slot)
    assert back.tolist() == [[0.0, 4.0, 2.0], [0.0, 0.0, 8.0]]


@pytest.mark.parametrize(("code", "bound"), [(Code.INT8, 0.5 / 127), (Code.FP8, 1 / 16)])
def test_quantisation_error(code: Code, bound: float) -> None:
    x = make_rows(20, 300, torch.float32)
    slot = torch.arange(20, dtype=torch.int32)[:, None]
    route = reference.Route(slot, slot, slot, slot)
    codes, scales = reference_codecs.quantize(x, route, 20, code)
    back = reference_codecs.dequantize(codes, scales, route, 20, 300, torch.float32)
    largest = torch.stack([part.abs().amax(dim=1) for part in x.split(128, dim=1)], dim=1).repeat_interleave(128, dim=1)[:, :300]
    # int8: half a step of the largest in the group; fp8: relative to the value, down to its smallest step.
    allowed = bound * largest if code is Code.INT8 else torch.maximum(bound * x.abs(), 2**-10 * largest / 448 * 1.01)
    assert ((back - x).abs() <= allowed * 1.001).all()


@pytest.mark.parametrize("code", list(ChangeCode))
def test_coded_changes_converge(code: ChangeCode) -> None:
    now, copy = make_rows(1, 1000, torch.float32)[0], torch.zeros(1000)
    errors = []
    for _ in range(4):
        reference_codecs.change_encode(now, copy, code)
        errors.append(float((now - copy).abs().max()))
    steps = code.value[0]
    assert errors[0] <= 5 / steps
    assert all(later <= earlier / steps for earlier, later in pairwise(errors[:3]))


def test_sparse_residual_by_hand() -> None:
    value, shared = torch.zeros(2 * TILE + 10), torch.ones(2 * TILE + 10)
    shared[:] = value
    value[[3, TILE - 1, TILE, 2 * TILE + 9]] = torch.tensor([2.0, -3.0, 0.5, float("nan")])
    residual = reference_codecs.residual_encode(value, shared, torch.tensor([1.0]), 10)
    assert residual.values[:2].tolist() == [2.0, -3.0]
    assert residual.places[:3].tolist() == [3, TILE - 1, 9]
    assert residual.starts.tolist() == [0, 2, 2, 3]
    assert residual.status.tolist() == [0, 3]
    back = reference_codecs.residual_decode(shared, residual)
    value[TILE] = 0
    assert torch.equal(back.nan_to_num(7.0), value.nan_to_num(7.0))
    dropped = reference_codecs.residual_encode(value, shared, torch.tensor([1.0]), 1)
    assert dropped.status.tolist() == [2, 3]
    assert dropped.starts.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("keep", [0.001, 0.02, 0.3])
def test_sampled_threshold_keeps_about_the_share(keep: float) -> None:
    value, shared = make_rows(1, 500_000, torch.float32)[0], make_rows(1, 500_000, torch.float32, seed=3)[0]
    threshold = reference_codecs.sample_threshold(value, shared, keep)
    kept = float(((value - shared).abs() >= threshold).float().mean())
    # The number of samples above it is exact; the share in all varies by its sampling error.
    assert abs(kept - keep) < 5 * math.sqrt(keep / 65536) + 1e-4
