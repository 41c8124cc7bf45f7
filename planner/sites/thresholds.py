"""How long rows keep the busiest link at least, by counting: the concave chance of a token needing a site stays as it is."""

from __future__ import annotations

import numpy as np

from hybridep.traffic import FloatArray
from planner.sites.boxes import Box
from planner.sites.relaxation import SLACK, Limits, Relaxation

HALVINGS = 10
"""Of a box's times; what was too short at each is proven."""


def least_rows_s(relaxation: Relaxation, box: Box, limits: Limits) -> tuple[float, float]:
    """Seconds per byte of a row, on the way to the experts and back. A site that holds m experts sends each token with one of the
    other E - m at least once. So if no site's links are busy for longer than t, each holds at least m(t); the smallest t counts
    for which all of them can, and together do not hold more than what homes can send out. No less than the box says, as a rule;
    infinite where its upper ends are too short."""
    kinds = relaxation.classes
    total = float((kinds.homes + limits.uploads) @ kinds.count)
    up, down = kinds.up_bytes_per_s, kinds.down_bytes_per_s
    sending = _sending_s(relaxation, limits, total, up), _sending_s(relaxation, limits, total, down)
    serving = (
        _serving_s(relaxation, limits, total, down, box.forward_s),
        _serving_s(relaxation, limits, total, up, box.back_s),
    )
    return max(sending[0], serving[0]), max(sending[1], serving[1])


def _sending_s(relaxation: Relaxation, limits: Limits, total: float, rates: FloatArray) -> float:
    experts, count = relaxation.problem.num_experts, relaxation.classes.count
    away = np.outer(relaxation.user_rows, relaxation.hit[experts - np.arange(experts + 1)])
    times = away / rates[:, None]
    candidates = np.unique(times)
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        # Times fall with m, so the experts needed are those whose time is still too long.
        needed = (times > candidates[middle] * (1 + SLACK)).sum(axis=1)
        if (needed <= limits.most_held).all() and float(needed @ count) <= total * (1 + SLACK):
            high = middle
        else:
            low = middle + 1
    return float(candidates[low]) * (1 - SLACK)


def _serving_s(relaxation: Relaxation, limits: Limits, total: float, rates: FloatArray, ends: tuple[float, float]) -> float:
    """Seconds that the busiest site's link is busy for with tokens it serves to others: a row that comes to a site with m experts
    finds at most m / P(m) of those it needs on average, and sites that hold ``total`` experts together leave D E - total to be
    found elsewhere. m / P(m) lies below a line from one expert on; the best m under those lines are found greedily."""
    problem, count = relaxation.problem, relaxation.classes.count
    experts, most = float(problem.num_experts), limits.most_held
    first = np.where(most >= 1, 1 / problem.hit[1], 0.0)
    last = most / np.maximum(problem.hit[most.astype(np.int64)], problem.hit[1])
    slope = np.where(most > 1, (last - first) / np.maximum(most - 1, 1.0), 0.0)
    units = np.concatenate([np.minimum(most, 1.0) * count, np.maximum(most - 1, 0.0) * count])

    def enough(time_s: float) -> bool:
        rows = time_s * rates / relaxation.rows
        gains = np.concatenate([rows * first, rows * slope]) + 1.0
        order = np.argsort(-gains, kind="stable")
        before = np.cumsum(units[order]) - units[order]
        taken = np.clip(total - before, 0.0, units[order])
        return float(taken @ gains[order]) >= experts * problem.num_sites * (1 - SLACK)

    low, high = ends
    if enough(low):
        return low
    if not enough(high * (1 + SLACK)):
        return float("inf")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low
