"""In how many parts tokens travel (``Schedule.chunks``): what has come of a micro-batch is computed while the rest is on its way.

Parts hide computation behind links, and each pays the latencies of its exchanges anew. Plans of equal domains are searched for
with each of some ``numbers`` of parts, and nothing is proven of those between. Between sites that differ the search is made for
tokens in one piece, the best plans that it finds are costed with each number, and its bound leaves out what experts compute
(``SiteProblem.in_parts``): no number of parts hides more.
Further parts that bring next to nothing are not worth their messages, which no prediction counts in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hybridep.errors import InfeasibleError
from hybridep.plan import Plan, Schedule
from planner.evaluate import evaluate
from planner.goal import Goal
from planner.plans import goal_of, predict, reported_again

WORTH = 5e-3
"""Share of the step (or price) that fewer parts may add."""


def numbers(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on; at last ``most``."""
    return tuple(sorted({*(2**power for power in range(most.bit_length())), most}))


def best_of_searches(search: Callable[[Schedule], list[Plan]], schedule: Schedule, most: int) -> list[Plan]:
    """What ``search`` finds, best first, with the fewest parts of ``numbers`` for which its first plan is as good as with any of
    them, but for ``WORTH``; as the schedule says where ``most`` is 1. Numbers for which there are no plans are left out. The
    bound holds for plans with any of these numbers. Raises what ``search`` raises first where it finds nothing at all."""
    if most == 1:
        return search(schedule)
    found, errors = list[list[Plan]](), list[InfeasibleError]()
    for number in numbers(most):
        try:
            found.append(search(schedule.model_copy(update={"chunks": number})))
        except InfeasibleError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    reports = [plans[0].solver for plans in found if plans[0].solver is not None]
    goal = goal_of(reports[0] if reports else None)
    values = [goal.value_of(plans[0]) for plans in found]
    best = found[_fewest(values)]
    return [reported_again(best[0], reports), *best[1:]] if reports else best


def tables_in_parts(found: Sequence[Plan], most: int, count: int) -> list[Plan]:
    """Of plans between sites, whose first has a report with a bound for any number of parts, each with the number that suits it;
    at most ``count``, the best first."""
    report = found[0].solver
    goal = goal_of(report)
    best = sorted((_in_parts(plan, most, goal) for plan in found), key=goal.value_of)[:count]
    return best if report is None else [reported_again(best[0], [report]), *best[1:]]


def _in_parts(plan: Plan, most: int, goal: Goal) -> Plan:
    """With the fewest that make its step as short as any, but for ``WORTH``; without a report."""
    tried = [plan.with_schedule(chunks=number) for number in numbers(most)]
    known = [evaluate(one) for one in tried]
    possible = [use.fits and not goal.overdraft(cost.step_usd) for cost, use in known]
    best = _fewest(
        [cost.step_s if good or not any(possible) else np.inf for (cost, _), good in zip(known, possible, strict=True)]
    )
    same = tried[best].schedule == plan.schedule
    return tried[best].model_copy(update={"prediction": plan.prediction if same else predict(tried[best]), "solver": None})


def _fewest(values: Sequence[float]) -> int:
    """Place of the first that is as small as the smallest, but for ``WORTH``."""
    return next(place for place, value in enumerate(values) if value <= min(values) * (1 + WORTH))
