"""The oracle: try every way to give configurations to layers. For tiny problems only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

from planner.problem import Problem


def brute_force(problem: Problem) -> tuple[tuple[int, ...], float] | None:
    """(layers per candidate, step's seconds, or dollars if those are the goal) of the best choice that fits and the budget
    allows; None when there is none. Looks at C(layers + candidates - 1, layers) choices."""
    best: tuple[tuple[int, ...], float] | None = None
    for counts in distributions(problem.num_layers, len(problem.candidates)):
        value = problem.value(counts)
        if (best is None or value < best[1]) and problem.fits(counts) and problem.affords(counts):
            best = counts, value
    return best


def distributions(num_layers: int, num_candidates: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``num_layers`` as an ordered sum of ``num_candidates`` numbers of at least zero."""
    for bars in combinations(range(num_layers + num_candidates - 1), num_candidates - 1):
        edges = (-1, *bars, num_layers + num_candidates - 1)
        yield tuple(right - left - 1 for left, right in pairwise(edges))
