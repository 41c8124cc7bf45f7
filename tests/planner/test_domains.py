"""Domain sizes and the paper's Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import permutations, product

import numpy as np
import pytest
from planner_cases import make_cluster

from hybridep.gating import Gating
from hybridep.placement import LevelChoice, divisors, place
from hybridep.traffic import expected_rows
from planner.domains import all_choices, copied_counts, level_choices


class Pattern(Enum):
    """How two ranks of one level exchange work."""

    GATHER = "gather"
    """Same domain: they copy each other's experts."""
    ALL_TO_ALL = "all_to_all"
    """Same offset in different domains: they exchange tokens."""


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


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(12) == (1, 2, 3, 4, 6, 12)


def test_copied_counts() -> None:
    assert copied_counts(1, 4) == (1,)
    assert copied_counts(3, 4) == (1, 2, 3)
    assert copied_counts(8, 4) == (2, 4, 6, 8)
    assert copied_counts(7, 4) == (2, 4, 5, 7)


def test_level_choices_are_distinct_and_end_with_all_experts() -> None:
    choices = level_choices(4, 2, 4)
    assert choices[0] == LevelChoice(domain_size=1, migration_ratio=1.0)
    assert len(set(choices)) == len(choices) == 1 + 2 * 2
    assert choices[-1] == LevelChoice(domain_size=4, migration_ratio=1.0)


def test_all_choices_give_different_tables() -> None:
    cluster = make_cluster(4, 2)
    tables = {tuple(serve.tobytes() for serve in place(cluster, 16, choices).serve) for choices in all_choices(cluster, 16, 4)}
    assert len(tables) == len(all_choices(cluster, 16, 4)) == 5 * 3


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (2, 2, 3)])
def test_algorithm_1_agrees_with_the_serving_tables(sizes: tuple[int, ...]) -> None:
    """Pairs that gather exchange copies; pairs that exchange tokens are those with expected rows. With one expert per
    GPU, moves at inner levels also carry experts on from outer copies, along the same pairs."""
    cluster = make_cluster(*sizes)
    for domain_sizes in product(*(divisors(size) for size in sizes)):
        choices = {f"l{i}": LevelChoice(domain_size=size) for i, size in enumerate(domain_sizes)}
        placed = place(cluster, cluster.num_gpus, choices)
        gathers = {(move.src, move.dst) for move in placed.moves}
        tokens = set()
        for level, rows in enumerate(
            expected_rows(placed, Gating(num_experts=placed.num_experts, top_k=2, sequence_length=8, sequences=(1,)))
        ):
            tokens |= {(int(rank), cluster.peer(int(rank), level, int(c))) for rank, c in np.argwhere(rows)}
        for src, dst in permutations(range(cluster.num_gpus), 2):
            found = pattern(sizes, domain_sizes, src, dst)
            assert ((src, dst) in gathers) == (found is not None and found[1] is Pattern.GATHER)
            assert ((src, dst) in tokens) == (found is not None and found[1] is Pattern.ALL_TO_ALL)


def test_pattern_of_the_papers_example() -> None:
    """4 DCs x 4 GPUs, S_ED = [2, 4] (HybridEP's multilevel example)."""
    sizes, domains = (4, 4), (2, 4)
    assert pattern(sizes, domains, 0, 4) == (0, Pattern.GATHER)
    assert pattern(sizes, domains, 0, 8) == (0, Pattern.ALL_TO_ALL)
    assert pattern(sizes, domains, 0, 12) is None  # another domain, another offset
    assert pattern(sizes, domains, 0, 1) == (1, Pattern.GATHER)
    assert pattern(sizes, domains, 0, 5) is None  # differ at two levels
