"""Sites taken together in bounds: equal ones, and among many different ones similar ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybridep.placement import IntArray
from hybridep.traffic import FloatArray
from planner.sites.problem import SiteProblem

MOST_SITES = 64
"""So many sites with links or latencies of their own are each a class of their own."""

MOST_CLASSES = 49
"""More different sites than this are merged, at the price of a weaker bound."""

FINER = 6
"""Of four bands the first holds 4 ** -6 of the sites, the first two 2 ** -6: the slowest links decide how long a step takes, and
a class is as fast as its fastest member."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteClasses:
    """C classes of sites. Each has the best its members have of everything, so that a bound for sites like these holds
    for the true ones; where members are equal nothing is lost."""

    label: IntArray
    """[D]: the class of each site."""
    count: FloatArray
    """[C]."""
    up_bytes_per_s: FloatArray
    """[C]."""
    down_bytes_per_s: FloatArray
    """[C]."""
    homes: FloatArray
    """[C]: experts at home."""
    latency_s: FloatArray
    """[C, C] between different sites of two classes (or of one)."""
    pair_bytes_per_s: FloatArray | None
    """[C, C]; only where every site is a class."""

    @property
    def others(self) -> FloatArray:
        """[C, C]: how many sites of the column's class are others to a site of the row's."""
        return np.asarray(self.count[None, :] - np.eye(len(self.count)))

    @property
    def merged(self) -> bool:
        """Some class has several sites."""
        return bool((self.count > 1).any())

    def best(self, values: FloatArray) -> FloatArray:
        """[C]: the largest of each class."""
        largest = np.full(len(self.count), -np.inf)
        np.maximum.at(largest, self.label, values)
        return largest


def site_classes(problem: SiteProblem) -> SiteClasses:
    """Equal sites together; where more than ``MOST_CLASSES`` differ, those with similar access links."""
    size = problem.num_sites
    alike = problem.alike_paths and size > 1
    label = np.arange(size)
    if alike:
        ranks = problem.tokens, problem.expert_s_per_choice, problem.compute.memory_bytes[:, 0]
        keys = np.column_stack([problem.up_bytes_per_s, problem.down_bytes_per_s, problem.homes, *ranks])
        label = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    if label.max(initial=0) >= (MOST_CLASSES if alike else MOST_SITES):
        side = int(np.sqrt(MOST_CLASSES / 2))
        band = _bands(problem.up_bytes_per_s, side)
        label = band * side
        for one in range(side):
            label[band == one] += _bands(problem.down_bytes_per_s[band == one], side)
        label = 2 * label + (problem.homes > problem.homes.min())
    _, label, count = np.unique(label, return_inverse=True, return_counts=True)
    num = len(count)
    shortest = np.full((num, num), np.inf)
    if problem.one_latency_s is not None:
        shortest[~np.eye(num, dtype=np.bool_) | (count > 1)] = problem.one_latency_s
    else:
        row, column = np.nonzero(~np.eye(size, dtype=np.bool_))
        np.minimum.at(shortest, (label[row], label[column]), problem.latency_s[row, column])
    made = SiteClasses(
        label=label,
        count=count.astype(np.float64),
        up_bytes_per_s=problem.up_bytes_per_s,
        down_bytes_per_s=problem.down_bytes_per_s,
        homes=problem.homes.astype(np.float64),
        latency_s=np.where(np.isfinite(shortest), shortest, 0.0),
        pair_bytes_per_s=None if num < size else problem.path_bytes_per_s,
    )
    return replace(
        made,
        up_bytes_per_s=made.best(problem.up_bytes_per_s),
        down_bytes_per_s=made.best(problem.down_bytes_per_s),
        homes=made.best(problem.homes.astype(np.float64)),
    )


def _bands(values: FloatArray, number: int) -> IntArray:
    """Which of ``number`` bands each value belongs to; bands of low values hold few (``FINER``)."""
    place = np.empty(len(values), dtype=np.int64)
    place[np.argsort(values, kind="stable")] = np.arange(len(values))
    return np.asarray((number * (place / max(len(values), 1)) ** (1 / FINER)).astype(np.int64))
