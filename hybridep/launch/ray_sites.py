"""Which sites of a Ray cluster can take ranks, asked by a process of its own, since Ray ends a driver whose node is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from hybridep.launch.host import child_environment
from hybridep.launch.ray_nodes import DETECTION

_PATIENCE_S = 120.0


def sites_at_hand(address: str, ranks_per_site: int) -> set[str]:
    """Names of the sites whose nodes answer, and have a CPU for each rank; none where the cluster cannot be reached."""
    command = [sys.executable, "-m", "hybridep.launch.ray_backend", "sites", str(os.getpid()), address, str(ranks_per_site)]
    try:
        done = subprocess.run(
            command, env=child_environment(DETECTION), stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return set()
    lines = done.stdout.splitlines()
    return set(json.loads(lines[-1])) if done.returncode == 0 and lines else set()
