from itertools import pairwise, permutations

import networkx as nx
import pytest

from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.topology import Cluster

GPU = {"throughput": "100 TFLOPS", "memory": "80 GiB", "memory_bandwidth": "2 TB/s"}


def hierarchy(*sizes):
    levels = [
        {"name": name, "size": size, "bandwidth": f"{10 * 10**depth} Gbps", "latency": f"{1000 // 10**depth} us"}
        for depth, (name, size) in enumerate(zip(("dc", "node", "gpu")[-len(sizes) :], sizes, strict=True))
    ]
    return build(Cluster, {"name": "h", "levels": levels, "gpu": GPU}, "h")


def three_sites():
    links = [
        {"src": a, "dst": b, "bandwidth": f"{1 + i} Gbps", "latency": f"{10 * (i + 1)} ms"}
        for i, (a, b) in enumerate(permutations("xyz", 2))
    ]
    data = {
        "name": "sites",
        "levels": [
            {"name": "dc", "size": 3, "bandwidth": "10 Gbps", "latency": "0 s"},
            {"name": "gpu", "size": 2, "bandwidth": "100 Gbps", "latency": "10 us"},
        ],
        "gpu": GPU,
        "sites": [{"name": "x", "up": "2 Gbps"}, {"name": "y"}, {"name": "z"}],
        "links": links,
    }
    return data


def test_ranks_are_mixed_radix_with_the_last_level_fastest():
    cluster = hierarchy(2, 3, 4)
    assert cluster.num_gpus == 24
    assert cluster.location(23) == (1, 2, 3)
    assert [tuple(x) for x in cluster.coordinates] == [cluster.location(rank) for rank in range(24)]
    assert cluster.peer(14, 0, 0) == 2
    assert cluster.peer(14, 1, 2) == 22


@pytest.mark.parametrize(
    "cluster", [hierarchy(4), hierarchy(2, 3, 4), build(Cluster, three_sites(), "s")], ids=["flat", "deep", "wan"]
)
def test_the_path_is_the_shortest_path_of_the_graph(cluster):
    graph = cluster.graph()
    for src, dst in permutations(range(cluster.num_gpus), 2):
        nodes = nx.shortest_path(graph, src, dst)
        links = [graph.edges[a, b]["link"] for a, b in pairwise(nodes)]
        assert tuple(links) == cluster.path(src, dst)


def test_links_and_latencies_of_sites_are_those_of_the_pair():
    cluster = build(Cluster, three_sites(), "s")
    path = [cluster.link_table[link] for link in cluster.path(0, 5)]
    assert [link.name for link in path] == ["x/gpu0 up", "x up", "x -> z", "z down", "z/gpu1 down"]
    assert path[1].bandwidth_bytes_per_s == 0.25e9
    assert path[2].bandwidth_bytes_per_s == 0.25e9
    assert cluster.latency_s(0, 5) == pytest.approx(0.02)
    assert cluster.latency_s(5, 0) == pytest.approx(0.05)
    assert cluster.latency_s(0, 1) == pytest.approx(1e-5)
    assert not cluster.is_symmetric


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["links"].pop(), "no link z -> y"),
        (lambda d: d["links"].append(d["links"][0]), "given twice"),
        (lambda d: d["links"].append({**d["links"][0], "dst": "w"}), "x -> w does not join"),
        (lambda d: d["sites"].pop(), "2 are named but level 'dc' has size 3"),
        (lambda d: d["sites"].__setitem__(1, {"name": "x"}), "names repeat"),
    ],
)
def test_a_bad_profile_is_refused_by_name(change, message):
    data = three_sites()
    change(data)
    with pytest.raises(ConfigError, match=message):
        build(Cluster, data, "s")


def test_a_changed_copy_has_links_and_latencies_of_its_own():
    cluster = hierarchy(2, 2)
    assert cluster.link_table[0].bandwidth_bytes_per_s == 1.25e9 and cluster.site_latency_s[0, 1] == 1e-3
    slower = cluster.levels[0].model_copy(update={"bandwidth": 1e6, "latency": 0.5})
    changed = cluster.model_copy(update={"levels": (slower, *cluster.levels[1:])})
    assert changed.link_table[0].bandwidth_bytes_per_s == 1e6 and changed.site_latency_s[0, 1] == 0.5
