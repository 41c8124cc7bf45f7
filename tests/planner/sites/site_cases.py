"""Uneven clusters, workloads and serving tables for the tests of the site planner."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from hybridep.arrays import IntArray
from hybridep.config import build
from hybridep.plan import Plan, Schedule
from hybridep.recompute import Recompute
from hybridep.serving import serving_groups
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.domains import layer_group
from planner.sites.boxes import Box
from planner.sites.exchange import layer_exchanges
from planner.sites.problem import Configuration, SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.search import Search
from planner.sites.strategy import begin, walk, walks_help


def uneven_cluster(
    rng: np.random.Generator,
    sites: int,
    inside: int = 2,
    *,
    pairs: bool = True,
    memory: str = "64 GiB",
    windows: bool = False,
    nodes: tuple[int, ...] = (),
) -> Cluster:
    """``windows``: connections have some, at every level. ``nodes``: sizes of levels between sites and ranks."""
    names = [f"s{i}" for i in range(sites)]

    def mbps(low: float, high: float) -> str:
        return f"{rng.uniform(low, high):.3f} Mbps"

    data: dict[str, Any] = {
        "name": "uneven",
        "levels": [
            {"name": "dc", "size": sites, "bandwidth": "200 Mbps", "latency": f"{rng.choice([0, 2, 30])} ms"},
            {"name": "gpu", "size": inside, "bandwidth": "10 Gbps", "latency": "0.02 ms"},
        ],
        "gpu": {
            "throughput": f"{rng.choice([50, 1000, 20000])} GFLOPS",
            "memory": memory,
            "memory_bandwidth": "1 TB/s",
        },
        "sites": [{"name": name, "up": mbps(50, 800), "down": mbps(50, 800)} for name in names],
    }
    # A stream of its own: the cases stay the same but for these.
    own = rng.spawn(1)[0]
    if own.random() < 0.5:
        data["gpu"] |= {
            "expert_throughput": "30 GFLOPS",
            "expert_overhead": f"{own.uniform(0, 2):.3f} ms",
            "block_overhead": f"{own.uniform(0, 2):.3f} ms",
            "pass_overhead": f"{own.uniform(0, 5):.3f} ms",
            "message_overhead": f"{own.uniform(0, 3):.3f} ms",
            "jitter": f"{own.uniform(0, 3):.3f} ms",
            "sharing": float(own.uniform(1, 4)),
        }
    # And another: sites whose ranks differ.
    uneven = rng.spawn(1)[0]
    if uneven.random() < 0.5:
        for site in data["sites"]:
            more = {"expert_throughput": f"{uneven.uniform(10, 90):.3f} GFLOPS"} if "expert_throughput" in data["gpu"] else {}
            site["gpu"] = more | {
                "throughput": f"{uneven.uniform(20, 4000):.3f} GFLOPS",
                "memory_bandwidth": f"{uneven.uniform(0.1, 2):.3f} TB/s",
                "block_overhead": f"{uneven.uniform(0, 2):.3f} ms",
            }
            site["tokens"] = float(uneven.uniform(0.5, 2))
            site["experts"] = float(uneven.choice([0.3, 1, 2]))
    if windows:
        # And another.
        long = rng.spawn(1)[0]
        for level in data["levels"]:
            level["window"] = f"{10 ** long.uniform(2, 5):.0f} B"
    if inside == 0:
        del data["levels"][1]
    data["levels"][1:1] = [
        {"name": f"node{depth}", "size": size, "bandwidth": f"{5 / (depth + 1)} Gbps", "latency": f"{0.3 - 0.1 * depth} ms"}
        for depth, size in enumerate(nodes)
    ]
    if pairs:
        data["links"] = [
            {"src": a, "dst": b, "bandwidth": mbps(20, 800), "latency": f"{rng.uniform(0, 80):.3f} ms"}
            for a, b in permutations(names, 2)
        ]
    return build(Cluster, data, "test")


def access_cluster(sites: int, rates_gbps: np.ndarray | None = None, *, gpus: int = 1, memory: str = "1 TB") -> Cluster:
    """Without links of pairs; access links of the ``rates_gbps`` ([kinds, 2] up and down) in turn, all alike without."""
    levels = [{"name": "dc", "size": sites, "bandwidth": "10 Gbps", "latency": "30 ms"}]
    levels += [{"name": "gpu", "size": gpus, "bandwidth": "2400 Gbps", "latency": "5 us"}] if gpus > 1 else []
    gpu = {"throughput": "150 TFLOPS", "memory": memory, "memory_bandwidth": "2 TB/s"}
    data: dict[str, Any] = {"name": "access", "levels": levels, "gpu": gpu}
    if rates_gbps is not None:
        every = enumerate(np.resize(rates_gbps, (sites, 2)))
        data["sites"] = [{"name": f"s{i}", "up": f"{up:.3f} Gbps", "down": f"{down:.3f} Gbps"} for i, (up, down) in every]
    return build(Cluster, data, "test")


def random_access_cluster(seed: int, sites: int, *, memory: str = "1 TB", kinds: int | None = None) -> Cluster:
    """Of one rank a site; all differ, or they are of so many kinds."""
    return access_cluster(sites, np.random.default_rng(seed).uniform(2, 16, (kinds or sites, 2)), memory=memory)


def with_shared_expert(problem: SiteProblem, *, recompute: Recompute) -> SiteProblem:
    """And one layer without experts, for half of what may ``recompute``."""
    model = problem.workload.model
    dense = {"num_layers": model.num_layers + 1, "num_dense_layers": 1, "dense_ffn_size": 60} if recompute.value > 1 else {}
    model = model.model_copy(update={"shared_ffn_size": 100} | dense)
    return replace(problem, workload=problem.workload.model_copy(update={"model": model}), recompute=recompute)


def many_experts() -> Workload:
    model = {"num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 1000, "num_experts": 64, "top_k": 4}
    training = {"sequence_length": 1024, "micro_batch_size": 1, "micro_batches": 4, "dtype": "bf16"}
    return build(Workload, {"name": "test", "model": model | {"expert_ffn_size": 256}, "training": training}, "test")


def small_workload(rng: np.random.Generator, experts: int) -> Workload:
    model = {
        "num_layers": int(rng.integers(1, 4)),
        "hidden_size": int(rng.choice([16, 64])),
        "num_heads": 2,
        "vocab_size": 64,
        "num_experts": experts,
        "top_k": int(rng.integers(1, min(experts, 4) + 1)),
        "expert_ffn_size": int(rng.choice([16, 64, 256, 1024])),
    }
    training = {
        "sequence_length": int(rng.choice([16, 64, 256])),
        "micro_batch_size": 4,
        "micro_batches": int(rng.choice([1, 1, 4])),
    }
    return build(Workload, {"name": "test", "model": model, "training": training}, "test")


def random_problem(
    seed: int,
    sites: int,
    experts: int,
    inside: int | None = None,
    *,
    windows: bool = False,
    nodes: tuple[int, ...] = (),
    chunks: int = 1,
) -> SiteProblem:
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([0, 1, 2, 3])) if inside is None else inside
    cluster = uneven_cluster(rng, sites, ranks, pairs=rng.random() < 0.7, windows=windows, nodes=nodes)
    schedule = Schedule(streams={"dc": 1 + seed % 3} if windows else {}, chunks=chunks)
    return site_problem(cluster, small_workload(rng, experts), schedule)


def few_kinds(seed: int, sites: int, experts: int) -> SiteProblem:
    """Sites of a few kinds, one latency, no limits per pair."""
    rng = np.random.default_rng(seed)
    cluster = uneven_cluster(rng, sites, int(rng.integers(0, 2)), pairs=False)
    named = []
    for index, site in enumerate(cluster.sites):
        rate = float(rng.uniform(5e6, 1e8)) if seed % 3 == 0 else site.up
        kind = {"up": rate, "down": rate} if seed % 3 == 0 else {}
        named.append((named[0] if seed % 2 and index else site).model_copy(update={"name": site.name, **kind}))
    memory = cluster.gpu.memory if seed % 4 else 2e6
    changed = cluster.model_copy(update={"sites": tuple(named), "gpu": cluster.gpu.model_copy(update={"memory": memory})})
    return site_problem(build(Cluster, changed.model_dump(mode="json", exclude_none=True), "test"), small_workload(rng, experts))


def random_table(rng: np.random.Generator, problem: SiteProblem) -> IntArray:
    return rng.integers(0, problem.num_sites, (problem.num_sites, problem.num_experts))


def as_plan(problem: SiteProblem, table: IntArray, configuration: Configuration) -> Plan:
    choices, serving = problem.choices(configuration.inside), serving_groups(problem.cluster, table)
    layers, residency = problem.workload.model.num_moe_layers, configuration.residency
    group = layer_group(0, layers, choices, residency, serving, recompute=problem.recompute)
    return Plan(
        cluster=problem.cluster,
        workload=problem.workload,
        layers=(group,),
        schedule=problem.schedule,
        codecs=problem.codecs_by_level,
    )


def box_of(relaxation: Relaxation, table: IntArray, configuration: Configuration) -> Box:
    """The smallest that holds this plan: all of its intervals are points."""
    problem, kinds = relaxation.problem, relaxation.classes
    layer = layer_exchanges(problem, table, configuration.inside)
    copies, rows, latency_s = layer.copies[0], layer.rows[0], kinds.latency_s[np.ix_(kinds.label, kinds.label)]

    def position(reaches_s: np.ndarray, pairs: np.ndarray, seconds: np.ndarray) -> tuple[int, int]:
        at = 1 + int(np.searchsorted(reaches_s[1:], seconds[pairs > 0].max())) if (pairs > 0).any() else 0
        return at, at

    def point(value: float) -> tuple[float, float]:
        return value, value

    return Box(
        residency=configuration.residency,
        gather_s=point(copies.line(problem)[1] * problem.wire.expert_bytes),
        return_s=point(copies.reverse.line(problem)[1] * problem.wire.expert_gradient_bytes),
        forward_s=point(rows.line(problem)[1]),
        back_s=point(rows.reverse.line(problem)[1]),
        copy_reach=position(relaxation.copy_reaches_s, copies.pairs, latency_s),
        reach=position(relaxation.reaches_s, rows.pairs, 3 * latency_s + 2 * latency_s.T),
    )


def run(search: Search) -> None:
    """As a plan between sites is searched for where memory is ample."""
    begin(search)
    if walks_help(search.problem):
        walk(search)
