"""Sites that may change places with each other: pipelines that differ in nothing else are one to a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from hybridep.topology import Cluster
from planner.sites.grouping import Groups


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
    """Sites are of one kind where they have the same GPUs, shares, access links and prices, and nothing else tells them apart: no
    links of pairs, no trunks, and no rules (``ruled``)."""
    size = cluster.sizes[0]
    if ruled or cluster.links or cluster.trunks:
        return Kinds(tuple(range(size)))
    numbers, found = count(), dict[str, int]()
    texts = [repr(site.model_copy(update={"name": ""})) for site in cluster.sites] or [""] * size
    return Kinds(tuple(found[text] if text in found else found.setdefault(text, next(numbers)) for text in texts))
