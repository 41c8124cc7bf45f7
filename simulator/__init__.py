"""Flow-level simulation of training: what a plan would take on a cluster that need not exist.

`simulate` one step of a plan (beside baselines), `simulate_run` many under `Conditions` that change, `zipf_routing` for uneven
choices of experts; results as plain data through their `as_dict`, the timeline through `Report.step.spans`.
"""

from simulator.conditions import Conditions
from simulator.many_steps import Course, simulate_run
from simulator.report import simulate
from simulator.routing import zipf_routing
from simulator.systems import System

__all__ = ["Conditions", "Course", "System", "simulate", "simulate_run", "zipf_routing"]
