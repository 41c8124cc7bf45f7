"""How long rows keep the busiest link at least, by counting: the concave chance of a token needing a site stays as it is."""

from __future__ import annotations

import numpy as np

from hybridep.traffic import FloatArray
from planner.sites.boxes import Box
from planner.sites.relaxation import SLACK, Limits, Relaxation

HALVINGS = 10
"""Of a box's times; what was too short at each is proven."""


def least_rows_s(relaxation: Relaxation, box: Box, limits: Limits) -> tuple[float, float]:
    """Seconds per byte of a row, on the way to the experts and back: the shortest times in which sites can send and serve what
    they must, as far as counting tells. No less than the box says; infinite where its upper ends are too short."""
    kinds = relaxation.classes.kinds
    up, down = kinds.up_bytes_per_s, kinds.down_bytes_per_s
    total = float((kinds.homes + limits.uploads) @ kinds.count)

    def shortest_s(out_rates: FloatArray, in_rates: FloatArray, ends: tuple[float, float]) -> float:
        def enough(time_s: float) -> bool:
            return _can_send(relaxation, limits, total, time_s * out_rates) and _can_serve(
                relaxation, limits, total, time_s * in_rates
            )

        low, high = ends
        if enough(low):
            return low
        if not enough(high * (1 + SLACK)):
            return float("inf")
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return low

    return shortest_s(up, down, box.forward_s), shortest_s(down, up, box.back_s)


def least_copies_s(relaxation: Relaxation, limits: Limits) -> tuple[float, float]:
    """Seconds of one gather and one return: what sites must hold beside their own arrives at each, and leaves all homes."""
    kinds, wire = relaxation.classes.kinds, relaxation.problem.wire
    up, down, owners = kinds.up_bytes_per_s, kinds.down_bytes_per_s, kinds.count * (kinds.homes > 0)
    needed = np.maximum(limits.least_held - kinds.homes, 0.0)
    total = float(needed @ kinds.count)

    def shortest_s(out_rates: FloatArray, in_rates: FloatArray) -> float:
        return max(float((needed / in_rates).max()), total / float(out_rates @ owners)) * (1 - SLACK)

    return shortest_s(up, down) * wire.expert_bytes, shortest_s(down, up) * wire.expert_gradient_bytes


def _can_send(relaxation: Relaxation, limits: Limits, total: float, link_bytes: FloatArray) -> bool:
    """Whether tokens need no more of sites' links ([K]: bytes in all, while every row has one) than there is, if sites hold
    ``total`` experts together. A site that holds m experts sends each token with one of the other E - m at least once."""
    experts, count = relaxation.problem.num_experts, relaxation.classes.kinds.count
    rows = link_bytes * (1 + SLACK) / relaxation.kind_rows
    needed = experts + 1 - np.searchsorted(relaxation.hit, rows, side="right")
    return bool((needed <= limits.most_held).all()) and float(needed @ count) <= total * (1 + SLACK)


def _can_serve(relaxation: Relaxation, limits: Limits, total: float, link_bytes: FloatArray) -> bool:
    """The same of tokens that sites serve to others: a row that comes to a site with m experts finds at most m / P(m) of those
    it needs on average, and sites that hold ``total`` experts together leave D E - total to be found elsewhere. m / P(m) lies
    below a line from one expert on; the best m under those lines are found greedily."""
    problem, count = relaxation.problem, relaxation.classes.kinds.count
    experts, most = float(problem.num_experts), limits.most_held
    first = np.where(most >= 1, 1 / problem.hit[1], 0.0)
    last = most / np.maximum(problem.hit[most.astype(np.int64)], problem.hit[1])
    slope = np.where(most > 1, (last - first) / np.maximum(most - 1, 1.0), 0.0)
    rows = link_bytes / relaxation.rows
    units = np.concatenate([np.minimum(most, 1.0) * count, np.maximum(most - 1, 0.0) * count])
    gains = np.concatenate([rows * first, rows * slope]) + 1.0
    order = np.argsort(-gains, kind="stable")
    before = np.cumsum(units[order]) - units[order]
    taken = np.clip(total - before, 0.0, units[order])
    return float(taken @ gains[order]) >= experts * problem.num_sites * (1 - SLACK)
