"""Which of several plans a simulation prefers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING

from hybridep.config import build
from planner.clock import now_s

if TYPE_CHECKING:
    from hybridep.arrays import IntArray
    from hybridep.plan import Plan
    from hybridep.routing import Routing
    from hybridep.topology import Cluster
    from hybridep.workload import Workload
    from planner import Constraints

CANDIDATES = 48
"""Plans among which a simulation chooses where nobody says how many."""
SEARCHED = 0.75
"""Share of the time limit in which they are made; simulations have what is left."""
PROVEN = 0.1, 0.2
"""Shares of the time that plans took: for the bound of a chosen one whose experts have other homes, at least and at most."""
MOST_SITES = 64
"""Between more sites that differ, a simulation takes too long to make dozens."""
MOST_PASSES = 2**17
"""Nor with more pairs of sites times micro-batches, through all of which a simulation goes: 1600 micro-batches of nine sites."""
SECONDS_PER_PAIR = 5e-4
"""What simulating one of them takes at most, for each ordered pair of sites: 2.5e-4 to 4e-4 were measured with 10 to 60 sites."""
SHORT_LAYERS, SHORT_LAYERS_AHEAD = 2, 4
"""MoE layers of the models that are simulated to choose: layers are alike, and two put plans in about the order of all; four
where copies set out ahead of their blocks."""
AHEAD_TAKES = 3
"""Times ``SECONDS_PER_PAIR`` is what simulating those takes at most."""


@dataclass(frozen=True, kw_only=True)
class SimulatedChoice:
    """The plan that a simulation of several prefers."""

    plan: Plan
    simulated: int
    """Plans that were simulated."""
    shorter: float
    """Share by which the plan's simulated step is shorter than that of the plan that costs least."""
    dearer: float
    """Share by which the plan costs more than the plan that costs least."""

    def to_json(self) -> dict[str, float]:
        """Plain data for JSON, without the plan."""
        return {"simulated": self.simulated, "shorter": self.shorter, "dearer": self.dearer}


def decides(cluster: Cluster, workload: Workload) -> bool:
    """A simulation chooses unless told otherwise: sites differ, so that plans of equal cost take different times; they, and their
    micro-batches, are few enough; and ranks share no processors, of which simulations know less than the cost does."""
    from planner.choose import by_site

    sites, micro_batches = cluster.sizes[0], workload.training.micro_batches
    few = sites <= MOST_SITES and sites**2 * micro_batches <= MOST_PASSES
    return by_site(cluster, workload) and few and cluster.gpu.sharing == 1


def planned(
    cluster: Cluster,
    workload: Workload,
    time_limit_s: float = 60.0,
    *,
    free_homes: bool = True,
    home: IntArray | None = None,
    popularity: Sequence[tuple[float, ...]] = (),
) -> Plan:
    """What ``hybridep plan`` makes of these without further wishes, or with experts at ``home`` (``planner.plan``). Raises what
    the planner raises."""
    import planner

    make = partial(planner.plans, cluster, workload, popularity=popularity, free_homes=free_homes, home=home)
    if not decides(cluster, workload):
        return make(1, time_limit_s=time_limit_s)[0]
    started_s = now_s()
    made = make(CANDIDATES, time_limit_s=SEARCHED * time_limit_s)
    return choose(made, None, until_s=started_s + time_limit_s, most=most_simulated(made, time_limit_s)).plan


def most_simulated(plans: Sequence[Plan], time_limit_s: float) -> int:
    """How many of these plans simulations' share of the limit has time for, two at least. A count, because what a deadline cuts
    off differs from run to run."""
    each_s = SECONDS_PER_PAIR * plans[0].cluster.sizes[0] ** 2
    if any(one.schedule.prefetch for one in plans):
        each_s *= AHEAD_TAKES
    if plans[0].popularity:
        each_s *= len(plans[0].popularity) / SHORT_LAYERS
    return max(2, min(CANDIDATES, int((1 - SEARCHED) * time_limit_s / each_s)))


def choose(
    plans: Sequence[Plan],
    rules: Constraints | None,
    recorded: Sequence[Routing] = (),
    *,
    until_s: float = inf,
    most: int = CANDIDATES,
) -> SimulatedChoice:
    """The plan whose step is simulated to be the shortest, of those that cost no more than any other planner's, with the solver's
    report of the first, which costs least. Simulates that one and those whose expected steps are the shortest, ``most`` in all,
    for a model of few layers, and begins none but the first two after ``until_s`` (``planner.clock``). With a record, of which
    other planners know nothing, of all plans, and all layers."""
    first = plans[0]
    if len(plans) > 1 and not recorded:
        most_s = least_of_others_s(first, rules)
        others = sorted((one for one in plans[1:] if _cost_s(one) <= most_s), key=lambda one: one.predicted.expected_s)
        plans = [first, *others][:most]
    if len(plans) == 1:
        return SimulatedChoice(plan=first, simulated=0, shorter=0.0, dearer=0.0)
    short = list(plans) if recorded else shortened(plans)
    found, steps_s = by_simulation(short, recorded, until_s=until_s)
    step_s = {id(one): step_s for one, step_s in zip(found, steps_s, strict=True)}
    chosen = next(one for one, its_short in zip(plans, short, strict=True) if its_short is found[0])
    return SimulatedChoice(
        plan=reported(chosen, first, until_s),
        simulated=len(found),
        shorter=1 - steps_s[0] / step_s[id(short[0])],
        dearer=_cost_s(chosen) / _cost_s(first) - 1,
    )


def by_simulation(
    plans: Sequence[Plan], recorded: Sequence[Routing], most_s: float = inf, until_s: float = inf
) -> tuple[list[Plan], list[float]]:
    """The plans by their simulated steps, the fastest first, and those steps in seconds: on average over the recorded ones, or
    with what their popularity of experts lets expect where there are none. Plans that cost more than ``most_s`` and than the
    first come last. Left out, but for the first two, are those that were not begun before ``until_s`` (``planner.clock``)
    or a KeyboardInterrupt."""
    from hybridep.commands.progress import one_by_one
    from simulator.step import simulate_step

    steps: Sequence[Routing | None] = recorded or [None]
    most_s = max(most_s, _cost_s(plans[0])) * (1 + 1e-9)
    found: list[tuple[bool, float, int]] = []
    for place, one in enumerate(one_by_one(plans, "simulating plans")):
        if place >= 2 and now_s() >= until_s:
            break
        try:
            found.append((_cost_s(one) > most_s, fmean(simulate_step(one, step).step_s for step in steps), place))
        except KeyboardInterrupt:
            if not found:
                raise
            break
    found.sort()
    return [plans[place] for *_, place in found], [step_s for _, step_s, _ in found]


def least_of_others_s(plan: Plan, rules: Constraints | None) -> float:
    """What the cheapest plan of other planners costs; infinite where none of theirs fits, or there is one site."""
    import planner

    if plan.cluster.sizes[0] < 2:
        return inf
    return min((other.step_s for other in planner.compare_planners(plan, rules).values() if other.fits), default=inf)


def reported(chosen: Plan, first: Plan, until_s: float = inf) -> Plan:
    """With the solver's report of the first, whose bound holds for it, too; where its popular experts live elsewhere, with the
    lower one of that bound and the one for its own homes. That is found until ``until_s`` (``planner.clock``), in ``PROVEN`` of
    the time that the first took."""
    from hybridep.plan import Status

    if chosen is first or first.solver is None:
        return chosen
    step_s, bound_s = _cost_s(chosen), first.solver.bound
    if chosen.popularity and _homes(chosen) != _homes(first):
        from planner.sites.popular import least_with_homes_s

        least, most = (share * first.solver.solve for share in PROVEN)
        deadline_s = now_s() + min(max(until_s - now_s(), least), most)
        bound_s = min(bound_s, step_s, least_with_homes_s(chosen, deadline_s))
    changed = {"status": Status.FEASIBLE, "objective": step_s, "bound": bound_s, "gap": max(0.0, 1 - bound_s / step_s)}
    return chosen.model_copy(update={"solver": first.solver.model_copy(update=changed)})


def _homes(plan: Plan) -> list[list[int]]:
    """Of each layer."""
    return [layers.placement.home.tolist() for layers in plan.placed]


def shortened(plans: Sequence[Plan]) -> list[Plan]:
    """The plans for a model of ``SHORT_LAYERS`` layers, or of ``SHORT_LAYERS_AHEAD`` where copies set out ahead, without
    predictions; the plans themselves where one has several placements or measured popularity."""
    from hybridep.workload import Workload

    if any(len(one.layers) > 1 or one.popularity for one in plans):
        return list(plans)
    work = plans[0].workload.model_dump(mode="json")
    few = SHORT_LAYERS_AHEAD if any(one.schedule.prefetch for one in plans) else SHORT_LAYERS
    layers = min(few, plans[0].workload.model.num_moe_layers)
    work["model"] |= {"num_layers": layers, "num_dense_layers": 0}
    workload = build(Workload, work, "workload")
    return [one.with_layers(one.layers[0].model_copy(update={"num_layers": layers}), workload=workload) for one in plans]


def _cost_s(plan: Plan) -> float:
    return 0.0 if plan.prediction is None else plan.prediction.step
