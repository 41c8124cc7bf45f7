"""The bound over all plans: boxes are halved, the least promising first, until the smallest bound is good enough."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.clock import now_s
from planner.sites.lp import Duals, box_program
from planner.sites.relaxation import Box, Relaxation, Weights, latency_s


@dataclass(frozen=True)
class Thresholds:
    """``Relaxation.thresholds_s``, which needs no numbers."""


Evidence = Weights | Duals | Thresholds
"""Link weights for the knapsacks, multipliers of the box's program, or the argument by thresholds."""


def proven_s(relaxation: Relaxation, box: Box, evidence: Evidence) -> float:
    """No plan of the box has a shorter step."""
    if isinstance(evidence, Weights):
        return relaxation.value_s(box, evidence)
    if isinstance(evidence, Thresholds):
        return relaxation.thresholds_s(box)
    program = box_program(relaxation, box)
    if program is None:
        return float("inf")
    return relaxation.base_s + relaxation.num_layers * (latency_s(relaxation, box) + program.value_s(evidence))


@dataclass(frozen=True, kw_only=True, eq=False)
class Proof:
    """Boxes that together hold every plan, each with weights that bound it."""

    parts: tuple[tuple[Box, Evidence], ...]
    bound_s: float
    """The smallest of the parts' bounds."""


@dataclass(frozen=True, eq=False)
class _Part:
    box: Box
    evidence: Evidence
    value_s: float


def even_weights(relaxation: Relaxation) -> Weights:
    """Every up and every down link alike: a first guess."""
    size, num = relaxation.problem.num_sites, len(relaxation.classes.count)
    forward, back, compute = relaxation.budgets_s
    one = np.ones(num)
    return Weights(
        out=one * forward / (2 * size),
        into=one * forward / (2 * size),
        back_out=one * back / (2 * size),
        back_into=one * back / (2 * size),
        compute=one * compute / size,
    )


def prove(
    relaxation: Relaxation,
    best_s: float,
    *,
    enough_gap: float = 1e-4,
    max_boxes: int = 2000,
    deadline_s: float = float("inf"),
    report: Callable[[float], None] | None = None,
) -> Proof:
    """A bound for a problem whose best known plan takes ``best_s``: stops when the gap is at most ``enough_gap``, after
    ``max_boxes`` boxes, or at ``deadline_s`` (of ``planner.clock``)."""
    target_s = best_s * (1 - enough_gap)
    even = even_weights(relaxation)
    heap: list[tuple[float, int, Box, _Part]] = []
    done: list[_Part] = []
    serial = 0

    def enter(box: Box, parent: _Part | None) -> None:
        nonlocal serial
        quick: tuple[Evidence, ...] = (even, Thresholds())
        part = max((_Part(box, one, proven_s(relaxation, box, one)) for one in quick), key=lambda one: one.value_s)
        if part.value_s < target_s and now_s() < deadline_s:
            quick_lp = len(relaxation.classes.count) <= FEW_CLASSES
            narrow = quick_lp or relaxation.num_layers * sum(spread_s(relaxation, box)) <= NARROW * best_s
            program = box_program(relaxation, box) if narrow else None
            duals = None if program is None else program.solve()
            if program is not None and duals is not None:
                layer_s = latency_s(relaxation, box) + program.value_s(duals)
                value_s = relaxation.base_s + relaxation.num_layers * layer_s
                part = max(part, _Part(box, duals, value_s), key=lambda one: one.value_s)
        if parent is not None and parent.value_s > part.value_s:
            part = parent  # what bounds the whole box bounds its half
        serial += 1
        if part.value_s >= target_s:
            done.append(part)
        else:
            heapq.heappush(heap, (part.value_s, serial, box, part))

    for root in relaxation.roots():
        enter(root, None)
    while heap and serial < max_boxes and now_s() < deadline_s:
        value_s, _, box, part = heapq.heappop(heap)
        try:
            if report is not None:
                report(value_s)
            halves = splittable(relaxation, box)
            if halves is None:
                # The bound cannot rise above this box.
                done.append(part)
                break
            for half in halves:
                enter(half, part)
        except KeyboardInterrupt:
            # What bounds the whole box bounds its halves, whichever of them were entered.
            done.append(part)
            break
    parts = list(dict.fromkeys([*done, *(part for _, _, _, part in heap)]))
    return Proof(
        parts=tuple((part.box, part.evidence) for part in parts),
        bound_s=min(part.value_s for part in parts),
    )


FEW_CLASSES = 16
"""Up to so many, linear programs are quick and are solved for every box."""
NARROW = 0.04
"""Linear programs are solved for boxes whose corners differ by less than this share of the best plan's step: in wider ones
the corners lose more than a program gains."""


def spread_s(relaxation: Relaxation, box: Box) -> tuple[float, float, float]:
    """What the box's corners differ by in the cost of one layer, along each of its three sides."""
    low_gather, high_gather = box.gather_s
    low_back, high_back = box.return_s
    low, high = box.reach
    batches = relaxation.problem.workload.training.micro_batches
    corner = relaxation.copies_s(box.residency, low_gather, low_back)
    return (
        relaxation.copies_s(box.residency, high_gather, low_back) - corner,
        relaxation.copies_s(box.residency, low_gather, high_back) - corner,
        batches * float(relaxation.reaches_s[high] - relaxation.reaches_s[low]),
    )


def splittable(relaxation: Relaxation, box: Box) -> tuple[Box, Box] | None:
    """Two halves that hold the box's plans, cut where its corners differ most in cost; None when they hardly differ."""
    low_gather, high_gather = box.gather_s
    low_back, high_back = box.return_s
    low, high = box.reach
    costs = spread_s(relaxation, box)
    widest = int(np.argmax(costs))
    if costs[widest] <= 1e-9 * relaxation.base_s / relaxation.num_layers:
        return None
    if widest == 0:
        middle = (low_gather + high_gather) / 2
        return replace(box, gather_s=(low_gather, middle)), replace(box, gather_s=(middle, high_gather))
    if widest == 1:
        middle = (low_back + high_back) / 2
        return replace(box, return_s=(low_back, middle)), replace(box, return_s=(middle, high_back))
    reaches = relaxation.reaches_s
    cut = int(np.searchsorted(reaches, (reaches[low] + reaches[high]) / 2, side="right")) - 1
    cut = min(max(cut, low), high - 1)
    return replace(box, reach=(low, cut)), replace(box, reach=(cut + 1, high))


def verify(relaxation: Relaxation, proof: Proof) -> float:
    """The bound that a proof gives, evaluated anew without any solver. Raises ValueError when its boxes leave plans out."""
    boxes = [box for box, _ in proof.parts]
    for root in relaxation.roots():
        if not _covered(root, [box for box in boxes if box.residency is root.residency]):
            raise ValueError(f"the proof leaves out plans whose copies live for one {root.residency.value}")
    return min(proven_s(relaxation, box, evidence) for box, evidence in proof.parts)


def _covered(root: Box, boxes: Sequence[Box]) -> bool:
    """Whether ``boxes`` leave nothing of ``root`` out: halve it until each piece lies in one box."""
    stack = [root]
    while stack:
        piece = stack.pop()
        touching = [box for box in boxes if _overlap(box, piece)]
        if any(_inside(piece, box) for box in touching):
            continue
        cut = _cut_at_an_edge(piece, touching)
        if cut is None:
            return False
        stack.extend(cut)
    return True


def _inside(piece: Box, box: Box) -> bool:
    return all(
        outer[0] <= inner[0] and inner[1] <= outer[1]
        for inner, outer in ((piece.gather_s, box.gather_s), (piece.return_s, box.return_s), (piece.reach, box.reach))
    )


def _overlap(a: Box, b: Box) -> bool:
    """Beyond a common face, in the continuous dimensions."""
    continuous = ((a.gather_s, b.gather_s), (a.return_s, b.return_s))
    apart = any(min(x[1], y[1]) <= max(x[0], y[0]) and x[0] != x[1] and y[0] != y[1] for x, y in continuous)
    return not apart and min(a.reach[1], b.reach[1]) >= max(a.reach[0], b.reach[0])


def _cut_at_an_edge(piece: Box, boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """The piece, cut along an edge of one of the boxes that passes through it."""
    for box in boxes:
        for edge in box.gather_s:
            if piece.gather_s[0] < edge < piece.gather_s[1]:
                return replace(piece, gather_s=(piece.gather_s[0], edge)), replace(piece, gather_s=(edge, piece.gather_s[1]))
        for edge in box.return_s:
            if piece.return_s[0] < edge < piece.return_s[1]:
                return replace(piece, return_s=(piece.return_s[0], edge)), replace(piece, return_s=(edge, piece.return_s[1]))
        for first in (box.reach[0], box.reach[1] + 1):
            if piece.reach[0] < first <= piece.reach[1]:
                return replace(piece, reach=(piece.reach[0], first - 1)), replace(piece, reach=(first, piece.reach[1]))
    return None
