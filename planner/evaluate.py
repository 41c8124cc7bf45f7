"""Cost and memory of any plan, whoever made it: on ranks, or over sites where there are too many ranks."""

from __future__ import annotations

from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.cost import StepCost, step_cost
from planner.memory import MemoryUse, memory_use
from planner.sites.evaluate import evaluate_sites
from planner.staggered import staggered_s

MOST_RANKS = 1024
"""Above, arrays over ranks take seconds and gigabytes."""
_MOST_EXPERTS = 2**22
"""Of a layer, times ranks (``MOST_RANKS`` at most): above, searches take minutes."""


def require_few_experts(cluster: Cluster, workload: Workload) -> None:
    """Raises UserError for more experts than plans are searched for."""
    experts, most = workload.model.num_experts, _MOST_EXPERTS // min(cluster.num_gpus, MOST_RANKS)
    if experts > most:
        raise UserError(
            f"model.num_experts: {experts} in a layer; for the {cluster.num_gpus} GPUs of {cluster.name} plans are searched for "
            f"with at most {most}; lower it"
        )


def evaluate(plan: Plan) -> tuple[StepCost, MemoryUse]:
    """What one step is expected to take, and what each rank needs."""
    if plan.cluster.num_gpus > MOST_RANKS and (found := evaluate_sites(plan)) is not None:
        return found
    return step_cost(plan), memory_use(plan)


def expected_s(plan: Plan, cost: StepCost | None = None) -> float:
    """Seconds of a step in which ranks that are done go on; ``cost`` is the plan's, where it is known. That of the cost where
    copies set out ahead of their blocks, or with too many ranks to follow each."""
    cost = cost or evaluate(plan)[0]
    if plan.schedule.prefetch or plan.cluster.num_gpus > MOST_RANKS:
        return cost.step_s
    return staggered_s(plan, cost)
