"""Plans for bandwidths that are not known exactly: the best step at a quantile of scenarios, or in the worst of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hybridep.codecs import Codecs
from hybridep.errors import UserError
from hybridep.plan import Plan, Schedule
from hybridep.recompute import Recompute, cheapest_first
from hybridep.sites import Site
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.constraints import Constraints
from planner.difference import scaled, varied, with_links, with_rates_of
from planner.evaluate import evaluate
from planner.plans import predict
from planner.sites.evaluate import home_of
from planner.sites.plans import chosen_table, plan_sites, table_plan
from planner.sites.problem import site_problem
from planner.sites.search import at_quantile
from planner.sites.solution import Wishes, solve_sites
from planner.solve import gap
from planner.stages.bound import least_s
from planner.streams import with_fewest, with_most
from planner.within_loss import Make, Searched, best_of, coded, plain, possible, search_each


@dataclass(frozen=True, kw_only=True)
class OverScenarios:
    """How a plan does over scenarios, and beside it the one made for the nominal bandwidths."""

    quantile: float
    steps_s: tuple[float, ...]
    """Of the plan in each scenario."""
    nominal_steps_s: tuple[float, ...]
    """Of the one made for the cluster as it is given, in each scenario."""
    step_s: float
    """Of the plan at the quantile."""
    nominal_step_s: float
    bound_s: float
    """No plan of its kind does better at the quantile; of those without stages, none with one serving table for all layers."""

    @property
    def gap(self) -> float:
        """(step - bound) / step at the quantile."""
        return gap(self.step_s, self.bound_s)

    def to_json(self) -> dict[str, Any]:
        """Without the plan."""
        names = ("quantile", "step_s", "bound_s", "gap", "steps_s", "nominal_step_s", "nominal_steps_s")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class RobustPlan(OverScenarios):
    """A plan, and how it does."""

    plan: Plan


def plan_for_scenarios(
    cluster: Cluster,
    workload: Workload,
    scenarios: Sequence[Cluster],
    *,
    quantile: float = 1.0,
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
    constraints: Constraints | None = None,
    codecs: Mapping[str, Codecs] | None = None,
    max_loss: float | None = None,
    free_homes: bool = False,
) -> RobustPlan:
    """The plan whose step at ``quantile`` of the scenarios (1: in the worst) is shortest; never worse there than the plan for
    ``cluster`` itself. Of the scenarios count the rates between sites; all else, and with it what fits, is as in ``cluster``;
    so are experts' homes, with ``free_homes`` those of the plan for it (``planner.plan``), and bounds hold for these.
    ``codecs`` by level name, or, within a ``max_loss`` (``planner.within_loss``), those between sites with which it is shortest
    at the quantile; the bound then holds for all that are permitted. Raises UserError for scenarios with other sites, and what
    ``plan`` raises."""
    scenarios = at_their_rates(cluster, scenarios, quantile)
    schedule, free = with_most(cluster, schedule)

    def at(plan: Plan) -> float:
        return at_quantile(_steps(plan, scenarios), quantile)

    def make(by_level: Mapping[str, Codecs], limit_s: float) -> _Made:
        half = Wishes(time_limit_s=limit_s / 2)
        nominal = plan_sites(
            cluster, workload, schedule=schedule, constraints=constraints, wishes=half, codecs=by_level, free_homes=free_homes
        )[0]
        again = nominal.recomputes
        made_for = partial(
            site_problem,
            workload=workload,
            schedule=schedule,
            constraints=constraints,
            codecs=by_level,
            recompute=again,
            home=home_of(nominal),
        )
        problem = made_for(cluster)
        first = chosen_table(nominal)
        solution = solve_sites(
            problem,
            Wishes(
                time_limit_s=limit_s / 2,
                scenarios=tuple(made_for(one) for one in scenarios),
                quantile=quantile,
                seeds=() if first is None else (first[0],),
                ways=tuple(one for one in (Recompute.NOTHING, *cheapest_first(workload)) if one is not again),
            ),
        )
        found, robust = solution.found, nominal
        if solution.fits and found.rank[1] < at(nominal):
            assert found.configuration is not None
            robust = table_plan(solution.problem, found.table, found.configuration)
        return _Made(plan=with_fewest(robust, free, at), nominal=with_fewest(nominal, free), bound_s=solution.bound_s)

    if max_loss is None:
        made = make(codecs or {}, time_limit_s)
    elif codecs:
        raise UserError("codecs given and codecs to be chosen by their loss: leave one of them out")
    else:
        made = _within_loss(make, at, cluster, workload, max_loss, time_limit_s)
    steps_s, nominal_steps_s = _steps(made.plan, scenarios), _steps(made.nominal, scenarios)
    return RobustPlan(
        plan=made.plan,
        quantile=quantile,
        steps_s=steps_s,
        nominal_steps_s=nominal_steps_s,
        step_s=at_quantile(steps_s, quantile),
        nominal_step_s=at_quantile(nominal_steps_s, quantile),
        bound_s=min(made.bound_s, at_quantile(steps_s, quantile)),
    )


@dataclass(frozen=True, kw_only=True)
class _Made:
    plan: Plan
    nominal: Plan
    """For the cluster as it is given."""
    bound_s: float
    """No step at the quantile is shorter."""


def _within_loss(
    make: Make[_Made], at: Callable[[Plan], float], cluster: Cluster, workload: Workload, max_loss: float, time_limit_s: float
) -> _Made:
    """What is best with codecs of which ``max_loss`` permits each; ``at``: seconds of a plan at the quantile."""

    def at_if_possible(plan: Plan) -> float:
        return at(plan) if possible(plan) else math.inf

    def worth(found: _Made, codecs: Codecs) -> float:
        return at_if_possible(coded(found.plan, codecs))

    searched = search_each(make, worth, cluster, workload, max_loss, time_limit_s)
    nominals = [[one.nominal] for one in searched.found]
    [nominal] = best_of(Searched(found=nominals, unknown=searched.unknown, infeasible=searched.infeasible))
    plans = [nominal, *(one.plan for one in searched.found)]
    bound_s = min(one.bound_s for one in searched.found)
    if searched.unknown:
        plans.append(coded(searched.found[0].plan, searched.unknown[0]))
        # Computation takes as long in every scenario.
        bound_s = min(bound_s, least_s(cluster, workload, 1))
    best = plain(min(plans, key=at_if_possible), at_if_possible)
    if best is not nominal:
        # A report of one search is of its codecs, at the given rates.
        best = best.model_copy(update={"prediction": predict(best), "solver": None})
    return _Made(plan=best, nominal=nominal, bound_s=bound_s)


def at_their_rates(cluster: Cluster, scenarios: Sequence[Cluster], quantile: float) -> list[Cluster]:
    """``cluster`` at the rates between sites that each of the scenarios gives them. Raises UserError for scenarios with other
    sites, for none, and for a quantile that is none."""
    if not scenarios or not 0 < quantile <= 1:
        raise UserError(f"planning for scenarios needs at least one, and a quantile above 0 and up to 1 (found {quantile:g})")
    return [with_rates_of(cluster, one) for one in scenarios]


def interval_scenarios(cluster: Cluster, share: float, *, draws: int = 8) -> list[Cluster]:
    """Every bandwidth between sites somewhere in [1 - share, 1 + share] of what is given: first all at the lower end, which is
    the worst case for every plan, then independent uniform draws. Raises UserError for a share outside [0, 1)."""
    if not 0 <= share < 1:
        raise UserError(f"bandwidths within {share:g} of what is given: the share must be at least 0 and below 1")
    rng = np.random.default_rng(0)
    return [scaled(cluster, 1 - share), *(_drawn(cluster, share, rng) for _ in range(draws))]


def _drawn(cluster: Cluster, share: float, rng: np.random.Generator) -> Cluster:
    rate = cluster.levels[0].bandwidth
    sites = tuple(
        site.model_copy(update={"up": site.up or rate, "down": site.down or rate})
        for site in cluster.sites or tuple(Site(name=name) for name in cluster.site_names)
    )
    apart = with_links(cluster, sites=sites, links=cluster.links, trunks=cluster.trunks)
    return varied(apart, lambda: float(rng.uniform(1 - share, 1 + share)))


def _steps(plan: Plan, scenarios: Sequence[Cluster]) -> tuple[float, ...]:
    return tuple(evaluate(plan.model_copy(update={"cluster": one}))[0].step_s for one in scenarios)
