"""Serving tables in plan files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridep.config import build, load
from hybridep.errors import ConfigError, PlacementError
from hybridep.pipeline import load_any_plan
from hybridep.plan import LayerGroup, Plan
from hybridep.serving import ServingGroup, format_experts, parse_experts, serving_groups, serving_table
from hybridep.topology import Cluster
from hybridep.traffic import link_bytes, step_traffic, wan_bytes
from hybridep.workload import Workload
from simulator.step import simulate_step

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def cluster() -> Cluster:
    return load(Cluster, CONFIGS / "clusters" / "lab-4dc.yaml")


@pytest.fixture
def workload() -> Workload:
    return load(Workload, CONFIGS / "models" / "tiny.yaml")


def plan_with(cluster: Cluster, workload: Workload, table: np.ndarray) -> Plan:
    inner = {level.name: level.size for level in cluster.levels[1:]}
    group = LayerGroup(
        first_layer=0,
        num_layers=workload.model.num_moe_layers,
        domains=inner,
        migration={},
        serving=serving_groups(cluster, table),
    )
    return Plan(cluster=cluster, workload=workload, layers=(group,))


def test_ranges() -> None:
    assert format_experts([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert parse_experts("0-2, 5,7-8", 9).tolist() == [0, 1, 2, 5, 7, 8]
    for bad in ("", "a", "3-1", "9", "1,1", "-1"):
        with pytest.raises(PlacementError, match="serving"):
            parse_experts(bad, 9)


def test_tables_survive_the_file(cluster: Cluster, workload: Workload, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(0, cluster.sizes[0], (cluster.sizes[0], workload.model.num_experts))
    table[1] = table[0]
    made = plan_with(cluster, workload, table)
    assert len(made.layers[0].serving) == cluster.sizes[0] - 1
    made.save(tmp_path / "plan.yaml")
    loaded = load_any_plan(tmp_path / "plan.yaml")
    assert loaded == made and loaded.digest == made.digest
    assert (loaded.placements[0].serve[0] == table).all()


def test_domains_as_a_table_are_the_same_plan(cluster: Cluster, workload: Workload) -> None:
    domains = {"dc": 2} | {level.name: level.size for level in cluster.levels[1:]}
    group = LayerGroup(first_layer=0, num_layers=workload.model.num_moe_layers, domains=domains, migration={})
    by_domains = Plan(cluster=cluster, workload=workload, layers=(group,))
    by_table = plan_with(cluster, workload, by_domains.placements[0].serve[0])
    expected, found = step_traffic(by_domains), step_traffic(by_table)
    assert expected.keys() == found.keys()
    assert all((expected[key] == found[key]).all() for key in expected)
    assert simulate_step(by_table).step_s == pytest.approx(simulate_step(by_domains).step_s, rel=1e-12)


def test_simulation_carries_the_bytes_of_any_table(cluster: Cluster, workload: Workload) -> None:
    table = np.random.default_rng(1).integers(0, cluster.sizes[0], (cluster.sizes[0], workload.model.num_experts))
    made = plan_with(cluster, workload, table)
    traffic = step_traffic(made)
    assert wan_bytes(traffic) > 0
    assert simulate_step(made).link_bytes == pytest.approx(link_bytes(cluster, traffic), rel=1e-9)


@pytest.mark.parametrize(
    ("holders", "sites", "message"),
    [
        ({"nowhere": "0-1"}, ["dc0"], "no site 'nowhere'"),
        ({"dc0": "0"}, ["dc0"], "expert 1 has no holder"),
        ({"dc0": "0-1", "dc1": "1"}, ["dc0"], "two holders"),
        ({"dc0": "0-1"}, ["dc0", "dc0"], "two groups"),
        ({"dc0": "0-1"}, ["dc0"], "is in no group"),
    ],
)
def test_bad_tables(holders: dict[str, str], sites: list[str], message: str) -> None:
    data = {
        "name": "two",
        "levels": [{"name": "dc", "size": 2, "bandwidth": "1 Gbps", "latency": "1 ms"}],
        "gpu": {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 TB/s"},
    }
    with pytest.raises(PlacementError, match=message):
        serving_table(build(Cluster, data, "test"), 2, [ServingGroup(sites=tuple(sites), holders=holders)])


def test_a_domain_size_beside_a_table(cluster: Cluster, workload: Workload) -> None:
    made = plan_with(cluster, workload, np.zeros((cluster.sizes[0], workload.model.num_experts), dtype=np.int64))
    data = made.model_dump(mode="json", exclude_none=True)
    data["layers"][0]["domains"][cluster.levels[0].name] = 2
    with pytest.raises(ConfigError, match="serving table"):
        build(Plan, data, "plan")
