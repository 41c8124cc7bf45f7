"""Why this pipeline: what keeps its step from being shorter, and what its neighbours would take, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from hybridep.pipeline import PipelinePlan, pipeline_link_bytes, pipeline_link_s
from planner.constraints import Constraints
from planner.explain import NUM_LINKS, LinkLoad
from planner.stages.costs import Costed
from planner.stages.neighbours import Neighbour, Neighbours


@dataclass(frozen=True, kw_only=True)
class PipelineAlternative:
    """One pipeline that could be: its stages, time and memory."""

    name: str
    """``plan``, or what differs from the plan, as in ``stages 1 and 2 joined``."""
    step_s: float
    """Seconds of the expected step."""
    ratio: float
    """To the plan's step."""
    parts_s: dict[str, float]
    """Seconds of the step by kind; they add up to it."""
    step_usd: float | None
    """What a step costs; None where nothing has a price."""
    memory_bytes: float
    """Of the fullest rank."""
    fullest_rank: str
    fits: bool
    allowed: bool
    """Keeps the rules that the plan was made with."""
    plan: PipelinePlan
    """The pipeline, without a prediction."""

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, texts and numbers; of the pipeline which sites hold how many layers, and its order."""
        told = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "plan"}
        return told | {
            "micro_batches": self.plan.micro_batches,
            "ahead": self.plan.ahead,
            "stages": [{"sites": list(stage.sites), "num_layers": stage.num_layers} for stage in self.plan.stages],
        }


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """What one stage does in one step."""

    number: int
    busy_s: float
    """Its own passes, copies, reductions and optimizer, without a pause."""
    share: float
    """Of the step."""


@dataclass(frozen=True, kw_only=True)
class PipelineExplanation:
    """Everything that ``hybridep plan --stages --explain`` shows about a choice."""

    plan: PipelineAlternative
    alternatives: tuple[PipelineAlternative, ...]
    """One forward less and more ahead; about half and twice as many micro-batches; activations kept where some compute again;
    tokens that travel, and copies, inside all stages; a layer of the busiest stage in one beside it; two neighbouring stages
    exchanged, or joined; the largest stage in two. Of each kind the best that fits and keeps the rules, and one that does not,
    where it would be better than the plan."""
    better: tuple[str, ...]
    """Names of those that fit, keep the rules, and are expected to be better than the plan by more than ``WORTH``: faster, or
    cheaper where dollars were to be few."""
    binds: str
    """What keeps the step from being shorter: ``memory of <rank>``, which an alternative lacks that would be better by more than
    ``WORTH``; else the name of the busiest link, or ``stage <number>``, whichever is busy for longer."""
    links: tuple[LinkLoad, ...]
    """The busiest first."""
    stage: StageLoad
    """The busiest one."""
    memory_parts_bytes: dict[str, float]
    """Of the fullest rank."""
    fullest_rank: str
    fullest_stage: int
    memory_capacity_bytes: float

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, texts and numbers."""
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        return told | {
            "plan": self.plan.to_json(),
            "alternatives": [one.to_json() for one in self.alternatives],
            "links": [asdict(one) for one in self.links],
            "stage": asdict(self.stage),
        }


def explain_pipeline(plan: PipelinePlan, constraints: Constraints | None = None) -> PipelineExplanation:
    """What binds a pipeline, and what its neighbours would take (``planner.stages.neighbours``), as they are expected.
    ``constraints``: rules that it was made with. Raises InfeasibleError for rules that no pipeline can keep."""
    near = Neighbours(plan, constraints)
    found = near.itself.costed
    chosen = _alternative(near.itself, found)
    others = near.found()
    better = [one for one in others if near.is_better(one)]
    blocked = [one for one in better if one.allowed and not one.costed.fits]
    links, number = _busiest_links(found), found.times.busiest_stage
    stage = StageLoad(number=number, busy_s=found.times.work_s, share=found.times.work_s / found.times.step_s)
    busiest = links[0].name if links[0].busy_s > stage.busy_s else f"stage {number}"
    fullest = max(range(len(plan.stages)), key=lambda stage: _fullness(found, stage))
    memory = found.inside[fullest].memory
    return PipelineExplanation(
        plan=chosen,
        alternatives=tuple(_alternative(one, found) for one in others),
        better=tuple(one.name for one in better if one.possible),
        binds=f"memory of {min(blocked, key=near.worth).costed.fullest.fullest_name}" if blocked else busiest,
        links=links,
        stage=stage,
        memory_parts_bytes=memory.parts_bytes,
        fullest_rank=memory.fullest_name,
        fullest_stage=fullest,
        memory_capacity_bytes=memory.capacity_bytes,
    )


def _alternative(one: Neighbour, plan: Costed) -> PipelineAlternative:
    found = one.costed
    return PipelineAlternative(
        name=one.name,
        step_s=found.times.step_s,
        ratio=found.times.step_s / plan.times.step_s,
        parts_s=found.parts_s,
        step_usd=found.step_usd if one.plan.cluster.has_prices else None,
        memory_bytes=found.fullest.fullest_bytes,
        fullest_rank=found.fullest.fullest_name,
        fits=found.fits,
        allowed=one.allowed,
        plan=one.plan,
    )


def _busiest_links(found: Costed) -> tuple[LinkLoad, ...]:
    plan, step_s = found.plan, found.times.step_s
    loads, busy_s = pipeline_link_bytes(plan), pipeline_link_s(plan)
    return tuple(
        LinkLoad(
            name=plan.cluster.link_table[link].name,
            total_bytes=float(loads[link]),
            busy_s=float(busy_s[link]),
            share=float(busy_s[link]) / step_s,
        )
        for link in np.argsort(-busy_s, kind="stable")[:NUM_LINKS]
    )


def _fullness(found: Costed, stage: int) -> float:
    memory = found.inside[stage].memory
    return memory.fullest_bytes / memory.capacity_bytes
