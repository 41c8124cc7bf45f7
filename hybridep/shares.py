"""How the global batch and the experts' homes are shared out among sites, in whole sequences and experts."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from hybridep.errors import PlacementError
from hybridep.topology import Cluster, by_themselves
from hybridep.workload import Workload


def apportion(total: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """``total`` in whole parts in proportion to ``weights`` [n]: the largest remainders are rounded up, the first of equals."""
    exact = total * weights / weights.sum()
    whole: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    rest = np.argsort(np.round(whole - exact, 9), kind="stable")[: total - int(whole.sum())]
    whole[rest] += 1
    return whole


def site_sequences(cluster: Cluster, workload: Workload) -> tuple[int, ...]:
    """[DCs]: sequences that each rank of a site draws in one micro-batch: ``training.micro_batch_size`` on average, in proportion
    to ``Site.tokens``, the largest remainders rounded up. So the global batch is the same whatever the shares.

    Raises PlacementError where a site's share is less than one sequence.
    """
    size, mean = cluster.levels[0].size, workload.training.micro_batch_size
    weights = cluster.token_weights
    if np.ptp(weights) == 0:
        return (mean,) * size
    found = apportion(size * mean, weights)
    if not found.all():
        least = int(found.argmin())
        exact = size * mean * weights[least] / weights.sum()
        raise PlacementError(
            f"sites.{cluster.site_name(least)}.tokens: {weights[least]:g} is {exact:.2g} sequences per rank and "
            f"micro-batch, and ranks draw whole ones; raise it, or training.micro_batch_size ({mean}, the mean)"
        )
    return tuple(int(number) for number in found)


def on_sites(cluster: Cluster, workload: Workload, sites: Collection[str]) -> tuple[Cluster, Workload]:
    """The same training on some of a cluster's sites, which share out the same global batch, in micro-batches that are at most as
    large. Raises PlacementError where they cannot, in whole sequences, or where sites have unequal shares."""
    if np.ptp(cluster.token_weights) or np.ptp(cluster.home_weights):
        raise PlacementError(f"{cluster.name}: its sites have shares of tokens or experts, of which none can be left out")
    found, training = by_themselves(cluster, sites), workload.training
    batch = training.micro_batch_size * training.micro_batches * cluster.num_gpus
    each, rest = divmod(batch, found.num_gpus)
    if rest or not each:
        raise PlacementError(f"{found.num_gpus} ranks of {cluster.name} cannot share {batch} sequences of a step evenly")
    size = max(number for number in range(1, training.micro_batch_size + 1) if each % number == 0)
    changed = training.model_copy(update={"micro_batch_size": size, "micro_batches": each // size})
    return found, workload.model_copy(update={"training": changed})


def site_shares(cluster: Cluster, workload: Workload) -> NDArray[np.float64]:
    """[DCs]: tokens of a rank of each site as a multiple of the mean."""
    return np.array(site_sequences(cluster, workload)) / workload.training.micro_batch_size


def first_sequence(cluster: Cluster, workload: Workload, rank: int) -> int:
    """Where a rank's sequences begin in the global batch of one micro-batch: those of the ranks before it come first."""
    sequences, inside = site_sequences(cluster, workload), cluster.num_gpus // cluster.levels[0].size
    dc, place = divmod(rank, inside)
    return inside * sum(sequences[:dc]) + place * sequences[dc]
