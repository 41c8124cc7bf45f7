"""Circuits of an optical switch: within the ports, as the published algorithms give them by hand, and against all there are."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from hybridep.arrays import FloatArray, IntArray
from simulator.circuits import allocate, completion_bytes, matched, paper, simulator
from simulator.fabric_file import Allocation


def demand(nodes: int, seed: int) -> FloatArray:
    made = np.random.default_rng(seed).lognormal(0, 1, (nodes, nodes))
    np.fill_diagonal(made, 0.0)
    return made


def from_pairs(nodes: int, **pairs: float) -> FloatArray:
    """`ab=3`: three bytes from node a to node b."""
    made = np.zeros((nodes, nodes))
    for pair, size in pairs.items():
        made["abcd".index(pair[0]), "abcd".index(pair[1])] = size
    return made


def every_allocation(nodes: int, ports: int) -> list[IntArray]:
    pairs = list(itertools.combinations(range(nodes), 2))
    found = []
    for numbers in itertools.product(range(ports + 1), repeat=len(pairs)):
        circuits = np.zeros((nodes, nodes), dtype=np.int64)
        for (a, b), number in zip(pairs, numbers, strict=True):
            circuits[a, b] = circuits[b, a] = number
        if circuits.sum(axis=0).max() <= ports:
            found.append(circuits)
    return found


@pytest.mark.parametrize("how", Allocation)
@pytest.mark.parametrize(("nodes", "ports"), [(2, 6), (3, 1), (5, 2), (8, 6)])
def test_ports_are_respected_and_circuits_go_both_ways(how: Allocation, nodes: int, ports: int) -> None:
    for seed in range(10):
        circuits = allocate(demand(nodes, seed), ports, 2, how)
        assert (circuits >= 0).all() and (circuits == circuits.T).all() and not circuits.diagonal().any()
        assert (circuits.sum(axis=0) <= ports).all()
        assert circuits.any()


@pytest.mark.parametrize("how", Allocation)
def test_no_demand_no_circuits(how: Allocation) -> None:
    assert not allocate(np.zeros((4, 4)), 6, 2, how).any()


def test_the_paper_stops_at_the_first_pair_without_a_port() -> None:
    # a-b takes both ports of a; a-c comes next and is blocked, so c-d gets nothing though both have ports.
    wanted = from_pairs(4, ab=10, ac=3, cd=1)
    circuits = paper(wanted, ports=2)
    assert circuits[0, 1] == 2
    assert circuits.sum() == 2 * 2
    # The public simulator gives every pair one first, and goes on.
    other = simulator(wanted, ports=2)
    assert (other[0, 1], other[0, 2], other[2, 3]) == (1, 1, 1)
    assert other.sum() == 2 * 3


@pytest.mark.parametrize("goes_on", [False, True])
def test_published_allocations_are_those_of_their_words_in_whole_fractions(goes_on: bool) -> None:
    """Circuit after circuit to the pair of most demand, divided by one more than its circuits, until it has no free port; or
    of those with free ports, divided by a hundred times the circuits' number with each."""
    rng = np.random.default_rng(1)
    for _ in range(150):
        nodes, ports = int(rng.integers(2, 8)), int(rng.integers(1, 8))
        wanted = rng.integers(0, 10 ** int(rng.integers(1, 8)), (nodes, nodes)) * (rng.random((nodes, nodes)) < 0.7)
        both = {(a, b): Fraction(int(wanted[a, b] + wanted[b, a])) for a, b in itertools.combinations(range(nodes), 2)}
        weight, number, free = dict(both), dict.fromkeys(both, 0), [ports] * nodes
        while True:
            possible = [pair for pair in both if weight[pair] and (not goes_on or all(free[end] for end in pair))]
            best = max(possible, key=lambda pair: weight[pair], default=None)
            if best is None or not all(free[end] for end in best):
                break
            number[best] += 1
            weight[best] = weight[best] / (100 * number[best]) if goes_on else both[best] / (1 + number[best])
            for end in best:
                free[end] -= 1
        found = (simulator if goes_on else paper)(wanted.astype(np.float64), ports)
        assert {pair: int(found[pair]) for pair in both} == number


def test_what_both_directions_carry_counts() -> None:
    wanted = from_pairs(3, ab=4, bc=3, cb=3)
    for circuits in (paper(wanted, ports=1), simulator(wanted, ports=1)):
        assert circuits[1, 2] == 1
        assert circuits[0, 1] == 0


def test_a_simulator_circuit_counts_a_hundredfold() -> None:
    # a-b has 101 times the demand of a-c: after one circuit it still comes first, after two it does not.
    circuits = simulator(from_pairs(3, ab=1010, ac=10), ports=4)
    assert (circuits[0, 1], circuits[0, 2]) == (2, 2)
    circuits = simulator(from_pairs(3, ab=990, ac=10), ports=2)
    assert (circuits[0, 1], circuits[0, 2]) == (1, 1)
    circuits = simulator(from_pairs(3, ab=1010, ac=10), ports=2)
    assert (circuits[0, 1], circuits[0, 2]) == (2, 0)


def test_completion_by_hand() -> None:
    wanted = from_pairs(3, ab=8, ba=2, ac=3, bc=5)
    circuits = np.zeros((3, 3), dtype=np.int64)
    circuits[0, 1] = circuits[1, 0] = 2
    # The circuits take 4; c gets 8 bytes over two packet links.
    assert completion_bytes(wanted, circuits, packet_ports=2) == 4
    assert completion_bytes(wanted, circuits, packet_ports=1) == 8
    assert completion_bytes(wanted, np.zeros((3, 3), dtype=np.int64), packet_ports=1) == 11
    # The reverse exchange takes as long.
    assert completion_bytes(wanted.T, circuits, packet_ports=1) == 8


@pytest.mark.parametrize(("nodes", "ports", "packet_ports"), [(3, 3, 1), (4, 2, 1), (4, 3, 2)])
def test_matching_finds_the_best_of_all_on_small_regions(nodes: int, ports: int, packet_ports: int) -> None:
    everything = every_allocation(nodes, ports)
    better_than_published = 0
    for seed in range(12):
        wanted = demand(nodes, seed)
        best = min(completion_bytes(wanted, circuits, packet_ports) for circuits in everything)
        found = completion_bytes(wanted, matched(wanted, ports, packet_ports), packet_ports)
        assert found == pytest.approx(best, rel=1e-12)
        published = [completion_bytes(wanted, how(wanted, ports), packet_ports) for how in (paper, simulator)]
        better_than_published += found < min(published) * (1 - 1e-9)
    assert better_than_published > 0


@pytest.mark.parametrize("nodes", [4, 8, 12])
def test_matching_is_never_worse_than_the_published_ones(nodes: int) -> None:
    for seed in range(15):
        wanted = demand(nodes, seed)
        found = completion_bytes(wanted, matched(wanted, 6, 2), 2)
        for how in (paper, simulator):
            assert found <= completion_bytes(wanted, how(wanted, 6), 2) * (1 + 1e-12)
