"""What a pipeline plan costs: seconds of a step, bytes between sites, memory, and what no pipeline is below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridep.baselines import baseline_like
from hybridep.pipeline import AnyPlan, PipelinePlan, between_link_bytes, pipeline_link_bytes
from hybridep.plan import Prediction
from hybridep.topology import Cluster
from hybridep.traffic import link_bytes, step_traffic
from planner.cost import StepCost
from planner.evaluate import MOST_RANKS, evaluate, expected_s
from planner.goal import Worth
from planner.memory import MemoryUse, memory_use
from planner.plans import BASELINES, dollars, seconds
from planner.price import egress_usd, step_usd
from planner.stages.inside import Inside, Room, Store, placed, with_fewest_again
from planner.stages.schedule import PipelineTimes, with_coding

WORK, BUBBLE, ACTIVATIONS = "stage_work", "bubble", "activations"
"""Parts of a step: the busiest stage, what waiting for other stages adds, and what the way between stages adds."""


WORTH = 1e-3
"""Share of a step up to which another pipeline is not worth a change: what is expected errs by more."""


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A pipeline plan and what it is expected to take."""

    plan: PipelinePlan
    inside: tuple[Inside, ...]
    times: PipelineTimes
    egress_usd: float
    """Dollars of a step for what leaves sites, inside stages and between them."""

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of a step by kind; they add up to it."""
        return {WORK: self.times.work_s, BUBBLE: self.times.bubble_s, ACTIVATIONS: self.times.activations_s}

    @property
    def step_usd(self) -> float:
        """Dollars of a step: what leaves sites, and all ranks for as long as it takes."""
        return step_usd(self.plan.cluster.rent_usd_per_s, self.egress_usd, self.times.step_s)

    @property
    def fits(self) -> bool:
        """Every rank has room."""
        return all(one.memory.fits for one in self.inside)

    @property
    def fullest(self) -> MemoryUse:
        """Memory of the stage with the rank that needs most of what it has."""
        return max((one.memory for one in self.inside), key=lambda use: use.fullest_bytes / use.capacity_bytes)


def is_better(one: Worth, other: Worth) -> bool:
    """Whether one pipeline is better than another by more than ``WORTH``."""
    (over, value), (others_over, others_value) = one, other
    return over < others_over or (over == others_over and value < others_value * (1 - WORTH))


def rooms(plan: PipelinePlan) -> list[Room]:
    """[stages]: what each keeps: activations, what is announced to the stages before and after, and what is on its way."""
    found = []
    for number in range(len(plan.stages)):
        sides = (number > 0) + (number < len(plan.stages) - 1)
        rows_bytes = int(plan.sequences(number).max()) * plan.sequence_bytes
        found.append(Room(in_flight=plan.in_flight(number), beside_bytes=float(sides * (plan.ahead + 2) * rows_bytes)))
    return found


def costed(plan: PipelinePlan, inside: Sequence[Inside] | None = None, store: Store | None = None) -> Costed:
    """What a pipeline plan costs; ``inside``: its stages' own costs, where they are known; ``store``: what was found of stages
    before, and is now."""
    if inside is None:
        inside = [placed(stage, stage.layers, room, store) for stage, room in zip(plan.plans, rooms(plan), strict=True)]
    most = [int(plan.sequences(stage).max()) for stage in range(len(plan.stages))]
    stages = with_coding(plan.activation_speed, plan.workload, most, [one.times for one in inside])
    times = PipelineTimes(plan=plan, stages=stages)
    return Costed(plan=plan, inside=tuple(inside), times=times, egress_usd=pipeline_egress_usd(plan, inside))


def least_again(found: Costed, store: Store) -> Costed:
    """With no more layers that compute again than it takes to fit. ``store``: what was found of stages before."""
    inside = [with_fewest_again(stage, one, store) for stage, one in zip(found.plan.plans, found.inside, strict=True)]
    return costed(found.plan.with_layers([one.layers for one in inside]), inside)


def expected_over(plan: AnyPlan, cluster: Cluster, store: Store | None = None) -> float:
    """Seconds of the expected step of a plan over the same sites at a cluster's rates. ``store`` as in `costed`."""
    if isinstance(plan, PipelinePlan):
        return costed(plan.at_rates(cluster), store=store).times.step_s
    return expected_s(plan.model_copy(update={"cluster": cluster}))


def fullest_of(plan: AnyPlan) -> MemoryUse | None:
    """What the fullest rank keeps, in stages or not, whether it has room or not; None for plans of over ``MOST_RANKS`` together,
    whose arrays would take gigabytes."""
    together = plan.plans if isinstance(plan, PipelinePlan) else (plan,)
    if max(one.cluster.num_gpus for one in together) > MOST_RANKS:
        return None
    return costed(plan).fullest if isinstance(plan, PipelinePlan) else memory_use(plan)


def pipeline_egress_usd(plan: PipelinePlan, inside: Sequence[Inside]) -> float:
    """Dollars of a step for what leaves sites, inside stages and between them."""
    if not plan.cluster.has_egress_prices:
        return 0.0
    return sum(one.egress_usd for one in inside) + egress_usd(plan.cluster, between_link_bytes(plan))


def simulated_usd(plan: AnyPlan, step_s: float) -> float:
    """What a step costs that takes so long."""
    cluster = plan.cluster
    moved = pipeline_link_bytes(plan) if isinstance(plan, PipelinePlan) else link_bytes(cluster, step_traffic(plan))
    return step_usd(cluster.rent_usd_per_s, egress_usd(cluster, moved), step_s)


def predicted(found: Costed, baselines: Mapping[str, float], known: dict[str, StepCost] | None = None) -> Prediction:
    """What is expected of one step; ``baselines``: seconds of those of others; ``known``: what was found of stages before, by
    `Plan.alike`, and is now."""
    plan, times, known = found.plan, found.times, {} if known is None else known
    for stage in plan.plans:
        if stage.alike not in known:
            known[stage.alike] = evaluate(stage)[0]
    costs = [known[stage.alike] for stage in plan.plans]
    return Prediction(
        step=seconds(times.step_s),
        bound=seconds(max(found.times.busiest_link_s, *(one.bound_s for one in costs))),
        parts={name: seconds(value) for name, value in found.parts_s.items()},
        wan_bytes=sum(one.wan_bytes for one in costs) + activation_bytes(plan),
        memory_bytes=found.fullest.fullest_bytes,
        baselines={name: seconds(step_s) for name, step_s in baselines.items()},
        cost=dollars(found.step_usd) if plan.cluster.has_prices else None,
    )


def without_stages(plan: PipelinePlan) -> dict[str, tuple[StepCost, MemoryUse]]:
    """Name of a baseline, which has every layer at all sites -> (cost of a step, memory)."""
    return {name.value: evaluate(baseline_like(plan, name)) for name in BASELINES}


def activation_bytes(plan: PipelinePlan) -> float:
    """Bytes of activations and their gradients in one step, as far as they leave sites."""
    inside, total = plan.cluster.ranks_per_site, 0
    for stage in range(len(plan.stages) - 1):
        ways = plan.ways(stage)
        for source, destination, number in zip(ways.source, ways.destination, ways.number, strict=True):
            if not plan.cluster.in_one_site(int(source) // inside, int(destination) // inside):
                total += int(number)
    return 2.0 * total * plan.micro_batches * plan.sequence_bytes
