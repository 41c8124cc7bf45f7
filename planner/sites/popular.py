"""Serving tables for experts whose popularity was measured, layer by layer, between sites that differ.

Tables are searched for as if all experts were alike, which makes their times a matter of counts. Then each layer takes those of
the best tables that cost it least with its own popularity, experts of one home or of all exchanged so that the more popular ones
are where there are more copies, and walks on from there (``planner.sites.walks``), experts counting as often as they are chosen.
So each layer may have other homes, as many experts at each site. Times add up over layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Codecs
from hybridep.errors import InfeasibleError
from hybridep.gating import gating
from hybridep.homes import homes_text
from hybridep.placement import home_blocks
from hybridep.plan import LayerGroup, Plan, Schedule
from hybridep.provenance import provenance
from hybridep.recompute import Recompute
from hybridep.serving import serving_groups
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import elapsed_s, now_s
from planner.cost import block_times, layer_coding, layer_cost, layer_traffic
from planner.domains import all_choices, joined, layer_group
from planner.exchange import ExchangeTimes
from planner.measured import balanced_homes, plans_measured
from planner.memory import memory_use
from planner.plans import predict, solver_report
from planner.problem import MAX_COPY_STEPS, build_problem, ways_again
from planner.sites.cost import site_cost
from planner.sites.plans import chosen_table, plan_sites
from planner.sites.popular_bound import least_s
from planner.sites.problem import Configuration, SiteProblem, site_problem
from planner.sites.room import room_of
from planner.sites.solution import Wishes
from planner.sites.strategy import walks_help
from planner.sites.work import for_popularity

TABLES = 16
"""The best ones found, among which each layer chooses."""
STARTS = 2
"""Of these, from which each layer's walks begin; of tables whose experts stay at their homes one, where others may not."""
SAMPLED = 4
"""Layers that tell which tables are best if experts change homes."""
SEARCHED, WALKED = 0.4, 0.8
"""Shares of the time after which tables are found, and walks end; the bound has what is left."""
AMPLE_S = 60.0
"""With less time walks make fewer moves in proportion."""
DOMAINS = 0.4
"""Equal domains are planned, too, where that takes no more than this share of the time."""
DOMAINS_S, EACH_S = 1e-6, 1.5e-3
"""Roughly, of one configuration in one layer: for each rank and expert, and whatever there are of these."""
AGAIN = 4
"""So many times as long that takes where memory is short, and layers are planned with each way to compute again, too."""


class _Choice(NamedTuple):
    """A table that any layer may use."""

    table: IntArray
    """[D, places]: experts live at places, as many as there are."""
    expert: IntArray
    """[places]: which expert it is."""
    configuration: Configuration
    recompute: Recompute


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
    free_homes: bool = False,
    home: IntArray | None = None,
) -> list[Plan]:
    """At most ``count`` plans, the fastest first, for experts of this ``popularity`` ([layers][E] shares): tables, or equal
    domains if there is time for them or no table fits, chosen for each MoE layer anew, and others that are alike in all layers,
    without a solver's report. The bound of the first holds for any tables, of each layer by itself, with its homes. With
    ``free_homes`` more experts may live where links are faster, and popular ones at other sites in each layer; ``home``: where
    they do live ([layers, E] ranks, as many at each in all layers). Raises what ``plan_sites`` raises."""
    started, asked_s = now_s(), elapsed_s()
    schedule = schedule or Schedule()
    domains: list[Plan] = []
    # Follows from the limit, not from the clock, so that two runs do the same.
    in_time = domains_in_time(cluster, workload, popularity[0], schedule, codecs, time_limit_s, free_homes=free_homes)
    measured = partial(
        plans_measured, cluster, workload, popularity, count, schedule=schedule, codecs=codecs, free_homes=free_homes, home=home
    )
    if in_time:
        with suppress(InfeasibleError):
            domains = measured()
    spent_s = now_s() - started
    found: list[Plan] = []
    try:
        found = plan_sites(
            cluster,
            workload,
            solver=solver,
            schedule=schedule,
            codecs=codecs,
            wishes=Wishes(time_limit_s=SEARCHED * time_limit_s, keep=TABLES),
            free_homes=free_homes,
            home=None if home is None else np.sort(home[0]),
        )
    except InfeasibleError:
        # As if all experts were alike none fit; where rare ones live at sites of little memory, equal domains may.
        if in_time and not domains:
            raise
    # What was compiled meanwhile counts to no limit; and how many moves walks have follows from the limit, not from what is left.
    begun = now_s() - SEARCHED * time_limit_s - spent_s
    anywhere = free_homes and home is None and np.ptp(cluster.home_weights) == 0
    if home is None:
        placement = next((one.placements[0] for one in found if one.layers[0].serving), None)
        blocks = home_blocks(cluster, workload.model.num_experts) if placement is None else placement.home
        home = np.tile(blocks, (len(popularity), 1))
    problem = site_problem(cluster, workload, schedule, codecs=codecs, home=np.sort(home[0]))
    numbered = zip(range(len(popularity)), popularity, home, strict=True)
    layers = [_Layer(problem, *layer, free=anywhere) for layer in numbered]
    share, until_s = min(time_limit_s / AMPLE_S, 1.0), begun + WALKED * time_limit_s
    fitting: list[Plan] = []
    for variant in _variants(layers, _choices(problem, found), share, until_s, anywhere=anywhere, several=count > 1):
        made = _plan(layers, variant)
        if len(fitting) < count and made.digest not in {one.digest for one in fitting} and memory_use(made).fits:
            fitting.append(made.model_copy(update={"prediction": predict(made)}))
    if not fitting and not in_time:
        domains = measured()
    plans = sorted((*domains, *fitting), key=lambda one: one.predicted.step)
    if not plans:
        # As if all experts were alike they fit; where popular ones are, they do not.
        raise InfeasibleError(f"no plan found for experts of this popularity fits the memory of {cluster.name}; raise gpu.memory")
    best = plans[0]
    deadline_s = max(begun, now_s() - WALKED * time_limit_s) + time_limit_s
    bounds_s = [best.predicted.step, least_s(problem, best, deadline_s)]
    bounds_s += [one.solver.bound for one in domains[:1] if one.solver is not None]
    report = solver_report(
        solver=solver,
        goal=problem.goal,
        objective_s=best.predicted.step,
        bound_s=min(bounds_s),
        cost_usd=0.0,
        bound_usd=0.0,
        solve_s=elapsed_s() - asked_s,
    )
    rest = [one.model_copy(update={"solver": None}) for one in plans[1:] if one.digest != best.digest]
    return [best.model_copy(update={"solver": report}), *rest][:count]


def least_with_homes_s(plan: Plan, deadline_s: float) -> float:
    """No plan whose layers have tables, and this plan's homes, takes less for its popularity."""
    home = np.sort(plan.placements[0].home)
    return least_s(site_problem(plan.cluster, plan.workload, plan.schedule, codecs=plan.codecs, home=home), plan, deadline_s)


def domains_in_time(
    cluster: Cluster,
    workload: Workload,
    shares: Sequence[float],
    schedule: Schedule,
    codecs: Mapping[str, Codecs] | None,
    time_limit_s: float,
    *,
    free_homes: bool = False,
) -> bool:
    """Whether ``plans_measured`` has time; ``shares``: of one layer, by which it is told whether memory is short."""
    model, share_s = workload.model, DOMAINS * time_limit_s
    number = (4 if free_homes else 2) * len(all_choices(cluster, model.num_experts, MAX_COPY_STEPS))
    takes_s = number * model.num_moe_layers * (EACH_S + DOMAINS_S * cluster.num_gpus * model.num_experts)
    if not takes_s <= share_s < AGAIN * takes_s:
        return takes_s <= share_s
    nothing = ways_again(model)[0]
    return not build_problem(cluster, workload, schedule, tuple(shares), codecs, recompute=nothing).is_short_of_memory


def _choices(problem: SiteProblem, found: Sequence[Plan]) -> list[_Choice]:
    """Those of the plans found that have the problem's homes."""
    alike = [one for one in found if np.array_equal(one.placements[0].home, problem.home)]
    tables = [(known, one.recomputes) for one in alike if (known := chosen_table(one)) is not None]
    places = np.arange(problem.num_experts)
    return [_Choice(table, places, configuration, recompute) for (table, configuration), recompute in tables]


class _Layer:
    """One MoE layer, whose experts are chosen with ``shares`` ([E]) and live on the ranks ``home`` ([E]), or as many on each if
    they are ``free``."""

    def __init__(self, problem: SiteProblem, number: int, shares: Sequence[float], home: IntArray, *, free: bool) -> None:
        self.problem, self.number, self.shares, self.home, self.free = problem, number, np.asarray(shares), home, free
        self._homes: dict[bytes, IntArray] = {}
        self._network = ExchangeTimes(cluster=problem.cluster, streams=problem.schedule.streams)
        self._gating = gating(problem.workload, tuple(shares), problem.cluster)

    def plain(self, choice: _Choice) -> _Choice:
        """With experts in the order of their homes."""
        return choice._replace(expert=np.argsort(self.home, kind="stable"))

    def suited(self, choice: _Choice, *, anywhere: bool = False) -> _Choice:
        """With experts of one home exchanged, or of all."""
        expert, home = self.plain(choice).expert, self.problem.home_site
        together = np.zeros_like(home) if anywhere else home
        places = best_places(together, choice.table, self.shares[expert], self.problem.slower_bytes_per_s[home])
        return choice._replace(expert=expert[places])

    def group(self, choice: _Choice) -> LayerGroup:
        """As plans have it."""
        problem, configuration = self.problem, choice.configuration
        cluster, table, owner = problem.cluster, np.empty_like(choice.table), np.empty_like(problem.home_site)
        table[:, choice.expert], owner[choice.expert] = choice.table, problem.home_site
        homes, serving = homes_text(cluster, self._homes_at(owner)), serving_groups(cluster, table)
        choices, residency = problem.choices(configuration.inside), configuration.residency
        return layer_group(self.number, 1, choices, residency, serving, homes=homes, recompute=choice.recompute)

    def _homes_at(self, site: IntArray) -> IntArray:
        """[E] ranks of experts that live at these sites ([E])."""
        if not self.free:
            return self.home
        key = site.tobytes()
        if key not in self._homes:
            self._homes[key] = balanced_homes(self.problem.cluster, self.shares, self.home, site)
        return self._homes[key]

    def seconds(self, choice: _Choice) -> float:
        """Its share of a step."""
        problem, group = self.problem, self.group(choice)
        cluster, workload, codecs, chunks = problem.cluster, problem.workload, problem.codecs, problem.schedule.chunks
        placement = group.placement(cluster, problem.num_experts, self.shares.tolist())
        traffic = layer_traffic(placement, workload, self._gating, codecs, chunks)
        coding_s = layer_coding(cluster.gpu, placement, workload, self._gating, codecs)
        times = block_times(self._network, workload, placement, self._gating, traffic, coding_s, chunks)
        times = replace(times, recompute=choice.recompute)
        return layer_cost(self._network, workload, times, traffic, group.residency, problem.schedule).total_s


def _variants(
    layers: Sequence[_Layer], choices: Sequence[_Choice], share: float, until_s: float, *, anywhere: bool, several: bool
) -> list[list[_Choice]]:
    """A table for each layer, in several ways, the shortest step first: where walks end, and begin, the best ones and each of
    their kind; and each of ``choices`` in all layers, if there are to be ``several`` plans without exchanges, too. Experts of
    different homes may be exchanged (``anywhere``)."""
    if not choices:
        return []
    problem = layers[0].problem
    tried, layer_s = _suited(layers, choices)
    found = [([row[place] for row in tried], float(layer_s[:, place].sum())) for place in range(len(choices))]
    tables = [[(place, False) for place in row] for row in np.argsort(layer_s, axis=1, kind="stable").tolist()]
    tables = [row[: 1 if anywhere else STARTS] for row in tables]
    if anywhere:
        # Which tables suit exchanges is much the same in all layers.
        _, sample_s = _suited(layers[:: -(-len(layers) // SAMPLED)], choices, anywhere=True)
        best = np.argsort(sample_s.mean(axis=0), kind="stable")[:STARTS].tolist()
        tables = [[*row, *((place, True) for place in best)] for row in tables]
    inside = {place: _configured(problem, choices[place]) for place, _ in {*chain(*tables)}}
    starts = [
        [min((layer.suited(one, anywhere=way) for one in inside[place]), key=layer.seconds) for place, way in row]
        for layer, row in zip(layers, tables, strict=True)
    ]
    rows = [[layer.plain(one) for layer in layers] for one in choices] if several else []
    for ends in (starts, _walked(layers, starts, share, until_s)) if walks_help(problem) else (starts,):
        rows += [
            [min(some, key=layer.seconds) for layer, some in zip(layers, ends, strict=True)],
            *map(list, zip(*ends, strict=True)),
        ]
    found += [(row, sum(map(_Layer.seconds, layers, row))) for row in rows]
    return [variant for variant, _ in sorted(found, key=lambda one: one[1])]


def _suited(
    layers: Sequence[_Layer], choices: Sequence[_Choice], *, anywhere: bool = False
) -> tuple[list[list[_Choice]], FloatArray]:
    """(Each choice with its experts exchanged for each layer, and seconds, [layers, choices])."""
    tried = [[layer.suited(one, anywhere=anywhere) for one in choices] for layer in layers]
    return tried, np.array([[layer.seconds(one) for one in row] for layer, row in zip(layers, tried, strict=True)])


def _configured(problem: SiteProblem, choice: _Choice) -> list[_Choice]:
    """As it is, and with what else may be chosen inside sites, or for copies, where that fits if all experts are alike."""
    again = replace(problem, recompute=choice.recompute)
    others = (one for one in problem.configurations() if one != choice.configuration)
    fitting = [one for one in others if site_cost(again, choice.table, one).fits]
    return [choice, *(choice._replace(configuration=one) for one in fitting)]


def _walked(layers: Sequence[_Layer], starts: Sequence[Sequence[_Choice]], share: float, until_s: float) -> list[list[_Choice]]:
    """Where walks from each layer's starts end; once the time is over, the starts."""
    from planner.sites import walks  # numba takes a while to import
    from planner.sites.moves import near_sites
    from planner.sites.smoothed import guide_of, limit

    problem, rng, ends = layers[0].problem, np.random.default_rng(0), list[list[_Choice]]()
    near, pace = near_sites(problem), walks.pace_of(problem)
    for layer, choices in zip(layers, starts, strict=True):
        found: list[_Choice] = []
        for one in choices if now_s() < until_s else []:
            again = replace(problem, recompute=one.recompute)
            guide = guide_of(again, one.table, one.configuration.residency)
            guide = guide._replace(work=for_popularity(guide.work, again, layer.shares[one.expert].tolist()))
            limit(guide, room_of(again, one.table, one.configuration))

            def cost_s(table: IntArray, layer: _Layer = layer, one: _Choice = one) -> float:
                return layer.seconds(one._replace(table=table))

            _, table = walks.walked(guide, near, pace, round(share * pace.moves), cost_s, rng)
            found.append(one._replace(table=table))
        ends.append(found or list(choices))
    return ends


def best_places(home_site: IntArray, table: IntArray, shares: FloatArray, rate: FloatArray) -> IntArray:
    """[E]: what is best at each place, experts of one site exchanged, so that the more popular of two is held by no fewer sites,
    or by as many and lives where links are no slower (``rate``, [E])."""
    holders, found = np.array([np.unique(column).size for column in table.T]), np.empty(len(home_site), dtype=np.int64)
    for site in np.unique(home_site):
        own = np.flatnonzero(home_site == site)
        found[own[np.lexsort((-rate[own], -holders[own]))]] = own[np.argsort(-shares[own], kind="stable")]
    return found


def _plan(layers: Sequence[_Layer], choices: Sequence[_Choice]) -> Plan:
    problem = layers[0].problem
    return Plan(
        cluster=problem.cluster,
        workload=problem.workload,
        layers=joined([layer.group(one) for layer, one in zip(layers, choices, strict=True)]),
        popularity=tuple(tuple(layer.shares.tolist()) for layer in layers),
        schedule=problem.schedule,
        codecs=problem.codecs_by_level,
        provenance=provenance(),
    )
