"""The bound over all plans: boxes are halved, the least promising first, until the smallest bound is good enough."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridep.arrays import FloatArray
from planner.clock import now_s
from planner.sites.boxes import POSITIONS, TIMES, Box, covered, side_by_side
from planner.sites.linear import BoxProgram, Duals
from planner.sites.lp import box_program, programs
from planner.sites.narrowing import all_narrowed, narrowed
from planner.sites.priced import Priced, priced_s
from planner.sites.relaxation import Relaxation

STALLED = 3000, 1e-3
"""A proof ends when so many boxes have not raised the bound by this share of the best step."""


@dataclass(frozen=True)
class Corner:
    """What every plan of the narrowed box spends at least, which needs no numbers."""


Evidence = Duals | Corner
"""Multipliers of the box's program, or the narrowed box itself."""


def proven_s(relaxation: Relaxation, box: Box, evidence: Evidence, best_s: float = float("inf")) -> float:
    """No plan of the box has a shorter step than this: those outside the narrowed box take ``best_s`` at least, those inside what
    is proven of it."""
    narrow = narrowed(relaxation, box, best_s)
    return best_s if narrow is None else min(best_s, _within_s(relaxation, narrow, evidence))


def _within_s(relaxation: Relaxation, narrow: Box, evidence: Evidence) -> float:
    """The same of a box that is narrowed."""
    if isinstance(evidence, Corner):
        return relaxation.base_s + relaxation.num_layers * max(priced_s(relaxation, narrow), relaxation.computing_s(narrow))
    return float(_by_duals_s(relaxation, narrow, _program(relaxation, narrow), [evidence])[0])


def _by_duals_s(relaxation: Relaxation, narrow: Box, program: BoxProgram, many: Sequence[Duals]) -> FloatArray:
    """What each of these multipliers says of the narrowed box, given its program."""
    layers_s = relaxation.token_latency_of(narrow) + relaxation.inside_s(narrow) + program.values_s(many)
    return relaxation.base_s + relaxation.num_layers * layers_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Proof:
    """Boxes that together hold every plan, each with what bounds those of its plans that are faster than ``best_s``."""

    best_s: float
    parts: tuple[tuple[Box, Evidence], ...]
    """Those first for which least is proven."""
    prices: tuple[Priced, ...]
    """Of visits, which say something of all of them."""
    bound_s: float
    """The smallest of the parts' bounds."""
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
    heap: list[tuple[float, int, _Open]] = []
    done: list[_Part] = []
    proven: list[Duals] = []
    boxes = pushed = programs = 0
    interrupted, every, most = False, _boxes_a_program(relaxation), _most_together(relaxation)
    raised_s, raised_at = -float("inf"), 0

    def keep(one: _Open) -> None:
        nonlocal pushed
        pushed += 1
        if one.part.value_s >= target_s:
            done.append(one.part)
        else:
            heapq.heappush(heap, (one.part.value_s, pushed, one))

    def enter(halves: Sequence[tuple[Box, _Part | None]]) -> None:
        """Each with what bounds the box around it."""
        nonlocal boxes
        boxes += len(halves)
        worth: list[_Open] = []
        for (box, around), narrow in zip(halves, all_narrowed(relaxation, [box for box, _ in halves], best_s), strict=True):
            if narrow is None:
                done.append(_Part(box, Corner(), best_s))
                continue
            part = _Part(box, Corner(), min(best_s, _within_s(relaxation, narrow, Corner())))
            if around is not None and around.value_s >= part.value_s:
                part = around  # what bounds the whole box bounds its half
            one = _Open(box, narrow, part, solved=False)
            if proven and part.value_s < target_s and _worth(relaxation, narrow, best_s):
                worth.append(one)
            else:
                keep(one)
        for one in _by_known(relaxation, worth, proven, best_s):
            keep(one)

    for root in relaxation.roots():
        enter([(root, None)])
    # The lowest boxes, whose halves are looked at side by side. However that is interrupted, no box is lost from all of these.
    batch: list[_Open] = []
    while heap and boxes < max_boxes and now_s() < deadline_s:
        value_s = heap[0][0]
        if value_s > raised_s + STALLED[1] * best_s:
            raised_s, raised_at = value_s, boxes
        elif boxes > raised_at + STALLED[0]:
            break
        try:
            if report is not None:
                report(value_s)
            halves: list[tuple[Box, _Part | None]] = []
            width = min(most, 1 + len(heap) // SHARE)
            while heap and len(batch) < width and (not batch or heap[0][2].box.residency is batch[0].box.residency):
                batch.append(one := heap[0][2])
                heapq.heappop(heap)
                cut = widest(relaxation, one.narrow)
                # In its turn, where the bound is about to be given up, or where there is nothing to cut.
                turn = programs * every <= boxes or boxes > raised_at + STALLED[0] // 2
                if not one.solved and (cut is None or (turn and _worth(relaxation, one.narrow, best_s))):
                    programs += 1
                    part = one.part
                    if (found := _by_program(relaxation, one.box, one.narrow, best_s)) is not None:
                        part = max(part, found[0], key=lambda part: part.value_s)
                        proven.insert(0, found[1])
                        del proven[MOST_KNOWN:]
                    keep(_Open(one.box, one.narrow, part, solved=True))
                    batch.pop()
                    break
                if cut is None:
                    if halves:
                        keep(one)
                        batch.pop()
                    break
                halves += [(half, one.part) for half in one.box.cut(*cut)]
            if halves:
                enter(halves)
            elif batch:
                # The bound cannot rise above this box.
                break
            batch = []
        except KeyboardInterrupt:
            # What bounds the whole box bounds its halves, whichever of them were entered.
            interrupted = True
            break
    done += [one.part for one in batch]
    parts = sorted(dict.fromkeys([*done, *(one.part for *_, one in heap)]), key=lambda part: part.value_s)
    return Proof(
        best_s=best_s,
        parts=tuple((part.box, part.evidence) for part in parts),
        prices=relaxation.prices,
        bound_s=parts[0].value_s,
        interrupted=interrupted,
    )


def _by_program(relaxation: Relaxation, box: Box, narrow: Box, best_s: float) -> tuple[_Part, Duals] | None:
    """None where the solver fails."""
    program = box_program(relaxation, narrow)
    duals = None if program is None else program.solve()
    if program is None or duals is None:
        return None
    return _Part(box, duals, min(best_s, float(_by_duals_s(relaxation, narrow, program, [duals])[0]))), duals


WIDTH, SHARE, TOGETHER = 16, 8, 50_000
"""At most so many boxes are cut at once, the lowest ones and one in so many of those that are open; tables over their halves
(``Limits``) have at most so many entries."""
MOST_KNOWN = 16
"""Multipliers of other boxes' programs that are tried on each box: those that proved most of one lately. To evaluate them takes a
fraction of what solving a program takes, and with a few dozen programs solved they prove most of what its own would."""


def _by_known(relaxation: Relaxation, many: Sequence[_Open], proven: list[Duals], best_s: float) -> Sequence[_Open]:
    """Each with what one of ``proven`` says of it, if that is more; the best one is moved to their front."""
    if not many:
        return many
    duals, better = list(proven), []
    for one, values_s in zip(many, _known_s(relaxation, [one.narrow for one in many], duals), strict=True):
        best = int(values_s.argmax())
        part = one.part
        if values_s[best] > part.value_s:
            part = _Part(one.box, duals[best], min(best_s, float(values_s[best])))
            proven.remove(duals[best])
            proven.insert(0, duals[best])
        better.append(replace(one, part=part))
    return better


def _known_s(relaxation: Relaxation, narrow: Sequence[Box], duals: Sequence[Duals]) -> FloatArray:
    """[boxes, duals]: what each of these multipliers says of each box."""
    ends = side_by_side(narrow)
    beside_s = [relaxation.token_latency_of(one) + relaxation.inside_s(one) for one in narrow]
    layers_s = np.array(beside_s)[:, None] + programs(relaxation, ends, relaxation.limits(ends)).values_s(duals)
    return np.asarray(relaxation.base_s + relaxation.num_layers * layers_s)


def _program(relaxation: Relaxation, narrow: Box) -> BoxProgram:
    program = box_program(relaxation, narrow)
    assert program is not None, "what is narrowed is possible"
    return program


NEAR = ((10, 1.0), (16, 0.5), (32, 0.3))
"""Up to so many classes, programs are made for boxes whose lower ends leave at most this share of a layer's time: in wider boxes
chords lose more than a program gains."""
NEAR_MERGED = 0.5
"""The same where sites are merged."""
TIGHT = 0.05
"""Among more different sites a program takes a second. It is made where cutting copies' times and distances can bring no more
than this share of what is left."""
SMALL, CUT_FOR_ONE = 8, 3
"""With so many classes each such box has its program solved; with more, so many boxes are cut for each one that is solved, and
the more as the time grows that solving takes: with the number of classes to the power of four."""
BOXES_MERGED = 16, 2
"""Boxes that are cut for each program that is solved where sites are merged: so many, or the latter for each class."""


def _worth(relaxation: Relaxation, narrow: Box, best_s: float) -> bool:
    """Whether the box's program can say much, and more than prices do."""
    if relaxation.prices and relaxation.classes.mixed:
        return False
    classes, layer_s = len(relaxation.classes.count), (best_s - relaxation.base_s) / relaxation.num_layers
    left_s = layer_s - relaxation.corner_s(narrow)
    if relaxation.classes.merged:
        return left_s <= NEAR_MERGED * layer_s
    if classes > NEAR[-1][0]:
        return max(_spread_s(relaxation, narrow, side) for side in CUT if side not in ROWS) <= TIGHT * left_s
    return left_s <= next(share for most, share in NEAR if classes <= most) * layer_s


def _most_together(relaxation: Relaxation) -> int:
    """Boxes that are cut at once: calls of numpy take longer than what they do for one box between few sites."""
    classes = relaxation.classes
    return int(np.clip(TOGETHER // (2 * len(classes.kinds.count) * len(classes.count)), 1, WIDTH))


def _boxes_a_program(relaxation: Relaxation) -> float:
    """Boxes that are cut for each program that is solved."""
    classes = len(relaxation.classes.count)
    if relaxation.classes.merged:
        return max(BOXES_MERGED[0], BOXES_MERGED[1] * classes)
    return CUT_FOR_ONE * (classes / SMALL) ** 4 if SMALL < classes <= NEAR[-1][0] else 0.0


CUT = (*TIMES, *POSITIONS)
COPIES, ROWS = ("gather_s", "return_s"), ("forward_s", "back_s")
CHEAPER = 0.5
"""Cutting times counts for less: narrowing finds much of their lower ends."""
PRICED = 0.1
"""And for less again of copies' times where prices say what copies cost, however long gathers and returns take."""


def widest(relaxation: Relaxation, narrow: Box) -> tuple[str, float] | None:
    """The side along which the box's corners differ most in cost, and where to cut it; None when they hardly differ."""
    factor = dict.fromkeys(TIMES, CHEAPER)
    if relaxation.prices and relaxation.classes.mixed:
        factor |= dict.fromkeys(COPIES, CHEAPER * PRICED)
    spread = {side: _spread_s(relaxation, narrow, side) * factor.get(side, 1.0) for side in CUT}
    side = max(spread, key=lambda one: spread[one])
    if spread[side] <= 1e-6 * relaxation.base_s / relaxation.num_layers:
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
        return relaxation.budgets_s[side == "back_s"] * float(high - low)
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
    """The bound that a proof gives, evaluated anew without any solver: of its prices nothing but themselves is believed. Raises
    ValueError when its boxes leave plans out, or its prices say nothing."""
    made: tuple[Priced, ...] = ()
    if proof.prices:
        from planner.sites.pricing import priced  # numba takes a while to import

        made = tuple(priced(relaxation, one.prices.price, one.homes, fine=one.prices.fine) for one in proof.prices)
    relaxation = replace(relaxation, prices=made)
    boxes = [box for box, _ in proof.parts]
    for root in relaxation.roots():
        if not covered(root, boxes):
            raise ValueError(f"the proof leaves out plans whose copies live for one {root.residency.value}")
    return min(proven_s(relaxation, box, evidence, proof.best_s) for box, evidence in proof.parts)
