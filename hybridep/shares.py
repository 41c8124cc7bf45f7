"""How the global batch and the experts' homes are shared out among sites, in whole sequences and experts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from math import isqrt

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


@lru_cache(maxsize=2**16)
def parts(total: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """What ``apportion`` makes of it, remembered."""
    return tuple(apportion(total, np.array(weights)).tolist())


def crowding(total: int, weights: tuple[float, ...]) -> float:
    """How many times as many of ``total`` whole parts as its exact share somebody has."""
    return float(np.max(np.array(parts(total, weights)) / np.array(weights))) * sum(weights) / total


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
            f"sites.{cluster.datacenters[least]}.tokens: {weights[least]:g} is {exact:.2g} sequences per rank and "
            f"micro-batch, and ranks draw whole ones; raise it, or training.micro_batch_size ({mean}, the mean)"
        )
    return tuple(int(number) for number in found)


def batch_sequences(cluster: Cluster, workload: Workload) -> int:
    """Sequences of one micro-batch, all ranks together."""
    return cluster.ranks_per_site * sum(site_sequences(cluster, workload))


def alike_ranks(cluster: Cluster, workload: Workload) -> bool:
    """Whether all sites have equal GPUs and as many sequences and experts for each rank."""
    return cluster.has_alike_ranks and isinstance(workload.training.micro_batch_size, int)


def on_sites(cluster: Cluster, workload: Workload, sites: Collection[str]) -> tuple[Cluster, Workload]:
    """The cluster of some ``sites``, and the workload with the whole cluster's global batch shared out among these, in proportion
    to ``Site.tokens`` and so evenly but for one sequence of a micro-batch where sites have none; in micro-batches of which no
    rank has more sequences than it had, where that is possible. Raises PlacementError where one of the sites would have none, and
    where no experts live at any."""
    kept, training = [site for site, name in enumerate(cluster.site_names) if name in sites], workload.training
    if len(kept) == cluster.sizes[0]:
        return cluster, workload
    if not cluster.home_weights[kept].any():
        raise PlacementError(f"{cluster.name}: no experts live at {', '.join(sites)} (sites.*.experts); leave fewer sites out")
    found, weights = by_themselves(cluster, sites), cluster.token_weights
    of_place = batch_sequences(cluster, workload) * training.micro_batches // cluster.ranks_per_site
    of_each = cluster.sizes[0] * training.micro_batch_size * weights / weights.sum()
    most, own = np.ceil(of_each[kept] - _ROUNDING), tuple(weights[kept].tolist())
    together = sequences_together(of_place, [own])
    if not together:
        raise PlacementError(
            f"{found.name}: {of_place} sequences of a step for a rank of each site leave one of {', '.join(found.site_names)} "
            "without any; give them other shares (sites.*.tokens), or leave it out, too"
        )
    small = [one for one in together if all(np.less_equal(parts(one, own), most))] or together[:1]
    # Of all that suits the shares best, the fewest micro-batches.
    of_batch = min(small, key=lambda one: (round(crowding(one, own), 9), -one))
    update = {"micro_batch_size": of_batch / len(own), "micro_batches": of_place // of_batch}
    changed = build(Training, training.model_dump(mode="json") | update, "training")
    return found, workload.model_copy(update={"training": changed})


def sequences_together(batch: int, groups: Iterable[Sequence[float]]) -> list[int]:
    """Sequences that a micro-batch may have, fewest first, counted of one rank of each site together, so that none of the sites
    of a group is without. ``batch``: sequences of a step, counted likewise; ``groups``: the sites' ``Site.tokens`` in each."""
    every = {tuple(group) for group in groups}
    fewest = max((len(group) for group in every), default=1)
    uneven = [group for group in every if len(set(group)) > 1]
    small = [number for number in range(1, isqrt(batch) + 1) if batch % number == 0]
    found = sorted({one for number in small for one in (number, batch // number) if one >= fewest})
    return [one for one in found if all(all(parts(one, group)) for group in uneven)]


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


def spread(loads: FloatArray, room: IntArray, group: IntArray) -> IntArray:
    """[N]: into which of B bins each of these ``loads`` ([N]) goes: the largest first, each into the bin that has least of those
    with ``room`` left ([B], for so many of them), then of the group of bins ([B]) that has least, then the first."""
    of_bin, of_group, left = np.zeros(len(room)), np.zeros(int(group.max()) + 1), room.copy()
    found = np.empty(len(loads), dtype=np.int64)
    for item in np.argsort(-loads, kind="stable"):
        free = np.flatnonzero(left)
        found[item] = chosen = free[np.lexsort((free, of_group[group[free]], of_bin[free]))[0]]
        left[chosen] -= 1
        of_bin[chosen] += loads[item]
        of_group[group[chosen]] += loads[item]
    return found
