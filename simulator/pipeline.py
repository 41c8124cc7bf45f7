"""Pipeline parallelism over sites: stages of layers at groups of sites, expert parallelism inside each stage.

What is composed: every stage by itself is simulated as a step of its own (``simulator.stages``), which gives the time of each of
its passes over a micro-batch, of its copies, and of what follows its last micro-batch. A second simulation has a rank per stage
that does these passes in the order of 1F1B (PipeDream-Flush; Narayanan et al., ICML 2021, and Megatron-LM, SC 2021), and all
transfers between stages as flows over the whole cluster's links: from every rank the activations of its tokens to the rank at
the same place of the next stage, and their gradients back, exact and without codecs. They run beside computation, one
micro-batch after the other in each direction, and share links with each other, also those of the next pair of stages. Where
links are slow a stage may run further ahead than 1F1B does, which takes memory (``ahead``).

What that leaves out in the pipeline's favour: activations and a stage's own exchanges do not slow each other where they use the
same links, which counts for stages of several sites (inside a site activations are next to nothing); nor do two stages' own
exchanges on trunks that both use. Gradients of tied embeddings are not summed over the two ends. Against it: the ranks of a stage
begin a pass together, when the last of them can, and every stage pays the fixed cost of a pass. Interleaved schedules are not
simulated; ``bubble_s`` is what they could save at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hybridep.baselines import Baseline
from hybridep.pipeline import ACTIVATIONS, GRADIENTS, PipelinePlan, alike, order_of_passes, pipeline_link_bytes
from hybridep.plan import Plan
from hybridep.routing import Routing
from hybridep.timeline import Span
from simulator.collective import Execution, Flows, Program, execute
from simulator.conditions import Conditions
from simulator.critical_path import seconds_by_label
from simulator.engine import Engine
from simulator.errors import PipelineError
from simulator.fabric import Fabric
from simulator.precision import EXACTLY, Precision
from simulator.stages import Stage, cut, routing_of, timed
from simulator.step import LinkLoad, StepResult, simulate_step
from simulator.symmetry import no_symmetry
from simulator.wiring import wiring

GATHER, FORWARD, BACKWARD = "stage_gather", "stage_forward", "stage_backward"

_GAIN = 1e-3
"""Running further ahead must save more than this share of the step."""

AHEAD = (1, 2, 3)
"""Forwards that a stage runs ahead for each stage behind it: 1 is 1F1B, which waits for every way there and back; with 3 it waits
for none that takes less than a micro-batch."""

INSIDE = (Baseline.EP, Baseline.EP_IN_DC)
"""Placements of experts inside a stage: over all its ranks, or inside each site with data parallelism across."""


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """One step of a pipeline, and where its time goes: the three parts sum to it."""

    plan: PipelinePlan
    stages: tuple[Stage, ...]
    program: Program
    """Its ranks are the stages."""
    execution: Execution
    without_transfers_s: float
    """What the step would take if activations moved at once."""
    activation_bytes: float
    """Between stages, both ways, all ranks together."""

    @property
    def step_s(self) -> float:
        """Until the last stage is done."""
        return self.execution.makespan_s

    @cached_property
    def work_s(self) -> float:
        """The busiest stage's own passes, exchanges and optimizer."""
        return _busiest_s(self.stages)

    @property
    def bubble_s(self) -> float:
        """What stages that wait for each other add to that: filling and draining, and stages of different speed."""
        return self.without_transfers_s - self.work_s

    @property
    def transfers_s(self) -> float:
        """What the activations' way adds to both."""
        return self.step_s - self.without_transfers_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by kind of operation along the critical path."""
        return seconds_by_label(self.program, self.execution)

    def spans(self) -> Iterator[Span]:
        """The timeline: a process per stage, with rows for its passes and for what it sends forward and back."""
        for position, operation in enumerate(self.program.operations):
            start_s, end_s = self.execution.start_s[position], self.execution.end_s[position]
            if operation.flows is None:
                if operation.label in (ACTIVATIONS, GRADIENTS):
                    continue
                stage, row = int(end_s.argmax()) if operation.seconds is None else int(np.argmax(operation.seconds)), "passes"
            else:
                stage, row = int(operation.flows.source[0]), f"sends {operation.label}"
            yield Span(
                name=f"{operation.label} ({operation.name})" if operation.name else operation.label,
                category=operation.label,
                process=f"stage {stage}: {', '.join(self.plan.stages[stage].sites)}",
                thread=row,
                start_s=float(start_s[stage]),
                duration_s=float(end_s[stage] - start_s[stage]),
            )

    @property
    def busiest_link(self) -> LinkLoad:
        """The link that comes nearest to its capacity, with what stages exchange inside and between them; ``busy_s`` as if it
        were always full."""
        loads_bytes = pipeline_link_bytes(self.plan)
        rates = np.array([link.bandwidth_bytes_per_s for link in self.plan.cluster.link_table])
        busy_s = loads_bytes / rates
        most = int(busy_s.argmax())
        return LinkLoad(
            name=self.plan.cluster.link_table[most].name,
            size_bytes=float(loads_bytes[most]),
            load=float(busy_s[most] / self.step_s),
            busy_s=float(busy_s[most]),
        )

    @property
    def choice(self) -> str:
        """In few words, of stages of equally many sites with the same baseline in each."""
        share = (self.bubble_s / self.step_s, self.transfers_s / self.step_s)
        return (
            f"{len(self.stages)} stages of {self.stages[0].plan.cluster.sizes[0]} sites, {self.plan.provenance['baseline']} in "
            f"each, {self.plan.in_flight(0)} micro-batches in flight, bubble {share[0]:.0%}, activations {share[1]:.0%}"
        )


def fastest_pipeline(
    plan: Plan,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
) -> PipelineStep:
    """The fastest of all numbers of stages from 2 that divide the sites and leave each stage a layer with experts, of both
    placements inside, and of running further ahead while that pays; arguments as `pipeline_step`. Raises PipelineError where
    there is none."""
    sites = plan.cluster.sizes[0]
    candidates: list[tuple[PipelinePlan, list[Stage]]] = []
    why = f"{plan.cluster.name} has one site"
    for stages in [number for number in range(2, sites + 1) if sites % number == 0]:
        for inside in INSIDE[: 2 if stages < sites else 1]:
            try:
                pipeline = cut(plan, stages, inside)
                candidates.append((pipeline, time_stages(pipeline, routing, precision, conditions)))
            except PipelineError as error:
                why = str(error)
    found: PipelineStep | None = None
    for pipeline, made in sorted(candidates, key=lambda one: _busiest_s(one[1])):
        best_s = math.inf
        for ahead in AHEAD:
            # No schedule is faster than the busiest stage by itself.
            if found is not None and _busiest_s(made) >= found.step_s:
                break
            step = run_stages(running_ahead(pipeline, ahead), made, precision, conditions)
            if found is None or step.step_s < found.step_s:
                found = step
            if step.step_s > best_s * (1 - _GAIN):
                break
            best_s = step.step_s
    if found is None:
        raise PipelineError(f"pipeline: no number of stages from 2 fits; {why}")
    return found


def _busiest_s(stages: Sequence[Stage]) -> float:
    return max(stage.busy_s for stage in stages)


def pipeline_step(
    plan: Plan,
    stages: int,
    inside: Baseline = Baseline.EP,
    ahead: int = 1,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
) -> PipelineStep:
    """One step of the plan's workload on its cluster, with its codecs and popularity, in so many stages of sites in a row.

    inside: how a stage places its experts. ahead: as in ``AHEAD``. The rest, and errors, as `simulate_pipeline`; raises
    PipelineError also for stages that do not divide the sites or leave one without experts.
    """
    return simulate_pipeline(running_ahead(cut(plan, stages, inside), ahead), routing, precision, conditions)


def simulate_pipeline(
    pipeline: PipelinePlan,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
) -> PipelineStep:
    """One step of a pipeline plan. routing: (MoE layer, micro-batch) -> [G, T, K] expert ids of a step without stages; tokens
    keep their choices wherever they are computed. Raises PipelineError for links or computation that vary within a step."""
    return run_stages(pipeline, time_stages(pipeline, routing, precision, conditions), precision, conditions)


def running_ahead(pipeline: PipelinePlan, ahead: int) -> PipelinePlan:
    """The same stages in another order. Raises PipelineError for less than 1."""
    if ahead < 1:
        raise PipelineError(f"pipeline: ahead {ahead} must be at least 1, or stages wait for each other in a circle")
    return pipeline.model_copy(update={"ahead": ahead})


def time_stages(
    pipeline: PipelinePlan,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
) -> list[Stage]:
    """Each stage by itself; arguments and errors as `simulate_pipeline`."""
    settled = conditions or Conditions()
    if settled.of_links or settled.compute_jitter:
        raise PipelineError("pipeline: not simulated with links or computation that vary; leave out changes, trace and jitters")

    def simulate(one: Plan, choices: Routing | None) -> StepResult:
        return simulate_step(one, choices, precision, conditions)

    known: dict[str, Stage] = {}
    made: list[Stage] = []
    for number, one in enumerate(pipeline.plans):
        key = f"{number if routing is not None or settled.stragglers else ''} {alike(one)}"
        if key not in known:
            known[key] = timed(one, simulate, routing_of(pipeline, routing, number))
        made.append(replace(known[key], plan=one))
    return made


def run_stages(
    pipeline: PipelinePlan,
    stages: Sequence[Stage],
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
) -> PipelineStep:
    """The stages' passes in the plan's order, with activations between them."""
    conditions = conditions or Conditions()
    engine = Engine()
    fabric = Fabric(engine, no_symmetry(wiring(pipeline.cluster)), precision.tolerance, conditions, pipeline.schedule.streams)
    forth, back = (_between(fabric, pipeline, down) for down in (True, False))
    program, without_s = _Schedule(stages, forth, back, pipeline.ahead).build()
    capacity = fabric.network.link_capacity_bytes_per_s * conditions.goodput
    execution = execute(program, engine, fabric.network, iter([(0.0, capacity)]))
    return PipelineStep(
        plan=pipeline,
        stages=tuple(stages),
        program=program,
        execution=execution,
        without_transfers_s=without_s,
        activation_bytes=pipeline.micro_batches * sum(float(way.flows.transfers.size_bytes.sum()) for way in [*forth, *back]),
    )


class _Way(NamedTuple):
    """One micro-batch's transfers from a stage to another."""

    flows: Flows
    """Until the bytes have left, so that the next can follow."""
    latency_s: float
    """Of the longest."""


def _between(fabric: Fabric, pipeline: PipelinePlan, down: bool) -> list[_Way]:
    """What each stage but the last sends to the next, or gets back from it."""
    stage_of = np.zeros(pipeline.cluster.num_gpus, dtype=np.int64)
    for stage, ranks in enumerate(pipeline.ranks):
        stage_of[ranks] = stage
    found = []
    for stage in range(len(pipeline.stages) - 1):
        ways = pipeline.ways(stage)
        ends = (ways.source, ways.destination) if down else (ways.destination, ways.source)
        flows = fabric.transfers(*ends, ways.number.astype(np.float64) * pipeline.sequence_bytes)
        latency_s = flows.transfers.latency_s
        transfers = replace(flows.transfers, latency_s=np.zeros(latency_s.size))
        both = {"source": stage_of[flows.source], "destination": stage_of[flows.destination]}
        found.append(_Way(replace(flows, transfers=transfers, **both), float(latency_s.max())))
    return found


class _Schedule:
    """All passes and transfers, each after what it needs; and when the last stage would be done if transfers took no time."""

    def __init__(self, stages: Sequence[Stage], forth: list[_Way], back: list[_Way], ahead: int) -> None:
        self._stages, self._forth, self._back, self._ahead = stages, forth, back, ahead
        self._number = len(stages)
        self._program = Program(num_ranks=self._number)
        self._last: list[list[int]] = [[] for _ in stages]
        """Of each stage, the end of its last pass."""
        self._free_s = [0.0] * self._number
        """Of each stage, without transfers: when it has ended that."""
        self._arrived: dict[tuple[bool, int, int], int] = {}
        """(Whether activations, stage, micro-batch) -> the end of their transfer."""
        self._ready_s: dict[tuple[bool, int, int], float] = {}
        """The same without transfers."""
        self._sent: dict[tuple[bool, int], int] = {}
        """(Whether activations, from stage) -> the end of the transfer before."""

    def build(self) -> tuple[Program, float]:
        micro_batches = self._stages[0].forward_s.size
        for number, stage in enumerate(self._stages):
            if stage.gather_s:
                self._compute(number, GATHER, stage.gather_s, [], "")
        todo = [list(order_of_passes(number, self._number, micro_batches, self._ahead))[::-1] for number in range(self._number)]
        while any(todo):
            for number, passes in enumerate(todo):
                while passes and self._can(number, *passes[-1]):
                    self._pass(number, *passes.pop())
        for number, stage in enumerate(self._stages):
            for label, seconds in stage.last:
                self._compute(number, label, seconds, [], "")
        return self._program, max(self._free_s)

    def _needs(self, stage: int, forward: bool) -> bool:
        """Whether a pass waits for another stage's."""
        return stage > 0 if forward else stage < self._number - 1

    def _can(self, stage: int, forward: bool, micro_batch: int) -> bool:
        return not self._needs(stage, forward) or (forward, stage, micro_batch) in self._arrived

    def _pass(self, stage: int, forward: bool, micro_batch: int) -> None:
        key = forward, stage, micro_batch
        name = f"micro-batch {micro_batch}"
        after = []
        if self._needs(stage, forward):
            after = [self._arrived[key]]
            self._free_s[stage] = max(self._free_s[stage], self._ready_s[key])
        seconds = self._stages[stage].forward_s if forward else self._stages[stage].backward_s
        self._compute(stage, FORWARD if forward else BACKWARD, float(seconds[micro_batch]), after, name)
        other = stage + 1 if forward else stage - 1
        if 0 <= other < self._number:
            label, way = (ACTIVATIONS, self._forth[stage]) if forward else (GRADIENTS, self._back[other])
            before = self._sent.get((forward, stage))
            waits = self._last[stage] if before is None else [*self._last[stage], before]
            sent = self._sent[forward, stage] = self._program.exchange(label, way.flows, waits, name, level=0)
            on_the_way = np.where(np.arange(self._number) == other, way.latency_s, 0.0)
            self._arrived[forward, other, micro_batch] = self._program.compute(label, on_the_way, [sent], name)
            self._ready_s[forward, other, micro_batch] = self._free_s[stage]

    def _compute(self, stage: int, label: str, seconds: float, after: list[int], name: str) -> None:
        mine = np.where(np.arange(self._number) == stage, seconds, 0.0)
        self._last[stage] = [self._program.compute(label, mine, [*self._last[stage], *after], name)]
        self._free_s[stage] += seconds
