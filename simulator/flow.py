"""Max-min fair rates of flows over shared links, by progressive filling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_TIE = 1e-10
"""Links whose fair shares differ by less than this (relative) fill in one round; a rate is low by no more than that."""


def max_min_rates(link_capacity_bytes_per_s: FloatArray, paths: IntArray, counts: FloatArray | None = None) -> FloatArray:
    """Rate of each flow such that none can grow without shrinking one that is no faster.

    link_capacity_bytes_per_s: [links], each > 0.
    paths: [flows, longest path], the link ids of each flow, -1 where a path is shorter.
    counts: [flows], how many identical flows a row stands for (1 where omitted); the answer is the rate of ONE of them,
        exactly what a row for each would give.
    Returns bytes per second, [flows]; infinite for a flow that crosses no link.

    Progressive filling raises all rates together and freezes flows as links fill (Bertsekas and Gallager, Data
    Networks, section 6.5.2). Here every link that fills before all links it shares a flow with is frozen in the same
    round, not just the first of the network: freezing others can only raise its neighbours' shares, so the rates are
    the same and rounds are far fewer.
    """
    num_flows = paths.shape[0]
    num_links = link_capacity_bytes_per_s.shape[0]
    rates = np.full(num_flows, np.inf)
    # -1 becomes one extra link that never fills.
    open_paths = np.where(paths < 0, num_links, paths)
    open_flows = np.arange(num_flows)
    open_counts = np.ones(num_flows) if counts is None else np.asarray(counts, dtype=np.float64)
    left = np.append(link_capacity_bytes_per_s, np.inf)
    on_link = paths.shape[1] and (open_paths < num_links).any(axis=1)
    if not np.all(on_link):
        keep = np.broadcast_to(on_link, num_flows)
        open_flows, open_paths, open_counts = open_flows[keep], open_paths[keep], open_counts[keep]
    while open_flows.size:
        flat = open_paths.ravel()
        weights = np.broadcast_to(open_counts[:, None], open_paths.shape)
        load = np.bincount(flat, weights=weights.ravel(), minlength=num_links + 1)
        share = np.divide(left, load, out=np.full(num_links + 1, np.inf), where=load > 0)
        share[num_links] = np.inf
        path_share = share[open_paths]
        rate = path_share.min(axis=1)
        # A link is frozen when it is the tightest link of all its flows; counts are integers, so the sums are exact.
        tight = path_share <= rate[:, None] * (1.0 + _TIE)
        tight_load = np.bincount(flat, weights=(weights * tight).ravel(), minlength=num_links + 1)
        full = (tight_load == load) & (load > 0)
        frozen = full[open_paths].any(axis=1)
        rates[open_flows[frozen]] = rate[frozen]
        used = np.where(frozen, rate, 0.0)[:, None] * weights
        left = np.maximum(left - np.bincount(flat, weights=used.ravel(), minlength=num_links + 1), 0.0)
        stay = ~frozen
        open_flows, open_paths, open_counts = open_flows[stay], open_paths[stay], open_counts[stay]
    return rates
