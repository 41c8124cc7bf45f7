"""Which link, or how much memory, to buy next for a pipeline: what an upgrade brings to it as it is, and after planning anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.errors import HybridEPError, UserError
from hybridep.pipeline import AnyPlan, PipelinePlan, pipeline_link_s
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.goal import FASTEST
from planner.sensitivity import Upgrade
from planner.stages.bound import least_s
from planner.stages.costs import Costed, costed, is_better
from planner.stages.fewer import without_stages
from planner.stages.inside import Store
from planner.stages.pipelines import plan_pipeline, reported, search_on
from planner.stages.wishes import StageWishes
from planner.upgrade_options import Option, Rates, link_options, memory_options

_TRIES, _LOOKS = 16, 4000
"""Changes that are tried when planning anew for one upgrade, and that are looked at, times sites: the more sites, the longer each
look takes."""
_FRESH = 16
"""Fresh pipelines, about, where memory is bought, since with more of it other numbers of stages may be better, and without."""
_OTHER_KIND_S = 5.0
"""Limit of the search for a plan without stages in place of a pipeline, or the other way round, where memory is bought."""
_SCREENED = 64
"""Links of one sort at most that are doubled for the plan as it is: those that are busy longest."""


@dataclass(frozen=True, kw_only=True)
class SearchedOn:
    """What a short search makes of a pipeline without an upgrade."""

    found: tuple[Costed, ...]
    """The best pipelines that it found; there may be none."""
    better: PipelinePlan | None
    """The best of them, with its prediction, if its step is shorter by more than ``planner.stages.costs.WORTH``."""
    store: Store
    """What was found of stages."""


def searched_on(plan: PipelinePlan, wishes: StageWishes | None = None) -> SearchedOn:
    """The base that upgrades are compared with: what is found from the pipeline, and from some fresh ones, by changes of which as
    many are tried as for an upgrade (``planner.stages.pipelines.search_on``). Wishes as those of ``pipeline_upgrades``."""
    store, asked = Store(), _asked(plan, wishes)
    found = _found_from(plan.cluster, [plan], asked, store, fresh=True)
    own_s, better = costed(plan, store=store).times.step_s, None
    best = min(found, key=lambda one: one.times.step_s, default=None)
    if best is not None and is_better((0.0, best.times.step_s), (0.0, own_s)):
        # Where codecs were to be chosen no pipeline with any of them takes less, as is told of the plan.
        asked = asked if wishes is None or wishes.max_loss is None else replace(asked, codecs={}, max_loss=wishes.max_loss)
        outer = asked.shortest(plan.cluster, plan.workload)
        bound_s = least_s(plan.cluster, plan.workload, asked.stages or 2, outer, alike=not asked.popularity)
        [better] = reported([best], asked, bound_s, plan.solver.solve if plan.solver is not None else 0.0)
    return SearchedOn(found=tuple(found), better=better, store=store)


def pipeline_upgrades(
    plan: PipelinePlan, wishes: StageWishes | None = None, *, top: int = 3, present: SearchedOn | None = None
) -> list[Upgrade]:
    """What can be bought (``planner.upgrade_options``), the most useful first; of sites with pods the trunks are what joins them
    to others. Of each sort the ``top`` ones by what they bring to the plan as it is are verified by planning anew, from the plan
    and what is found without an upgrade (``planner.stages.pipelines.search_on``); others, and links that the plan does not use,
    are left out. Of the ``wishes`` the number of stages, rules and connections count. By the step's time, which no upgrade makes
    longer: where a walk says so, by less than a percent, the step without it is told. ``present``: what was ``searched_on``
    without an upgrade, if it was. Raises UserError for one site."""
    if plan.cluster.sizes[0] < 2:
        raise UserError(f"cluster {plan.cluster.name}: upgrades are priced for plans between sites")
    asked, rates, present = _asked(plan, wishes), Rates.of(plan.cluster), present or searched_on(plan, wishes)
    store, starts = present.store, [plan, *(one.plan for one in present.found)]
    own_s = costed(plan, store=store).times.step_s
    present_s = min([own_s, *(one.times.step_s for one in present.found)])
    busy_s, made = pipeline_link_s(plan), list[Upgrade]()
    for options in (*link_options(rates), memory_options(rates)):
        priced = list[tuple[float, Option]]()
        for option in _busiest(options, busy_s):
            with_it_s = costed(plan.at_rates(option.rates.applied), store=store).times.step_s
            priced.append((min(with_it_s, own_s), option))
        for as_it_is_s, option in sorted(priced, key=lambda entry: entry[0])[:top]:
            anew = _found_from(option.rates.applied, starts, asked, store, fresh=option.link is None)
            anew_s = min([as_it_is_s, present_s, *(one.times.step_s for one in anew)])
            made.append(Upgrade.of(option, as_it_is_s=as_it_is_s, present_s=present_s, planned_anew_s=anew_s))
    return sorted(made, key=lambda upgrade: -upgrade.gain_s)


def of_either_kind(plan: AnyPlan, upgrades: Sequence[Upgrade], wishes: StageWishes) -> list[Upgrade]:
    """The ``upgrades`` of a plan that may be in stages or not: with more memory one of the other kind may have room, and take
    less. Not if one takes less than the present plan without it: that is no gain of memory."""
    wishes, [option] = replace(wishes, goal=FASTEST), memory_options(Rates.of(plan.cluster))
    search = without_stages if isinstance(plan, PipelinePlan) else _in_stages

    def other_s(cluster: Cluster) -> float:
        """Infinite where there is none."""
        try:
            return search(cluster, plan.workload, wishes, _OTHER_KIND_S).predicted.expected_s
        except HybridEPError:
            return np.inf

    anew_s, made = other_s(option.rates.applied), list[Upgrade]()
    for one in upgrades:
        if one.name == option.name and anew_s < one.planned_anew_s and other_s(plan.cluster) >= one.present_s:
            one = replace(one, planned_anew_s=anew_s, gain_s=one.present_s - anew_s)
        made.append(one)
    return sorted(made, key=lambda upgrade: -upgrade.gain_s)


def _in_stages(cluster: Cluster, workload: Workload, wishes: StageWishes, time_limit_s: float) -> PipelinePlan:
    return plan_pipeline(cluster, workload, wishes, time_limit_s=time_limit_s)


def _asked(plan: PipelinePlan, wishes: StageWishes | None) -> StageWishes:
    return replace(wishes or StageWishes(), popularity=plan.popularity, codecs=plan.codecs, max_loss=None, goal=FASTEST)


def _found_from(
    cluster: Cluster, starts: Sequence[PipelinePlan], asked: StageWishes, store: Store, *, fresh: bool
) -> list[Costed]:
    looks = max(_LOOKS // cluster.sizes[0], 1)
    return search_on(cluster, starts, asked, tries=_TRIES, looks=looks, fresh=_FRESH * fresh, store=store)


def _busiest(options: Iterable[Option], busy_s: FloatArray) -> list[Option]:
    """Those of links that the plan uses, the busiest first, at most ``_SCREENED``; and what is no link. ``busy_s``: [links]."""

    def busy(option: Option) -> float:
        return np.inf if option.link is None else float(busy_s[option.link])

    return sorted((one for one in options if busy(one) > 0), key=lambda one: -busy(one))[:_SCREENED]
