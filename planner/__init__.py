"""The planner: decides which experts travel to the tokens and which tokens travel to the experts."""

from planner.check import CheckError, check
from planner.choose import plan
from planner.cost import StepCost, step_cost
from planner.explain import Alternative, Explanation, LinkLoad, explain, summary
from planner.memory import MemoryUse, memory_use
from planner.plans import baseline, plan_domains, predict
from planner.sites.compare import OtherPlan, compare_planners

__all__ = [
    "Alternative",
    "CheckError",
    "Explanation",
    "LinkLoad",
    "MemoryUse",
    "OtherPlan",
    "StepCost",
    "baseline",
    "check",
    "compare_planners",
    "explain",
    "memory_use",
    "plan",
    "plan_domains",
    "predict",
    "step_cost",
    "summary",
]
