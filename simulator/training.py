"""One training step of a plan as a program of operations: whose bytes, whose computation, and what waits for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hybridep.coding import Coded, Coding, copy_coding, dense_coding, direct_coding, speed_of, token_coding
from hybridep.plan import PlacedLayers, Plan, Residency
from hybridep.routing import Routing
from hybridep.shares import site_shares
from hybridep.traffic import (
    Direct,
    FloatArray,
    Op,
    OpLevel,
    Traffic,
    copy_traffic,
    dense_traffic,
    direct_traffic,
    expected_rows,
    is_late,
    routed_rows,
    served_copies,
    token_traffic,
)
from simulator.arrays import IntArray
from simulator.collective import Flows, Program
from simulator.conditions import Conditions, LinkFactors
from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.fabric import Fabric
from simulator.mixnet import CircuitController
from simulator.network import EXACT
from simulator.symmetry import Exchange, no_symmetry, symmetry
from simulator.token_exchange import Route, TokenExchange
from simulator.wiring import Wiring

PRE_EXPERT = "pre_expert"
EXPERT = "expert"
HEAD = "head"
BACKWARD = "_backward"
OPTIMIZER = "optimizer"
RECONFIGURATION = "reconfiguration"
CODING = "coding"

_OUT = (Op.EXPERT_GATHER, Op.TOKEN_COUNTS, Op.TOKEN_DISPATCH, Op.SHARED_REDUCE_SCATTER)
"""Transfers of a layer; its others are these, or their reverse, in other units."""

_MOVES = (Op.EXPERT_GATHER, Op.GRADIENT_RETURN)
_ROWS = (Op.TOKEN_DISPATCH, Op.TOKEN_COMBINE, Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD)

_TOKENS, _COPIES = 0, 1
"""Priorities on the links."""

_BACKWARD_COST = 2.0
"""Backward computes the gradients of inputs and of weights, each as costly as the forward."""


class _Way(NamedTuple):
    """Tokens to the experts and back, in forward or in backward."""

    out: Op
    back: Op
    label: str
    cost: float
    """Of the experts' computation, in forwards."""


_FORWARDS = _Way(Op.TOKEN_DISPATCH, Op.TOKEN_COMBINE, EXPERT, 1.0)
_BACKWARDS = _Way(Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD, EXPERT + BACKWARD, _BACKWARD_COST)


class _Sent(NamedTuple):
    """What one layer exchanges and computes in one micro-batch; tokens and computation of one chunk."""

    traffic: Traffic
    direct: dict[Op, Direct]
    expert_s: FloatArray
    """[ranks of the cluster] forward of the routed experts."""
    coding_s: Mapping[OpLevel, Coded]
    """[ranks of the cluster] seconds before and after each exchange."""


class _Block(NamedTuple):
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


class _Step(NamedTuple):
    """A place in the step: a layer in a micro-batch, and whether its copies come or go there."""

    block: _Block
    layer: int
    name: str
    ahead: _Block | None
    """Its forward where circuits were set for it before its gate."""
    gather: bool
    regather: bool
    give_back: bool
    is_last: bool


def step_program(
    plan: Plan,
    engine: Engine,
    wiring: Wiring,
    routing: Routing | None = None,
    tolerance: float = EXACT,
    conditions: Conditions | None = None,
    start_s: float = 0.0,
    exchange: TokenExchange | None = None,
) -> tuple[Program, Fabric]:
    """The operations of one training step, each rank waiting only for what it needs; and the network they run on.

    Per micro-batch: the MoE blocks forward, the rest of the model, the blocks backward in reverse order; then the dense
    gradients are all-reduced and the optimizer steps. A block's gather runs beside its pre-expert forward, its gradient
    return beside its pre-expert backward (HybridEP, Eq. 12), and a second gather beside the combine's gradients, with
    which it shares the links; or before them where the plan's schedule does not overlap. With a prefetch depth, gathers set
    out that many blocks ahead and are waited for by the experts, returns by the end of the step; both are one queue per rank
    and give way to tokens. Tokens travel as `exchange` says, as the runtime has it where it is left out; chunks and a prefetch
    depth do not go together (SimulationError).
    Tokens are coded before a hop and decoded after it. Copies and their gradients are coded beside the rank's own chain, which
    stands still for as long.
    Without `routing`, rows are the number that the plan's popularity of experts lets expect (all alike where it has none).
    The program's ranks are then the kinds of ranks that differ; with routing all do.
    """
    builder = _Builder(plan, engine, wiring, routing, tolerance, conditions or Conditions(), start_s, exchange or TokenExchange())
    return builder.build(), builder.fabric


class _Builder:
    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        wiring: Wiring,
        routing: Routing | None,
        tolerance: float,
        conditions: Conditions,
        start_s: float,
        exchange: TokenExchange,
    ) -> None:
        if exchange.chunks > 1 and plan.schedule.prefetch:
            raise SimulationError(f"chunks: {exchange.chunks} with prefetch {plan.schedule.prefetch}; only one of them can be")
        self._exchange = exchange
        self._plan = plan
        self._jitter = conditions.compute_jitter
        self._random = np.random.default_rng([conditions.seed, int(start_s * 1e6)])
        self._routing = routing
        self._prefetch = plan.schedule.prefetch
        self._queue: list[int] = []
        """Ends of what was queued last, of copies and their gradients."""
        self._gathered: dict[int, list[int]] = {}
        """Layer -> ends of its gather, in one pass."""
        self._returned: dict[int, list[int]] = {}
        """The same of its gradients' return, where copies live for one micro-batch."""
        self._controller = CircuitController(wiring) if wiring.inside.mixnet is not None else None
        if self._controller is not None and exchange.route is Route.DIRECT:
            raise SimulationError("route direct: circuits of a MixNet are for exchanges hop by hop")
        self._circuits: IntArray | None = None
        """That are set; None at the start of the step."""
        self._released: list[int] = []
        """Ends of what used them last."""
        self._levels = range(len(plan.cluster.levels))
        workload, of_ranks = plan.workload, plan.cluster.of_ranks
        self._slowdown = conditions.slowdown(plan.cluster, start_s)
        rates, shares = of_ranks(lambda gpu: gpu.throughput), site_shares(plan.cluster, workload)
        # Seconds that a FLOP of a rank with the mean number of tokens stands for.
        each_s = np.repeat(shares, plan.cluster.num_gpus // shares.size) / rates
        self._pre_expert_s = self._slowdown * (workload.pre_expert_flops * each_s + of_ranks(lambda gpu: gpu.block_overhead))
        self._head_s = self._slowdown * (workload.head_flops * each_s + of_ranks(lambda gpu: gpu.pass_overhead))
        self._optimizer_s = self._optimizer()
        dense = dense_traffic(plan.placements[0], workload, plan.level_codecs)
        dense_coding_s = self._seconds(self._dense_coding())
        expected = {}
        # Shares of routes over trunks are not compared where rows go directly; circuits join some nodes and not others.
        comparable = exchange.route is Route.HOPS or wiring.wan is None
        if routing is None and not self._jitter and comparable and self._controller is None:
            for layers in plan.placed:
                expected[layers.first_layer] = self._traffic(layers, None)
            all_coding_s = (dense_coding_s, *(one.coding_s for one in expected.values()))
            coding_s = [each for by_key in all_coding_s for each in by_key.values()]
            alike = symmetry(
                wiring,
                [Exchange(key.level, sent) for one in expected.values() for key, sent in one.traffic.items() if key.op in _OUT]
                + [Exchange(key.level, sent) for key, sent in dense.items() if key.op is Op.DENSE_REDUCE_SCATTER],
                [
                    self._optimizer_s,
                    *(one.expert_s for one in expected.values()),
                    *(part for each in coding_s for part in each),
                    self._pre_expert_s,
                    self._head_s,
                ],
                LinkFactors(conditions, wiring.link_names).traits if conditions.of_links else None,
                [pairs for one in expected.values() for op, pairs in one.direct.items() if op in _OUT],
            )
        else:
            alike = no_symmetry(wiring)
        self.fabric = Fabric(engine, alike, tolerance, conditions)
        self._one_of_each = alike.first
        self._program = Program(num_ranks=alike.num_kinds)
        self._expected = {first: self._block_of(sent) for first, sent in expected.items()}
        self._dense = _Block(flows=self._flows(dense), expert_s=self._slowdown, coding_s=dense_coding_s)

    def build(self) -> Program:
        last: list[int] = []
        for micro_batch in range(self._plan.workload.training.micro_batches):
            steps = [
                self._step(layer, layers, micro_batch)
                for layers in self._plan.placed
                for layer in range(layers.first_layer, layers.first_layer + layers.num_layers)
            ]
            for place, step in enumerate(steps):
                if self._prefetch:
                    self._start_gathers([ahead for ahead in steps[place : place + self._prefetch + 1] if ahead.gather], last)
                last = self._forward(step, last)
            self._gathered.clear()
            last = [self._compute(HEAD, self._head_s, last)]
            backwards = steps[::-1]
            self._start_gathers([ahead for ahead in backwards[: self._prefetch] if ahead.regather], last)
            last = [self._compute(HEAD + BACKWARD, self._head_s * _BACKWARD_COST, last)]
            for place, step in enumerate(backwards):
                if self._prefetch:
                    self._start_gathers(
                        [ahead for ahead in backwards[place : place + self._prefetch + 1] if ahead.regather], last
                    )
                last = self._backward(step, last)
            self._gathered.clear()
        last = [*last, *self._queue]
        last = self._hops(self._dense, Op.DENSE_REDUCE_SCATTER, self._levels[::-1], last, "")
        last = self._hops(self._dense, Op.DENSE_ALL_GATHER, self._levels, last, "")
        self._compute(OPTIMIZER, self._optimizer_s, last)
        return self._program

    def _compute(self, label: str, seconds: FloatArray, after: Sequence[int], name: str = "", *, beside: bool = False) -> int:
        """seconds: [ranks of the cluster]."""
        seconds = seconds[self._one_of_each]
        if self._jitter:
            seconds = seconds * np.exp(self._random.normal(0.0, self._jitter, seconds.size))
        return self._program.compute(label, seconds, after, name, beside=beside)

    def _step(self, layer: int, layers: PlacedLayers, micro_batch: int) -> _Step:
        each_time = layers.group.residency is Residency.MICROBATCH
        is_last = micro_batch == self._plan.workload.training.micro_batches - 1
        block = self._block(layer, layers, micro_batch)
        return _Step(
            block=block,
            layer=layer,
            name=f"layer {layer}, micro-batch {micro_batch}",
            ahead=self._ahead(block, layer, layers, micro_batch),
            gather=each_time or micro_batch == 0,
            regather=each_time,
            give_back=each_time or is_last,
            is_last=is_last,
        )

    def _block(self, layer: int, layers: PlacedLayers, micro_batch: int) -> _Block:
        if self._routing is None:
            if layers.first_layer not in self._expected:
                self._expected[layers.first_layer] = self._block_of(self._traffic(layers, None))
            return self._expected[layers.first_layer]
        return self._block_of(self._traffic(layers, self._routing[layer, micro_batch]))

    def _traffic(self, layers: PlacedLayers, choices: IntArray | None) -> _Sent:
        workload, cluster, placement = self._plan.workload, self._plan.cluster, layers.placement
        gpu = cluster.gpu
        codecs, per_choice, chunks = self._plan.level_codecs, self._exchange.per_choice, self._exchange.chunks
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
        copies = served_copies(placement, layers.gating, choices).sum(axis=1)
        products_s = copies * workload.expert_flops_per_row / cluster.of_ranks(lambda gpu: gpu.expert_flops_per_s) / chunks
        held_s = placement.holds.sum(axis=1) * cluster.of_ranks(lambda gpu: gpu.expert_overhead)
        alone_s = (products_s + held_s) * self._slowdown
        # Ranks that share processors wait for each other's work, too.
        expert_s = alone_s / gpu.sharing + alone_s.mean() * (1 - 1 / gpu.sharing)
        coding: Coding = {}
        if gpu.coding is not None:
            if self._exchange.route is Route.DIRECT:
                tokens = direct_coding(direct, placement, workload, codecs)
            else:
                # Each chunk takes its share.
                tokens = token_coding(placement, workload, rows, codecs, layers.gating, choices, per_choice=per_choice)
                tokens = {key: Coded(one.encoded / chunks, one.decoded / chunks) for key, one in tokens.items()}
            coding = tokens | copy_coding(placement, workload, codecs)
        return _Sent(traffic | copy_traffic(placement, workload, codecs), direct, expert_s, self._seconds(coding))

    def _dense_coding(self) -> Coding:
        plan = self._plan
        return {} if plan.cluster.gpu.coding is None else dense_coding(plan.cluster.sizes, plan.workload, plan.level_codecs)

    def _seconds(self, coding: Coding) -> dict[OpLevel, Coded]:
        """Of each rank while all code; operations that take no time are left out."""
        gpu, found = self._plan.cluster.gpu, {}
        for key, coded in coding.items():
            speed = speed_of(gpu.coding, self._plan.level_codecs, key) if gpu.coding is not None else None
            if speed is not None:
                alone = [coded.encoded / speed.encode * self._slowdown, coded.decoded / speed.decode * self._slowdown]
                found[key] = Coded(*(one / gpu.sharing + one.mean() * (1 - 1 / gpu.sharing) for one in alone))
        if self._exchange.route is Route.DIRECT:
            # One exchange over all levels.
            for key in [key for key in found if key.level > 0 and key.op in _ROWS]:
                one, first = found.pop(key), OpLevel(key.op, 0)
                found[first] = Coded(*(a + b for a, b in zip(found[first], one, strict=True))) if first in found else one
        return found

    def _block_of(self, sent: _Sent) -> _Block:
        control, jitter_s = self._controller, self._plan.cluster.gpu.jitter
        if control is None:
            direct = {OpLevel(op, 0): self.fabric.direct(pairs, jitter_s) for op, pairs in sent.direct.items()}
            return _Block(flows=self._flows(sent.traffic) | direct, expert_s=sent.expert_s, coding_s=sent.coding_s)
        demand = control.demand_bytes(sent.traffic)
        circuits = control.circuits(demand)
        light = {key: part for key, part in sent.traffic.items() if control.is_light(key)}
        dark = {key: part for key, part in sent.traffic.items() if key not in light}
        flows = self._flows(dark) | self._flows(light, circuits)
        return _Block(flows, sent.expert_s, sent.coding_s, light=light, demand_bytes=demand, circuits=circuits)

    def _ahead(self, block: _Block, layer: int, layers: PlacedLayers, micro_batch: int) -> _Block | None:
        """A block as its forward is where circuits are set before its gate, for what is then expected of it."""
        if self._controller is None or block.demand_bytes is None or block.light is None:
            return None
        load = None
        if self._routing is not None:
            chosen = self._routing[layer, micro_batch].reshape(self._plan.cluster.num_gpus, -1)
            num_experts = self._plan.workload.model.num_experts
            load = np.stack([np.bincount(each[each >= 0], minlength=num_experts) for each in chosen]).astype(np.float64)
        expected = self._controller.foreseen(layer, layers.placement, block.demand_bytes, load)
        if expected is None:
            return None
        if np.array_equal(expected, block.demand_bytes):
            return block
        circuits = self._controller.circuits(expected)
        return block._replace(flows={**block.flows, **self._flows(block.light, circuits)}, circuits=circuits)

    def _flows(self, traffic: Traffic, circuits: IntArray | None = None) -> dict[OpLevel, Flows]:
        jitter_s = self._plan.cluster.gpu.jitter
        return {
            key: self.fabric.flows(key.level, sent, jitter_s if is_late(key) else 0.0, circuits) for key, sent in traffic.items()
        }

    def _reconfigure(self, block: _Block, after: Sequence[int], name: str) -> list[int]:
        """Set a block's circuits after their last use and after these; ends that their next use waits for, none where regions
        have them already."""
        if self._controller is None or block.circuits is None:
            return []
        last: list[int] = []
        for flows in self._controller.switching(self._circuits, block.circuits):
            last = [self._program.exchange(RECONFIGURATION, flows, last or [*after, *self._released], name)]
        self._circuits = block.circuits
        return last

    def _out(self, block: _Block, op: Op, after: list[int], circuits: list[int], name: str) -> list[int]:
        """Tokens to their experts or gradients to them, outermost level first; inside sites once circuits are set."""
        last = self._hops(block, op, self._levels[:1], after, name)
        return self._hops(block, op, self._levels[1:], [*last, *circuits], name)

    def _back(self, block: _Block, op: Op, after: list[int], name: str) -> list[int]:
        """And back, innermost level first."""
        self._released = self._hops(block, op, self._levels[:0:-1], after, name)
        return self._hops(block, op, self._levels[:1], self._released, name)

    def _hops(self, block: _Block, op: Op, levels: Sequence[int], after: list[int], name: str) -> list[int]:
        """One exchange per level, in the order given; a rank begins a hop when its part of the one before is done. It codes
        before and decodes after."""
        gives_way = self._prefetch and op in _MOVES
        priority = _COPIES if gives_way else _TOKENS
        for level in levels:
            key = OpLevel(op, level)
            hop, coding_s = block.flows.get(key), block.coding_s.get(key)
            if hop is not None and hop.source.size:
                if coding_s is not None:
                    after = [self._compute(CODING, coding_s.encoded, after, name, beside=op in _MOVES)]
                after = [self._program.exchange(op.value, hop, after, name, level=level, priority=priority)]
                if coding_s is not None:
                    after = [self._compute(CODING, coding_s.decoded, after, name, beside=op in _MOVES)]
        return after

    def _coded_beside(self, block: _Block, op: Op, after: list[int], name: str) -> list[int]:
        """A rank's own chain stands still for as long as it codes and decodes copies, or their gradients, beside it."""
        seconds = [part for key, coding_s in block.coding_s.items() if key.op is op for part in coding_s]
        return [self._compute(CODING, np.sum(seconds, axis=0), after, name)] if np.any(seconds) else after

    def _start_gathers(self, steps: Sequence[_Step], after: list[int]) -> None:
        """Queue gathers that are not queued yet."""
        for step in steps:
            if step.layer not in self._gathered:
                self._gathered[step.layer] = self._queued(step, Op.EXPERT_GATHER, self._levels, after)

    def _queued(self, step: _Step, op: Op, levels: Sequence[int], after: list[int]) -> list[int]:
        """The hops of copies or of their gradients, behind all that was queued before; none where none are due."""
        done = self._hops(step.block, op, levels, [*after, *self._queue], step.name)
        if done == [*after, *self._queue]:
            return []
        self._queue = done
        return done

    def _forward(self, step: _Step, after: list[int]) -> list[int]:
        block, name = step.ahead or step.block, step.name
        circuits = self._reconfigure(block, [], name) if step.ahead is not None else None
        gathered = after
        if step.gather and not self._prefetch:
            gathered = self._hops(block, Op.EXPERT_GATHER, self._levels, after, name)
        begin = gathered
        if self._plan.schedule.overlap:
            begin = self._coded_beside(block, Op.EXPERT_GATHER, after, name) if step.gather else after
        ready = self._compute(PRE_EXPERT, self._pre_expert_s, begin, name)
        held = self._gathered.get(step.layer, [])
        return self._through_experts(block, _FORWARDS, [ready, *gathered], held, circuits, name)

    def _through_experts(
        self, block: _Block, way: _Way, after: list[int], held: Sequence[int], circuits: list[int] | None, name: str
    ) -> list[int]:
        """Tokens to the experts and back, chunk by chunk; computation waits for `held` copies, too, and what is inside sites
        for `circuits`, ends of their setting (None: they are set once the first counts have told what will move)."""
        last, computed = after, list(held)
        results = []
        for _ in range(self._exchange.chunks):
            for level in self._levels:
                if way is _FORWARDS:
                    last = self._hops(block, Op.TOKEN_COUNTS, [level], last, name)
                if circuits is None:
                    circuits = self._reconfigure(block, last, name)
                if level == 1:
                    last = [*last, *circuits]
                last = self._hops(block, way.out, [level], last, name)
            computed = [self._compute(way.label, block.expert_s * way.cost, [*last, *computed], name)]
            results += computed
        if self._exchange.chunks == 1:
            last = computed
        for result in results:
            last = self._back(block, way.back, list(dict.fromkeys([*last, result])), name)
        return last

    def _backward(self, step: _Step, after: list[int]) -> list[int]:
        block, name = step.block, step.name
        if self._prefetch:
            return self._prefetched_backward(step, after)
        circuits = self._reconfigure(block, [], name)
        begin = gathered = self._hops(block, Op.EXPERT_GATHER, self._levels, after, name) if step.regather else after
        if self._plan.schedule.overlap:
            begin = self._coded_beside(block, Op.EXPERT_GATHER, after, name) if step.regather else after
        last = self._through_experts(block, _BACKWARDS, begin, gathered, circuits, name)
        returned = self._hops(block, Op.GRADIENT_RETURN, self._levels[::-1], last, name) if step.give_back else last
        if step.is_last:
            # Renews the layer's shared expert, where copies are coded against one.
            returned = self._hops(block, Op.SHARED_REDUCE_SCATTER, self._levels[::-1], returned, name)
            returned = self._hops(block, Op.SHARED_ALL_GATHER, self._levels, returned, name)
        begin = returned
        if self._plan.schedule.overlap:
            begin = self._coded_beside(block, Op.GRADIENT_RETURN, last, name) if step.give_back else last
        ready = self._compute(PRE_EXPERT + BACKWARD, self._pre_expert_s * _BACKWARD_COST, begin, name)
        return [ready, *returned]

    def _prefetched_backward(self, step: _Step, after: list[int]) -> list[int]:
        """Backward whose gather set out before, and whose gradients return while blocks below run theirs."""
        block, name = step.block, step.name
        if step.regather:
            after = self._coded_beside(block, Op.EXPERT_GATHER, after, name)
        last = self._out(block, Op.COMBINE_BACKWARD, after, self._reconfigure(block, [], name), name)
        # Gradients that the runtime does not keep while it makes new ones: with copies per micro-batch, memory is short.
        above = self._returned.get(step.layer + self._prefetch + 1, [])
        last = [*last, *self._gathered.get(step.layer, []), *above]
        last = [self._compute(EXPERT + BACKWARD, block.expert_s * _BACKWARD_COST, last, name)]
        if step.give_back:
            returned = self._queued(step, Op.GRADIENT_RETURN, self._levels[::-1], last)
            if step.regather:
                self._returned[step.layer] = returned
        last = self._back(block, Op.DISPATCH_BACKWARD, last, name)
        if step.give_back:
            last = self._coded_beside(block, Op.GRADIENT_RETURN, last, name)
        return [self._compute(PRE_EXPERT + BACKWARD, self._pre_expert_s * _BACKWARD_COST, last, name)]

    def _optimizer(self) -> FloatArray:
        """[ranks] AdamW reads weight, gradient and state and writes weight and state of the rank's own experts and of
        all dense parameters; memory bandwidth bounds it."""
        model, dtype = self._plan.workload.model, self._plan.workload.training.dtype
        params = self._plan.home_experts * float(model.expert_params) + model.dense_params
        size_bytes = params * (3 * dtype.num_bytes + 2 * dtype.state_bytes)
        rates = self._plan.cluster.of_ranks(lambda gpu: gpu.memory_bandwidth)
        return np.asarray(size_bytes / rates * self._slowdown, dtype=np.float64)
