"""Plans to compare a plan with, on the same cluster and workload."""

from __future__ import annotations

from enum import Enum

from hybridep.plan import LayerGroup, Plan, Residency


class Baseline(Enum):
    """An alternative that needs no search."""

    EP = "ep"
    """Plain expert parallelism: no copies, every token travels to its experts' homes."""
    FULL_GATHER = "full_gather"
    """Every rank copies all experts for the step; no token travels."""


def baseline_plan(plan: Plan, baseline: Baseline) -> Plan:
    """The baseline in the plan's place: same cluster, workload, codecs and schedule, another placement."""
    everything = baseline is Baseline.FULL_GATHER
    group = LayerGroup(
        first_layer=0,
        num_layers=plan.workload.model.num_moe_layers,
        domains={level.name: level.size if everything else 1 for level in plan.cluster.levels},
        migration={level.name: 1.0 if everything else 0.0 for level in plan.cluster.levels},
        residency=Residency.STEP,
    )
    # Built anew, not copied with changes: a copy would keep the placements cached for the old layers.
    return Plan(
        cluster=plan.cluster,
        workload=plan.workload,
        layers=(group,),
        codecs=plan.codecs,
        schedule=plan.schedule,
        provenance={"baseline": baseline.value},
    )
