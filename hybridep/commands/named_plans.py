"""Plans by name: what is made now of a cluster and a workload, for runs and scenarios alike."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from hybridep.baselines import Baseline, baseline_plan
from hybridep.errors import UserError
from hybridep.pipeline import AnyPlan, PipelinePlan, codecs_inside
from hybridep.plan import Plan, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload

BASELINES = {baseline.value: baseline for baseline in Baseline}


def named_plan(
    name: str, cluster: Cluster, workload: Workload, *, time_limit_s: float = 60.0, before: AnyPlan | None = None
) -> AnyPlan:
    """A baseline where ``name`` is one; with ``stages`` what ``hybridep plan --stages`` makes, and otherwise what ``hybridep
    plan`` makes. In place of the plan ``before`` it has what that one has: stages, while there are sites for them, its codecs,
    copies ahead or tokens in parts, and what it knows of experts' popularity; and for the same sites its homes, so that weights
    stay where they are. Raises what the planner raises."""
    made = _made(name, cluster, workload, time_limit_s, before)
    known = before.popularity if before is not None else ()
    return made if made.popularity == known else made.with_popularity(known)


def _made(name: str, cluster: Cluster, workload: Workload, time_limit_s: float, before: AnyPlan | None) -> AnyPlan:
    if name in BASELINES:
        return _baseline(cluster, workload, BASELINES[name])
    codecs, popularity = (before.codecs, before.popularity) if before is not None else ({}, ())
    schedule = before.schedule if before is not None else Schedule()
    # Slow to import, and not needed for a plan that exists.
    import planner
    from hybridep.commands import plan_choice, pools, stage_choice

    in_stages = name == "stages" if before is None else isinstance(before, PipelinePlan) and cluster.sizes[0] > 1
    if in_stages:
        wishes = planner.StageWishes(codecs=codecs, popularity=popularity)
        return stage_choice.in_stages(cluster, workload, wishes, time_limit_s=time_limit_s).plan
    if schedule.prefetch:
        popularity = ()  # with which copies ahead are not planned
    if not codecs and schedule == Schedule(streams=schedule.streams):
        make = partial(plan_choice.planned, cluster, workload, time_limit_s, popularity=popularity)
    else:
        make = partial(
            planner.plan,
            cluster,
            workload,
            time_limit_s=time_limit_s,
            schedule=None if schedule.overlap else Schedule(overlap=False),
            ahead=schedule.prefetch > 0,
            most_chunks=schedule.chunks,
            codecs=codecs_inside(codecs),
            popularity=popularity,
        )
    if before is None or cluster.site_names != before.cluster.site_names:
        # Training begins, or resumes from files.
        return make(free_homes=True)
    if isinstance(before, Plan) and popularity == before.popularity:
        with suppress(UserError):  # homes that no search keeps: others where sites are alike, or in other numbers in each layer
            return make(**pools.homes_of(before))
    return make(free_homes=False)


def _baseline(cluster: Cluster, workload: Workload, which: Baseline) -> Plan:
    """With as many connections per pair of ranks as the planner would give it."""
    if all(level.window is None for level in cluster.levels):
        return baseline_plan(cluster, workload, which)
    from planner.streams import with_fewest, with_most

    schedule, free = with_most(cluster, None)
    return with_fewest(baseline_plan(cluster, workload, which, schedule=schedule), free)
