"""How exactly a training step is simulated, and what is given up for speed among thousands of different sites."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.topology import Cluster
from simulator.network import EXACT
from simulator.sent import Sent, dense


@dataclass(frozen=True, kw_only=True)
class Precision:
    """As exactly as numbers allow, unless something else is asked for."""

    tolerance: float = EXACT
    """Share of its bytes by which a transfer may differ to end together with another."""
    one_rank_per_site: bool = False
    """Whether the ranks of a site are taken for alike: each sends and gets the site's mean between sites, and inside as many
    bytes, and computes for as long, as the busiest of them. Between sites each pair carries the bytes that it carries."""


EXACTLY = Precision()


def mean_between_sites(cluster: Cluster, sent: Sent) -> FloatArray:
    """[ranks, sites] bytes of each rank to each site, as many as the ranks of its site send there on average."""
    num_sites = cluster.sizes[0]
    per_site = cluster.ranks_per_site
    return np.repeat(dense(sent).reshape(num_sites, per_site, num_sites).mean(axis=1), per_site, axis=0)


def busiest_inside(cluster: Cluster, level: int, sent: Sent) -> FloatArray:
    """[ranks, coordinates of the level] bytes inside sites: what the site's busiest worker of the level sends or gets, by each
    of them, evenly by its ranks and to all others."""
    size, below = cluster.sizes[level], cluster.stride(level)
    worker = np.arange(cluster.num_gpus) // below
    # [workers, coordinates]
    moved = np.add.reduceat(dense(sent), np.arange(0, cluster.num_gpus, below), axis=0)
    moved[np.arange(moved.shape[0]), worker[::below] % size] = 0.0
    got = moved.reshape(-1, size, size).sum(axis=1).ravel()
    busy = np.maximum(moved.sum(axis=1), got).reshape(cluster.sizes[0], -1).max(axis=1)
    # A level of one worker has nothing to send.
    each = np.repeat(busy, cluster.ranks_per_site) / (below * max(size - 1, 1))
    spread = np.repeat(each[:, None], size, axis=1)
    spread[np.arange(cluster.num_gpus), worker % size] = 0.0
    return spread


def most_of_site(cluster: Cluster, each: FloatArray) -> FloatArray:
    """[ranks] of each rank, the largest of its site."""
    per_site = cluster.ranks_per_site
    return np.repeat(each.reshape(-1, per_site).max(axis=1), per_site)
