"""Proofs with the bound of ``planner.sites.sizes``: boxes halved until each is bounded well enough, and a check of them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from planner.clock import now_s
from planner.sites.linear import Duals
from planner.sites.sizes import SizeBox, SizeRelaxation


@dataclass(frozen=True, kw_only=True, eq=False)
class SizeProof:
    """Boxes that together hold every plan that may be faster than ``best_s``, each with multipliers that bound it."""

    best_s: float
    parts: tuple[tuple[SizeBox, Duals | None], ...]
    bound_s: float


def prove_sizes(
    sizes: SizeRelaxation, best_s: float, *, enough_gap: float, max_boxes: int, deadline_s: float = float("inf")
) -> SizeProof:
    """A bound for a problem whose best known plan takes ``best_s``: the boxes are halved, the least promising first."""
    target_s = best_s * (1 - enough_gap)
    heap: list[tuple[float, int, SizeBox, Duals | None]] = []
    done: list[tuple[float, SizeBox, Duals | None]] = []
    count = 0

    def enter(box: SizeBox) -> None:
        nonlocal count
        count += 1
        duals, value_s = None, sizes.proven_s(box, None)
        if value_s < target_s:
            program = sizes.program(box)
            duals = program.solve()
            value_s = sizes.proven_s(box, duals, program)
        if value_s >= target_s:
            done.append((value_s, box, duals))
        else:
            heapq.heappush(heap, (value_s, count, box, duals))

    for root in sizes.roots(best_s):
        enter(root)
    # Both halves or none: a half without multipliers of its own would be bounded worse than the whole.
    while heap and count < max_boxes and now_s() < deadline_s:
        value_s, _, box, duals = heapq.heappop(heap)
        halves = _halves(sizes, box)
        if halves is None:
            done.append((value_s, box, duals))
            break
        for half in halves:
            enter(half)
    parts = [*done, *((value_s, box, duals) for value_s, _, box, duals in heap)]
    return SizeProof(
        best_s=best_s,
        parts=tuple((box, duals) for _, box, duals in parts),
        bound_s=min(best_s, *(value_s for value_s, _, _ in parts)),
    )


def _halves(sizes: SizeRelaxation, box: SizeBox) -> tuple[SizeBox, SizeBox] | None:
    forward, back, _ = sizes.relaxation.budgets_s
    spread = forward * (box.forward_s[1] - box.forward_s[0]), back * (box.back_s[1] - box.back_s[0])
    if box.forward_s[0] == 0 or max(spread) <= 1e-6 * sizes.relaxation.base_s / sizes.relaxation.num_layers:
        return None
    if sizes.tied:
        low, middle, high = box.forward_s[0], sum(box.forward_s) / 2, box.forward_s[1]
        first = replace(box, forward_s=(low, middle), back_s=(low, middle))
        return first, replace(box, forward_s=(middle, high), back_s=(middle, high))
    if spread[0] >= spread[1]:
        low, middle, high = box.forward_s[0], sum(box.forward_s) / 2, box.forward_s[1]
        return replace(box, forward_s=(low, middle)), replace(box, forward_s=(middle, high))
    low, middle, high = box.back_s[0], sum(box.back_s) / 2, box.back_s[1]
    return replace(box, back_s=(low, middle)), replace(box, back_s=(middle, high))


def verify_sizes(sizes: SizeRelaxation, proof: SizeProof) -> float:
    """The bound that a proof gives, evaluated anew without any solver. Raises ValueError when its boxes leave plans out."""
    for root in sizes.roots(proof.best_s):
        stack = [root]
        boxes = [box for box, _ in proof.parts if box.residency is root.residency]
        while stack:
            piece = stack.pop()
            if any(_inside(piece, box, sizes.tied) for box in boxes):
                continue
            cut = _cut(piece, boxes, sizes.tied)
            if cut is None:
                raise ValueError(f"the proof leaves out plans whose copies live for one {root.residency.value}")
            stack.extend(cut)
    return min(proof.best_s, *(sizes.proven_s(box, duals) for box, duals in proof.parts))


def _inside(piece: SizeBox, box: SizeBox, tied: bool) -> bool:
    sides = ((piece.forward_s, box.forward_s),) if tied else ((piece.forward_s, box.forward_s), (piece.back_s, box.back_s))
    return all(outer[0] <= inner[0] and inner[1] <= outer[1] for inner, outer in sides)


def _cut(piece: SizeBox, boxes: list[SizeBox], tied: bool) -> tuple[SizeBox, SizeBox] | None:
    """The piece, cut along an edge of one of the boxes that passes through it."""
    for box in boxes:
        for edge in box.forward_s:
            if piece.forward_s[0] < edge < piece.forward_s[1]:
                return replace(piece, forward_s=(piece.forward_s[0], edge)), replace(piece, forward_s=(edge, piece.forward_s[1]))
        for edge in box.back_s if not tied else ():
            if piece.back_s[0] < edge < piece.back_s[1]:
                return replace(piece, back_s=(piece.back_s[0], edge)), replace(piece, back_s=(edge, piece.back_s[1]))
    return None
