"""A box narrowed to what its plans have that are faster than a known one.

What a plan spends on one thing it cannot spend on another: a box's lower ends leave so much time for each of its sides, and what
its upper ends leave possible keeps links busy for so long at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from hybridep.traffic import gathers_and_returns
from planner.sites.boxes import TIMES, Box, side_by_side
from planner.sites.priced import copies_by_prices_s
from planner.sites.relaxation import SLACK, Relaxation
from planner.sites.thresholds import least_copies_s, least_rows_s
from planner.sites.visits import copies_for_visits_s


def narrowed(relaxation: Relaxation, box: Box, best_s: float) -> Box | None:
    """Holds every plan of ``box`` with a shorter step than ``best_s``; None when there is none."""
    return all_narrowed(relaxation, [box], best_s)[0]


def all_narrowed(relaxation: Relaxation, boxes: Sequence[Box], best_s: float) -> list[Box | None]:
    """Each, as ``narrowed``; all of one residency. First no side may exceed its lower end by more than all lower ends together
    leave of a layer's time; then what the upper ends leave possible (``Relaxation.limits``) gives copies and rows lower ends of
    their own."""
    layer_s = (best_s - relaxation.base_s) / relaxation.num_layers
    found: list[Box | None] = [None] * len(boxes)
    left: list[tuple[int, Box]] = []
    for number, box in enumerate(boxes):
        lower_s = relaxation.corner_s(box) * (1 - SLACK)
        if lower_s < layer_s:
            left.append((number, _tied(relaxation, _ends_within(relaxation, box, layer_s - lower_s))))
    if not left:
        return found
    ends = side_by_side([box for _, box in left])
    limits = relaxation.limits(ends)
    possible = limits.possible(relaxation.classes)
    counted = (
        least_copies_s(relaxation, limits),
        copies_for_visits_s(relaxation, ends, limits),
        copies_by_prices_s(relaxation, ends, limits),
    )
    copies_s = (reduce(np.maximum, each) for each in zip(*counted, strict=True))
    least_s = np.stack([*copies_s, *least_rows_s(relaxation, ends, limits)], axis=1)
    for (number, box), least, some in zip(left, least_s.tolist(), possible.tolist(), strict=True):
        if not some:
            continue
        gather_s, return_s, forward_s, back_s = map(_at_least, (box.gather_s, box.return_s, box.forward_s, box.back_s), least)
        narrow = replace(box, gather_s=gather_s, return_s=return_s, forward_s=forward_s, back_s=back_s)
        # Upper ends stay as they are: ``Relaxation.limits`` knows them.
        narrow = _tied(relaxation, narrow)
        if any(low > high for low, high in (getattr(narrow, side) for side in TIMES)):
            continue
        # A second round of the same costs more boxes than it saves.
        if relaxation.corner_s(narrow) * (1 - SLACK) < layer_s:
            found[number] = narrow
    return found


def _at_least(interval: tuple[float, float], low: float) -> tuple[float, float]:
    return max(interval[0], low), interval[1]


def _tied(relaxation: Relaxation, box: Box) -> Box:
    """Where the way back takes as long as the way there (``Relaxation.tied``), what is known of one is known of the other."""
    if not relaxation.tied:
        return box
    wire = relaxation.problem.wire
    ratio = wire.expert_gradient_bytes / wire.expert_bytes

    def both(one: tuple[float, float], other: tuple[float, float], unit: float) -> tuple[float, float]:
        return max(one[0], other[0] * unit * (1 - SLACK)), min(one[1], other[1] * unit * (1 + SLACK))

    return replace(
        box,
        gather_s=both(box.gather_s, box.return_s, 1 / ratio),
        return_s=both(box.return_s, box.gather_s, ratio),
        forward_s=both(box.forward_s, box.back_s, 1.0),
        back_s=both(box.back_s, box.forward_s, 1.0),
    )


def _ends_within(relaxation: Relaxation, box: Box, left_s: float) -> Box:
    """Without plans that exceed the lower ends by more than ``left_s`` in one layer. A layer's time is a sum of terms for
    gathers, returns, rows each way and tokens' latency; each rises with its own side, so its lower end bounds it from below,
    and in a plan that is fast enough it is at most that and all that is left."""
    problem = relaxation.problem
    batches, beside = problem.workload.training.micro_batches, problem.beside_s
    gathers, returns = gathers_and_returns(box.residency, batches)
    hidden = min(gathers, batches)
    forward, back, _ = relaxation.budgets_s
    latency_s, latency_back_s = relaxation.copy_latency_s(box)
    # The inverses of what gathers and returns cost (``Relaxation.copies_s``), latency included; what is hidden costs nothing.
    gather_cost_s = relaxation.copies_s(box.residency, latency_s + box.gather_s[0], 0.0) + left_s
    short = gathers > hidden and gather_cost_s <= (gathers - hidden) * beside
    gather_s = gather_cost_s / (gathers - hidden) if short else (gather_cost_s + hidden * beside) / gathers
    return_cost_s = relaxation.copies_s(box.residency, 0.0, latency_back_s + box.return_s[0]) + left_s
    return_s = return_cost_s / returns + 2 * beside

    def at_most(interval: tuple[float, float], high: float) -> tuple[float, float]:
        return interval[0], min(interval[1], max(high * (1 + SLACK), interval[0]))

    def nearer(positions: tuple[int, int], reaches_s: np.ndarray, most_s: float) -> tuple[int, int]:
        last = int(np.searchsorted(reaches_s, most_s * (1 + SLACK), side="right")) - 1
        return positions[0], min(positions[1], max(last, positions[0]))

    return replace(
        box,
        gather_s=at_most(box.gather_s, gather_s - latency_s),
        return_s=at_most(box.return_s, return_s - latency_back_s),
        forward_s=at_most(box.forward_s, box.forward_s[0] + left_s / forward),
        back_s=at_most(box.back_s, box.back_s[0] + left_s / back),
        copy_reach=nearer(box.copy_reach, relaxation.copy_reaches_s, gather_s - box.gather_s[0]),
        reach=nearer(box.reach, relaxation.reaches_s, relaxation.reaches_s[box.reach[0]] + left_s / batches),
    )
