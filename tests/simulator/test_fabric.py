import itertools
from collections.abc import Sequence

import networkx as nx
import numpy as np
import pytest

from hybridep.config import build
from hybridep.topology import Cluster
from simulator.conditions import Conditions
from simulator.engine import Engine
from simulator.fabric import Fabric
from simulator.symmetry import no_symmetry
from simulator.wiring import wiring


def cluster(*sizes: int, pairs: bool = False, windows: Sequence[str | None] = (None,) * 3) -> Cluster:
    names = ["dc", "node", "gpu"][-len(sizes) :] if len(sizes) < 3 else ["dc", "node", "gpu"]
    levels = [
        {
            "name": name,
            "size": size,
            "bandwidth": f"{10 * 10**depth} Gbps",
            "latency": f"{10 ** (3 - depth)} us",
            "window": window,
        }
        for depth, (name, size, window) in enumerate(zip(names, sizes, windows, strict=False))
    ]
    data = {
        "name": "test",
        "levels": levels,
        "gpu": {"throughput": "1 TFLOPS", "memory": "1 GiB", "memory_bandwidth": "1 TB/s"},
    }
    if pairs:
        sites = [f"s{dc}" for dc in range(sizes[0])]
        data["sites"] = [{"name": site} for site in sites]
        data["links"] = [
            {"src": a, "dst": b, "bandwidth": f"{1 + i} Gbps", "latency": f"{10 + i} ms"}
            for i, (a, b) in enumerate(itertools.permutations(sites, 2))
        ]
    return build(Cluster, data, "test")


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (3, 2, 2)])
@pytest.mark.parametrize("pairs", [False, True])
def test_paths_are_the_shortest_of_the_clusters_graph(sizes: tuple[int, ...], pairs: bool) -> None:
    topology = cluster(*sizes, pairs=pairs)
    graph = topology.graph()
    source, destination = np.array(list(itertools.permutations(range(topology.num_gpus), 2))).T
    links, _, latency_s, round_trip_s, _ = wiring(topology).paths(source, destination)
    for a, b, found, latency in zip(source.tolist(), destination.tolist(), links, latency_s.tolist(), strict=True):
        expected = {graph.edges[edge]["link"] for edge in itertools.pairwise(nx.shortest_path(graph, a, b))}
        assert sorted(found[found >= 0].tolist()) == sorted(expected)
        assert latency == topology.latency_s(a, b)
    back_s = [topology.latency_s(b, a) for a, b in zip(source.tolist(), destination.tolist(), strict=True)]
    np.testing.assert_allclose(round_trip_s, latency_s + back_s, rtol=1e-15)


def test_transfer_takes_the_latency_and_rate_of_the_slowest_link() -> None:
    topology = cluster(3, 2, pairs=True)
    engine = Engine()
    fabric = Fabric(engine, no_symmetry(wiring(topology)))
    arrivals: list[float] = []
    # s1 -> s0 is the third pair: 3 Gbps, 12 ms.
    sent = np.zeros((6, 3))
    sent[2, 0] = 3e6
    flows = fabric.flows(0, sent)
    assert (flows.source.tolist(), flows.destination.tolist()) == ([2], [0])
    fabric.network.send(flows.transfers, lambda groups, last: arrivals.append(engine.now_s))
    engine.run()
    assert arrivals == [pytest.approx(3e6 * 8 / 3e9 + 12e-3)]
    busy = [link.name for link, bytes_ in zip(topology.link_table, fabric.network.link_bytes, strict=True) if bytes_]
    assert busy == ["s0 down", "s1 up", "s0/gpu0 down", "s1/gpu0 up", "s1 -> s0"]


@pytest.mark.parametrize(
    ("windows", "met", "under_way_bytes"),
    [
        (("2 MB", "1 MB"), {}, (6e6, 1e6)),
        (("2 MB", None), {}, (6e6, np.inf)),
        ((None, "1 MB"), {"streams": 5}, (np.inf, 5e6)),
        (("2 MB", "1 MB"), {"streams": 5}, (10e6, 5e6)),
        (("2 MB", None), {"window": "4 MB"}, (12e6, 4e6)),
    ],
)
def test_transfers_get_their_windows_per_round_trip(
    windows: tuple[str | None, str | None], met: dict[str, object], under_way_bytes: tuple[float, float]
) -> None:
    """Three connections between sites, one inside, unless a scenario says another number for all levels."""
    topology = cluster(3, 2, pairs=True, windows=windows)
    fabric = Fabric(
        Engine(), no_symmetry(wiring(topology)), conditions=Conditions.model_validate(met), streams={topology.levels[0].name: 3}
    )
    source, destination = np.array(list(itertools.permutations(range(6), 2))).T
    limits = fabric.transfers(source, destination, np.ones(30)).transfers.limit_bytes_per_s
    assert limits is not None
    for a, b, limit in zip(source.tolist(), destination.tolist(), limits.tolist(), strict=True):
        round_trip_s = topology.latency_s(a, b) + topology.latency_s(b, a)
        assert limit == pytest.approx(under_way_bytes[a // 2 == b // 2] / round_trip_s)


def test_nothing_to_send_is_left_out() -> None:
    fabric = Fabric(Engine(), no_symmetry(wiring(cluster(4))))
    sent = np.zeros((4, 4))
    sent[1, 1], sent[2, 3] = 5.0, 7.0
    flows = fabric.flows(0, sent)
    assert (flows.source.tolist(), flows.destination.tolist()) == ([2], [3])
