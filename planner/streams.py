"""How many connections two ranks get at levels where one connection has a window (``Level.window``).

More connections never lengthen a predicted step, so the search for a placement has the most at every such level. The plan that it
finds then gets the fewest with which its step is as short, but for a thousandth: what a connection costs (memory and a file
descriptor at either end) is in no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridep.plan import MOST_STREAMS, Plan, Schedule, Status
from hybridep.topology import Cluster
from planner.evaluate import evaluate
from planner.plans import goal_of, predict, reported_again

WORTH = 1e-3
"""Share of the step that fewer connections may add."""


def with_most(cluster: Cluster, schedule: Schedule | None) -> tuple[Schedule | None, tuple[str, ...]]:
    """The schedule with ``MOST_STREAMS`` connections at the levels with a window that it says nothing of; and their names."""
    given = schedule or Schedule()
    free = tuple(one.name for one in cluster.levels if one.window is not None and one.size > 1 and one.name not in given.streams)
    if not free:
        return schedule, free
    return given.model_copy(update={"streams": given.streams | dict.fromkeys(free, MOST_STREAMS)}), free


def with_fewest(plan: Plan, free: Sequence[str], step_s: Callable[[Plan], float] | None = None) -> Plan:
    """A plan of ``with_most`` with the fewest connections (1, 2, 4 and so on) at the levels ``free``, outermost level first, and
    with what is predicted of it then. ``step_s`` where another time than the predicted step counts; a budget is kept."""
    if not free:
        return plan
    goal = goal_of(plan.solver)
    longest_s = _seconds(plan, step_s) * (1 + WORTH)

    def good(one: Plan) -> bool:
        affordable = goal.budget_usd is None or not goal.overdraft(evaluate(one)[0].step_usd)
        return affordable and _seconds(one, step_s) <= longest_s

    for name in free:
        number = 1
        while number < MOST_STREAMS and not good(_with(plan, name, number)):
            number *= 2
        plan = _with(plan, name, number)
    report, plan = plan.solver, plan.model_copy(update={"prediction": predict(plan)})
    return plan if report is None else reported_again(plan, [report], proven=report.status is Status.OPTIMAL)


def _with(plan: Plan, level: str, number: int) -> Plan:
    return plan.with_schedule(streams=plan.schedule.streams | {level: number})


def _seconds(plan: Plan, step_s: Callable[[Plan], float] | None) -> float:
    return evaluate(plan)[0].step_s if step_s is None else step_s(plan)
