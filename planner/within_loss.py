"""The planner chooses codecs: those whose measured loss is permitted, on the links between sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from hybridep.codec_losses import permitted, worthwhile
from hybridep.codecs import EXACT, Codecs
from hybridep.errors import HybridEPError, InfeasibleError, NoSolutionError
from hybridep.plan import Plan, copies_last
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import now_s
from planner.evaluate import evaluate
from planner.goal import Goal
from planner.plans import goal_of, predict, reported_again
from planner.stages.bound import least_s, least_usd_of_any

Found = TypeVar("Found")
Make = Callable[[dict[str, Codecs], float], Found]
"""(codecs by level name, time limit) -> what is best with these."""
_SAME = 1e-9
"""Plans that differ by at most such a share take as long."""
_OVER = 1.5
"""Multiple of the time limit after which no more searches begin: one that takes longer than its share ends the others."""


@dataclass(frozen=True, kw_only=True)
class Searched(Generic[Found]):
    """What searches with each of the codecs that are permitted came to."""

    found: list[Found]
    """Of each that found something, at least one."""
    unknown: list[Codecs]
    """With which nothing is known, for lack of time; those first that suit what was found first."""
    infeasible: list[Codecs]
    """With which nothing is possible, as far as the search could tell."""


def search_each(
    make: Make[Found],
    worth: Callable[[Found, Codecs], float],
    cluster: Cluster,
    workload: Workload,
    max_loss: float,
    time_limit_s: float,
) -> Searched[Found]:
    """What ``make`` finds with each of the codecs between sites whose measured losses add up to at most ``max_loss`` (0.005 for
    half a percent), without those that bring nothing. After the first they are taken in the order of what they make of what it
    found (``worth``: less is better). Where time is over before, or on KeyboardInterrupt once something was found, nothing is
    known of the others. Raises what ``make`` raises where it finds nothing."""
    begun_s, found = now_s(), list[Found]()
    left = worthwhile(permitted(max_loss), workload, cluster.gpu.coding)
    outermost, limit_s = cluster.levels[0].name, time_limit_s / len(left)
    missing: HybridEPError | None = None
    unknown, infeasible = list[Codecs](), list[Codecs]()
    while left and not (found and now_s() - begun_s > _OVER * time_limit_s):
        codecs = left.pop(0)
        try:
            found.append(make({outermost: codecs} if codecs.coded else {}, limit_s))
        except (InfeasibleError, NoSolutionError) as error:  # what a codec keeps may not fit
            missing = missing or error
            (unknown if isinstance(error, NoSolutionError) else infeasible).append(codecs)
            continue
        except KeyboardInterrupt:
            if not found:
                raise
            unknown.append(codecs)
            break
        if len(found) == 1:
            worths = [worth(found[0], one) for one in left]
            left = [left[place] for place in sorted(range(len(left)), key=worths.__getitem__)]
    if not found:
        assert missing is not None
        raise missing
    return Searched(found=found, unknown=[*unknown, *left], infeasible=infeasible)


def plans_within_loss(
    make: Make[list[Plan]], cluster: Cluster, workload: Workload, count: int, *, max_loss: float, time_limit_s: float
) -> list[Plan]:
    """The best of the plans that ``make`` finds, best first, with codecs between sites as ``search_each`` tries them, at most
    ``count``: plans of one placement with different codecs are different plans. Each is without codecs that bring it nothing. The
    bound of the first holds for all that are permitted; the others have no solver's report. Raises what ``make`` raises."""

    def worth(plans: list[Plan], codecs: Codecs) -> float:
        return worth_of(coded(plans[0], codecs), _goal(plans[0]))

    return best_of(search_each(make, worth, cluster, workload, max_loss, time_limit_s), count)


def best_of(searched: Searched[list[Plan]], count: int = 1) -> list[Plan]:
    """The best plans of the searches, as `plans_within_loss`. Of codecs with which nothing is known the plans of the first search
    with the first of these are looked at, and the bound of all of them is computation; so also of those with which nothing was
    found within a budget, since that is not proven."""
    every = [plan for plans in searched.found for plan in plans]
    first, goal = every[0], _goal(every[0])
    reports = [plans[0].solver for plans in searched.found if plans[0].solver is not None]
    bound_s, bound_usd = min(one.bound for one in reports), min(one.cost_bound or 0.0 for one in reports)
    if unknown := [*searched.unknown, *(searched.infeasible if goal.budget_usd is not None else ())]:
        for plan in searched.found[0]:
            other = coded(plan, unknown[0])
            if worth_of(other, goal) < np.inf:
                every.append(other.model_copy(update={"prediction": predict(other)}))
        bound_s = min(bound_s, least_s(first.cluster, first.workload, 1))
        bound_usd = min(bound_usd, least_usd_of_any(first.cluster, first.workload))
    different = dict[str, Plan]()
    for plan in sorted(every, key=goal.value_of):
        needed = plain(plan, lambda other: worth_of(other, goal))
        # However many connections each has.
        schedule = needed.schedule.model_copy(update={"streams": {}})
        key = needed.model_copy(update={"schedule": schedule}).digest
        different.setdefault(key, needed.model_copy(update={"solver": None}))
        if len(different) == count:
            break
    best, *others = sorted(different.values(), key=goal.value_of)
    return [reported_again(best, reports, bound_s=bound_s, bound_usd=bound_usd), *others]


def plain(plan: Plan, worth: Callable[[Plan], float]) -> Plan:
    """The plan without codecs between sites that bring it nothing; ``worth``: of a plan, less is better."""
    codecs = plan.codecs.get(plan.cluster.levels[0].name, EXACT)
    needed = without_useless(codecs, lambda codecs: worth(coded(plan, codecs)))
    if needed is codecs:
        return plan
    made = coded(plan, needed)
    return made.model_copy(update={"prediction": predict(made)})


def without_useless(codecs: Codecs, worth: Callable[[Codecs], float]) -> Codecs:
    """Without those that bring nothing, the most lossy ones first. ``worth``: of a plan with such codecs, less is better."""
    most = worth(codecs) * (1 + _SAME)
    if most == np.inf:
        return codecs
    loss = {kind: gate.relative for kind, gate in codecs.gates.items()}
    for kind in sorted(codecs.coded, key=lambda kind: -loss.get(kind, 0.0)):
        if worth(plainer := codecs.without(kind)) <= most:
            codecs = plainer
    return codecs


def coded(plan: Plan, codecs: Codecs) -> Plan:
    """The same placement with these codecs between sites, neither predicted nor reported."""
    by_level = {plan.cluster.levels[0].name: codecs} if codecs.coded else {}
    return plan.model_copy(update={"codecs": by_level, "prediction": None, "solver": None})


def worth_of(plan: Plan, goal: Goal) -> float:
    """Seconds or dollars of its step; infinite where it is not `possible`, or the budget has no room for it."""
    if not _lasting(plan):
        return np.inf
    cost, memory = evaluate(plan)
    within = memory.fits and not goal.overdraft(cost.step_usd)
    return goal.value(cost.step_s, cost.step_usd) if within else np.inf


def possible(plan: Plan) -> bool:
    """Whether it has room, and its copies stay as long as its codecs need."""
    return _lasting(plan) and evaluate(plan)[1].fits


def _lasting(plan: Plan) -> bool:
    return all(copies_last(plan.layers, codecs) for codecs in plan.codecs.values())


def _goal(plan: Plan) -> Goal:
    assert plan.solver is not None
    return goal_of(plan.solver)
