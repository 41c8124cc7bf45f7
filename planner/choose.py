"""Which planner a cluster needs: equal domains per level, or a serving table per site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridep.codecs import Codecs
from hybridep.plan import Plan, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.depths import plan_ahead
from planner.measured import plan_measured
from planner.plans import plan_domains
from planner.sites.plans import plan_sites

MANY_SITES = 64
"""With more sites even equal ones are planned site by site: the candidates of equal domains have arrays over ranks."""


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
    popularity: Sequence[tuple[float, ...]] = (),
    ahead: bool = False,
    codecs: Mapping[str, Codecs] | None = None,
) -> Plan:
    """The fastest plan found that fits, with its prediction, a proven bound, and how it was found. With measured ``popularity``
    of the experts ([MoE layers][E] shares) equal domains are chosen layer by layer. With ``ahead``, also plans whose copies set
    out before their blocks (``Schedule.prefetch``), where sites are alike and no popularity is given. ``codecs`` by level name;
    where one is lossy, equal domains are searched alone, because the other searches know exact bytes only.

    Raises InfeasibleError (says how much memory is missing where), NoSolutionError (time limit), UserError (unknown solver).
    """
    lossy = any(one.lossy for one in (codecs or {}).values())
    if popularity and not lossy:
        return plan_measured(cluster, workload, popularity, schedule=schedule)
    if by_site(cluster) and not lossy:
        return plan_sites(cluster, workload, solver=solver, time_limit_s=time_limit_s, schedule=schedule)
    if ahead and not lossy:
        return plan_ahead(cluster, workload, solver=solver, time_limit_s=time_limit_s)
    return plan_domains(cluster, workload, solver=solver, time_limit_s=time_limit_s, schedule=schedule, codecs=codecs)


def by_site(cluster: Cluster) -> bool:
    """Sites differ, or there are many, with at most one level inside."""
    return cluster.sizes[0] >= 2 and len(cluster.sizes) <= 2 and (not cluster.is_symmetric or cluster.sizes[0] > MANY_SITES)
