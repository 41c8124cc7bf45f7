"""Sites taken together in bounds: equal ones, and among many different ones similar ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from planner.sites.problem import SiteProblem

MOST_SITES = 64
"""So many sites with links or latencies of their own are each a class of their own."""

MOST_KINDS = 48
"""More different sites than this are merged, at the price of a weaker bound."""

BANDS = 3
"""Of up links, and of down links, that sites are merged by; more bring little."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Kinds:
    """K kinds of sites, which nothing tells apart, class by class."""

    place: IntArray
    """[D]: the kind of each site."""
    label: IntArray
    """[K]: the class of each kind, ascending."""
    count: FloatArray
    """[K]: sites."""
    up_bytes_per_s: FloatArray
    """[K]."""
    down_bytes_per_s: FloatArray
    """[K]."""
    homes: FloatArray
    """[K]: experts at home."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteClasses:
    """C classes of sites, of one kind or of similar ones. What one of them can do at most is what the best can; what all do
    together is limited by what they have together, so in sums each counts as their mean. Where a class is of one kind nothing is
    lost."""

    label: IntArray
    """[D]: the class of each site."""
    count: FloatArray
    """[C]: sites."""
    kinds: Kinds
    """What classes are made of."""
    up_bytes_per_s: FloatArray
    """[C]: of the fastest."""
    down_bytes_per_s: FloatArray
    """[C]: of the fastest."""
    homes: FloatArray
    """[C]: experts at home, on average."""
    latency_s: FloatArray
    """[C, C] between different sites of two classes (or of one)."""
    pair_bytes_per_s: FloatArray | None
    """[C, C]; only where every site is a class."""

    @cached_property
    def others(self) -> FloatArray:
        """[C, C]: how many sites of the column's class are others to a site of the row's."""
        return np.asarray(self.count[None, :] - np.eye(len(self.count)))

    @cached_property
    def merged(self) -> bool:
        """Some class has several sites."""
        return bool((self.count > 1).any())

    def best(self, values: FloatArray) -> FloatArray:
        """[C]: the largest of each class; ``values`` are of sites, [D]."""
        largest = np.full(len(self.count), -np.inf)
        np.maximum.at(largest, self.label, values)
        return largest

    def largest(self, values: FloatArray, axis: int = -1) -> FloatArray:
        """Of each class, [C] along the axis along which ``values`` are of kinds, [K]."""
        return np.asarray(np.maximum.reduceat(values, self._first, axis=axis)) if self.mixed else values

    def mean(self, values: FloatArray, axis: int = -1) -> FloatArray:
        """Of all sites of each class, [C] along the axis along which ``values`` are of kinds, [K]."""
        if not self.mixed:
            return values
        further = [1] * (-axis - 1)
        total = np.add.reduceat(values * self.kinds.count.reshape(-1, *further), self._first, axis=axis)
        return np.asarray(total / self.count.reshape(-1, *further))

    @cached_property
    def mixed(self) -> bool:
        """Some class is of several kinds."""
        return len(self.kinds.count) > len(self.count)

    @cached_property
    def _first(self) -> IntArray:
        """[C]: the first kind of each class."""
        return np.searchsorted(self.kinds.label, np.arange(len(self.count)))


def _kinds(problem: SiteProblem) -> IntArray:
    """[D]: sites with the same number are told apart by nothing."""
    if not (problem.alike_paths and problem.num_sites > 1):
        return np.arange(problem.num_sites)
    ranks = problem.tokens, problem.expert_s_per_choice, problem.compute.memory_bytes[:, 0]
    keys = np.column_stack([problem.up_bytes_per_s, problem.down_bytes_per_s, problem.homes, *ranks])
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1))


def site_classes(problem: SiteProblem) -> SiteClasses:
    """Equal sites together; where more than ``MOST_KINDS`` differ, those with similar access links."""
    size, label = problem.num_sites, _kinds(problem)
    if label.max(initial=0) >= (MOST_KINDS if problem.alike_paths else MOST_SITES):
        band = _bands(problem.up_bytes_per_s)
        label = band * BANDS
        for one in range(BANDS):
            label[band == one] += _bands(problem.down_bytes_per_s[band == one])
        label = 2 * label + (problem.homes > problem.homes.min())
    _, label, count = np.unique(label, return_inverse=True, return_counts=True)
    num, kinds = len(count), _kinds_of(problem, label)
    shortest = np.full((num, num), np.inf)
    if problem.one_latency_s is not None:
        shortest[~np.eye(num, dtype=np.bool_) | (count > 1)] = problem.one_latency_s
    else:
        row, column = np.nonzero(~np.eye(size, dtype=np.bool_))
        np.minimum.at(shortest, (label[row], label[column]), problem.latency_s[row, column])
    merged = num < size
    made = SiteClasses(
        label=label,
        count=count.astype(np.float64),
        kinds=kinds,
        up_bytes_per_s=kinds.up_bytes_per_s,
        down_bytes_per_s=kinds.down_bytes_per_s,
        homes=kinds.homes,
        latency_s=np.where(np.isfinite(shortest), shortest, 0.0),
        pair_bytes_per_s=None if merged else problem.path_bytes_per_s,
    )
    return replace(
        made,
        up_bytes_per_s=made.largest(kinds.up_bytes_per_s),
        down_bytes_per_s=made.largest(kinds.down_bytes_per_s),
        homes=made.mean(kinds.homes),
    )


def _kinds_of(problem: SiteProblem, label: IntArray) -> Kinds:
    """Given each site's class."""
    keys = np.column_stack([label, _kinds(problem)])
    _, first, place, count = np.unique(keys, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return Kinds(
        place=place.reshape(-1),
        label=label[first],
        count=count.astype(np.float64),
        up_bytes_per_s=problem.up_bytes_per_s[first],
        down_bytes_per_s=problem.down_bytes_per_s[first],
        homes=problem.homes[first].astype(np.float64),
    )


def _bands(rates: FloatArray) -> IntArray:
    """Which of ``BANDS`` each belongs to, about as many to each."""
    place = np.empty(len(rates), dtype=np.int64)
    place[np.argsort(rates, kind="stable")] = np.arange(len(rates))
    return place * BANDS // max(len(rates), 1)
