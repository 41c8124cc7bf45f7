"""Sites that may change places with each other: pipelines that differ in nothing else are one to a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.topology import Cluster
from planner.sites.grouping import Groups

_MOST_FIGURES = 10_000_000
"""Of trunks and pairs that are compared: 80 MB."""


@dataclass(frozen=True)
class Kinds:
    """Which sites are of one kind."""

    of_site: tuple[int, ...]
    """[D]: numbered as the first site of each comes."""

    def one_of_each(self, group: tuple[int, ...]) -> Iterator[int]:
        """The first site of each kind that is in a group."""
        return iter({self.of_site[site]: site for site in reversed(group)}.values())

    def settled(self, path: Groups) -> Groups:
        """The same pipeline, each kind's sites in the cluster's order along the path; ``path`` itself where all sites differ."""
        if len(self._members) == len(self.of_site):
            return path
        left = list(map(iter, self._members))
        return tuple(tuple(sorted(next(left[self.of_site[site]]) for site in group)) for group in path)

    @cached_property
    def _members(self) -> list[list[int]]:
        """[kinds]: the sites of each."""
        members: list[list[int]] = [[] for _ in range(max(self.of_site) + 1)]
        for site, kind in enumerate(self.of_site):
            members[kind].append(site)
        return members


def kinds_of(cluster: Cluster, *, ruled: bool) -> Kinds:
    """Sites are of one kind where they have the same GPUs, shares, access links and prices, and all others the same ways to each,
    as a site's pods do. With rules (``ruled``) all differ, and with more than ``_MOST_FIGURES`` of trunks and pairs."""
    size, numbers = cluster.sizes[0], count()
    own = [repr(site.model_copy(update={"name": ""})) for site in cluster.sites] or [""] * size
    ways = np.zeros((0, size, size))
    if ruled or size**2 * len(cluster.trunks) > _MOST_FIGURES:
        return Kinds(tuple(range(size)))
    if cluster.links or cluster.trunks:
        pairs = np.ones((size, size)) if cluster.pair_bytes_per_s is None else cluster.pair_bytes_per_s
        trunks = cluster.trunk_shares.toarray().reshape(-1, size, size)
        ways = np.concatenate([[pairs, cluster.site_latency_s, cluster.egress_usd_per_byte], trunks])
    found, firsts = list[int](), dict[tuple[str, bytes], list[int]]()
    for site, text in enumerate(own):
        # Only those with the same figures in any order are compared.
        same = firsts.setdefault((text, np.sort(ways[:, site]).tobytes()), [])
        like = next((first for first in same if _may_be_swapped(ways, site, first)), None)
        if like is None:
            same.append(site)
        found.append(next(numbers) if like is None else found[like])
    return Kinds(tuple(found))


def _may_be_swapped(ways: FloatArray, site: int, other: int) -> bool:
    """Whether figures of all pairs, [figures, D, D], stay the same where two sites change names."""
    order = np.arange(ways.shape[1])
    order[[site, other]] = other, site
    return bool((ways[:, site, order] == ways[:, other]).all() and (ways[:, order, site] == ways[:, :, other]).all())
