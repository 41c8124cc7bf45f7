"""Tables for sites of very uneven links: the fastest hold all experts, each serving as many of the others as its links carry.

Sites in the middle would serve two users or fewer if they were hubs. Three of them may share the experts instead, as a team: as
many copies as a hub's, three sites served, and none takes in more than a third of the experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.shares import apportion
from planner.sites.grouping import assign, distance
from planner.sites.problem import SiteProblem


def hub_table(problem: SiteProblem, count: int, team: int) -> IntArray:
    """[D, E]: ``count`` hubs of ``team`` sites each; the hubs' sites are the fastest, and each hub gets users in proportion to
    the slowest link of its sites, near ones where paths between sites differ."""
    rate, order = problem.slower_bytes_per_s, problem.fastest_first
    hubs = order[: count * team].reshape(count, team)
    room = apportion(len(order) - count * team, rate[hubs].min(axis=1))
    table = np.empty((problem.num_sites, problem.num_experts), dtype=np.int64)
    even = np.full(team, problem.num_experts // team) + (np.arange(team) < problem.num_experts % team)
    rows = [assign(problem, [int(site) for site in members], even) for members in hubs]
    for members, row in zip(hubs, rows, strict=True):
        table[members] = row
    apart = distance(problem) if problem.pair_bytes_per_s is not None else None
    owner = np.repeat(np.arange(count), room)
    for turn, user in enumerate(order[count * team :]):
        chosen = int(owner[turn])
        if apart is not None:
            costs = np.where(room > 0, apart[user][hubs].max(axis=1), np.inf)
            chosen = int(np.argmin(costs))
            room[chosen] -= 1
        table[user] = rows[chosen]
    return table


TEAM = 3
"""Sites of a team."""
NO_TEAMS = np.empty((0, TEAM), dtype=np.int64)
STEPS = 48
"""Times that are tried for each direction, and again near the best ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HubPlan:
    """Sites that hold everything, and how many users each serves."""

    hubs: IntArray
    rooms: IntArray
    """Users that each could serve."""
    teams: IntArray
    """[teams, ``TEAM``]: sites that find all experts among themselves."""
    layer_s: float
    """What rows and copies of one layer take."""
    forward: float
    """Sites' rows that a link of one byte per second carries while the busiest one is busy, on the way to the experts."""
    back: float
    """Likewise on the way back."""

    def users(self, problem: SiteProblem) -> IntArray:
        """Sites that are neither hubs nor in a team."""
        return np.setdiff1d(np.arange(problem.num_sites), np.concatenate([self.hubs, self.teams.ravel()]))

    def rows(self, problem: SiteProblem) -> tuple[FloatArray, FloatArray]:
        """Rows of how many sites each may send ([D]) and receive ([D]) while the busiest link is busy."""
        up, down = problem.up_bytes_per_s, problem.down_bytes_per_s
        return np.minimum(self.forward * up, self.back * down), np.minimum(self.forward * down, self.back * up)


def best_hubs(problem: SiteProblem, most_users: int) -> HubPlan | None:
    """With at most so many users a hub: for each way to limit the busiest link's time forward and back, the fewest hubs whose
    links serve all others; of these the fastest. A site whose links are too slow to send its tokens away in time is a hub whether
    it serves anybody or not. None where paths between sites have limits of their own, or none serve all."""
    if problem.pair_bytes_per_s is not None or problem.num_sites < 3:
        return None
    up, down = problem.up_bytes_per_s, problem.down_bytes_per_s
    per_forward, per_back = layer_bytes(problem)
    best: HubPlan | None = None
    at = 0, 0
    middle = float(np.median(np.minimum(up, down)))
    shortest, longest = 0.5 / middle, 16.0 / middle
    forwards = backs = np.geomspace(shortest, longest, STEPS)
    for fine in (False, True):
        if fine:
            if best is None:
                break
            step = (longest / shortest) ** (1.0 / (STEPS - 1))
            near = np.geomspace(1 / step, step, STEPS // 2)
            forwards, backs = forwards[at[0]] * near, backs[at[1]] * near
        for i, forward in enumerate(forwards):
            for j, back in enumerate(backs):
                lower_s = per_forward * forward + per_back * back
                if best is not None and lower_s >= best.layer_s:
                    break
                within = hubs_within(problem, forward, back, most_users)
                if within is None:
                    continue
                layer_s = lower_s + _copies_s(problem, within)
                if best is None or layer_s < best.layer_s:
                    best, at = replace(within, layer_s=layer_s), (i, j)
    return best


def hubs_within(problem: SiteProblem, forward: float, back: float, most_users: int) -> HubPlan | None:
    """The fewest hubs whose links serve all others while the busiest one is busy for ``forward`` and ``back`` (seconds per byte
    of a site's rows), with most room first but for those that send too little to be users; where hubs would serve fewer users
    than a team has members, teams in their place, as far as there are sites whose links carry what these exchange. None where
    there is no way."""
    size, up, down = problem.num_sites, problem.up_bytes_per_s, problem.down_bytes_per_s
    rooms = np.floor(np.minimum(forward * down, back * up) * (1 + 1e-9)).astype(np.int64)
    rooms = np.minimum(rooms, most_users)
    stays = np.minimum(forward * up, back * down) * (1 + 1e-9) < 1.0
    order = problem.fastest_first
    order = order[np.argsort(-rooms[order], kind="stable")]
    order = np.concatenate([order[stays[order]], order[~stays[order]]])
    left = size - 1 - np.arange(size) - np.cumsum(rooms[order])
    least = max(int(stays.sum()), 1)
    left[: least - 1] = size
    many = max(int((rooms[order] >= TEAM).sum()), least)
    teams = NO_TEAMS
    if left[many - 1] > 0:
        found = _teams(problem, forward, back, order[many:])[: -(-int(left[many - 1]) // TEAM)]
        teams, left = (found, left - found.size) if left[many - 1] <= found.size else (teams, left)
    if left.min() > 0:
        return None
    hubs = order[: int((left <= 0).argmax()) + 1]
    return HubPlan(hubs=hubs, rooms=rooms[hubs], teams=teams, layer_s=np.inf, forward=forward, back=back)


def _teams(problem: SiteProblem, forward: float, back: float, sites: IntArray) -> IntArray:
    """[teams, ``TEAM``]: of those sites whose links carry what teammates exchange meanwhile, the fastest first."""
    up, down = problem.up_bytes_per_s[sites], problem.down_bytes_per_s[sites]
    rows = np.minimum(np.minimum(forward * up, back * down), np.minimum(forward * down, back * up)) * (1 + 1e-9)
    able = sites[rows >= (TEAM - 1) * problem.hit[-(-problem.num_experts // TEAM)]]
    able = able[np.argsort(-problem.slower_bytes_per_s[able], kind="stable")]
    return np.asarray(able[: len(able) // TEAM * TEAM].reshape(-1, TEAM))


def layer_bytes(problem: SiteProblem) -> tuple[float, float]:
    """Of the rows of all of one site's tokens in one layer's step: on the way to the experts, and back."""
    training, wire = problem.workload.training, problem.wire
    rows = training.micro_batches * problem.num_inside * training.tokens
    return float(rows * wire.row_there_bytes), float(rows * wire.row_back_bytes)


def _copies_s(problem: SiteProblem, plan: HubPlan) -> float:
    """Of a gather and a return when hubs hold everything, and teams share it."""
    wire, up, down = problem.wire, problem.up_bytes_per_s, problem.down_bytes_per_s
    is_hub = np.zeros(problem.num_sites, dtype=np.bool_)
    is_hub[plan.hubs] = True
    sent = (problem.homes * (len(plan.hubs) + len(plan.teams) - is_hub)).astype(np.float64)
    kept = np.where(is_hub, problem.num_experts - problem.homes, 0).astype(np.float64)
    kept[plan.teams.ravel()] = -(-problem.num_experts // TEAM)
    gather = wire.expert_bytes * max(float((sent / up).max()), float((kept / down).max()))
    return gather + wire.expert_gradient_bytes * max(float((sent / down).max()), float((kept / up).max()))


def served_table(problem: SiteProblem, plan: HubPlan) -> IntArray:
    """[D, E]: each user finds everything at one hub."""
    users, holder = plan.users(problem), np.arange(problem.num_sites)
    holder[users] = np.repeat(plan.hubs, users_of(plan, len(users)))
    return with_teams(problem, plan, np.repeat(holder[:, None], problem.num_experts, axis=1))


def with_teams(problem: SiteProblem, plan: HubPlan, table: IntArray) -> IntArray:
    """The table ([D, E]) with teams' members finding all among themselves, evenly, own experts first."""
    even = np.bincount(np.arange(problem.num_experts) % TEAM, minlength=TEAM)
    for members in plan.teams:
        table[members] = assign(problem, members.tolist(), even)
    return table


def users_of(plan: HubPlan, num_users: int) -> IntArray:
    """Of each hub: the fullest are relieved where there is more room than users."""
    left = plan.rooms.copy()
    for _ in range(int(left.sum()) - num_users):
        left[np.argmax(left)] -= 1
    return left
