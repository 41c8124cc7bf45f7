"""Which circuits a MixNet has for each layer's token exchanges, and what it knows of them before the gate has chosen."""

from __future__ import annotations

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.placement import Placement
from hybridep.traffic import Op, OpLevel, Traffic
from simulator.circuits import allocate, completion_bytes
from simulator.collective import Flows
from simulator.fabric_file import MixNet, Prediction
from simulator.load_prediction import predicted_load
from simulator.network import Transfers
from simulator.wiring import Wiring

LIGHT = (Op.TOKEN_DISPATCH, Op.TOKEN_COMBINE, Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD)
"""Transfers that may use circuits; counts of tokens, copies and dense gradients keep to the packet network."""


class CircuitController:
    """Follows a step, layer by layer and micro-batch by micro-batch, in the order of their forward."""

    def __init__(self, wiring: Wiring) -> None:
        assert wiring.inside.mixnet is not None
        self._mixnet: MixNet = wiring.inside.mixnet
        self._wiring = wiring
        self._demand: dict[int, FloatArray] = {}
        """Layer -> that of the last micro-batch."""
        self._load: dict[int, list[FloatArray]] = {}
        """Layer -> that of each micro-batch."""
        self._latest: IntArray | None = None

    def is_light(self, key: OpLevel) -> bool:
        """Whether transfers between nodes of one site, and of tokens."""
        return key.op in LIGHT and 1 <= key.level <= self._wiring.node_level

    def demand_bytes(self, traffic: Traffic) -> FloatArray:
        """[regions, nodes of one, again]: of one dispatch; the other three exchanges are the same, or its transpose."""
        demand = self._nothing()
        for key, sent in traffic.items():
            if key.op is Op.TOKEN_DISPATCH and self.is_light(key):
                source, coordinate = np.nonzero(sent)
                cluster = self._wiring.cluster
                own = cluster.coordinates[source, key.level]
                destination = source + (coordinate - own) * cluster.stride(key.level)
                self._add(demand, self._wiring.node(source), self._wiring.node(destination), sent[source, coordinate])
        return demand

    def circuits(self, demand_bytes: FloatArray) -> IntArray:
        """[regions, nodes of one, again] for such a demand."""
        mixnet, rate = self._mixnet, self._wiring.interface_bytes_per_s
        best = np.stack([allocate(each, mixnet.optical, mixnet.packet, mixnet.allocation) for each in demand_bytes])
        if mixnet.keep and self._latest is not None:
            for region, (demand, now) in enumerate(zip(demand_bytes, self._latest, strict=True)):
                needs, would_need = (completion_bytes(demand, each, mixnet.packet) / rate for each in (now, best[region]))
                if 2 * (needs - would_need) < mixnet.reconfiguration:
                    best[region] = now
        self._latest = best
        return best

    def foreseen(self, layer: int, placement: Placement, demand_bytes: FloatArray, load: FloatArray | None) -> FloatArray | None:
        """What a layer's demand was expected to be, before its gate; None where there is nothing to go by, as in the first
        micro-batch. demand_bytes, and load [ranks, experts] (how often each rank's tokens chose what; None where it is not
        followed): what came, to be remembered."""
        before, self._demand[layer] = self._demand.get(layer), demand_bytes
        seen = self._load.setdefault(layer, [])
        earlier = self._load.get(layer - 1, [])
        wanted = self._mixnet.prediction
        found = None
        if wanted is not Prediction.NONE:
            found = before
            # The layer before has been through its gate in this micro-batch, and this one in those before.
            if wanted is Prediction.LOAD and seen and len(earlier) > len(seen):
                found = self._demand_of(placement, predicted_load(earlier[:-1], seen, earlier[-1]))
        if load is not None:
            seen.append(load)
        return found

    def _demand_of(self, placement: Placement, load: FloatArray) -> FloatArray:
        """As `demand_bytes` but for its unit, and with a token counted once for each of its experts."""
        demand, depth = self._nothing(), self._wiring.node_level + 1
        arrived = np.tile(placement.coordinates[:, None, :], (1, placement.num_experts, 1))[..., :depth]
        arrived[..., 0] = placement.serve[0][placement.coordinates[:, 0]]
        served = np.stack([placement.serve[level][placement.coordinates[:, level]] for level in range(depth)], axis=-1)
        source, destination = (
            np.ravel_multi_index(tuple(np.moveaxis(place, -1, 0)), placement.sizes[:depth]).ravel() for place in (arrived, served)
        )
        self._add(demand, source, destination, load.ravel())
        return demand

    def _nothing(self) -> FloatArray:
        size = self._wiring.nodes_per_region
        return np.zeros((self._wiring.num_regions, size, size))

    def _add(self, demand: FloatArray, source: IntArray, destination: IntArray, amount: FloatArray) -> None:
        """Amounts between nodes, where these are different ones of one region."""
        size = self._wiring.nodes_per_region
        here = (source // size == destination // size) & (source != destination)
        source, destination = source[here], destination[here]
        np.add.at(demand, (source // size, source % size, destination % size), amount[here])

    def switching(self, before: IntArray | None, circuits: IntArray) -> list[Flows]:
        """Two exchanges, one after the other, by which every region whose circuits change waits for the last of its ranks and
        then for the switch: all ranks to the region's first, and back. before: None for no circuits."""
        changed = (circuits != (0 if before is None else before)).any(axis=(1, 2))
        ranks = np.arange(self._wiring.cluster.num_gpus)
        region = self._wiring.node(ranks) // self._wiring.nodes_per_region
        first = np.searchsorted(region, region)
        others = changed[region] & (ranks != first)
        if not others.any():
            return []
        ranks, first = ranks[others], first[others]
        return [
            _signals(ranks, first, np.zeros(ranks.size)),
            _signals(first, ranks, np.full(ranks.size, self._mixnet.reconfiguration)),
        ]


def _signals(source: IntArray, destination: IntArray, latency_s: FloatArray) -> Flows:
    return Flows(
        source=source,
        destination=destination,
        transfers=Transfers(
            links=np.full((source.size, 1), -1, dtype=np.int64), latency_s=latency_s, size_bytes=np.zeros(source.size)
        ),
    )
