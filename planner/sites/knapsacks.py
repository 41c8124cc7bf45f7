"""The bound of one box by weights on the links, which anyone can evaluate with a sort.

For any weights on the links, which add up to what a second on the busiest link costs,

    sum_links weight * (rows over the link / its bandwidth)

is at most the time of the token exchanges. With chords in place of chances (``planner.sites.relaxation``), minimised over the
numbers n[d, h] of experts that site h serves for tokens of site d, with sum_h n[d, h] = E and n[d, h] <= N[d, h], this splits by
d into fractional knapsacks, solved by sorting. Where the weights come from does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep.traffic import FloatArray
from planner.sites.boxes import Box
from planner.sites.relaxation import Limits, Relaxation


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """What a second on each link costs, all of them at least zero (dual variables); equal in each class of sites."""

    out: FloatArray
    """[C]: up links, tokens on their way to experts (dispatch, combine backward)."""
    into: FloatArray
    """[C]: down links, likewise."""
    back_out: FloatArray
    """[C]: up links, results on their way back (combine, dispatch backward)."""
    back_into: FloatArray
    """[C]: down links, likewise."""
    compute: FloatArray
    """[C]: expert computation of the site's ranks."""


def even_weights(relaxation: Relaxation) -> Weights:
    """Every up and every down link alike: a first guess."""
    size, num = relaxation.problem.num_sites, len(relaxation.classes.count)
    forward, back, compute = relaxation.budgets_s
    one = np.ones(num)
    return Weights(
        out=one * forward / (2 * size),
        into=one * forward / (2 * size),
        back_out=one * back / (2 * size),
        back_into=one * back / (2 * size),
        compute=one * compute / size,
    )


def knapsacks_s(relaxation: Relaxation, box: Box, weights: Weights) -> float:
    """No plan of the box spends less in one layer; infinite when the box is empty. Raises ValueError for negative weights (which
    prove nothing); too large ones are scaled down first."""
    if any((a < 0).any() for a in (weights.out, weights.into, weights.back_out, weights.back_into, weights.compute)):
        raise ValueError("weights of a bound must be at least zero")
    weights, limits = _within_budget(relaxation, weights), relaxation.limits(box)
    if not limits.possible(relaxation.classes):
        return float("inf")
    own, taken, costs = _cheapest(relaxation, limits, weights)
    if (own + taken.sum(axis=1) < relaxation.problem.num_experts - 1e-6).any():
        return float("inf")
    each = own * weights.compute * relaxation.expert_s + (taken * costs).sum(axis=1)
    latency_s, latency_back_s = relaxation.copy_latency_s(box)
    copies_s = relaxation.copies_s(box.residency, latency_s + box.gather_s[0], latency_back_s + box.return_s[0])
    return copies_s + relaxation.token_latency_of(box) + float(each @ relaxation.classes.count)


def _within_budget(relaxation: Relaxation, weights: Weights) -> Weights:
    """Scaled down where weights add up to more than a second on the busiest link costs; then they prove something."""
    forward, back, compute = relaxation.budgets_s
    count = relaxation.classes.count
    a = _scale(float((weights.out + weights.into) @ count), forward)
    b = _scale(float((weights.back_out + weights.back_into) @ count), back)
    c = _scale(float(weights.compute @ count), compute)
    return Weights(
        out=weights.out * a,
        into=weights.into * a,
        back_out=weights.back_out * b,
        back_into=weights.back_into * b,
        compute=weights.compute * c,
    )


def _scale(total: float, budget: float) -> float:
    return budget / total if total > budget else 1.0


def _cheapest(relaxation: Relaxation, limits: Limits, weights: Weights) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Fractional knapsacks: (experts that a site of each class serves itself [C], experts that it finds at all sites of each
    other class [C, C], their unit costs [C, C], in seconds per layer)."""
    experts, classes = float(relaxation.problem.num_experts), relaxation.classes
    # Of a class's links each has its part of the weight, in proportion to its rate.
    up, down = classes.mean(classes.kinds.up_bytes_per_s), classes.mean(classes.kinds.down_bytes_per_s)
    user = weights.out / up + weights.back_into / down
    holder = weights.into / down + weights.back_out / up
    compute = weights.compute * relaxation.expert_s
    costs = (user[:, None] + holder[None, :]) * relaxation.unit_rows(limits) + compute[None, :]
    size = len(classes.count)
    # The last column is the site itself, which needs no link.
    all_costs = np.column_stack([costs, compute])
    caps = np.column_stack([classes.mean(limits.most_found) * classes.others, classes.mean(limits.most_held)])
    order = np.argsort(all_costs, axis=1, kind="stable")
    sorted_caps = np.take_along_axis(caps, order, axis=1)
    before = np.cumsum(sorted_caps, axis=1) - sorted_caps
    taken = np.empty_like(caps)
    np.put_along_axis(taken, order, np.clip(experts - before, 0.0, sorted_caps), axis=1)
    return taken[:, size], taken[:, :size], costs
