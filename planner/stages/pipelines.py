"""Pipeline plans: the best that a search finds, what is told of them, a search that goes on from some, and a short look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridep.errors import InfeasibleError, UserError
from hybridep.pipeline import PipelinePlan, check_stageable
from hybridep.plan import Schedule
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.units import format_dollars, format_seconds
from hybridep.workload import Workload
from planner.choose import Report
from planner.clock import elapsed_s, now_s
from planner.cost import StepCost
from planner.evaluate import require_few_experts
from planner.plans import solver_report
from planner.stages.bound import least_s, least_usd
from planner.stages.candidates import Candidates
from planner.stages.costs import Costed, predicted, without_stages
from planner.stages.inside import Store
from planner.stages.rules import StageRules
from planner.stages.search import Search
from planner.stages.wishes import StageWishes
from planner.stages.within_loss import pipelines_within_loss
from planner.streams import with_most

GLANCED = 4
"""Pipelines that ``glance`` looks at, about."""


@dataclass
class StageCache:
    """What searches for pipelines over one cluster, of one workload, found of stages, for those that follow."""

    _known: list[tuple[StageWishes, Candidates]] = field(default_factory=list)

    def candidates(self, cluster: Cluster, workload: Workload, wishes: StageWishes) -> Candidates:
        """What makes pipelines, with what is known of stages for the same wishes."""
        for asked, known in self._known:
            if asked == wishes:
                return known.anew()
        made = candidates_of(cluster, workload, wishes)
        self._known.append((wishes, made))
        return made


def plan_pipeline(
    cluster: Cluster,
    workload: Workload,
    wishes: StageWishes | None = None,
    *,
    time_limit_s: float = 60.0,
    report: Report | None = None,
    patience_s: float = math.inf,
    starts: Sequence[PipelinePlan] = (),
    cache: StageCache | None = None,
) -> PipelinePlan:
    """The best pipeline found, as expected. Arguments and errors as `plan_pipelines`."""
    return plan_pipelines(
        cluster, workload, wishes, time_limit_s=time_limit_s, report=report, patience_s=patience_s, starts=starts, cache=cache
    )[0]


def plan_pipelines(
    cluster: Cluster,
    workload: Workload,
    wishes: StageWishes | None = None,
    number: int = 1,
    *,
    time_limit_s: float = 60.0,
    report: Report | None = None,
    patience_s: float = math.inf,
    starts: Sequence[PipelinePlan] = (),
    cache: StageCache | None = None,
) -> list[PipelinePlan]:
    """The best pipelines found in as many stages as are wished for, with their predictions, the best first: at most ``number``,
    which differ in more than how far ahead they run. Exact but for codecs; for experts that are chosen alike, or with measured
    popularity. The best one is the fastest, or what the goal says; all keep the rules. The bound is below every pipeline, and
    says little. ``report``: told ("bound" or "plan", seconds) as either is known or improves. On KeyboardInterrupt, once there is
    a plan, the best so far. ``patience_s``: for how long a first one is looked for at most. ``starts``: pipelines over the same
    sites that are known and keep the rules, from which the search goes on, too; not from those with other codecs. ``cache``: of
    searches before this one for the same cluster and workload.

    Raises UserError for what stages cannot share, and InfeasibleError where no number of stages is possible, or none fits the
    memory, the rules or the budget, and says why.
    """
    wishes = wishes or StageWishes()
    wishes.check(cluster)
    _require_stages(cluster, workload)
    told: Report = report or (lambda what, seconds: None)
    begun_s, asked_s = now_s(), elapsed_s()
    goal, stages, cache = wishes.goal, wishes.stages, cache or StageCache()
    bound_s = least_s(cluster, workload, stages or 2, wishes.shortest(cluster, workload), alike=not wishes.popularity)
    told("bound", bound_s)

    def make(asked: StageWishes, since_s: float, limit_s: float, known: Sequence[PipelinePlan] = ()) -> list[Costed]:
        search = Search(cache.candidates(cluster, workload, asked), since_s, limit_s, told, since_s + patience_s)
        numbers = range(2, cluster.sizes[0] + 1) if stages is None else (stages,)
        here = [one.at_rates(cluster, search.candidates.schedule) for one in (*starts, *known) if one.codecs == asked.codecs]
        return search.run(numbers, number, here)

    if wishes.max_loss is None:
        found = make(wishes, begun_s, time_limit_s)
    else:
        found = pipelines_within_loss(make, cluster, workload, wishes, time_limit_s)[:number]
    if goal.overdraft(found[0].step_usd):
        assert goal.budget_usd is not None
        cheapest = f"{format_dollars(found[0].step_usd)} (a step of {format_seconds(found[0].times.step_s)})"
        raise InfeasibleError(
            f"pipeline over {cluster.name}: none was found that costs at most {format_dollars(goal.budget_usd)} per step: the "
            f"cheapest costs {cheapest}; raise --budget, or --time-limit"
        )
    took_s = elapsed_s() - asked_s
    try:
        return reported(found, wishes, bound_s, took_s)
    except KeyboardInterrupt:
        # Among many sites reports take seconds.
        return reported(found[:1], wishes, bound_s, took_s)


def reported(found: Sequence[Costed], wishes: StageWishes, bound_s: float, took_s: float) -> list[PipelinePlan]:
    """Pipelines for one cluster and workload with what is predicted of them, and how they were found: in ``took_s``, where none
    takes less than ``bound_s``."""
    made, known = list[PipelinePlan](), dict[str, StepCost]()
    baselines = {name: cost.step_s for name, (cost, _) in without_stages(found[0].plan).items()}
    for one in found:
        cluster = one.plan.cluster
        how = solver_report(
            solver=wishes.solver,
            goal=wishes.goal,
            objective_s=one.times.step_s,
            bound_s=bound_s,
            cost_usd=one.step_usd,
            bound_usd=least_usd(cluster, one.plan.workload, bound_s, wishes.shortest(cluster, one.plan.workload)),
            solve_s=took_s,
            proven=False,
        )
        more = {"prediction": predicted(one, baselines, known), "solver": how, "provenance": provenance()}
        made.append(one.plan.model_copy(update=more))
    return made


def search_on(
    cluster: Cluster,
    starts: Sequence[PipelinePlan],
    wishes: StageWishes,
    number: int = 1,
    *,
    tries: int,
    looks: int,
    fresh: int = 0,
    store: Store | None = None,
) -> list[Costed]:
    """The best pipelines over ``cluster``, at most ``number``, that a short search finds, which no time limit ends: the
    ``starts``, which keep the rules, at its rates; about so many ``fresh`` ones, of various numbers of stages; and what the best
    of these numbers become in other micro-batches, by changes of sites and layers, of which so many are looked at and tried, and
    at other depths. Only what fits; so there may be none. ``store``: what was found of stages before, and is now."""
    candidates = candidates_of(cluster, starts[0].workload, wishes, store)
    search = Search(candidates, now_s(), math.inf, lambda what, seconds: None, -math.inf, changes=tries, looks=looks)
    search.go_on([one.at_rates(cluster, candidates.schedule) for one in starts], fresh)
    return search.best(number)


def glance(cluster: Cluster, workload: Workload, wishes: StageWishes, *, limit_s: float, patience_s: float) -> Costed:
    """The best of about ``GLANCED`` pipelines that a search would begin with, placed without a search; of fewer where that takes
    longer than ``limit_s``. Raises what `plan_pipelines` raises, also where none of these fits, and no other one is found within
    ``patience_s``."""
    wishes.check(cluster)
    _require_stages(cluster, workload)
    candidates = candidates_of(cluster, workload, wishes)
    search = Search(candidates, now_s(), limit_s, lambda what, seconds: None, now_s() + patience_s, changes=0, looks=0)
    search.go_on([], GLANCED)
    for best in search.best(1):
        return best
    raise InfeasibleError(f"pipeline over {cluster.name}: {candidates.reason}")


def _require_stages(cluster: Cluster, workload: Workload) -> None:
    """Raises UserError where stages are no way to divide the model."""
    require_few_experts(cluster, workload)
    try:
        check_stageable(workload.model)
    except ValueError as error:
        raise UserError(str(error)) from None


def candidates_of(cluster: Cluster, workload: Workload, wishes: StageWishes, store: Store | None = None) -> Candidates:
    """What makes pipelines to search among; ``store``: what was found of stages before, and is now."""
    schedule = with_most(cluster, wishes.schedule)[0] or Schedule()
    rules = StageRules(cluster, workload.model.num_experts, wishes.constraints)
    return Candidates(cluster, workload, schedule, wishes, rules, store=store or Store())
