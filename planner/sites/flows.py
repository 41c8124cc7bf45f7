"""One exchange between sites, kept up to date row by row: what a local search asks tens of thousands of times.

It takes as long as its busiest link, so two plans with equally busy ones look alike, though in one of them a single link is left
to relieve and in the other ten. Beside that time stands a smooth one, the norm of all links' times with the exponent
``SHARPNESS``, which falls with every busy link that is relieved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep.placement import IntArray
from hybridep.traffic import FloatArray
from planner.sites.problem import SiteProblem

DOUBLINGS = 5
SHARPNESS = 2**DOUBLINGS
"""Two links that are equally busy count as one that is 2 % busier."""
SMOOTH, BUSIEST, FARTHEST, PRICE = range(4)
"""What is kept of each row, there and back: its share of the smooth sum, seconds of its busiest pair, its largest latency, and
dollars; all but the latency per unit's byte."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Changed:
    """A flow with some rows replaced."""

    rows: IntArray
    """[k] sites."""
    units: FloatArray
    """[k, D]."""
    access: FloatArray
    """[2, D]: units that sites send and receive."""
    trunk_s: FloatArray
    """[2, trunks], there and back."""
    by_row: FloatArray
    """[4, 2, D]: ``SMOOTH`` to ``PRICE``, there and back."""

    @property
    def latencies_s(self) -> FloatArray:
        """[2]: there and back."""
        return np.asarray(self.by_row[FARTHEST].max(axis=1))

    @property
    def usd(self) -> FloatArray:
        """[2] per unit's byte: there and back."""
        return np.asarray(self.by_row[PRICE].sum(axis=1))


class Flow:
    """Units from site to site, and what as many take there and back. Rates inside sites and windows count as far as they limit
    what a site, or a pair of sites, can send."""

    def __init__(self, problem: SiteProblem, units: FloatArray, typical: float) -> None:
        """``units`` is [D, D] with zeros on the diagonal; ``typical`` ones of a site, within a factor of a million."""
        size, inside = problem.num_sites, problem.num_inside * problem.gpu_bytes_per_s
        up_s, down_s = 1 / np.minimum(problem.up_bytes_per_s, inside), 1 / np.minimum(problem.down_bytes_per_s, inside)
        paths, prices = problem.path_bytes_per_s, problem.egress_usd_per_byte
        # There and back: [2, D, D], and [2, sent and received, D].
        self.pair_s = None if paths is None else np.stack([1 / paths, 1 / paths.T])
        self.access_s = np.array([[up_s, down_s], [down_s, up_s]])
        self.latency_s = np.stack([problem.latency_s, problem.latency_s.T])
        self.pair_usd = None if prices is None else np.stack([prices, prices.T])
        trunks = problem.trunk_s_per_byte.toarray().reshape(-1, size, size)
        # [2, src, trunks, dst].
        self.trunk_s = np.stack([trunks.transpose(1, 0, 2), trunks.transpose(2, 0, 1)])
        self.units = np.zeros((size, size))
        self.now = Changed(
            rows=np.zeros(0, dtype=np.int64),
            units=np.zeros((0, size)),
            access=np.zeros((2, size)),
            trunk_s=np.zeros((2, len(trunks))),
            by_row=np.zeros((4, 2, size)),
        )
        # Powers of seconds in proportion to it are neither too large nor too small.
        self.scale_s = typical * float(np.median(self.access_s))
        self.accept(self.changed(np.arange(size), units))

    def changed(self, rows: IntArray, units: FloatArray) -> Changed:
        """With ``units`` ([k, D]) in place of ``rows`` ([k])."""
        more, access, by_row, trunk_s = units - self.units[rows], self.now.access.copy(), self.now.by_row.copy(), self.now.trunk_s
        access[0, rows] = units.sum(axis=1)
        access[1] += more.sum(axis=0)
        if self.pair_s is not None:
            pair_s = self.pair_s[:, rows] * units
            by_row[BUSIEST][:, rows] = pair_s.max(axis=2)
            by_row[SMOOTH][:, rows] = self._powers(pair_s).sum(axis=2)
        by_row[FARTHEST][:, rows] = (self.latency_s[:, rows] * (units > 0)).max(axis=2)
        if self.pair_usd is not None:
            by_row[PRICE][:, rows] = (self.pair_usd[:, rows] * units).sum(axis=2)
        if trunk_s.size:
            trunk_s = trunk_s + np.einsum("xrtd,rd->xt", self.trunk_s[:, rows], more)
        return Changed(rows=rows, units=units, access=access, trunk_s=trunk_s, by_row=by_row)

    def accept(self, changed: Changed) -> None:
        """Make it the flow."""
        self.units[changed.rows] = changed.units
        self.now = changed

    def busiest_s(self, changed: Changed) -> FloatArray:
        """[2] per unit's byte: what the busiest link takes there, and back."""
        pairs_s = np.maximum(changed.by_row[BUSIEST].max(axis=1), changed.trunk_s.max(axis=1, initial=0.0))
        return np.asarray(np.maximum((self.access_s * changed.access).max(axis=(1, 2)), pairs_s))

    def smooth_s(self, changed: Changed) -> FloatArray:
        """[2] per unit's byte: the norm of all links, there and back."""
        sums = self._powers(self.access_s * changed.access).sum(axis=(1, 2)) + changed.by_row[SMOOTH].sum(axis=1)
        if changed.trunk_s.size:
            sums += self._powers(changed.trunk_s[:, :, None]).sum(axis=(1, 2))
        return np.asarray(self.scale_s * sums ** (1 / SHARPNESS))

    def at_busiest(self, back: bool, rng: np.random.Generator) -> tuple[int, int]:
        """(src, dst) of units that the busiest link carries there, or back; of several any, in proportion to what they take."""
        way = int(back)
        pairs_s, access_s, trunk_s = self.now.by_row[BUSIEST, way], self.access_s[way] * self.now.access, self.now.trunk_s[way]
        longest_s = max(pairs_s.max(), access_s.max())
        if trunk_s.max(initial=0.0) > longest_s:
            src, dst = divmod(_any_of(self.trunk_s[way, :, trunk_s.argmax()] * self.units, rng), len(self.units))
        elif self.pair_s is not None and pairs_s.max() == longest_s:
            src = int(pairs_s.argmax())
            dst = int((self.pair_s[way, src] * self.units[src]).argmax())
        else:
            received, site = divmod(int(access_s.argmax()), len(self.units))
            other = _any_of(self.units[:, site] if received else self.units[site], rng)
            src, dst = (other, site) if received else (site, other)
        return src, dst

    def _powers(self, seconds: FloatArray) -> FloatArray:
        """[2, ..] to the power of ``SHARPNESS``, in units of ``scale_s``."""
        values = seconds / self.scale_s
        for _ in range(DOUBLINGS):
            values *= values
        return values


def _any_of(weights: FloatArray, rng: np.random.Generator) -> int:
    """An index of the raveled ``weights``, in proportion to them."""
    sums = np.cumsum(weights)
    return min(int(np.searchsorted(sums, rng.random() * sums[-1], side="right")), weights.size - 1)
