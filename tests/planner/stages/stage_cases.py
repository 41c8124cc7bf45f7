"""Small clusters of sites, even and uneven, and random pipelines over them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import numpy as np

from hybridep.config import build
from hybridep.pipeline import PipelinePlan, possible_micro_batches
from hybridep.plan import LayerGroup, Residency
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.sites.grouping import Groups

KINDS = ("even", "access", "pairs")
"""How sites differ: not at all, in their access links, in their links per pair."""


def sites_cluster(
    rng: np.random.Generator, num_sites: int, gpus: int, kind: str, memory: str = "80 GiB", throughput: str = "30 TFLOPS"
) -> Cluster:
    names = [f"s{site}" for site in range(num_sites)]
    sites: list[dict[str, Any]] = [{"name": name} for name in names]
    if kind == "access":
        for site in sites:
            site |= {way: f"{10 ** rng.uniform(-0.5, 1):.3f} Gbps" for way in ("up", "down")}
    data: dict[str, Any] = {
        "name": "sites",
        "levels": [
            {"name": "dc", "size": num_sites, "bandwidth": "1 Gbps", "latency": f"{10 ** rng.uniform(-4, -1.3):.5f} s"},
            {"name": "gpu", "size": gpus, "bandwidth": "100 Gbps", "latency": "0.01 ms"},
        ],
        "gpu": {"throughput": throughput, "memory": memory, "memory_bandwidth": "1 TB/s", "block_overhead": "0.1 ms"},
        "sites": sites,
    }
    if kind == "pairs":
        data["links"] = [
            {
                "src": src,
                "dst": dst,
                "bandwidth": f"{10 ** rng.uniform(-1, 1):.3f} Gbps",
                "latency": f"{10 ** rng.uniform(-3.5, -1):.5f} s",
            }
            for src, dst in permutations(names, 2)
        ]
    return build(Cluster, data, "sites")


def uneven_cluster(seed: int, num_sites: int, gpus: int) -> Cluster:
    """Sites that differ in their access links and in their links per pair."""
    pairs, access = (sites_cluster(np.random.default_rng(seed), num_sites, gpus, kind) for kind in ("pairs", "access"))
    return build(Cluster, pairs.model_dump(mode="json", exclude_none=True) | {"sites": access.sites}, "uneven")


def layered_workload(layers: int, *, ffn: int = 256, micro_batches: int = 2, micro_batch_size: int = 4) -> Workload:
    model = {
        "num_layers": layers,
        "hidden_size": 256,
        "num_heads": 4,
        "vocab_size": 1000,
        "num_experts": 8,
        "top_k": 2,
        "expert_ffn_size": ffn,
    }
    training = {
        "sequence_length": 128,
        "micro_batch_size": micro_batch_size,
        "micro_batches": micro_batches,
        "dtype": "bf16",
    }
    return build(Workload, {"name": "layers", "model": model, "training": training}, "layers")


def all_groups(size: int) -> list[Groups]:
    """All ordered partitions of so many sites."""
    found = set()
    for label in product(range(size), repeat=size):
        used = sorted(set(label))
        if used == list(range(len(used))):
            found.add(tuple(tuple(site for site in range(size) if label[site] == stage) for stage in used))
    return sorted(found)


def every_pipeline(cluster: Cluster, workload: Workload) -> Iterator[PipelinePlan]:
    """All partitions, orders, layers and numbers of micro-batches of two stages or more, with domains of one site or all."""
    layers = workload.model.num_layers
    for groups in all_groups(cluster.sizes[0]):
        if not all(cluster.home_weights[list(group)].any() for group in groups):
            continue
        for cuts in product(range(1, layers + 1), repeat=len(groups)):
            if len(groups) == 1 or sum(cuts) != layers:
                continue
            for domains in product(*({1, len(group)} for group in groups)):
                stages = []
                for group, number, size in zip(groups, cuts, domains, strict=True):
                    placed = LayerGroup(first_layer=0, num_layers=number, domains={"dc": size, "gpu": 1}, migration={})
                    names = [cluster.site_name(site) for site in group]
                    stages.append({"sites": names, "num_layers": number, "layers": [placed]})
                for micro_batches in possible_micro_batches(workload, cluster, groups):
                    data = {"cluster": cluster, "workload": workload, "micro_batches": micro_batches, "stages": stages}
                    yield build(PipelinePlan, data, "pipeline")


def with_shares(rng: np.random.Generator, cluster: Cluster) -> Cluster:
    """Sites that take more of the batch than others, or have more experts, or none."""
    given = cluster.model_dump(mode="json", exclude_none=True)
    for site in given["sites"]:
        site["tokens"] = float(rng.choice([0.5, 1, 1, 2, 3.3]))
        site["experts"] = float(rng.choice([0, 1, 1, 2.5]))
    if not any(site["experts"] for site in given["sites"]):
        given["sites"][0]["experts"] = 1
    return build(Cluster, given, "shares")


def random_pipeline(seed: int, least_stages: int = 1, *, shares: bool = False) -> PipelinePlan:
    """Any sites together, any layers, any equal domains inside, any number of micro-batches that is possible."""
    rng = np.random.default_rng(seed)
    while True:
        num_sites, gpus = int(rng.integers(max(2, least_stages), 6)), int(rng.integers(1, 3))
        throughput = f"{10 ** rng.uniform(0, 2.5):.3f} TFLOPS"
        cluster = sites_cluster(rng, num_sites, gpus, KINDS[rng.integers(len(KINDS))], throughput=throughput)
        if shares:
            cluster = with_shares(rng, cluster)
        layers = int(rng.integers(num_sites, 9))
        workload = layered_workload(layers, ffn=int(rng.choice([64, 256, 1024])), micro_batches=int(rng.integers(1, 4)))
        made = random_pipeline_over(rng, cluster, workload, least_stages)
        if made is not None:
            return made


def random_pipeline_over(
    rng: np.random.Generator, cluster: Cluster, workload: Workload, least_stages: int = 1
) -> PipelinePlan | None:
    """The same of one cluster and model; None where what was drawn is not possible."""
    num_sites, layers = cluster.sizes[0], workload.model.num_layers
    stages = int(rng.integers(least_stages, num_sites + 1))
    label = rng.integers(stages, size=num_sites)
    groups = [np.flatnonzero(label == stage).tolist() for stage in range(stages)]
    if not all(groups) or not all(cluster.home_weights[group].any() for group in groups):
        return None
    choices = possible_micro_batches(workload, cluster, groups)
    if not choices:
        return None
    cuts = np.sort(rng.choice(np.arange(1, layers), size=stages - 1, replace=False))
    made = []
    for group, number in zip(groups, np.diff([0, *cuts, layers]).tolist(), strict=True):
        sizes = [size for size in range(1, len(group) + 1) if len(group) % size == 0]
        placed = LayerGroup(
            first_layer=0,
            num_layers=int(number),
            domains={"dc": int(rng.choice(sizes)), "gpu": int(rng.choice([1, cluster.sizes[1]]))},
            migration={},
            residency=Residency.STEP if rng.random() < 0.7 else Residency.MICROBATCH,
        )
        made.append({"sites": [cluster.site_name(site) for site in group], "num_layers": int(number), "layers": [placed]})
    data = {
        "cluster": cluster,
        "workload": workload,
        "micro_batches": int(rng.choice(choices[-6:])),
        "ahead": int(rng.integers(1, 5)),
        "stages": made,
    }
    return build(PipelinePlan, data, "pipeline")


def even_stages() -> PipelinePlan:
    """Six sites that are alike, two in each stage."""
    cluster, stages = sites_cluster(np.random.default_rng(0), 6, 2, "even"), []
    for first in range(0, 6, 2):
        placed = LayerGroup(first_layer=0, num_layers=2, domains={"dc": 1, "gpu": 2}, migration={})
        stages.append({"sites": [f"s{first}", f"s{first + 1}"], "num_layers": 2, "layers": [placed]})
    workload = layered_workload(6, micro_batches=3)
    return build(PipelinePlan, {"cluster": cluster, "workload": workload, "micro_batches": 6, "stages": stages}, "pipeline")
