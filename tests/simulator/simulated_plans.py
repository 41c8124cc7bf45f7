"""Small plans of every shape."""

import itertools
from typing import Any

from hybridep.config import build
from hybridep.plan import Plan
from simulator.conditions import Conditions
from simulator.many_steps import Course
from simulator.symmetry import Symmetry, no_symmetry
from simulator.wiring import Wiring

RATES_GBPS = {"dc": 1.0, "node": 8.0, "gpu": 100.0}
THROUGHPUT = 1e12


def conditions(**values: object) -> Conditions:
    return Conditions.model_validate(values)


def course(**values: object) -> Course:
    return Course.model_validate(values)


def one_by_one(wires: Wiring, *described: object) -> Symmetry:
    """In place of ``simulator.blocks.symmetry``: no rank stands for others."""
    return no_symmetry(wires)


def make_plan(
    *sizes: int,
    domains: dict[str, int] | None = None,
    migration: dict[str, float] | None = None,
    residency: str = "step",
    overlap: bool = True,
    prefetch: int = 0,
    latency_s: float = 0.0,
    micro_batches: int = 1,
    num_experts: int = 16,
    num_layers: int = 3,
    pairs: bool = False,
    throughput: float = THROUGHPUT,
    sites: list[dict[str, Any]] | None = None,
) -> Plan:
    names = {1: ["dc"], 2: ["dc", "gpu"], 3: ["dc", "node", "gpu"]}[len(sizes)]
    cluster: dict[str, Any] = {
        "name": "test",
        "levels": [
            {"name": name, "size": size, "bandwidth": f"{RATES_GBPS[name]} Gbps", "latency": f"{latency_s} s"}
            for name, size in zip(names, sizes, strict=True)
        ],
        "gpu": {
            "throughput": f"{throughput} FLOPS",
            "memory": "80 GiB",
            "memory_bandwidth": "1 TB/s",
            "block_overhead": "1 ms",
        },
    }
    if sites or pairs:
        cluster["sites"] = sites or [{"name": f"s{dc}"} for dc in range(sizes[0])]
    if pairs:
        # Every pair differs, in both directions.
        cluster["links"] = [
            {"src": f"s{a}", "dst": f"s{b}", "bandwidth": f"{0.3 + 0.1 * i} Gbps", "latency": f"{1 + i} ms"}
            for i, (a, b) in enumerate(itertools.permutations(range(sizes[0]), 2))
        ]
    data = {
        "cluster": cluster,
        "workload": {
            "name": "test",
            "model": {
                "num_layers": num_layers,
                "hidden_size": 64,
                "num_heads": 4,
                "vocab_size": 100,
                "num_experts": num_experts,
                "top_k": 3,
                "expert_ffn_size": 128,
                "shared_ffn_size": 32,
                "num_dense_layers": 1,
                "dense_ffn_size": 96,
            },
            "training": {
                "sequence_length": 32,
                "micro_batch_size": 2,
                "micro_batches": micro_batches,
                "dtype": "fp32",
            },
        },
        "layers": [
            {
                "first_layer": 0,
                "num_layers": num_layers - 1,
                "domains": domains or {},
                "migration": migration or {},
                "residency": residency,
            }
        ],
        "schedule": {"overlap": overlap, "prefetch": prefetch},
    }
    return build(Plan, data, "test")


PLANS = {
    "ep": make_plan(2, 2, 2),
    "gathered": make_plan(2, 2, 2, domains={"dc": 2, "node": 2, "gpu": 2}, micro_batches=2),
    "part gathered": make_plan(4, 2, domains={"dc": 2}, migration={"dc": 0.5}, latency_s=1e-4),
    "every micro-batch": make_plan(4, 2, domains={"dc": 2, "gpu": 2}, residency="microbatch", micro_batches=2),
    "no overlap": make_plan(4, 2, domains={"dc": 2}, overlap=False),
    "ahead": make_plan(4, 2, domains={"dc": 2, "gpu": 2}, prefetch=1, num_layers=4),
    "ahead every micro-batch": make_plan(
        4, 2, domains={"dc": 2}, residency="microbatch", prefetch=2, micro_batches=2, num_layers=5, latency_s=1e-4
    ),
    "pairs": make_plan(3, 2, domains={"gpu": 2}, pairs=True, num_experts=18),
    "pairs gathered": make_plan(3, 2, domains={"dc": 3}, migration={"dc": 0.67}, pairs=True, micro_batches=2),
    "fewer experts than ranks": make_plan(2, 2, 8, domains={"node": 2}, num_experts=16, throughput=1e10),
    "one rank": make_plan(1),
    "ranks that differ": make_plan(
        3,
        2,
        domains={"gpu": 2},
        num_experts=18,
        throughput=1e10,
        sites=[
            {"name": "a", "tokens": 2},
            {"name": "b", "gpu": {"throughput": "5 GFLOPS", "memory_bandwidth": "0.5 TB/s", "block_overhead": "2 ms"}},
            {"name": "c"},
        ],
    ),
}
