"""Plans from serving tables: search, bound, and the better of this and equal domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from hybridep.arrays import IntArray
from hybridep.codecs import Codecs
from hybridep.errors import InfeasibleError, NoSolutionError
from hybridep.homes import homes_text
from hybridep.plan import Objective, Plan, Schedule
from hybridep.provenance import provenance
from hybridep.recompute import ALL, Recompute, cheapest_first
from hybridep.serving import serving_groups
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.activations import pre_expert_bytes
from planner.chunks import best_of_searches, tables_in_parts
from planner.clock import elapsed_s, now_s
from planner.constraints import Constraints
from planner.domains import layer_group
from planner.evaluate import MOST_RANKS
from planner.goal import FASTEST, Goal
from planner.memory import TOLERANCE
from planner.plans import plan_domains, predict, solver_report
from planner.sites.cost import SiteCost, fixed_cost
from planner.sites.evaluate import home_of, nearest_inside
from planner.sites.free_homes import with_better_homes, with_possible_homes
from planner.sites.problem import Configuration, SiteProblem, site_problem
from planner.sites.search import Found
from planner.sites.solution import SiteSolution, Wishes, solve_sites
from planner.solve import over_budget, too_small


def plan_sites(
    cluster: Cluster,
    workload: Workload,
    *,
    solver: str = "highs",
    schedule: Schedule | None = None,
    constraints: Constraints | None = None,
    wishes: Wishes | None = None,
    goal: Goal = FASTEST,
    codecs: Mapping[str, Codecs] | None = None,
    most_chunks: int = 1,
    fit_domains: bool = False,
    free_homes: bool = False,
    home: IntArray | None = None,
) -> list[Plan]:
    """The fastest (or cheapest) plans found for sites that differ, best first, at most ``wishes.keep``: one serving table for all
    layers, or equal domains where those win.

    All layers compute again in backward (``LayerGroup.recompute``) where no table fits otherwise, and among few enough sites for
    walks also where that is better. The first has a bound that holds for every serving table that keeps the rules, whatever it
    costs and the choice inside sites, used in all layers, and for the integer program's mixtures of equal domains; and where
    tokens travel in any number of parts up to ``most_chunks`` (tables are searched for tokens in one piece).
    ``fit_domains``: where no equal domains fit no table is looked for, since sites are alike. ``free_homes``: more experts may
    live where links are faster, or rules or prices ask for it (``planner.sites.free_homes``); the bound is then one for plans
    with the homes chosen, and for equal domains. ``home``: where they do live, which leaves equal domains out. Raises
    InfeasibleError and UserError.
    """
    wishes = wishes or Wishes()
    started, asked_s = now_s(), elapsed_s()
    make = partial(site_problem, cluster, workload, schedule, goal=goal, codecs=codecs, most_chunks=most_chunks, home=home)
    free = free_homes and home is None
    try:
        problem = make(constraints)
    except InfeasibleError:
        possible = with_possible_homes(replace(make(), constraints=constraints)) if free else None
        if possible is None:
            raise
        problem = possible
    if free:
        problem, wishes = with_better_homes(problem, wishes)
    domains = None
    if problem.permissions is None and home is None and cluster.num_gpus <= MOST_RANKS:
        limit_s, by_level = max(wishes.time_limit_s / 4, 0.2), problem.codecs_by_level

        def search(schedule: Schedule) -> list[Plan]:
            wanted = partial(plan_domains, solver=solver, time_limit_s=limit_s, goal=goal, codecs=by_level)
            return [wanted(cluster, workload, schedule=schedule)]

        try:
            [domains] = best_of_searches(search, problem.schedule, most_chunks)
        except InfeasibleError:
            if fit_domains:
                raise
        except NoSolutionError:
            pass  # the solver had no plan in its part of the time; tables may do without

    def solved(problem: SiteProblem, ways: tuple[Recompute, ...] = ()) -> SiteSolution:
        left_s = max(wishes.time_limit_s - (now_s() - started), 0.1)
        return solve_sites(problem, replace(wishes, time_limit_s=left_s, paced_by_s=wishes.time_limit_s, ways=ways))

    tried = [solved(problem, cheapest_first(workload))]
    for recompute in cheapest_first(workload):
        if tried[-1].proofs:
            break
        # Nothing fits, or every table was tried: with less memory for each, others may fit.
        again = replace(problem, recompute=recompute)
        if recompute is ALL or _may_fit(again):
            tried.append(solved(again))
    tried = [one for one in tried if one.fits] or tried[-1:]
    solution = min(tried, key=lambda one: one.found.rank)
    problem, fits = solution.problem, solution.fits
    if not fits and domains is None:
        domains = _cheapest(problem, solution.found, wishes, free_homes=free_homes, home=home)
    more = [table_plan(problem, one.table, _configuration(one)) for one in solution.pool if one is not solution.found]
    if domains is not None and (not fits or goal.value_of(domains) <= solution.found.rank[1]):
        best = domains
        more = [one for one in more if goal.value_of(one) > goal.value_of(best)]
    else:
        best = table_plan(problem, solution.found.table, _configuration(solution.found))
    bounds_s = [best.predicted.step, *(one.bound_s for one in tried)]
    bounds_usd = [best.predicted.cost_usd, *(one.bound_usd for one in tried)]
    if domains is not None and domains.solver is not None:
        bounds_s.append(domains.solver.bound)
        bounds_usd += [] if domains.solver.cost_bound is None else [domains.solver.cost_bound]
    report = solver_report(
        solver=solver,
        goal=goal,
        objective_s=best.predicted.step,
        bound_s=min(bounds_s),
        cost_usd=best.predicted.cost_usd,
        bound_usd=min(bounds_usd),
        solve_s=elapsed_s() - asked_s,
    )
    return [best.model_copy(update={"solver": report}), *more][: wishes.keep]


def _may_fit(problem: SiteProblem) -> bool:
    """Whether ranks have room for what any table takes."""
    kept = pre_expert_bytes(problem.workload, problem.compute.share, problem.recompute).kept
    needed = fixed_cost(problem).lasting_bytes + problem.num_layers * kept
    return bool((needed <= problem.compute.memory_bytes * (1 + TOLERANCE)).all())


def _cheapest(problem: SiteProblem, least: Found, wishes: Wishes, *, free_homes: bool, home: IntArray | None) -> Plan:
    """Where the search for the fastest plan found none within the budget: the cheapest plan, in as many parts as suit it, if that
    one is. Raises InfeasibleError where it is not either, or memory is missing."""
    budget_usd, cost = problem.goal.budget_usd, least.cost
    assert cost is not None
    if budget_usd is None or not cost.fits:
        raise InfeasibleError(_missing(problem, least))
    cheap = plan_sites(
        problem.cluster,
        problem.workload,
        schedule=problem.schedule,
        constraints=problem.constraints,
        wishes=replace(wishes, keep=1, report=None),
        goal=Goal(objective=Objective.DOLLARS),
        codecs=problem.codecs_by_level,
        most_chunks=problem.most_chunks,
        free_homes=free_homes,
        home=home,
    )[0]
    assert cheap.solver is not None and cheap.solver.cost_bound is not None
    [in_parts] = tables_in_parts([cheap], problem.most_chunks, 1) if problem.most_chunks > 1 else [cheap]
    if problem.goal.overdraft(in_parts.predicted.cost_usd):
        found = in_parts.predicted
        raise InfeasibleError(over_budget(budget_usd, found.cost_usd, found.step, cheap.solver.cost_bound))
    return in_parts


def table_plan(problem: SiteProblem, table: IntArray, configuration: Configuration) -> Plan:
    """The plan with this serving table ([D, E]) in all MoE layers, with its prediction and without a solver's report."""
    choices, serving = problem.choices(configuration.inside), serving_groups(problem.cluster, table)
    layers, residency = problem.workload.model.num_moe_layers, configuration.residency
    homes = homes_text(problem.cluster, problem.home)
    group = layer_group(0, layers, choices, residency, serving, homes=homes, recompute=problem.recompute)
    made = Plan(
        cluster=problem.cluster,
        workload=problem.workload,
        layers=(group,),
        schedule=problem.schedule,
        codecs=problem.codecs_by_level,
        provenance=provenance(),
    )
    return made.model_copy(update={"prediction": predict(made)})


def chosen_table(plan: Plan) -> tuple[IntArray, Configuration] | None:
    """The serving table ([D, E]) and the configuration of most of a plan's layers, or the nearest one where domains are a part of
    a level inside sites; None for homes that differ by layer (``evaluate.home_of``) and measured popularity, which plans between
    sites do not know."""
    most = max(plan.placed, key=lambda layers: layers.num_layers)
    inside, _ = nearest_inside(plan, most.group)
    if home_of(plan) is None or plan.popularity:
        return None
    return np.ascontiguousarray(most.placement.serve[0]), Configuration(inside=inside, residency=most.group.residency)


def _missing(problem: SiteProblem, least: Found) -> str:
    cost = least.cost
    assert isinstance(cost, SiteCost)
    return too_small(
        problem.cluster,
        cost.fullest_rank,
        cost.memory_bytes,
        "in the plan found that needs least",
        "relax the rules, " if problem.permissions else "",
    )


def _configuration(found: Found) -> Configuration:
    assert found.configuration is not None
    return found.configuration
