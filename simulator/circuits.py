"""Who gets the circuits of an optical switch: the published ways, and one that looks further.

Nodes of a region have as many ports each on one circuit switch; a circuit joins two of them both ways and takes a port of each.
A pair with circuits uses nothing else, all other pairs share the packet network (MixNet, Liao et al., SIGCOMM 2025).
"""

from __future__ import annotations

from itertools import combinations

import networkx as nx
import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.compiled import allocating, compiled
from simulator.fabric_file import Allocation

_DEMOTED = 100.0
"""What MixNet's simulator divides a pair's demand by for each circuit that it gets, times their number."""
_MOST_MOVES = 1000
_TIE = 1 - 1e-12


def allocate(demand_bytes: FloatArray, ports: int, packet_ports: int, how: Allocation) -> IntArray:
    """Circuits [nodes, nodes], symmetric, for the bytes of an exchange [nodes, nodes] from row to column.

    ports: of each node on the circuit switch; packet_ports: of the same rate on the packet network.
    """
    if how is Allocation.PAPER:
        return paper(demand_bytes, ports)
    if how is Allocation.SIMULATOR:
        return simulator(demand_bytes, ports)
    return matched(demand_bytes, ports, packet_ports)


def completion_bytes(demand_bytes: FloatArray, circuits: IntArray, packet_ports: int) -> float:
    """The least time of an exchange and of its reverse, times the rate of one port: that of the slowest pair with circuits, or
    of what the busiest node sends or receives over the packet network."""
    return float(_cost(np.asarray(demand_bytes, dtype=np.float64), circuits, float(packet_ports))[0])


def paper(demand_bytes: FloatArray, ports: int) -> IntArray:
    """MixNet's Algorithm 1: circuit after circuit to the pair that takes longest, and the end at the first such pair without a
    free port, so ports may stay unused. What a pair takes without circuits is left open there; here the packet network counts
    as one circuit to everybody, so that twice the demand gets two circuits before half of it gets one."""
    weight, circuits, free = _unjoined(demand_bytes, ports)
    while weight.size:
        a, b = divmod(int((weight / (1 + circuits)).argmax()), len(weight))
        if not (weight[a, b] > 0 and free[a] and free[b]):
            break
        _join(circuits, free, a, b)
    return circuits


def simulator(demand_bytes: FloatArray, ports: int) -> IntArray:
    """As MixNet's public simulator does: pairs without a free port are passed over, and each circuit divides a pair's demand by
    a hundred times their number, so that nearly all pairs get one before any gets two."""
    weight, circuits, free = _unjoined(demand_bytes, ports)
    while weight.any():
        a, b = divmod(int(weight.argmax()), len(weight))
        if free[a] and free[b]:
            _join(circuits, free, a, b)
            weight[a, b] /= _DEMOTED * circuits[a, b]
        for end in (a, b):
            if not free[end]:
                weight[end, :] = weight[:, end] = 0
    return circuits


def _unjoined(demand_bytes: FloatArray, ports: int) -> tuple[FloatArray, IntArray, IntArray]:
    """What each pair exchanges both ways, above the diagonal of [nodes, nodes]; no circuits [nodes, nodes]; all ports [nodes]."""
    weight = np.triu(demand_bytes + demand_bytes.T, 1)
    return weight, np.zeros(weight.shape, dtype=np.int64), np.full(len(weight), ports)


def matched(demand_bytes: FloatArray, ports: int, packet_ports: int) -> IntArray:
    """A matching of largest demand per port (Edmonds' algorithm), and the two published allocations; each is then changed
    circuit by circuit while the exchange gets shorter. The best of the three."""
    demand = np.asarray(demand_bytes, dtype=np.float64)
    starts = [_by_matchings(demand, ports), paper(demand, ports), simulator(demand, ports)]
    for circuits in starts:
        _improve(demand, circuits, ports, float(packet_ports))
    return min(starts, key=lambda circuits: tuple(_cost(demand, circuits, float(packet_ports))))


def _by_matchings(demand: FloatArray, ports: int) -> IntArray:
    """A matching per port of every node; a pair's demand counts divided by the circuits that it would then have."""
    weight = np.maximum(demand, demand.T)
    circuits = np.zeros(weight.shape, dtype=np.int64)
    free = np.full(len(weight), ports)
    for _ in range(ports):
        graph: nx.Graph[int] = nx.Graph()
        for a, b in combinations(range(len(weight)), 2):
            if weight[a, b] > 0:
                graph.add_edge(a, b, weight=weight[a, b] / (1 + circuits[a, b]))
        for a, b in nx.max_weight_matching(graph):
            _join(circuits, free, a, b)
    return circuits


def _join(circuits: IntArray, free: IntArray, a: int, b: int) -> None:
    circuits[a, b] += 1
    circuits[b, a] += 1
    free[a] -= 1
    free[b] -= 1


@compiled
def _cost(demand: FloatArray, circuits: IntArray, packet_ports: float) -> tuple[float, float]:
    """The longest of all times, and the sum of their squares; times are of pairs with circuits and of nodes' packet links."""
    nodes = demand.shape[0]
    most, squares = 0.0, 0.0
    for a in range(nodes):
        sent, received = 0.0, 0.0
        for b in range(nodes):
            if b == a:
                continue
            if circuits[a, b] > 0:
                time = demand[a, b] / circuits[a, b]
                most = max(most, time)
                squares += time * time
            else:
                sent += demand[a, b]
                received += demand[b, a]
        for time in (sent / packet_ports, received / packet_ports):
            most = max(most, time)
            squares += time * time
    return most, squares


@allocating
def _improve(demand: FloatArray, circuits: IntArray, ports: int, packet_ports: float) -> None:
    """Give a pair that holds the exchange up a circuit more, or take all of its circuits away, in place of others where ports
    are short, as long as the exchange gets shorter (or, as long as before, is better balanced)."""
    nodes = demand.shape[0]
    tried, chosen = circuits.copy(), circuits.copy()
    best = _cost(demand, circuits, packet_ports)
    for _ in range(_MOST_MOVES):
        found = False
        slow = _slow(demand, circuits, packet_ports, best[0])
        for a in range(nodes):
            for b in range(a + 1, nodes):
                if not slow[a, b]:
                    continue
                # The node with which each end gives a circuit up; the end itself for none.
                for c in range(nodes):
                    for d in range(nodes):
                        if c == b or d == a or (c != a and circuits[a, c] == 0) or (d != b and circuits[b, d] == 0):
                            continue
                        tried[:] = circuits
                        _add(tried, a, c, -1)
                        _add(tried, b, d, -1)
                        _add(tried, a, b, 1)
                        if tried[a].sum() > ports or tried[b].sum() > ports:
                            continue
                        cost = _cost(demand, tried, packet_ports)
                        if _less(cost, best):
                            best, found = cost, True
                            chosen[:] = tried
                if circuits[a, b] > 0:
                    tried[:] = circuits
                    _add(tried, a, b, -circuits[a, b])
                    cost = _cost(demand, tried, packet_ports)
                    if _less(cost, best):
                        best, found = cost, True
                        chosen[:] = tried
        if not found:
            return
        circuits[:] = chosen


@allocating
def _slow(demand: FloatArray, circuits: IntArray, packet_ports: float, most: float) -> BoolArray:
    """[nodes, nodes]: pairs with circuits that take longest, and pairs over packet links that take longest."""
    nodes = demand.shape[0]
    busy = np.zeros(nodes, dtype=np.bool_)
    for a in range(nodes):
        sent, received = 0.0, 0.0
        for b in range(nodes):
            if b != a and circuits[a, b] == 0:
                sent += demand[a, b]
                received += demand[b, a]
        busy[a] = max(sent, received) / packet_ports >= most * _TIE
    slow = np.zeros(demand.shape, dtype=np.bool_)
    for a in range(nodes):
        for b in range(a + 1, nodes):
            larger = max(demand[a, b], demand[b, a])
            if circuits[a, b] > 0:
                slow[a, b] = larger / circuits[a, b] >= most * _TIE
            else:
                slow[a, b] = larger > 0 and (busy[a] or busy[b])
    return slow


@compiled
def _less(cost: tuple[float, float], best: tuple[float, float]) -> bool:
    """Shorter, or as long and better balanced; by more than rounding."""
    return cost[0] < best[0] * _TIE or (cost[0] <= best[0] and cost[1] < best[1] * _TIE)


@compiled
def _add(circuits: IntArray, a: int, b: int, number: int) -> None:
    """Circuits between two nodes; none where they are one and the same."""
    if a != b:
        circuits[a, b] += number
        circuits[b, a] += number
