"""One training step of a plan as a program of operations: whose bytes, whose computation, and what waits for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hybridep.placement import Placement
from hybridep.plan import LayerGroup, Plan, Residency
from hybridep.traffic import (
    FloatArray,
    Op,
    OpLevel,
    Traffic,
    copy_traffic,
    dense_traffic,
    expected_rows,
    routed_rows,
    served_copies,
    token_traffic,
)
from simulator.collective import Flows, Program
from simulator.fabric import Fabric
from simulator.flow import IntArray

Routing = Mapping[tuple[int, int], IntArray]
"""(MoE layer, micro-batch) -> [G, T, K] expert ids, -1 for none."""

PRE_EXPERT = "pre_expert"
EXPERT = "expert"
HEAD = "head"
BACKWARD = "_backward"
OPTIMIZER = "optimizer"

_BACKWARD_COST = 2.0
"""Backward computes the gradients of inputs and of weights, each as costly as the forward."""


class _Block(NamedTuple):
    """What one MoE layer does in one micro-batch; the gather and return are those of a step in which they are due."""

    flows: Mapping[OpLevel, Flows]
    expert_s: FloatArray
    """[ranks] forward of the routed experts."""


class _Step(NamedTuple):
    """A place in the step: a layer in a micro-batch, and whether its copies come or go there."""

    block: _Block
    name: str
    gather: bool
    regather: bool
    give_back: bool


def step_program(plan: Plan, fabric: Fabric, routing: Routing | None = None) -> Program:
    """The operations of one training step, each rank waiting only for what it needs.

    Per micro-batch: the MoE blocks forward, the rest of the model, the blocks backward in reverse order; then the dense
    gradients are all-reduced and the optimizer steps. A block's gather runs beside its pre-expert forward, its gradient
    return beside its pre-expert backward (HybridEP, Eq. 12), and a second gather beside the combine's gradients, with
    which it shares the links; or before them where the plan's schedule does not overlap.
    Without `routing`, tokens choose experts uniformly and rows are their expected number.
    """
    return _Builder(plan, fabric, routing).build()


class _Builder:
    def __init__(self, plan: Plan, fabric: Fabric, routing: Routing | None) -> None:
        self._plan = plan
        self._fabric = fabric
        self._routing = routing
        self._levels = range(len(plan.cluster.levels))
        self._num_ranks = plan.cluster.num_gpus
        self._program = Program(num_ranks=self._num_ranks)
        workload, gpu = plan.workload, plan.cluster.gpu
        everybody = np.ones(self._num_ranks)
        self._pre_expert_s = everybody * (workload.pre_expert_flops / gpu.throughput + gpu.block_overhead)
        self._head_s = everybody * (workload.head_flops / gpu.throughput)
        self._expected: dict[int, _Block] = {}

    def build(self) -> Program:
        last: list[int] = []
        layers = list(self._plan.each_layer())
        for micro_batch in range(self._plan.workload.training.micro_batches):
            steps = [self._step(layer, group, placement, micro_batch) for layer, group, placement in layers]
            for step in steps:
                last = self._forward(step, last)
            last = [self._program.compute(HEAD, self._head_s, last)]
            last = [self._program.compute(HEAD + BACKWARD, self._head_s * _BACKWARD_COST, last)]
            for step in reversed(steps):
                last = self._backward(step, last)
        dense = self._flows(dense_traffic(self._plan.placements[0], self._plan.workload))
        last = self._hops(dense, Op.DENSE_REDUCE_SCATTER, self._levels[::-1], last, "")
        last = self._hops(dense, Op.DENSE_ALL_GATHER, self._levels, last, "")
        self._program.compute(OPTIMIZER, self._optimizer_s(), last)
        return self._program

    def _step(self, layer: int, group: LayerGroup, placement: Placement, micro_batch: int) -> _Step:
        each_time = group.residency is Residency.MICROBATCH
        is_last = micro_batch == self._plan.workload.training.micro_batches - 1
        return _Step(
            block=self._block(layer, group, placement, micro_batch),
            name=f"layer {layer}, micro-batch {micro_batch}",
            gather=each_time or micro_batch == 0,
            regather=each_time,
            give_back=each_time or is_last,
        )

    def _block(self, layer: int, group: LayerGroup, placement: Placement, micro_batch: int) -> _Block:
        if self._routing is None and group.first_layer in self._expected:
            return self._expected[group.first_layer]
        workload, gpu = self._plan.workload, self._plan.cluster.gpu
        tokens, top_k = workload.training.tokens, workload.model.top_k
        if self._routing is None:
            choices, rows = None, expected_rows(placement, tokens, top_k)
        else:
            choices = self._routing[layer, micro_batch]
            rows = routed_rows(placement, choices)
        traffic = token_traffic(placement, workload, rows) | copy_traffic(placement, workload)
        copies = served_copies(placement, choices, tokens, top_k).sum(axis=1)
        block = _Block(flows=self._flows(traffic), expert_s=copies * (workload.expert_flops_per_row / gpu.throughput))
        if self._routing is None:
            self._expected[group.first_layer] = block
        return block

    def _flows(self, traffic: Traffic) -> dict[OpLevel, Flows]:
        """Transfers of an array [ranks, size of the level]: from each rank to its peer at each coordinate."""
        flows = {}
        for key, sent in traffic.items():
            source, coordinate = np.nonzero(sent)
            sizes = self._plan.cluster.sizes
            stride = int(np.prod(sizes[key.level + 1 :]))
            destination = source + (coordinate - source // stride % sizes[key.level]) * stride
            flows[key] = self._fabric.flows(source, destination, sent[source, coordinate])
        return flows

    def _hops(self, flows: Mapping[OpLevel, Flows], op: Op, levels: Sequence[int], after: list[int], name: str) -> list[int]:
        """One exchange per level, in the order given; a rank begins a hop when its part of the one before is done."""
        for level in levels:
            hop = flows.get(OpLevel(op, level))
            if hop is not None and hop.source.size:
                after = [self._program.exchange(op.value, hop, after, name, level=level)]
        return after

    def _forward(self, step: _Step, after: list[int]) -> list[int]:
        flows, name = step.block.flows, step.name
        gathered = self._hops(flows, Op.EXPERT_GATHER, self._levels, after, name) if step.gather else after
        begin = after if self._plan.schedule.overlap else gathered
        ready = self._program.compute(PRE_EXPERT, self._pre_expert_s, begin, name)
        last = [ready, *gathered]
        for level in self._levels:
            last = self._hops(flows, Op.TOKEN_COUNTS, [level], last, name)
            last = self._hops(flows, Op.TOKEN_DISPATCH, [level], last, name)
        last = [self._program.compute(EXPERT, step.block.expert_s, last, name)]
        return self._hops(flows, Op.TOKEN_COMBINE, self._levels[::-1], last, name)

    def _backward(self, step: _Step, after: list[int]) -> list[int]:
        flows, name = step.block.flows, step.name
        gathered = self._hops(flows, Op.EXPERT_GATHER, self._levels, after, name) if step.regather else after
        begin = after if self._plan.schedule.overlap else gathered
        last = [*self._hops(flows, Op.COMBINE_BACKWARD, self._levels, begin, name), *gathered]
        expert_s = step.block.expert_s * _BACKWARD_COST
        last = [self._program.compute(EXPERT + BACKWARD, expert_s, last, name)]
        last = self._hops(flows, Op.DISPATCH_BACKWARD, self._levels[::-1], last, name)
        returned = self._hops(flows, Op.GRADIENT_RETURN, self._levels[::-1], last, name) if step.give_back else last
        begin = last if self._plan.schedule.overlap else returned
        ready = self._program.compute(PRE_EXPERT + BACKWARD, self._pre_expert_s * _BACKWARD_COST, begin, name)
        return [ready, *returned]

    def _optimizer_s(self) -> FloatArray:
        """[ranks] AdamW reads weight, gradient and state and writes weight and state of the rank's own experts and of
        all dense parameters; memory bandwidth bounds it."""
        model, dtype, gpu = self._plan.workload.model, self._plan.workload.training.dtype, self._plan.cluster.gpu
        homes = self._plan.placements[0].home
        experts = np.bincount(homes, minlength=self._num_ranks) * model.num_moe_layers
        params = experts * float(model.expert_params) + model.dense_params
        size_bytes = params * (3 * dtype.num_bytes + 2 * dtype.state_bytes)
        return np.asarray(size_bytes / gpu.memory_bandwidth, dtype=np.float64)
