"""What a Ray cluster has, asked by a process of its own, since Ray ends a driver whose node is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hybridep.errors import UserError
from hybridep.launch.host import child_environment
from hybridep.launch.ray_nodes import DETECTION
from hybridep.launch.ray_placing import Machine, ranks_per_gpu
from hybridep.topology import Cluster

_PATIENCE_S = 120.0
_EXAMINE_PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a Ray cluster, as it describes itself. What comes after ``error`` is there if that is empty."""

    dc: str | None
    """Its label; None where it has none."""
    address: str
    cpus: int
    gpus: int
    """That Ray knows of."""
    error: str
    """Why it says no more."""
    python: str = ""
    hybridep: str | None = None
    """The version that is installed, as of torch; None where none is."""
    torch: str | None = None
    devices: tuple[tuple[str, int], ...] = ()
    """Name and bytes of memory of each GPU that torch sees."""
    memory_bytes: int = 0
    unreachable: dict[str, str] | None = None
    """Address of another node -> why no connection to it is possible from here."""


def sites_at_hand(address: str, cluster: Cluster, *, use_gpus: bool) -> set[str]:
    """Names of the cluster's sites, each pod by itself, whose nodes answer and have room for its ranks: a CPU for each and, with
    ``use_gpus``, no more of them on a GPU than when all the site's nodes were there. Raises UserError where Ray cannot be
    reached."""
    room, found = _ask("room", address, _PATIENCE_S), set[str]()
    left = {}
    for datacenter, pods in Counter(cluster.datacenters).items():
        has = room.get(datacenter, {"cpus": 0, "gpus": 0, "had_gpus": 0})
        per_gpu = ranks_per_gpu(pods * cluster.ranks_per_site, has["had_gpus"] if use_gpus else 0)
        left[datacenter] = Machine(cpus=has["cpus"], gpus=has["gpus"]).room(per_gpu)
    for name, datacenter in zip(cluster.site_names, cluster.datacenters, strict=True):
        if left[datacenter] >= cluster.ranks_per_site:
            left[datacenter] -= cluster.ranks_per_site
            found.add(name)
    return found


def nodes_of(address: str) -> list[Node]:
    """All nodes of the cluster, in an order of Ray's. Raises UserError where it cannot be reached."""
    found = _ask("nodes", address, _EXAMINE_PATIENCE_S)
    return [Node(**node | {"devices": tuple(map(tuple, node.get("devices", [])))}) for node in found]


def _ask(what: str, address: str, patience_s: float) -> Any:
    """What ``ray_cluster`` answers. Raises UserError with its last words where it does not."""
    command = [sys.executable, "-m", "hybridep.launch.ray_cluster", what, str(os.getpid()), address]
    try:
        done = subprocess.run(
            command, env=child_environment(DETECTION), stdin=subprocess.DEVNULL, capture_output=True, timeout=patience_s
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"RAY_ADDRESS={address}: does not answer within {patience_s:g} s") from None
    if done.returncode or not done.stdout.strip():
        line = (done.stderr.decode(errors="replace").strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        if not line.startswith("RAY_ADDRESS"):
            # Of a log, and followed by advice, where Ray has ended the process.
            why = re.sub(r"^\[.*?\] \S+: ", "", line).partition(". ")[0]
            line = f"RAY_ADDRESS={address}: cannot be reached ({why})"
        raise UserError(line)
    return json.loads(done.stdout.splitlines()[-1])
