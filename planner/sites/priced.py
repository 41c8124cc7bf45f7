"""What prices of visits (``planner.sites.visit_prices``) say of a box: how many copies of slow homes' experts all sites need
together, how long gathers and returns of so many take, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.plan import Residency
from hybridep.traffic import gathers_and_returns
from planner.sites.boxes import Box, Boxes, upper_ends
from planner.sites.relaxation import SLACK, Limits, Relaxation
from planner.sites.visits import row_budgets

if TYPE_CHECKING:
    from planner.sites.visit_prices import VisitPrices

ROUNDING = 1e-12
"""Share of what all sites may pay and earn that their sum may be too large by."""
STEPS = 4
"""Towards the time of a gather that sends enough; what is reached is never too long."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced:
    """Prices, and the homes whose experts they are about."""

    prices: VisitPrices
    homes: FloatArray
    """[K]: experts at home of sites of each kind, zero but for these homes."""
    cost_s: dict[Residency, float]
    """Of one layer, for each copy: what gathers and returns take at least, however long either is."""


def needed_by_prices(relaxation: Relaxation, priced: Priced, box: Box | Boxes, limits: Limits) -> FloatArray:
    """[...]: of the homes' experts, by all sites; infinite where no plan is possible."""
    kinds, experts = relaxation.classes.kinds, relaxation.problem.num_experts
    sent, received = row_budgets(relaxation, box)
    others = experts - priced.prices.experts
    least = np.maximum(priced.homes, np.minimum(limits.least_held, limits.most_held) - others)
    each = priced.prices.needed(sent, received, least, limits.most_held)
    return np.asarray(each @ kinds.count - priced.prices.experts - ROUNDING * priced.prices.largest * kinds.count.sum())


def _all_needed(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> FloatArray:
    """[..., prices]."""
    known, keys = relaxation.known_needed, upper_ends(box)
    if isinstance(box, Box) and keys[0] in known:
        return known[keys[0]]
    found = np.stack([needed_by_prices(relaxation, one, box, limits) for one in relaxation.prices], axis=-1)
    known.clear()
    known.update(zip(keys, found if isinstance(box, Boxes) else [found], strict=True))
    return found


def copies_by_prices_s(relaxation: Relaxation, boxes: Boxes, limits: Limits) -> tuple[FloatArray, FloatArray]:
    """[N] seconds of one gather and one return, at least; infinite where all copies that a box leaves possible are too few."""
    kinds, wire = relaxation.classes.kinds, relaxation.problem.wire
    there_s = back_s = np.zeros(len(boxes.gather_s[1]))
    if not relaxation.prices:
        return there_s, back_s
    most = [end[1][:, None] for end in (boxes.gather_s, boxes.return_s)]
    for priced, needed in zip(relaxation.prices, _all_needed(relaxation, boxes, limits).T * (1 - SLACK), strict=True):
        owners = priced.homes > 0
        count = kinds.count[owners]
        up, down = kinds.up_bytes_per_s[owners] / wire.expert_bytes, kinds.down_bytes_per_s[owners] / wire.expert_gradient_bytes
        too_few = limits.uploads[:, owners] @ count < needed
        there_s = np.maximum(there_s, np.where(too_few, np.inf, _shortest_s(needed, up, down * most[1], count)))
        back_s = np.maximum(back_s, np.where(too_few, np.inf, _shortest_s(needed, down, up * most[0], count)))
    return there_s * (1 - SLACK), back_s * (1 - SLACK)


def _shortest_s(needed: FloatArray, rates: FloatArray, most: FloatArray, count: FloatArray) -> FloatArray:
    """[N]: in which homes send so many copies together, no home more than ``most`` ([N, homes]). What they send is concave in
    time, so steps along its slopes end before that."""
    time_s = np.maximum(needed, 0.0) / float(rates @ count)
    for _ in range(STEPS):
        sent = rates * time_s[:, None]
        full = sent >= most
        slope = (rates * count * ~full).sum(axis=1)
        missing = needed - (np.minimum(sent, most) * count).sum(axis=1)
        time_s = time_s + np.where((missing > 0) & (slope > 0), missing / np.where(slope > 0, slope, 1.0), 0.0)
    return time_s


def priced_s(relaxation: Relaxation, box: Box) -> float:
    """As ``Relaxation.corner_s``, with what prices say of copies, if that is more."""
    corner_s = relaxation.corner_s(box)
    if not relaxation.prices:
        return corner_s
    latency_s, latency_back_s = relaxation.copy_latency_s(box)
    copies_s = relaxation.copies_s(box.residency, latency_s + box.gather_s[0], latency_back_s + box.return_s[0])
    needed = _all_needed(relaxation, box, relaxation.limits(box)).tolist()
    least_s = max(copies_cost_s(one, box.residency, copies) for one, copies in zip(relaxation.prices, needed, strict=True))
    least_s += latencies_s(relaxation, box.residency, latency_s, latency_back_s)
    return corner_s + max(least_s - copies_s, 0.0)


def copies_cost_s(priced: Priced, residency: Residency, needed: float) -> float:
    """What one layer's gathers and returns take, latency apart, less what computation may hide of them."""
    # Where no plan is possible that holds whatever copies cost.
    return needed if needed == np.inf else needed * priced.cost_s[residency] * (1 - SLACK)


def latencies_s(relaxation: Relaxation, residency: Residency, latency_s: float, latency_back_s: float) -> float:
    """Of one layer's gathers and returns, less all that computation may hide of these."""
    gathers, returns = _moves(relaxation, residency)
    batches, beside_s = relaxation.problem.workload.training.micro_batches, relaxation.problem.beside_s
    hidden_s = min(gathers, batches) * beside_s + returns * 2 * beside_s
    return gathers * latency_s + returns * latency_back_s - hidden_s


def _moves(relaxation: Relaxation, residency: Residency) -> tuple[int, int]:
    return gathers_and_returns(residency, relaxation.problem.workload.training.micro_batches)


def per_copy_s(relaxation: Relaxation, homes: FloatArray) -> dict[Residency, float]:
    """``Priced.cost_s`` for these homes ([K]). Each sends no more than fits into a gather, and into a return. So all together
    send no more than shares of either, for any shares; those are best for which a second of gathers and one of returns bring as
    much for what they cost."""
    kinds, wire = relaxation.classes.kinds, relaxation.problem.wire
    owners = np.flatnonzero(homes)
    up, down = (rate[owners] * kinds.count[owners] for rate in (kinds.up_bytes_per_s, kinds.down_bytes_per_s))
    # Where least goes there of what comes back, what goes there counts.
    order = np.argsort(up / down, kind="stable")
    cost_s = {}
    for residency in relaxation.problem.residencies:
        gathers, returns = _moves(relaxation, residency)
        there, back = up[order] / (wire.expert_bytes * gathers), down[order] / (wire.expert_gradient_bytes * returns)
        gained, lost = np.cumsum(there), back.sum() - np.cumsum(back)
        at = int((gained >= lost).argmax())
        before, after = float(gained[at] - there[at]), float(lost[at] + back[at])
        cost_s[residency] = 1 / (before + (after - before) * float(there[at] / (there[at] + back[at])))
    return cost_s
