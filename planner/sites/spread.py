"""Hubs that leave experts out, which their users find spread thinly over all sites.

A hub with u users receives u rows where each of its users sends one, so most sites' links carry little while the hubs' are full.
A token needs a holder of one expert only with the small chance P(1), so a site whose links have room for s more rows finds
s / P(1) experts elsewhere, one by one, and its hub need not hold them. What limits the gather are the homes with the slowest
links, so it is their experts that hubs leave out. Each expert left out has a few holders among the users, who serve it to as many
sites as their links allow.

Among a few hundred sites gathers wait for the hubs' own links, while fast homes' have room for copies at many more sites. There a
hub's users hold some experts themselves, which the hub finds at one of them; that leaves memory for users, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from planner.sites.hubs import NO_TEAMS, HubPlan, hubs_within, layer_bytes, with_teams
from planner.sites.problem import SiteProblem

SCALES = (0.94, 0.97, 1.0, 1.01, 1.05, 1.1, 1.25, 2.0)
"""How long the busiest link may carry rows, over what the best hubs that leave nothing out need; longer leaves more out."""
FINER = (0.98, 0.99, 1.0, 1.01, 1.02)
"""And over what the fastest of these need."""
MOST_USERS = 8
"""Of each hub of equal sites."""
MOST_THIN = 0.9
"""Of what hubs leave out, the share that its other holders make up for again, at most."""
STEPS = 20
"""Lengths of a gather that are tried, and halvings of a return's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """Hubs, their users, and how much each hub leaves out."""

    plan: HubPlan
    hub_of: IntArray
    """[D]: hubs are their own."""
    left_out: IntArray
    """[hubs]: experts that each may leave out."""
    most_copies: FloatArray
    """[E]: how many sites are to hold each expert at most, about."""
    thin: float
    """Copies elsewhere for each that a hub leaves out, about."""
    layer_s: float
    """About what rows and copies of one layer take."""


def equal_hubs(problem: SiteProblem, users: int) -> HubPlan:
    """Of equal sites, each with so many users; they own as few experts as can be, since owners serve theirs as users."""
    count = -(-problem.num_sites // (users + 1))
    hubs = np.argsort(problem.homes, kind="stable")[:count]
    rate = float(min(problem.up_bytes_per_s.min(), problem.down_bytes_per_s.min()))
    rooms, time = np.full(count, users), users / rate
    return HubPlan(hubs=hubs, rooms=rooms, teams=NO_TEAMS, layer_s=np.inf, forward=time, back=time)


def equal_spread(problem: SiteProblem) -> Spread | None:
    """The best number of users per hub of equal sites; None where no hub would leave anything out."""
    most = min(MOST_USERS, problem.num_sites - 1)
    made = [_spread(problem, equal_hubs(problem, users)) for users in range(1, most + 1)]
    best = min(made, key=lambda one: one.layer_s, default=None)
    return best if best is not None and best.left_out.any() else None


def best_spreads(problem: SiteProblem, plan: HubPlan, most_users: int) -> list[Spread]:
    """With links busy for as long as ``plan`` needs or somewhat longer, and the hubs that this takes: the fastest first."""

    def near(middle: HubPlan, scales: Iterable[tuple[float, float]]) -> list[Spread]:
        found = []
        for there, again in scales:
            within = hubs_within(problem, there * middle.forward, again * middle.back, most_users)
            if within is not None:
                found.append(_spread(problem, replace(within, layer_s=plan.layer_s)))
        return sorted((one for one in found if one.left_out.any()), key=lambda one: one.layer_s)

    made = near(plan, product(SCALES, SCALES))
    if made:
        # The best of these only: where it does not fit into memory others like it do not either.
        made += near(made[0].plan, (scales for scales in product(FINER, FINER) if scales != (1.0, 1.0)))[:1]
    return sorted(made, key=lambda one: one.layer_s)


def _spread(problem: SiteProblem, plan: HubPlan) -> Spread:
    size, one = problem.num_sites, float(problem.hit[1])
    out, _ = plan.rows(problem)
    users = plan.users(problem)
    # Users with equally much room share hubs, which are filled one after another: so few serve those that have none.
    users = users[np.argsort(out[users], kind="stable")]
    hub_of = np.arange(size)
    hub_of[users] = np.repeat(plan.hubs, plan.rooms)[: len(users)]
    spare = out - 1.0
    spare[plan.hubs] = out[plan.hubs]
    room = np.full(size, np.inf)
    np.minimum.at(room, hub_of, spare)
    most = np.maximum(room[plan.hubs], 0.0) / one * (1 + 1e-9)
    left_out = np.minimum(most, problem.num_experts // 2).astype(np.int64)
    thin = _thin(problem, plan, left_out)
    most_copies, copies_s = _fewest_copies(problem, plan, left_out, thin)
    per_forward, per_back = layer_bytes(problem)
    return Spread(
        plan=plan,
        hub_of=hub_of,
        left_out=left_out,
        most_copies=most_copies,
        thin=thin,
        layer_s=per_forward * plan.forward + per_back * plan.back + copies_s,
    )


def _thin(problem: SiteProblem, plan: HubPlan, left_out: IntArray) -> float:
    """``Spread.thin``: as many as it takes of those users who can serve most others' tokens, for all that find experts one by
    one."""
    served = np.floor(plan.rows(problem)[1] / problem.hit[1] * (1 + 1e-9))
    served[plan.hubs] = served[plan.teams.ravel()] = 0
    found = float(left_out @ (plan.rooms + 1))
    holders = np.searchsorted(np.cumsum(np.sort(served)[::-1]), found) + 1
    return min(float(holders) / max(float(left_out.sum()), 1.0), MOST_THIN)


def copy_seconds(problem: SiteProblem) -> tuple[FloatArray, FloatArray]:
    """[E] each: what a gather and a return take at the home's links per copy, as long as its experts have equally many."""
    there_s = (problem.wire.expert_bytes * problem.homes / problem.up_bytes_per_s)[problem.home_site]
    back_s = (problem.wire.expert_gradient_bytes * problem.homes / problem.down_bytes_per_s)[problem.home_site]
    return there_s, back_s


def _fewest_copies(problem: SiteProblem, plan: HubPlan, left_out: IntArray, thin: float) -> tuple[FloatArray, float]:
    """([E] copies of each expert at hubs if these leave so many out, seconds of a gather and a return): those of the homes with
    the slowest links are the fewest, but no fewer than what the hubs' own links take as long for. Teams have one more each."""
    hubs, teams = plan.hubs, len(plan.teams)
    there_s, back_s = copy_seconds(problem)
    count, kept = len(hubs), problem.num_experts - left_out - problem.homes[hubs]
    there_least_s = float((problem.wire.expert_bytes * kept / problem.down_bytes_per_s[hubs]).max())
    back_least_s = float((problem.wire.expert_gradient_bytes * kept / problem.up_bytes_per_s[hubs]).max())
    fewer = 1 - thin
    budget, least = float(left_out.sum()) * fewer, count - int((left_out > 0).sum()) * fewer

    def copies(gather_s: float, return_s: float) -> FloatArray:
        return np.asarray(np.minimum(np.minimum(gather_s / there_s, return_s / back_s) - teams, count))

    def fits(gather_s: float, return_s: float) -> bool:
        few = copies(gather_s, return_s)
        return bool(few.min() >= least and (count - few).sum() <= budget)

    def shortest_s(gather_s: float) -> float:
        low, high = float(back_s.max()) * (least + teams), max(float(back_s.max()) * (count + teams), back_least_s)
        if not fits(gather_s, high):
            return np.inf
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(gather_s, middle) else (middle, high)
        return max(high, back_least_s)

    gathers = float(there_s.max()) * (teams + count * np.linspace(max(least / count, 0.5 / STEPS), 1.0, STEPS))
    gathers = np.unique(np.maximum(gathers, there_least_s))
    best = float(gathers[0]), shortest_s(float(gathers[0]))
    for gather_s in gathers[1:].tolist():
        if gather_s + max(float(back_s.max()) * (least + teams), back_least_s) >= sum(best):
            break
        best = min(best, (gather_s, shortest_s(gather_s)), key=sum)
    return copies(*best), sum(best)


def own_counts(problem: SiteProblem, spread: Spread, share: float) -> IntArray:
    """[hubs]: how many experts each hub's users hold themselves, so that no hub's links take longer for its copies than this
    share of what the slowest hub's take for all that it does not leave out."""
    hubs, wire = spread.plan.hubs, problem.wire
    kept = problem.num_experts - spread.left_out - problem.homes[hubs]
    down, up = problem.down_bytes_per_s[hubs] / wire.expert_bytes, problem.up_bytes_per_s[hubs] / wire.expert_gradient_bytes
    rate = np.minimum(down, up)
    most = np.floor(share * float((kept / rate).max()) * rate).astype(np.int64)
    users = np.bincount(spread.hub_of, minlength=problem.num_sites)[hubs] - 1
    return np.where(users > 0, np.maximum(kept - most, 0), 0)


def spread_table(problem: SiteProblem, spread: Spread, away: np.ndarray | None = None, own: IntArray | None = None) -> IntArray:
    """[D, E]: hubs compute for their users what they hold; the rest is computed by each expert's few other holders. So is what
    hubs hold for their users only (``away``, [hubs, E]; see ``planner.sites.relief``). So many experts each hub's users hold
    themselves (``own``, [hubs]), and one of them computes these for the hub, where its links have room."""
    size, hubs, hub_of = problem.num_sites, spread.plan.hubs, spread.hub_of
    missing = np.zeros((size, problem.num_experts), dtype=np.bool_)
    missing[hubs] = left_out(problem, spread)
    table = with_teams(problem, spread.plan, np.repeat(hub_of[:, None], problem.num_experts, axis=1))
    # Hubs are full: of rows, or of what rows leave in memory.
    free = (spread.plan.rows(problem)[1] / problem.hit[1] * (1 + 1e-9)).astype(np.int64)
    free[hubs] = free[spread.plan.teams.ravel()] = 0
    lacks = missing[hub_of]
    if away is not None:
        lacks[hubs] |= away
    there_s, back_s = copy_seconds(problem)
    if own is not None:
        _give_users(problem, spread, own, table, free)
        lacks &= table == hub_of[:, None]
    # The slowest homes first, whose experts are to have the fewest copies: each goes to those with most room.
    for expert in np.argsort(-(there_s + back_s), kind="stable"):
        home = problem.home_site[expert]
        table[home, expert] = home
        lacks[home, expert] = False
        asking = np.flatnonzero(lacks[:, expert])
        # The home, then users by room.
        order = np.lexsort((-free, np.arange(size) != home))
        order = order[free[order] > 0]
        holders = order[: int(np.searchsorted(np.cumsum(free[order]), len(asking))) + 1]
        places = np.repeat(holders, free[holders])
        if len(places) > len(asking) > 0:
            places = places[np.arange(len(asking)) * len(places) // len(asking)]
        # What nobody has room for stays at the hub.
        places, asking = places[: len(asking)], asking[: len(places)]
        table[asking, expert] = places
        free -= np.bincount(places, minlength=size)
        own_places = holders[lacks[holders, expert]]
        table[own_places, expert] = own_places
    return table


def _give_users(problem: SiteProblem, spread: Spread, own: IntArray, table: IntArray, free: IntArray) -> None:
    """What users hold themselves, into ``table``, and what that takes of the room of those who compute it for hubs. Hub by hub
    those experts whose homes' links are then busy for the shortest time."""
    missing, one = left_out(problem, spread), float(problem.hit[1])
    copy_s, copies = sum(copy_seconds(problem)), (~missing).sum(axis=0)
    for number in np.flatnonzero(own):
        hub = spread.plan.hubs[number]
        users = np.flatnonzero(spread.hub_of == hub)
        users = users[users != hub]
        busy_s = np.where(missing[number] | (problem.home_site == hub), np.inf, (copies + len(users)) * copy_s)
        held = np.argsort(busy_s, kind="stable")[: own[number]]
        held = held[np.isfinite(busy_s[held])]
        rows = int(np.ceil(problem.hit[len(held)] / one))
        computing = users[np.argmax(free[users])]
        if len(held) and free[computing] >= rows:
            free[computing] -= rows
            copies[held] += len(users) - 1
            table[np.ix_(users, held)] = users[:, None]
            table[hub, held] = computing


def left_out(problem: SiteProblem, spread: Spread) -> np.ndarray:
    """[hubs, E]: which experts each hub leaves out."""
    hubs = spread.plan.hubs
    wanted = np.ceil((len(hubs) - spread.most_copies) / (1 - spread.thin))
    chosen = np.zeros((len(hubs), problem.num_experts), dtype=np.bool_)
    for hub in np.argsort(-spread.left_out, kind="stable"):
        own = problem.home_site == hubs[hub]
        first = np.argsort(-np.where(own, -np.inf, wanted), kind="stable")[: spread.left_out[hub]]
        chosen[hub, first] = True
        wanted[first] -= 1
    return chosen
