"""Expert domains: which sizes a level allows, and who talks to whom (HybridEP, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import product

import numpy as np

from hybridep.placement import LevelChoice, home_blocks
from hybridep.topology import Cluster


class Pattern(Enum):
    """How two ranks of one level exchange work."""

    GATHER = "gather"
    """Same domain: they copy each other's experts."""
    ALL_TO_ALL = "all_to_all"
    """Same offset in different domains: they exchange tokens."""


def divisors(size: int) -> tuple[int, ...]:
    """Domain sizes of a level of ``size`` workers, ascending."""
    return tuple(d for d in range(1, size + 1) if size % d == 0)


def pattern(sizes: Sequence[int], domain_sizes: Sequence[int], src: int, dst: int) -> tuple[int, Pattern] | None:
    """(level, pattern) of two global ranks, or None when they do not exchange anything directly.

    HybridEP, Algorithm 1, with the condition that its pseudocode leaves out: the two locations differ at exactly one
    level (the algorithm compares the levels below only, so it would also join ranks whose outer locations differ).
    """
    a = np.array(np.unravel_index(src, tuple(sizes)))
    b = np.array(np.unravel_index(dst, tuple(sizes)))
    different = np.flatnonzero(a != b)
    if len(different) != 1:
        return None
    level = int(different[0])
    size = domain_sizes[level]
    if a[level] // size == b[level] // size:
        return level, Pattern.GATHER
    if a[level] % size == b[level] % size:
        return level, Pattern.ALL_TO_ALL
    return None


def copied_counts(num_at_home: int, max_steps: int) -> tuple[int, ...]:
    """Numbers of experts of the fullest home worth trying, ascending from 1: all of 1..n when n <= ``max_steps``, else
    ``max_steps`` numbers spread evenly that end with n."""
    if num_at_home <= max_steps:
        return tuple(range(1, num_at_home + 1))
    return tuple(sorted({max(1, round(num_at_home * step / max_steps)) for step in range(1, max_steps + 1)}))


def level_choices(size: int, num_at_home: int, max_steps: int) -> tuple[LevelChoice, ...]:
    """Distinct choices of one level: domain size and share of each home's experts that are copied. Nothing is copied with
    a size of 1, so that one has no further variants."""
    counts = copied_counts(num_at_home, max_steps)
    partial = [
        LevelChoice(domain_size=d, migration_ratio=count / num_at_home) for d in divisors(size) if d > 1 for count in counts
    ]
    return (LevelChoice(), *partial)


def all_choices(cluster: Cluster, num_experts: int, max_steps: int) -> tuple[dict[str, LevelChoice], ...]:
    """Every combination of the levels' choices, by level name."""
    num_at_home = int(np.bincount(home_blocks(cluster, num_experts)).max())
    names = [level.name for level in cluster.levels]
    choices = [level_choices(size, num_at_home, max_steps) for size in cluster.sizes]
    return tuple(dict(zip(names, combination, strict=True)) for combination in product(*choices))
