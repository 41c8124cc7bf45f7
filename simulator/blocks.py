"""What each MoE layer of a plan exchanges and computes, as transfers over a fabric of the ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.coding import Coded, Coding, copy_coding, dense_coding, direct_coding, speed_of, token_coding
from hybridep.errors import UserError
from hybridep.plan import PlacedLayers, Plan
from hybridep.recompute import Recompute, again_flops, dense_again_flops
from hybridep.routing import Routing
from hybridep.shares import site_shares
from hybridep.topology import Cluster
from hybridep.traffic import (
    DENSE,
    Direct,
    Op,
    OpLevel,
    Traffic,
    copy_traffic,
    dense_shard_params,
    dense_traffic,
    direct_traffic,
    expected_rows,
    is_late,
    routed_rows,
    served_copies,
    token_traffic,
)
from simulator.collective import Flows
from simulator.conditions import Conditions, LinkFactors
from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.fabric import Fabric
from simulator.mixnet import CircuitController
from simulator.precision import Precision, busiest_inside, mean_between_sites, most_of_site
from simulator.sent import Sent, compact, dense, spread
from simulator.symmetry import Exchange, no_symmetry, symmetry
from simulator.token_exchange import Route, TokenExchange
from simulator.wiring import Wiring

BACKWARD_COST = 2.0
"""Backward computes the gradients of inputs and of weights, each as costly as the forward."""
_OUT = (Op.EXPERT_GATHER, Op.TOKEN_COUNTS, Op.TOKEN_DISPATCH, Op.SHARED_REDUCE_SCATTER)
"""Transfers of a layer; its others are these, or their reverse, in other units."""

_ROWS = (Op.TOKEN_DISPATCH, Op.TOKEN_COMBINE, Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD)


class _LayerSent(NamedTuple):
    """What one layer exchanges and computes in one micro-batch; tokens and computation of one chunk."""

    traffic: Mapping[OpLevel, Sent]
    direct: dict[Op, Direct]
    expert_s: FloatArray
    """[ranks of the cluster] forward of the routed experts."""
    coding_s: Mapping[OpLevel, Coded]
    """[ranks of the cluster] seconds before and after each exchange."""


class Block(NamedTuple):
    """What one MoE layer does in one micro-batch; the gather and return are those of a step in which they are due."""

    flows: Mapping[OpLevel, Flows]
    expert_s: FloatArray
    """[ranks of the cluster] forward of the routed experts."""
    coding_s: Mapping[OpLevel, Coded]
    """[ranks of the cluster] seconds before and after each exchange in which ranks code and decode."""
    light: Traffic | None = None
    """Of its flows that may use circuits."""
    demand_bytes: FloatArray | None = None
    """[regions, nodes of one, again]: what circuits are for."""
    circuits: IntArray | None = None
    """[regions, nodes of one, again]: those that its flows use."""


class Place(NamedTuple):
    """Where the ranks and sites of a plan are in the cluster that is simulated: the same, unless the plan is one of several
    stages."""

    cluster: Cluster
    ranks: IntArray
    """Of the cluster, in the plan's order."""
    sites: IntArray

    @staticmethod
    def everywhere(cluster: Cluster) -> Place:
        """Of a plan for the whole cluster."""
        return Place(cluster, np.arange(cluster.num_gpus), np.arange(cluster.sizes[0]))

    def each(self, values: FloatArray) -> FloatArray:
        """[ranks of the cluster] of [ranks of the plan]; 0 elsewhere."""
        if self.ranks.size == self.cluster.num_gpus:
            return values
        found = np.zeros(self.cluster.num_gpus)
        found[self.ranks] = values
        return found

    def sent(self, level: int, sent: Sent) -> Sent:
        """[ranks of the cluster, coordinates of the level] of [ranks of the plan, ...]."""
        if self.ranks.size == self.cluster.num_gpus:
            return sent
        size = self.cluster.sizes[level]
        return spread(sent, self.ranks, self.sites if level == 0 else np.arange(size), (self.cluster.num_gpus, size))


class Blocks:
    """Of one step, as `simulator.training.step_program` has its arguments; each is made when it is asked for, or once where
    layers do not differ. What all of them send is known first, then over which fabric (`join`)."""

    fabric: Fabric
    reduction: Block
    """Of the dense gradients."""

    def __init__(
        self,
        plan: Plan,
        wiring: Wiring,
        routing: Routing | None,
        precision: Precision,
        conditions: Conditions,
        start_s: float,
        exchange: TokenExchange,
        place: Place | None = None,
    ) -> None:
        self._plan = plan
        self._routing = routing
        self._exchange = exchange
        self._place = place or Place.everywhere(plan.cluster)
        whole = self._place.cluster
        self.chunks = plan.schedule.chunks if exchange.chunks is None else exchange.chunks
        """Parts in which tokens travel; their flows and computation are those of one part."""
        self._one_of_site = precision.one_rank_per_site
        self.controller = CircuitController(wiring) if wiring.inside.mixnet is not None else None
        # Ranks that share processors queue for them instead: `messages_s`.
        self._jitter_s = whole.gpu.jitter if whole.processors is None else 0.0
        if self.controller is not None and exchange.route is Route.DIRECT:
            raise SimulationError("route direct: circuits of a MixNet are for exchanges hop by hop")
        workload, of_ranks = plan.workload, plan.cluster.of_ranks
        self._slowdown = self._most(conditions.slowdown(whole, start_s)[self._place.ranks])
        if whole.processors is not None:
            # All figures are those of a rank while all compute.
            self._slowdown = self._slowdown * (whole.processors / whole.num_gpus)
        rates, shares = of_ranks(lambda gpu: gpu.throughput), site_shares(plan.cluster, workload)
        # Seconds that a FLOP of a rank with the mean number of tokens stands for.
        each_s = np.repeat(shares, plan.cluster.ranks_per_site) / rates
        overhead_s, pass_s = of_ranks(lambda gpu: gpu.block_overhead), of_ranks(lambda gpu: gpu.pass_overhead)
        self.pre_expert_s = self.slowed(workload.pre_expert_flops * each_s + overhead_s)
        self.again_s: dict[Recompute, FloatArray] = {}
        """Of what layers compute again before their routed experts."""
        for one in {group.recompute for group in plan.layers}:
            again_s = again_flops(workload, one) * each_s + (overhead_s if Recompute.ATTENTION in one else 0.0)
            self.again_s[one] = self.slowed(again_s)
        self.head_s = self.slowed(workload.head_flops * each_s + pass_s)
        dense_again_s = dense_again_flops(workload, plan.dense_recompute) * each_s
        self.head_backward_s = BACKWARD_COST * self.head_s + self.slowed(dense_again_s)
        self.optimizer_s = self._optimizer()
        sent = dense_traffic(plan.placements[0], workload, plan.level_codecs)
        self._reduction = {key: self._place.sent(key.level, sent.pop(key)) for key in list(sent)}
        self._reduction_coding_s = self._seconds(self._reduction_coding())
        # Shares of routes over trunks are not compared where rows go directly; circuits join some nodes and not others.
        comparable = exchange.route is Route.HOPS or wiring.wan is None
        in_step = not conditions.compute_jitter and whole.processors is None
        is_expected = routing is None and in_step and self.controller is None
        if self._one_of_site and not (is_expected and exchange.route is Route.HOPS):
            raise UserError(
                "one_rank_per_site: only where tokens go as expected, hop by hop; leave it out with recorded or drawn routing, "
                "compute_jitter, ranks that share processors, a MixNet, and systems other than baselines and pipeline"
            )
        if self._one_of_site and whole.ranks_per_site > 1:
            # Each part of what one rank sends would get a window of its own.
            under_way_bytes = conditions.under_way_bytes(whole, plan.schedule.streams)
            held = [
                one.name for one, most in zip(whole.levels, under_way_bytes, strict=True) if one.size > 1 and np.isfinite(most)
            ]
            if held:
                raise UserError(
                    f"one_rank_per_site: not where a window holds transfers (level {held[0]}), since which rank sends them then "
                    "counts; leave one of the two out"
                )
        self.comparable = is_expected and comparable
        """Whether ranks that must do the same can be told from what is known beforehand."""
        self._expected_sent: dict[int, _LayerSent] = {}
        if self.comparable:
            self._expected_sent = {layers.first_layer: self._traffic(layers, None) for layers in plan.placed}
        self._expected: dict[int, Block] = {}

    def exchanges(self) -> list[Exchange]:
        """All that layers exchange hop by hop, and what reduces the dense gradients; not what is the reverse of others."""
        of_layers = [one.traffic for one in self._expected_sent.values()]
        found = [Exchange(key.level, sent) for traffic in of_layers for key, sent in traffic.items() if key.op in _OUT]
        first = [item for item in self._reduction.items() if item[0].op is Op.DENSE_REDUCE_SCATTER]
        return found + [Exchange(key.level, sent) for key, sent in first]

    def computations_s(self) -> list[FloatArray]:
        """[ranks of the cluster] each."""
        coding_s = [self._reduction_coding_s, *(one.coding_s for one in self._expected_sent.values())]
        return [
            self.optimizer_s,
            *(one.expert_s for one in self._expected_sent.values()),
            *(part for by_key in coding_s for each in by_key.values() for part in each),
            self.pre_expert_s,
            *self.again_s.values(),
            self.head_s,
            self.head_backward_s,
        ]

    def direct(self) -> list[Direct]:
        """What layers exchange straight between ranks."""
        return [pairs for one in self._expected_sent.values() for op, pairs in one.direct.items() if op in _OUT]

    def join(self, fabric: Fabric) -> None:
        """From now on transfers are this fabric's."""
        self.fabric = fabric
        self._expected = {first: self._block_of(sent) for first, sent in self._expected_sent.items()}
        self._expected_sent.clear()
        # One after the other: at thousands of sites each takes hundreds of megabytes.
        reduction = self._reduction
        flows = {key: made for key in list(reduction) for made in self._flows({key: reduction.pop(key)}).values()}
        self.reduction = Block(flows=flows, expert_s=self._slowdown, coding_s=self._reduction_coding_s)

    def messages_s(self, key: OpLevel, flows: Flows) -> FloatArray:
        """[ranks] of a processor for an exchange's messages, where ranks share processors: further messages and jitter were
        measured with all ranks at it, who then wait for nothing but processors."""
        cluster = self._place.cluster
        if cluster.processors is None:
            return np.zeros(cluster.num_gpus)
        per_site = cluster.ranks_per_site
        inside = flows.source // per_site == flows.destination // per_site
        is_jittered = is_late(key) | (inside & (key.op not in DENSE))
        jittered = np.zeros(cluster.num_gpus, dtype=np.bool_)
        jittered[flows.source[is_jittered]] = jittered[flows.destination[is_jittered]] = True
        further = np.maximum(np.bincount(flows.source, minlength=cluster.num_gpus) - 1, 0)
        slowdown = self._place.each(self._slowdown)
        return np.asarray(slowdown * (further * cluster.gpu.message_overhead + jittered * cluster.gpu.jitter))

    def of(self, layer: int, layers: PlacedLayers, micro_batch: int) -> Block:
        if self._routing is None:
            if layers.first_layer not in self._expected:
                self._expected[layers.first_layer] = self._block_of(self._traffic(layers, None))
            return self._expected[layers.first_layer]
        return self._block_of(self._traffic(layers, self._routing[layer, micro_batch]))

    def _traffic(self, layers: PlacedLayers, choices: IntArray | None) -> _LayerSent:
        workload, cluster, placement = self._plan.workload, self._plan.cluster, layers.placement
        gpu = cluster.gpu
        codecs, per_choice, chunks = self._plan.level_codecs, self._exchange.per_choice, self.chunks
        traffic: Traffic = {}
        direct: dict[Op, Direct] = {}
        if self._exchange.route is Route.DIRECT:
            direct = direct_traffic(placement, workload, layers.gating, choices, codecs)
        elif choices is None:
            rows = expected_rows(placement, layers.gating, per_choice=per_choice)
            traffic = token_traffic(placement, workload, rows, codecs, per_choice=per_choice)
        else:
            rows = routed_rows(placement, choices, per_choice=per_choice)
            traffic = token_traffic(placement, workload, rows, codecs, per_choice=per_choice)
        if chunks > 1:
            traffic = {key: sent if key.op is Op.TOKEN_COUNTS else sent / chunks for key, sent in traffic.items()}
            direct = {op: pairs if op is Op.TOKEN_COUNTS else pairs.part(chunks) for op, pairs in direct.items()}
        computed = served_copies(placement, layers.gating, choices).sum(axis=1)
        products_s = computed * workload.expert_flops_per_row / cluster.of_ranks(lambda gpu: gpu.expert_flops_per_s) / chunks
        held_s = placement.holds.sum(axis=1) * cluster.of_ranks(lambda gpu: gpu.expert_overhead)
        expert_s = self.slowed(products_s + held_s)
        coding: Coding = {}
        if gpu.coding is not None:
            if self._exchange.route is Route.DIRECT:
                tokens = direct_coding(direct, placement, workload, codecs)
            else:
                # Each chunk takes its share.
                tokens = token_coding(placement, workload, rows, codecs, layers.gating, choices, per_choice=per_choice)
                tokens = {key: Coded(one.encoded / chunks, one.decoded / chunks) for key, one in tokens.items()}
            coding = tokens | copy_coding(placement, workload, codecs)
        coding_s = self._seconds(coding)
        if self.controller is not None or choices is not None:
            traffic |= copy_traffic(placement, workload, codecs)
            moved = {key: self._place.sent(key.level, sent) for key, sent in traffic.items()}
            return _LayerSent(moved, direct, expert_s, coding_s)
        # One after the other: at thousands of sites each of these arrays takes hundreds of megabytes.
        sent = {key: self._of_site(key.level, traffic.pop(key)) for key in list(traffic)}
        copies = copy_traffic(placement, workload, codecs)
        sent |= {key: self._of_site(key.level, copies.pop(key)) for key in list(copies)}
        return _LayerSent(sent, direct, expert_s, coding_s)

    def _of_site(self, level: int, sent: FloatArray) -> Sent:
        if self._one_of_site:
            cluster = self._plan.cluster
            sent = mean_between_sites(cluster, sent) if level == 0 else busiest_inside(cluster, level, sent)
        return self._place.sent(level, compact(sent))

    def slowed(self, each_s: FloatArray) -> FloatArray:
        """[ranks of the cluster] of [ranks of the plan]: seconds of computation, as stragglers and shared processors make it."""
        return self._place.each(self._most(each_s * self._slowdown))

    def _most(self, each_s: FloatArray) -> FloatArray:
        return most_of_site(self._plan.cluster, each_s) if self._one_of_site else each_s

    def _reduction_coding(self) -> Coding:
        plan = self._plan
        return {} if plan.cluster.gpu.coding is None else dense_coding(plan.cluster.sizes, plan.workload, plan.level_codecs)

    def _seconds(self, coding: Coding) -> dict[OpLevel, Coded]:
        """Of each rank; operations that take no time are left out."""
        gpu, found = self._plan.cluster.gpu, {}
        for key, coded in coding.items():
            speed = speed_of(gpu.coding, self._plan.level_codecs, key) if gpu.coding is not None else None
            if speed is not None:
                found[key] = Coded(self.slowed(coded.encoded / speed.encode), self.slowed(coded.decoded / speed.decode))
        if self._exchange.route is Route.DIRECT:
            # One exchange over all levels.
            for key in [key for key in found if key.level > 0 and key.op in _ROWS]:
                one, first = found.pop(key), OpLevel(key.op, 0)
                found[first] = Coded(*(a + b for a, b in zip(found[first], one, strict=True))) if first in found else one
        return found

    def _block_of(self, sent: _LayerSent) -> Block:
        control = self.controller
        if control is None:
            direct = {OpLevel(op, 0): self.fabric.direct(pairs, self._jitter_s) for op, pairs in sent.direct.items()}
            return Block(flows=self._flows(sent.traffic) | direct, expert_s=sent.expert_s, coding_s=sent.coding_s)
        traffic = {key: dense(part) for key, part in sent.traffic.items()}
        demand = control.demand_bytes(traffic)
        circuits = control.circuits(demand)
        light = {key: part for key, part in traffic.items() if control.is_light(key)}
        dark = {key: part for key, part in traffic.items() if key not in light}
        flows = self._flows(dark) | self._flows(light, circuits)
        return Block(flows, sent.expert_s, sent.coding_s, light=light, demand_bytes=demand, circuits=circuits)

    def ahead(self, block: Block, layer: int, layers: PlacedLayers, micro_batch: int) -> Block | None:
        """A block as its forward is where circuits are set before its gate, for what is then expected of it."""
        if self.controller is None or block.demand_bytes is None or block.light is None:
            return None
        load = None
        if self._routing is not None:
            chosen = self._routing[layer, micro_batch].reshape(self._plan.cluster.num_gpus, -1)
            num_experts = self._plan.workload.model.num_experts
            load = np.stack([np.bincount(each[each >= 0], minlength=num_experts) for each in chosen]).astype(np.float64)
        expected = self.controller.foreseen(layer, layers.placement, block.demand_bytes, load)
        if expected is None:
            return None
        if np.array_equal(expected, block.demand_bytes):
            return block
        circuits = self.controller.circuits(expected)
        return block._replace(flows={**block.flows, **self._flows(block.light, circuits)}, circuits=circuits)

    def _flows(self, traffic: Mapping[OpLevel, Sent], circuits: IntArray | None = None) -> dict[OpLevel, Flows]:
        return {
            key: self.fabric.flows(key.level, sent, self._jitter_s if is_late(key) else 0.0, circuits)
            for key, sent in traffic.items()
        }

    def _optimizer(self) -> FloatArray:
        """[ranks of the cluster] AdamW reads weight, gradient and state and writes weight and state of the rank's own experts
        and of its share of the dense parameters; memory bandwidth bounds it."""
        model, training = self._plan.workload.model, self._plan.workload.training
        params = self._plan.home_experts * float(model.expert_params) + dense_shard_params(model, self._plan.cluster.sizes)
        size_bytes = params * (2 * (training.dtype.num_bytes + training.dtype.state_bytes) + training.gradient_dtype.num_bytes)
        rates = self._plan.cluster.of_ranks(lambda gpu: gpu.memory_bandwidth)
        return self.slowed(np.asarray(size_bytes / rates, dtype=np.float64))


def fabric_of(
    blocks: Sequence[Blocks],
    engine: Engine,
    wiring: Wiring,
    precision: Precision,
    conditions: Conditions,
    streams: Mapping[str, int],
    between: Sequence[Exchange] = (),
) -> Fabric:
    """The network that all these share, with ranks that must do the same in it once, where that can be told. ``between``: what
    travels beside."""
    alike = no_symmetry(wiring)
    if all(one.comparable for one in blocks):
        alike = symmetry(
            wiring,
            [*(exchange for one in blocks for exchange in one.exchanges()), *between],
            [each_s for one in blocks for each_s in one.computations_s()],
            LinkFactors(conditions, wiring.link_names).traits if conditions.of_links else None,
            [pairs for one in blocks for pairs in one.direct()],
        )
    fabric = Fabric(engine, alike, precision.tolerance, conditions, streams)
    for one in blocks:
        one.join(fabric)
    return fabric
