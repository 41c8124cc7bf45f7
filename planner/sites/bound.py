"""The bound over all plans: boxes are halved, the least promising first, until the smallest bound is good enough."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.clock import now_s
from planner.sites.boxes import POSITIONS, TIMES, Box, covered
from planner.sites.classes import Merging
from planner.sites.knapsacks import Weights, even_weights, knapsacks_s
from planner.sites.linear import BoxProgram, Duals
from planner.sites.lp import box_program
from planner.sites.narrowing import narrowed
from planner.sites.relaxation import Relaxation

STALLED = 800, 1e-3
"""A proof ends when so many boxes have not raised the bound by this share of the best step."""


@dataclass(frozen=True)
class Corner:
    """What every plan of the narrowed box spends at least, which needs no numbers."""


Evidence = Weights | Duals | Corner
"""Link weights for the knapsacks, multipliers of the box's program, or the narrowed box itself."""


def proven_s(relaxation: Relaxation, box: Box, evidence: Evidence, best_s: float = float("inf")) -> float:
    """No plan of the box has a shorter step than this: those outside the narrowed box take ``best_s`` at least, those inside what
    is proven of it."""
    narrow = narrowed(relaxation, box, best_s)
    return best_s if narrow is None else min(best_s, _within_s(relaxation, narrow, evidence))


def _within_s(relaxation: Relaxation, narrow: Box, evidence: Evidence) -> float:
    """The same of a box that is narrowed."""
    if isinstance(evidence, Corner):
        layer_s = relaxation.corner_s(narrow)
    elif isinstance(evidence, Weights):
        layer_s = relaxation.inside_s(narrow) + knapsacks_s(relaxation, narrow, evidence)
    else:
        program = box_program(relaxation, narrow)
        assert program is not None, "what is narrowed is possible"
        return _by_duals_s(relaxation, narrow, program, evidence)
    return relaxation.base_s + relaxation.num_layers * layer_s


def _by_duals_s(relaxation: Relaxation, narrow: Box, program: BoxProgram, duals: Duals) -> float:
    layer_s = relaxation.token_latency_of(narrow) + relaxation.inside_s(narrow) + program.value_s(duals)
    return relaxation.base_s + relaxation.num_layers * layer_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Proof:
    """Boxes that together hold every plan, each with what bounds those of its plans that are faster than ``best_s``."""

    best_s: float
    parts: tuple[tuple[Box, Evidence], ...]
    bound_s: float
    """The smallest of the parts' bounds."""
    merging: Merging
    """Of the relaxation whose boxes these are."""
    interrupted: bool
    """By the user, before its time was over."""


@dataclass(frozen=True, eq=False)
class _Part:
    box: Box
    evidence: Evidence
    value_s: float


@dataclass(frozen=True, eq=False)
class _Open:
    """A box to be bounded better."""

    box: Box
    narrow: Box
    part: _Part
    """What bounds it: its own evidence, or that of a box around it."""
    duals: Duals | None
    """Of the last box around it, or itself, whose program was solved: they prove something of boxes inside it, too."""
    solved: bool
    """Its own program was."""


def prove(
    relaxation: Relaxation,
    best_s: float,
    *,
    enough_gap: float = 1e-4,
    max_boxes: int = 2000,
    deadline_s: float = float("inf"),
    report: Callable[[float], None] | None = None,
) -> Proof:
    """A bound for a problem whose best known plan takes ``best_s``: stops when the gap is at most ``enough_gap``, when more boxes
    hardly raise it (``STALLED``), after ``max_boxes`` boxes, or at ``deadline_s`` (of ``planner.clock``)."""
    target_s = best_s * (1 - enough_gap)
    even = even_weights(relaxation)
    heap: list[tuple[float, int, _Open]] = []
    done: list[_Part] = []
    boxes = pushed = 0
    interrupted = False
    raised_s, raised_at = -float("inf"), 0

    def keep(one: _Open) -> None:
        nonlocal pushed
        pushed += 1
        if one.part.value_s >= target_s:
            done.append(one.part)
        else:
            heapq.heappush(heap, (one.part.value_s, pushed, one))

    def enter(box: Box, around: _Open | None) -> None:
        nonlocal boxes
        boxes += 1
        narrow = narrowed(relaxation, box, best_s)
        if narrow is None:
            done.append(_Part(box, Corner(), best_s))
            return
        duals = around.duals if around is not None and len(relaxation.classes.count) <= MOST_INHERITED else None
        quick: tuple[Evidence, ...] = (even, Corner()) if duals is None else (even, Corner(), duals)
        found = [_Part(box, one, min(best_s, _within_s(relaxation, narrow, one))) for one in quick]
        if around is not None:
            found.append(around.part)  # what bounds the whole box bounds its half
        keep(_Open(box, narrow, max(found, key=lambda one: one.value_s), duals, solved=False))

    for root in relaxation.roots():
        enter(root, None)
    while heap and boxes < max_boxes and now_s() < deadline_s:
        value_s, _, one = heapq.heappop(heap)
        if value_s > raised_s + STALLED[1] * best_s:
            raised_s, raised_at = value_s, boxes
        elif boxes > raised_at + STALLED[0]:
            done.append(one.part)
            break
        try:
            if report is not None:
                report(value_s)
            if not one.solved and _worth(relaxation, one.narrow, best_s):
                part, duals = one.part, one.duals
                found = _by_program(relaxation, one.box, one.narrow, best_s)
                if found is not None:
                    part, duals = max(part, found[0], key=lambda part: part.value_s), found[1]
                keep(_Open(one.box, one.narrow, part, duals, solved=True))
                continue
            cut = widest(relaxation, one.narrow)
            if cut is None:
                # The bound cannot rise above this box.
                done.append(one.part)
                break
            for half in one.box.cut(*cut):
                enter(half, one)
        except KeyboardInterrupt:
            # What bounds the whole box bounds its halves, whichever of them were entered.
            done.append(one.part)
            interrupted = True
            break
    parts = list(dict.fromkeys([*done, *(one.part for *_, one in heap)]))
    return Proof(
        best_s=best_s,
        parts=tuple((part.box, part.evidence) for part in parts),
        bound_s=min(part.value_s for part in parts),
        merging=relaxation.merging,
        interrupted=interrupted,
    )


def _by_program(relaxation: Relaxation, box: Box, narrow: Box, best_s: float) -> tuple[_Part, Duals] | None:
    """None where the solver fails."""
    program = box_program(relaxation, narrow)
    duals = None if program is None else program.solve()
    if program is None or duals is None:
        return None
    return _Part(box, duals, min(best_s, _by_duals_s(relaxation, narrow, program, duals))), duals


NEAR = ((10, 1.0), (16, 0.5), (32, 0.1))
"""Up to so many classes, programs are solved for boxes whose lower ends leave at most this share of a layer's time: larger ones
take longer (a second among 60), and in wide boxes chords lose more than a program gains."""
TIGHT = ((32, 0.1), (64, 0.05))
"""Up to so many classes they are also solved where cutting copies' times and distances can bring no more than this share of what
is left."""
MOST_MERGED = 40
"""The same up to so many where some are merged; with more of those, programs cost more than they bring."""
MOST_INHERITED = 32
"""Up to so many classes multipliers are tried on boxes inside; making a program of more takes longer than it brings."""


def _worth(relaxation: Relaxation, narrow: Box, best_s: float) -> bool:
    """Whether the box's program is to be solved."""
    classes, layer_s = len(relaxation.classes.count), (best_s - relaxation.base_s) / relaxation.num_layers
    left_s = layer_s - relaxation.corner_s(narrow)
    if left_s <= next((share for most, share in NEAR if classes <= most), 0.0) * layer_s:
        return True
    if relaxation.classes.merged and classes > MOST_MERGED:
        return False
    share = next((share for most, share in TIGHT if classes <= most), 0.0)
    return max(_spread_s(relaxation, narrow, side) for side in CUT if side not in ROWS) <= share * left_s


CUT = (*TIMES, *POSITIONS)
ROWS = ("forward_s", "back_s")
CHEAPER = 0.5
"""Cutting how long rows keep links busy counts for less: narrowing finds much of their lower ends."""


def widest(relaxation: Relaxation, narrow: Box) -> tuple[str, float] | None:
    """The side along which the box's corners differ most in cost, and where to cut it; None when they hardly differ."""
    spread = {side: _spread_s(relaxation, narrow, side) for side in CUT}
    side = max(spread, key=lambda one: spread[one])
    if spread[side] <= 1e-9 * relaxation.base_s / relaxation.num_layers:
        return None
    low, high = getattr(narrow, side)
    if side not in POSITIONS:
        return side, (low + high) / 2
    reaches = relaxation.reaches_s if side == "reach" else relaxation.copy_reaches_s
    cut = int(np.searchsorted(reaches, (reaches[low] + reaches[high]) / 2, side="right")) - 1
    return side, min(max(cut, low), high - 1)


def _spread_s(relaxation: Relaxation, narrow: Box, side: str) -> float:
    low, high = getattr(narrow, side)
    if side in ROWS:
        return CHEAPER * relaxation.budgets_s[side == "back_s"] * float(high - low)
    if side == "reach":
        more = float(relaxation.reaches_s[high] - relaxation.reaches_s[low])
        return relaxation.problem.workload.training.micro_batches * more
    there, back_s = relaxation.copy_latency_s(narrow)
    gather, give_back = there + narrow.gather_s[0], back_s + narrow.return_s[0]
    if side == "copy_reach":
        more = float(relaxation.copy_reaches_s[high] - relaxation.copy_reaches_s[low])
        farther = relaxation.copies_s(narrow.residency, gather + more, give_back + more)
        return farther - relaxation.copies_s(narrow.residency, gather, give_back)
    ends = (gather + high - low, give_back) if side == "gather_s" else (gather, give_back + high - low)
    return relaxation.copies_s(narrow.residency, *ends) - relaxation.copies_s(narrow.residency, gather, give_back)


def verify(relaxation: Relaxation, proof: Proof) -> float:
    """The bound that a proof gives, evaluated anew without any solver. Raises ValueError when its boxes leave plans out, or are
    of sites merged another way."""
    if relaxation.merging is not proof.merging:
        raise ValueError(f"the proof is about sites merged otherwise ({proof.merging.value}, not {relaxation.merging.value})")
    boxes = [box for box, _ in proof.parts]
    for root in relaxation.roots():
        if not covered(root, boxes):
            raise ValueError(f"the proof leaves out plans whose copies live for one {root.residency.value}")
    return min(proven_s(relaxation, box, evidence, proof.best_s) for box, evidence in proof.parts)
