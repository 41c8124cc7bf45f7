"""A plan as matrices over sites: who computes for whom, who copies from whom, and how busy the links between are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.plan import Plan
from planner.evaluate import evaluate


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanMatrices:
    """Means over the MoE layers."""

    sites: tuple[str, ...]
    served: FloatArray
    """[D, D]: experts that the column's site computes for tokens of the row's."""
    copied: FloatArray
    """[D, D]: experts of the row's site that the column's holds a copy of."""
    up_s: FloatArray
    """[D]: seconds of a step that a site's up link is busy."""
    down_s: FloatArray
    """[D]."""
    pair_s: FloatArray | None
    """[D, D] from row to column; None where only access links limit."""


def plan_matrices(plan: Plan) -> PlanMatrices:
    """Of any plan."""
    cluster, size = plan.cluster, plan.cluster.sizes[0]
    served, copied = np.zeros((size, size)), np.zeros((size, size))
    layers = plan.workload.model.num_moe_layers
    rows = np.arange(size)[:, None]
    for _, num_layers, _, placement, _ in plan.placed:
        share = num_layers / layers
        np.add.at(served, (np.broadcast_to(rows, placement.serve[0].shape), placement.serve[0]), share)
        holder, expert = np.nonzero(placement.holds_at[0])
        np.add.at(copied, (placement.home_coordinates[0][expert], holder), share)
    np.fill_diagonal(copied, 0.0)
    cost, _ = evaluate(plan)
    pair_s = None
    if cluster.links:
        pair_s = np.zeros((size, size))
        pair_s[~np.eye(size, dtype=np.bool_)] = cost.link_s[cluster.pair_links]
    return PlanMatrices(
        sites=cluster.site_names,
        served=served,
        copied=copied,
        up_s=cost.link_s[: 2 * size : 2],
        down_s=cost.link_s[1 : 2 * size : 2],
        pair_s=pair_s,
    )
