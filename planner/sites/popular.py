"""Serving tables for experts whose popularity was measured, layer by layer, between sites that differ.

Tables are searched for as if all experts were alike, which makes their times a matter of counts. Then each layer takes the one of
the best tables that costs it least with its own popularity, experts of one home exchanged so that the more popular ones are where
there are more copies: their tokens stay. Times add up over layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from hybridep.codecs import Codecs
from hybridep.errors import InfeasibleError
from hybridep.gating import Gating, gating
from hybridep.placement import IntArray, Placement
from hybridep.plan import LayerGroup, Plan, Schedule
from hybridep.provenance import provenance
from hybridep.serving import serving_groups
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import now_s
from planner.cost import block_times, layer_coding, layer_cost, layer_traffic
from planner.exchange import Network
from planner.measured import plans_measured
from planner.memory import memory_use
from planner.plans import predict, solver_report
from planner.sites.bound import prove
from planner.sites.plans import chosen_table, plan_sites
from planner.sites.problem import Configuration, SiteProblem, site_problem
from planner.sites.relaxation import Relaxation
from planner.sites.solution import Wishes

TABLES = 16
"""The best ones found, among which each layer chooses."""
SEARCHED = 0.6
"""Share of the time in which they are searched for; the bound has what is left."""
MOST_BOXES = 20_000


class _Choice(NamedTuple):
    """A table that any layer may use."""

    table: IntArray
    """[D, E]"""
    configuration: Configuration


def plans_popular(
    cluster: Cluster,
    workload: Workload,
    popularity: Sequence[tuple[float, ...]],
    count: int = 1,
    *,
    solver: str = "highs",
    schedule: Schedule | None = None,
    codecs: Mapping[str, Codecs] | None = None,
    time_limit_s: float = 60.0,
) -> list[Plan]:
    """At most ``count`` plans, the fastest first, for experts of this ``popularity`` ([layers][E] shares): tables, or equal
    domains, chosen for each MoE layer anew, and others that are alike in all layers, without a solver's report. The bound of the
    first holds for any tables, of each layer by itself. Raises what ``plan_sites`` raises."""
    started = now_s()
    schedule = schedule or Schedule()
    found = plan_sites(
        cluster,
        workload,
        solver=solver,
        schedule=schedule,
        codecs=codecs,
        wishes=Wishes(time_limit_s=SEARCHED * time_limit_s, keep=TABLES),
    )
    problem = site_problem(cluster, workload, schedule, codecs=codecs)
    choices = [_Choice(*chosen) for one in found if (chosen := chosen_table(one)) is not None]
    groups = [[_group(problem, one, layer, shares) for one in choices] for layer, shares in enumerate(popularity)]
    layer_s = np.array([[_layer_s(problem, one, popularity[layer]) for one in row] for layer, row in enumerate(groups)])
    by_layer = [row[best] for row, best in zip(groups, layer_s.argmin(axis=1), strict=True)]
    alike = [[row[place] for row in groups] for place in np.argsort(layer_s.sum(axis=0), kind="stable")]
    made = [_plan(problem, each, popularity) for each in (by_layer, *alike)]
    try:
        domains = plans_measured(cluster, workload, popularity, count, schedule=schedule, codecs=codecs)
    except InfeasibleError:
        domains = []
    fitting = [one for one in made if memory_use(one).fits]
    plans = sorted((*domains, *fitting), key=_step_s)
    if not plans:
        # As if all experts were alike they fit; where popular ones are, they do not.
        raise InfeasibleError(f"no plan found for experts of this popularity fits the memory of {cluster.name}; raise gpu.memory")
    best = plans[0]
    deadline_s = started + time_limit_s
    bounds_s = [_step_s(best), least_s(problem, popularity, _step_s(best), deadline_s)]
    bounds_s += [one.solver.bound for one in domains[:1] if one.solver is not None]
    report = solver_report(
        solver=solver,
        goal=problem.goal,
        objective_s=_step_s(best),
        bound_s=min(bounds_s),
        cost_usd=0.0,
        bound_usd=0.0,
        solve_s=now_s() - started,
    )
    rest = [one.model_copy(update={"solver": None}) for one in plans[1:] if one.digest != best.digest]
    return [best.model_copy(update={"solver": report}), *rest][:count]


def least_s(problem: SiteProblem, popularity: Sequence[tuple[float, ...]], best_s: float, deadline_s: float) -> float:
    """No plan whose layers have any serving tables takes less, given that one takes ``best_s``. As if all experts were alike, but
    fewer tokens needed each number of them than need as many of the least popular in any layer; and each layer had all memory,
    since others may take less."""
    roomy = problem.cluster.gpu.model_copy(update={"memory": 1e18})
    sites = tuple(
        site.model_copy(update={"gpu": None if site.gpu is None else site.gpu.model_copy(update={"memory": None})})
        for site in problem.cluster.sites
    )
    cluster = problem.cluster.model_copy(update={"gpu": roomy, "sites": sites})
    of_least = least_hit_share([gating(problem.workload, shares) for shares in popularity])
    relaxed = replace(problem, cluster=cluster, hit_share=of_least)
    return prove(Relaxation(problem=relaxed), best_s, max_boxes=MOST_BOXES, deadline_s=deadline_s).bound_s


def least_hit_share(layers: Sequence[Gating]) -> float:
    """The largest share of ``Gating.hit_by_count`` that is no more, for any number of experts, than the probability that a token
    needs one of the least popular ones, in any of these layers."""
    even = replace(layers[0], popularity=None).hit_by_count[1:]
    shares = []
    for one in layers:
        if one.capacity is None:
            # None of n experts is chosen with the largest probability where they have the smallest ones of being drawn.
            order = np.argsort(one.chosen, kind="stable")
            member = np.zeros((one.num_experts, one.num_experts), dtype=np.bool_)
            member[:, order] = np.tri(one.num_experts, dtype=np.bool_)
            shares.append(float((one.hit(member) / even).min()))
        else:
            # Drops differ; any set has at least the tokens of its least chosen expert.
            shares.append(float((one.chosen * one.kept).min() / even[-1]))
    return min(1.0, *shares)


def _group(problem: SiteProblem, choice: _Choice, layer: int, shares: Sequence[float]) -> LayerGroup:
    """One layer with this table, its experts exchanged."""
    inside = problem.choices(choice.configuration.inside)
    return LayerGroup(
        first_layer=layer,
        num_layers=1,
        domains={name: one.domain_size for name, one in inside.items()},
        migration={name: 1.0 for name, one in inside.items() if one.domain_size > 1},
        residency=choice.configuration.residency,
        serving=serving_groups(problem.cluster, exchanged(problem.home_site, choice.table, shares)),
    )


def exchanged(home_site: IntArray, table: IntArray, shares: Sequence[float]) -> IntArray:
    """[D, E]: experts of one site exchanged, so that the more popular of two is held by no fewer sites."""
    holders = np.array([np.unique(column).size for column in table.T])
    found = table.copy()
    for site in np.unique(home_site):
        own = np.flatnonzero(home_site == site)
        popular = own[np.argsort(-np.asarray(shares)[own], kind="stable")]
        found[:, popular] = table[:, own[np.argsort(-holders[own], kind="stable")]]
    return found


def _layer_s(problem: SiteProblem, group: LayerGroup, shares: Sequence[float]) -> float:
    """The layer's share of a step."""
    cluster, workload, chunks = problem.cluster, problem.workload, problem.schedule.chunks
    network = Network(cluster=cluster, streams=problem.schedule.streams)
    placement: Placement = group.placement(cluster, problem.num_experts, shares)
    expected = gating(workload, shares, cluster)
    traffic = layer_traffic(placement, workload, expected, problem.codecs, chunks)
    coding_s = layer_coding(cluster.gpu, placement, workload, expected, problem.codecs)
    times = block_times(network, workload, placement, expected, traffic, coding_s, chunks)
    return layer_cost(network, workload, times, traffic, group.residency, problem.schedule).total_s


def _plan(problem: SiteProblem, layers: Sequence[LayerGroup], popularity: Sequence[tuple[float, ...]]) -> Plan:
    """Neighbouring layers that do the same are one group."""

    def decided(group: LayerGroup) -> object:
        return group.model_copy(update={"first_layer": 0})

    groups: list[LayerGroup] = []
    for _, same in groupby(layers, key=decided):
        alike = list(same)
        groups.append(alike[0].model_copy(update={"num_layers": len(alike)}))
    made = Plan(
        cluster=problem.cluster,
        workload=problem.workload,
        layers=tuple(groups),
        popularity=tuple(popularity),
        schedule=problem.schedule,
        codecs=problem.codecs_by_level,
        provenance=provenance(),
    )
    return made.model_copy(update={"prediction": predict(made)})


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step
