"""Which planner a cluster needs: equal domains per level, or a serving table per site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from hybridep.arrays import IntArray
from hybridep.codecs import Codecs
from hybridep.errors import UserError
from hybridep.plan import Plan, Schedule
from hybridep.shares import alike_ranks
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.chunks import best_of_searches, numbers, tables_in_parts
from planner.constraints import Constraints, permissions
from planner.depths import BETWEEN_SITES, plan_ahead, tables_ahead
from planner.evaluate import MOST_RANKS, require_few_experts
from planner.goal import FASTEST, Goal
from planner.measured import plans_measured
from planner.plans import plan_domains, top_domains
from planner.sites.plans import plan_sites
from planner.sites.popular import plans_popular
from planner.sites.solution import Wishes
from planner.streams import with_fewest, with_most
from planner.within_loss import plans_within_loss

FEW_SITES = 3
"""From so many equal sites on a serving table may be better than equal domains, whose sizes divide the sites."""
MANY_SITES = 64
"""With more sites even equal ones are planned site by site: the candidates of equal domains have arrays over ranks."""

Report = Callable[[str, float], None]
"""``planner.sites.solution.Wishes.report``."""


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
    constraints: Constraints | None = None,
    popularity: Sequence[tuple[float, ...]] = (),
    ahead: bool = False,
    most_chunks: int = 1,
    codecs: Mapping[str, Codecs] | None = None,
    max_loss: float | None = None,
    goal: Goal = FASTEST,
    free_homes: bool = False,
    home: IntArray | None = None,
    report: Report | None = None,
) -> Plan:
    """The fastest plan found that fits and keeps the rules, with its prediction, a proven bound, and how it was found. At levels
    with a window that ``schedule`` says nothing of, connections per pair of ranks are chosen, too (``planner.streams``). With
    measured ``popularity`` of the experts ([MoE layers][E] shares) plans are chosen layer by layer. With ``ahead``, also
    plans whose copies set out before their blocks (``Schedule.prefetch``). Tokens travel in up to ``most_chunks`` parts, as many
    as bring something: 1, 2, 4 and so on, or the most (``planner.chunks``, also for what the bound then holds for). ``codecs`` by
    level name, or those that are best between sites among all whose measured losses add up to at most ``max_loss``. With a
    ``goal`` the cheapest plan in place of the fastest, or the fastest that costs no more than a budget. ``free_homes``: among
    sites that differ, or with rules, more experts may live where links are faster, rules let all have copies or these cost least;
    with popularity other ones in each layer, also where sites are alike. ``home``: where they do live, there ([E] ranks, in their
    order; with popularity [MoE layers][E], as many on each rank in all layers). On KeyboardInterrupt, once there is a plan, the
    best so far.

    Raises InfeasibleError (how much memory is missing where, which rules clash, or what the cheapest plan costs), NoSolutionError
    (time limit), UserError (unknown solver or site, no prices, or wishes that no search has together).
    """

    return plans(
        cluster,
        workload,
        1,
        solver=solver,
        time_limit_s=time_limit_s,
        schedule=schedule,
        constraints=constraints,
        popularity=popularity,
        ahead=ahead,
        most_chunks=most_chunks,
        codecs=codecs,
        max_loss=max_loss,
        goal=goal,
        free_homes=free_homes,
        home=home,
        report=report,
    )[0]


def plans(
    cluster: Cluster,
    workload: Workload,
    count: int,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    schedule: Schedule | None = None,
    constraints: Constraints | None = None,
    popularity: Sequence[tuple[float, ...]] = (),
    ahead: bool = False,
    most_chunks: int = 1,
    codecs: Mapping[str, Codecs] | None = None,
    max_loss: float | None = None,
    goal: Goal = FASTEST,
    free_homes: bool = False,
    home: IntArray | None = None,
    report: Report | None = None,
) -> list[Plan]:
    """At most ``count`` different plans, the fastest first, which is ``plan``'s; the others have no solver's report. Between
    sites, plans with the same codecs differ in at least a twentieth of who computes what for whom; with a ``max_loss`` the next
    ones may be of one placement, with other codecs. Raises what ``plan`` raises."""
    if max_loss is not None:
        if codecs:
            raise UserError("codecs given and codecs to be chosen by their loss: leave one of them out")

        def make(chosen: Mapping[str, Codecs], limit_s: float) -> list[Plan]:
            return plans(
                cluster,
                workload,
                count,
                solver=solver,
                time_limit_s=limit_s,
                schedule=schedule,
                constraints=constraints,
                popularity=popularity,
                ahead=ahead,
                most_chunks=most_chunks,
                codecs=chosen,
                goal=goal,
                free_homes=free_homes,
                home=home,
                report=report,
            )

        return plans_within_loss(make, cluster, workload, count, max_loss=max_loss, time_limit_s=time_limit_s)
    require_few_experts(cluster, workload)
    if goal.needs_prices:
        goal.require_prices(cluster)
        if popularity or ahead:
            raise UserError(
                "prices with measured popularity or copies ahead: their searches know time only; leave one of them out"
            )
    if constraints is not None and permissions(cluster, workload.model.num_experts, constraints.rules).forbid_nothing:
        constraints = None
    lossy = any(one.coded for one in (codecs or {}).values())
    given = schedule is not None and schedule != Schedule(streams=schedule.streams)
    dear = goal.needs_prices and uneven_prices(cluster)
    by_table = by_site(cluster, workload) or dear or constraints is not None
    if home is not None and not (by_table or popularity):
        raise UserError("homes of experts are given between sites that differ; leave them out")
    # Alike sites: equal domains or a table, whichever is better. Copies ahead, and placements by layer, know equal domains there.
    either = not by_table and cluster.sizes[0] >= FEW_SITES and not ahead and not popularity
    if most_chunks > 1:
        if ahead or (schedule is not None and schedule.prefetch):
            raise UserError("tokens in parts and copies ahead of their blocks: a schedule has one of them; leave the other out")
        if workload.model.pad_expert_input_to_capacity:
            raise UserError("tokens in parts with pad_expert_input_to_capacity, which pads whole micro-batches; leave one out")
    if ahead:
        if lossy or popularity or given or (count > 1 and not by_table):
            raise UserError(
                "copies ahead of their blocks are planned for exact bytes, without popularity or a given schedule, and one plan "
                "at a time where sites are alike; leave those out, or ahead"
            )
        if by_table and cluster.num_gpus > MOST_RANKS:
            raise UserError(
                f"copies ahead between sites are planned for at most {MOST_RANKS} ranks, and {cluster.name} has "
                f"{cluster.num_gpus}; leave ahead out"
            )
    schedule, free = with_most(cluster, schedule)
    if popularity:
        if constraints is not None:
            raise UserError("measured popularity and constraints: plans layer by layer keep no rules; leave one of them out")
        if home is not None:
            _require_homes(home, (len(popularity), workload.model.num_experts))

        def measured(schedule: Schedule) -> list[Plan]:
            if not by_table or cluster.num_gpus > MOST_RANKS:
                by_layer = partial(plans_measured, schedule=schedule, codecs=codecs, free_homes=free_homes, home=home)
                return by_layer(cluster, workload, popularity, count)
            limit_s = time_limit_s / len(numbers(most_chunks))
            limited = partial(plans_popular, solver=solver, time_limit_s=limit_s, free_homes=free_homes, home=home)
            return limited(cluster, workload, popularity, count, schedule=schedule, codecs=codecs)

        found = best_of_searches(measured, schedule or Schedule(), most_chunks)
        return [with_fewest(one, free) for one in found]
    if by_table or either:
        found = plan_sites(
            cluster,
            workload,
            solver=solver,
            schedule=schedule,
            constraints=constraints,
            wishes=Wishes(
                time_limit_s=time_limit_s, keep=max(count, BETWEEN_SITES) if ahead or most_chunks > 1 else count, report=report
            ),
            goal=goal,
            codecs=codecs,
            most_chunks=most_chunks,
            fit_domains=either and goal.budget_usd is None,
            free_homes=free_homes,
            home=home,
        )
        if ahead:
            found = tables_ahead(found, count)
        elif most_chunks > 1:
            found = tables_in_parts(found, most_chunks, count)
    elif ahead:
        found = [plan_ahead(cluster, workload, solver=solver, time_limit_s=time_limit_s, schedule=schedule)]
    else:

        def domains(schedule: Schedule) -> list[Plan]:
            best = plan_domains(
                cluster, workload, solver=solver, time_limit_s=time_limit_s, schedule=schedule, codecs=codecs, goal=goal
            )
            return [best, *top_domains(best, count - 1)]

        found = best_of_searches(domains, schedule or Schedule(), most_chunks)
    return [with_fewest(one, free) for one in found]


def _require_homes(home: IntArray, shape: tuple[int, int]) -> None:
    """Raises UserError for homes that are not of each layer's experts, or of other numbers in one layer than in another."""
    if np.shape(home) != shape:
        raise UserError(f"homes: with measured popularity they are given by layer, {shape}, and not {np.shape(home)}")
    if len(other := np.flatnonzero((np.sort(home, axis=1) != np.sort(home[0])).any(axis=1))):
        raise UserError(
            f"homes: other numbers of experts live on ranks in layer {other[0]} than in layer 0; they must be the same"
        )


def uneven_prices(cluster: Cluster) -> bool:
    """What bytes cost depends on where they come from or go."""
    prices = cluster.egress_usd_per_byte[~np.eye(cluster.sizes[0], dtype=np.bool_)]
    return prices.size > 0 and bool((prices != prices[0]).any())


def by_site(cluster: Cluster, workload: Workload) -> bool:
    """Sites differ, or there are many."""
    alike = cluster.is_symmetric and alike_ranks(cluster, workload)
    return cluster.sizes[0] >= 2 and (not alike or cluster.sizes[0] > MANY_SITES)
