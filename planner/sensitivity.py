"""Which link, or how much memory, to buy next: what an upgrade brings to the plan as it is, and after planning anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridep.errors import UserError
from hybridep.placement import IntArray
from hybridep.plan import Plan
from hybridep.sites import Site
from hybridep.topology import Cluster
from hybridep.traffic import FloatArray
from hybridep.units import format_bandwidth, format_bytes
from planner.constraints import Constraints
from planner.difference import with_links
from planner.evaluate import evaluate
from planner.sites.cost import site_cost
from planner.sites.others import rank_order_domains
from planner.sites.plans import chosen_table
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.search import Found, Search
from planner.sites.strategy import walks_help
from planner.streams import with_most

MOVES = 8000
"""Tried when planning anew for one upgrade."""
FACTOR = 2.0
"""How many times as fast an upgraded link is, or as large an upgraded memory."""


@dataclass(frozen=True, kw_only=True)
class Upgrade:
    """One thing bought."""

    name: str
    """``up link of us-east``, ``link us-east -> eu-west``, ``trunk us-east up`` or ``memory of every rank``."""
    before: str
    after: str
    as_it_is_s: float
    """Step of the present plan with it."""
    present_s: float
    """Step of the present plan, or of what is found by searching on without the upgrade, if that is shorter."""
    planned_anew_s: float
    """Step of a plan made for it, starting from these; connections per pair of ranks are chosen anew, too, in both searches."""
    gain_s: float
    """Between these two."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Option:
    name: str
    before: str
    after: str
    problem: SiteProblem


def upgrades(
    plan: Plan, *, top: int = 3, constraints: Constraints | None = None, streams: Mapping[str, int] | None = None
) -> list[Upgrade]:
    """Upgrades by ``FACTOR`` of a site's up link, a site's down link, a link between two sites, a trunk, or the memory, the most
    useful first; of sites with pods the trunks are what joins them to others. Of each sort the ``top`` ones by what they bring to
    the plan as it is (its step's derivative, taken in one stride) are verified by planning anew; the others are left out. Where
    the plan is none that plans between sites know, which and where these searches begin go by the nearest one (``chosen_table``).
    ``streams`` are the connections by level name that were asked for (``Schedule.streams``); others may change. Raises UserError
    for one site, and plans with homes of their own or measured popularity."""
    chosen = chosen_table(plan)
    if chosen is None or plan.cluster.sizes[0] < 2:
        raise UserError(
            f"cluster {plan.cluster.name}: upgrades are priced for plans between sites, without homes of their own or popularity"
        )
    if plan.schedule.prefetch:
        raise UserError(
            "upgrades are priced for plans whose copies set out with their blocks; leave --prefetch or --upgrades out"
        )
    table, configuration = chosen
    schedule, _ = with_most(plan.cluster, plan.schedule.model_copy(update={"streams": dict(streams or {})}))
    again = plan.recomputes
    problem = site_problem(plan.cluster, plan.workload, schedule, constraints, codecs=plan.codecs, recompute=again)
    present = _searched(problem, [table])
    present_s = min(evaluate(plan)[0].step_s, _step_s(present))
    found = []
    for options in (_access(problem, up=True), _access(problem, up=False), _pairs(problem), _trunks(problem)):
        priced = [(site_cost(option.problem, table, configuration).step_s, option) for option in options]
        found += sorted(priced, key=lambda entry: entry[0])[:top]
    more = _more_memory(problem)
    found.append((site_cost(more.problem, table, configuration).step_s, more))
    made = []
    for _, option in found:
        as_it_is_s = evaluate(plan.model_copy(update={"cluster": _cluster(option.problem)}))[0].step_s
        anew_s = min(_step_s(_searched(option.problem, [table, present.table])), as_it_is_s, present_s)
        made.append(
            Upgrade(
                name=option.name,
                before=option.before,
                after=option.after,
                as_it_is_s=as_it_is_s,
                present_s=present_s,
                planned_anew_s=anew_s,
                gain_s=present_s - anew_s,
            )
        )
    return sorted(made, key=lambda upgrade: -upgrade.gain_s)


def _searched(problem: SiteProblem, tables: Sequence[IntArray]) -> Found:
    """The best that a short search from these finds."""
    search = Search(problem=problem)
    starts = [search.evaluate(table) for table in tables]
    for other in rank_order_domains(problem):
        search.evaluate(other)
    if walks_help(problem):
        from planner.sites.walks import improve_tables  # numba takes a while to import

        improve_tables(search, sorted(starts, key=lambda one: one.rank)[:1], MOVES, np.random.default_rng(0))
    assert search.best is not None
    return search.best


def _step_s(found: Found) -> float:
    """Infinite where it does not fit."""
    return found.rank[1] if found.rank[0] == 0 else float("inf")


def _cluster(problem: SiteProblem) -> Cluster:
    """That of a problem, at the problem's rates."""
    cluster, place = problem.cluster, {name: dc for dc, name in enumerate(problem.cluster.site_names)}
    sites = tuple(
        site.model_copy(update={"up": float(up), "down": float(down)})
        for site, up, down in zip(
            cluster.sites or tuple(Site(name=name) for name in place),
            problem.up_bytes_per_s,
            problem.down_bytes_per_s,
            strict=True,
        )
    )
    links = cluster.links
    if (rates := problem.pair_bytes_per_s) is not None:
        links = tuple(link.model_copy(update={"bandwidth": float(rates[place[link.src], place[link.dst]])}) for link in links)
    return with_links(cluster, sites=sites, links=links, trunks=cluster.trunks)


def _access(problem: SiteProblem, *, up: bool) -> Iterator[_Option]:
    rates = problem.up_bytes_per_s if up else problem.down_bytes_per_s
    for dc in range(problem.num_sites):
        if _is_pod(problem, dc):
            continue
        faster = rates.copy()
        faster[dc] *= FACTOR
        changed = replace(problem, up_bytes_per_s=faster) if up else replace(problem, down_bytes_per_s=faster)
        if problem.pair_bytes_per_s is not None and any(site.part_of is not None for site in problem.cluster.sites):
            # Links to and from pods, and beside them, are as wide as access links; so they stay.
            pairs = np.where(_as_access(problem), _access_rates(changed), problem.pair_bytes_per_s)
            changed = replace(changed, pair_bytes_per_s=pairs)
        name = f"{'up' if up else 'down'} link of {problem.cluster.site_name(dc)}"
        yield _Option(name=name, before=format_bandwidth(rates[dc]), after=format_bandwidth(faster[dc]), problem=changed)


def _access_rates(problem: SiteProblem) -> FloatArray:
    """[D, D]: what the access links of both ends leave possible."""
    return np.minimum(problem.up_bytes_per_s[:, None], problem.down_bytes_per_s[None, :])


def _as_access(problem: SiteProblem) -> NDArray[np.bool_]:
    """[D, D]: pairs whose links are as wide as the access links of their ends."""
    assert problem.pair_bytes_per_s is not None
    return np.asarray(problem.pair_bytes_per_s == _access_rates(problem))


def _pairs(problem: SiteProblem) -> Iterator[_Option]:
    """Those that are narrower than the access links of their ends: others bring nothing."""
    rates = problem.pair_bytes_per_s
    if rates is None:
        return
    for src, dst in np.argwhere(rates < _access_rates(problem)):
        if _is_pod(problem, src) or _is_pod(problem, dst):
            continue
        faster = rates.copy()
        faster[src, dst] *= FACTOR
        name = f"link {problem.cluster.site_name(int(src))} -> {problem.cluster.site_name(int(dst))}"
        yield _Option(
            name=name,
            before=format_bandwidth(rates[src, dst]),
            after=format_bandwidth(faster[src, dst]),
            problem=replace(problem, pair_bytes_per_s=faster),
        )


def _trunks(problem: SiteProblem) -> Iterator[_Option]:
    cluster, place = problem.cluster, {name: dc for dc, name in enumerate(problem.cluster.site_names)}
    for number, trunk in enumerate(cluster.trunks):
        faster = trunk.model_copy(update={"bandwidth": trunk.bandwidth * FACTOR})
        trunks = (*cluster.trunks[:number], faster, *cluster.trunks[number + 1 :])
        changed = with_links(cluster, sites=cluster.sites, links=cluster.links, trunks=trunks)
        rates = None if problem.pair_bytes_per_s is None else problem.pair_bytes_per_s.copy()
        for src, dst in (map(place.__getitem__, way.split(" -> ")) for way in trunk.carries):
            # Links of pods are as wide as the path over trunks.
            if rates is not None and (_is_pod(problem, src) or _is_pod(problem, dst)):
                rates[src, dst] *= FACTOR
        yield _Option(
            name=f"trunk {trunk.name.removeprefix('trunk ')}",
            before=format_bandwidth(trunk.bandwidth),
            after=format_bandwidth(faster.bandwidth),
            problem=replace(problem, cluster=changed, pair_bytes_per_s=rates),
        )


def _is_pod(problem: SiteProblem, dc: int) -> bool:
    """Its links are inside a site, or as wide as others are."""
    return bool(problem.cluster.sites) and problem.cluster.sites[dc].part_of is not None


def _more_memory(problem: SiteProblem) -> _Option:
    cluster = problem.cluster
    sites = tuple(
        site.model_copy(update={"gpu": site.gpu.model_copy(update={"memory": site.gpu.memory * FACTOR})})
        if site.gpu is not None and site.gpu.memory is not None
        else site
        for site in cluster.sites
    )
    gpu = cluster.gpu.model_copy(update={"memory": cluster.gpu.memory * FACTOR})
    has = sorted({one.memory for one in cluster.site_gpus})
    return _Option(
        name="memory of every rank",
        before=" or ".join(map(format_bytes, has)),
        after=" or ".join(format_bytes(one * FACTOR) for one in has),
        problem=replace(problem, cluster=cluster.model_copy(update={"gpu": gpu, "sites": sites})),
    )
