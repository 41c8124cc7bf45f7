"""A pipeline plan in plain data, as ``hybridep plan --json`` prints it."""

from __future__ import annotations

from typing import Any

from hybridep.pipeline import PipelinePlan
from hybridep.plan import Objective
from planner.stages.costs import costed, without_stages


def pipeline_summary(plan: PipelinePlan) -> dict[str, Any]:
    """What is expected of a step, how the plan was found, and what each stage does, in seconds and bytes."""
    found = costed(plan)
    prediction, report = plan.prediction, plan.solver
    bound_s = report.bound if report else 0.0
    stages = []
    for number, (stage, inside) in enumerate(zip(plan.stages, found.inside, strict=True)):
        stages.append(
            {
                "sites": list(stage.sites),
                "num_layers": stage.num_layers,
                "layers": [group.model_dump(mode="json") for group in stage.layers],
                "sequences": [int(own) for own in plan.sequences(number)[:: plan.cluster.ranks_per_site]],
                "in_flight": plan.in_flight(number),
                "forward_s": inside.times.forward_s,
                "backward_s": inside.times.backward_s,
                "busy_s": inside.times.busy_s(plan.micro_batches),
                "memory_bytes": inside.memory.fullest_bytes,
                "capacity_bytes": inside.memory.capacity_bytes,
            }
        )
    return {
        "status": report.status.value if report else ("feasible" if found.fits else "infeasible"),
        "objective_s": found.times.step_s,
        "bound_s": bound_s,
        "gap": report.gap if report else 1 - bound_s / found.times.step_s,
        "solve_s": report.solve if report else 0.0,
        "domains": [group.domains for stage in plan.stages for group in stage.layers],
        "baselines": dict(prediction.baselines) if prediction else {},
        "baselines_that_fit": [name for name, (_, memory) in without_stages(plan).items() if memory.fits],
        "memory_bytes": found.fullest.fullest_bytes,
        "fullest_rank": found.fullest.fullest_name,
        "step_s": found.times.step_s,
        "parts_s": found.parts_s,
        "lower_bound_s": prediction.bound if prediction else None,
        "wan_bytes": prediction.wan_bytes if prediction else None,
        "step_usd": found.step_usd if plan.cluster.has_prices else None,
        "minimised": report.minimised.value if report else Objective.TIME.value,
        "cost_bound_usd": report.cost_bound if report else None,
        "micro_batches": plan.micro_batches,
        "ahead": plan.ahead,
        "stages": stages,
        "streams": dict(plan.schedule.streams),
        "digest": plan.digest,
    }
