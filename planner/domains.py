"""Expert domains: which sizes a level allows, and how many experts of each home may be copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, product

import numpy as np

from hybridep.placement import LevelChoice, divisors, home_blocks
from hybridep.plan import LayerGroup, Residency
from hybridep.recompute import Recompute
from hybridep.serving import ServingGroup
from hybridep.topology import Cluster


def copied_counts(num_at_home: int, max_steps: int) -> tuple[int, ...]:
    """Numbers of experts of the fullest home worth trying, ascending from 1: all of 1..n when n <= ``max_steps``, else
    ``max_steps`` numbers spread evenly that end with n."""
    if num_at_home <= max_steps:
        return tuple(range(1, num_at_home + 1))
    return tuple(sorted({max(1, round(num_at_home * step / max_steps)) for step in range(1, max_steps + 1)}))


def level_choices(size: int, num_at_home: int, max_steps: int) -> tuple[LevelChoice, ...]:
    """Distinct choices of one level: domain size and share of each home's experts that are copied. Nothing is copied with
    a size of 1, so that one has no further variants."""
    counts = copied_counts(num_at_home, max_steps)
    partial = [
        LevelChoice(domain_size=d, migration_ratio=count / num_at_home) for d in divisors(size) if d > 1 for count in counts
    ]
    return (LevelChoice(), *partial)


def all_choices(cluster: Cluster, num_experts: int, max_steps: int) -> tuple[dict[str, LevelChoice], ...]:
    """Every combination of the levels' choices, by level name."""
    num_at_home = int(np.bincount(home_blocks(cluster, num_experts)).max())
    names = [level.name for level in cluster.levels]
    choices = [level_choices(size, num_at_home, max_steps) for size in cluster.sizes]
    return tuple(dict(zip(names, combination, strict=True)) for combination in product(*choices))


def joined(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Of single layers, in their order: neighbouring ones that do the same are one group."""

    def decided(group: LayerGroup) -> object:
        return group.model_copy(update={"first_layer": 0})

    together = (list(same) for _, same in groupby(groups, key=decided))
    return tuple(alike[0].model_copy(update={"num_layers": len(alike)}) for alike in together)


def layer_group(
    first: int,
    count: int,
    choices: dict[str, LevelChoice],
    residency: Residency,
    serving: tuple[ServingGroup, ...] = (),
    *,
    homes: Mapping[str, str] | None = None,
    recompute: Recompute = Recompute.NOTHING,
) -> LayerGroup:
    """Of a plan file; ratios only where something is copied."""
    return LayerGroup(
        first_layer=first,
        num_layers=count,
        domains={name: choice.domain_size for name, choice in choices.items()},
        migration={name: choice.migration_ratio for name, choice in choices.items() if choice.domain_size > 1},
        residency=residency,
        recompute=recompute,
        serving=serving,
        homes=dict(homes or {}),
    )
