"""The shape of a cluster, from the nodes of a Ray cluster."""

from __future__ import annotations

import pytest

from hybridep.commands.probe import at_address
from hybridep.config import build
from hybridep.errors import UserError
from hybridep.launch.ray_profile import profile
from hybridep.launch.ray_sites import Node
from hybridep.run import Device
from hybridep.sites import ClusterFile
from hybridep.topology import Cluster


def node(dc: str | None, gpus: int = 0, cpus: int = 64, memory: int = 80 << 30, error: str = "") -> Node:
    return Node(
        dc=dc, address="10.0.0.1", cpus=cpus, gpus=gpus, error=error, devices=(("H100", memory),) * gpus, memory_bytes=256 << 30
    )


@pytest.mark.parametrize(
    ("nodes", "levels", "pods"),
    [
        ([node("b", 8), node("a", 8)], {"dc": 2, "gpu": 8}, [None, None]),
        ([node("b", 8), node("a", 8), node("b", 8), node("a", 8), node(None)], {"dc": 2, "node": 2, "gpu": 8}, [None, None]),
        # Twelve GPUs and eight are three and two nodes of four.
        ([node("a", 8), node("a", 4), node("b", 4), node("b", 4)], {"dc": 2, "gpu": 4}, [3, 2]),
        ([node("a", 8)] * 4 + [node("b", 8)] * 2, {"dc": 2, "node": 2, "gpu": 8}, [2, 1]),
        ([node("a", 8)] * 3, {"dc": 1, "node": 3, "gpu": 8}, [None]),
        # Without GPUs: a rank for each CPU.
        ([node("a", cpus=2), node("b", cpus=2)], {"dc": 2, "gpu": 2}, [None, None]),
    ],
)
def test_shape(nodes: list[Node], levels: dict[str, int], pods: list[int | None]) -> None:
    cluster = build(ClusterFile, profile(nodes), "nodes")
    assert {level.name: level.size for level in cluster.levels} == levels
    assert [site.name for site in cluster.sites] == sorted({one.dc for one in nodes if one.dc})
    assert [site.pods for site in cluster.sites] == pods
    whole = build(Cluster, profile(nodes), "nodes")
    assert whole.num_gpus == sum(one.gpus or one.cpus for one in nodes if one.dc)
    on_cpus = build(Cluster, profile(nodes, use_gpus=False), "nodes")
    assert on_cpus.num_gpus == sum(one.cpus for one in nodes if one.dc)


def test_memory_is_that_of_the_smallest_and_other_gpus_are_told_apart() -> None:
    cluster = build(ClusterFile, profile([node("a", 8), node("b", 8, memory=40 << 30), node("b", 8), node("a", 8)]), "nodes")
    assert cluster.gpu.memory == 40 << 30 and [site.gpu and site.gpu.memory for site in cluster.sites] == [80 << 30, 40 << 30]
    alike = build(ClusterFile, profile([node("a", 8), node("b", 8)]), "nodes")
    assert alike.gpu.memory == 80 << 30 and [site.gpu for site in alike.sites] == [None, None]
    cpus = build(ClusterFile, profile([node("a", cpus=64), node("b", cpus=2)]), "nodes")
    assert cpus.gpu.memory == 4 << 30 and [site.gpu for site in cpus.sites] == [None, None]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([node(None, 8)], "no Ray node has a site: start nodes with --labels=dc=SITE"),
        ([node("a", 8), node("b", 8, error="it does not answer")], "the Ray node of b at 10.0.0.1: it does not answer"),
        ([node("a", 8), node("b")], "the Ray node of b at 10.0.0.1 has no GPU that torch sees, but others have"),
        ([node("a", cpus=0)], "the Ray node of a at 10.0.0.1 has no CPU"),
    ],
)
def test_what_cannot_train_is_named(nodes: list[Node], said: str) -> None:
    with pytest.raises(UserError) as caught:
        profile(nodes)
    assert str(caught.value).startswith(said)


def test_without_an_address_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="cluster 'ray': RAY_ADDRESS is not set"):
        at_address(Device.AUTO, [])
