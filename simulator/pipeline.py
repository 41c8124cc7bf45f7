"""Pipeline parallelism over sites: stages of layers at groups of sites, each placed by a plan of its own.

All ranks of all stages are simulated together, over the links of the whole cluster: each stage's passes in the order of 1F1B
(PipeDream-Flush; Narayanan et al., ICML 2021, and Megatron-LM, SC 2021) or further ahead (``PipelinePlan.ahead``), exactly as
``simulator.training`` has them without stages; and between stages, from every rank straight to those that go on with its
sequences, activations and their gradients as flows beside all others. They leave one micro-batch after the other in each
direction, while the rank computes on; only to code them before, and to decode them, takes a rank's own time. A later stage's
copies of a step set out when the step begins, and their gradients leave after its last backward, as in the runtime.

Gradients of tied embeddings are not summed over the two ends. Interleaved schedules are not simulated; ``bubble_s`` is what they
could save at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from hybridep.arrays import BoolArray, FloatArray
from hybridep.baselines import Baseline
from hybridep.coding import Coded
from hybridep.config import build
from hybridep.pipeline import ACTIVATIONS, GRADIENTS, AnyPlan, PipelinePlan, Ways
from hybridep.plan import Plan
from hybridep.routing import Routing
from hybridep.topology import only_sites
from hybridep.units import counted
from simulator.blocks import Blocks, Place, fabric_of
from simulator.collective import Flows, Program, Progress
from simulator.conditions import Conditions
from simulator.engine import Engine
from simulator.errors import PipelineError
from simulator.fabric import Fabric
from simulator.fabric_file import FabricFile
from simulator.precision import EXACTLY, Precision
from simulator.sent import Sent, compact
from simulator.stages import Stage, awaits, cut, in_turn, routing_of, time_stages
from simulator.stages_apart import busiest_s, run_stages, without_transfers_s
from simulator.step import StepResult, run, simulate_step
from simulator.symmetry import Exchange
from simulator.token_exchange import TokenExchange
from simulator.training import CODING, MESSAGES, Jitter, Passes, jitter_of
from simulator.wiring import wiring

WAIT = "stage_wait"
"""For what comes from another stage, after a stage's own passes."""

_GAIN = 1e-3
"""Running further ahead must save more than this share of the step."""

AHEAD = (1, 2, 3)
"""Forwards that a stage runs ahead for each stage behind it: 1 is 1F1B, which waits for every way there and back; with 3 it waits
for none that takes less than a micro-batch."""

INSIDE = (Baseline.EP, Baseline.EP_IN_DC)
"""Placements of experts inside a stage: over all its ranks, or inside each site with data parallelism across."""

_ROUNDING = 1e-12
"""Share of a step."""

_MOST_MOMENTS = 200_000_000
"""Of operations and ranks: about 40 bytes each are kept."""

_TOGETHER = 3
"""Candidates that are simulated with all ranks together, the fastest by their stages apart."""


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """One step of a pipeline, and where its time goes: the three parts sum to it."""

    plan: PipelinePlan
    result: StepResult
    """Of all ranks."""
    by_themselves: Callable[[], list[Stage]]
    """Simulates the stages."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """By themselves, with links and computation that do not vary."""
        return tuple(self.by_themselves())

    @cached_property
    def without_transfers_s(self) -> float:
        """What the step would take if activations moved at once, and stages shared no links with them."""
        return without_transfers_s(self.stages, self.plan.ahead)

    @property
    def step_s(self) -> float:
        """Until the last rank is done."""
        return self.result.step_s

    @cached_property
    def work_s(self) -> float:
        """The busiest stage's own passes, exchanges and optimizer, by itself."""
        return min(busiest_s(self.stages), self.step_s)

    @property
    def bubble_s(self) -> float:
        """What stages that wait for each other add to that: filling and draining, and stages of different speed."""
        return min(max(self.without_transfers_s, self.work_s), self.step_s) - self.work_s

    @property
    def transfers_s(self) -> float:
        """What the activations' way adds to both, with what they and stages' own exchanges do to each other."""
        seconds = self.step_s - self.work_s - self.bubble_s
        return seconds if seconds > _ROUNDING * self.step_s else 0.0

    @property
    def activation_bytes(self) -> float:
        """Between stages, both ways, all ranks together."""
        ways = [self.plan.ways(stage) for stage in range(len(self.stages) - 1)]
        sequences = sum(int(way.number.sum()) for way in ways)
        return 2.0 * self.plan.micro_batches * sequences * self.plan.sequence_bytes

    @property
    def choice(self) -> str:
        """In few words, of stages of equally many sites with the same baseline in each."""
        share = (self.bubble_s / self.step_s, self.transfers_s / self.step_s)
        return (
            f"{len(self.stages)} stages of {counted(self.stages[0].plan.cluster.sizes[0], 'site')}, "
            f"{self.plan.provenance['baseline']} in each, {counted(self.plan.in_flight(0), 'micro-batch')} in flight, "
            f"bubble {share[0]:.0%}, activations {share[1]:.0%}"
        )


def fastest_pipeline(
    plan: Plan,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
    fabric: FabricFile | None = None,
) -> PipelineStep:
    """The fastest of all numbers of stages from 2 that divide the sites and leave each stage a layer with experts, of both
    placements inside, and of running further ahead while that pays: compared with stages apart, and the best few with all ranks
    together. Arguments as `simulate_pipeline`. Stages apart are compared with links and computation that do not vary. Raises
    PipelineError where there is none."""
    _require_no_circuits(fabric)
    sites = plan.cluster.sizes[0]
    candidates: list[tuple[PipelinePlan, list[Stage]]] = []
    why = f"{plan.cluster.name} has one site"
    for stages in [number for number in range(2, sites + 1) if sites % number == 0]:
        for inside in INSIDE[: 2 if stages < sites else 1]:
            try:
                pipeline = cut(plan, stages, inside)
                candidates.append((pipeline, time_stages(pipeline, routing, precision, conditions, fabric)))
            except PipelineError as error:
                why = str(error)
    if not candidates:
        raise PipelineError(f"pipeline: no number of stages from 2 fits; {why}")
    found: list[tuple[float, PipelinePlan]] = []
    for pipeline, made in sorted(candidates, key=lambda one: busiest_s(one[1])):
        for apart_s, ahead in _apart(pipeline, made, precision, conditions, fabric):
            found.append((apart_s, pipeline.running_ahead(ahead)))
    best: PipelineStep | None = None
    for apart_s, pipeline in sorted(found, key=lambda one: one[0])[:_TOGETHER]:
        # What takes longer with stages apart hardly takes less together.
        if best is not None and apart_s >= best.step_s:
            break
        step = simulate_pipeline(pipeline, routing, precision, conditions, fabric=fabric)
        if best is None or step.step_s < best.step_s:
            best = step
    assert best is not None
    return best


def _apart(
    pipeline: PipelinePlan,
    stages: list[Stage],
    precision: Precision,
    conditions: Conditions | None,
    fabric: FabricFile | None,
) -> Iterator[tuple[float, int]]:
    """(Seconds of a step with stages apart, how far ahead), while running further ahead pays."""
    best_s = math.inf
    for ahead in AHEAD:
        step_s = run_stages(pipeline.running_ahead(ahead), stages, precision, conditions, fabric)
        yield step_s, ahead
        if step_s > best_s * (1 - _GAIN):
            break
        best_s = step_s


def simulate_pipeline(
    pipeline: PipelinePlan,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
    start_s: float = 0.0,
    progress: Progress | None = None,
    fabric: FabricFile | None = None,
) -> PipelineStep:
    """One step of a pipeline plan, which begins ``start_s`` into the run. routing: (MoE layer, micro-batch) -> [G, T, K] expert
    ids of a step without stages; tokens keep their choices wherever they are computed. progress: told how much of the step is
    simulated. fabric: as `simulator.step.simulate_step`. Raises PipelineError where that would take too much memory, and for
    optical circuits inside sites."""
    return PipelineStep(
        plan=pipeline,
        result=_together(pipeline, routing, precision, conditions, start_s, progress, fabric),
        by_themselves=partial(time_stages, pipeline, routing, precision, conditions, fabric),
    )


def simulate_any(
    plan: AnyPlan,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
    start_s: float = 0.0,
    fabric: FabricFile | None = None,
) -> StepResult:
    """One step of a plan with or without stages; arguments as `simulator.step.simulate_step`. Raises what
    `simulate_pipeline` does, too."""
    if isinstance(plan, PipelinePlan):
        return _together(plan, routing, precision, conditions, start_s, fabric=fabric)
    return simulate_step(plan, routing, precision, conditions, start_s, fabric)


def _require_no_circuits(fabric: FabricFile | None) -> None:
    if fabric is not None and fabric.inside.mixnet is not None:
        raise PipelineError(f"pipeline: not simulated with a MixNet inside sites ({fabric.name}); leave out one of the two")


def _together(
    pipeline: PipelinePlan,
    routing: Routing | None,
    precision: Precision,
    conditions: Conditions | None,
    start_s: float,
    progress: Progress | None = None,
    fabric: FabricFile | None = None,
) -> StepResult:
    _require_no_circuits(fabric)
    conditions = conditions or Conditions()
    cluster, engine, wires = pipeline.cluster, Engine(), wiring(pipeline.cluster, fabric)
    blocks = []
    for number, plan in enumerate(_own_plans(pipeline)):
        ranks = pipeline.ranks[number]
        place = Place(cluster, ranks, np.unique(ranks // cluster.ranks_per_site))
        choices = routing_of(pipeline, routing, number)
        blocks.append(Blocks(plan, wires, choices, precision, conditions, start_s, TokenExchange(), place))
    ways = [pipeline.ways(stage) for stage in range(len(pipeline.stages) - 1)]
    between = [_sent(pipeline, way, precision, forward=forward) for forward in (True, False) for way in ways]
    network = fabric_of(
        blocks,
        engine,
        wires,
        precision,
        conditions,
        pipeline.schedule.streams,
        [Exchange(0, sent) for sent in between],
    )
    moments = _moments(pipeline) * network.symmetry.num_kinds
    if moments > _MOST_MOMENTS:
        raise PipelineError(
            f"pipeline: {network.symmetry.num_kinds} ranks that differ and {pipeline.micro_batches} micro-batches are "
            f"{moments / 1e6:.0f} million moments to keep, and at most {_MOST_MOMENTS / 1e6:.0f} are; give --one-rank-per-site"
        )
    program = _Order(pipeline, blocks, between, network, jitter_of(conditions, start_s)).build()
    return run(pipeline, program, engine, network, conditions, start_s, progress)


def _moments(pipeline: PipelinePlan) -> int:
    """Operations of a program, about."""
    return 2 * pipeline.micro_batches * (8 * pipeline.workload.model.num_layers + 4 * len(pipeline.stages))


def _own_plans(pipeline: PipelinePlan) -> list[Plan]:
    """Of each stage, with ranks as fast as they are while those of all stages compute."""
    if pipeline.cluster.processors is None:
        return list(pipeline.plans)
    made = []
    for stage, plan in zip(pipeline.stages, pipeline.plans, strict=True):
        data = plan.model_dump(mode="json") | {"cluster": only_sites(pipeline.cluster, stage.sites), "workload": plan.workload}
        made.append(build(Plan, data, "stage"))
    return made


def _sent(pipeline: PipelinePlan, ways: Ways, precision: Precision, *, forward: bool) -> Sent:
    """[ranks, sites] bytes of one micro-batch from a stage to the next, or back: from each rank to its like in other sites."""
    cluster = pipeline.cluster
    per_site = cluster.ranks_per_site
    source, destination = (ways.source, ways.destination) if forward else (ways.destination, ways.source)
    sent = np.zeros((cluster.num_gpus, cluster.sizes[0]))
    np.add.at(sent, (source, destination // per_site), ways.number.astype(np.float64) * pipeline.sequence_bytes)
    if precision.one_rank_per_site:
        total = sent.reshape(-1, per_site, cluster.sizes[0]).sum(axis=1)
        sent = np.repeat(total / per_site, per_site, axis=0)
    return compact(sent)


def _coding_s(pipeline: PipelinePlan, stage: int, own: Blocks) -> Coded | None:
    """[ranks of the cluster]: for one micro-batch's rows that a stage passes on, and for as many that it gets."""
    speed = pipeline.activation_speed
    if speed is None:
        return None
    row_bytes = pipeline.workload.training.sequence_length * pipeline.workload.combine_row_bytes
    size_bytes = np.asarray(pipeline.sequences(stage) * row_bytes, dtype=np.float64)
    return Coded(own.slowed(size_bytes / speed.encode), own.slowed(size_bytes / speed.decode))


class _Passing(NamedTuple):
    """The same in the program's ranks."""

    flows: Flows
    """Until the bytes have left, so that the next can follow."""
    pause_s: FloatArray
    """[ranks of the program] until all has come."""
    messages_s: FloatArray
    """[ranks of the program] of a processor, where ranks share processors."""


class _Order:
    """All stages' passes, and what passes between them, each after what it needs."""

    def __init__(
        self,
        pipeline: PipelinePlan,
        blocks: Sequence[Blocks],
        between: Sequence[Sent],
        fabric: Fabric,
        jitter: Jitter,
    ) -> None:
        self._pipeline, self._number = pipeline, len(pipeline.stages)
        first = fabric.symmetry.first
        stage_of = np.zeros(pipeline.cluster.num_gpus, dtype=np.int64)
        for stage, ranks in enumerate(pipeline.ranks):
            stage_of[ranks] = stage
        self._members: list[BoolArray] = [stage_of[first] == stage for stage in range(self._number)]
        self._program = Program(num_ranks=fabric.symmetry.num_kinds, processors=pipeline.cluster.processors)
        self._nothing_s = np.zeros(self._program.num_ranks)
        self._passes = [
            Passes(plan, own, self._program, jitter, members if self._number > 1 else None, early=stage > 0)
            for stage, (plan, own, members) in enumerate(zip(pipeline.plans, blocks, self._members, strict=True))
        ]
        self._coding_s = [_coding_s(pipeline, stage, own) for stage, own in enumerate(blocks)]
        passing = [_passing(fabric.flows(0, sent), pipeline, self._program.num_ranks) for sent in between]
        self._forth, self._back = passing[: self._number - 1], passing[self._number - 1 :]
        self._last: list[list[int]] = [[] for _ in pipeline.stages]
        """Of each stage, the ends of its last pass."""
        self._arrived: dict[tuple[bool, int, int], int] = {}
        """(Whether activations, stage, micro-batch) -> the end of their way."""
        self._taken: dict[tuple[bool, int, int], int] = {}
        """The same -> when the stage has them, and announces further ones."""
        self._sent: dict[tuple[bool, int], int] = {}
        """(Whether activations, from stage) -> the end of what left before."""

    def build(self) -> Program:
        pipeline, number = self._pipeline, self._number
        for passes in self._passes:
            passes.begin()
        for stage, forward, batch in in_turn(number, pipeline.micro_batches, pipeline.ahead, self._can):
            self._pass(stage, forward, batch)
        for stage, passes in enumerate(self._passes):
            passes.finish(self._last[stage])
        return self._program

    def _can(self, stage: int, forward: bool, batch: int) -> bool:
        """Whether what the pass waits for, and what its results wait for, is in the program."""
        key = self._window(stage, forward, batch)
        is_here = not awaits(stage, forward, self._number) or (forward, stage, batch) in self._arrived
        return is_here and (key is None or key in self._taken)

    def _window(self, stage: int, forward: bool, batch: int) -> tuple[bool, int, int] | None:
        """What the next stage must have taken before it announces this micro-batch."""
        other, before = (stage + 1 if forward else stage - 1), batch - self._pipeline.ahead - 1
        return (forward, other, before) if 0 <= other < self._number and before >= 0 else None

    def _pass(self, stage: int, forward: bool, batch: int) -> None:
        key, name = (forward, stage, batch), f"micro-batch {batch}"
        mine, last, coding_s = self._members[stage], self._last[stage], self._coding_s[stage]
        passes = self._passes[stage]
        if key in self._arrived:
            last = [self._program.compute(WAIT, self._nothing_s, [*last, self._arrived.pop(key)], name, ranks=mine)]
            if coding_s is not None:
                last = [passes.compute(CODING, coding_s.decoded, last, name)]
            self._taken[key] = last[0]
        last = passes.forward(batch, last) if forward else passes.backward(batch, last)
        other = stage + 1 if forward else stage - 1
        if coding_s is not None and 0 <= other < self._number:
            last = [passes.compute(CODING, coding_s.encoded, last, name)]
        self._last[stage] = last
        if not 0 <= other < self._number:
            return
        label, way = (ACTIVATIONS, self._forth[stage]) if forward else (GRADIENTS, self._back[other])
        window = self._window(stage, forward, batch)
        after = [*last, *([self._sent[forward, stage]] if (forward, stage) in self._sent else [])]
        after += [self._taken.pop(window)] if window is not None else []
        both = mine | self._members[other]
        moved = self._program.exchange(label, way.flows, after, name, level=0, ranks=both)
        self._sent[forward, stage] = self._program.compute(label, self._nothing_s, [moved], name, ranks=mine, pause=True)
        theirs = self._members[other]
        here = self._program.compute(label, way.pause_s, [moved], name, ranks=theirs, pause=True)
        if way.messages_s.any():
            here = self._program.compute(MESSAGES, way.messages_s, [here], name, beside=True, ranks=theirs)
        self._arrived[forward, other, batch] = here


def _passing(flows: Flows, pipeline: PipelinePlan, num_ranks: int) -> _Passing:
    cluster, transfers = pipeline.cluster, flows.transfers
    pause_s, messages_s = np.zeros(num_ranks), np.zeros(num_ranks)
    np.maximum.at(pause_s, flows.destination, transfers.latency_s)
    if cluster.processors is not None:
        share = cluster.processors / cluster.num_gpus
        further = np.maximum(np.bincount(flows.destination, minlength=num_ranks) - 1, 0)
        messages_s = share * (further * cluster.gpu.message_overhead + (pause_s > 0) * cluster.gpu.jitter)
    left = replace(transfers, latency_s=np.zeros(transfers.latency_s.size))
    return _Passing(replace(flows, transfers=left), pause_s, messages_s)
