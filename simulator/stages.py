"""Pipeline stages: sites that hold some of a model's layers, and how long they take over a micro-batch.

A stage is a plan of its own, for its sites and its layers, and is simulated as any other step is. Its passes over the
micro-batches are read off that simulation one after the other, from when the last rank has ended one to when the last rank
has ended the next; they add up to the simulated step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.baselines import Baseline, baseline_group
from hybridep.config import build
from hybridep.errors import ConfigError
from hybridep.pipeline import PipelinePlan, StagePlan, check_homes, order_of_passes, stage_workload
from hybridep.plan import Plan, Schedule
from hybridep.routing import Routing
from hybridep.shares import owners
from hybridep.topology import by_themselves
from hybridep.traffic import split_sizes
from hybridep.workload import Workload
from simulator.conditions import Conditions
from simulator.errors import PipelineError
from simulator.fabric_file import FabricFile
from simulator.precision import EXACTLY, Precision
from simulator.routes import with_fabric
from simulator.step import StepResult, simulate_step
from simulator.training import BACKWARD, HEAD, PRE_EXPERT

SimulateStage = Callable[[Plan, Routing | None], StepResult]
"""Simulates one step of a plan, by what its tokens choose where that is given."""

_ROUNDING = 1e-9

RETURN = "stage_return"
"""Of copies' gradients, after a stage's last micro-batch."""

_KINDS = 3
"""Micro-batches that differ where nothing is recorded: the first, whose copies come, those between, and the last."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage's sites and layers, and the times of one step of it by itself."""

    plan: Plan
    """Of its share of the model on its sites, with as many micro-batches as it handles."""
    gather_s: float
    """For copies, before its first micro-batch and waiting for no other stage."""
    forward_s: FloatArray
    """[micro-batches]"""
    backward_s: FloatArray
    """[micro-batches]"""
    last: tuple[tuple[str, float], ...]
    """Labels and seconds of what follows its last micro-batch and no other stage waits for: copies' gradients, as far as they
    show, dense gradients, optimizer."""

    @property
    def busy_s(self) -> float:
        """All of it, without a pause."""
        return float(self.gather_s + self.forward_s.sum() + self.backward_s.sum() + sum(seconds for _, seconds in self.last))


def cut(plan: Plan, stages: int, inside: Baseline) -> PipelinePlan:
    """The plan's cluster and model in so many stages of equally many sites in a row, with `inside` as placement in each.

    Layers are split as evenly as they can be, the first stages having one more. There are `stages` times the micro-batches, so
    that the global batch is the same.
    Raises PipelineError where sites or layers cannot be split so.
    """
    cluster, workload = plan.cluster, plan.workload
    sites = cluster.sizes[0]
    if stages < 1 or sites % stages:
        raise PipelineError(f"pipeline: {stages} stages must divide the {sites} sites of {cluster.name}")
    names = cluster.site_names
    made, first, per_stage = [], 0, sites // stages
    try:
        for number, layers in enumerate(split_sizes(workload.model.num_layers, stages)):
            members = names[number * per_stage : (number + 1) * per_stage]
            check_homes(cluster, number, range(number * per_stage, (number + 1) * per_stage))
            own = by_themselves(cluster, members)
            part = stage_workload(
                workload,
                cluster,
                number=number,
                first_layer=first,
                num_layers=layers,
                sites=own,
                micro_batches=workload.training.micro_batches * stages,
            )
            group = baseline_group(own, part, inside)
            made.append(StagePlan(sites=members, num_layers=layers, layers=(group,)))
            first += layers
        data = {
            "cluster": cluster,
            "workload": workload,
            "micro_batches": workload.training.micro_batches * stages,
            "stages": made,
            "popularity": plan.popularity,
            "codecs": plan.codecs,
            "schedule": Schedule(streams=plan.schedule.streams),
            "provenance": {"baseline": inside.value},
        }
        return build(PipelinePlan, data, "pipeline")
    except (ConfigError, ValueError) as error:
        raise PipelineError(f"pipeline: {error}") from None


def timed(plan: Plan, simulate: SimulateStage, routing: Routing | None = None) -> Stage:
    """A stage by itself. Without `routing` three micro-batches are simulated at most, and the one in the middle stands for all
    that are neither the first nor the last; and two at least, to tell what copies take from what every micro-batch does. With it
    every micro-batch is another, and copies take what they take without."""
    micro_batches = plan.workload.training.micro_batches
    passes, last = _passes(simulate(_with(plan, min(max(micro_batches, 2), _KINDS)), None))
    gather_s, return_s = _more(passes[0, 0], passes[1, 0]), _more(passes[-1, 1], passes[-2, 1])
    order = [0, *[1] * max(micro_batches - 2, 0), len(passes) - 1][:micro_batches]
    if routing is not None:
        passes, last = _passes(simulate(plan, routing))
        gather_s, return_s, order = min(gather_s, passes[0, 0]), min(return_s, passes[-1, 1]), [*range(micro_batches)]
    passes[0, 0] -= gather_s
    passes[-1, 1] -= return_s
    after = ((RETURN, return_s), *last) if return_s else last
    return Stage(plan=plan, gather_s=gather_s, forward_s=passes[order, 0], backward_s=passes[order, 1], last=after)


def time_stages(
    pipeline: PipelinePlan,
    routing: Routing | None = None,
    precision: Precision = EXACTLY,
    conditions: Conditions | None = None,
    fabric: FabricFile | None = None,
) -> list[Stage]:
    """Each stage by itself, as long as links and computation do not vary; arguments as `simulator.pipeline.simulate_pipeline`."""
    settled, inside = (conditions or Conditions()).settled, None
    if fabric is not None:
        # A stage's sites are not all that a fabric joins, but its trunks say what they carry for which of them.
        inside = FabricFile(name=fabric.name, inside=fabric.inside)
        if fabric.wan is not None:
            pipeline = pipeline.at_rates(with_fabric(pipeline.cluster, fabric.wan))

    def simulate(one: Plan, choices: Routing | None) -> StepResult:
        return simulate_step(one, choices, precision, settled, fabric=inside)

    known: dict[str, Stage] = {}
    made: list[Stage] = []
    for number, one in enumerate(pipeline.plans):
        key = f"{number if routing is not None or settled.stragglers else ''} {one.alike}"
        if key not in known:
            known[key] = timed(one, simulate, routing_of(pipeline, routing, number))
        made.append(replace(known[key], plan=one))
    return made


def awaits(stage: int, forward: bool, stages: int) -> bool:
    """Whether a pass waits for what another stage sends."""
    return stage > 0 if forward else stage < stages - 1


def in_turn(
    stages: int, micro_batches: int, ahead: int, can: Callable[[int, bool, int], bool]
) -> Iterator[tuple[int, bool, int]]:
    """(stage, whether forward, micro-batch) of all passes: each stage's in its order, and each as soon as it ``can`` be. Raises
    PipelineError where none can."""
    todo = [list(order_of_passes(stage, stages, micro_batches, ahead))[::-1] for stage in range(stages)]
    while any(todo):
        before = sum(map(len, todo))
        for stage, left in enumerate(todo):
            while left and can(stage, *left[-1]):
                yield stage, *left.pop()
        if sum(map(len, todo)) == before:
            raise PipelineError("pipeline: its stages wait for each other in a circle")


def _more(seconds: float, others_s: float) -> float:
    """Than another pass takes; nothing where only rounding differs."""
    return float(seconds - others_s) if seconds - others_s > _ROUNDING * seconds else 0.0


def routing_of(pipeline: PipelinePlan, routing: Routing | None, number: int) -> Routing | None:
    """What a stage's tokens choose, where the whole cluster's ranks choose these without stages: the global batch's sequences are
    the same, in the same order."""
    if routing is None:
        return None
    stage, whole = pipeline.plans[number], pipeline.workload
    part, length, batches = stage.workload.model.part, whole.training.sequence_length, pipeline.micro_batches
    assert part is not None
    drawn, own = owners(pipeline.cluster, whole), owners(stage.cluster, stage.workload)
    shape = (stage.cluster.num_gpus, int(own[1].max()) + 1, length)
    found: dict[tuple[int, int], IntArray] = {}
    for layer in range(stage.workload.model.num_moe_layers):
        every = [routing[part.first_moe_layer + layer, batch] for batch in range(whole.training.micro_batches)]
        chosen = np.concatenate([one.reshape(len(one), -1, length, one.shape[-1])[drawn] for one in every])
        for batch, mine in enumerate(chosen.reshape(batches, -1, length, chosen.shape[-1])):
            choices = np.full((*shape, chosen.shape[-1]), -1, dtype=chosen.dtype)
            choices[own] = mine
            found[layer, batch] = choices.reshape(shape[0], -1, chosen.shape[-1])
    return found


def _with(plan: Plan, micro_batches: int) -> Plan:
    workload = plan.workload
    training = workload.training.model_copy(update={"micro_batches": micro_batches})
    few = Workload(name=workload.name, model=workload.model, training=training)
    return build(Plan, plan.model_dump(mode="json") | {"workload": few.model_dump(mode="json")}, "stage")


def _passes(step: StepResult) -> tuple[FloatArray, tuple[tuple[str, float], ...]]:
    """[micro-batches, 2] seconds of forward and backward passes, their part of the head included; and what follows them."""
    labels = [operation.label for operation in step.program.operations]
    layers = step.plan.workload.model.num_moe_layers
    forward = [place for place, label in enumerate(labels) if label == HEAD]
    # A block's backward ends with what comes before its experts.
    backward = [place for place, label in enumerate(labels) if label == PRE_EXPERT + BACKWARD][layers - 1 :: layers]
    ends_s = np.maximum.accumulate(step.execution.end_s.max(axis=1))
    both = np.stack([ends_s[forward], ends_s[backward]], axis=1)
    passes = np.diff(both.ravel(), prepend=0.0).reshape(both.shape)
    after = range(backward[-1] + 1, len(labels))
    return passes, tuple((labels[place], float(ends_s[place] - ends_s[place - 1])) for place in after)
