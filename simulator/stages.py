"""Pipeline stages: sites in a row that hold some of a model's layers, and how long they take over a micro-batch.

A stage is a plan of its own, for its sites and its layers, and is simulated as any other step is. Its passes over the
micro-batches are read off that simulation one after the other, from when the last rank has ended one to when the last rank
has ended the next; they add up to the simulated step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hybridep.baselines import Baseline, baseline_plan
from hybridep.config import build
from hybridep.plan import Plan, Schedule
from hybridep.routing import Routing
from hybridep.traffic import FloatArray, split_sizes
from hybridep.workload import Model, Workload
from simulator.errors import PipelineError
from simulator.many_steps import only_sites
from simulator.step import StepResult
from simulator.training import BACKWARD, HEAD, PRE_EXPERT

SimulateStage = Callable[[Plan, Routing | None], StepResult]
"""Simulates one step of a plan, by what its tokens choose where that is given."""

_NO_VOCABULARY = 2
"""The smallest: of a stage without embeddings. Its projection is some 1e-4 of a layer's work."""

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


def cut(plan: Plan, stages: int, inside: Baseline) -> list[Plan]:
    """The plan's cluster and model in so many stages of equally many sites in a row, with `inside` as placement in each.

    Layers are split as evenly as they can be, the first stages having one more. The first holds the embedding, the last the
    output projection (tied ones are held by both). A stage has `stages` times the micro-batches, so that the global batch is the
    same.
    Raises PipelineError where sites or layers cannot be split so, or where sites take unequal shares of tokens or experts.
    """
    cluster, model = plan.cluster, plan.workload.model
    sites = cluster.sizes[0]
    if stages < 1 or sites % stages:
        raise PipelineError(f"pipeline: {stages} stages must divide the {sites} sites of {cluster.name}")
    if np.ptp(cluster.token_weights) or np.ptp(cluster.home_weights):
        raise PipelineError(
            f"pipeline: sites of {cluster.name} have unequal shares of tokens or experts, but every stage computes all tokens "
            "and holds all experts of its layers; leave out sites.*.tokens and sites.*.experts"
        )
    names = [cluster.site_name(site) for site in range(sites)]
    training = plan.workload.training.model_copy(update={"micro_batches": plan.workload.training.micro_batches * stages})
    made, first_layer, per_stage = [], 0, sites // stages
    for number, layers in enumerate(split_sizes(model.num_layers, stages)):
        part = _part(model, first_layer, layers, stages)
        workload = Workload(name=f"{plan.workload.name}, stage {number} of {stages}", model=part, training=training)
        first_moe = max(first_layer - model.num_dense_layers, 0)
        mine = names[number * per_stage : (number + 1) * per_stage]
        made.append(
            baseline_plan(
                cluster if stages == 1 else only_sites(cluster, mine),
                workload,
                inside,
                schedule=Schedule(streams=plan.schedule.streams),
                codecs=plan.codecs,
                popularity=plan.popularity[first_moe : first_moe + part.num_moe_layers],
            )
        )
        first_layer += layers
    return made


def _part(model: Model, first_layer: int, layers: int, stages: int) -> Model:
    """A stage's layers. Raises PipelineError where none has experts."""
    dense = min(max(model.num_dense_layers - first_layer, 0), layers)
    if dense >= layers:
        raise PipelineError(
            f"pipeline: a stage of {stages} would have {layers} layers, {dense} of them without experts, of the model's "
            f"{model.num_layers} and {model.num_dense_layers}; each needs one with experts"
        )
    update: dict[str, object] = {"num_layers": layers, "num_dense_layers": dense}
    if stages > 1:
        at_an_end = first_layer == 0 or first_layer + layers == model.num_layers
        update |= {"vocab_size": model.vocab_size if at_an_end else _NO_VOCABULARY, "tie_embeddings": True}
    return build(Model, model.model_dump(mode="json") | update, "stage")


def timed(plan: Plan, simulate: SimulateStage, routing: Routing | None = None, *, embeds_only: bool = False) -> Stage:
    """A stage by itself. Without `routing` three micro-batches are simulated, and the one in the middle stands for all that are
    neither the first nor the last. `embeds_only`: its vocabulary is an embedding, without a projection to compute."""
    micro_batches = plan.workload.training.micro_batches
    simulated = micro_batches if routing is not None else min(micro_batches, _KINDS)
    passes, last = _passes(simulate(_with(plan, simulated, without_vocabulary=embeds_only), routing))
    if embeds_only:
        _, last = _passes(simulate(_with(plan, 1), _first_of(routing)))
    middle = [1] * (micro_batches - simulated)
    order = [0, *middle, *range(1, simulated)] if middle else list(range(simulated))
    forward_s, backward_s = passes[order, 0], passes[order, 1]
    gather_s = return_s = 0.0
    # Recorded choices make every micro-batch another: what the copies take is then not told apart.
    if routing is None and micro_batches > 1:
        gather_s, return_s = _more(forward_s[0], forward_s[1]), _more(backward_s[-1], backward_s[-2])
    forward_s[0] -= gather_s
    backward_s[-1] -= return_s
    after = ((RETURN, return_s), *last) if return_s else last
    return Stage(plan=plan, gather_s=gather_s, forward_s=forward_s, backward_s=backward_s, last=after)


def _more(seconds: float, others_s: float) -> float:
    """Than another pass takes; nothing where only rounding differs."""
    return float(seconds - others_s) if seconds - others_s > _ROUNDING * seconds else 0.0


def alike(plan: Plan) -> str:
    """The same for stages that must take the same time, whatever their sites are called."""
    data = plan.model_dump(mode="json", exclude={"provenance"})
    data["cluster"]["name"] = data["workload"]["name"] = ""
    if not (plan.cluster.links or plan.cluster.trunks):
        for site in data["cluster"]["sites"]:
            site["name"] = ""
    return str(data)


def routing_of(plan: Plan, routing: Routing | None, stages: int, number: int) -> Routing | None:
    """What a stage's tokens choose: its micro-batches are those of all ranks at the same place of a stage, one stage's ranks
    after the other's. The plan is the whole one."""
    if routing is None:
        return None
    model, micro_batches = plan.workload.model, plan.workload.training.micro_batches
    layers = split_sizes(model.num_layers, stages)
    first = max(sum(layers[:number]) - model.num_dense_layers, 0)
    end = sum(layers[: number + 1]) - model.num_dense_layers
    ranks = plan.cluster.num_gpus // stages
    return {
        (layer - first, group * micro_batches + micro_batch): routing[layer, micro_batch][group * ranks : (group + 1) * ranks]
        for layer in range(first, end)
        for group in range(stages)
        for micro_batch in range(micro_batches)
    }


def _with(plan: Plan, micro_batches: int, *, without_vocabulary: bool = False) -> Plan:
    workload = plan.workload
    training = workload.training.model_copy(update={"micro_batches": micro_batches})
    model = workload.model.model_copy(update={"vocab_size": _NO_VOCABULARY} if without_vocabulary else {})
    return build(
        Plan,
        plan.model_dump(mode="json")
        | {"workload": Workload(name=workload.name, model=model, training=training).model_dump(mode="json")},
        "stage",
    )


def _first_of(routing: Routing | None) -> Routing | None:
    return None if routing is None else {key: chosen for key, chosen in routing.items() if key[1] == 0}


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
