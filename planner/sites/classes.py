"""Sites taken together in bounds: equal ones, and among many different ones similar ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from hybridep.placement import IntArray
from hybridep.traffic import FloatArray
from planner.sites.problem import SiteProblem

MOST_SITES = 64
"""So many sites with links or latencies of their own are each a class of their own."""

MOST_CLASSES = 49
"""More different sites than this are merged, at the price of a weaker bound."""

FINER = 6
"""Where slow ones are kept apart: of four bands the first holds 4 ** -6 of the sites, the first two 2 ** -6."""

MOST_RATES = 120
"""Between so many rates bands of close ones may end."""


class Merging(Enum):
    """Which of many different sites are merged. A class is as fast as its fastest member, so what is lost is what the others are
    slower; which way loses less depends on how rates are distributed."""

    SLOW_APART = "slow apart"
    """Slow ones with few others: the slowest links decide how long a step takes."""
    CLOSE = "close"
    """Those whose links take nearly as long for a byte."""


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


def merges_different(problem: SiteProblem) -> bool:
    """There are more different sites than classes."""
    return bool(_kinds(problem).max(initial=0) >= (MOST_CLASSES if problem.alike_paths else MOST_SITES))


def _kinds(problem: SiteProblem) -> IntArray:
    """[D]: sites with the same number are told apart by nothing."""
    if not (problem.alike_paths and problem.num_sites > 1):
        return np.arange(problem.num_sites)
    ranks = problem.tokens, problem.expert_s_per_choice, problem.compute.memory_bytes[:, 0]
    keys = np.column_stack([problem.up_bytes_per_s, problem.down_bytes_per_s, problem.homes, *ranks])
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1))


def site_classes(problem: SiteProblem, merging: Merging = Merging.SLOW_APART) -> SiteClasses:
    """Equal sites together; where more than ``MOST_CLASSES`` differ, those with similar access links."""
    size, label = problem.num_sites, _kinds(problem)
    if merges_different(problem):
        side = int(np.sqrt(MOST_CLASSES / 2))
        bands = _BANDS[merging]
        band = bands(problem.up_bytes_per_s, side)
        label = band * side
        for one in range(side):
            label[band == one] += bands(problem.down_bytes_per_s[band == one], side)
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


def _slow_apart(values: FloatArray, number: int) -> IntArray:
    """Which of ``number`` bands each value belongs to; bands of low values hold few (``FINER``)."""
    place = np.empty(len(values), dtype=np.int64)
    place[np.argsort(values, kind="stable")] = np.arange(len(values))
    return np.asarray((number * (place / max(len(values), 1)) ** (1 / FINER)).astype(np.int64))


def _close(values: FloatArray, number: int) -> IntArray:
    """Which of ``number`` bands each rate belongs to, so that all together lose least by counting as the fastest of their bands:
    the best bands that end at one of ``MOST_RATES`` rates."""
    ordered = np.sort(values)
    if not len(ordered):
        return np.zeros(0, dtype=np.int64)
    last = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_RATES)).astype(np.int64))
    ends = ordered[last]
    # Sites up to each end, and what they take for a byte together; lost[i, j] is what a band loses that ends at j and begins
    # after the end before i.
    count = np.concatenate([[0], last + 1])
    taken = np.concatenate([[0.0], np.cumsum(1 / ordered)[last]])
    lost = taken[None, 1:] - taken[:-1, None] - (count[None, 1:] - count[:-1, None]) / ends
    lost[np.tril_indices(len(ends), -1)] = np.inf
    best, before = lost[0], []
    for _ in range(number - 1):
        through = np.concatenate([[0.0], best[:-1]])[:, None] + lost
        before.append(through.argmin(axis=0))
        best = through.min(axis=0)
    at, limits = len(ends) - 1, [ends[-1]]
    for first in reversed(before):
        at = int(first[at]) - 1
        if at < 0:
            break
        limits.append(ends[at])
    return np.asarray(np.searchsorted(np.array(limits[::-1]), values))


_BANDS: dict[Merging, Callable[[FloatArray, int], IntArray]] = {Merging.SLOW_APART: _slow_apart, Merging.CLOSE: _close}
