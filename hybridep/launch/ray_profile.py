"""A cluster file's content from the nodes of a Ray cluster: its shape, with figures of links and GPUs that are to be measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hybridep.errors import UserError
from hybridep.launch.ray_sites import Node

_UNMEASURED = {"bandwidth": "1 Gbps", "latency": "1 ms"}


def profile(nodes: Sequence[Node], *, use_gpus: bool = True) -> dict[str, Any]:
    """Fields of a ``ClusterFile``: sites by label, in order of name, with a rank for each GPU that torch sees, or for each CPU
    where no node has any, or none is to be used. All machines are made of nodes of one size, the largest possible, and where
    sites have unequal numbers of these, of pods of one size. Sites with other GPUs than others have the memory of their own.
    Raises UserError for labelled nodes that do not answer, or lack what others compute on."""
    labelled = [node for node in nodes if node.dc]
    if not labelled:
        raise UserError("no Ray node has a site: start nodes with --labels=dc=SITE")
    for node in labelled:
        if node.error:
            raise UserError(f"the Ray node of {node.dc} at {node.address}: {node.error}; `hybridep doctor` tells more")
    on_gpus = use_gpus and any(node.devices for node in labelled)
    ranks = dict[str, list[int]]()
    for node in labelled:
        here = len(node.devices) if on_gpus else node.cpus
        if not here:
            raise UserError(
                f"the Ray node of {node.dc} at {node.address} has no {'GPU that torch sees' if on_gpus else 'CPU'}, but others "
                "have; start it without the label if it is to train nothing"
            )
        ranks.setdefault(str(node.dc), []).append(here)
    machine = math.gcd(*(number for machines in ranks.values() for number in machines))
    machines = {dc: sum(ranks[dc]) // machine for dc in sorted(ranks)}
    pod = math.gcd(*machines.values())
    uneven = len({*machines.values()}) > 1
    levels = [{"name": "dc", "size": len(machines)} | _UNMEASURED | ({"pods": _UNMEASURED} if uneven else {})]
    levels += [{"name": "node", "size": pod} | _UNMEASURED] * (pod > 1)
    levels.append({"name": "gpu", "size": machine} | _UNMEASURED)
    kinds = {dc: sorted({kind for node in labelled if node.dc == dc for kind in node.devices if on_gpus}) for dc in machines}
    if on_gpus:
        memory = {dc: min(size for _, size in kinds[dc]) for dc in machines}
    else:
        memory = dict.fromkeys(machines, min(node.memory_bytes // node.cpus for node in labelled))
    sites: list[dict[str, Any]] = [{"name": dc} for dc in machines]
    for site in sites:
        if uneven:
            site["pods"] = machines[site["name"]] // pod
        if any(other != kinds[site["name"]] for other in kinds.values()):
            site["gpu"] = {"memory": _mebibytes(memory[site["name"]])}
    return {
        "name": "ray",
        "levels": levels,
        "gpu": {"throughput": "1 TFLOPS", "memory": _mebibytes(min(memory.values())), "memory_bandwidth": "1 GB/s"},
        "sites": sites,
    }


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB"
