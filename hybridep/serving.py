"""The outermost level's serving table as people read it: for tokens of these sites, that site computes those experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from pydantic import Field

from hybridep.arrays import IntArray
from hybridep.config import Strict
from hybridep.errors import PlacementError
from hybridep.topology import Cluster

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


class ServingGroup(Strict):
    """Sites whose tokens are served alike: each expert at one site for all of them."""

    sites: tuple[str, ...] = Field(min_length=1)
    holders: dict[str, str]
    """Site -> the experts it computes for those tokens, as in ``0-3,8``; every expert once."""


def serving_table(cluster: Cluster, num_experts: int, groups: Iterable[ServingGroup]) -> IntArray:
    """[SF_0, E]: the site that computes expert e for tokens of each site.

    Raises PlacementError for an unknown site, one that is in no group or in two, and an expert without or with two holders.
    """
    size = cluster.sizes[0]
    index = {name: dc for dc, name in enumerate(cluster.site_names)}
    table = np.full((size, num_experts), -1, dtype=np.int64)
    known: dict[str, list[int]] = {}  # plans of many sites name the same experts over and over

    def site(name: str) -> int:
        if name not in index:
            raise PlacementError(f"serving: no site {name!r} in cluster {cluster.name}")
        return index[name]

    for group in groups:
        row = [-1] * num_experts
        for holder, text in group.holders.items():
            if text not in known:
                known[text] = parse_experts(text, num_experts).tolist()
            number = site(holder)
            for expert in known[text]:
                if row[expert] >= 0:
                    raise PlacementError(f"serving of {group.sites[0]}: expert {expert} has two holders, the second is {holder}")
                row[expert] = number
        if -1 in row:
            raise PlacementError(f"serving of {group.sites[0]}: expert {row.index(-1)} has no holder")
        found = np.array(row, dtype=np.int64)
        for name in group.sites:
            if table[site(name), 0] >= 0:
                raise PlacementError(f"serving: site {name} is in two groups")
            table[site(name)] = found
    if (table[:, 0] < 0).any():
        raise PlacementError(f"serving: site {cluster.site_name(int(np.argmax(table[:, 0] < 0)))} is in no group")
    return table


def serving_groups(cluster: Cluster, table: IntArray) -> tuple[ServingGroup, ...]:
    """The groups that ``serving_table`` turns into ``table`` ([SF_0, E]), in the order of their first sites."""
    members: dict[bytes, list[int]] = {}
    for dc, row in enumerate(table):
        members.setdefault(row.tobytes(), []).append(dc)
    groups = []
    names = cluster.site_names
    known: dict[tuple[int, ...], str] = {}
    for sites in members.values():
        # Lists, not arrays: most holders of many sites have one expert or two.
        held: dict[int, list[int]] = {}
        for expert, holder in enumerate(table[sites[0]].tolist()):
            held.setdefault(holder, []).append(expert)
        holders = {}
        for holder in sorted(held):
            experts = tuple(held[holder])
            if experts not in known:
                known[experts] = format_experts(experts)
            holders[names[holder]] = known[experts]
        groups.append(ServingGroup(sites=tuple(names[dc] for dc in sites), holders=holders))
    return tuple(groups)


def parse_experts(text: str, num_experts: int) -> IntArray:
    """``"0-3,8"`` -> [0, 1, 2, 3, 8]. Raises PlacementError."""
    experts: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise PlacementError(f"serving: {text!r} are no experts; write them like 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < num_experts:
            raise PlacementError(f"serving: {part.strip()!r} in {text!r} must rise and stay below {num_experts}")
        experts.extend(range(first, last + 1))
    if len(set(experts)) != len(experts):
        raise PlacementError(f"serving: {text!r} names an expert twice")
    return np.array(experts, dtype=np.int64)


def format_experts(experts: Sequence[int] | IntArray) -> str:
    """[0, 1, 2, 3, 8] -> ``"0-3,8"``; ascending input."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and expert == runs[-1][1] + 1:
            runs[-1][1] = int(expert)
        else:
            runs.append([int(expert), int(expert)])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
