"""The oracle: every serving table, for tiny problems only."""

from __future__ import annotations

from itertools import product

import numpy as np

from hybridep.placement import IntArray
from planner.sites.cost import cost_of
from planner.sites.exchange import layer_exchanges
from planner.sites.problem import Configuration, Inside, SiteProblem


def best_table(problem: SiteProblem) -> tuple[IntArray, Configuration, float] | None:
    """(table, configuration, step seconds) of the fastest plan that fits; None when none fits. Looks at
    D ** (D E) tables."""
    size, experts = problem.num_sites, problem.num_experts
    best: tuple[IntArray, Configuration, float] | None = None
    insides = list(dict.fromkeys(configuration.inside for configuration in problem.configurations()))
    for entries in product(range(size), repeat=size * experts):
        table = np.array(entries, dtype=np.int64).reshape(size, experts)
        for inside in insides:
            best = _better(problem, table, inside, best)
    return best


def _better(
    problem: SiteProblem, table: IntArray, inside: Inside, best: tuple[IntArray, Configuration, float] | None
) -> tuple[IntArray, Configuration, float] | None:
    layer = layer_exchanges(problem, table, inside)
    for configuration in problem.configurations():
        if configuration.inside is inside:
            cost = cost_of(problem, layer, configuration.residency)
            if (best is None or cost.step_s < best[2]) and cost.fits(problem):
                best = table, configuration, cost.step_s
    return best
