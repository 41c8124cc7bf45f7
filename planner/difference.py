"""Two plans for the same work side by side: what differs, what it costs, and from which bandwidth on the other one wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from hybridep.errors import UserError
from hybridep.plan import Plan
from hybridep.sites import Level, PairLink, SharedTrunk, Site
from hybridep.topology import Cluster
from planner.evaluate import evaluate

WIDEST = 64.0
"""Switching is looked for between a WAN this many times slower and faster."""
HALVINGS = 24
"""Of a range of factors, to find where two plans take equally long."""

StepAt = Callable[[float], float]
"""Factor on all bandwidths between sites -> seconds of a plan's step."""


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """Pairs are (first plan, second plan)."""

    step_s: tuple[float, float]
    parts_s: dict[str, tuple[float, float]]
    """By kind, those that differ, the largest difference first."""
    wan_bytes: tuple[float, float]
    memory_bytes: tuple[float, float]
    served_elsewhere: float
    """Share of (layer, site, expert) whose tokens are computed at another site."""
    copies_gained: float
    """Copies that sites hold in the second plan only, per layer."""
    copies_lost: float
    """Copies that sites hold in the first plan only, per layer."""
    most_changed: dict[str, float]
    """Share of its experts that a site finds elsewhere, the five most changed sites."""
    moved_experts: float
    """Experts that live elsewhere in the second plan, per layer; with none a switch between two steps moves no weights."""
    same_popularity: bool
    """Both were made for experts of the same popularity; else both are costed with that of the second, or of the only one that
    has one."""
    switch_at: float | None
    """Factor on all bandwidths between sites, nearest to 1, at which the two take equally long: beyond it the plan that is
    slower now is the faster one. None where one wins at every factor from 1/64 to 64."""

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, texts and numbers."""
        return asdict(self)


def compare_plans(first: Plan, second: Plan) -> PlanDifference:
    """Both under today's cost model. Raises PlanMismatchError when they are for different clusters or workloads.

    Where homes are the same, switching from one plan to the other between two steps moves no weights, since copies are gathered
    anew every step: it pays as soon as the other one is faster for longer than it takes to tell all ranks. Where not, training
    resumes under the other one from a checkpoint.
    """
    first.require(second.cluster, second.workload, "the first plan")
    second.require(first.cluster, first.workload, "the second plan")  # a plan may leave sites out that the other one has
    popularity, same = second.popularity or first.popularity, first.popularity == second.popularity
    first, second = (one if one.popularity == popularity else one.with_popularity(popularity) for one in (first, second))
    (cost_a, memory_a), (cost_b, memory_b) = evaluate(first), evaluate(second)
    layers, size = first.workload.model.num_moe_layers, first.cluster.sizes[0]
    moved, gained, lost, moved_experts = np.zeros(size), 0.0, 0.0, 0.0
    for (_, _, a), (_, _, b) in zip(first.each_layer(), second.each_layer(), strict=True):
        moved += (a.serve[0] != b.serve[0]).mean(axis=1) / layers
        moved_experts += float((a.home != b.home).sum()) / layers
        gained += float((b.holds_at[0] & ~a.holds_at[0]).sum()) / layers
        lost += float((a.holds_at[0] & ~b.holds_at[0]).sum()) / layers
    parts = {
        name: (cost_a.parts_s.get(name, 0.0), cost_b.parts_s.get(name, 0.0)) for name in {**cost_a.parts_s, **cost_b.parts_s}
    }
    differing = [name for name, (a, b) in parts.items() if abs(a - b) > 1e-9 * cost_a.step_s]
    changed = [int(dc) for dc in np.argsort(-moved, kind="stable")[:5] if moved[dc] > 0]
    return PlanDifference(
        step_s=(cost_a.step_s, cost_b.step_s),
        parts_s={name: parts[name] for name in sorted(differing, key=lambda name: -abs(parts[name][0] - parts[name][1]))},
        wan_bytes=(cost_a.wan_bytes, cost_b.wan_bytes),
        memory_bytes=(memory_a.fullest_bytes, memory_b.fullest_bytes),
        served_elsewhere=float(moved.mean()),
        copies_gained=gained,
        copies_lost=lost,
        most_changed={first.cluster.site_name(dc): float(moved[dc]) for dc in changed},
        moved_experts=moved_experts,
        same_popularity=same,
        switch_at=switch_at(partial(step_at, first), partial(step_at, second)),
    )


def switch_at(first: StepAt, second: StepAt, halvings: int = HALVINGS) -> float | None:
    """The factor on all bandwidths between sites, nearest to 1 in ratio, at which both plans take equally long; None where one is
    faster at every factor that is looked at."""

    def ahead(factor: float) -> float:
        return _ahead(first, second, factor)

    here = ahead(1.0)
    if abs(here) < 1e-12:
        return 1.0
    steps = [2.0**power for power in range(1, int(np.log2(WIDEST)) + 1)]
    for inner, outer in zip([1.0, *steps], steps, strict=False):
        crossed = [side for side in (1, -1) if ahead(outer**side) * here < 0]
        found = [equal_at(first, second, inner**side, outer**side, halvings) for side in crossed]
        if found:
            return min(found, key=lambda factor: abs(np.log(factor)))
    return None


def equal_at(first: StepAt, second: StepAt, low: float, high: float, halvings: int = HALVINGS) -> float:
    """The factor between ``low`` and ``high`` at which both plans take equally long; the one that is faster at ``high`` is no
    faster at ``low``. Found by so many ``halvings``."""
    there = _ahead(first, second, high)
    for _ in range(halvings):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _ahead(first, second, middle) * there > 0 else (middle, high)
    return high


def step_at(plan: Plan, factor: float) -> float:
    """Seconds of a step with all bandwidths between sites times ``factor``."""
    return evaluate(plan.model_copy(update={"cluster": scaled(plan.cluster, factor)}))[0].step_s


def _ahead(first: StepAt, second: StepAt, factor: float) -> float:
    """By what share of its step the second is faster."""
    return 1 - second(factor) / first(factor)


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """Every bandwidth between sites times ``factor``; what joins the pods of a site stays."""
    return varied(cluster, lambda: factor)


def varied(cluster: Cluster, factor: Callable[[], float]) -> Cluster:
    """Every bandwidth between sites times a factor of its own; what joins the pods of a site stays."""
    sites = [
        site
        if site.part_of is not None
        else site.model_copy(update={"up": site.up and site.up * factor(), "down": site.down and site.down * factor()})
        for site in cluster.sites
    ]
    place = {site.name: site.labels[-1] for site in cluster.sites}
    links = [
        link if place[link.src] == place[link.dst] else link.model_copy(update={"bandwidth": link.bandwidth * factor()})
        for link in cluster.links
    ]
    trunks = [trunk.model_copy(update={"bandwidth": trunk.bandwidth * factor()}) for trunk in cluster.trunks]
    outer = cluster.levels[0].model_copy(update={"bandwidth": cluster.levels[0].bandwidth * factor()})
    return with_links(cluster, outer=outer, sites=tuple(sites), links=tuple(links), trunks=tuple(trunks))


def with_rates_of(cluster: Cluster, other: Cluster) -> Cluster:
    """The same cluster with the rates and latencies between sites that another file gives them, whatever their order there.
    Raises UserError where that has other sites."""
    here, there = cluster.site_names, other.site_names
    missing = [name for name in here if name not in there] or [name for name in there if name not in here]
    if missing:
        where = "not in" if missing[0] in here else "only in"
        raise UserError(f"site {missing[0]} is {where} it: it has {', '.join(there)}, cluster {cluster.name} {', '.join(here)}")
    by_name = {site.name: site for site in other.sites}
    given = cluster.sites or tuple(Site(name=name) for name in here if other.sites)
    rates = [(by_name[site.name].up, by_name[site.name].down) if other.sites else (None, None) for site in given]
    sites = [site.model_copy(update={"up": up, "down": down}) for site, (up, down) in zip(given, rates, strict=True)]
    level = other.levels[0]
    outer = cluster.levels[0].model_copy(update={"bandwidth": level.bandwidth, "latency": level.latency})
    return with_links(cluster, outer=outer, sites=tuple(sites), links=other.links, trunks=other.trunks)


def with_links(
    cluster: Cluster,
    *,
    sites: tuple[Site, ...],
    links: tuple[PairLink, ...],
    trunks: tuple[SharedTrunk, ...],
    outer: Level | None = None,
) -> Cluster:
    """The same cluster with other links between its sites. Not validated again: only rates change."""
    values = {name: getattr(cluster, name) for name in Cluster.model_fields}
    levels = (outer or cluster.levels[0], *cluster.levels[1:])
    return Cluster.model_construct(**(values | {"levels": levels, "sites": sites, "links": links, "trunks": trunks}))
