"""Which of several pipelines a simulation prefers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hybridep.commands.plan_choice import MOST_SITES, SEARCHED, SECONDS_PER_PAIR, SHORT_LAYERS
from hybridep.errors import UserError
from hybridep.pipeline import PipelinePlan
from planner.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridep.pipeline import AnyPlan
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from planner import StageCache, StageWishes
    from planner.goal import Goal, Worth

CANDIDATES = 24
"""Pipelines among which a simulation chooses at most, as far as there is time."""
_FAR = 1.1
"""Pipelines that are expected to take so many times as long as the best are not simulated: what is expected errs by less."""
_LAYER_S, _INSIDE_S = 5e-6, 3e-5
"""What simulating one takes, about, for each rank, layer and micro-batch, and more where the layer's experts are exchanged inside
sites, too. 0.6 to 1.2 times as much was measured between 13 and 60 regions, 0.4 to 3 times where exchanges are inside sites."""


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """The pipeline that a simulation of several prefers, or a plan without stages to compare it with."""

    plan: AnyPlan
    simulated_s: float | None = None
    """Seconds of the plan's simulated step; None where it was not simulated."""
    simulated: int = 0
    """Pipelines that were simulated."""
    others: tuple[StageChoice, ...] = ()
    """What else was found for the same sites, the best first: what was simulated, then the rest."""

    @property
    def step_s(self) -> float:
        """Seconds of the plan's step, simulated, or as expected where it was not."""
        return self.plan.predicted.expected_s if self.simulated_s is None else self.simulated_s


def in_stages(
    cluster: Cluster,
    workload: Workload,
    wishes: StageWishes | None = None,
    *,
    time_limit_s: float = 60.0,
    shown: bool = False,
    known: PipelinePlan | None = None,
    cache: StageCache | None = None,
    top: int = 1,
) -> StageChoice:
    """What ``hybridep plan --stages`` makes: of the fastest pipelines by the planner's expectation the one that is fastest in a
    simulation of all ranks; the planner's own best between more than ``MOST_SITES`` sites. With a ``goal`` the cheapest, or the
    fastest within a budget. ``shown``: with the search's progress on stderr. ``known``: one more to choose from, from which the
    search goes on, too; ``cache``: of searches before this one. ``top``: how many are wanted, the others in
    ``StageChoice.others``. Raises what the planner raises."""
    from hybridep.commands.plan_progress import PlanProgress
    from planner import StageWishes, plan_pipelines

    wishes = wishes or StageWishes()
    number = CANDIDATES if cluster.sizes[0] <= MOST_SITES else 1
    started_s, share = now_s(), SEARCHED if number > 1 else 1.0
    # It ends before simulations show theirs.
    with PlanProgress() if shown else nullcontext() as progress:
        limit_s, starts = share * time_limit_s, [] if known is None else [known]
        made = plan_pipelines(
            cluster, workload, wishes, max(number, top), time_limit_s=limit_s, report=progress, starts=starts, cache=cache
        )
    if known is not None and all(one.digest != known.digest for one in made):
        made.append(known)
        made.sort(key=lambda one: wishes.goal.worth(one.predicted.expected_s, one.predicted.cost_usd))
    near = made
    if not wishes.goal.needs_prices:
        near = [one for one in made if one.predicted.expected_s <= _FAR * made[0].predicted.expected_s]
    chosen = first_in_time(_differing_first(near), time_limit_s) if number > 1 else []
    found = best_simulated(chosen, wishes.goal, until_s=started_s + time_limit_s) or StageChoice(plan=made[0])
    known_so = [found.plan, *(other.plan for other in found.others)]
    rest = [StageChoice(plan=one) for one in made if not any(one is other for other in known_so)]
    return replace(found, others=(*found.others, *rest))


def _differing_first(plans: Sequence[PipelinePlan]) -> list[PipelinePlan]:
    """The best of each number of stages, then the others: what is expected of them errs more between numbers than within one."""
    firsts = {len(plan.stages): plan for plan in reversed(plans)}
    return sorted(plans, key=lambda plan: firsts[len(plan.stages)] is not plan)


def first_in_time(plans: Sequence[PipelinePlan], time_limit_s: float) -> list[PipelinePlan]:
    """The first of the pipelines, about as many as simulations' share of the limit has time for: an estimate, because what a
    deadline cuts off differs from run to run."""
    took_s = np.cumsum([simulating_s(plan) for plan in plans])
    return list(plans[: int((took_s <= (1 - SEARCHED) * time_limit_s).sum())])


def simulating_s(plan: AnyPlan) -> float:
    """What simulating a step of it takes, about."""
    cluster = plan.cluster
    if not isinstance(plan, PipelinePlan):
        passes = plan.workload.model.num_moe_layers / SHORT_LAYERS * plan.workload.training.micro_batches / 8
        return SECONDS_PER_PAIR * cluster.sizes[0] ** 2 * passes
    groups = [group for stage in plan.stages for group in stage.layers]
    inside = [group for group in groups if any(group.domains.get(level.name, 1) < level.size for level in cluster.levels[1:])]
    layers_s = _LAYER_S * plan.workload.model.num_layers + _INSIDE_S * sum(group.num_layers for group in inside)
    return plan.micro_batches * cluster.num_gpus * layers_s


def simulated_s(plan: AnyPlan) -> float:
    """A step of it with all ranks; with one of each site where those of a pipeline are too many."""
    from simulator.errors import PipelineError
    from simulator.pipeline import simulate_any
    from simulator.precision import Precision

    try:
        return simulate_any(plan).step_s
    except PipelineError:
        return simulate_any(plan, precision=Precision(one_rank_per_site=True)).step_s


def best_simulated(plans: Sequence[PipelinePlan], goal: Goal, *, until_s: float) -> StageChoice | None:
    """The best by simulated step, or its price, of those that can be simulated, if there are any; none but the first is begun
    after ``until_s`` (``planner.clock``), or a KeyboardInterrupt."""
    from hybridep.commands.progress import one_by_one
    from planner.stages.costs import simulated_usd

    found: list[tuple[Worth, float, int]] = []
    for place, one in enumerate(one_by_one(plans, "simulating pipelines")):
        if place and now_s() >= until_s:
            break
        try:
            step_s = simulated_s(one)
        except KeyboardInterrupt:
            break
        except UserError:
            # Too many ranks, and windows forbid to take those of a site for alike.
            continue
        usd = simulated_usd(one, step_s) if goal.needs_prices else 0.0
        found.append((goal.worth(step_s, usd), step_s, place))
    if not found:
        return None
    best, *others = (StageChoice(plan=plans[place], simulated_s=step_s, simulated=1) for _, step_s, place in sorted(found))
    return replace(best, simulated=len(found), others=tuple(others))
