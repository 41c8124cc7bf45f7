"""Flows that do not share as equals: priorities, limits of single flows, and links whose capacity changes or is cut."""

from functools import partial

import numpy as np
import pytest
from max_min_oracle import max_min_rates, random_network, rates_bytes_per_s

from hybridep.arrays import FloatArray, IntArray
from simulator.collective import Flows, Program, execute
from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.network import Network, Transfers


def rates_by_priority(
    capacity: FloatArray, paths: IntArray, weights: FloatArray, priority: IntArray, limit: FloatArray
) -> FloatArray:
    """The textbook's rates of one priority after another, each on what is left; a limit is a link of the flow's own."""
    rates, left = np.zeros(len(paths)), capacity.copy()
    for each in np.unique(priority):
        mine = np.flatnonzero(priority == each)
        own = np.arange(len(mine))[:, None] + len(left)
        with_limits = np.maximum(np.append(left, limit[mine]), 0.0)
        mine_paths = np.concatenate([paths[mine], own], axis=1)
        mine_weights = np.concatenate([weights[mine], np.ones((len(mine), 1))], axis=1)
        rates[mine] = max_min_rates(with_limits, mine_paths, mine_weights)
        for flow in mine:
            on_link = paths[flow] >= 0
            left[paths[flow][on_link]] -= weights[flow][on_link] * rates[flow]
        left[left < 1e-9 * capacity] = 0.0
    return rates


class Shared:
    """Random flows of up to three priorities, about half of them limited, each priority a batch."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.capacity, self.paths, self.weights = random_network(seed, weighted=seed % 3 == 0)
        count = len(self.paths)
        self.sizes = rng.lognormal(20, 1, count)
        self.priority = rng.integers(0, 1 + seed % 4, count)
        some = rng.choice([0.05, 0.2], count) * self.capacity.mean()
        self.limit = np.where(rng.random(count) < 0.5, some, 1e30) if seed % 2 else np.full(count, 1e30)
        self.engine = Engine()
        self.network = Network(self.engine, self.capacity)
        self.end_s = np.full(count, np.nan)
        self.batches = []
        for each in np.unique(self.priority):
            rows = np.flatnonzero(self.priority == each)
            transfers = Transfers(
                links=self.paths[rows],
                latency_s=np.zeros(rows.size),
                size_bytes=self.sizes[rows],
                weights=None if seed % 3 else self.weights[rows],
                limit_bytes_per_s=np.where(self.limit[rows] < 1e30, self.limit[rows], np.inf) if seed % 2 else None,
                priority=int(each),
            )

            def note(groups: IntArray, last: IntArray, rows: IntArray = rows) -> None:
                self.end_s[rows[groups]] = self.engine.now_s

            batch = self.network.prepare(transfers, note)
            self.network.start(batch)
            self.batches.append((rows, batch))

    def rates(self) -> FloatArray:
        rates = np.zeros(len(self.paths))
        for rows, batch in self.batches:
            rates[rows] = rates_bytes_per_s(self.network, batch)
        return rates


@pytest.mark.parametrize("block", range(3))
def test_rates_are_fair_within_a_priority_and_within_limits(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        shared = Shared(seed)
        shared.engine.run(until_s=0.0)
        expected = rates_by_priority(shared.capacity, shared.paths, shared.weights, shared.priority, shared.limit)
        np.testing.assert_allclose(shared.rates(), expected, rtol=1e-7, atol=1e-9 * shared.capacity.max(), err_msg=f"seed {seed}")


@pytest.mark.parametrize("block", range(2))
def test_flows_that_end_one_by_one_end_when_they_should(block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        shared = Shared(seed)
        shared.engine.run()
        left, end_s, now_s, active = shared.sizes.copy(), np.zeros(len(shared.sizes)), 0.0, np.arange(len(shared.sizes))
        while active.size:
            rates = rates_by_priority(
                shared.capacity, shared.paths[active], shared.weights[active], shared.priority[active], shared.limit[active]
            )
            with np.errstate(divide="ignore"):
                needs_s = left[active] / rates
            now_s += needs_s.min()
            left[active] -= rates * needs_s.min()
            done = needs_s <= needs_s.min() * (1 + 1e-10)
            end_s[active[done]] = now_s
            active = active[~done]
        np.testing.assert_allclose(shared.end_s, end_s, rtol=1e-6, err_msg=f"seed {seed}")


def test_urgent_flows_stop_the_others_until_they_are_through() -> None:
    engine = Engine()
    network = Network(engine, [10.0, 4.0])
    ends: dict[str, float] = {}

    def send(name: str, links: list[int], size_bytes: float, priority: int, limit: float = np.inf) -> None:
        network.send(
            Transfers(
                links=np.array([links]),
                latency_s=np.zeros(1),
                size_bytes=np.array([size_bytes]),
                priority=priority,
                limit_bytes_per_s=np.array([limit]),
            ),
            lambda groups, last: ends.update({name: engine.now_s}),
        )

    send("late", [0], 50.0, 2)
    engine.at(1.0, lambda: send("urgent", [0, 1], 8.0, 0))
    engine.at(1.0, lambda: send("next", [0], 12.0, 1, limit=5.0))
    engine.run()
    # urgent gets 4 of 10 for 2 s; next its limit of 5 for 2.4 s; late 10, then 1 for 2 s, 5 for .4 s, then 10 again.
    assert ends == {"urgent": pytest.approx(3.0), "next": pytest.approx(3.4), "late": pytest.approx(3.4 + 36 / 10)}


def test_capacity_that_changes_and_a_link_that_is_cut() -> None:
    engine = Engine()
    network = Network(engine, [10.0, 10.0])
    ends: dict[int, float] = {}
    transfers = Transfers(links=np.array([[0], [1], [0]]), latency_s=np.zeros(3), size_bytes=np.array([40.0, 40.0, 10.0]))
    network.send(transfers, lambda groups, last: ends.update(dict.fromkeys(groups.tolist(), engine.now_s)))
    engine.at(1.0, lambda: network.set_capacity(np.array([0.0, 5.0])))
    engine.at(4.0, lambda: network.set_capacity(np.array([20.0, 5.0])))
    engine.run()
    # Link 0 moves 5 of each flow in 1 s, nothing for 3 s, then 10 each: 5 left of the short one, 35 of the other.
    assert ends == {2: pytest.approx(4.5), 0: pytest.approx(4.5 + 30 / 20), 1: pytest.approx(7.0)}


@pytest.mark.parametrize("urgent", [False, True])
def test_what_has_left_but_for_rounding_is_not_held_up(urgent: bool) -> None:
    """Ends that fall together with a cut, or with a flow that takes the link whole; which of them round up is luck."""
    rng = np.random.default_rng(0)
    for rate, begin_s, end_s in rng.uniform(0.1, 1.0, (60, 3)) + np.array([1.0, 0.0, 1.0]):
        engine = Engine()
        network = Network(engine, [rate])
        ends: list[float] = []

        def send(size_bytes: float, priority: int, engine: Engine = engine, network: Network = network) -> None:
            size = np.array([size_bytes])
            one = Transfers(links=np.array([[0]]), latency_s=np.zeros(1), size_bytes=size, priority=priority)
            network.send(one, lambda *_: ends.append(engine.now_s))  # noqa: B023

        engine.at(begin_s, partial(send, rate * (end_s - begin_s), 1))
        if urgent:
            engine.at(end_s, partial(send, 5 * rate, 0))
        else:
            engine.at(end_s, partial(network.set_capacity, np.zeros(1)))
            engine.at(end_s + 5, partial(network.set_capacity, np.array([rate])))
        engine.run()
        assert ends[0] == pytest.approx(end_s, rel=1e-12)


def test_flows_on_a_link_that_stays_cut_never_end() -> None:
    engine = Engine()
    network = Network(engine, [1.0])
    program = Program(num_ranks=2)
    one = Transfers(links=np.array([[0]]), latency_s=np.zeros(1), size_bytes=np.array([5.0]))
    program.exchange("send", Flows(source=np.array([0]), destination=np.array([1]), transfers=one), [])
    engine.at(1.0, lambda: network.set_capacity(np.zeros(1)))
    with pytest.raises(SimulationError, match="never ran"):
        execute(program, engine, network)


def test_an_exchange_of_lower_priority_waits_for_the_others() -> None:
    engine = Engine()
    network = Network(engine, [1.0])
    program = Program(num_ranks=2)
    one = Transfers(links=np.array([[0]]), latency_s=np.zeros(1), size_bytes=np.array([5.0]))
    flows = Flows(source=np.array([0]), destination=np.array([1]), transfers=one)
    program.exchange("copies", flows, [], priority=1)
    program.exchange("tokens", flows, [])
    end_s = execute(program, engine, network).end_s[:, 1]
    assert end_s == pytest.approx([10.0, 5.0])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"priority": -1}, "priority -1"), ({"limit_bytes_per_s": np.zeros(1)}, r"limit 0\.0")],
)
def test_misuse_names_the_value(changes: dict[str, object], problem: str) -> None:
    network = Network(Engine(), [1.0])
    one = {"links": np.array([[0]]), "latency_s": np.zeros(1), "size_bytes": np.ones(1)}
    with pytest.raises(SimulationError, match=problem):
        network.send(Transfers(**one, **changes), lambda groups, last: None)  # type: ignore[arg-type]
    with pytest.raises(SimulationError, match="needs 1 capacities"):
        network.set_capacity(np.array([-1.0]))
