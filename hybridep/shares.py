"""How the global batch and the experts' homes are shared out among sites, in whole sequences and experts."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil, isqrt

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.config import build
from hybridep.errors import PlacementError
from hybridep.topology import Cluster, by_themselves
from hybridep.workload import Training, Workload

_ROUNDING = 1e-9


def apportion(total: int, weights: FloatArray) -> IntArray:
    """``total`` in whole parts in proportion to ``weights`` [n]: the largest remainders are rounded up, the first of equals."""
    exact = total * weights / weights.sum()
    whole: IntArray = np.floor(exact + 1e-9).astype(np.int64)
    rest = np.argsort(np.round(whole - exact, 9), kind="stable")[: total - int(whole.sum())]
    whole[rest] += 1
    return whole


def site_sequences(cluster: Cluster, workload: Workload) -> tuple[int, ...]:
    """[DCs]: sequences that each rank of a site draws in one micro-batch: ``training.micro_batch_size`` on average, in proportion
    to ``Site.tokens``, the largest remainders rounded up. So the global batch is the same whatever the shares.

    Raises PlacementError where a site's share is less than one sequence, and where those of all sites are no whole number.
    """
    size, mean = cluster.levels[0].size, workload.training.micro_batch_size
    weights = cluster.token_weights
    if np.ptp(weights) == 0 and isinstance(mean, int):
        return (mean,) * size
    total = round(size * mean)
    if abs(size * mean - total) > _ROUNDING * total:
        raise PlacementError(
            f"training.micro_batch_size: {mean:g} on average are {size * mean:g} for {size} ranks, one of each site of "
            f"{cluster.name}, and ranks draw whole sequences; choose one of which {size} make a whole number"
        )
    found = apportion(total, weights)
    if not found.all():
        least = int(found.argmin())
        exact = size * mean * weights[least] / weights.sum()
        raise PlacementError(
            f"sites.{cluster.site_name(least)}.tokens: {weights[least]:g} is {exact:.2g} sequences per rank and "
            f"micro-batch, and ranks draw whole ones; raise it, or training.micro_batch_size ({mean}, the mean)"
        )
    return tuple(int(number) for number in found)


def batch_sequences(cluster: Cluster, workload: Workload) -> int:
    """Sequences of one micro-batch, all ranks together."""
    return cluster.ranks_per_site * sum(site_sequences(cluster, workload))


def unequal_shares(cluster: Cluster) -> bool:
    """Sites are given more of the batch, or of the experts, than others."""
    return bool(np.ptp(cluster.token_weights) or np.ptp(cluster.home_weights))


def alike_ranks(cluster: Cluster, workload: Workload) -> bool:
    """Whether all sites have equal GPUs and as many sequences and experts for each rank."""
    return cluster.has_alike_ranks and isinstance(workload.training.micro_batch_size, int)


def on_sites(cluster: Cluster, workload: Workload, sites: Collection[str]) -> tuple[Cluster, Workload]:
    """The cluster of some ``sites``, and the workload with the whole cluster's global batch shared out among these: evenly but
    for one sequence of a micro-batch, in micro-batches that are at most as large, where that is possible. Raises PlacementError
    where sites have unequal shares."""
    if unequal_shares(cluster):
        raise PlacementError(
            f"{cluster.name}: its sites have unequal shares (sites.*.tokens, sites.*.experts), of which none can be left out"
        )
    found, training = by_themselves(cluster, sites), workload.training
    most = ceil(training.micro_batch_size)  # that some rank has
    batch, number = batch_sequences(cluster, workload) * training.micro_batches, found.levels[0].size
    each, rest = divmod(batch, found.num_gpus)
    if rest:
        of_place = batch * number // found.num_gpus
        together = sequences_together(of_place, number)
        of_batch = max([one for one in together if ceil(one / number) <= most], default=together[0])
        update = {"micro_batch_size": of_batch / number, "micro_batches": of_place // of_batch}
    else:
        size = max(one for one in range(1, most + 1) if each % one == 0)
        update = {"micro_batch_size": size, "micro_batches": each // size}
    changed = build(Training, training.model_dump(mode="json") | update, "training")
    return found, workload.model_copy(update={"training": changed})


def of_sites(cluster: Cluster, workload: Workload, sites: Collection[str]) -> Workload:
    """The workload in which ``sites`` by themselves have the sequences together that they have among all of the cluster's."""
    sequences = zip(cluster.site_names, site_sequences(cluster, workload), strict=True)
    mine = [number for name, number in sequences if name in sites]
    mean = sum(mine) // len(mine) if sum(mine) % len(mine) == 0 else sum(mine) / len(mine)
    return workload.model_copy(update={"training": workload.training.model_copy(update={"micro_batch_size": mean})})


def sequences_together(batch: int, sites: int) -> list[int]:
    """Sequences that a micro-batch may have, fewest first, counted of one rank of each site together, so that none of so many
    sites is without. ``batch``: sequences of a step, counted likewise."""
    small = [number for number in range(1, isqrt(batch) + 1) if batch % number == 0]
    return sorted({one for number in small for one in (number, batch // number) if one >= sites})


def site_shares(cluster: Cluster, workload: Workload) -> FloatArray:
    """[DCs]: tokens of a rank of each site as a multiple of the mean."""
    return np.array(site_sequences(cluster, workload)) / workload.training.micro_batch_size


def first_sequence(cluster: Cluster, workload: Workload, rank: int) -> int:
    """Where a rank's sequences begin in the global batch of one micro-batch, as ``owners`` has them."""
    sequences, inside = site_sequences(cluster, workload), cluster.ranks_per_site
    dc, place = divmod(rank, inside)
    return place * sum(sequences) + sum(sequences[:dc])


def owners(cluster: Cluster, workload: Workload) -> tuple[IntArray, IntArray]:
    """[B] each: the rank that has each sequence of one micro-batch, and which one of its own that is. The sites' first ranks have
    the first sequences, then their second ones: so whatever sites share a batch, a sequence has the same place in all of them."""
    sequences, inside = site_sequences(cluster, workload), cluster.ranks_per_site
    first = np.repeat(inside * np.arange(len(sequences)), sequences)
    rank = (first + np.arange(inside)[:, None]).ravel()
    return rank, np.tile(np.concatenate([np.arange(number) for number in sequences]), inside)
