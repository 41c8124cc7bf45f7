"""One training step of a plan as a program of operations: whose bytes, whose computation, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.plan import PlacedLayers, Plan, Residency
from hybridep.routing import Routing
from hybridep.traffic import MOVES, Op, OpLevel
from simulator.blocks import BACKWARD_COST, Block, Blocks, fabric_of
from simulator.collective import Flows, Program
from simulator.conditions import Conditions
from simulator.engine import Engine
from simulator.errors import SimulationError
from simulator.fabric import Fabric
from simulator.precision import EXACTLY, Precision
from simulator.token_exchange import TokenExchange
from simulator.wiring import Wiring

PRE_EXPERT = "pre_expert"
EXPERT = "expert"
HEAD = "head"
BACKWARD = "_backward"
OPTIMIZER = "optimizer"
RECONFIGURATION = "reconfiguration"
CODING = "coding"
MESSAGES = "messages"
"""Processors' time for them, where ranks share processors."""

_TOKENS, _COPIES = 0, 1
"""Priorities on the links."""


class _Pass(NamedTuple):
    """Tokens to the experts and back, in forward or in backward."""

    out: Op
    back: Op
    label: str


_FORWARDS = _Pass(Op.TOKEN_DISPATCH, Op.TOKEN_COMBINE, EXPERT)
_BACKWARDS = _Pass(Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD, EXPERT + BACKWARD)


class _Step(NamedTuple):
    """A place in the step: a layer in a micro-batch, and whether its copies come or go there."""

    block: Block
    layer: int
    name: str
    ahead: Block | None
    """Its forward where circuits were set for it before its gate."""
    gather: bool
    regather: bool
    give_back: bool
    is_last: bool
    expert_backward: float
    """What the experts' backward takes, in forwards of theirs."""
    pre_expert_backward_s: FloatArray
    """[ranks of the cluster]."""


def step_program(
    plan: Plan,
    engine: Engine,
    wiring: Wiring,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
    start_s: float = 0.0,
    exchange: TokenExchange | None = None,
) -> tuple[Program, Fabric]:
    """The operations of one training step, each rank waiting only for what it needs; and the network they run on.

    Per micro-batch: the MoE blocks forward, the rest of the model, the blocks backward in reverse order; then the dense
    gradients are summed, the optimizer steps, and its weights are gathered. A block's gather runs beside its pre-expert
    forward, its gradient return beside its pre-expert backward (HybridEP, Eq. 12), and a second gather beside the
    combine's gradients, with which it shares the links; or before them where the plan's schedule does not overlap. With
    a prefetch depth, gathers set out that many blocks ahead and are waited for by the experts, returns by the end of
    the step; both are one queue per rank and give way to tokens. Tokens travel as `exchange` says, as the runtime has
    it where it is left out; chunks and a prefetch depth do not go together (SimulationError). Tokens are coded before a
    hop and decoded after it. Copies and their gradients are coded beside the rank's own chain, which stands still for
    as long. Without `routing`, rows are the number that the plan's popularity of experts lets expect (all alike where
    it has none). The program's ranks are then the kinds of ranks that differ; with routing all do.
    """
    conditions, exchange = conditions or Conditions(), exchange or TokenExchange()
    if plan.schedule.prefetch and exchange.chunks is not None and exchange.chunks > 1:
        raise SimulationError(f"chunks: {exchange.chunks} with prefetch {plan.schedule.prefetch}; only one of them can be")
    blocks = Blocks(plan, wiring, routing, precision, conditions, start_s, exchange)
    fabric = fabric_of([blocks], engine, wiring, precision, conditions, plan.schedule.streams)
    program = Program(num_ranks=fabric.symmetry.num_kinds, processors=plan.cluster.processors)
    passes = Passes(plan, blocks, program, jitter_of(conditions, start_s))
    last: list[int] = []
    for micro_batch in range(plan.workload.training.micro_batches):
        last = passes.forward(micro_batch, last)
        last = passes.backward(micro_batch, last)
    passes.finish(last)
    return program, fabric


class Jitter(NamedTuple):
    """How computations scatter."""

    spread: float
    random: np.random.Generator


def jitter_of(conditions: Conditions, start_s: float) -> Jitter:
    """In a step that begins then."""
    return Jitter(conditions.compute_jitter, np.random.default_rng([conditions.seed, int(start_s * 1e6)]))


class Passes:
    """What a plan's ranks do in one step, pass by pass, as operations of a program; each takes and gives the ends that a rank
    waits for.

    ranks: [ranks of the program] whose passes these are, where others are in it, too. early: copies of a step set out when it
    begins, not with their blocks, and their gradients leave after its last backward: as in a stage that waits for another.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        program: Program,
        jitter: Jitter,
        ranks: BoolArray | None = None,
        *,
        early: bool = False,
    ) -> None:
        self._plan, self._blocks = plan, blocks
        self._jitter = jitter
        self._prefetch = plan.schedule.prefetch
        self._ranks, self._early = ranks, early
        self._queue: list[int] = []
        """Ends of what was queued last, of copies and their gradients."""
        self._gathered: dict[int, list[int]] = {}
        """Layer -> ends of its gather, in one pass."""
        self._returned: dict[int, list[int]] = {}
        """The same of its gradients' return, where copies live for one micro-batch."""
        self._circuits: IntArray | None = None
        """That are set; None at the start of the step."""
        self._released: list[int] = []
        """Ends of what used them last."""
        self._levels = range(len(plan.cluster.levels))
        self._one_of_each = blocks.fabric.symmetry.first
        self._program = program
        self._steps: dict[int, list[_Step]] = {}
        """Micro-batch -> its layers, between its forward and its backward."""
        self._late: list[_Step] = []
        """Layers whose gradients leave at the end."""

    def begin(self) -> None:
        """Of a step whose copies set out early."""
        for step in self._of(0):
            if self._is_early(step):
                self._gathered[step.layer] = self._queued(step, Op.EXPERT_GATHER, self._levels, [])

    def forward(self, micro_batch: int, last: list[int]) -> list[int]:
        """Of a micro-batch through all layers, and the output projection's where the plan has one."""
        steps = self._of(micro_batch)
        for place, step in enumerate(steps):
            if self._prefetch:
                self._start_gathers([ahead for ahead in steps[place : place + self._prefetch + 1] if ahead.gather], last)
            last = self._forward(step, last)
        self._gathered.clear()
        return [self.compute(HEAD, self._blocks.head_s, last)]

    def backward(self, micro_batch: int, last: list[int]) -> list[int]:
        """And back."""
        backwards = self._steps.pop(micro_batch)[::-1]
        self._start_gathers([ahead for ahead in backwards[: self._prefetch] if ahead.regather], last)
        last = [self.compute(HEAD + BACKWARD, self._blocks.head_backward_s, last)]
        for place, step in enumerate(backwards):
            if self._prefetch:
                self._start_gathers([ahead for ahead in backwards[place : place + self._prefetch + 1] if ahead.regather], last)
            last = self._backward(step, last)
        self._gathered.clear()
        return last

    def finish(self, last: list[int]) -> None:
        """What is left after the last micro-batch."""
        for step in reversed(self._late):
            self._queued(step, Op.GRADIENT_RETURN, self._levels[::-1], last)
            self._queued(step, Op.SHARED_REDUCE_SCATTER, self._levels[::-1], last)
            self._queued(step, Op.SHARED_ALL_GATHER, self._levels, last)
        last = [*last, *self._queue]
        last = self._hops(self._blocks.reduction, Op.DENSE_REDUCE_SCATTER, self._levels[::-1], last, "")
        last = self._hops(self._blocks.reduction, Op.DENSE_ALL_GATHER, self._levels[:1], last, "")
        last = [self.compute(OPTIMIZER, self._blocks.optimizer_s, last)]
        self._hops(self._blocks.reduction, Op.DENSE_ALL_GATHER, self._levels[1:], last, "")

    def _of(self, micro_batch: int) -> list[_Step]:
        if micro_batch not in self._steps:
            self._steps[micro_batch] = [
                self._step(layer, layers, micro_batch)
                for layers in self._plan.placed
                for layer in range(layers.first_layer, layers.first_layer + layers.num_layers)
            ]
        return self._steps[micro_batch]

    def _is_early(self, step: _Step) -> bool:
        """Whether the step's copies are there before its block, and stay."""
        return self._early and not step.regather

    def compute(self, label: str, seconds: FloatArray, after: Sequence[int], name: str = "", *, beside: bool = False) -> int:
        """Add a computation of its ranks; seconds: [ranks of the cluster]."""
        seconds = seconds[self._one_of_each]
        if self._jitter.spread:
            seconds = seconds * np.exp(self._jitter.random.normal(0.0, self._jitter.spread, seconds.size))
        return self._program.compute(label, seconds, after, name, beside=beside, ranks=self._ranks)

    def _exchange(
        self, label: str, flows: Flows, after: Sequence[int], name: str, level: int | None = None, priority: int = 0
    ) -> int:
        return self._program.exchange(label, flows, after, name, level=level, priority=priority, ranks=self._ranks)

    def _step(self, layer: int, layers: PlacedLayers, micro_batch: int) -> _Step:
        each_time = layers.group.residency is Residency.MICROBATCH
        is_last = micro_batch == self._plan.workload.training.micro_batches - 1
        block = self._blocks.of(layer, layers, micro_batch)
        again_s = self._blocks.again_s[layers.group.recompute]
        return _Step(
            block=block,
            layer=layer,
            name=f"layer {layer}, micro-batch {micro_batch}",
            ahead=self._blocks.ahead(block, layer, layers, micro_batch),
            gather=each_time or micro_batch == 0,
            regather=each_time,
            give_back=each_time or is_last,
            is_last=is_last,
            expert_backward=float(layers.group.recompute.backward_cost),
            pre_expert_backward_s=self._blocks.pre_expert_s * BACKWARD_COST + again_s,
        )

    def _reconfigure(self, block: Block, after: Sequence[int], name: str) -> list[int]:
        """Set a block's circuits after their last use and after these; ends that their next use waits for, none where regions
        have them already."""
        if self._blocks.controller is None or block.circuits is None:
            return []
        last: list[int] = []
        for flows in self._blocks.controller.switching(self._circuits, block.circuits):
            last = [self._exchange(RECONFIGURATION, flows, last or [*after, *self._released], name)]
        self._circuits = block.circuits
        return last

    def _out(self, block: Block, op: Op, after: list[int], circuits: list[int], name: str) -> list[int]:
        """Tokens to their experts or gradients to them, outermost level first; inside sites once circuits are set."""
        last = self._hops(block, op, self._levels[:1], after, name)
        return self._hops(block, op, self._levels[1:], [*last, *circuits], name)

    def _back(self, block: Block, op: Op, after: list[int], name: str) -> list[int]:
        """And back, innermost level first."""
        self._released = self._hops(block, op, self._levels[:0:-1], after, name)
        return self._hops(block, op, self._levels[:1], self._released, name)

    def _hops(self, block: Block, op: Op, levels: Sequence[int], after: list[int], name: str) -> list[int]:
        """One exchange per level, in the order given; a rank begins a hop when its part of the one before is done. It codes
        before and decodes after, when it has had a processor for the messages if it shares one."""
        gives_way = self._prefetch and op in MOVES
        priority = _COPIES if gives_way else _TOKENS
        for level in levels:
            key = OpLevel(op, level)
            hop, coding_s = block.flows.get(key), block.coding_s.get(key)
            if hop is not None and hop.source.size:
                if coding_s is not None:
                    after = [self.compute(CODING, coding_s.encoded, after, name, beside=op in MOVES)]
                after = [self._exchange(op.value, hop, after, name, level, priority)]
                messages_s = self._blocks.messages_s(key, hop)
                if messages_s.any():
                    after = [self.compute(MESSAGES, messages_s, after, name, beside=op in MOVES)]
                if coding_s is not None:
                    after = [self.compute(CODING, coding_s.decoded, after, name, beside=op in MOVES)]
        return after

    def _coded_beside(self, block: Block, op: Op, after: list[int], name: str) -> list[int]:
        """A rank's own chain stands still for as long as it codes and decodes copies, or their gradients, beside it."""
        seconds = [part for key, coding_s in block.coding_s.items() if key.op is op for part in coding_s]
        return [self.compute(CODING, np.sum(seconds, axis=0), after, name)] if np.any(seconds) else after

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
        if step.gather and self._is_early(step):
            gathered = [*after, *self._gathered[step.layer]]
        elif step.gather and not self._prefetch:
            gathered = self._hops(block, Op.EXPERT_GATHER, self._levels, after, name)
        begin = gathered
        if self._plan.schedule.overlap:
            begin = self._coded_beside(block, Op.EXPERT_GATHER, after, name) if step.gather else after
        ready = self.compute(PRE_EXPERT, self._blocks.pre_expert_s, begin, name)
        held = self._gathered.get(step.layer, [])
        return self._through_experts(block, _FORWARDS, block.expert_s, [ready, *gathered], held, circuits, name)

    def _through_experts(
        self,
        block: Block,
        one_pass: _Pass,
        expert_s: FloatArray,
        after: list[int],
        held: Sequence[int],
        circuits: list[int] | None,
        name: str,
    ) -> list[int]:
        """Tokens to the experts and back, chunk by chunk; computation waits for `held` copies, too, and what is inside sites
        for `circuits`, ends of their setting (None: they are set once the first counts have told what will move)."""
        last, computed = after, list(held)
        results = []
        for _ in range(self._blocks.chunks):
            for level in self._levels:
                if one_pass is _FORWARDS:
                    last = self._hops(block, Op.TOKEN_COUNTS, [level], last, name)
                if circuits is None:
                    circuits = self._reconfigure(block, last, name)
                if level == 1:
                    last = [*last, *circuits]
                last = self._hops(block, one_pass.out, [level], last, name)
            computed = [self.compute(one_pass.label, expert_s, [*last, *computed], name)]
            results += computed
        if self._blocks.chunks == 1:
            last = computed
        for result in results:
            last = self._back(block, one_pass.back, list(dict.fromkeys([*last, result])), name)
        return last

    def _backward(self, step: _Step, after: list[int]) -> list[int]:
        block, name = step.block, step.name
        if self._prefetch:
            return self._prefetched_backward(step, after)
        circuits = self._reconfigure(block, [], name)
        begin = gathered = self._hops(block, Op.EXPERT_GATHER, self._levels, after, name) if step.regather else after
        if self._plan.schedule.overlap:
            begin = self._coded_beside(block, Op.EXPERT_GATHER, after, name) if step.regather else after
        last = self._through_experts(block, _BACKWARDS, block.expert_s * step.expert_backward, begin, gathered, circuits, name)
        if step.give_back and self._is_early(step) and self._plan.workload.training.micro_batches > 1:
            self._late.append(step)
            last = self._coded_beside(block, Op.GRADIENT_RETURN, last, name)
            return [self.compute(PRE_EXPERT + BACKWARD, step.pre_expert_backward_s, last, name)]
        returned = self._hops(block, Op.GRADIENT_RETURN, self._levels[::-1], last, name) if step.give_back else last
        if step.is_last:
            # Renews the layer's shared expert, where copies are coded against one.
            returned = self._hops(block, Op.SHARED_REDUCE_SCATTER, self._levels[::-1], returned, name)
            returned = self._hops(block, Op.SHARED_ALL_GATHER, self._levels, returned, name)
        begin = returned
        if self._plan.schedule.overlap:
            begin = self._coded_beside(block, Op.GRADIENT_RETURN, last, name) if step.give_back else last
        ready = self.compute(PRE_EXPERT + BACKWARD, step.pre_expert_backward_s, begin, name)
        return [ready, *returned]

    def _prefetched_backward(self, step: _Step, after: list[int]) -> list[int]:
        """Backward whose gather set out before, and whose gradients return while blocks below run theirs; so is a shared expert
        renewed."""
        block, name = step.block, step.name
        if step.regather:
            after = self._coded_beside(block, Op.EXPERT_GATHER, after, name)
        last = self._out(block, Op.COMBINE_BACKWARD, after, self._reconfigure(block, [], name), name)
        # Gradients that the runtime does not keep while it makes new ones: with copies per micro-batch, memory is short.
        above = self._returned.get(step.layer + self._prefetch + 1, [])
        last = [*last, *self._gathered.get(step.layer, []), *above]
        last = [self.compute(EXPERT + BACKWARD, block.expert_s * step.expert_backward, last, name)]
        if step.give_back:
            returned = self._queued(step, Op.GRADIENT_RETURN, self._levels[::-1], last)
            if step.is_last:
                returned = self._queued(step, Op.SHARED_REDUCE_SCATTER, self._levels[::-1], last) or returned
                returned = self._queued(step, Op.SHARED_ALL_GATHER, self._levels, last) or returned
            if step.regather:
                self._returned[step.layer] = returned
        last = self._back(block, Op.DISPATCH_BACKWARD, last, name)
        if step.give_back:
            last = self._coded_beside(block, Op.GRADIENT_RETURN, last, name)
        return [self.compute(PRE_EXPERT + BACKWARD, step.pre_expert_backward_s, last, name)]
