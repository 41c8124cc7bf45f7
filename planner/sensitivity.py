"""Which link, or how much memory, to buy next: what an upgrade brings to the plan as it is, and after planning anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np

from hybridep.arrays import IntArray
from hybridep.errors import HybridEPError, UserError
from hybridep.plan import Plan
from hybridep.recompute import Recompute, cheapest_first
from hybridep.topology import Cluster
from planner.constraints import Constraints
from planner.evaluate import MOST_RANKS, evaluate
from planner.plans import plan_domains
from planner.sites.cost import site_cost
from planner.sites.evaluate import home_of
from planner.sites.others import rank_order_domains
from planner.sites.plans import chosen_table
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.search import Found, Search
from planner.sites.strategy import walks_help
from planner.streams import with_most
from planner.upgrade_options import Option, Rates, link_options, memory_options

MOVES = 8000
"""Tried when planning anew for one upgrade, and one way to compute again."""
_DOMAINS_S = 5.0
"""Limit of the integer program for equal domains with more memory."""


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

    @classmethod
    def of(cls, option: Option, *, as_it_is_s: float, present_s: float, planned_anew_s: float) -> Upgrade:
        """What an option brings."""
        return cls(
            name=option.name,
            before=option.before,
            after=option.after,
            as_it_is_s=as_it_is_s,
            present_s=present_s,
            planned_anew_s=planned_anew_s,
            gain_s=present_s - planned_anew_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def upgrades(
    plan: Plan, *, top: int = 3, constraints: Constraints | None = None, streams: Mapping[str, int] | None = None
) -> list[Upgrade]:
    """What can be bought (``planner.upgrade_options``), the most useful first; of sites with pods the trunks are what joins them
    to others. Of each sort the ``top`` ones by what they bring to the plan as it is (its step's derivative, taken in one stride)
    are verified by planning anew; the others are left out. Where the plan is none that plans between sites know, which and where
    these searches begin go by the nearest one (``chosen_table``). ``streams`` are the connections by level name that were
    asked for (``Schedule.streams``); others may change. Raises UserError for one site, and plans with homes that differ by
    layer or measured popularity."""
    chosen = chosen_table(plan)
    if chosen is None or plan.cluster.sizes[0] < 2:
        raise UserError(
            f"cluster {plan.cluster.name}: upgrades are priced for plans between sites, without homes that differ by "
            "layer or popularity"
        )
    if plan.schedule.prefetch:
        raise UserError(
            "upgrades are priced for plans whose copies set out with their blocks; leave --prefetch or --upgrades out"
        )
    table, configuration = chosen
    schedule, _ = with_most(plan.cluster, plan.schedule.model_copy(update={"streams": dict(streams or {})}))
    asked = site_problem(plan.cluster, plan.workload, schedule, constraints, codecs=plan.codecs, home=home_of(plan))
    # What no layer computes again now none need with more of anything.
    ways = (Recompute.NOTHING, *cheapest_first(plan.workload)) if plan.recomputes else (Recompute.NOTHING,)
    problems = [replace(asked, recompute=one) for one in ways]
    problem, present = min(((one, _searched(one, [table])) for one in problems), key=lambda found: found[1].rank)

    def mixed_s(cluster: Cluster) -> float:
        """Of equal domains that differ between layers; infinite where there are none, or rules might forbid them."""
        if problem.permissions is not None or cluster.num_gpus > MOST_RANKS:
            return inf
        try:
            made = plan_domains(cluster, plan.workload, time_limit_s=_DOMAINS_S, schedule=schedule, codecs=plan.codecs)
        except HybridEPError:
            return inf
        return made.predicted.step

    present_s = min(evaluate(plan)[0].step_s, _step_s(present), mixed_s(plan.cluster))
    found, rates = list[Option](), Rates.of(plan.cluster)
    for options in (*link_options(rates), memory_options(rates)):
        priced = [(site_cost(_at(problem, option.rates), table, configuration).step_s, option) for option in options]
        found += [option for _, option in sorted(priced, key=lambda entry: entry[0])[:top]]
    made = []
    for option in found:
        cluster = option.rates.applied
        as_it_is_s = evaluate(plan.model_copy(update={"cluster": cluster}))[0].step_s
        # Links change nothing of what fits; with more memory less need be computed again.
        is_memory = option.link is None
        anew = [_searched(_at(one, option.rates), [table, present.table]) for one in (problems if is_memory else [problem])]
        steps_s = [as_it_is_s, present_s, *map(_step_s, anew), *([mixed_s(cluster)] if is_memory else [])]
        made.append(Upgrade.of(option, as_it_is_s=as_it_is_s, present_s=present_s, planned_anew_s=min(steps_s)))
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


def _at(problem: SiteProblem, rates: Rates) -> SiteProblem:
    """The problem at other rates, of links between sites or of memory."""
    return replace(
        problem,
        cluster=rates.cluster,
        up_bytes_per_s=rates.up_bytes_per_s,
        down_bytes_per_s=rates.down_bytes_per_s,
        pair_bytes_per_s=rates.pair_bytes_per_s,
    )
