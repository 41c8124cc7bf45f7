"""How long rows keep the busiest link at least, by counting: the concave chance of a token needing a site stays as it is."""

from __future__ import annotations

import numpy as np

from hybridep.traffic import FloatArray
from planner.sites.boxes import Box
from planner.sites.relaxation import SLACK, Limits, Relaxation

HALVINGS = 10
"""Of the times in which links may send; what was too short at each is proven."""


def least_rows_s(relaxation: Relaxation, box: Box, limits: Limits) -> tuple[float, float]:
    """Seconds per byte of a row, on the way to the experts and back: the shortest times in which sites can send and serve what
    they must, as far as counting tells. Infinite where the box's upper ends are too short."""
    kinds = relaxation.classes.kinds
    up, down = kinds.up_bytes_per_s, kinds.down_bytes_per_s
    total = float((kinds.homes + limits.uploads) @ kinds.count)
    there_s, back_s = _serving_s(relaxation, limits, total, (down, up))
    return (
        max(there_s, _sending_s(relaxation, limits, total, up, box.forward_s)),
        max(back_s, _sending_s(relaxation, limits, total, down, box.back_s)),
    )


def least_copies_s(relaxation: Relaxation, limits: Limits) -> tuple[float, float]:
    """Seconds of one gather and one return: what sites must hold beside their own arrives at each, and leaves all homes."""
    kinds, wire = relaxation.classes.kinds, relaxation.problem.wire
    up, down, owners = kinds.up_bytes_per_s, kinds.down_bytes_per_s, kinds.count * (kinds.homes > 0)
    needed = np.maximum(limits.least_held - kinds.homes, 0.0)
    total = float(needed @ kinds.count)

    def shortest_s(out_rates: FloatArray, in_rates: FloatArray) -> float:
        return max(float((needed / in_rates).max()), total / float(out_rates @ owners)) * (1 - SLACK)

    return shortest_s(up, down) * wire.expert_bytes, shortest_s(down, up) * wire.expert_gradient_bytes


def _sending_s(relaxation: Relaxation, limits: Limits, total: float, rates: FloatArray, ends: tuple[float, float]) -> float:
    """In which all links ([K]: bytes per second) can send what they must, if sites hold ``total`` experts together; no less than
    the box says. A site that holds m experts sends each token with one of the other E - m at least once, so if its link is busy
    for no longer than t, it holds at least m(t)."""
    experts, count, rows_per_s = relaxation.problem.num_experts, relaxation.classes.kinds.count, rates / relaxation.kind_rows

    def enough(time_s: float) -> bool:
        needed = experts + 1 - relaxation.hit.searchsorted(time_s * (1 + SLACK) * rows_per_s, side="right")
        return bool((needed <= limits.most_held).all()) and float(needed @ count) <= total * (1 + SLACK)

    low, high = ends
    if enough(low):
        return low
    if not enough(high * (1 + SLACK)):
        return float("inf")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def _serving_s(relaxation: Relaxation, limits: Limits, total: float, both: tuple[FloatArray, FloatArray]) -> FloatArray:
    """In which all links ([K]: bytes per second, of either way) can receive what others' tokens need: a row that comes to a site
    with m experts finds at most m / P(m) of those it needs on average, and sites that hold ``total`` experts together leave
    D E - total to be found elsewhere. m / P(m) lies below a line from one expert on; the best m under those lines are found
    greedily."""
    problem, count, most = relaxation.problem, relaxation.classes.kinds.count, limits.most_held
    first = np.where(most >= 1, 1 / problem.hit[1], 0.0)
    last = most / np.maximum(problem.hit[most.astype(np.int64)], problem.hit[1])
    more = np.maximum(most - 1, 0.0)
    found = np.concatenate([first, (last - first) * (more > 0) / np.maximum(more, 1.0)])
    number = np.concatenate([np.minimum(most, 1.0) * count, more * count])
    shortest_s = []
    for rates in both:
        found_per_s = found * np.concatenate([rates, rates]) / relaxation.rows
        order = np.argsort(-found_per_s, kind="stable")
        units, found_per_s = number[order], found_per_s[order]
        taken = np.minimum(np.maximum(total - (np.cumsum(units) - units), 0.0), units)
        missing, all_per_s = problem.num_experts * problem.num_sites - float(taken.sum()), float(taken @ found_per_s)
        least_s = missing / all_per_s * (1 - SLACK) if all_per_s > 0 else float("inf")
        shortest_s.append(least_s if missing > 0 else 0.0)
    return np.array(shortest_s)
