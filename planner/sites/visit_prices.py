"""How many copies all sites need together, by prices of visits: a bound that leaves every visit whole.

Of the experts of some homes, each site holds a number and finds the rest at others, visit by visit. Let a visit that finds n of
them have a price, in copies, which its site pays and its holder earns. What is paid is earned, so the copies of any plan are at
least what all sites hold, pay and do not earn, each at its cheapest:

    sum over sites of  min over m of  m + least paid for finding the others - most earned with m

Rows of a site's visits fit into what its links carry in time, and so do those of visits that it receives, none of which finds
more than m: two knapsacks of whole visits, with P as it is (no chords) and every site's own links (no classes). They depend on
nothing but prices, so they are solved once for all boxes. Any prices prove something; good ones are the multipliers of a linear
program over holdings (what a single site holds, finds and serves), which are generated as they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.compiled import allocating, compiled
from planner.linear_program import minimise
from planner.sites.relaxation import SLACK

STEPS, TRIED, SMALL = (3.0, 7.5), 200, 8
"""Rows are counted in steps, those of a visit rounded down, so that nothing a plan does is left out. A visit that finds one
expert takes between so many; of so many sizes of steps it is the one that leaves out least of any visit of so few experts."""
MOST_STEPS = 3000
"""Of a holder's rows that are told apart."""
FINE = 4
"""So many times as many steps, for the same rows, are fine ones, of which less is left out; tables take as much more memory."""
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Prices are straight lines between visits of so many experts."""
ROUNDS, CLOSE = 60, 2e-3
"""Generating holdings ends after so many rounds, or when no further ones would save this share of the copies."""
HOLDINGS = 4
"""Of a class, that are added in a round."""
FORBIDDEN = 8
"""How much dearer copies are that a site cannot hold; some holding must be there to begin with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VisitPrices:
    """What prices say of n experts, whatever the box."""

    price: FloatArray
    """[n + 1]: copies, of a visit that finds so many."""
    find: FloatArray
    """[steps, n + 1]: copies that a site pays at least for finding so many in visits, with rows for so many steps, or more than
    are told apart."""
    serve: FloatArray
    """[steps, n + 1]: copies that a site earns at most if it holds so many."""
    beyond: float
    """Earned at most for each further step."""
    longest: int
    """Steps of the largest visit."""
    rows: float
    """Of a step."""
    fine: bool
    """Whether steps are."""

    @cached_property
    def largest(self) -> float:
        """Copies that a site pays or earns, or holds, at most."""
        return max(float(self.experts), float(self.find[np.isfinite(self.find)].max()), float(self.serve.max()))

    @cached_property
    def rest(self) -> FloatArray:
        """[steps, n + 1]: copies that a site holds, and pays for finding the others."""
        return np.ascontiguousarray(np.arange(self.experts + 1) + self.find[:, ::-1])

    @property
    def experts(self) -> int:
        """n."""
        return int(self.find.shape[1] - 1)

    def needed(self, sent: FloatArray, received: FloatArray, least: FloatArray, most: FloatArray) -> FloatArray:
        """[...]: what sites hold, pay and do not earn at least, given rows that each may send and receive and how many of the
        experts it holds at least and at most; all [..., sites]. Infinite where some site cannot find all."""
        shape = np.broadcast_shapes(sent.shape, received.shape, least.shape, most.shape)
        flat = [np.ascontiguousarray(np.broadcast_to(one, shape)).ravel() for one in (sent, received, least, most)]
        steps = [np.floor(one * ((1 + SLACK) / self.rows)).astype(np.int64) for one in flat[:2]]
        ends = [np.clip(one, 0, self.experts).astype(np.int64) for one in (np.ceil(flat[2] - SLACK), np.floor(flat[3] + SLACK))]
        found = np.empty(len(flat[0]))
        _cheapest(self.rest, self.serve, self.beyond, self.longest, steps[0], steps[1], ends[0], ends[1], found)
        return found.reshape(shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sites:
    """C classes of sites that prices are found for."""

    count: FloatArray
    """[C]."""
    sent: FloatArray
    """[C]: rows that a site may send."""
    received: FloatArray
    """[C]."""
    most: FloatArray
    """[C]: experts that a site may hold."""


@dataclass(frozen=True)
class Holding:
    """Of a site of one class: what it holds, and its visits, made less received, by knots of the price, in so many steps of rows
    each."""

    site: int
    held: float
    visits: FloatArray
    sent: int
    received: int

    def possible(self, sites: Sites, steps: Sequence[IntArray]) -> bool:
        """With room for so many steps ([C], made and received)."""
        here = self.site
        return bool(self.sent <= steps[0][here] and self.received <= steps[1][here] and self.held <= sites.most[here])


def find_prices(
    sites: Sites, hit: FloatArray, known: Sequence[Holding] = (), *, fine: bool = False
) -> tuple[FloatArray, list[Holding]]:
    """Good ones for these sites, [n + 1], and the holdings behind them; some of these may be ``known`` where the same sites have
    more or less room, counted in steps as ``fine``. ``hit`` is P, [n + 1]."""
    experts, times = len(hit) - 1, FINE if fine else 1
    step = _step(hit, times)
    needs = _needs(hit, step)
    knots = np.array([0, *(one for one in KNOTS if one < experts), experts])
    # [knots - 1, n + 1]: what a visit counts at each knot but zero.
    shape = np.stack([np.interp(np.arange(experts + 1), knots, one) for one in np.eye(len(knots))[1:]])
    steps = [np.floor(one / step).astype(np.int64) for one in (sites.sent, sites.received)]
    steps = [np.minimum(steps[0], _enough(needs)), np.minimum(steps[1], times * MOST_STEPS - 1)]
    # To begin with, all hold everything.
    dearer = np.where(sites.most < experts, FORBIDDEN, 1.0)
    holdings = [Holding(site, experts * factor, np.zeros(len(shape)), 0, 0) for site, factor in enumerate(dearer.tolist())]
    holdings += [one for one in known if one.possible(sites, steps)]
    best = -np.inf, np.zeros(experts + 1)
    for _ in range(ROUNDS):
        held, price, used = _master(sites, holdings, shape)
        proven, added = _generate(sites, steps, price, needs, shape)
        best = max(best, (proven, price), key=lambda one: one[0])
        if not added or best[0] >= held * (1 - CLOSE):
            break
        holdings += added
    return np.maximum.accumulate(best[1]), [holding for holding in used if holding.sent or holding.received]


def visit_prices(price: FloatArray, hit: FloatArray, fine: bool = False) -> VisitPrices:
    """What these prices ([n + 1], of visits that find so many) say, in ``fine`` steps or not; ``hit`` is P. Raises ValueError
    where prices fall: to find more must not be cheaper."""
    if price[0] < 0 or (np.diff(price) < 0).any():
        raise ValueError("a visit that finds more must not have a lower price")
    times = FINE if fine else 1
    step = _step(hit, times)
    needs = _needs(hit, step)
    return VisitPrices(
        price=price,
        find=_find_table(price, needs, _enough(needs) + 1)[0],
        serve=_serve_table(price, needs, times * MOST_STEPS)[0],
        beyond=float((price[1:] / needs[1:]).max()),
        longest=int(needs.max()),
        rows=step,
        fine=fine,
    )


def _step(hit: FloatArray, times: int) -> float:
    """Rows, of so many ``times`` as many steps."""
    small, sizes = hit[1 : SMALL + 1], hit[1] / (times * np.linspace(*STEPS, TRIED))[:, None]
    left_out = 1 - np.floor(small * ((1 - SLACK) / sizes)) * sizes / small
    return float(sizes[left_out.max(axis=1).argmin(), 0])


def _needs(hit: FloatArray, step: float) -> IntArray:
    """[n + 1]: steps of a visit, of so many rows each."""
    return np.floor(hit * ((1 - SLACK) / step)).astype(np.int64)


def _enough(needs: IntArray) -> int:
    """Steps that visits of any sizes take at most which find all."""
    experts = np.arange(1, len(needs))
    return int(len(experts) * (needs[1:] / experts).max()) + 1


def _master(sites: Sites, holdings: list[Holding], shape: FloatArray) -> tuple[float, FloatArray, list[Holding]]:
    """Fewest experts held with shares of these holdings, the price of visits, [n + 1], and which holdings these are."""
    knots = len(shape)
    member = np.zeros((len(sites.count), len(holdings) + knots - 1))
    member[[holding.site for holding in holdings], np.arange(len(holdings))] = 1.0
    # A visit that finds more will do, so prices do not fall.
    larger = np.eye(knots)[:, :-1] - np.eye(knots)[:, 1:]
    visits = np.concatenate([np.stack([holding.visits for holding in holdings], axis=1), -larger], axis=1)
    costs = np.array([*(holding.held for holding in holdings), *np.zeros(knots - 1)])
    found = minimise(costs, visits, np.zeros(knots), member, sites.count)
    if found is None:
        return float("inf"), np.zeros(shape.shape[1]), holdings
    used = [holding for holding, share in zip(holdings, found.x.tolist(), strict=False) if share > 0]
    return float(costs @ found.x), found.inequality @ shape, used


def _generate(
    sites: Sites, steps: Sequence[IntArray], price: FloatArray, needs: IntArray, shape: FloatArray
) -> tuple[float, list[Holding]]:
    """What prices prove of these sites, which may send and receive rows of so many ``steps`` ([C] each), and their cheapest
    holdings."""
    experts, held = len(price) - 1, np.arange(len(price))
    find, found = _find_table(price, needs, int(steps[0].max()) + 1)
    serve, served = _serve_table(price, needs, int(steps[1].max()) + 1)
    proven, holdings = 0.0, []
    for site, (count, most) in enumerate(zip(sites.count, sites.most, strict=True)):
        sent, received = steps[0][site], steps[1][site]
        value = held + find[sent, experts - held] - serve[received]
        value[held > most] = np.inf
        proven += count * float(value.min())
        lower = np.append(np.inf, value[:-1]) > value
        lowest = np.flatnonzero(lower & (np.append(value[1:], np.inf) >= value) & np.isfinite(value))
        for number in lowest[np.argsort(value[lowest], kind="stable")][:HOLDINGS].tolist():
            made, got = _visits(found, sent, experts - number, needs), _received(served, received, number, needs)
            holdings.append(Holding(site, float(number), shape @ (made - got), int(made @ needs), int(got @ needs)))
    return proven, holdings


@allocating
def _find_table(price: FloatArray, needs: IntArray, length: int) -> tuple[FloatArray, IntArray]:
    """[length, n + 1] each: least price of visits that find so many with rows for so many steps, and the largest of them."""
    experts = len(price) - 1
    best, visit = np.full((length, experts + 1), np.inf), np.zeros((length, experts + 1), dtype=np.int64)
    for steps in range(length):
        best[steps, 0] = 0.0
        for number in range(1, experts + 1):
            least, chosen = np.inf, 0
            for one in range(1, number + 1):
                if needs[one] > steps:
                    break
                paid = price[one] + best[steps - needs[one], number - one]
                if paid < least:
                    least, chosen = paid, one
            best[steps, number], visit[steps, number] = least, chosen
    return best, visit


@allocating
def _serve_table(price: FloatArray, needs: IntArray, length: int) -> tuple[FloatArray, IntArray]:
    """[length, n + 1] each: most that visits earn which find no more than so many with rows for so many steps, and one of these
    visits, or -1 where a step less is as good, or 0."""
    experts = len(price) - 1
    best, visit = np.zeros((length, experts + 1)), np.zeros((length, experts + 1), dtype=np.int64)
    for number in range(1, experts + 1):
        for steps in range(length):
            most, chosen = best[steps, number - 1], visit[steps, number - 1]
            if steps > 0 and best[steps - 1, number] > most:
                most, chosen = best[steps - 1, number], -1
            if steps >= needs[number]:
                earned = price[number] + best[steps - needs[number], number]
                if earned > most:
                    most, chosen = earned, number
            best[steps, number], visit[steps, number] = most, chosen
    return best, visit


@allocating
def _visits(visit: IntArray, steps: int, number: int, needs: IntArray) -> FloatArray:
    """[n + 1]: how many visits of each size find so many."""
    made = np.zeros(visit.shape[1])
    while number > 0:
        one = visit[steps, number]
        made[one] += 1.0
        number -= one
        steps -= needs[one]
    return made


@allocating
def _received(visit: IntArray, steps: int, number: int, needs: IntArray) -> FloatArray:
    """[n + 1]: the same of the visits that earn most."""
    made = np.zeros(visit.shape[1])
    while visit[steps, number] != 0:
        one = visit[steps, number]
        if one < 0:
            steps -= 1
        else:
            made[one] += 1.0
            steps -= needs[one]
    return made


@compiled
def _cheapest(
    rest: FloatArray,
    serve: FloatArray,
    beyond: float,
    longest: int,
    sent: IntArray,
    received: IntArray,
    least: IntArray,
    most: IntArray,
    found: FloatArray,
) -> None:
    """Site by site, into ``found``. Four numbers of experts at once take two thirds of the time of one by one."""
    last = len(serve) - 1
    for site in range(len(found)):
        there, here = rest[min(sent[site], len(rest) - 1)], serve[min(received[site], last)]
        first, second, third, fourth = np.inf, np.inf, np.inf, np.inf
        number, end = least[site], most[site] + 1
        while number + 4 <= end:
            one, two = there[number] - here[number], there[number + 1] - here[number + 1]
            three, four = there[number + 2] - here[number + 2], there[number + 3] - here[number + 3]
            first, second = one if one < first else first, two if two < second else second
            third, fourth = three if three < third else third, four if four < fourth else fourth
            number += 4
        while number < end:
            one = there[number] - here[number]
            first = one if one < first else first
            number += 1
        best = min(first, second, third, fourth)
        # What exceeds the table: all but a visit that both share.
        if received[site] > last:
            best -= beyond * (received[site] - last + longest)
        found[site] = best
