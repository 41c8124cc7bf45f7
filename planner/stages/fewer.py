"""Which sites to train on: all of them only where each pays for what it makes others send.

Sites that are left out are idle; the others share out the same global batch (``hybridep.shares.on_sites``). One site by itself is
tried, then numbers of them that differ by factors of ``_FACTOR``, up to all, each time those that are nearest to each other, in
pipelines or, where none is possible, without stages; then the best ones give sites up and exchange them for others while that
helps; sites that may change places with each other (``planner.stages.kinds``) are one to it. Before fewer are chosen all are
tried without stages, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hybridep.arrays import IntArray
from hybridep.errors import HybridEPError
from hybridep.pipeline import AnyPlan, PipelinePlan, codecs_inside
from hybridep.plan import Objective, Plan
from hybridep.shares import on_sites
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.alone import alone
from planner.choose import Report, plan
from planner.clock import now_s
from planner.goal import FASTEST, Worth
from planner.plans import goal_of, solver_report
from planner.stages.bound import least_of_any_s, least_s, least_usd_of_any
from planner.stages.kinds import Kinds, kinds_of
from planner.stages.order import way_s_per_byte
from planner.stages.pipelines import StageCache, plan_pipeline
from planner.stages.rules import StageRules
from planner.stages.wishes import StageWishes

_FACTOR = 1.5
_STARTS = 2
"""Sites from which others are added."""
_NUMBERED_BY, _AGAIN = 0.5, 0.2
"""Shares of the time limit: after the first each further number of sites is tried once; the second is for another look at all
sites, before fewer are chosen. In what is left sites are exchanged."""
_CODED = 0.2
"""Share of the time limit in which codecs are chosen, where a loss is permitted."""
_LEAST_S = 0.1
"""Time limit of what is tried after the time limit."""
_PATIENCE_S = 0.5
"""For how long a first pipeline of fewer sites than all is looked for at least: it may take seconds to be sure that none fits."""
_SAVES = 0.1
"""Share of a step, or its price, that leaving sites out must save: the more sites, the farther short searches are from what long
ones find."""

Sites = tuple[str, ...]
"""Names, in the cluster's order."""


@dataclass(frozen=True, kw_only=True)
class Paying:
    """What was chosen, by short searches."""

    sites: Sites
    fewer: AnyPlan | None
    """The best plan found for fewer sites than all, with the same global batch; None where there is none."""
    pipelines: Mapping[Sites, PipelinePlan] = field(default_factory=dict)
    """The best one found for each choice of sites that was tried."""


def sites_that_pay(
    cluster: Cluster,
    workload: Workload,
    wishes: StageWishes | None = None,
    *,
    time_limit_s: float = 60.0,
    report: Report | None = None,
    cache: StageCache | None = None,
) -> Paying:
    """The sites of the best pipeline, or plan without stages, that was found; all of them where fewer save little. Rules hold
    among those (``among``). ``report``: told ("plan", seconds) of each that is better than those before. ``cache``: of searches
    for all sites. Raises what ``plan_pipeline`` raises where none is possible."""
    wishes = wishes or StageWishes()
    wishes.check(cluster)
    begun_s, rules = now_s(), StageRules(cluster, workload.model.num_experts, wishes.constraints)
    asked, known, cache = wishes, dict[Sites, PipelinePlan](), cache or StageCache()
    if asked.max_loss is not None:
        # Once, for all sites: the many searches here are too short to choose codecs in each.
        with suppress(HybridEPError):
            coded = plan_pipeline(cluster, workload, wishes, time_limit_s=_CODED * time_limit_s, cache=cache)
            wishes, known = replace(wishes, codecs=coded.codecs, max_loss=None), {cluster.site_names: coded}
    told: Report = report or (lambda what, seconds: None)
    search = _Search(cluster, workload, wishes, rules, begun_s, time_limit_s, told, cache, known)
    paying = search.run()
    if wishes is asked:
        return paying
    # Bounds of those that were found hold for the chosen codecs alone.
    return Paying(sites=paying.sites, fewer=None if paying.fewer is None else _bounded_for_all(paying.fewer, asked))


def _bounded_for_all(plan: AnyPlan, wishes: StageWishes) -> AnyPlan:
    """The plan with a bound that holds for all codecs whose loss is permitted."""
    assert plan.solver is not None
    stages, codecs = 1, wishes.shortest(plan.cluster, plan.workload)
    if isinstance(plan, PipelinePlan):
        stages = wishes.stages or 2
    how = solver_report(
        solver=plan.solver.solver,
        goal=goal_of(plan.solver),
        objective_s=plan.predicted.step,
        bound_s=least_s(plan.cluster, plan.workload, stages, codecs, alike=not wishes.popularity),
        cost_usd=plan.predicted.cost_usd,
        bound_usd=least_usd_of_any(plan.cluster, plan.workload),
        solve_s=plan.solver.solve,
        proven=False,
    )
    return plan.model_copy(update={"solver": how})


def among(
    cluster: Cluster, workload: Workload, wishes: StageWishes, sites: Sites, rules: StageRules | None = None
) -> tuple[Cluster, Workload, StageWishes]:
    """What is asked of these sites by themselves: rules by those of them that are there, and prices only where there are any."""
    rules = rules or StageRules(cluster, workload.model.num_experts, wishes.constraints)
    one, work = on_sites(cluster, workload, sites)
    goal = wishes.goal if one.has_prices else FASTEST
    return one, work, replace(wishes, goal=goal, constraints=rules.inside(one))


def without_stages(
    cluster: Cluster,
    workload: Workload,
    wishes: StageWishes,
    time_limit_s: float,
    *,
    free_homes: bool = False,
    home: IntArray | None = None,
) -> Plan:
    """The best plan found that has all layers at all sites, as wished for. ``free_homes`` and ``home``: see ``planner.plan``.
    Raises what the planner raises."""
    return plan(
        cluster,
        workload,
        solver=wishes.solver,
        time_limit_s=time_limit_s,
        schedule=wishes.schedule,
        constraints=wishes.constraints,
        popularity=wishes.popularity,
        codecs=codecs_inside(wishes.codecs),
        max_loss=wishes.max_loss,
        goal=wishes.goal,
        free_homes=free_homes,
        home=home,
    )


def least_of_any(cluster: Cluster, workload: Workload, wishes: StageWishes) -> float:
    """Seconds of a step, or its price where that is to be small, below which there is no plan for any of the sites."""
    if wishes.goal.objective is Objective.DOLLARS:
        return least_usd_of_any(cluster, workload)
    codecs = wishes.shortest(cluster, workload)
    return least_of_any_s(cluster, workload, wishes.stages, codecs, alike=not wishes.popularity)


@dataclass
class _Search:
    cluster: Cluster
    workload: Workload
    wishes: StageWishes
    rules: StageRules
    begun_s: float
    time_limit_s: float
    report: Report
    cache: StageCache
    """Of searches for all sites."""
    _pipelines: dict[Sites, PipelinePlan]
    """As ``Paying.pipelines``."""
    _worth: dict[Sites, Worth] = field(default_factory=dict)
    _fewer: AnyPlan | None = None

    def run(self) -> Paying:
        """The best found; of an interrupted search the best so far."""
        try:
            self._search()
        except KeyboardInterrupt:
            if not self._worth:
                raise
        return Paying(sites=self._chosen(), fewer=self._fewer, pipelines=self._pipelines)

    def _search(self) -> None:
        every = self.cluster.site_names
        least = self.wishes.stages or 1
        if least == 1:
            self._keep_alone()
        orders = list(_near_orders(self.cluster, [self.rules.possible((site,)) for site in range(self.cluster.sizes[0])]))
        numbered = [
            dict.fromkeys(self._first_of_like(_named(self.cluster, order[:number])) for order in orders)
            for number in self._numbers(max(least, 2))
        ]
        each_s = _NUMBERED_BY * self.time_limit_s / max(sum(map(len, numbered)), 1)
        for same_number in numbered:
            for sites in same_number:
                self._try(sites, each_s)
                if self._left_s(_NUMBERED_BY) < 0:
                    break
        if not self._worth:
            # Says why not.
            self._keep(every, self._pipeline(every, each_s))
        if self._chosen() != every and self._left_s(1.0) > 0:
            # A search of a second or two says little of many sites.
            self._try(every, _AGAIN * self.time_limit_s, again=True)
        best, improved = self._best(), self._chosen() != every
        while improved and self._left_s(1.0) > 0:
            improved = False
            for sites in _changed(best, every):
                if self._left_s(1.0) < 0:
                    break
                if len(sites) >= max(least, 2) and self._try(sites, each_s / 2) and self._best() != best:
                    best, improved = self._best(), True
                    break
        if self._chosen() != every and (left_s := self._left_s(1.0)) > _AGAIN * self.time_limit_s:
            # Nothing is left to exchange, as among like sites.
            with suppress(HybridEPError):
                self._keep(every, self._pipeline(every, left_s))

    def _chosen(self) -> Sites:
        """The best sites that were tried, or all where leaving some out saves little."""
        best, every = self._best(), self.cluster.site_names
        if every in self._worth:
            (over, value), (others_over, others_value) = self._worth[every], self._worth[best]
            if over <= others_over and value * (1 - _SAVES) <= others_value:
                return every
        return best

    def _numbers(self, least: int) -> list[int]:
        """Numbers of sites to try, fewest first: from ``least`` to all, by factors."""
        found, number = list[int](), float(self.cluster.sizes[0])
        while round(number) >= least:
            found.append(round(number))
            number = min(number / _FACTOR, number - 1)
        return found[::-1]

    def _best(self) -> Sites:
        return min(self._worth, key=lambda sites: (self._worth[sites], sites))

    def _keep_alone(self) -> None:
        wishes = self.wishes
        own = alone(self.cluster, self.workload, popularity=wishes.popularity, goal=wishes.goal, constraints=wishes.constraints)
        if own is not None:
            self._keep((own.cluster.site_name(0),), own)

    def _try(self, sites: Sites, limit_s: float, *, again: bool = False) -> bool:
        """Whether there is a plan for these sites, or like ones, that was not known. ``again``: also without stages, if that may
        be, as all are where there is no pipeline."""
        sites = self._first_of_like(sites)
        if sites in self._worth and not again:
            return False
        made, limit_s = list[AnyPlan](), max(min(limit_s, self._left_s(1.0)), _LEAST_S)
        with suppress(HybridEPError):
            made.append(self._pipeline(sites, limit_s))
        if self.wishes.stages is None and (again or not made):
            with suppress(HybridEPError):
                made.append(without_stages(*among(self.cluster, self.workload, self.wishes, sites, self.rules), limit_s / 2))
        for one in made:
            self._keep(sites, one)
        return bool(made)

    def _pipeline(self, sites: Sites, limit_s: float) -> PipelinePlan:
        """The best one found for these sites, now or before. Raises what the planner raises."""
        is_all = len(sites) == self.cluster.sizes[0]
        patience_s, cache = (math.inf, self.cache) if is_all else (max(limit_s, _PATIENCE_S), None)
        known, asked = self._pipelines.get(sites), among(self.cluster, self.workload, self.wishes, sites, self.rules)
        starts = [] if known is None else [known]
        self._pipelines[sites] = plan_pipeline(*asked, time_limit_s=limit_s, patience_s=patience_s, starts=starts, cache=cache)
        return self._pipelines[sites]

    def _keep(self, sites: Sites, made: AnyPlan) -> None:
        worth = self.wishes.goal.worth(made.predicted.expected_s, made.predicted.cost_usd)
        best = all(worth < other for other in self._worth.values())
        if len(sites) < self.cluster.sizes[0]:
            others = [other for known, other in self._worth.items() if len(known) < self.cluster.sizes[0]]
            self._fewer = made if all(worth < other for other in others) else self._fewer
        self._worth[sites] = min(worth, self._worth.get(sites, worth))
        if best:
            self.report("plan", made.predicted.expected_s)

    def _first_of_like(self, sites: Sites) -> Sites:
        """As many sites of each kind, the first ones in the cluster's order."""
        every, wanted = self.cluster.site_names, set(sites)
        numbers = tuple(number for number, site in enumerate(every) if site in wanted)
        return tuple(every[number] for number in self._kinds.settled((numbers,))[0])

    @cached_property
    def _kinds(self) -> Kinds:
        return kinds_of(self.cluster, ruled=self.wishes.constraints is not None)

    def _left_s(self, share: float) -> float:
        return self.begun_s + share * self.time_limit_s - now_s()


def _named(cluster: Cluster, sites: Sequence[int]) -> Sites:
    return tuple(cluster.site_name(site) for site in sorted(sites))


def _near_orders(cluster: Cluster, possible: Sequence[bool]) -> Iterator[list[int]]:
    """All sites, each the one that is nearest to one of those before, from the ends of the fastest links on, first those that may
    be a stage by themselves (``possible``)."""
    apart = way_s_per_byte(cluster)
    both = np.maximum(apart, apart.T)
    np.fill_diagonal(both, np.inf)
    speed = np.array([gpu.throughput for gpu in cluster.site_gpus])
    nearest, starts = both.min(axis=1), list[int]()
    for site in np.lexsort((nearest, -speed, ~np.array(possible))).tolist():
        if len(starts) < _STARTS and all(both[site, other] > nearest[site] for other in starts):
            starts.append(site)
    for start in starts:
        order, left = [start], set(range(len(both))) - {start}
        while left:
            order.append(min(left, key=lambda site: (both[site, order].min(), site)))
            left.remove(order[-1])
        yield order


def _changed(sites: Sites, every: Sites) -> Iterator[Sites]:
    """Sites after each change: one fewer, another in place of one, one more."""
    mine, others = set(sites), [site for site in every if site not in sites]

    def in_order(chosen: set[str]) -> Sites:
        return tuple(site for site in every if site in chosen)

    for one in sites if len(sites) > 1 else ():
        yield in_order(mine - {one})
    for one in sites:
        for other in others:
            yield in_order(mine - {one} | {other})
    for other in others:
        yield in_order(mine | {other})
