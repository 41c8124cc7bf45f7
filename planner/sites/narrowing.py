"""A box narrowed to what its plans have that are faster than a known one.

What a plan spends on one thing it cannot spend on another: a box's lower ends leave so much time for each of its sides, and what
its upper ends leave possible keeps links busy for so long at least.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hybridep.traffic import gathers_and_returns
from planner.sites.boxes import Box
from planner.sites.relaxation import SLACK, Relaxation
from planner.sites.thresholds import least_copies_s, least_rows_s
from planner.sites.visits import copies_for_visits_s


def narrowed(relaxation: Relaxation, box: Box, best_s: float) -> Box | None:
    """Holds every plan of ``box`` with a shorter step than ``best_s``; None when there is none. First no side may exceed its
    lower end by more than all lower ends together leave of a layer's time; then what the upper ends leave possible
    (``Relaxation.limits``) gives copies and rows lower ends of their own."""
    layer_s = (best_s - relaxation.base_s) / relaxation.num_layers
    lower_s = relaxation.corner_s(box) * (1 - SLACK)
    if lower_s >= layer_s:
        return None
    box = _ends_within(relaxation, box, layer_s - lower_s)
    limits = relaxation.limits(box)
    if not limits.possible(relaxation.classes):
        return None
    gather_s, return_s = least_copies_s(relaxation, limits)
    visits_s, visits_back_s = copies_for_visits_s(relaxation, box, limits)
    forward_s, back_s = least_rows_s(relaxation, box, limits)

    def at_least(interval: tuple[float, float], low: float) -> tuple[float, float]:
        return max(interval[0], low), interval[1]

    box = replace(
        box,
        gather_s=at_least(box.gather_s, max(gather_s, visits_s)),
        return_s=at_least(box.return_s, max(return_s, visits_back_s)),
        forward_s=at_least(box.forward_s, forward_s),
        back_s=at_least(box.back_s, back_s),
    )
    if relaxation.tied:
        box = _tied(relaxation, box)
    if any(low > high for low, high in (box.gather_s, box.return_s, box.forward_s, box.back_s)):
        return None
    # A second round of the same costs more boxes than it saves.
    return None if relaxation.corner_s(box) * (1 - SLACK) >= layer_s else box


def _tied(relaxation: Relaxation, box: Box) -> Box:
    """Where the way back takes as long as the way there (``Relaxation.tied``), what is known of one is known of the other."""
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
