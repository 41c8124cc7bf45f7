"""Plans that nobody has to search for: what a chosen plan is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from hybridep.codecs import Codecs, codecs_for_others
from hybridep.config import build
from hybridep.pipeline import AnyPlan, codecs_inside
from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload


class Baseline(Enum):
    """A placement that follows from the cluster's shape alone."""

    EP = "ep"
    """Expert parallelism over all ranks: no copies, every token travels to its experts' homes; hop by hop and once per
    destination (as DeepEP's and NVIDIA Hybrid-EP's kernels between nodes)."""
    FULL_GATHER = "full_gather"
    """Every rank copies all experts once per optimizer step, no token travels: data parallelism with sharded optimizer state
    (ZeRO, Rajbhandari et al., SC 2020; Tutel's ``adaptive:0``)."""
    EP_IN_DC = "ep_in_dc"
    """Expert parallelism inside each datacenter and data parallelism across: tokens stay, the experts' weights and gradients
    cross once per optimizer step. What guides advise for slow links (Megatron-Core, MoE guide)."""
    EP_IN_NODE = "ep_in_node"
    """Expert parallelism only inside the innermost level, data parallelism across all others: expert groups folded into the
    NVLink domain (MoE Parallel Folding, Liu et al., arXiv 2504.14960). With two levels the same as ``ep_in_dc``."""


def baseline_group(cluster: Cluster, workload: Workload, baseline: Baseline) -> LayerGroup:
    """All MoE layers as the baseline has them. Copies live for one optimizer step."""
    depth = len(cluster.levels)
    copied = {
        Baseline.EP: 0,
        Baseline.FULL_GATHER: depth,
        # With one level there is nothing inside: the sites are the ranks.
        Baseline.EP_IN_DC: 1,
        Baseline.EP_IN_NODE: max(depth - 1, 1),
    }[baseline]
    return LayerGroup(
        first_layer=0,
        num_layers=workload.model.num_moe_layers,
        domains={level.name: level.size if at < copied else 1 for at, level in enumerate(cluster.levels)},
        migration={level.name: 1.0 for level in cluster.levels[:copied] if level.size > 1},
        residency=Residency.STEP,
    )


def baseline_plan(
    cluster: Cluster,
    workload: Workload,
    baseline: Baseline,
    *,
    schedule: Schedule | None = None,
    codecs: Mapping[str, Codecs] | None = None,
    popularity: tuple[tuple[float, ...], ...] = (),
) -> Plan:
    """The baseline on a cluster, without a prediction, whether or not it fits the memory. Raises ConfigError where the cluster's
    sites cannot share the workload."""
    data = {
        "cluster": cluster,
        "workload": workload,
        "layers": (baseline_group(cluster, workload, baseline),),
        "popularity": popularity,
        "codecs": dict(codecs or {}),
        "schedule": schedule or Schedule(),
        "provenance": {"baseline": baseline.value},
    }
    return build(Plan, data, f"{workload.name} on {cluster.name}")


def baseline_like(plan: AnyPlan, baseline: Baseline) -> Plan:
    """The baseline in place of a plan, with its schedule, its codecs (``codecs_for_others``) and its popularity."""
    codecs = codecs_inside(codecs_for_others(plan.codecs))
    return baseline_plan(plan.cluster, plan.workload, baseline, schedule=plan.schedule, codecs=codecs, popularity=plan.popularity)
