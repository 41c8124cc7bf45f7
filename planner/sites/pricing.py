"""Which prices of visits to look for: those that prove most where least is proven."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hybridep.traffic import FloatArray
from planner.clock import now_s
from planner.sites.boxes import Box
from planner.sites.narrowing import narrowed
from planner.sites.priced import Priced, copies_cost_s, latencies_s, needed_copies, per_copy_s
from planner.sites.relaxation import Relaxation
from planner.sites.visit_prices import Sites, VisitPrices, find_prices, visit_prices
from planner.sites.visits import row_budgets, slowest_homes

PARTS = 8
"""Of the experts, by how fast their homes send copies."""
SHARES = 0.5, 0.625, 0.75, 1.0
"""Of the experts, those of the slowest homes: prices are for finding them alone. Fewer need fewer copies, from slower links."""
BANDS = 20, 3
"""Of sites that prices are found for: by rows that they may send, and among these by rows that they may receive."""
TIMES = 25
"""Times of rows at which it is asked what is proven, each way."""
RAISED = 1e-3
"""Prices are looked for as long as those of ``PATIENCE`` points raise what is proven by this share of the step."""
PATIENCE, GROUPS_A_POINT = 3, 2
MOST_PRICES = 24


def with_prices(relaxation: Relaxation, best_s: float, deadline_s: float = float("inf")) -> Relaxation:
    """The same with prices, one after another for those times of rows for which least is proven by all before, as long as that
    helps."""
    roots = [box for box in (narrowed(relaxation, root, best_s) for root in relaxation.roots()) if box is not None]
    groups = _groups(relaxation)
    if not roots or not groups:
        return relaxation
    forward, back = (_between(roots, side) for side in ("forward_s", "back_s"))
    pairs = [(one, one) for one in forward.tolist()] if relaxation.tied else [(a, b) for a in forward for b in back]
    grids = [_Grid(relaxation, root, *np.array(pairs).T) for root in roots]
    made: list[Priced] = []
    raised: list[float] = []
    while now_s() < deadline_s and len(made) < MOST_PRICES:
        lowest = np.minimum.reduce([grid.proven_s.max(axis=0) for grid in grids])
        at = int(lowest.argmin())
        raised.append(float(lowest[at]))
        if raised[-1] >= best_s or (len(raised) > PATIENCE and raised[-1] < raised[-1 - PATIENCE] + RAISED * best_s):
            break
        grid = min(grids, key=lambda one: float(one.proven_s[:, at].max()))
        # The groups of homes that tell most there, as far as is known.
        told = [
            max((grid.proven_s[1 + n, at] for n, one in enumerate(made) if one.homes is homes), default=np.inf)
            for homes in groups
        ]
        for chosen in np.argsort(told, kind="stable")[::-1][: GROUPS_A_POINT if made else None].tolist():
            made.append(_prices_at(relaxation, grid.at(at), groups[chosen]))
            for one in grids:
                one.add(made[-1], best_s)
    near = np.minimum.reduce([grid.proven_s.max(axis=0) for grid in grids]) < best_s
    useful = {int(number) - 1 for grid in grids for number in grid.proven_s[:, near].argmax(axis=0)}
    return replace(relaxation, prices=tuple(made[number] for number in sorted(useful - {-1})))


class _Grid:
    """What prices prove of one root's plans whose rows take as long as each of some points says."""

    def __init__(self, relaxation: Relaxation, root: Box, there_s: FloatArray, back_s: FloatArray) -> None:
        self.relaxation, self.root, self.there_s, self.back_s = relaxation, root, there_s, back_s
        self.proven_s = np.zeros((0, len(there_s)))
        """[1 + prices, points]: by none, and by each."""
        forward, back, compute = relaxation.budgets_s
        latency_s = max(latencies_s(relaxation, root.residency, *relaxation.copy_latency_s(root)), 0.0)
        fixed_s = relaxation.token_latency_of(root) + compute * relaxation.problem.least_expert_s + latency_s
        self.without_s = relaxation.base_s + relaxation.num_layers * (forward * there_s + back * back_s + fixed_s)
        self.add(_no_prices(relaxation), np.inf)

    def at(self, point: int) -> Box:
        """Plans whose rows take no longer."""
        there_s, back_s = float(self.there_s[point]), float(self.back_s[point])
        return replace(self.root, forward_s=(0.0, there_s), back_s=(0.0, back_s))

    def add(self, priced: Priced, best_s: float) -> None:
        """Where nothing better than ``best_s`` is known to be impossible."""
        proven_s, limits = self.without_s.copy(), self.relaxation.limits(self.root)
        known_s = self.proven_s.max(axis=0, initial=0.0)
        for point in np.flatnonzero(known_s < best_s).tolist():
            needed = float(needed_copies(self.relaxation, priced, self.at(point), limits))
            proven_s[point] += self.relaxation.num_layers * copies_cost_s(priced, self.root.residency, needed)
        self.proven_s = np.concatenate([self.proven_s, proven_s[None]])


def _no_prices(relaxation: Relaxation) -> Priced:
    """Visits cost nothing: tells only where rows have too little time."""
    prices = visit_prices(np.zeros(relaxation.problem.num_experts + 1), relaxation.hit)
    return _priced(relaxation, prices, relaxation.classes.kinds.homes)


def _priced(relaxation: Relaxation, prices: VisitPrices, homes: FloatArray) -> Priced:
    cost_s = {residency: per_copy_s(relaxation, homes, residency) for residency in relaxation.problem.residencies}
    return Priced(prices=prices, homes=homes, cost_s=cost_s)


def _between(roots: list[Box], side: str) -> FloatArray:
    ends = [getattr(root, side) for root in roots]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    return np.geomspace(max(low, high / 100), high, TIMES)


def _groups(relaxation: Relaxation) -> list[FloatArray]:
    """[K] each: experts at home of sites of each kind, of the slowest homes with about each of ``SHARES``."""
    kinds, slowest = relaxation.classes.kinds, slowest_homes(relaxation, PARTS)
    return [np.where(slowest < part, kinds.homes, 0.0) for part in sorted({round(share * PARTS) for share in SHARES})]


def _prices_at(relaxation: Relaxation, box: Box, homes: FloatArray) -> Priced:
    """Good ones where links are busy for as long as the box's upper ends say."""
    kinds, limits = relaxation.classes.kinds, relaxation.limits(box)
    sent, received = row_budgets(relaxation, box)
    band = _bands(sent, BANDS[0]) * BANDS[1]
    for one in np.unique(band):
        band[band == one] += _bands(received[band == one], BANDS[1])
    label = np.unique(band, return_inverse=True)[1].reshape(-1)
    count = np.bincount(label, weights=kinds.count).astype(np.float64)
    mean = [np.bincount(label, weights=one * kinds.count) / count for one in (sent, received, limits.most_held)]
    sites = Sites(count=count, sent=mean[0], received=mean[1], most=mean[2])
    experts = round(float(homes @ kinds.count))
    return _priced(relaxation, find_prices(sites, relaxation.hit[: experts + 1]), homes)


def _bands(values: FloatArray, number: int) -> np.ndarray:
    """Which of so many each belongs to, about as many to each; equal ones together."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - count / 2
    return np.asarray((middle * number / len(values)).astype(np.int64)[place.reshape(-1)])
