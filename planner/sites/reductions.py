"""Sums over all ranks of all sites in closed form: of dense gradients, and of what a layer's shared expert is renewed with.

Reduce-scatter innermost level first, then all-gather outermost first, as ``hybridep.traffic`` has them.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.codecs import ExpertCodec, Wire, wires
from hybridep.traffic import gathered_wires, split_each
from planner.sites.exchange import Exchange, LayerExchanges
from planner.sites.problem import SiteProblem


def dense_exchanges(problem: SiteProblem) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Bytes of the reduce-scatter of dense gradients, innermost level first, and of the all-gather."""
    work = problem.workload
    gathered = tuple(gathered_wires(work, problem.codecs, len(problem.cluster.sizes)))
    reduced, gathered_back = (_reduce_scatter(problem, work.model.dense_params, one) for one in (problem.wires, gathered))
    return reduced, tuple(exchange.reverse for exchange in gathered_back)


def shared_exchanges(problem: SiteProblem, layer: LayerExchanges) -> tuple[Exchange, ...]:
    """Likewise of a layer's shared expert, exact: only where copies travel as the difference from it."""
    coded = (problem.wires[one.level].codecs.experts is ExpertCodec.SHARED_RESIDUAL and one.out.any() for one in layer.copies)
    return _shared(problem) if any(coded) else ()


@lru_cache(maxsize=8)
def _shared(problem: SiteProblem) -> tuple[Exchange, ...]:
    return _reduce_scatter(problem, problem.workload.model.expert_params, wires(problem.workload, (), len(problem.cluster.sizes)))


def _reduce_scatter(problem: SiteProblem, total: int, by_level: tuple[Wire, ...]) -> tuple[Exchange, ...]:
    size, n, sizes = problem.num_sites, problem.num_inside, problem.inner_sizes
    exchanges = []
    shards = np.full(n, total)  # what each of a site's ranks still has
    every = np.ones((size, 1))
    for level in reversed(range(1, len(sizes) + 1)):
        width = sizes[level - 1]
        if width == 1:
            continue
        own = np.arange(n) // math.prod(sizes[level:]) % width
        parts = split_each(shards, width)
        message = by_level[level].dense_bytes(parts)
        mine = message[np.arange(n), own]
        exchanges.append(
            Exchange(
                level=level,
                out=every * (message.sum(axis=1) - mine),
                into=every * (float(width - 1) * mine),
                messages=(width - 1, width - 1),
                largest_of=partial(np.asarray, message),
            )
        )
        shards = parts[np.arange(n), own]
    if size > 1:
        # [n, D]: what a rank sends to each site.
        parts = by_level[0].dense_bytes(split_each(shards, size))
        out = (parts.sum(axis=1, keepdims=True) - parts).T
        into = np.asarray(parts.T * float(size - 1), dtype=np.float64)

        def to_each(part: FloatArray) -> FloatArray:
            return np.tile(part, (size, 1)) * (1.0 - np.eye(size))

        exchanges.append(
            Exchange(
                level=0,
                out=out,
                into=into,
                messages=(size - 1, size - 1),
                pairs_of=lambda: to_each(parts.sum(axis=0)),
                largest_of=lambda: to_each(parts.max(axis=0)),
            )
        )
    return tuple(exchanges)
