"""A lower bound on what the bytes between sites cost, whatever the serving table.

Each site pays for itself: tokens of site d for the rows that leave it and for what comes back, and a holder for the copies that
it gets. A site that computes m experts for its own tokens holds at least those, so what it does not own of them are copies, at
the price of the cheapest homes; and each of its tokens that needs one of the other E - m sends at least one row, at the price of
the cheapest site. The smallest sum over m counts.
"""

from __future__ import annotations

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.traffic import gathers_and_returns
from planner.sites.cost import fixed_cost
from planner.sites.problem import SiteProblem


def least_egress_usd(problem: SiteProblem) -> float:
    """No plan's bytes cost less per step."""
    prices = problem.egress_usd_per_byte
    if prices is None or problem.num_sites < 2:
        return 0.0
    layer_usd = min(
        _layer_usd(problem, prices, *gathers_and_returns(residency, _batches(problem))) for residency in problem.residencies
    )
    return fixed_cost(problem).egress_usd + problem.num_layers * layer_usd


def _batches(problem: SiteProblem) -> int:
    return problem.workload.training.micro_batches


def _layer_usd(problem: SiteProblem, prices: FloatArray, gathers: int, returns: int) -> float:
    wire, size, experts = problem.wire, problem.num_sites, problem.num_experts
    row_usd = prices * wire.row_there_bytes + prices.T * wire.row_back_bytes
    np.fill_diagonal(row_usd, np.inf)
    rows = problem.num_inside * problem.for_bounds.hit[experts - np.arange(experts + 1)]
    # [home site, holder]
    copy_usd = prices * (gathers * wire.expert_bytes) + prices.T * (returns * wire.expert_gradient_bytes)
    total = 0.0
    for site in range(size):
        foreign = np.sort(copy_usd[problem.home_site[problem.home_site != site], site])
        copies = np.concatenate([np.zeros(experts - len(foreign) + 1), np.cumsum(foreign)])
        total += float((copies + _batches(problem) * problem.tokens[site] * rows * row_usd[site].min()).min())
    return total
