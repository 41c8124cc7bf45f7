"""Transfers over random fabrics, which end when a network of named devices has them, each path told from what a file says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from fabric_cases import fabric
from max_min_oracle import fluid_end_s
from simulated_plans import RATES_GBPS, make_plan

from hybridep.arrays import IntArray
from simulator.engine import Engine
from simulator.fabric import Fabric
from simulator.symmetry import no_symmetry
from simulator.wiring import wiring

GBPS = 1e9 / 8
Place = tuple[int, int, int]
"""Site, node, GPU."""
Device = tuple[object, ...]
Path = dict[Device, float]
"""Links, and the share of a transfer on each."""
UP, DOWN = 0, 1


class Devices:
    """Links by name, with what they carry once a path has used them."""

    def __init__(self, sizes: tuple[int, int, int], inside: dict[str, Any], wan: dict[str, Any]) -> None:
        self.sizes, self.inside, self.wan = sizes, inside, wan
        self.capacity: dict[Device, float] = {}
        self.circuits: dict[tuple[int, int, int], int] = {}
        """(Site, node, another) -> number."""

    def path(self, a: Place, b: Place) -> Path:
        node_gbps, one = RATES_GBPS["node"], self.sizes[2]
        if "rail" in self.inside:
            relay = a if a[0] != b[0] else (*a[:2], b[2])
            names = [] if relay == a else [self._link(("gpu", *a), UP, "gpu"), self._link(("gpu", *relay), DOWN, "gpu")]
            if a[:2] != b[:2]:
                names += [self._use(("port", *end, way), node_gbps / one) for end, way in ((relay, UP), (b, DOWN))]
        elif self._domain(a) == self._domain(b):
            return dict.fromkeys((self._use(("port", *end, way), 900.0) for end, way in ((a, UP), (b, DOWN))), 1.0)
        else:
            names = [self._link(("gpu", *end), way, "gpu") for end, way in ((a, UP), (b, DOWN))]
            if number := self.circuits.get((a[0], *sorted((a[1], b[1]))), 0) if a[0] == b[0] else 0:
                mixnet = self.inside["mixnet"]
                share = number / (mixnet["packet"] + mixnet["optical"])
                names.append(self._use(("circuits", *a[:2], b[1]), share * node_gbps))
            elif a[:2] != b[:2]:
                names += [self._link(("node", *end[:2]), way, "node") for end, way in ((a, UP), (b, DOWN))]
                names += self._leaves(a, b)
        if a[0] == b[0]:
            return dict.fromkeys(names, 1.0)
        names += [self._link(("dc", end[0]), way, "dc") for end, way in ((a, UP), (b, DOWN))]
        return dict.fromkeys(names, 1.0) | self._between(a[0], b[0])

    def _use(self, device: Device, gbps: float) -> Device:
        self.capacity[device] = gbps * GBPS
        return device

    def _link(self, worker: Device, way: int, level: str) -> Device:
        mixnet, gbps = self.inside.get("mixnet"), RATES_GBPS[level]
        if level == "node" and mixnet:
            gbps *= mixnet["packet"] / (mixnet["packet"] + mixnet["optical"])
        return self._use((*worker, way), gbps)

    def _domain(self, place: Place) -> object:
        if "nvlink" not in self.inside:
            return place
        return place[0], (place[1] * self.sizes[2] + place[2]) // self.inside["nvlink"]["domain"]

    def _leaves(self, a: Place, b: Place) -> list[Device]:
        if (tree := self.inside.get("fat_tree")) is None:
            return []
        gbps = RATES_GBPS["node"] * tree["workers_per_leaf"] / tree["oversubscription"]
        leaves = [(end[0], end[1] // tree["workers_per_leaf"]) for end in (a, b)]
        ways = ((leaves[0], UP), (leaves[1], DOWN))
        return [] if leaves[0] == leaves[1] else [self._use(("leaf", *leaf, way), gbps) for leaf, way in ways]

    def _between(self, a: int, b: int) -> Path:
        kind = next(iter(self.wan), None)
        if kind == "mesh":
            return {self._use(("trunk", a, b), 0.2): 1.0}
        if kind == "hub":
            ends = [(site, way) for site, way in ((a, UP), (b, DOWN)) if f"dc{site}" != self.wan["hub"].get("at")]
            return {self._use(("spoke", *end), 0.4): 1.0 for end in ends}
        if kind == "ring":
            sites = self.sizes[0]
            ways = [[("ring", (a + way * k) % sites, way) for k in range(way * (b - a) % sites)] for way in (1, -1)]
            ways = [one for one in ways if len(one) == min(map(len, ways))]
            ways = ways if self.wan["ring"]["routing"] == "ecmp" else ways[:1]
            return {self._use(device, 0.3): 1 / len(ways) for one in ways for device in one}
        return self._over_graph(f"dc{a}", f"dc{b}") if kind else {}

    def _over_graph(self, a: str, b: str) -> Path:
        cables, found = self.wan["graph"]["trunks"], Path()
        graph = nx.Graph()
        for one in sorted(cables, key=lambda one: -one["metric"]):
            graph.add_edge(*one["ends"], metric=one["metric"])
        far = nx.single_source_dijkstra_path_length(graph, b, weight="metric")

        def go(at: str, part: float) -> None:
            forks = [
                (number, one["ends"][1 - side], one)
                for number, one in enumerate(cables)
                for side in (0, 1)
                if one["ends"][side] == at and far[one["ends"][1 - side]] + one["metric"] == far[at]
            ]
            forks = forks if self.wan["graph"]["routing"] == "ecmp" else forks[:1]
            for number, to, one in forks if at != b else ():
                device = self._use(("cable", number, to), float(one["bandwidth"].split()[0]))
                found[device] = found.get(device, 0.0) + part / len(forks)
                go(to, part / len(forks))

        go(a, 1.0)
        return found


def random_devices(rng: np.random.Generator) -> Devices:
    def divisor(number: int, least: int = 1) -> int:
        return int(rng.choice([each for each in range(least, number + 1) if number % each == 0]))

    sites, nodes, gpus = int(rng.integers(1, 5)), int(rng.integers(2, 5)), int(rng.integers(1, 5))
    parts = {
        "fat_tree": {"workers_per_leaf": divisor(nodes), "oversubscription": float(rng.choice([1, 1.5, 3]))},
        "nvlink": {"domain": divisor(nodes * gpus, 2), "bandwidth": "900 Gbps"},
        "rail": {},
        "mixnet": {"packet": int(rng.integers(1, 4)), "optical": int(rng.integers(1, 5)), "region": divisor(nodes, 2)},
    }
    chosen: tuple[str, ...] = ((), ("fat_tree",), ("nvlink",), ("fat_tree", "nvlink"), ("rail",), ("mixnet",))[rng.integers(6)]
    places = [f"dc{site}" for site in range(sites)] + [f"pop{place}" for place in range(int(rng.integers(3)))]
    ends = [(places[k], places[int(rng.integers(k))]) for k in range(1, len(places))]
    ends += [tuple(rng.choice(places, 2, replace=False)) for _ in range(int(rng.integers(4))) if len(places) > 1]
    routing = str(rng.choice(["shortest", "ecmp"]))
    trunks = [
        {
            "ends": [str(end) for end in rng.permutation(both)],
            "bandwidth": f"{rng.integers(1, 9) / 10} Gbps",
            "latency": "1 ms",
            "metric": int(rng.integers(1, 4)),
        }
        for both in ends
    ]
    wans: list[dict[str, Any]] = [
        {},
        {"mesh": {"bandwidth": "0.2 Gbps"}},
        {"hub": {"bandwidth": "0.4 Gbps"}},
        {"hub": {"bandwidth": "0.4 Gbps", "at": f"dc{rng.integers(sites)}"}},
        {"ring": {"bandwidth": "0.3 Gbps", "routing": routing}},
        {"graph": {"routing": routing, "trunks": trunks}},
    ]
    return Devices((sites, nodes, gpus), {name: parts[name] for name in chosen}, wans[rng.integers(6)] if sites > 1 else {})


def drawn_circuits(devices: Devices, rng: np.random.Generator) -> IntArray | None:
    """[regions, nodes of one, again], which the devices get to know."""
    if "mixnet" not in devices.inside:
        return None
    (sites, nodes, _), mixnet = devices.sizes, devices.inside["mixnet"]
    size = mixnet["region"]
    made = rng.integers(0, mixnet["optical"] + 1, (sites * nodes // size, size, size))
    made = np.triu(made, 1) + np.triu(made, 1).transpose(0, 2, 1)
    for region, a, b in np.argwhere(np.triu(made)).tolist():
        site, first = divmod(region * size, nodes)
        devices.circuits[site, first + a, first + b] = int(made[region, a, b])
    return made


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(8))
def test_transfers_end_as_over_devices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(30):
        devices = random_devices(rng)
        cluster = make_plan(*devices.sizes, num_experts=max(4, int(np.prod(devices.sizes)))).cluster
        parts = {"inside": devices.inside} | ({"wan": devices.wan} if devices.wan else {})
        number, ranks = int(rng.integers(1, 30)), cluster.num_gpus
        source = rng.integers(ranks, size=number)
        destination = (source + rng.integers(1, ranks, size=number)) % ranks
        size_bytes = rng.lognormal(14, 1, number) if rng.random() < 0.5 else np.full(number, 1e6)
        circuits = drawn_circuits(devices, rng)
        locations = [tuple(cluster.location(rank)) for rank in range(ranks)]
        paths = [devices.path(locations[a], locations[b]) for a, b in zip(source, destination, strict=True)]
        links = {device: place for place, device in enumerate(devices.capacity)}
        crossed, shares = np.full((number, len(links)), -1), np.ones((number, len(links)))
        for row, path in enumerate(paths):
            for column, (device, share) in enumerate(path.items()):
                crossed[row, column], shares[row, column] = links[device], share
        expected_s = fluid_end_s(np.array(list(devices.capacity.values())), crossed, shares, size_bytes)

        engine, end_s = Engine(), np.zeros(number)
        made = Fabric(engine, no_symmetry(wiring(cluster, fabric(**parts))))
        transfers = made.transfers(source, destination, size_bytes, None, circuits).transfers
        groups = np.arange(number)[:, None]

        def note(arrived: IntArray, last: IntArray, engine: Engine = engine, end_s: Any = end_s) -> None:
            end_s[arrived] = engine.now_s

        made.network.send(replace(transfers, latency_s=np.zeros(number), groups=groups), note)
        engine.run()
        np.testing.assert_allclose(end_s, expected_s, rtol=1e-7, err_msg=f"{devices.sizes} {parts}")
