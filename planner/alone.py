"""One site by itself, which moves nothing between sites: where links are slow and it has room, no plan for more may be faster."""

from __future__ import annotations

from collections.abc import Sequence

from hybridep.errors import HybridEPError, InfeasibleError
from hybridep.plan import Plan
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.choose import plan
from planner.constraints import Constraints
from planner.goal import FASTEST, Goal, Worth
from planner.stages.rules import StageRules

_KINDS = 4
"""Of sites with the fastest GPUs: others by themselves are hardly faster."""
_LIMIT_S = 10.0


def alone(
    cluster: Cluster,
    workload: Workload,
    *,
    popularity: Sequence[tuple[float, ...]] = (),
    goal: Goal = FASTEST,
    constraints: Constraints | None = None,
) -> Plan | None:
    """The best plan for one site of several (of a site with pods, for one of these), with the whole global batch; None where none
    has room, or sequences to share, and where none by itself keeps the rules."""
    if cluster.sizes[0] == 1:
        return None
    try:
        rules = StageRules(cluster, workload.model.num_experts, constraints)
    except InfeasibleError:
        return None
    kinds: dict[str, int] = {}
    for site in sorted(range(cluster.sizes[0]), key=lambda site: -cluster.site_gpus[site].throughput):
        kind = repr(cluster.site_gpus[site])
        if len(kinds) < _KINDS and kind not in kinds and rules.possible((site,)):
            kinds[kind] = site
    found: list[tuple[Worth, int, Plan]] = []
    for site in kinds.values():
        try:
            one, work = on_sites(cluster, workload, [cluster.site_name(site)])
            # Where neither its ranks nor its bytes cost anything there is no price to make small.
            own = goal if one.has_prices else FASTEST
            made = plan(one, work, time_limit_s=_LIMIT_S, popularity=popularity, goal=own, constraints=rules.inside(one))
        except HybridEPError:
            continue
        found.append((goal.worth(made.predicted.expected_s, made.predicted.cost_usd), site, made))
    return min(found, key=lambda one: one[:2])[2] if found else None
