"""Sums over all ranks of all sites in closed form: of dense gradients, and of what a layer's shared expert is renewed with.

Reduce-scatter innermost level first, then all-gather outermost first, as ``hybridep.traffic`` has them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hybridep.codecs import ExpertCodec, Wire, wires
from hybridep.traffic import FloatArray, split_sizes
from planner.sites.exchange import Exchange, LayerExchanges
from planner.sites.problem import SiteProblem


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
        exchanges.append(Exchange(outer=False, out=out, into=into, messages=(n - 1, n - 1), largest_of=lambda: message))
    if size > 1:
        # [n, D]: what a rank sends to each site.
        parts = by_level[0].dense_bytes(shards[:, None] // size + (np.arange(size) < shards[:, None] % size))
        out = (parts.sum(axis=1, keepdims=True) - parts).T
        into = parts.T * float(size - 1)

        def to_each(part: FloatArray) -> FloatArray:
            return np.tile(part, (size, 1)) * (1.0 - np.eye(size))

        exchanges.append(
            Exchange(
                outer=True,
                out=out,
                into=into,
                messages=(size - 1, size - 1),
                pairs_of=lambda: to_each(parts.sum(axis=0)),
                largest_of=lambda: to_each(parts.max(axis=0)),
            )
        )
    return tuple(exchanges)
