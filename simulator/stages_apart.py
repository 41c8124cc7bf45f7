"""Stages by themselves, put together: what a pipeline would take if its stages' exchanges and what passes between them did not
share links.

Every stage is simulated as a step of its own (``simulator.stages``), which gives the time of each of its passes, of its copies,
and of what follows its last micro-batch. A second simulation has a rank per stage that does these passes in their order, with
activations as flows over the cluster's links. It takes a fraction of the time of ``simulator.pipeline``, which simulates all
ranks together, and is what candidates are compared by. Where several sites make a stage it is too fast, because tokens, copies
and activations use the same links: by 1 to 13 % between measured regions (experiments/stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hybridep.pipeline import ACTIVATIONS, GRADIENTS, PipelinePlan
from simulator.collective import Flows, Program, execute
from simulator.conditions import Conditions
from simulator.engine import Engine
from simulator.fabric import Fabric
from simulator.fabric_file import FabricFile
from simulator.precision import EXACTLY, Precision
from simulator.stages import Stage, awaits, in_turn
from simulator.symmetry import no_symmetry
from simulator.wiring import wiring

GATHER, FORWARD, BACKWARD = "stage_gather", "stage_forward", "stage_backward"


def busiest_s(stages: Sequence[Stage]) -> float:
    """Of the stage that takes longest by itself."""
    return max(stage.busy_s for stage in stages)


def without_transfers_s(stages: Sequence[Stage], ahead: int) -> float:
    """What a step takes if activations move at once."""
    number, free_s = len(stages), [float(stage.gather_s) for stage in stages]
    ready_s: dict[tuple[bool, int, int], float] = {}

    def can(stage: int, forward: bool, micro_batch: int) -> bool:
        return not awaits(stage, forward, number) or (forward, stage, micro_batch) in ready_s

    for stage, forward, micro_batch in in_turn(number, stages[0].forward_s.size, ahead, can):
        seconds = stages[stage].forward_s if forward else stages[stage].backward_s
        begin_s = max(free_s[stage], ready_s.get((forward, stage, micro_batch), 0.0))
        free_s[stage] = begin_s + float(seconds[micro_batch])
        ready_s[forward, stage + 1 if forward else stage - 1, micro_batch] = free_s[stage]
    return max(sum((seconds for _, seconds in one.last), start=free) for one, free in zip(stages, free_s, strict=True))


def run_stages(
    pipeline: PipelinePlan,
    stages: Sequence[Stage],
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
    fabric: FabricFile | None = None,
) -> float:
    """Seconds of one step: the stages' passes in the plan's order, with activations between them."""
    conditions, wires, streams = conditions or Conditions(), wiring(pipeline.cluster, fabric), pipeline.schedule.streams
    engine = Engine()
    links = Fabric(engine, no_symmetry(wires), precision.tolerance, conditions, streams)
    forth, back = (_between(links, pipeline, down) for down in (True, False))
    program = _program(stages, forth, back, pipeline.ahead)
    capacity = links.network.link_capacity_bytes_per_s * conditions.goodput
    return execute(program, engine, links.network, iter([(0.0, capacity, False)])).makespan_s


class _Sending(NamedTuple):
    """One micro-batch's transfers from a stage to another."""

    flows: Flows
    """Until the bytes have left, so that the next can follow."""
    latency_s: float
    """Of the longest."""


def _between(fabric: Fabric, pipeline: PipelinePlan, down: bool) -> list[_Sending]:
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
        found.append(_Sending(replace(flows, transfers=transfers, **both), float(latency_s.max())))
    return found


def _program(stages: Sequence[Stage], forth: list[_Sending], back: list[_Sending], ahead: int) -> Program:
    """All passes and transfers, each after what it needs."""
    number = len(stages)
    program = Program(num_ranks=number)
    last: list[list[int]] = [[] for _ in stages]
    """Of each stage, the end of its last pass."""
    arrived: dict[tuple[bool, int, int], int] = {}
    """(Whether activations, stage, micro-batch) -> the end of their transfer."""
    sent: dict[tuple[bool, int], int] = {}
    """(Whether activations, from stage) -> the end of the transfer before."""

    def can(stage: int, forward: bool, micro_batch: int) -> bool:
        return not awaits(stage, forward, number) or (forward, stage, micro_batch) in arrived

    def compute(stage: int, label: str, seconds: float, after: Sequence[int] = (), name: str = "") -> None:
        mine = np.where(np.arange(number) == stage, seconds, 0.0)
        last[stage] = [program.compute(label, mine, [*last[stage], *after], name)]

    for stage, one in enumerate(stages):
        if one.gather_s:
            compute(stage, GATHER, one.gather_s)
    for stage, forward, micro_batch in in_turn(number, stages[0].forward_s.size, ahead, can):
        key, name = (forward, stage, micro_batch), f"micro-batch {micro_batch}"
        seconds = stages[stage].forward_s if forward else stages[stage].backward_s
        after = [arrived[key]] if key in arrived else []
        compute(stage, FORWARD if forward else BACKWARD, float(seconds[micro_batch]), after, name)
        other = stage + 1 if forward else stage - 1
        if 0 <= other < number:
            label, sending = (ACTIVATIONS, forth[stage]) if forward else (GRADIENTS, back[other])
            before = [sent[forward, stage]] if (forward, stage) in sent else []
            sent[forward, stage] = program.exchange(label, sending.flows, [*last[stage], *before], name, level=0)
            on_the_way = np.where(np.arange(number) == other, sending.latency_s, 0.0)
            arrived[forward, other, micro_batch] = program.compute(label, on_the_way, [sent[forward, stage]], name)
    for stage, one in enumerate(stages):
        for label, one_s in one.last:
            compute(stage, label, one_s)
    return program
