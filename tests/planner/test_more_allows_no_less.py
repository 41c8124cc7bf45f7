"""More memory, or a larger budget, never makes a plan slower."""

from __future__ import annotations

from typing import Any

import pytest
from planner_cases import shipped_workload
from site_cases import run

from hybridep.config import build
from hybridep.topology import Cluster
from planner.goal import FASTEST, Goal
from planner.sites.problem import site_problem
from planner.sites.search import Search


def searched_s(data: dict[str, Any], goal: Goal = FASTEST) -> float:
    """The best step of a search in proportion to 10 s."""
    problem = site_problem(build(Cluster, data, "test"), shipped_workload("tiny"), goal=goal)
    search = Search(problem=problem, walks_share=1 / 6)
    run(search)
    assert search.best is not None and search.best.rank[0] == 0
    return search.best.rank[1]


def cluster(memory: str, bandwidth: str, sites: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": "uneven",
        "levels": [
            {"name": "dc", "size": len(sites), "bandwidth": bandwidth, "latency": "4 ms"},
            {"name": "gpu", "size": 2, "bandwidth": "3.5 Gbps", "latency": "0.7 ms"},
        ],
        "gpu": {"throughput": "10 GFLOPS", "memory": memory, "memory_bandwidth": "5 GB/s"},
        "sites": sites,
    }


def test_more_memory() -> None:
    """With 100 MB a table that leads nowhere fits, too: all experts at the site with most memory."""
    sites = [{"name": "a"}, {"name": "b", "gpu": {"memory": "66 MB"}}]
    steps_s = [searched_s(cluster(memory, "50 Mbps", sites)) for memory in ("70 MB", "95 MB", "100 MB")]
    assert steps_s == sorted(steps_s, reverse=True)


@pytest.mark.turns(2)
def test_a_larger_budget() -> None:
    sites = [{"name": "paris", "up": "100 Mbps"}, {"name": "tokyo", "down": "50 Mbps"}, {"name": "oslo"}]
    data = cluster("1 GiB", "200 Mbps", sites)
    data["levels"][0]["egress"] = "50 $/GB"
    data["gpu"] |= {"price": "2.5 $/h", "block_overhead": "12 ms"}
    steps_s = [searched_s(data, Goal(budget_usd=budget_usd)) for budget_usd in (2.1, 2.4, 2.6)]
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[1] < 2.6
