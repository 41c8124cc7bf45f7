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

from hybridep.pipeline import ACTIVATIONS, GRADIENTS, PipelinePlan, order_of_passes
from simulator.collective import Flows, Program, execute
from simulator.conditions import Conditions
from simulator.engine import Engine
from simulator.fabric import Fabric
from simulator.network import Transfers
from simulator.precision import EXACTLY, Precision
from simulator.stages import Stage
from simulator.symmetry import no_symmetry
from simulator.wiring import wiring

GATHER, FORWARD, BACKWARD = "stage_gather", "stage_forward", "stage_backward"


def busiest_s(stages: Sequence[Stage]) -> float:
    """Of the stage that takes longest by itself."""
    return max(stage.busy_s for stage in stages)


def without_transfers_s(stages: Sequence[Stage], ahead: int) -> float:
    """What a step takes if activations move at once."""
    none = Flows(
        source=np.zeros(0, dtype=np.int64),
        destination=np.zeros(0, dtype=np.int64),
        transfers=Transfers(links=np.zeros((0, 1), dtype=np.int32), latency_s=np.zeros(0), size_bytes=np.zeros(0)),
    )
    nothing = [_Sending(none, 0.0)] * (len(stages) - 1)
    return _Schedule(stages, nothing, nothing, ahead).build()[1]


def run_stages(
    pipeline: PipelinePlan,
    stages: Sequence[Stage],
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
) -> float:
    """Seconds of one step: the stages' passes in the plan's order, with activations between them."""
    conditions = conditions or Conditions()
    engine = Engine()
    fabric = Fabric(engine, no_symmetry(wiring(pipeline.cluster)), precision.tolerance, conditions, pipeline.schedule.streams)
    forth, back = (_between(fabric, pipeline, down) for down in (True, False))
    program, _ = _Schedule(stages, forth, back, pipeline.ahead).build()
    capacity = fabric.network.link_capacity_bytes_per_s * conditions.goodput
    return execute(program, engine, fabric.network, iter([(0.0, capacity, False)])).makespan_s


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


class _Schedule:
    """All passes and transfers, each after what it needs; and when the last stage would be done if transfers took no time."""

    def __init__(self, stages: Sequence[Stage], forth: list[_Sending], back: list[_Sending], ahead: int) -> None:
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
            label, sending = (ACTIVATIONS, self._forth[stage]) if forward else (GRADIENTS, self._back[other])
            before = self._sent.get((forward, stage))
            waits = self._last[stage] if before is None else [*self._last[stage], before]
            sent = self._sent[forward, stage] = self._program.exchange(label, sending.flows, waits, name, level=0)
            on_the_way = np.where(np.arange(self._number) == other, sending.latency_s, 0.0)
            self._arrived[forward, other, micro_batch] = self._program.compute(label, on_the_way, [sent], name)
            self._ready_s[forward, other, micro_batch] = self._free_s[stage]

    def _compute(self, stage: int, label: str, seconds: float, after: list[int], name: str) -> None:
        mine = np.where(np.arange(self._number) == stage, seconds, 0.0)
        self._last[stage] = [self._program.compute(label, mine, [*self._last[stage], *after], name)]
        self._free_s[stage] += seconds
