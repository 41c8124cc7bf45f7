"""Tables whose layers compute again in backward, where memory is short: not only where nothing fits otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from site_cases import run

import planner
from hybridep.config import build
from hybridep.recompute import Recompute, cheapest_first
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.difference import scaled
from planner.sites.again import rank, walk_in_ways
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.search import Search
from planner.sites.strategy import begin

SHARE = 1 / 30
FOUR = {
    "s0": ("36 Mbps", "127 Mbps"),
    "s1": ("9231 Mbps", "389 Mbps"),
    "s2": ("7781 Mbps", "44 Mbps"),
    "s3": ("834 Mbps", "726 Mbps"),
}
THREE = {"s0": ("777 Mbps", "6916 Mbps"), "s1": ("6105 Mbps", "2957 Mbps"), "s2": ("304 Mbps", "73 Mbps")}


def given(sites: dict[str, tuple[str, str]], memory: str) -> tuple[Cluster, Workload]:
    four = len(sites) == 4
    data = {
        "name": "uneven",
        "levels": [
            {"name": "dc", "size": len(sites), "bandwidth": "1 Gbps", "latency": "1 ms"},
            {"name": "gpu", "size": 2 if four else 1, "bandwidth": "100 Gbps", "latency": "10 us"},
        ],
        "gpu": {"throughput": "32 TFLOPS", "memory": memory, "memory_bandwidth": "1 TB/s", "block_overhead": "10 us"},
        "sites": [{"name": name, "up": up, "down": down} for name, (up, down) in sites.items()],
    }
    model: dict[str, Any] = {
        "num_layers": 6 if four else 2,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 256,
        "num_experts": 4,
    }
    model |= {"top_k": 4, "expert_ffn_size": 256} | ({"shared_ffn_size": 512} if four else {})
    training = {"sequence_length": 128, "micro_batch_size": 1, "micro_batches": 1 if four else 4}
    workload = build(Workload, {"name": "small", "model": model, "training": training}, "small")
    return build(Cluster, data, "uneven"), workload


def searched(problem: SiteProblem) -> Search:
    search = Search(problem=problem, walks_share=SHARE)
    begin(search)
    return search


@pytest.mark.turns(4)
@pytest.mark.parametrize(("sites", "memory", "fits"), [(FOUR, "31 MB", True), (THREE, "8.7 MB", False)])
def test_as_good_as_a_search_for_each_way_to_compute_again(sites: dict[str, tuple[str, str]], memory: str, fits: bool) -> None:
    """And better than what keeps all activations, or than the first way in which something fits."""
    cluster, workload = given(sites, memory)
    problem, ways, by_way = site_problem(cluster, workload), cheapest_first(workload), dict[Recompute, tuple[float, float]]()
    for one in (Recompute.NOTHING, *ways):
        search = Search(problem=replace(problem, recompute=one), walks_share=SHARE)
        run(search)
        by_way[one] = rank(search)
    best = min(walk_in_ways(searched(problem), ways), key=rank)
    assert best.problem.recompute and rank(best)[0] == 0
    assert rank(best)[1] <= 1.02 * min(by_way.values())[1]
    first = next(step_s for missing, step_s in by_way.values() if missing == 0)
    assert rank(best)[1] < 0.97 * first and (by_way[Recompute.NOTHING][0] == 0) is fits


def test_where_memory_is_ample_nothing_computes_again() -> None:
    cluster, workload = given(FOUR, "1 GB")
    search = searched(site_problem(cluster, workload))
    assert not search.is_short and [*walk_in_ways(search, cheapest_first(workload))] == [search]


@pytest.mark.turns(4)
def test_plans_have_what_was_found() -> None:
    cluster, workload = given(FOUR, "31 MB")
    kept = searched(site_problem(cluster, workload))
    made = planner.plan(cluster, workload, time_limit_s=4)
    assert made.recomputes and made.predicted.step < 0.98 * rank(kept)[1]
    planner.check(made)


@pytest.mark.turns(2)
def test_plans_for_scenarios_compute_again_as_suits_them() -> None:
    """Though at the nominal rates, a hundred times as fast, nothing does so."""
    cluster, workload = given(FOUR, "31 MB")
    fast = scaled(cluster, 100)
    assert not planner.plan(fast, workload, time_limit_s=0.5).recomputes
    made = planner.plan_for_scenarios(fast, workload, [cluster], time_limit_s=1)
    assert made.plan.recomputes and planner.memory_use(made.plan).fits
    assert made.bound_s <= made.step_s < 0.75 * made.nominal_step_s


def test_plans_for_scenarios_fit_where_no_table_does() -> None:
    """Some layers with copies fit, at one site all of them do not, and at the other site none."""
    cluster, workload = given({"s0": ("30 Mbps", "1 Gbps"), "s1": ("1 Gbps", "1 Gbps")}, "1 GB")
    data = cluster.model_dump(mode="json", exclude_none=True)
    for site, tokens, memory in zip(data["sites"], (1.8, 1.0), ("7.263 MB", "5.256 MB"), strict=True):
        site |= {"tokens": tokens, "gpu": {"memory": memory}}
    cluster = build(Cluster, data, "tight")
    model = {"num_layers": 6, "num_heads": 2, "vocab_size": 64, "num_experts": 2, "top_k": 1, "expert_ffn_size": 16}
    training = {"sequence_length": 32, "micro_batch_size": 20, "micro_batches": 1}
    work = workload.model_dump(mode="json")
    work = build(Workload, work | {"model": work["model"] | model, "training": work["training"] | training}, "small")
    made = planner.plan_for_scenarios(cluster, work, planner.interval_scenarios(cluster, 0.5, draws=1), time_limit_s=0.5)
    assert len(made.plan.layers) == 2 and planner.memory_use(made.plan).fits
    assert made.bound_s <= made.step_s == made.nominal_step_s
