"""Max-min fair rates as a compiled loop, for traffic in which hardly two flows are alike.

Uneven flows end one by one, links fill one by one, and vectors of numbers have nothing to work on: `max_min_rates` in
`simulator.flow` then spends its time calling numpy. This is the same filling, link after link, compiled by numba where
that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import cast

import numpy as np
import numpy.typing as npt

from simulator.flow import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]
Fill = Callable[[FloatArray, IntArray, IntArray, IntArray, FloatArray, FloatArray, float, FloatArray], None]


class Solver:
    """Rates of a fixed table of paths while the numbers of flows on them fall.

    paths: [paths, longest path] link ids, -1 where a path is shorter; each has a link. counts: [paths] flows on each.
    """

    def __init__(self, fill: Fill, capacity: FloatArray, paths: IntArray, counts: FloatArray) -> None:
        self._fill = fill
        self._capacity = capacity
        self._paths = paths
        flat = paths.ravel()
        hops = np.flatnonzero(flat >= 0)
        by_link = hops[np.argsort(flat[hops], kind="stable")]
        self._members = by_link // paths.shape[1]
        degree = np.bincount(flat[hops], minlength=capacity.size)
        self._first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(degree)])
        self._load = np.zeros(capacity.size)
        self._counts = counts.copy()
        self._add(np.arange(paths.shape[0]), counts)
        self.rates = np.ones(paths.shape[0])
        """[paths] bytes per second of one flow; a path that has lost all its flows keeps its last rate."""
        self._unchanged_below = 0.0

    def _add(self, rows: IntArray, counts: FloatArray) -> None:
        links = self._paths[rows]
        on_link = links >= 0
        counted = np.broadcast_to(counts[:, None], links.shape)
        np.add.at(self._load, links[on_link], counted[on_link])

    @property
    def used(self) -> BoolArray:
        """[links] whether any flow crosses the link."""
        return self._load > 0

    def remove(self, rows: IntArray) -> None:
        """Take all flows off these paths."""
        self._add(rows, -self._counts[rows])
        self._counts[rows] = 0.0
        self._unchanged_below = min(self._unchanged_below, float(self.rates[rows].min()))

    def solve(self) -> FloatArray:
        """Bring `rates` up to date and return it.

        While rates rise together, nothing is different without a flow until the level at which that flow stopped:
        its links were not full before. So flows slower than the slowest one removed keep their rates.
        """
        below = self._unchanged_below * (1.0 - 1e-9)
        self._fill(self._capacity, self._paths, self._first, self._members, self._load, self._counts, below, self.rates)
        self._unchanged_below = np.inf
        return self.rates


@cache
def compiled_fill() -> Fill | None:
    """`fill`, compiled; None where numba is not installed. Takes a second or two the first time on a machine."""
    try:
        numba = import_module("numba")
    except ImportError:
        return None
    return cast(Fill, numba.njit(cache=True)(fill))


def fill(
    capacity: FloatArray,
    paths: IntArray,
    first: IntArray,
    members: IntArray,
    loads: FloatArray,
    counts: FloatArray,
    keep_below: float,
    rates: FloatArray,
) -> None:
    """Write the max-min fair rate of each path with flows into `rates`; those below `keep_below` stay as they are.

    capacity, loads: [links] bytes per second, and flows that cross the link. first, members: the paths on each link,
    members[first[link] : first[link + 1]]. Raises all rates together; the link with the least left for each of its
    flows fills first and fixes theirs (Bertsekas and Gallager, Data Networks, section 6.5.2).
    """
    num_paths, width = paths.shape
    num_links = capacity.size
    load = loads.copy()
    left = capacity.copy()
    fixed = np.zeros(num_paths, np.bool_)
    for path in range(num_paths):
        if counts[path] == 0:
            fixed[path] = True
        elif rates[path] < keep_below:
            fixed[path] = True
            for hop in range(width):
                link = paths[path, hop]
                if link >= 0:
                    load[link] -= counts[path]
                    left[link] -= rates[path] * counts[path]
    share = np.zeros(num_links)
    open_links = np.empty(num_links, np.int64)
    num_open = 0
    for link in range(num_links):
        if load[link] > 0:
            share[link] = left[link] / load[link]
            open_links[num_open] = link
            num_open += 1
    while True:
        tightest, kept = -1, 0
        for index in range(num_open):
            link = open_links[index]
            if load[link] > 0:
                open_links[kept] = link
                kept += 1
                if tightest < 0 or share[link] < share[tightest]:
                    tightest = link
        num_open = kept
        if tightest < 0:
            return
        rate = share[tightest]
        for index in range(first[tightest], first[tightest + 1]):
            path = members[index]
            if fixed[path]:
                continue
            fixed[path] = True
            rates[path] = rate
            for hop in range(width):
                link = paths[path, hop]
                if link >= 0:
                    load[link] -= counts[path]
                    left[link] -= rate * counts[path]
                    if load[link] > 0:
                        # Never below the level reached: what is missing then is rounding.
                        share[link] = max(left[link] / load[link], rate)
