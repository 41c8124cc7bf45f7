"""Two plans for the same work side by side, of which one or both are in stages, or one leaves sites out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hybridep.pipeline import AnyPlan, PipelinePlan
from planner.difference import scaled, switch_at
from planner.evaluate import evaluate, expected_s
from planner.stages.costs import costed, expected_over, predicted

HALVINGS = 10
"""Of a factor of two, which find where plans take equally long to a thousandth."""


@dataclass(frozen=True, kw_only=True)
class SiteLayers:
    """What a site computes."""

    stage: int | None
    """None in a plan without stages."""
    first_layer: int
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class PipelineDifference:
    """Pairs are (first plan, second plan)."""

    step_s: tuple[float, float]
    """Seconds of the expected step."""
    parts_s: dict[str, tuple[float | None, float | None]]
    """Seconds by kind, the largest first, without kinds that take none; None where a plan has no such part. Those of a plan
    without stages add up to its cost, of which its expected step may be less."""
    wan_bytes: tuple[float, float]
    """Between sites, of a step."""
    memory_bytes: tuple[float, float]
    """Of the fullest rank."""
    sites: tuple[int, int]
    """How many take part."""
    stages: tuple[int, int]
    """How many; one where there are none."""
    micro_batches: tuple[int, int]
    """In which the same global batch is computed."""
    ahead: tuple[int | None, int | None]
    """Forwards that a stage runs ahead for each one behind it; None without stages."""
    layers_moved: int
    """Layers that are at other sites in the second plan."""
    sites_moved: dict[str, tuple[SiteLayers | None, SiteLayers | None]]
    """Sites that have other layers in the second plan, in the cluster's order; None where a plan leaves the site out."""
    switch_at: float | None
    """Factor on all bandwidths between sites, nearest to 1, at which the two take equally long, to a thousandth: beyond it the
    plan that is slower now is the faster one. None where one wins at every factor from 1/64 to 64."""

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, texts and numbers."""
        return asdict(self)


def compare_pipelines(first: AnyPlan, second: AnyPlan) -> PipelineDifference:
    """Both as they are expected today; they may be in stages or not, and one may leave out sites that the other one has. Raises
    PlanMismatchError when they are for different clusters or workloads."""
    few, many = sorted((first, second), key=lambda plan: len(plan.cluster.site_names))
    few.require(many.cluster, many.workload, "the first plan" if few is first else "the second plan")
    a, b = _figures(first), _figures(second)
    parts = {name: (a.parts_s.get(name), b.parts_s.get(name)) for name in {**a.parts_s, **b.parts_s}}
    parts = {name: both for name, both in parts.items() if any(both)}
    held = _held(first), _held(second)
    moved = {name: (held[0].get(name), held[1].get(name)) for name in many.cluster.site_names}
    return PipelineDifference(
        step_s=(a.step_s, b.step_s),
        parts_s=dict(sorted(parts.items(), key=lambda item: -max(value or 0.0 for value in item[1]))),
        wan_bytes=(a.wan_bytes, b.wan_bytes),
        memory_bytes=(a.memory_bytes, b.memory_bytes),
        sites=(len(held[0]), len(held[1])),
        stages=(_stages(first), _stages(second)),
        micro_batches=(_micro_batches(first), _micro_batches(second)),
        ahead=(_ahead(first), _ahead(second)),
        layers_moved=sum(
            _sites_of(held[0], layer) != _sites_of(held[1], layer) for layer in range(first.workload.model.num_layers)
        ),
        sites_moved={name: both for name, both in moved.items() if _layers(both[0]) != _layers(both[1])},
        switch_at=switch_at(partial(expected_at, first), partial(expected_at, second), HALVINGS),
    )


def expected_at(plan: AnyPlan, factor: float) -> float:
    """Seconds of the expected step with all bandwidths between sites times ``factor``."""
    return expected_over(plan, scaled(plan.cluster, factor))


@dataclass(frozen=True, kw_only=True)
class _Figures:
    step_s: float
    parts_s: dict[str, float]
    wan_bytes: float
    memory_bytes: float


def _figures(plan: AnyPlan) -> _Figures:
    if isinstance(plan, PipelinePlan):
        found = costed(plan)
        wan_bytes = predicted(found, {}).wan_bytes
        return _Figures(
            step_s=found.times.step_s, parts_s=found.parts_s, wan_bytes=wan_bytes, memory_bytes=found.fullest.fullest_bytes
        )
    cost, memory = evaluate(plan)
    return _Figures(
        step_s=expected_s(plan, cost), parts_s=cost.parts_s, wan_bytes=cost.wan_bytes, memory_bytes=memory.fullest_bytes
    )


def _held(plan: AnyPlan) -> dict[str, SiteLayers]:
    """What each site of the plan computes."""
    if not isinstance(plan, PipelinePlan):
        whole = SiteLayers(stage=None, first_layer=0, num_layers=plan.workload.model.num_layers)
        return dict.fromkeys(plan.cluster.site_names, whole)
    found, first = dict[str, SiteLayers](), 0
    for number, stage in enumerate(plan.stages):
        own = SiteLayers(stage=number, first_layer=first, num_layers=stage.num_layers)
        found |= dict.fromkeys(stage.sites, own)
        first += stage.num_layers
    return found


def _layers(held: SiteLayers | None) -> range | None:
    return None if held is None else range(held.first_layer, held.first_layer + held.num_layers)


def _sites_of(held: dict[str, SiteLayers], layer: int) -> set[str]:
    return {name for name, one in held.items() if one.first_layer <= layer < one.first_layer + one.num_layers}


def _stages(plan: AnyPlan) -> int:
    return len(plan.stages) if isinstance(plan, PipelinePlan) else 1


def _micro_batches(plan: AnyPlan) -> int:
    return plan.micro_batches if isinstance(plan, PipelinePlan) else plan.workload.training.micro_batches


def _ahead(plan: AnyPlan) -> int | None:
    return plan.ahead if isinstance(plan, PipelinePlan) else None
