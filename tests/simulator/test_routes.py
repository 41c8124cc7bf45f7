"""Routes by formula against routes through a graph, and what splits where."""

import itertools

import networkx as nx
import numpy as np
import pytest
from fabric_cases import fabric, ring_of_trunks
from simulated_plans import make_plan

from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.topology import Cluster
from simulator.errors import SimulationError
from simulator.fabric_file import FabricFile
from simulator.routes import Routes, routes, with_fabric


def made(sites: int, fabric_file: FabricFile) -> Routes:
    found = routes(make_plan(sites, 2, num_experts=16).cluster, fabric_file.wan)
    assert found is not None
    return found


def crossed(found: Routes) -> dict[tuple[int, int], dict[str, float]]:
    """Pair of sites -> share on each trunk, by name."""
    table = {}
    for pair in itertools.permutations(range(found.num_sites), 2):
        trunks, shares = found.between(np.array([pair[0]]), np.array([pair[1]]))
        table[pair] = {found.trunk_name(t): s for t, s in zip(trunks[0].tolist(), shares[0].tolist(), strict=True) if t >= 0}
    return table


@pytest.mark.parametrize("routing", ["shortest", "ecmp"])
@pytest.mark.parametrize("sites", [2, 3, 5, 6])
def test_a_ring_is_the_graph_of_its_trunks(sites: int, routing: str) -> None:
    if sites == 2:
        return
    ring = made(sites, fabric(wan={"ring": {"bandwidth": "1 Gbps", "latency": "3 ms", "routing": routing}}))
    graph = made(sites, fabric(wan={"graph": {"routing": routing, "trunks": ring_of_trunks(sites, "1 Gbps")}}))
    np.testing.assert_allclose(ring.latency_s, graph.latency_s)
    mine, theirs = crossed(ring), crossed(graph)
    for (a, b), shares in mine.items():
        if routing == "ecmp" or 2 * ((b - a) % sites) != sites:
            assert shares == theirs[a, b]


@pytest.mark.parametrize("at", [None, "dc2"])
def test_a_hub_is_the_graph_of_its_spokes(at: str | None) -> None:
    hub = made(4, fabric(wan={"hub": {"bandwidth": "1 Gbps", "latency": "3 ms"} | ({"at": at} if at else {})}))
    spokes = [
        {"ends": [f"dc{site}", at or "hub"], "bandwidth": "1 Gbps", "latency": "3 ms"} for site in range(4) if f"dc{site}" != at
    ]
    graph = made(4, fabric(wan={"graph": {"trunks": spokes}}))
    np.testing.assert_allclose(hub.latency_s, graph.latency_s)
    assert crossed(hub) == crossed(graph)


def test_a_mesh_has_a_trunk_per_ordered_pair() -> None:
    mesh = made(3, fabric(wan={"mesh": {"bandwidth": "1 Gbps", "latency": "3 ms"}}))
    assert crossed(mesh) == {(a, b): {f"dc{a} -> dc{b}": 1.0} for a, b in itertools.permutations(range(3), 2)}
    assert mesh.latency_s[0, 1] == 0.003


@pytest.mark.parametrize("seed", range(5))
def test_every_step_of_ecmp_lies_on_a_shortest_route_and_nothing_is_lost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = nx.connected_watts_strogatz_graph(9, 4, 0.4, seed=seed)
    metrics = {edge: int(rng.integers(1, 3)) for edge in graph.edges}
    nx.set_edge_attributes(graph, metrics, "metric")
    place = lambda node: f"dc{node}" if node < 6 else f"pop{node}"  # noqa: E731
    trunks = [
        {"ends": [place(a), place(b)], "bandwidth": "1 Gbps", "latency": "1 ms", "metric": m} for (a, b), m in metrics.items()
    ]
    found = made(6, fabric(wan={"graph": {"routing": "ecmp", "trunks": trunks}}))
    for (a, b), shares in crossed(found).items():
        on_shortest = {
            f"{place(u)} -> {place(v)}"
            for path in nx.all_shortest_paths(graph, a, b, "metric")
            for u, v in itertools.pairwise(path)
        }
        assert set(shares) == on_shortest
        balance: dict[str, float] = {}
        for name, share in shares.items():
            tail, head = name.split(" -> ")
            balance[tail] = balance.get(tail, 0.0) - share
            balance[head] = balance.get(head, 0.0) + share
        assert balance.pop(f"dc{a}") == pytest.approx(-1)
        assert balance.pop(f"dc{b}") == pytest.approx(1)
        assert all(abs(left) < 1e-12 for left in balance.values())


def test_parallel_trunks_have_names_of_their_own() -> None:
    ring = made(2, fabric(wan={"ring": {"bandwidth": "1 Gbps", "routing": "ecmp"}}))
    cable = {"ends": ["dc0", "dc1"], "bandwidth": "1 Gbps", "latency": "1 ms"}
    graph = made(2, fabric(wan={"graph": {"routing": "ecmp", "trunks": [cable, cable]}}))
    names = {f"dc{a} -> dc{1 - a} {number}": 0.5 for a in (0, 1) for number in (1, 2)}
    for found in (ring, graph):
        assert crossed(found) == {
            (a, 1 - a): {name: share for name, share in names.items() if name.startswith(f"dc{a}")} for a in (0, 1)
        }
    wan = fabric(wan={"graph": {"routing": "ecmp", "trunks": [cable, cable]}}).wan
    assert wan is not None
    trunks = [trunk.model_dump(mode="json") for trunk in with_fabric(make_plan(2, 2).cluster, wan).trunks]
    assert len({trunk["name"] for trunk in trunks}) == 4
    data = make_plan(2, 2).cluster.model_dump(mode="json", exclude_none=True) | {"trunks": [trunks[0], trunks[0]]}
    with pytest.raises(ConfigError, match="trunks: names repeat"):
        build(Cluster, data, "cluster")


@pytest.mark.parametrize("name", ["dc1 up", "dc0 -> dc1"])
def test_a_trunk_is_not_called_as_a_link(name: str) -> None:
    """Its load would be told as the link's, and what changes one would change both."""
    data = make_plan(2, 2).cluster.model_dump(mode="json", exclude_none=True)
    ends = [("dc0", "dc1"), ("dc1", "dc0")]
    links = [{"src": src, "dst": dst, "bandwidth": "1 Gbps", "latency": "1 ms"} for src, dst in ends]
    named = {"sites": [{"name": "dc0"}, {"name": "dc1"}], "links": links}
    trunk = {"name": name, "bandwidth": "1 Gbps", "carries": {"dc0 -> dc1": 1}}
    with pytest.raises(ConfigError, match=f"trunks: '{name}' is what a link of the sites is called; give the trunk another"):
        build(Cluster, data | named | {"trunks": [trunk]}, "cluster")


def graph_of(*metrics: tuple[str, str, float]) -> FabricFile:
    trunks = [{"ends": [a, b], "bandwidth": "1 Gbps", "latency": "1 ms", "metric": metric} for a, b, metric in metrics]
    return fabric(wan={"graph": {"routing": "ecmp", "trunks": trunks}})


def test_only_shortest_ways_are_taken() -> None:
    nearly = graph_of(("dc0", "pop", 100.0), ("pop", "dc1", 100.0), ("dc0", "dc1", 200.001))
    assert crossed(made(2, nearly))[0, 1] == {"dc0 -> pop": 1.0, "pop -> dc1": 1.0}
    # A place that is hardly nearer than another is not on its way.
    small = graph_of(("dc0", "dc1", 1.0), ("dc0", "dc2", 1e-9), ("dc1", "dc2", 2.0))
    assert crossed(made(3, small))[2, 1] == {"dc2 -> dc0": 1.0, "dc0 -> dc1": 1.0}
    with pytest.raises(SimulationError, match="metrics at dc0 are too unequal"):
        made(3, graph_of(("dc0", "dc1", 1e-30), ("dc1", "dc2", 1.0)))


def test_places_that_are_not_joined() -> None:
    trunk = {"ends": ["dc0", "dc1"], "bandwidth": "1 Gbps", "latency": "0 s"}
    with pytest.raises(SimulationError, match="no route from dc2 to dc0"):
        made(3, fabric(wan={"graph": {"trunks": [trunk]}}))
    with pytest.raises(SimulationError, match=r"hub\.at: no site 'nowhere'"):
        made(3, fabric(wan={"hub": {"bandwidth": "1 Gbps", "at": "nowhere"}}))
