"""Clusters, workloads and random problems for the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np

from hybridep.config import build, load
from hybridep.placement import LevelChoice
from hybridep.plan import Residency, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.problem import Candidate, Problem, build_problem

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def shipped_cluster(name: str, *overrides: str) -> Cluster:
    return load(Cluster, CONFIGS / "clusters" / f"{name}.yaml", overrides)


def shipped_workload(name: str, *overrides: str) -> Workload:
    return load(Workload, CONFIGS / "models" / f"{name}.yaml", overrides)


def make_cluster(
    *sizes: int,
    bandwidths: Sequence[str] = ("100 Mbps", "10 Gbps", "100 Gbps"),
    latencies: Sequence[str] = ("1 ms", "0.1 ms", "0.01 ms"),
    throughput: str = "1 TFLOPS",
    memory: str = "64 GiB",
    pairs: Sequence[str] = (),
) -> Cluster:
    """Levels l0, l1, ...; ``pairs`` are bandwidths of the DC pairs, used in turn."""
    levels = [
        {"name": f"l{i}", "size": size, "bandwidth": bandwidths[i], "latency": latencies[i]} for i, size in enumerate(sizes)
    ]
    gpu = {"throughput": throughput, "memory": memory, "memory_bandwidth": "1 TB/s"}
    data: dict[str, object] = {"name": "test", "levels": levels, "gpu": gpu}
    if pairs:
        names = [f"s{i}" for i in range(sizes[0])]
        data["sites"] = [{"name": name} for name in names]
        data["links"] = [
            {"src": a, "dst": b, "bandwidth": pairs[i % len(pairs)], "latency": f"{1 + i} ms"}
            for i, (a, b) in enumerate(permutations(names, 2))
        ]
    return build(Cluster, data, "test")


def make_workload(
    *,
    layers: int = 4,
    hidden: int = 64,
    experts: int = 16,
    top_k: int = 2,
    ffn: int = 64,
    tokens: int = 256,
    micro_batches: int = 1,
    vocabulary: int = 256,
) -> Workload:
    model = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": 2,
        "vocab_size": vocabulary,
        "num_experts": experts,
        "top_k": top_k,
        "expert_ffn_size": ffn,
    }
    training = {"sequence_length": tokens, "micro_batch_size": 1, "micro_batches": micro_batches}
    return build(Workload, {"name": "test", "model": model, "training": training}, "test")


def mixing_case(memory: str = "1 GiB") -> tuple[Cluster, Workload]:
    """Slow links and many small experts per token: the best plan is a middle domain, and links bind."""
    cluster = make_cluster(
        4, 2, bandwidths=["200 Mbps", "8 Gbps"], latencies=["0.5 ms", "0.2 ms"], throughput="20 GFLOPS", memory=memory
    )
    return cluster, make_workload(layers=4, hidden=128, experts=16, top_k=4, ffn=128, tokens=512)


def two_sites(memory_bytes: float) -> Cluster:
    """Of one slow rank each."""
    gpu = {"throughput": "300 GFLOPS", "memory": f"{memory_bytes:.0f} B", "memory_bandwidth": "1 TB/s"}
    level = {"name": "dc", "size": 2, "bandwidth": "1 Gbps", "latency": "1 ms"}
    return build(Cluster, {"name": "two", "levels": [level], "gpu": gpu}, "two")


def dense_workload(expert_ffn_size: int) -> Workload:
    """One layer without experts and five with eight."""
    model = {"num_layers": 6, "num_dense_layers": 1, "dense_ffn_size": 64, "hidden_size": 256, "num_heads": 4}
    model |= {"vocab_size": 1000, "num_experts": 8, "top_k": 2, "expert_ffn_size": expert_ffn_size}
    training = {"sequence_length": 128, "micro_batch_size": 16, "micro_batches": 2, "dtype": "bf16"}
    return build(Workload, {"name": "dense", "model": model, "training": training}, "dense")


@cache
def _base() -> Problem:
    return build_problem(make_cluster(2, 2), make_workload(layers=1, experts=4), Schedule())


def random_problem(seed: int) -> Problem:
    """Any numbers: 1-5 layers, 1-6 candidates that trade time for memory, memory from ample to none."""
    rng = np.random.default_rng(seed)
    ranks, layers, candidates = 4, int(rng.integers(1, 6)), int(rng.integers(1, 7))
    made = []
    for index in range(candidates):
        seconds = float(rng.choice([rng.uniform(0.1, 10.0), rng.integers(1, 4)]))
        thirst = rng.uniform(0, 2e9) / seconds
        shared = rng.random() < 0.5
        lasting = np.full(ranks, thirst) if shared else rng.uniform(0, thirst, ranks)
        passing = rng.uniform(0, 2e9, ranks) * (rng.random() < 0.7)
        made.append(
            Candidate(
                choices={"l0": LevelChoice(), "l1": LevelChoice()},
                residency=Residency.STEP,
                num_copies=index,
                layer_s=seconds,
                chain_s=seconds,
                link_s=0.0,
                lasting_bytes=lasting,
                passing_bytes=passing,
            )
        )
    fixed = rng.uniform(0, 1e9, ranks)
    least = min(float((fixed + layers * c.lasting_bytes + c.passing_bytes).max()) for c in made)
    return replace(
        _base(),
        num_layers=layers,
        candidates=tuple(made),
        fixed_s=float(rng.uniform(0, 1)),
        fixed_lasting_bytes=fixed,
        fixed_passing_bytes=rng.uniform(0, 1e9, ranks),
        capacity_bytes=np.full(ranks, rng.uniform(0.8, 2.5) * least + rng.uniform(0, 1e9)),
    )


def random_cluster(rng: np.random.Generator, memory: str = "64 GiB") -> Cluster:
    shapes = [(2, 2), (4, 2), (3, 2), (2, 2, 2), (4,), (6,), (1, 4)]
    sizes = shapes[rng.integers(len(shapes))]
    pairs = ["80 Mbps", "200 Mbps", "1 Gbps"] if sizes[0] > 1 and rng.random() < 0.3 else []
    return make_cluster(
        *sizes,
        bandwidths=[f"{rng.choice([50, 200, 1000])} Mbps", "5 Gbps", "50 Gbps"],
        latencies=[f"{rng.choice([0, 1, 20])} ms", "0.1 ms", "0.01 ms"],
        throughput=f"{rng.choice([10, 1000, 100000])} GFLOPS",
        memory=memory,
        pairs=pairs,
    )


def random_workload(rng: np.random.Generator) -> Workload:
    return make_workload(
        layers=int(rng.integers(1, 4)),
        hidden=int(rng.choice([16, 64])),
        experts=int(rng.choice([4, 8, 12])),
        top_k=int(rng.integers(1, 4)),
        ffn=int(rng.choice([16, 128])),
        tokens=int(rng.choice([16, 256, 1024])),
        micro_batches=int(rng.choice([1, 1, 4])),
    )
