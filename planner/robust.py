"""Plans for bandwidths that are not known exactly: the best step at a quantile of scenarios, or in the worst of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridep.codecs import Codecs
from hybridep.errors import UserError
from hybridep.plan import Plan, Schedule
from hybridep.sites import Site
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.constraints import Constraints
from planner.difference import scaled, varied, with_links, with_rates_of
from planner.evaluate import evaluate
from planner.sites.plans import chosen_table, plan_sites, table_plan
from planner.sites.problem import site_problem
from planner.sites.search import at_quantile
from planner.sites.solution import Wishes, solve_sites
from planner.solve import gap
from planner.streams import with_fewest, with_most


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
    """No plan does better at the quantile."""

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
) -> RobustPlan:
    """The plan whose step at ``quantile`` of the scenarios (1: in the worst) is shortest; never worse there than the plan for
    ``cluster`` itself. Of the scenarios count the rates between sites; all else, and with it what fits, is as in ``cluster``.
    Raises UserError for scenarios with other sites, and what ``plan`` raises."""
    scenarios = at_their_rates(cluster, scenarios, quantile)
    schedule, free = with_most(cluster, schedule)
    half = Wishes(time_limit_s=time_limit_s / 2)
    nominal = plan_sites(cluster, workload, schedule=schedule, constraints=constraints, wishes=half, codecs=codecs)[0]
    again = nominal.recomputes
    problem = site_problem(cluster, workload, schedule, constraints, codecs=codecs, recompute=again)
    first = chosen_table(nominal)
    solution = solve_sites(
        problem,
        Wishes(
            time_limit_s=time_limit_s / 2,
            scenarios=tuple(site_problem(one, workload, schedule, codecs=codecs, recompute=again) for one in scenarios),
            quantile=quantile,
            seeds=() if first is None else (first[0],),
        ),
    )
    assert solution.found.configuration is not None
    robust = table_plan(problem, solution.found.table, solution.found.configuration)
    nominal_steps_s = _steps(nominal, scenarios)
    if at_quantile(nominal_steps_s, quantile) <= solution.found.rank[1]:
        robust = nominal
    robust = with_fewest(robust, free, lambda one: at_quantile(_steps(one, scenarios), quantile))
    nominal = with_fewest(nominal, free)
    steps_s, nominal_steps_s = _steps(robust, scenarios), _steps(nominal, scenarios)
    return RobustPlan(
        plan=robust,
        quantile=quantile,
        steps_s=steps_s,
        nominal_steps_s=nominal_steps_s,
        step_s=at_quantile(steps_s, quantile),
        nominal_step_s=at_quantile(nominal_steps_s, quantile),
        bound_s=min(solution.bound_s, at_quantile(steps_s, quantile)),
    )


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
