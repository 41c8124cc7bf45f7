"""The planner chooses codecs: those whose measured loss is permitted, on the links between sites."""

from __future__ import annotations

from collections.abc import Callable

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

Make = Callable[[dict[str, Codecs], float], Plan]
"""(codecs by level name, time limit) -> the best plan with these."""
_SAME = 1e-9
"""Plans that differ by at most such a share take as long."""
_OVER = 1.5
"""Multiple of the time limit after which no more searches begin: one that takes longer than its share ends the others."""


def plan_within_loss(make: Make, cluster: Cluster, workload: Workload, max_loss: float, time_limit_s: float) -> Plan:
    """The best of the plans that ``make`` finds with codecs between sites whose measured losses add up to at most ``max_loss``
    (0.005 for half a percent), without those that bring nothing. Its bound holds for all of them. Codecs are looked at in the
    order of what they make of the first plan; where time is over before, or on KeyboardInterrupt once there is a plan, that plan
    with the next ones is what is known of the others, and their bound is computation; so also of those with which no plan was
    found in time, or within a budget. Raises what ``make`` raises."""
    begun_s, made = now_s(), list[Plan]()
    left = worthwhile(permitted(max_loss), workload, cluster.gpu.coding)
    outermost, limit_s = cluster.levels[0].name, time_limit_s / len(left)
    missing: HybridEPError | None = None
    unknown, over = list[Codecs](), list[Codecs]()
    while left and not (made and now_s() - begun_s > _OVER * time_limit_s):
        codecs = left.pop(0)
        try:
            made.append(make({outermost: codecs} if codecs.lossy else {}, limit_s))
        except (InfeasibleError, NoSolutionError) as error:  # what a codec keeps may not fit
            missing = missing or error
            (unknown if isinstance(error, NoSolutionError) else over).append(codecs)
            continue
        except KeyboardInterrupt:
            if not made:
                raise
            unknown.append(codecs)
            break
        if len(made) == 1:
            left = _in_order(made[0], outermost, left)
    if not made:
        assert missing is not None
        raise missing
    goal, reports = _goal(made[0]), [plan.solver for plan in made if plan.solver is not None]
    bound_s, bound_usd = min(one.bound for one in reports), min(one.cost_bound or 0.0 for one in reports)
    if goal.budget_usd is not None:
        # That nothing is within a budget is not proven.
        unknown += over
    if left := [*unknown, *left]:
        coded = _coded(made[0], outermost, left[0])
        if _worth(coded, goal) < np.inf:
            made.append(coded.model_copy(update={"prediction": predict(coded)}))
        bound_s = min(bound_s, least_s(cluster, workload, 1))
        bound_usd = min(bound_usd, least_usd_of_any(cluster, workload))
    best = min(made, key=goal.value_of)
    chosen = best.codecs.get(outermost, EXACT)
    needed = without_useless(chosen, lambda codecs: _worth(_coded(best, outermost, codecs), goal))
    if needed is not chosen:
        plainer = _coded(best, outermost, needed)
        best = plainer.model_copy(update={"prediction": predict(plainer)})
    return reported_again(best, reports, bound_s=bound_s, bound_usd=bound_usd)


def without_useless(codecs: Codecs, worth: Callable[[Codecs], float]) -> Codecs:
    """Without those that bring nothing, the most lossy ones first. ``worth``: of a plan with such codecs, less is better."""
    most = worth(codecs) * (1 + _SAME)
    if most == np.inf:
        return codecs
    for kind in sorted(codecs.lossy, key=lambda kind: -codecs.gates[kind].relative):
        if worth(plainer := codecs.without(kind)) <= most:
            codecs = plainer
    return codecs


def _in_order(plan: Plan, outermost: str, choices: list[Codecs]) -> list[Codecs]:
    """Those first that make the plan best."""
    worth = [_worth(_coded(plan, outermost, codecs), _goal(plan)) for codecs in choices]
    return [choices[place] for place in sorted(range(len(choices)), key=worth.__getitem__)]


def _coded(plan: Plan, outermost: str, codecs: Codecs) -> Plan:
    """The same placement, not yet predicted."""
    return plan.model_copy(update={"codecs": {outermost: codecs} if codecs.lossy else {}, "prediction": None})


def _worth(plan: Plan, goal: Goal) -> float:
    """Seconds or dollars of its step; infinite where it has no room, its copies do not stay as long as its codecs need, or the
    budget has no room for it."""
    if not all(copies_last(plan.layers, codecs) for codecs in plan.codecs.values()):
        return np.inf
    cost, memory = evaluate(plan)
    possible = memory.fits and not goal.overdraft(cost.step_usd)
    return goal.value(cost.step_s, cost.step_usd) if possible else np.inf


def _goal(plan: Plan) -> Goal:
    assert plan.solver is not None
    return goal_of(plan.solver)
