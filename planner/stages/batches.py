"""Numbers of micro-batches that suit a pipeline's sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hybridep.pipeline import possible_micro_batches, sequences_of_place
from hybridep.topology import Cluster
from hybridep.workload import Workload

BATCHES = (1, 2, 4, 8, 16)
"""Micro-batches as a multiple of the stages, about."""
FEW_BATCHES = (0.25, 0.5)
"""Micro-batches as a share of the stages: fewer may be better where what each pass waits for is most of a step."""
MANY_BATCHES = (32, 64)
"""The same where memory is short: the more micro-batches, the fewer activations each has."""
_MOST_BATCHES = 1024


def unevenness(workload: Workload, cluster: Cluster, sites_per_stage: Sequence[int]) -> dict[int, float]:
    """Possible numbers of micro-batches -> how many times as many sequences as its stage's mean a site may have."""
    batch, sizes = sequences_of_place(workload, cluster), set(sites_per_stage)
    return {
        number: max(-(-batch // number // size) * size * number / batch for size in sizes)
        for number in possible_micro_batches(workload, cluster, sites_per_stage)
    }


def numbers_about(possible: Mapping[int, float], stages: int, batches: Sequence[float] = BATCHES) -> list[int]:
    """Numbers of micro-batches that are about so many times the stages, fewest first: ``possible`` ones (``unevenness``)."""
    few = {number: crowded for number, crowded in possible.items() if number <= _MOST_BATCHES}
    return sorted({number_about(few, times * stages) for times in batches})


def number_about(possible: Mapping[int, float], wanted: float) -> int:
    """The possible number nearest to ``wanted`` by factors, if half as many micro-batches count as much as sites with 1.4 times
    as many sequences."""
    return min(possible, key=lambda number: (math.sqrt(max(number / wanted, wanted / number)) * possible[number], number))
