"""Which files of checkpoints travel between sites, from where, and over which links; no rank runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybridep.config import build
from hybridep.topology import Cluster
from runtime.checkpoint_search import _transfers
from runtime.checkpoint_travel import Kept, Roads, Transfer, arrival, kept


def cluster(**changes: Any) -> Cluster:
    levels = [
        {"name": "dc", "size": 4, "bandwidth": "1 Gbps", "latency": "1 ms"},
        {"name": "gpu", "size": 2, "bandwidth": "10 Gbps", "latency": "1 us"},
    ]
    gpu = {"throughput": "10 GFLOPS", "memory": "1 GiB", "memory_bandwidth": "5 GB/s"}
    return build(Cluster, {"name": "test", "levels": levels, "gpu": gpu} | changes, "cluster")


LEADERS = [0, 0, 2, 2, 4, 4, 6, 6]


def test_copies_go_where_links_are_free() -> None:
    roads = Roads(cluster(), LEADERS)
    for file in (0, 2, 4, 6, 1, 3, 5, 7):
        roads.copy(f"file{file}", Kept(100, [LEADERS[file]]), 1)
    assert Counter(one.source for one in roads.transfers) == dict.fromkeys(range(8), 1), "both ranks of a site send one"
    assert Counter(one.destination for one in roads.transfers) == dict.fromkeys(range(8), 1)
    assert all(one.source // 2 != one.destination // 2 for one in roads.transfers)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_sites_keep_as_many_copies_as_others(copies: int) -> None:
    """Also where what a site sends takes longest, wherever it goes."""
    roads = Roads(cluster(), LEADERS)
    for name, file in kept({leader: {f"file{leader}{number}": 100 for number in range(4)} for leader in LEADERS}).items():
        roads.copy(name, file, copies)
    assert Counter(one.destination // 2 for one in roads.transfers) == dict.fromkeys(range(4), 4 * copies)
    assert Counter(one.destination for one in roads.transfers) == dict.fromkeys(range(8), 2 * copies)


def test_copies_go_over_the_fastest_links() -> None:
    names = [f"s{dc}" for dc in range(4)]
    fast = {(0, 3), (3, 1), (1, 2), (2, 0)}
    links = [
        {"src": names[src], "dst": names[dst], "bandwidth": "900 Mbps" if (src, dst) in fast else "10 Mbps", "latency": "1 ms"}
        for src in range(4)
        for dst in range(4)
        if src != dst
    ]
    roads = Roads(cluster(sites=[{"name": name} for name in names], links=links), LEADERS)
    for leader in (0, 2, 4, 6):
        roads.copy(f"file{leader}", Kept(100, [leader]), 1)
    assert {(one.source // 2, one.destination // 2) for one in roads.transfers} == fast
    roads.bring("wanted", Kept(100, [0, 4, 6]), {2, 4})
    assert roads.transfers[-1][2:] == (7, 3), "the site with the fast link, the ranks that have done less"


def test_pods_of_a_site_are_lost_together() -> None:
    pods = cluster(
        levels=[
            {
                "name": "dc",
                "size": 2,
                "bandwidth": "1 Gbps",
                "latency": "1 ms",
                "pods": {"bandwidth": "9 Gbps", "latency": "1 us"},
            },
            {"name": "gpu", "size": 2, "bandwidth": "10 Gbps", "latency": "1 us"},
        ],
        sites=[{"name": "large", "pods": 3}, {"name": "small"}],
    )
    roads = Roads(pods, LEADERS)
    roads.copy("file", Kept(100, [0]), 1)
    roads.copy("file", Kept(100, [0, 6]), 1)
    roads.copy("other", Kept(100, [6]), 3)
    roads.bring("file", Kept(100, [0, 6]), {2})
    assert roads.transfers == [Transfer("file", 100, 0, 6), Transfer("other", 100, 6, 0), Transfer("file", 100, 1, 2)]


def test_parts_of_parameters_are_brought_where_they_overlap() -> None:
    """Whatever parts they were written in, and are read in."""
    parts = {"a.pt": {"w": [0, 10]}, "b.pt": {"w": [10, 30], "v": [0, 5]}, "c.pt": {"v": [5, 9]}}
    sizes = {"a.pt": 3, "b.pt": 2, "c.pt": 1}

    def files(*wanted: tuple[str, int, int]) -> list[str]:
        told = [{"leader": LEADERS[rank], "files": [], "dense": [], "have": {}, "pieces": {}} for rank in range(8)]
        told[0] |= {"have": sizes, "pieces": parts}
        told[3] |= {"dense": wanted}
        transfers = _transfers(told, cluster())
        assert all(one.source in (0, 1) and one.destination in (2, 3) for one in transfers)
        return [one.name for one in transfers]

    assert files(("w", 2, 8)) == files(("w", 0, 10)) == ["a.pt"]
    assert files(("w", 8, 12)) == files(("w", 0, 30)) == ["a.pt", "b.pt"]
    assert files(("w", 10, 12), ("v", 5, 9)) == ["b.pt", "c.pt"] and files(("v", 5, 6)) == ["c.pt"] and files() == []


def test_files_of_several_ranks_have_names_of_their_own() -> None:
    assert arrival("a.pt", 1) != arrival("a.pt", 2) and not Path(arrival("a.pt", 1)).match("*.pt")
