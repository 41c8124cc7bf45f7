"""Boxes of plans: intervals of the times and distances that a plan has, halved, and whether some boxes hold every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.plan import Residency

TIMES = ("gather_s", "return_s", "forward_s", "back_s")
POSITIONS = ("copy_reach", "reach")


@dataclass(frozen=True, kw_only=True)
class Box:
    """Plans with this residency whose times and distances lie in these closed intervals."""

    residency: Residency
    gather_s: tuple[float, float]
    """Of the busiest link between sites, for one gather, latency apart."""
    return_s: tuple[float, float]
    """Likewise, for one return of gradients."""
    forward_s: tuple[float, float]
    """Of the busiest link, while every row has one byte: dispatch and combine backward."""
    back_s: tuple[float, float]
    """Combine and dispatch backward."""
    copy_reach: tuple[int, int]
    """Positions in ``Relaxation.copy_reaches_s``: latency from the home that is farthest from one of its copies."""
    reach: tuple[int, int]
    """Positions in ``Relaxation.reaches_s``: latency of one micro-batch's token exchanges between the farthest sites that
    exchange tokens."""

    def cut(self, side: str, at: float) -> tuple[Box, Box]:
        """Two boxes that hold this one's plans: up to ``at`` and from there; of positions, up to ``at`` and beyond."""
        low, high = getattr(self, side)
        first: Any
        second: Any
        first, second = ((low, int(at)), (int(at) + 1, high)) if side in POSITIONS else ((low, at), (at, high))
        return replace(self, **{side: first}), replace(self, **{side: second})

    def inside(self, other: Box) -> bool:
        """Every plan of this box is one of the other's."""
        ends = [(getattr(self, side), getattr(other, side)) for side in (*TIMES, *POSITIONS)]
        return self.residency is other.residency and all(b[0] <= a[0] and a[1] <= b[1] for a, b in ends)


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """N boxes of one residency side by side, as ``Box`` with [N] of each end: what works on arrays takes either, and has as many
    first axes as there are here."""

    residency: Residency
    gather_s: tuple[FloatArray, FloatArray]
    return_s: tuple[FloatArray, FloatArray]
    forward_s: tuple[FloatArray, FloatArray]
    back_s: tuple[FloatArray, FloatArray]
    copy_reach: tuple[IntArray, IntArray]
    reach: tuple[IntArray, IntArray]


def side_by_side(boxes: Sequence[Box]) -> Boxes:
    """All of one residency."""
    ends = {side: np.array([getattr(box, side) for box in boxes]).T for side in (*TIMES, *POSITIONS)}
    return Boxes(residency=boxes[0].residency, **{side: (low, high) for side, (low, high) in ends.items()})


def upper_ends(box: Box | Boxes) -> list[tuple[Any, ...]]:
    """What tells boxes apart whose lower ends do not matter, one by one: residency and upper ends."""
    ends = [getattr(box, side)[1] for side in (*TIMES, *POSITIONS)]
    if isinstance(box, Box):
        return [(box.residency, *ends)]
    return [(box.residency, *one) for one in zip(*(end.tolist() for end in ends), strict=True)]


def over(end: float | FloatArray, axes: int) -> FloatArray:
    """With so many further axes."""
    return np.asarray(end).reshape(*np.shape(end), *[1] * axes)


def covered(root: Box, boxes: Sequence[Box]) -> bool:
    """Whether ``boxes`` leave nothing of ``root`` out: it is cut along their edges until each piece lies in one of them."""
    alike = [box for box in boxes if box.residency is root.residency]
    ends = np.array([[getattr(box, side) for side in (*TIMES, *POSITIONS)] for box in alike], dtype=np.float64)
    # Positions are whole: one that ends before another begins leaves nothing between them.
    ends = ends.reshape(-1, len(TIMES) + len(POSITIONS), 2)
    ends[:, len(TIMES) :, 1] += 1
    piece = np.array([getattr(root, side) for side in (*TIMES, *POSITIONS)], dtype=np.float64)
    piece[len(TIMES) :, 1] += 1
    stack = [(piece, ends)]
    while stack:
        piece, ends = stack.pop()
        low, high = piece[:, 0], piece[:, 1]
        flat = (low == high) & (ends[:, :, 0] <= low) & (high <= ends[:, :, 1])
        touching = ((np.minimum(ends[:, :, 1], high) > np.maximum(ends[:, :, 0], low)) | flat).all(axis=1)
        ends = ends[touching]
        if ((ends[:, :, 0] <= low) & (high <= ends[:, :, 1])).all(axis=1).any():
            continue
        cut = _edge(piece, ends)
        if cut is None:
            return False
        side, at = cut
        first, second = piece.copy(), piece.copy()
        first[side, 1] = second[side, 0] = at
        stack += [(first, ends), (second, ends)]
    return True


def _edge(piece: FloatArray, ends: FloatArray) -> tuple[int, float] | None:
    """The edge inside the piece that passes through the fewest boxes."""
    best: tuple[int, int, float] | None = None
    for side, (low, high) in enumerate(piece):
        edges = np.unique(ends[:, side])
        for at in edges[(edges > low) & (edges < high)].tolist():
            passed = int(((ends[:, side, 0] < at) & (at < ends[:, side, 1])).sum())
            if best is None or passed < best[0]:
                best = passed, side, at
    return None if best is None else best[1:]
