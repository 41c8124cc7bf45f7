"""Numbers of micro-batches that suit a pipeline's sites."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hybridep.pipeline import sequences_of_place, token_weights
from hybridep.shares import crowding, sequences_together
from hybridep.topology import Cluster
from hybridep.workload import Workload

BATCHES = (1, 2, 4, 8, 16)
"""Micro-batches as a multiple of the stages, about."""
FEW_BATCHES = (0.25, 0.5)
"""Micro-batches as a share of the stages: fewer may be better where what each pass waits for is most of a step."""
MANY_BATCHES = (32, 64)
"""The same where memory is short: the more micro-batches, the fewer activations each has."""
_MOST_BATCHES = 1024


def unevenness(workload: Workload, cluster: Cluster, groups: Iterable[Sequence[int]]) -> dict[int, float]:
    """Possible numbers of micro-batches for stages of these sites -> how many times as many sequences as its share of them a site
    may have."""
    batch, every = sequences_of_place(workload, cluster), set(token_weights(cluster, groups))
    return {batch // one: max(crowding(one, own) for own in every) for one in reversed(sequences_together(batch, every))}


def numbers_about(possible: Mapping[int, float], stages: int, batches: Sequence[float] = BATCHES) -> list[int]:
    """Numbers of micro-batches that are about so many times the stages, fewest first: ``possible`` ones (``unevenness``)."""
    few = {number: crowded for number, crowded in possible.items() if number <= _MOST_BATCHES}
    return sorted({number_about(few, times * stages) for times in batches})


def beside(possible: Mapping[int, float], number: int) -> list[int]:
    """The possible numbers next to one of them, fewer and more."""
    every = sorted(possible)
    at = every.index(number)
    return [*every[max(at - 1, 0) : at], *every[at + 1 : at + 2]]


def number_about(possible: Mapping[int, float], wanted: float) -> int:
    """The possible number nearest to ``wanted`` by factors, if half as many micro-batches count as much as sites with 1.4 times
    as many sequences."""
    return min(possible, key=lambda number: (math.sqrt(max(number / wanted, wanted / number)) * possible[number], number))
