"""Transfers between and inside sites in closed form, and how long each takes.

The same bytes as ``hybridep.traffic`` gives for the placement, summed over what the links cannot tell apart. A token of a
site with n_h of the E experts served at site h goes there with probability 1 - C(E - n_h, K) / C(E, K); or where tokens choose
from some groups of experts only, with that of ``hybridep.group_choice``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.gating import gating
from hybridep.traffic import COUNT_BYTES
from planner.sites.problem import Inside, SiteProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """Sums over one exchange, in rows, experts or bytes."""

    level: int
    """0 between sites."""
    out: FloatArray
    """[D, n] sent by each rank."""
    into: FloatArray
    """[D, n] received."""
    once: FloatArray | None = None
    """[D, n] what each rank codes of what it sends: each once, however many ranks get it; None for everything."""
    messages: tuple[int, int] = (0, 0)
    """Of the rank that sends to most others, and of the one that receives from most."""
    pairs_of: Callable[[], FloatArray] | None = None
    """Makes ``pairs``, which most questions about many sites can do without; None below the sites."""
    largest_of: Callable[[], FloatArray]
    """Makes ``largest``, which matters where connections have windows only."""

    @cached_property
    def pairs(self) -> FloatArray:
        """[D, D] from site to site, all ranks together, zero on the diagonal."""
        assert self.pairs_of is not None
        return self.pairs_of()

    @cached_property
    def largest(self) -> FloatArray:
        """The largest message between two ranks: [D, D] from site to site, zero on the diagonal; inside sites of any shape."""
        return self.largest_of()

    @cached_property
    def reverse(self) -> Exchange:
        """The same in the other direction."""
        return Exchange(
            level=self.level,
            out=self.into,
            into=self.out,
            messages=self.messages[::-1],
            pairs_of=None if self.pairs_of is None else lambda: self.pairs.T,
            largest_of=lambda: self.largest.T,
        )

    @property
    def both(self) -> FloatArray:
        """[D, n]: out and in."""
        return self.out + self.into

    def of_workers(self, number: int) -> tuple[FloatArray, FloatArray]:
        """What the ranks of each of a site's so many workers send together, and what they receive: [D, workers] each."""
        size, n = self.out.shape
        if number == n:
            return self.out, self.into
        out, into = (one.reshape(size, number, n // number).sum(axis=2) for one in (self.out, self.into))
        return out, into

    def line(self, problem: SiteProblem) -> tuple[float, float]:
        """(latency of the farthest pair that talks and overhead of further messages, seconds per unit's byte on the busiest
        link, or of the largest message within its windows)."""
        if not self.out.any():
            return 0.0, 0.0
        further_s = (self.messages[0] - 1) * problem.cluster.gpu.message_overhead
        # What goes from worker to worker of a level crosses their links and those of all levels below.
        below = problem.inner_links[max(self.level - 1, 0) :]
        busiest = max((float(one.max()) / rate for number, rate in below for one in self.of_workers(number)), default=0.0)
        window_s_per_byte = problem.window_s_per_byte[self.level]
        if window_s_per_byte.any():
            busiest = max(busiest, float((self.largest * window_s_per_byte).max()))
        if self.level > 0:
            return problem.cluster.levels[self.level].latency + further_s, busiest
        up, down = self.out.sum(axis=1) / problem.up_bytes_per_s, self.into.sum(axis=1) / problem.down_bytes_per_s
        busiest = max(busiest, float(up.max()), float(down.max()))
        if problem.pair_bytes_per_s is not None:
            busiest = max(busiest, float((self.pairs / problem.pair_bytes_per_s).max()))
        if problem.cluster.trunks:
            busiest = max(busiest, float((problem.trunk_s_per_byte @ self.pairs.ravel()).max()))
        latency_s = problem.one_latency_s
        if latency_s is None:
            latency_s = float((problem.latency_s * (self.pairs > 0)).max())
        return latency_s + further_s, busiest

    def seconds(self, problem: SiteProblem) -> float:
        """Of one whose units are bytes: latency plus the busiest link's time."""
        latency_s, busiest_s = self.line(problem)
        return latency_s + busiest_s


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerExchanges:
    """Of one layer: rows of one dispatch and experts of one gather, between sites and inside."""

    rows: tuple[Exchange, ...]
    copies: tuple[Exchange, ...]
    counts: tuple[Exchange, ...]
    """Bytes."""
    served: FloatArray
    """[D, n]: token copies that each rank computes."""
    arrived: FloatArray
    """[D, n]: rows that end up at each rank, those of its own tokens included."""
    copies_held: FloatArray
    """[D, n]: experts of others."""


def held_by_site(problem: SiteProblem, table: IntArray) -> IntArray:
    """[D, E]: 1 where a site holds an expert: the home's, and those that serve somebody. ``table`` may leave out rows that
    another one equals."""
    experts = np.arange(problem.num_experts)
    held = np.zeros((problem.num_sites, problem.num_experts), dtype=np.int64)
    held[problem.home_site, experts] = 1
    held[table, experts[None, :]] = 1
    return held


def distinct_rows(table: IntArray) -> tuple[IntArray, IntArray]:
    """The rows of ``table`` ([D, E]) that differ, in the order of their first sites ([U, E]), and which of them each site has
    ([D])."""
    number: dict[bytes, int] = {}
    which = np.array([number.setdefault(row.tobytes(), len(number)) for row in table])
    return table[np.unique(which, return_index=True)[1]], which


@dataclass(frozen=True, kw_only=True, eq=False)
class _Served:
    """How many experts each place serves for each row of a table, where that is any: [K] each."""

    row: IntArray
    place: IntArray
    count: IntArray
    hit: FloatArray
    """The probability that a token needs one of them."""

    @classmethod
    def of(cls, problem: SiteProblem, places: IntArray) -> _Served:
        """``places`` is [rows, E]: where each expert is computed."""
        ordered = np.sort(places, axis=1)
        first = np.ones(ordered.shape, dtype=np.bool_)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        start = np.flatnonzero(first)
        row, place, count = start // ordered.shape[1], ordered.ravel()[start], np.diff(start, append=ordered.size)
        if problem.group_of is None:
            return cls(row=row, place=place, count=count, hit=problem.hit[count])
        groups, size = int(problem.group_of[-1]) + 1, int(places.max()) + 1
        found = np.searchsorted(row * size + place, np.arange(len(places))[:, None] * size + places)
        of_groups = np.bincount((found * groups + problem.group_of).ravel(), minlength=len(row) * groups)
        hit = gating(problem.workload).hit_by_groups(of_groups.reshape(len(row), groups))
        return cls(row=row, place=place, count=count, hit=hit)

    def by_place(self, value: NDArray[Any], users: NDArray[Any], size: int) -> FloatArray:
        """[size]: ``value`` ([K]) of all users of all rows together, with so many users ([rows]) each."""
        return np.asarray(np.bincount(self.place, weights=users[self.row] * value, minlength=size), dtype=np.float64)


def layer_exchanges(problem: SiteProblem, table: IntArray, inside: tuple[Inside, ...]) -> LayerExchanges:
    """``table`` is [D, E]: the site that computes expert e for tokens of site d."""
    return with_inside(problem, between_sites(problem, table), inside)


@dataclass(frozen=True, kw_only=True, eq=False)
class BetweenSites:
    """What of a layer no choice inside sites changes. Sites with equal rows of the table are counted together."""

    distinct: IntArray
    """[U, E]: the rows that differ."""
    tokens: FloatArray
    """[U]: of all users of a row."""
    per_copy: FloatArray
    """[U]: the choices that those make of each expert."""
    served: _Served
    rows: Exchange
    counts: Exchange
    copies: Exchange
    held_at: FloatArray
    """[D, n]: experts that a site holds, by their homes' place inside its site."""


def between_sites(problem: SiteProblem, table: IntArray) -> BetweenSites:
    """``table`` is [D, E]."""
    size = problem.num_sites
    distinct, which = distinct_rows(table)
    served = _Served.of(problem, distinct)
    told_bytes = np.full(len(served.row), float(COUNT_BYTES))
    copies, held_at = _copies(problem, held_by_site(problem, distinct))
    return BetweenSites(
        distinct=distinct,
        tokens=np.asarray(np.bincount(which, weights=problem.tokens), dtype=np.float64),
        per_copy=np.asarray(np.bincount(which, weights=problem.rows_per_choice), dtype=np.float64),
        served=served,
        rows=_alike(problem, served.hit, served, which, problem.tokens, problem.tokens),
        counts=_alike(problem, told_bytes, served, which, np.ones(size)),
        copies=copies,
        held_at=held_at,
    )


def with_inside(problem: SiteProblem, between: BetweenSites, inside: tuple[Inside, ...]) -> LayerExchanges:
    """All exchanges of a layer. Level after level, what is held goes to all workers where all hold it; tokens go to the one that
    holds an expert where one does."""
    size, n, sizes = problem.num_sites, problem.num_inside, problem.inner_sizes
    served, held_at, tokens = between.served, between.held_at, between.tokens
    rows, copies, counts = [between.rows], [between.copies], [between.counts]
    here = np.stack(np.unravel_index(np.arange(n), sizes)) if sizes else np.zeros((0, 1), dtype=np.int64)
    home = here[:, problem.home_inside]
    # Where tokens are after the hops so far: at one of ``places`` of their site, told by the coordinates at levels where one
    # worker holds each expert. ``place`` is that of each rank, ``found`` of each expert; ``alike`` ranks send there alike.
    places = alike = 1
    place, found = np.zeros(n, dtype=np.int64), np.zeros(problem.num_experts, dtype=np.int64)
    arrived = np.broadcast_to(served.by_place(served.hit, tokens, size)[:, None], (size, n))
    for level, (width, one) in enumerate(zip(sizes, inside, strict=True), start=1):
        if width == 1:
            continue
        coordinate = here[level - 1]
        inner = n // math.prod(sizes[:level])
        if one is Inside.ALL:
            all_held = _together(held_at, width, inner)
            copies.append(
                Exchange(
                    level=level,
                    out=held_at * (width - 1),
                    into=all_held - held_at,
                    once=held_at,
                    messages=_all_to(held_at > 0, width, inner)[::-1],
                    largest_of=partial(np.asarray, held_at),
                )
            )
            held_at = all_held
            continue
        places, place, found = places * width, place * width + coordinate, found * width + home[level - 1]
        served = _Served.of(problem, between.distinct * places + found)
        needed = served.by_place(served.hit, tokens, size * places).reshape(size, places)[:, place]
        sent = alike * needed
        before, away = arrived, _together(sent, width, inner) - sent
        rows.append(
            Exchange(
                level=level,
                out=away,
                into=(width - 1) * sent,
                once=np.minimum(before, away),
                messages=_all_to(needed > 0, width, inner),
                largest_of=partial(np.asarray, sent),
            )
        )
        present = np.bincount(home[level - 1], minlength=width)[coordinate] > 0
        some = np.broadcast_to(present, (size, n))
        told = COUNT_BYTES * some.astype(np.float64)
        counts.append(
            Exchange(
                level=level,
                out=_together(told, width, inner) - told,
                into=(width - 1) * told,
                messages=_all_to(some, width, inner),
                largest_of=partial(np.asarray, told),
            )
        )
        alike *= width
        arrived = alike * needed
    loads = served.by_place(served.count * alike, between.per_copy, size * places).reshape(size, places)[:, place]
    return LayerExchanges(
        rows=tuple(rows),
        copies=tuple(copies),
        counts=tuple(counts),
        served=np.asarray(loads, dtype=np.float64),
        arrived=np.asarray(arrived, dtype=np.float64),
        copies_held=np.asarray(held_at - problem.at_home, dtype=np.float64),
    )


def _together(values: FloatArray, width: int, inner: int) -> FloatArray:
    """[D, n]: the sum over the ``width`` ranks that differ at one level only, which has ``inner`` ranks per worker below it."""
    split = values.reshape(len(values), -1, width, inner)
    return np.asarray(np.broadcast_to(split.sum(axis=2, keepdims=True), split.shape).reshape(values.shape), dtype=np.float64)


def _alike(
    problem: SiteProblem,
    sent: FloatArray,
    served: _Served,
    which: IntArray,
    scale: FloatArray,
    most_coded: FloatArray | float = math.inf,
) -> Exchange:
    """Every rank of a site sends the same to each other site: its ``scale`` ([D]) times what is ``sent`` ([K]) for the experts
    served there; it codes at most ``most_coded`` of that. ``which`` is the row of each site."""
    size, n, every = problem.num_sites, problem.num_inside, np.ones(problem.num_inside)
    users = np.bincount(which, weights=scale)
    keys, mine = served.row * size + served.place, which * size + np.arange(size)
    at = np.minimum(np.searchsorted(keys, mine), len(keys) - 1)
    own, one = keys[at] == mine, np.ones(len(sent))
    kept = np.where(own, scale * sent[at], 0.0)
    to = np.bincount(served.row)[which] - own
    of = served.by_place(one, np.bincount(which).astype(np.float64), size) - own
    # Where all was taken away from a sum, what is left is rounding.
    out = np.where(to > 0, scale * np.bincount(served.row, weights=sent)[which] - kept, 0.0)
    into = np.where(of > 0, served.by_place(sent, users, size) - kept, 0.0)

    def each() -> FloatArray:
        by_row = np.zeros((len(users), size))
        by_row[served.row, served.place] = sent
        return _away(scale[:, None] * by_row[which])

    return Exchange(
        level=0,
        out=out[:, None] * every,
        into=into[:, None] * every,
        once=np.minimum(out, most_coded)[:, None] * every,
        messages=(int(to.max()), int(of.max())),
        pairs_of=lambda: n * each(),
        largest_of=each,
    )


def _away(pairs: FloatArray) -> FloatArray:
    """``pairs`` with nothing on its diagonal."""
    np.fill_diagonal(pairs, 0.0)
    return pairs


def _all_to(receives: BoolArray, width: int, inner: int) -> tuple[int, int]:
    """Messages when ranks that differ at one level only send to those others of them that receive ([D, n])."""
    others = _together(receives.astype(np.float64), width, inner) - receives
    return int(others.max()), width - 1


def _copies(problem: SiteProblem, held: IntArray) -> tuple[Exchange, FloatArray]:
    """The gather's exchange between sites in experts, and what each site holds by the homes' places inside ([D, n])."""
    size, n, home_site = problem.num_sites, problem.num_inside, problem.home_site
    held_at = held @ np.eye(n)[problem.home_inside]
    into = held_at - problem.at_home
    copies = held.sum(axis=0) - 1.0
    out = np.bincount(problem.home, weights=copies, minlength=size * n).reshape(size, n)
    messages = int(copies.max()), int(into.max())
    ranks, first = np.unique(problem.home, return_index=True)
    if len(ranks) < problem.num_experts:
        # Which ranks send anything to each site; homes are in the order of ranks.
        sends = np.maximum.reduceat(held, first, axis=1)
        sends[ranks // n, np.arange(len(ranks))] = 0
        messages = int(sends.sum(axis=0).max()), int((sends @ np.eye(n)[ranks % n]).max())

    def pairs() -> FloatArray:
        moved = np.zeros((size, size))
        np.add.at(moved, home_site, held.T)
        return _away(moved)

    def largest() -> FloatArray:
        moved = np.zeros((size * n, size))
        np.add.at(moved, problem.home, held.T)
        return _away(moved.reshape(size, n, size).max(axis=1))

    different = np.bincount(problem.home, weights=copies > 0, minlength=size * n).reshape(size, n)
    outer = Exchange(
        level=0,
        out=np.asarray(out, dtype=np.float64),
        into=into,
        once=np.asarray(different, dtype=np.float64),
        messages=messages,
        pairs_of=pairs,
        largest_of=largest,
    )
    return outer, held_at
