"""The planner: decides which experts travel to the tokens and which tokens travel to the experts."""

from planner.alone import alone
from planner.check import CheckError, check
from planner.choose import plan, plans
from planner.constraints import Constraints, constraints_among, load_constraints
from planner.cost import StepCost, step_cost
from planner.difference import PlanDifference, compare_plans
from planner.evaluate import expected_s
from planner.explain import Alternative, Explanation, LinkLoad, explain, summary
from planner.goal import Goal
from planner.lossless import lossless_like
from planner.matrices import PlanMatrices, plan_matrices
from planner.memory import MemoryUse, memory_use
from planner.plans import baseline, plan_domains, predict
from planner.pool import PooledPlan, plan_pool
from planner.robust import RobustPlan, interval_scenarios, plan_for_scenarios
from planner.sensitivity import Upgrade, upgrades
from planner.sites.compare import OtherPlan, compare_planners
from planner.stages.costs import expected_over, fullest_of
from planner.stages.difference import PipelineDifference, compare_pipelines
from planner.stages.explain import PipelineAlternative, PipelineExplanation, explain_pipeline
from planner.stages.fewer import least_of_any, sites_that_pay
from planner.stages.matrices import StageMatrices, stage_matrices
from planner.stages.pipelines import StageCache, glance, plan_pipeline, plan_pipelines
from planner.stages.pool import pipeline_pool
from planner.stages.report import pipeline_summary
from planner.stages.robust import RobustPipeline, pipeline_for_scenarios, staged_for_scenarios
from planner.stages.upgrades import SearchedOn, of_either_kind, pipeline_upgrades, searched_on
from planner.stages.wishes import StageWishes

__all__ = [
    "Alternative",
    "CheckError",
    "Constraints",
    "Explanation",
    "Goal",
    "LinkLoad",
    "MemoryUse",
    "OtherPlan",
    "PipelineAlternative",
    "PipelineDifference",
    "PipelineExplanation",
    "PlanDifference",
    "PlanMatrices",
    "PooledPlan",
    "RobustPipeline",
    "RobustPlan",
    "SearchedOn",
    "StageCache",
    "StageMatrices",
    "StageWishes",
    "StepCost",
    "Upgrade",
    "alone",
    "baseline",
    "check",
    "compare_pipelines",
    "compare_planners",
    "compare_plans",
    "constraints_among",
    "expected_over",
    "expected_s",
    "explain",
    "explain_pipeline",
    "fullest_of",
    "glance",
    "interval_scenarios",
    "least_of_any",
    "load_constraints",
    "lossless_like",
    "memory_use",
    "of_either_kind",
    "pipeline_for_scenarios",
    "pipeline_pool",
    "pipeline_summary",
    "pipeline_upgrades",
    "plan",
    "plan_domains",
    "plan_for_scenarios",
    "plan_matrices",
    "plan_pipeline",
    "plan_pipelines",
    "plan_pool",
    "plans",
    "predict",
    "searched_on",
    "sites_that_pay",
    "stage_matrices",
    "staged_for_scenarios",
    "step_cost",
    "summary",
    "upgrades",
]
