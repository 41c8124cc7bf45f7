"""Which rank owns which experts, as people write it: site or worker -> experts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hybridep.arrays import IntArray
from hybridep.errors import PlacementError
from hybridep.placement import expert_homes, home_blocks
from hybridep.serving import format_experts, parse_experts
from hybridep.topology import Cluster


def home_table(cluster: Cluster, num_experts: int, homes: Mapping[str, str]) -> IntArray:
    """[E]: the rank that owns each expert. ``homes`` maps a worker of any level (``us-east``, ``us-east/gpu3``) to the experts
    that live there, as in ``0-3,8``; those of a worker with several ranks are spread over them in even blocks.

    Raises PlacementError for an unknown worker, and an expert without or with two homes. Ranks without experts are fine.
    """
    if not homes:
        return home_blocks(cluster, num_experts)
    ranks = _workers(cluster)
    table = np.full(num_experts, -1, dtype=np.int64)
    for name, text in homes.items():
        if name not in ranks:
            raise PlacementError(
                f"homes: no worker {name!r} in cluster {cluster.name}; names are like {', '.join(list(ranks)[:4])}"
            )
        experts = parse_experts(text, num_experts)
        if len(taken := experts[table[experts] >= 0]):
            raise PlacementError(f"homes: expert {taken[0]} has two homes, the second is {name}")
        first, number = ranks[name]
        table[experts] = first + expert_homes(len(experts), number)
    if (table < 0).any():
        raise PlacementError(f"homes: expert {int(np.argmax(table < 0))} has no home")
    return table


def homes_text(cluster: Cluster, home: IntArray) -> dict[str, str]:
    """What ``home_table`` turns into ``home`` ([E] ranks): a line for each rank that has experts, or none for its blocks."""
    if np.array_equal(home, home_blocks(cluster, len(home))):
        return {}
    return {
        cluster.worker_name(cluster.location(int(rank))): format_experts(np.flatnonzero(home == rank)) for rank in np.unique(home)
    }


def _workers(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Worker name -> its first rank and its number of ranks, outermost level first."""
    found: dict[str, tuple[int, int]] = {}
    number = cluster.num_gpus
    for depth, size in enumerate(cluster.sizes):
        number //= size
        for first in range(0, cluster.num_gpus, number):
            found.setdefault(cluster.worker_name(cluster.location(first)[: depth + 1]), (first, number))
    return found
