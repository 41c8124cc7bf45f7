"""Which sites of a Ray cluster can take ranks, asked by a process of its own, since Ray ends a driver whose node is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from hybridep.launch.host import child_environment
from hybridep.launch.ray_nodes import DETECTION
from hybridep.topology import Cluster

_PATIENCE_S = 120.0


def sites_at_hand(address: str, cluster: Cluster) -> set[str]:
    """Names of the cluster's sites, each pod by itself, whose nodes answer and have a CPU for each rank; none where Ray cannot
    be reached."""
    command = [sys.executable, "-m", "hybridep.launch.ray_backend", "sites", str(os.getpid()), address]
    try:
        done = subprocess.run(
            command, env=child_environment(DETECTION), stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return set()
    lines = done.stdout.splitlines()
    cpus, found = json.loads(lines[-1]) if done.returncode == 0 and lines else {}, set[str]()
    for name, datacenter in zip(cluster.site_names, cluster.datacenters, strict=True):
        if cpus.get(datacenter, 0) >= cluster.ranks_per_site:
            cpus[datacenter] -= cluster.ranks_per_site
            found.add(name)
    return found
