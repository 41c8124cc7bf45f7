"""Which prices of visits to look for: those that prove most where least is proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from planner.clock import now_s
from planner.sites.boxes import Box
from planner.sites.narrowing import narrowed
from planner.sites.priced import Priced, copies_cost_s, latencies_s, per_copy_s
from planner.sites.relaxation import Relaxation
from planner.sites.visit_prices import Holding, Sites, find_prices, visit_prices
from planner.sites.visits import row_budgets, slowest_homes

PARTS = 8
"""Of the experts, by how fast their homes send copies."""
SHARES = 0.5, 0.625, 0.75
"""Of the experts, those of the slowest homes: prices are for finding them alone. Fewer need fewer copies, from slower links."""
BANDS = 20, 3
"""Of sites that prices are found for: by rows that they may send, and among these by rows that they may receive."""
CELLS, WINDOW = 20, (0.6, 1.4)
"""Times of rows at which it is asked what is proven, each way, between these shares of a known plan's."""
FIRST = 0.95
"""Share of a known plan's times for which prices are found first."""
RAISED, PATIENCE = 1e-3, 3
"""Prices are looked for as long as those for so many times raise what is proven by this share of the step."""
MOST_PRICES, AT_ONCE = 24, 2
"""In all, and for the same times."""
NEAR = 0.01
"""Of the step: prices are kept that prove most where hardly more than the least is proven, which is where boxes are looked at."""


def with_prices(
    relaxation: Relaxation, best_s: float, rows_s: tuple[float, float], deadline_s: float = float("inf")
) -> Relaxation:
    """The same with prices: for about the times that a known plan's rows keep the busiest link, there and back (seconds per byte
    of a row), and then for those for which least is proven, as long as that helps. ``best_s`` is that plan's step."""
    roots = [box for box in (narrowed(relaxation, root, best_s) for root in relaxation.roots()) if box is not None]
    groups = _groups(relaxation)
    if not (roots and groups):
        return relaxation
    # Where all is gathered no rows travel; others' plans may have some.
    one_row_s = relaxation.rows / float(np.median(relaxation.classes.kinds.up_bytes_per_s))
    rows_s = rows_s[0] or one_row_s, rows_s[1] or one_row_s
    holdings = [list[Holding]() for _ in groups]
    grids = [_Grid(relaxation, root, _classes(relaxation, _within(root, rows_s)), rows_s) for root in roots]
    made: list[Priced] = []
    about: list[int] = []
    raised: list[float] = []
    box = _within(roots[0], (FIRST * rows_s[0], FIRST * rows_s[1]))
    cell: int | None = None
    fine = False
    while now_s() < deadline_s and len(made) < MOST_PRICES:
        if made:
            lowest = np.minimum.reduce([grid.proven_s.max(axis=0) for grid in grids])
            cell = int(lowest.argmin())
            raised.append(float(lowest[cell]))
            if raised[-1] >= best_s:
                break
            if len(raised) > PATIENCE and raised[-1] < raised[-1 - PATIENCE] + RAISED * best_s:
                if fine:
                    break
                # What is found in coarse steps tells where to look.
                fine, raised, holdings = True, [], [[] for _ in groups]
                made = _in_fine_steps(relaxation, made, grids, best_s)
                continue
            box = min(grids, key=lambda one: float(one.proven_s[:, cell].max())).box(cell)
        for group in _telling(grids, about, len(groups), cell):
            if made and now_s() >= deadline_s:
                break
            prices, holdings[group] = find_prices(
                grids[0].sites(box), _hit(relaxation, groups[group]), holdings[group], fine=fine
            )
            made.append(priced(relaxation, prices, groups[group], fine=fine))
            about.append(group)
            for grid in grids:
                grid.add(made[-1], best_s)
    lowest = np.minimum.reduce([grid.proven_s.max(axis=0) for grid in grids])
    left = lowest <= float(lowest.min()) + NEAR * best_s
    useful = {int(number) - 1 for grid in grids for number in grid.proven_s[:, left].argmax(axis=0)}
    return replace(relaxation, prices=tuple(made[number] for number in sorted(useful - {-1})))


def _in_fine_steps(relaxation: Relaxation, made: Sequence[Priced], grids: Sequence[_Grid], best_s: float) -> list[Priced]:
    """The same prices, which grids know in place of the coarse ones."""
    found = [priced(relaxation, one.prices.price, one.homes, fine=True) for one in made]
    for grid in grids:
        grid.proven_s = grid.proven_s[:1]
        for one in found:
            grid.add(one, best_s)
    return found


def with_prices_about(relaxation: Relaxation, box: Box, best_s: float) -> Relaxation:
    """The same with those for the times of rows in a box, too, for which others prove little."""
    box = narrowed(relaxation, box, best_s) or box
    classes = _mean_sites(relaxation, box, _classes(relaxation, box), relaxation.limits(box).most_held)
    made = []
    for homes in _groups(relaxation):
        price, _ = find_prices(classes, _hit(relaxation, homes), fine=True)
        made.append(priced(relaxation, price, homes, fine=True))
    return replace(relaxation, prices=(*relaxation.prices, *made))


def _mean_sites(relaxation: Relaxation, box: Box, label: IntArray, most_held: FloatArray) -> Sites:
    """Of classes ([K]: which one each kind is of), where links are busy for as long as the box's upper ends say."""
    number = relaxation.classes.kinds.count
    count = np.bincount(label, weights=number).astype(np.float64)
    rooms = (*row_budgets(relaxation, box), most_held)
    sent, received, most = (np.bincount(label, weights=one * number) / count for one in rooms)
    return Sites(count=count, sent=sent, received=received, most=most)


def _groups(relaxation: Relaxation) -> list[FloatArray]:
    """[K] each: experts at home of sites of each kind, of the slowest homes with about each of ``SHARES``."""
    kinds, slowest = relaxation.classes.kinds, slowest_homes(relaxation, PARTS)
    found = [np.where(slowest < part, kinds.homes, 0.0) for part in sorted({round(share * PARTS) for share in SHARES})]
    return [one for number, one in enumerate(found) if one.any() and not any((one == other).all() for other in found[:number])]


def _telling(grids: Sequence[_Grid], about: Sequence[int], groups: int, cell: int | None) -> list[int]:
    """The groups of homes whose prices tell most of a cell, as far as is known; all of them at first."""
    if cell is None:
        return list(range(groups))
    known = np.stack([grid.proven_s[1:, cell] for grid in grids]).min(axis=0)
    told = np.array([known[np.array(about) == group].max() for group in range(groups)])
    return [int(group) for group in np.argsort(-told, kind="stable")[:AT_ONCE]]


def _within(root: Box, rows_s: tuple[float, float]) -> Box:
    """Plans whose rows take no longer."""
    return replace(root, forward_s=(0.0, rows_s[0]), back_s=(0.0, rows_s[1]))


class _Grid:
    """What prices prove of one root's plans, about, by how long their rows take: in cells between two times there, and two back.
    Sites with as much room for rows are taken together, which is wrong in detail and fast."""

    def __init__(self, relaxation: Relaxation, root: Box, label: IntArray, rows_s: tuple[float, float]) -> None:
        self.relaxation, self.root, self.label = relaxation, root, label
        self.count = np.bincount(label, weights=relaxation.classes.kinds.count).astype(np.float64)
        times = [list(pairwise(one * np.geomspace(*WINDOW, CELLS + 1))) for one in rows_s]
        cells = list(zip(*times, strict=True)) if relaxation.tied else list(product(*times))
        lower, self.upper = (np.array([[ends[end] for ends in cell] for cell in cells]) for end in (0, 1))
        """[cells, 2]: there and back."""
        self.proven_s = np.zeros((0, len(cells)))
        """[1 + prices, cells]: by none, and by each."""
        forward, back, compute = relaxation.budgets_s
        latency_s = max(latencies_s(relaxation, root.residency, *relaxation.copy_latency_s(root)), 0.0)
        fixed_s = relaxation.token_latency_of(root) + compute * relaxation.problem.least_expert_s + latency_s
        self.without_s = relaxation.base_s + relaxation.num_layers * (lower @ (forward, back) + fixed_s)
        self.rooms = [self.sites(self.box(cell)) for cell in range(len(cells))]
        # Visits that cost nothing tell where rows have too little time.
        none = np.zeros(relaxation.problem.num_experts + 1)
        self.add(priced(relaxation, none, relaxation.classes.kinds.homes), np.inf)

    def box(self, cell: int) -> Box:
        """The cell's plans, and those whose rows take less time."""
        there_s, back_s = self.upper[cell].tolist()
        return _within(self.root, (there_s, back_s))

    def sites(self, box: Box) -> Sites:
        """Where links are busy for as long as the box's upper ends say."""
        return _mean_sites(self.relaxation, box, self.label, self.relaxation.limits(self.root).most_held)

    def add(self, one: Priced, best_s: float) -> None:
        """Where a step shorter than ``best_s`` may be possible."""
        prices, proven_s = one.prices, self.without_s.copy()
        known_s, none = self.proven_s.max(axis=0, initial=0.0), np.zeros(len(self.count))
        for cell in np.flatnonzero(known_s < best_s).tolist():
            room = self.rooms[cell]
            needed = float(prices.needed(room.sent, room.received, none, room.most) @ self.count) - prices.experts
            proven_s[cell] += self.relaxation.num_layers * copies_cost_s(one, self.root.residency, needed)
        self.proven_s = np.concatenate([self.proven_s, proven_s[None]])


def _hit(relaxation: Relaxation, homes: FloatArray) -> FloatArray:
    """P, of the experts of these homes ([K])."""
    return relaxation.hit[: round(float(homes @ relaxation.classes.kinds.count)) + 1]


def priced(relaxation: Relaxation, price: FloatArray, homes: FloatArray, *, fine: bool = False) -> Priced:
    """What prices of visits that find so many of the experts of some homes ([K]: of each kind, zero but for these) say, in
    ``fine`` steps or not. Raises ValueError where that is nothing: for prices that fall, or of another number of experts."""
    hit, all_homes = _hit(relaxation, homes), relaxation.classes.kinds.homes
    if len(price) != len(hit) or not homes.any() or ((homes != 0) & (homes != all_homes)).any():
        raise ValueError("prices are not about all experts of some homes")
    return Priced(prices=visit_prices(price, hit, fine), homes=homes, cost_s=per_copy_s(relaxation, homes))


def _classes(relaxation: Relaxation, box: Box) -> IntArray:
    """[K]: sites with about as much room for rows."""
    sent, received = row_budgets(relaxation, box)
    band = _bands(sent, BANDS[0]) * BANDS[1]
    for one in np.unique(band):
        band[band == one] += _bands(received[band == one], BANDS[1])
    return np.asarray(np.unique(band, return_inverse=True)[1].reshape(-1))


def _bands(values: FloatArray, number: int) -> IntArray:
    """Which of so many each belongs to, about as many to each; equal ones together."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - count / 2
    return np.asarray((middle * number / len(values)).astype(np.int64)[place.reshape(-1)])
