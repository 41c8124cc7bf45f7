"""Cost and memory of any plan, whoever made it: on ranks, or over sites where there are too many ranks."""

from __future__ import annotations

from hybridep.plan import Plan
from planner.cost import StepCost, step_cost
from planner.memory import MemoryUse, memory_use
from planner.sites.evaluate import evaluate_sites

MOST_RANKS = 1024
"""Above, arrays over ranks take seconds and gigabytes."""


def evaluate(plan: Plan) -> tuple[StepCost, MemoryUse]:
    """What one step is expected to take, and what each rank needs."""
    if plan.cluster.num_gpus > MOST_RANKS and (found := evaluate_sites(plan)) is not None:
        return found
    return step_cost(plan), memory_use(plan)
