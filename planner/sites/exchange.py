"""Transfers between and inside sites in closed form, and how long each takes.

The same bytes as ``hybridep.traffic`` gives for the placement, summed over what the links cannot tell apart. A token of a
site with n_h of the E experts served at site h goes there with probability 1 - C(E - n_h, K) / C(E, K).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hybridep.codecs import ExpertCodec, Wire, wires
from hybridep.placement import IntArray
from hybridep.traffic import COUNT_BYTES, FloatArray, split_sizes
from planner.sites.problem import Inside, SiteProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """Sums over one exchange, in rows, experts or bytes."""

    outer: bool
    """Between sites, or inside them."""
    out: FloatArray
    """[D, n] sent by each rank."""
    into: FloatArray
    """[D, n] received."""
    pairs: FloatArray | None = None
    """[D, D] from site to site, all ranks together, zero on the diagonal; None inside sites."""
    once: FloatArray | None = None
    """[D, n] what each rank codes of what it sends: each once, however many ranks get it; None for everything."""
    messages: tuple[int, int] = (0, 0)
    """Of the rank that sends to most others, and of the one that receives from most."""

    @property
    def reverse(self) -> Exchange:
        """The same in the other direction."""
        pairs = None if self.pairs is None else self.pairs.T
        return Exchange(outer=self.outer, out=self.into, into=self.out, pairs=pairs, messages=self.messages[::-1])

    @property
    def both(self) -> FloatArray:
        """[D, n]: out and in."""
        return self.out + self.into

    def line(self, problem: SiteProblem) -> tuple[float, float]:
        """(latency of the farthest pair that talks and overhead of further messages, seconds per unit's byte on the busiest
        link)."""
        if not self.out.any():
            return 0.0, 0.0
        further_s = (self.messages[0] - 1) * problem.cluster.gpu.message_overhead
        busiest = max(float(self.out.max()), float(self.into.max())) / problem.gpu_bytes_per_s
        if self.pairs is None:
            return problem.gpu_latency_s + further_s, busiest
        up, down = self.pairs.sum(axis=1) / problem.up_bytes_per_s, self.pairs.sum(axis=0) / problem.down_bytes_per_s
        busiest = max(busiest, float(up.max()), float(down.max()))
        if problem.pair_bytes_per_s is not None:
            busiest = max(busiest, float((self.pairs / problem.pair_bytes_per_s).max()))
        if problem.cluster.trunks:
            busiest = max(busiest, float((problem.trunk_s_per_byte @ self.pairs.ravel()).max()))
        return float((problem.latency_s * (self.pairs > 0)).max()) + further_s, busiest

    def seconds(self, problem: SiteProblem, unit_bytes: float) -> float:
        """With ``unit_bytes`` per row or expert: latency plus the busiest link's time."""
        latency, per_byte = self.line(problem)
        return latency + per_byte * unit_bytes


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
    """[D, E]: 1 where a site holds an expert: the home's, and those that serve somebody."""
    experts = np.arange(problem.num_experts)
    held = np.zeros((problem.num_sites, problem.num_experts), dtype=np.int64)
    held[problem.home_site, experts] = 1
    held[table, experts[None, :]] = 1
    return held


def served_counts(problem: SiteProblem, table: IntArray) -> IntArray:
    """[D, D]: number of experts that site h serves for tokens of site d."""
    size = problem.num_sites
    keys = np.arange(size)[:, None] * size + table
    return np.bincount(keys.ravel(), minlength=size * size).reshape(size, size)


def layer_exchanges(problem: SiteProblem, table: IntArray, inside: Inside) -> LayerExchanges:
    """``table`` is [D, E]: the site that computes expert e for tokens of site d."""
    size, n = problem.num_sites, problem.num_inside
    served = served_counts(problem, table)
    rows = problem.tokens[:, None] * problem.hit[served]
    arrived = np.broadcast_to(rows.sum(axis=0)[:, None], (size, n))
    np.fill_diagonal(rows, 0.0)
    talks = served > 0
    np.fill_diagonal(talks, False)
    held = held_by_site(problem, table)
    per_copy = problem.rows_per_choice
    inner_rows: tuple[Exchange, ...] = ()
    inner_counts: tuple[Exchange, ...] = ()
    outer_rows, outer_counts = _alike(n, rows, problem.tokens), _alike(n, COUNT_BYTES * talks.astype(np.float64))
    if inside is Inside.ALL or n == 1:
        loads = np.broadcast_to((per_copy @ served)[:, None], (size, n))
    else:
        by_rank = _served_by_rank(problem, table)
        before = arrived
        loads = n * np.tensordot(per_copy, by_rank, 1)
        needed = np.tensordot(problem.tokens, problem.hit[by_rank], 1)
        arrived = n * needed
        away = needed.sum(axis=1, keepdims=True) - needed
        told = _all_to(needed > 0)
        once = np.minimum(before, away)
        inner_rows = (Exchange(outer=False, out=away, into=(n - 1) * needed, once=once, messages=told),)
        present = np.zeros(n)
        present[problem.home_inside] = 1.0
        peers = np.broadcast_to(present.sum() - present, (size, n))
        into = np.broadcast_to((n - 1) * present, (size, n))
        told = _all_to(np.broadcast_to(present > 0, (size, n)))
        inner_counts = (Exchange(outer=False, out=COUNT_BYTES * peers, into=COUNT_BYTES * into, messages=told),)
    copies, held_at = _copies(problem, held, inside)
    return LayerExchanges(
        rows=(outer_rows, *inner_rows),
        copies=copies,
        counts=(outer_counts, *inner_counts),
        served=np.asarray(loads, dtype=np.float64),
        arrived=np.asarray(arrived, dtype=np.float64),
        copies_held=held_at,
    )


def dense_exchanges(problem: SiteProblem) -> tuple[Exchange, ...]:
    """Bytes of the reduce-scatter of dense gradients, innermost level first; the all-gather is the reverse."""
    return _reduce_scatter(problem, problem.workload.model.dense_params, problem.wires)


def shared_exchanges(problem: SiteProblem, layer: LayerExchanges) -> tuple[Exchange, ...]:
    """Likewise of a layer's shared expert, exact: only where copies travel as the difference from it."""
    coded = (
        problem.wires[0 if one.outer else 1].codecs.experts is ExpertCodec.SHARED_RESIDUAL and one.out.any()
        for one in layer.copies
    )
    return _shared(problem) if any(coded) else ()


@lru_cache(maxsize=8)
def _shared(problem: SiteProblem) -> tuple[Exchange, ...]:
    exact = wires(problem.workload, (), 2)
    return _reduce_scatter(problem, problem.workload.model.expert_params, (exact[0], exact[1]))


def _reduce_scatter(problem: SiteProblem, total: int, by_level: tuple[Wire, Wire]) -> tuple[Exchange, ...]:
    size, n = problem.num_sites, problem.num_inside
    exchanges = []
    shards = np.array([total])
    if n > 1:
        shards = np.array(split_sizes(total, n))
        every, message = np.ones((size, 1)), by_level[1].dense_bytes(shards)
        out, into = every * (message.sum() - message), every * ((n - 1) * message)
        exchanges.append(Exchange(outer=False, out=out, into=into, messages=(n - 1, n - 1)))
    if size > 1:
        # [n, D]: what a rank sends to each site.
        parts = by_level[0].dense_bytes(shards[:, None] // size + (np.arange(size) < shards[:, None] % size))
        pairs = np.tile(parts.sum(axis=0), (size, 1))
        np.fill_diagonal(pairs, 0.0)
        out = (parts.sum(axis=1, keepdims=True) - parts).T
        into = parts.T * float(size - 1)
        exchanges.append(Exchange(outer=True, out=out, into=into, pairs=pairs, messages=(size - 1, size - 1)))
    return tuple(exchanges)


def _alike(n: int, per_rank: FloatArray, most_coded: FloatArray | float = math.inf) -> Exchange:
    """Every rank of a site sends the same [D, D]; it codes at most so many rows ([D])."""
    out, into = per_rank.sum(axis=1), per_rank.sum(axis=0)
    every = np.ones(n)
    talks = per_rank > 0
    messages = int(talks.sum(axis=1).max()), int(talks.sum(axis=0).max())
    pairs = n * per_rank
    return Exchange(
        outer=True,
        out=out[:, None] * every,
        into=into[:, None] * every,
        once=np.minimum(out, most_coded)[:, None] * every,
        pairs=pairs,
        messages=messages,
    )


def _all_to(receives: NDArray[np.bool_]) -> tuple[int, int]:
    """Messages when all ranks of a site send to those others of it that receive ([D, n])."""
    others = receives.sum(axis=1, keepdims=True) - receives
    return int(others.max()), receives.shape[1] - 1


def _served_by_rank(problem: SiteProblem, table: IntArray) -> IntArray:
    """[D, D, n]: experts that rank c of site h serves for one rank of site d."""
    size, n = problem.num_sites, problem.num_inside
    keys = (np.arange(size)[:, None] * size + table) * n + problem.home_inside
    return np.bincount(keys.ravel(), minlength=size * size * n).reshape(size, size, n)


def _copies(problem: SiteProblem, held: IntArray, inside: Inside) -> tuple[tuple[Exchange, ...], FloatArray]:
    """The gather's exchanges in experts, and copies per rank ([D, n])."""
    size, n = problem.num_sites, problem.num_inside
    at_home = np.bincount(problem.home, minlength=size * n).reshape(size, n).astype(np.float64)
    site, expert = np.nonzero(held)
    held_at = np.bincount(site * n + problem.home_inside[expert], minlength=size * n).reshape(size, n).astype(np.float64)
    pairs = np.bincount(problem.home_site[expert] * size + site, minlength=size * size).reshape(size, size).astype(np.float64)
    np.fill_diagonal(pairs, 0.0)
    copies = np.bincount(expert, minlength=problem.num_experts) - 1.0
    out = np.bincount(problem.home, weights=copies, minlength=size * n).reshape(size, n)
    moved = site != problem.home_site[expert]
    between = np.zeros((size, n, size), dtype=np.bool_)
    between[problem.home_site[expert[moved]], problem.home_inside[expert[moved]], site[moved]] = True
    messages = int(between.sum(axis=2).max()), int(between.sum(axis=0).max())
    different = np.bincount(problem.home, weights=copies > 0, minlength=size * n).reshape(size, n)
    outer = Exchange(
        outer=True,
        out=np.asarray(out, dtype=np.float64),
        into=held_at - at_home,
        once=np.asarray(different, dtype=np.float64),
        pairs=pairs,
        messages=messages,
    )
    if inside is Inside.ONE or n == 1:
        return (outer,), held_at - at_home
    all_held = held_at.sum(axis=1, keepdims=True)
    spread = _all_to(held_at > 0)[::-1]
    fan_out = Exchange(outer=False, out=held_at * (n - 1), into=all_held - held_at, once=held_at, messages=spread)
    return (outer, fan_out), np.asarray(all_held - at_home)
