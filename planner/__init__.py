"""The planner: decides which experts travel to the tokens and which tokens travel to the experts."""

from planner.cost import StepCost, step_cost
from planner.memory import MemoryUse, memory_use
from planner.plans import baseline, plan, predict

__all__ = ["MemoryUse", "StepCost", "baseline", "memory_use", "plan", "predict", "step_cost"]
