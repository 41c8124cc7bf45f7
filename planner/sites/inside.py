"""What a layer spends inside sites at least, for each choice of who holds experts there.

At a level whose workers all hold what their site holds, every one of them gets every expert. At a level where one worker holds
each, the tokens of all others that need one of its experts come to it. Links of one level are equally wide, so the busiest one
takes at least as long as all together do on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from planner.sites.problem import Inside, SiteProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class InsideTimes:
    """Of one choice for the levels inside sites, at least."""

    gather_s: FloatArray
    """[E + 1] of one gather of copies, by how many experts a site holds."""
    return_s: FloatArray
    """[E + 1] likewise, of one return of gradients."""
    token_s: FloatArray
    """[E + 1] of one layer's token exchanges in a step, for each token of a rank and micro-batch, by how many experts a site
    serves for its own tokens; their latency apart."""
    latency_s: float
    """Of one layer's token exchanges in a step, if there are any."""


def inside_times(problem: SiteProblem) -> tuple[InsideTimes, ...]:
    """Of all choices."""
    return tuple(_of_choice(problem, one) for one in dict.fromkeys(each.inside for each in problem.configurations()))


def _of_choice(problem: SiteProblem, inside: tuple[Inside, ...]) -> InsideTimes:
    n, home, batches = problem.num_inside, problem.home_inside, problem.workload.training.micro_batches
    experts = np.arange(problem.num_experts + 1)
    gather_s, return_s, token_s = np.zeros((3, len(experts)))
    latency_s = 0.0
    # At how many places a site has each expert after the levels so far, and at which of those that levels with one holder tell
    # apart it is.
    copied = 1
    place = np.zeros(problem.num_experts, dtype=np.int64)
    for depth, (width, one) in enumerate(zip(problem.inner_sizes, inside, strict=True)):
        if width == 1:
            continue
        workers, rate = problem.inner_links[depth]
        wire, late_s = problem.wires[depth + 1], problem.cluster.levels[depth + 1].latency
        below = n // workers
        told_apart = place * width + home // below % width
        at_place = np.bincount(told_apart)
        if one is Inside.ALL:
            arrive_s = max((width - 1) * copied / (links * each) for links, each in problem.inner_links[depth:])
            busiest_s = np.maximum(experts * arrive_s, (width - 1) * _fullest(at_place) / rate)
            gather_s += np.where(experts > 0, late_s + busiest_s * wire.expert_bytes, 0.0)
            return_s += np.where(experts > 0, late_s + busiest_s * wire.expert_gradient_bytes, 0.0)
            copied *= width
        else:
            row_bytes = wire.row_there_bytes + wire.row_back_bytes
            # As many ranks' tokens meet at a place as there are places but for this level's, so their mean has only its width.
            rows = (width - 1) / width * below * _fewest_rows(at_place, problem.hit)
            token_s += batches * row_bytes * rows / rate
            latency_s += 4 * batches * late_s
            place = told_apart
    return InsideTimes(gather_s=gather_s, return_s=return_s, token_s=token_s, latency_s=latency_s)


def _fullest(at_place: IntArray) -> FloatArray:
    """[E + 1]: experts at the fullest place, at least, of 0, 1, .. E that a site holds, when no place has more than these."""
    fullest = np.arange(at_place.max() + 1)
    room = np.minimum(fullest[:, None], at_place).sum(axis=1)
    return np.searchsorted(room, np.arange(at_place.sum() + 1)).astype(np.float64)


def _fewest_rows(at_place: IntArray, hit: FloatArray) -> FloatArray:
    """[E + 1]: rows of a token to all places together, at least, for 0, 1, .. E experts: P is concave, so few places with as many
    as they can have take fewest."""
    largest = np.sort(at_place)[::-1]
    full = np.concatenate([[0], np.cumsum(largest)])
    rows = np.concatenate([[0.0], np.cumsum(hit[largest])])
    experts = np.arange(full[-1] + 1)
    before = np.searchsorted(full, experts, side="right") - 1
    return np.asarray(rows[before] + hit[experts - full[before]])
