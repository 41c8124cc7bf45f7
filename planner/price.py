"""What one training step costs in dollars: every byte that leaves a site for another one at its price, and all ranks rented for
as long as the step takes."""

from __future__ import annotations

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.topology import Cluster


def step_usd(rent_usd_per_s: float, egress_usd: float, step_s: float) -> float:
    """Given what its bytes between sites cost, and all ranks together per second."""
    return egress_usd + rent_usd_per_s * step_s


def egress_usd(cluster: Cluster, link_bytes: FloatArray) -> float:
    """Of bytes per entry of ``Cluster.link_table``: counted on the links per pair where there are any, else as they leave."""
    if not cluster.has_egress_prices:
        return 0.0
    size = cluster.sizes[0]
    away = ~np.eye(size, dtype=np.bool_)
    if cluster.links:
        return float(link_bytes[cluster.pair_links] @ cluster.egress_usd_per_byte[away])
    # Without links per pair a source has one price; its largest entry is it (the diagonal is zero).
    return float(link_bytes[: 2 * size : 2] @ cluster.egress_usd_per_byte.max(axis=1, initial=0.0))
