"""How long rows keep the busiest link at least, by counting: the concave chance of a token needing a site stays as it is."""

from __future__ import annotations

import numpy as np

from hybridep.arrays import BoolArray, FloatArray
from planner.sites.boxes import Box, Boxes, over
from planner.sites.relaxation import SLACK, Limits, Relaxation

HALVINGS = 10
"""Of the times in which links may send; what was too short at each is proven."""


def least_rows_s(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> tuple[FloatArray, FloatArray]:
    """Seconds per byte of a row, on the way to the experts and back: the shortest times in which sites can send and serve what
    they must, as far as counting tells. Infinite where the box's upper ends are too short."""
    kinds = relaxation.classes.kinds
    total = (kinds.homes + limits.uploads) @ kinds.count
    rates, ends = (
        np.stack([kinds.up_bytes_per_s, kinds.down_bytes_per_s]),
        np.asarray([box.forward_s, box.back_s], dtype=np.float64),
    )
    sent_s = _sending_s(relaxation, limits, total, rates, ends)
    there_s, back_s = np.maximum(_serving_s(relaxation, limits, total, rates[::-1]), sent_s)
    return there_s, back_s


def least_copies_s(relaxation: Relaxation, limits: Limits) -> tuple[FloatArray, FloatArray]:
    """Seconds of one gather and one return: what sites must hold beside their own arrives at each, and leaves all homes."""
    kinds, wire = relaxation.classes.kinds, relaxation.problem.wire
    up, down, owners = kinds.up_bytes_per_s, kinds.down_bytes_per_s, kinds.count * (kinds.homes > 0)
    needed = np.maximum(limits.least_held - kinds.homes, 0.0)
    total = needed @ kinds.count

    def shortest_s(out_rates: FloatArray, in_rates: FloatArray) -> FloatArray:
        return np.asarray(np.maximum((needed / in_rates).max(axis=-1), total / float(out_rates @ owners)) * (1 - SLACK))

    return shortest_s(up, down) * wire.expert_bytes, shortest_s(down, up) * wire.expert_gradient_bytes


def _sending_s(relaxation: Relaxation, limits: Limits, total: FloatArray, rates: FloatArray, ends: FloatArray) -> FloatArray:
    """[2, ...]: in which all links (``rates``, [2, K]: bytes per second, of either way) can send what they must, if sites hold
    ``total`` experts together; no less than the box says (``ends``: [2, 2, ...], lower and upper ones of either way). A site that
    holds m experts sends each token with one of the other E - m at least once, so if its link is busy for no longer than t, it
    holds at least m(t)."""
    experts, count, lead = relaxation.problem.num_experts, relaxation.classes.kinds.count, ends.ndim - 2
    rows_per_s, room = _either_way(rates / relaxation.kind_rows, lead), total * (1 + SLACK)

    def enough(time_s: FloatArray) -> BoolArray:
        needed = experts + 1 - relaxation.hit.searchsorted(over(time_s * (1 + SLACK), 1) * rows_per_s, side="right")
        return np.asarray((needed <= limits.most_held).all(axis=-1) & (needed @ count <= room))

    low, high = ends[:, 0], ends[:, 1]
    least, at_once, at_last = low, enough(low), enough(high * (1 + SLACK))
    if not at_once.all():
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            fits = enough(middle)
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return np.where(at_once, least, np.where(at_last, low, np.inf))


def _either_way(values: FloatArray, lead: int) -> FloatArray:
    """[2, ..., K] with so many axes between, given [2, K]."""
    return values.reshape(len(values), *[1] * lead, -1)


def _serving_s(relaxation: Relaxation, limits: Limits, total: FloatArray, rates: FloatArray) -> FloatArray:
    """[2, ...]: in which all links (``rates``, [2, K]: bytes per second, of either way) can receive what others' tokens need: a
    row that comes to a site with m experts finds at most m / P(m) of those it needs on average, and sites that hold ``total``
    experts together leave D E - total to be found elsewhere. m / P(m) lies below a line from one expert on, the steepest to any m
    that a site may hold: to the last one, but for a capacity that drops the last tokens. The best m under those lines are found
    greedily."""
    problem, count, most = relaxation.problem, relaxation.classes.kinds.count, limits.most_held
    first, more = np.where(most >= 1, 1 / problem.hit[1], 0.0), np.maximum(most - 1, 0.0)
    held = np.arange(1, problem.num_experts + 1)
    steepest = np.maximum.accumulate((held / problem.hit[1:] - 1 / problem.hit[1]) / np.maximum(held - 1, 1))
    found = np.concatenate([first, steepest[more.astype(np.int64)]], axis=-1)
    number = np.concatenate([np.minimum(most, 1.0) * count, more * count], axis=-1)
    found_per_s = found * _either_way(np.concatenate([rates, rates], axis=-1), most.ndim - 1) / relaxation.rows
    order = np.argsort(-found_per_s, axis=-1, kind="stable")
    units, found_per_s = np.take_along_axis(np.stack(np.broadcast_arrays(number, found_per_s)), order[None], axis=-1)
    taken = np.minimum(np.maximum(over(total, 1) - (np.cumsum(units, axis=-1) - units), 0.0), units)
    missing, all_per_s = problem.num_experts * problem.num_sites - taken.sum(axis=-1), (taken * found_per_s).sum(axis=-1)
    least_s = np.where(all_per_s > 0, missing / np.where(all_per_s > 0, all_per_s, 1.0) * (1 - SLACK), np.inf)
    return np.where(missing > 0, least_s, 0.0)
