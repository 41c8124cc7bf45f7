"""The oracle: try every way to give configurations to layers. For tiny problems only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

from planner.problem import Problem


def brute_force(problem: Problem) -> tuple[tuple[int, ...], float] | None:
    """(layers per candidate, step seconds) of the fastest choice that fits; None when none fits. Looks at
    C(layers + candidates - 1, layers) choices."""
    best: tuple[tuple[int, ...], float] | None = None
    for counts in distributions(problem.num_layers, len(problem.candidates)):
        objective_s = problem.objective_s(counts)
        if (best is None or objective_s < best[1]) and problem.fits(counts):
            best = counts, objective_s
    return best


def distributions(num_layers: int, num_candidates: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``num_layers`` as an ordered sum of ``num_candidates`` numbers of at least zero."""
    for bars in combinations(range(num_layers + num_candidates - 1), num_candidates - 1):
        edges = (-1, *bars, num_layers + num_candidates - 1)
        yield tuple(right - left - 1 for left, right in pairwise(edges))
