"""Memory that sites have left, and about what copies and rows take of it: what keeps walks among tables that fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from planner.activations import routed_backward_bytes, routed_bytes
from planner.memory import lasting_copy_bytes
from planner.sites.cost import rank_memory_bytes
from planner.sites.exchange import layer_exchanges
from planner.sites.problem import Configuration, SiteProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """Of each site's fullest rank."""

    left_bytes: FloatArray
    """[D]."""
    copy_bytes: float
    """What one copy more at a site takes, about; here and below as shared by its ranks now."""
    choice_bytes: float
    """What one choice more takes that each rank of a site computes."""


def room_of(problem: SiteProblem, table: IntArray, configuration: Configuration) -> Room:
    """Of ``table`` ([D, E])."""
    layer = layer_exchanges(problem, table, configuration.inside)
    needs = rank_memory_bytes(problem, layer, configuration.residency)
    work, one = problem.workload, np.ones(1)
    # Of the experts' backward: gradients of what they hold, and of their rows.
    held = problem.num_layers * lasting_copy_bytes(work, one, configuration.residency) + work.expert_bytes
    arrived = one * float(layer.arrived.sum() / layer.served.sum())
    kept, again = routed_bytes(work, one, arrived, problem.recompute)
    rows = problem.num_layers * kept + again + routed_backward_bytes(work)
    copies = float(layer.copies[0].into.sum())
    return Room(
        left_bytes=(problem.compute.memory_bytes - needs).min(axis=1),
        copy_bytes=float(held[0]) * (float(layer.copies_held.max(axis=1).sum()) / copies if copies else 1.0),
        choice_bytes=float(rows[0] * layer.served.max(axis=1).sum() / layer.served.mean(axis=1).sum()),
    )
