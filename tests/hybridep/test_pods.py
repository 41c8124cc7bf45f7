"""Sites of several pods: what a cluster file with them means."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from hybridep.config import build
from hybridep.errors import ConfigError, PlacementError
from hybridep.pods import MOST_PODS
from hybridep.shares import site_sequences
from hybridep.topology import Cluster
from hybridep.traffic import Op, OpLevel, link_bytes
from hybridep.workload import Workload
from planner.memory import memory_knob
from planner.solve import too_small

GBPS = 1e9 / 8


def cluster_data() -> dict[str, Any]:
    """Two pods at ``big``, one at ``mid`` and one at ``small``, of two ranks each."""
    outer = {"name": "dc", "size": 3, "bandwidth": "5 Gbps", "latency": "9 ms", "egress": "0.02 $/GB"}
    return {
        "name": "test",
        "levels": [
            outer | {"pods": {"bandwidth": "100 Gbps", "latency": "20 us"}},
            {"name": "gpu", "size": 2, "bandwidth": "400 Gbps", "latency": "10 us"},
        ],
        "gpu": {"throughput": "100 TFLOPS", "memory": "80 GiB", "memory_bandwidth": "2 TB/s"},
        "sites": [
            {"name": "big", "pods": 2, "up": "8 Gbps", "tokens": 2, "experts": 3, "gpu": {"memory": "40 GiB"}},
            {"name": "mid"},
            {"name": "small", "down": "2 Gbps"},
        ],
    }


def with_pairs(data: dict[str, Any]) -> dict[str, Any]:
    names = [site["name"] for site in data["sites"]]
    data["links"] = [
        {"src": a, "dst": b, "bandwidth": f"{i + 1} Gbps", "latency": f"{i + 1} ms"}
        for i, (a, b) in enumerate(permutations(names, 2))
    ]
    return data


def loads(cluster: Cluster, src: int, dst: int) -> dict[str, float]:
    """Bytes per link when the first rank of one pod sends 8 to the other pod."""
    sent = np.zeros((cluster.num_gpus, cluster.sizes[0]))
    sent[src * cluster.sizes[1], dst] = 8.0
    found = link_bytes(cluster, {OpLevel(Op.TOKEN_DISPATCH, 0): sent})
    return {link.name: number for link, number in zip(cluster.link_table, found, strict=True) if number}


def test_errors_name_what_the_file_has() -> None:
    cluster = build(Cluster, cluster_data(), "test")
    assert memory_knob(cluster, 0) == "sites.big.gpu.memory"
    text = too_small(cluster, 0, 1e15, "here")
    assert "Raise sites.big.gpu.memory, " in text and "lower sites.big.experts, sites.big.tokens, " in text
    uneven = cluster_data()
    uneven["sites"][1]["tokens"] = 50
    with pytest.raises(PlacementError, match=r"sites\.small\.tokens|sites\.big\.tokens"):
        site_sequences(build(Cluster, uneven, "test"), two_sequences())


def two_sequences() -> Workload:
    model = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_heads": 1,
        "vocab_size": 8,
        "num_experts": 2,
        "top_k": 1,
        "expert_ffn_size": 8,
    }
    training = {"sequence_length": 4, "micro_batch_size": 2, "dtype": "fp32"}
    return build(Workload, {"name": "two", "model": model, "training": training}, "two")


def test_pods_become_sites_that_share_their_access_link() -> None:
    cluster = build(Cluster, cluster_data(), "test")
    assert cluster.sizes == (4, 2)
    assert [cluster.worker_name(cluster.location(rank)) for rank in (0, 2, 4)] == ["big-pod0/gpu0", "big-pod1/gpu0", "mid/gpu0"]
    assert cluster.token_weights.tolist() == [2, 2, 1, 1] and cluster.home_weights.tolist() == [3, 3, 1, 1]
    assert [gpu.memory / 2**30 for gpu in cluster.site_gpus] == [40, 40, 80, 80]
    assert [cluster.site_labels(dc)[-1] for dc in range(4)] == ["big", "big", "mid", "small"]
    rates = {link.name: link.bandwidth_bytes_per_s / GBPS for link in cluster.link_table}
    assert rates["big-pod0 up"] == rates["big-pod1 down"] == 100 and rates["mid up"] == 5 and rates["small down"] == 2
    assert rates["big up"] == 8 and rates["big down"] == 5 and "mid" not in {trunk.name[:3] for trunk in cluster.trunks}
    # Limits per pair are no narrower than the path.
    assert rates["big-pod0 -> big-pod1"] == 100 and rates["big-pod0 -> small"] == 2 and rates["mid -> big-pod1"] == 5
    latencies_s = cluster.latency_s(0, 2), cluster.latency_s(2, 4), cluster.latency_s(6, 4)
    assert latencies_s == pytest.approx((20e-6, 9e-3, 9e-3))
    assert cluster.egress_usd_per_byte[0].tolist() == pytest.approx([0, 0, 2e-11, 2e-11])


def test_what_stays_in_a_site_does_not_cross_its_access_link() -> None:
    cluster = build(Cluster, cluster_data(), "test")
    inside = {"big-pod0/gpu0 up", "big-pod0 up", "big-pod0 -> big-pod1", "big-pod1 down", "big-pod1/gpu0 down"}
    assert set(loads(cluster, 0, 1)) == inside
    out = {"big-pod1/gpu0 up", "big-pod1 up", "big-pod1 -> mid", "big up", "mid down", "mid/gpu0 down"}
    assert set(loads(cluster, 1, 2)) == out
    back = {"mid/gpu0 up", "mid up", "mid -> big-pod1", "big down", "big-pod1 down", "big-pod1/gpu0 down"}
    assert set(loads(cluster, 2, 1)) == back
    assert set(loads(cluster, 2, 1).values()) == {8.0}


def test_pods_share_the_links_per_pair_and_the_trunks_of_their_sites() -> None:
    data = with_pairs(cluster_data())
    data["trunks"] = [{"name": "cable", "bandwidth": "3 Gbps", "carries": {"big -> small": 0.5, "mid -> small": 1}}]
    cluster = build(Cluster, data, "test")
    rates = {trunk.name: trunk.bandwidth / GBPS for trunk in cluster.trunks}
    assert rates == {
        "big up": 8,
        "big down": 5,
        "big -> mid": 1,
        "big -> small": 2,
        "mid -> big": 3,
        "small -> big": 5,
        "cable": 3,
    }
    assert {"big -> small", "big-pod0 -> small", "big up", "cable"} < set(loads(cluster, 0, 3))
    assert loads(cluster, 1, 3)["cable"] == 4 and loads(cluster, 2, 3)["cable"] == 8
    assert cluster.latency_s(0, 6) == pytest.approx(2e-3) and cluster.latency_s(6, 2) == pytest.approx(5e-3)
    pairs = {(link.src, link.dst): link for link in cluster.links}
    assert pairs["mid", "small"].bandwidth == 2 * GBPS, "no wider than the access link"


def test_an_expanded_cluster_loads_unchanged() -> None:
    cluster = build(Cluster, with_pairs(cluster_data()), "test")
    assert build(Cluster, cluster.model_dump(mode="json", exclude_none=True), "again") == cluster
    one_each = cluster_data()
    one_each["sites"][0]["pods"] = 1
    assert build(Cluster, one_each, "test").sizes == (3, 2)


def put(place: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        *path, last = (int(part) if part.isdigit() else part for part in place.split("."))
        node: Any = data
        for part in path:
            node = node[part]
        node[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("sites.0.pods", 0), r"sites.0.pods: .*greater than or equal to 1 \(found 0\)"),
        (put("levels.0.pods", None), "levels.0.pods: is missing, and site big has 2 pods"),
        (put("levels.0.pods", {"latency": "1 us"}), "levels.0.pods.bandwidth: is missing"),
        (put("levels.1.pods", {"bandwidth": "1 Gbps", "latency": "1 us"}), "levels.1.pods: only a dc has pods"),
        (put("levels.0.size", 4), "sites: 3 are named but level 'dc' has size 4"),
        (put("sites.1.name", "big-pod1"), "sites: names repeat"),
        (put("sites.2.pods", MOST_PODS), "259 pods in all; .* up to 256"),
        (put("sites.2.tokens", -1), "sites.2.tokens"),
    ],
)
def test_bad_pods_are_refused_by_name(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = cluster_data()
    change(data)
    with pytest.raises(ConfigError, match=message):
        build(Cluster, data, "test")
