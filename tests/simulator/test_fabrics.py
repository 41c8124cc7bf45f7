"""Transfers over fabrics: times that a person can add up, the definition of max-min fairness, and one of each kind for all."""

import itertools

import numpy as np
import pytest
from fabric_cases import FABRICS, fabric
from max_min_oracle import check_max_min, rates_bytes_per_s
from simulated_plans import RATES_GBPS, make_plan, one_by_one

import simulator.blocks
from hybridep.plan import Plan
from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.fabric import Fabric
from simulator.fabric_file import FabricFile
from simulator.step import simulate_step
from simulator.symmetry import no_symmetry
from simulator.wiring import wiring

CLUSTER = make_plan(6, 2, 4, latency_s=1e-3, num_experts=48).cluster
GBPS = 1e9 / 8


def time_of(fabric_file: FabricFile, pairs: list[tuple[int, int]], size_bytes: float = 1e6) -> float:
    """Seconds until the last of equal transfers between ranks has arrived, less one latency."""
    engine = Engine()
    wires = wiring(CLUSTER, fabric_file)
    made = Fabric(engine, no_symmetry(wires))
    source, destination = np.array(pairs).T
    latency_s = wires.paths(source, destination).latency_s
    assert (latency_s == latency_s[0]).all()
    flows = made.transfers(source, destination, np.full(len(pairs), size_bytes))
    made.network.send(flows.transfers, lambda groups, last: None)
    engine.run()
    return engine.now_s - float(latency_s[0])


ALL_TO_ALL = [(8 * a, 8 * b) for a, b in itertools.permutations(range(6), 2)]


@pytest.mark.parametrize(
    ("name", "pairs", "expected_s"),
    [
        # One transfer at the rate of its slowest link; a site's access link has 1 Gbps.
        ("mesh", [(0, 8)], 1e6 / (0.2 * GBPS)),
        ("hub", [(0, 8)], 1e6 / (0.4 * GBPS)),
        ("ring", [(0, 8)], 1e6 / (0.3 * GBPS)),
        ("ring, both ways", [(0, 24)], 1e6 / (2 * 0.3 * GBPS)),
        ("fat-tree", [(0, 4)], 1e6 / (RATES_GBPS["node"] / 3 * GBPS)),
        ("rail", [(0, 4)], 1e6 / (RATES_GBPS["node"] / 4 * GBPS)),
        ("nvlink", [(0, 1)], 1e6 / (900 * GBPS)),
        # Transfers that share: on a trunk, on a leaf's uplink, on a rail.
        ("mesh", [(0, 8), (1, 9)], 2e6 / (0.2 * GBPS)),
        ("fat-tree", [(0, 4), (1, 5), (2, 6)], 3e6 / (RATES_GBPS["node"] / 3 * GBPS)),
        ("rail", [(0, 5), (1, 5)], 2e6 / (RATES_GBPS["node"] / 4 * GBPS)),
        ("rail", [(0, 4), (1, 5), (2, 6), (3, 7)], 1e6 / (RATES_GBPS["node"] / 4 * GBPS)),
        # Incast: five sites send to one over its own trunk, or its access link.
        ("hub", [(8 * site, 0) for site in range(1, 6)], 5e6 / (0.4 * GBPS)),
        ("mesh", [(8 * site, 0) for site in range(1, 6)], max(5e6 / (1 * GBPS), 1e6 / (0.2 * GBPS))),
        # All-to-All: every trunk of the ring carries 1 + 2 neighbours' transfers and, split or not, the opposite site's.
        ("mesh", ALL_TO_ALL, max(5e6 / (1 * GBPS), 1e6 / (0.2 * GBPS))),
        ("hub", ALL_TO_ALL, 5e6 / (0.4 * GBPS)),
        ("ring", ALL_TO_ALL, 6e6 / (0.3 * GBPS)),
        ("ring, both ways", ALL_TO_ALL, 4.5e6 / (0.3 * GBPS)),
    ],
)
def test_closed_forms(name: str, pairs: list[tuple[int, int]], expected_s: float) -> None:
    file = FABRICS[name]
    if name == "hub":
        file = fabric(wan={"hub": {"bandwidth": "0.4 Gbps"}})
    assert time_of(file, pairs) == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("name", FABRICS)
def test_rates_are_max_min_fair_and_bytes_are_conserved(name: str) -> None:
    rng = np.random.default_rng(1)
    wires = wiring(CLUSTER, FABRICS[name])
    pairs = [pair for pair in itertools.permutations(range(CLUSTER.num_gpus), 2) if rng.random() < 0.1]
    source, destination = np.array(pairs).T
    engine = Engine()
    made = Fabric(engine, no_symmetry(wires))
    size_bytes = rng.lognormal(15, 1, len(pairs))
    transfers = made.transfers(source, destination, size_bytes).transfers
    weights = np.ones(transfers.links.shape) if transfers.weights is None else transfers.weights
    batch = made.network.prepare(transfers, lambda groups, last: None)
    made.network.start(batch)
    # The network looks ahead as far as nothing else happens.
    engine.at(1e-9, lambda: None)
    engine.run(until_s=0.0)
    check_max_min(wires.capacity_bytes_per_s, transfers.links, weights, rates_bytes_per_s(made.network, batch))
    engine.run()
    paths = wires.paths(source, destination)
    carried = np.zeros(wires.capacity_bytes_per_s.size)
    used = paths.links >= 0
    np.add.at(carried, paths.links[used], (paths.shares * size_bytes[:, None])[used])
    np.testing.assert_allclose(made.network.link_bytes, carried, rtol=1e-12)


@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(make_plan(6, 2, 4, num_experts=48, num_layers=2, latency_s=1e-3), id="ep"),
        pytest.param(make_plan(6, 2, 4, num_experts=12, num_layers=2, domains={"dc": 3, "node": 2}), id="hybrid"),
    ],
)
def test_kinds_give_what_all_ranks_give(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = simulate_step(plan, fabric=FABRICS[name])
    monkeypatch.setattr(simulator.blocks, "symmetry", one_by_one)
    full = simulate_step(plan, fabric=FABRICS[name])
    kind = reduced.symmetry.kind
    assert reduced.symmetry.num_kinds < full.symmetry.num_kinds
    np.testing.assert_allclose(reduced.execution.end_s[:, kind], full.execution.end_s, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(reduced.link_bytes, full.link_bytes, rtol=1e-9)
    assert reduced.step_s == pytest.approx(full.step_s, rel=1e-8)


def test_symmetric_rings_and_meshes_have_few_kinds() -> None:
    plan = make_plan(6, 2, 4, num_experts=48)
    for name in ("mesh", "hub", "ring, both ways"):
        assert simulate_step(plan, fabric=FABRICS[name]).symmetry.num_kinds == 1
    assert simulate_step(plan, fabric=FABRICS["hub at a site"]).symmetry.num_kinds == 2


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ({"fat_tree": {"workers_per_leaf": 3}}, "workers_per_leaf: 3 must divide a site's workers, [0-9]+$"),
        ({"nvlink": {"domain": 3, "bandwidth": "1 Gbps"}}, "domain: 3 must divide"),
        ({"rail": {}}, "needs a level of nodes"),
    ],
)
def test_fabrics_that_do_not_fit_the_cluster(inside: dict[str, object], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        wiring(make_plan(2, 4).cluster, fabric(inside=inside))


def test_links_may_be_alike_where_no_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # The one site's links carry nothing, and what leaves a node's only GPU crosses two links of one rate.
    plan = make_plan(1, 4, 1, num_experts=4, num_layers=3, throughput=1e9)
    levels = [level.model_copy(update={"bandwidth": 1e9}) for level in plan.cluster.levels]
    plan = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"levels": tuple(levels)})})
    plan = plan.with_popularity(((0.3, 0.28, 0.22, 0.2), (0.2, 0.22, 0.28, 0.3)))
    some = simulate_step(plan)
    assert (some.symmetry.num_kinds, some.symmetry.link_size.max()) == (4, 2)
    monkeypatch.setattr(simulator.blocks, "symmetry", one_by_one)
    every = simulate_step(plan)
    assert some.step_s == pytest.approx(every.step_s, rel=1e-9)
    np.testing.assert_allclose(some.link_bytes, every.link_bytes, rtol=1e-9)
