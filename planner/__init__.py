"""The planner: decides which experts travel to the tokens and which tokens travel to the experts."""

from planner.check import CheckError, check
from planner.choose import plan
from planner.cost import StepCost, step_cost
from planner.explain import Alternative, Explanation, LinkLoad, explain, summary
from planner.memory import MemoryUse, memory_use
from planner.plans import baseline, plan_domains, predict

__all__ = [
    "Alternative",
    "CheckError",
    "Explanation",
    "LinkLoad",
    "MemoryUse",
    "StepCost",
    "baseline",
    "check",
    "explain",
    "memory_use",
    "plan",
    "plan_domains",
    "predict",
    "step_cost",
    "summary",
]
