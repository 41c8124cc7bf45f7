"""What rules force every plan to send, and how far: rows of tokens that may not stay, and copies that must be elsewhere than at
home."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray
from planner.sites.problem import SiteProblem

SLACK = 1e-9
"""Share by which times are rounded down, since plans' own are sums in another order."""


class Forced(NamedTuple):
    """Of one layer, at least; as those of boxes (``planner.sites.boxes``)."""

    gather_s: float = 0.0
    return_s: float = 0.0
    forward_s: float = 0.0
    back_s: float = 0.0
    copies_from_s: float = 0.0
    """Latency from a home to one of its copies."""
    tokens_from_s: float = 0.0
    """Latency between sites that exchange tokens."""


def forced(problem: SiteProblem, copies_s: FloatArray, tokens_s: FloatArray) -> Forced:
    """Of all serving tables that keep the rules; zero without rules. ``copies_s``, ``tokens_s``: latencies from the row's site to
    the column's [D, D].

    A site sends a row for each token that needs one of the experts which it may not compute, wherever that goes. Where only one
    site may compute some experts for another's tokens, their rows come there, and unless it is their home, their copies do. An
    expert whose home may not compute it for anybody leaves it at least once.
    """
    rules = problem.permissions
    if rules is None:
        return Forced()
    size, experts, home = problem.num_sites, np.arange(problem.num_experts), problem.home_site
    rows_out, rows_in, tokens_from_s = np.zeros(size), np.zeros(size), 0.0
    must_hold, may_hold = np.zeros((2, size, problem.num_experts), dtype=np.bool_)
    for site in range(size):
        possible = rules.serve[site][:, None] & rules.hold
        may_hold |= possible
        away = ~possible[site]
        rows = problem.num_inside * problem.tokens[site] * problem.hit
        rows_out[site] = rows[int(away.sum())]
        if away.any():
            nearest_s = np.where(possible[:, away], tokens_s[site][:, None], np.inf).min(axis=0)
            tokens_from_s = max(tokens_from_s, float(nearest_s.max()))
        only = np.flatnonzero(possible.sum(axis=0) == 1)
        holder = possible.argmax(axis=0)[only]
        must_hold[holder, only] = True
        there = np.bincount(holder, minlength=size)
        there[site] = 0
        rows_in += rows[there]
    must_hold[home, experts] = False
    leaves = ~may_hold[home, experts]
    ways_s = copies_s[home].T
    nearest_s = np.where(may_hold[:, leaves], ways_s[:, leaves], np.inf).min(axis=0)
    farthest_s = [*ways_s[must_hold], *nearest_s]
    out = np.bincount(home, weights=np.maximum(must_hold.sum(axis=0), leaves), minlength=size).astype(np.float64)
    into = must_hold.sum(axis=1).astype(np.float64)

    def busiest(out: FloatArray, into: FloatArray) -> float:
        return (1 - SLACK) * float(max((out / problem.up_bytes_per_s).max(), (into / problem.down_bytes_per_s).max()))

    return Forced(
        gather_s=busiest(out, into) * problem.wire.expert_bytes,
        return_s=busiest(into, out) * problem.wire.expert_gradient_bytes,
        forward_s=busiest(rows_out, rows_in),
        back_s=busiest(rows_in, rows_out),
        copies_from_s=float(max(farthest_s, default=0.0)),
        tokens_from_s=tokens_from_s,
    )
