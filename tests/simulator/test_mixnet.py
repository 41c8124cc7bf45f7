"""A MixNet: what crosses which link, when its circuits cost time, and what it knows of traffic beforehand."""

from typing import Any

import numpy as np
import pytest
from fabric_cases import fabric
from max_min_oracle import check_max_min, rates_bytes_per_s
from scipy.optimize import LinearConstraint, minimize
from simulated_plans import RATES_GBPS, make_plan

from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.plan import Plan
from hybridep.routing import Routing
from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.fabric import Fabric
from simulator.fabric_file import FabricFile
from simulator.load_prediction import transition
from simulator.mixnet import CircuitController
from simulator.routing import zipf_routing
from simulator.step import StepResult, simulate_step
from simulator.symmetry import no_symmetry
from simulator.wiring import wiring

INTERFACE_BYTES_PER_S = RATES_GBPS["node"] / 8 * 1e9 / 8


def mixnet(**settings: Any) -> FabricFile:
    return fabric(inside={"mixnet": settings})


def circuits_of(regions: int, nodes: int, *joined: tuple[int, int, int, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(region, node, node, how many)"""
    made = np.zeros((regions, nodes, nodes), dtype=np.int64)
    for region, a, b, number in joined:
        made[region, a, b] = made[region, b, a] = number
    return made


# --- links ---------------------------------------------------------------------------------------------------------------------

CLUSTER = make_plan(2, 4, 2, num_experts=16).cluster
CIRCUITS = circuits_of(2, 4, (0, 0, 1, 3), (0, 0, 2, 1), (1, 2, 3, 6))


@pytest.mark.parametrize(
    ("pairs", "interfaces"),
    [
        # Ranks 0 and 2 are on nodes 0 and 1: three circuits, for one transfer or shared by two, and as much back.
        ([(0, 2)], 3.0),
        ([(0, 2), (1, 3)], 1.5),
        ([(0, 2), (2, 0)], 3.0),
        # Nodes 0 and 2 have one; 0 and 3 none, and use the packet network, which two transfers of a node share.
        ([(0, 4)], 1.0),
        ([(0, 6)], 2.0),
        ([(0, 6), (1, 6)], 1.0),
        # In the other site, and between the two.
        ([(12, 14)], 6.0),
        ([(8, 10)], 2.0),
        ([(0, 8)], RATES_GBPS["dc"] * 1e9 / 8 / INTERFACE_BYTES_PER_S),
        # Circuits take nothing from the packet links of their nodes.
        ([(0, 2), (0, 6)], 2.0),
    ],
)
def test_transfers_take_circuits_or_packet_links(pairs: list[tuple[int, int]], interfaces: float) -> None:
    engine = Engine()
    made = Fabric(engine, no_symmetry(wiring(CLUSTER, mixnet())))
    source, destination = np.array(pairs).T
    flows = made.transfers(source, destination, np.full(len(pairs), 1e6), None, CIRCUITS)
    made.network.send(flows.transfers, lambda groups, last: None)
    engine.run()
    assert engine.now_s == pytest.approx(1e6 / (interfaces * INTERFACE_BYTES_PER_S), rel=1e-9)


def test_rates_over_circuits_are_max_min_fair_and_bytes_are_conserved() -> None:
    rng = np.random.default_rng(3)
    wires = wiring(CLUSTER, mixnet())
    source, destination = np.array([(a, b) for a in range(16) for b in range(16) if a != b and rng.random() < 0.4]).T
    size_bytes = rng.lognormal(15, 1, source.size)
    engine = Engine()
    made = Fabric(engine, no_symmetry(wires))
    transfers = made.transfers(source, destination, size_bytes, None, CIRCUITS).transfers
    batch = made.network.prepare(transfers, lambda groups, last: None)
    made.network.start(batch)
    engine.at(1e-9, lambda: None)
    engine.run(until_s=0.0)
    rates = rates_bytes_per_s(made.network, batch)
    check_max_min(wires.capacity_bytes_per_s, transfers.links, np.ones(transfers.links.shape), rates)
    engine.run()
    # Between two nodes of one region: all of it over their circuits where they have any, none of it otherwise.
    carried = {link: size for link, size in enumerate(made.network.link_bytes) if wires.is_circuit(link) and size}
    node = source // 2, destination // 2
    for a, b, number, place in ((0, 1, 3, "node 0 -> node 1"), (6, 7, 6, "node 6 -> node 7")):
        between = size_bytes[(node[0] == a) & (node[1] == b)].sum()
        (link,) = [each for each in carried if wires.link_name(each) == f"{number} circuits {place}"]
        assert carried[link] == pytest.approx(between, rel=1e-12)
    assert len(carried) == 2 * 3


@pytest.mark.parametrize(
    ("inside", "sizes", "message"),
    [
        ({"mixnet": {}}, (2, 4), "needs a level of nodes"),
        ({"mixnet": {"region": 3}}, (2, 4, 2), "region: 3 must divide the nodes of a site, 4"),
        ({"mixnet": {}}, (4, 1, 2), "region: 1 must divide the nodes of a site, 1, and be at least 2"),
    ],
)
def test_clusters_that_it_does_not_fit(inside: dict[str, Any], sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        wiring(make_plan(*sizes).cluster, fabric(inside=inside))


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ({"mixnet": {"packet": 0}}, "packet"),
        ({"mixnet": {"optical": 0}}, "optical"),
        ({"mixnet": {"reconfiguration": 25}}, "has no unit"),
        ({"mixnet": {"allocation": "best"}}, "'paper', 'simulator' or 'matching'"),
        ({"mixnet": {"delay": "1 ms"}}, "delay"),
        ({"mixnet": {}, "fat_tree": {"workers_per_leaf": 2}}, "mixnet: brings its own packet network"),
    ],
)
def test_files_that_say_nonsense(inside: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(FabricFile, {"name": "test", "inside": inside}, "test")


# --- time ----------------------------------------------------------------------------------------------------------------------

LAYERS = 3


def one_choice_plan(*sizes: int, micro_batches: int = 1) -> Plan:
    """Top-1 gates; every layer computes 1 ms before its experts, twice that in backward, and next to nothing else."""
    made = make_plan(*sizes, num_experts=int(np.prod(sizes)), num_layers=LAYERS + 1, micro_batches=micro_batches, throughput=1e18)
    workload = made.workload
    one = workload.model_copy(update={"model": workload.model.model_copy(update={"top_k": 1})})
    return made.model_copy(update={"workload": one})


def partners(plan: Plan, site: int = 0) -> Routing:
    """All tokens of a node go to one other node, 1 or 2 away by turns of layers; of the same site, or of the one so far away."""
    sites, nodes, _ = plan.cluster.sizes
    ranks = np.arange(plan.cluster.num_gpus)
    tokens = plan.workload.training.tokens
    made = {}
    for layer in range(LAYERS):
        partner = (ranks // nodes + site) % sites * nodes + (ranks % nodes ^ (1 + layer % 2))
        for micro_batch in range(plan.workload.training.micro_batches):
            made[layer, micro_batch] = np.broadcast_to(partner[:, None, None], (ranks.size, tokens, 1)).copy()
    return made


def step(plan: Plan, routing: Routing, **settings: Any) -> StepResult:
    return simulate_step(plan, routing, fabric=mixnet(**settings))


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("allocation", "delay_ms"),
    [("matching", 0.3), ("matching", 1.0), ("paper", 1.7), ("matching", 2.0), ("simulator", 2.6), ("matching", 40.0)],
)
def test_a_change_hides_behind_computation_exactly_as_far_as_it_goes(allocation: str, delay_ms: float) -> None:
    plan = one_choice_plan(1, 4, 1, micro_batches=3)
    routing = partners(plan)

    def more_ms(**settings: Any) -> float:
        with_delay, without = (
            step(plan, routing, allocation=allocation, reconfiguration=f"{delay} ms", **settings).step_s
            for delay in (delay_ms, 0)
        )
        return (with_delay - without) * 1e3

    # A node tells three others how many rows follow, over its packet links, while circuits change.
    counts_ms = 3 * 8 / (2 * INTERFACE_BYTES_PER_S) * 1e3
    # In forward each layer waits for the rest of it, but the first one after a backward, which ended with the same circuits. In
    # backward the last layer has its circuits from forward, and the others change while the one above computes for 2 ms.
    backward = 3 * (LAYERS - 1) * max(delay_ms - 2.0, 0.0)
    assert more_ms() == pytest.approx((3 * LAYERS - 2) * (delay_ms - counts_ms) + backward, rel=1e-6)
    # Foreseen from the second micro-batch on, it hides behind the 1 ms before the gate as well.
    foreseen = LAYERS * (delay_ms - counts_ms) + 2 * (LAYERS - 1) * max(delay_ms - counts_ms - 1.0, 0.0)
    for prediction in ("last", "load"):
        assert more_ms(prediction=prediction) == pytest.approx(foreseen + backward, rel=1e-6)


def test_a_change_hides_behind_the_hop_between_sites() -> None:
    plan = one_choice_plan(2, 4, 1)
    tokens_bytes = plan.workload.training.tokens * 64 * 4
    hop_s = 4 * tokens_bytes / (RATES_GBPS["dc"] * 1e9 / 8)
    away = partners(plan, site=1)
    at_once = step(plan, away, reconfiguration="0 s").step_s
    short, long = 0.9 * hop_s, hop_s + 0.05
    assert step(plan, away, reconfiguration=f"{short!r} s").step_s == pytest.approx(at_once, rel=1e-9)
    assert step(plan, away, reconfiguration=f"{long!r} s").step_s > at_once + LAYERS * 0.049


def test_circuits_carry_tokens_and_nothing_else() -> None:
    plan = make_plan(2, 4, 2, num_layers=3, domains={"dc": 2}, migration={"dc": 0.5}, micro_batches=2)
    routing = zipf_routing(plan, exponent=1.0, seed=0)
    result = step(plan, routing, reconfiguration="0 s")
    plain = simulate_step(plan, routing)
    wires = result.symmetry.wiring
    light = sum(size for link, size in enumerate(result.link_bytes) if wires.is_circuit(link))
    nodes = slice(plan.cluster.up_link(1, 0), plan.cluster.up_link(2, 0), 2)
    assert light > 0
    # What a circuit carries left a node's packet link; all else is where it was.
    assert light + result.link_bytes[nodes].sum() == pytest.approx(plain.link_bytes[nodes].sum(), rel=1e-12)
    gpus = slice(plan.cluster.up_link(2, 0), plan.cluster.up_link(2, 0) + 2 * 16)
    np.testing.assert_allclose(result.link_bytes[gpus], plain.link_bytes[gpus], rtol=1e-12)
    assert {link.name for link in result.links} >= {"dc0 up"}
    assert all(link.size_bytes > 0 for link in result.links if "circuits" in link.name)


def test_circuits_that_are_not_worth_the_change_stay() -> None:
    plan = make_plan(1, 4, 2, num_layers=6, micro_batches=2)
    routing = zipf_routing(plan, exponent=1.0, seed=1)
    anew, kept = (
        step(plan, routing, packet=1, optical=3, reconfiguration="25 ms", keep=keep).parts["reconfiguration"]
        for keep in (False, True)
    )
    assert anew > 0.2
    assert kept == pytest.approx(0.025, rel=1e-4)
    free = [step(plan, routing, packet=1, optical=3, reconfiguration="0 s", keep=keep).step_s for keep in (False, True)]
    assert free[0] == free[1]


def test_without_tokens_between_nodes_nothing_changes() -> None:
    plan = make_plan(2, 4, 2, domains={"dc": 2, "node": 4}, num_experts=16)
    assert "reconfiguration" not in step(plan, zipf_routing(plan, exponent=0.0, seed=0), reconfiguration="25 ms").parts


def test_expected_traffic_needs_one_set_of_circuits() -> None:
    plan = make_plan(1, 4, 2, num_layers=6, micro_batches=2)
    results = [simulate_step(plan, fabric=mixnet(reconfiguration=f"{delay} ms")).step_s for delay in (0, 25)]
    # Beside the counts of rows.
    assert results[1] - results[0] == pytest.approx(0.025, rel=1e-4)


# --- prediction ----------------------------------------------------------------------------------------------------------------


def loads(seed: int, batches: int, truth: Any, noise: float) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(seed)
    before = [rng.dirichlet(np.ones(len(truth)), 6) * 100 for _ in range(batches)]
    return before, [load @ truth.T + noise * rng.standard_normal(load.shape) for load in before]


def test_a_transition_without_noise_is_found() -> None:
    truth = np.random.default_rng(0).dirichlet(np.ones(5) * 0.5, 5).T
    found = transition(*loads(1, 8, truth, 0.0))
    np.testing.assert_allclose(found, truth, atol=1e-4)


def test_the_transition_is_that_of_the_papers_solver() -> None:
    truth = np.random.default_rng(2).dirichlet(np.ones(4), 4).T
    before, after = loads(3, 5, truth, 8.0)
    found = transition(before, after)
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=0), 1.0, atol=1e-12)

    def squares(flat: Any) -> float:
        return sum(
            0.9 ** (len(before) - 1 - age) * float(((y - x @ flat.reshape(4, 4).T) ** 2).sum())
            for age, (x, y) in enumerate(zip(before, after, strict=True))
        )

    columns = np.kron(np.ones(4), np.eye(4))
    slsqp = minimize(
        squares, np.full(16, 0.25), method="SLSQP", bounds=[(0, 1)] * 16, constraints=[LinearConstraint(columns, 1, 1)],
        options={"ftol": 1e-12, "maxiter": 500},
    )  # fmt: skip
    assert squares(found.ravel()) <= slsqp.fun * (1 + 1e-6)
    np.testing.assert_allclose(found.ravel(), slsqp.x, atol=1e-3)


def test_the_layer_before_tells_what_the_micro_batch_before_does_not() -> None:
    # Tokens that chose expert e go to e ^ 3 next; which ones they chose first turns round with every micro-batch.
    plan = one_choice_plan(1, 4, 1)
    nodes = np.arange(4)
    seen = {}
    for prediction in ("last", "load"):
        control = CircuitController(wiring(plan.cluster, mixnet(prediction=prediction)))
        for micro_batch in range(4):
            first = nodes ^ (1 + micro_batch % 2)
            for layer, chosen in enumerate((first, first ^ 3)):
                load = np.zeros((4, 4))
                load[nodes, chosen] = 100.0
                seen[prediction] = control.foreseen(layer, plan.placements[0], load[None], load)
        came = load[None]
    np.testing.assert_allclose(seen["load"], came, atol=0.1)
    assert seen["last"] is not None and not (seen["last"] * came).any()
