"""Token groups: sites whose tokens stay among them, with every expert held somewhere in the group.

One group of all sites with experts at home is expert parallelism; every site a group of its own is full gather. In
between, k groups of D / k sites are the paper's domains seen from the other side: sites of the same offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from hybridep.arrays import FloatArray, IntArray
from planner.sites.problem import SiteProblem

Groups = tuple[tuple[int, ...], ...]

MANY = 128
"""With more sites groups are made in one pass."""


def distance(problem: SiteProblem) -> FloatArray:
    """[D, D], symmetric: seconds that one micro-batch's rows to a site take, both ways, latency included."""
    work, wire = problem.workload, problem.wire
    row_bytes = wire.row_there_bytes + wire.row_back_bytes
    rate = np.minimum(problem.up_bytes_per_s[:, None], problem.down_bytes_per_s[None, :])
    if problem.path_bytes_per_s is not None:
        rate = np.minimum(rate, problem.path_bytes_per_s)
    rows = problem.num_inside * work.training.tokens * row_bytes / 2
    one_way = rows / rate + 2.5 * problem.latency_s
    both = one_way + one_way.T
    np.fill_diagonal(both, 0.0)
    return np.asarray(both)


def nearest_groups(apart: FloatArray, num_groups: int) -> Groups:
    """Groups of nearly equal size: the site farthest from all that are left takes its nearest ones, and so on; then
    pairs of sites change places while that brings members nearer together."""
    size = len(apart)
    if size > MANY:
        return _nearest_of_many(apart, num_groups)
    left = list(range(size))
    groups: list[list[int]] = []
    for number in range(num_groups):
        take = len(left) // (num_groups - number)
        among = np.array(left)
        first = int(among[np.argmax(apart[np.ix_(among, among)].sum(axis=1))])
        order = among[np.argsort(apart[first, among], kind="stable")]
        chosen = [first, *(int(d) for d in order if d != first)][:take]
        groups.append(sorted(chosen))
        left = [d for d in left if d not in set(chosen)]
    label = np.empty(size, dtype=np.int64)
    for number, members in enumerate(groups):
        label[members] = number
    _exchange_members(apart, label, num_groups)
    return groups_of(label)


def _nearest_of_many(apart: FloatArray, num_groups: int) -> Groups:
    """As above, with the sites taken once in the order of their distance from all, and no exchanges."""
    size = len(apart)
    free = np.ones(size, dtype=np.bool_)
    groups: list[tuple[int, ...]] = []
    left = size
    for first in np.argsort(-apart.sum(axis=1), kind="stable"):
        if not free[first]:
            continue
        take = left // (num_groups - len(groups))
        others = np.flatnonzero(free)
        distances = apart[first, others]
        distances[others == first] = -1.0
        chosen = others[np.argsort(distances, kind="stable")[:take]]
        free[chosen] = False
        left -= take
        groups.append(tuple(int(d) for d in np.sort(chosen)))
    return tuple(groups)


def grown_groups(apart: FloatArray, num_groups: int) -> Groups:
    """Groups of any size: the nearest are joined first (average linkage), as the pods of a site are."""
    tree = linkage(squareform(apart, checks=False), "average")
    return groups_of([int(label) for label in fcluster(tree, num_groups, "maxclust")])


def even_groups(problem: SiteProblem, num_groups: int) -> Groups:
    """Groups of nearly equal size and nearly equal access rates together: the sites by rate, dealt out there and back."""
    order = problem.fastest_first
    turn = np.arange(len(order))
    lap, place = turn // num_groups, turn % num_groups
    label = np.empty(len(order), dtype=np.int64)
    label[order] = np.where(lap % 2 == 0, place, num_groups - 1 - place)
    return groups_of(label)


def estimate_s(problem: SiteProblem, num_groups: int) -> float:
    """One layer's share of a step with so many groups, if all sites but experts' homes were the slowest, and latencies the
    median."""
    work, wire, size = problem.workload, problem.wire, problem.num_sites
    members = size / num_groups
    held = problem.num_experts / members
    # Where experts are fewer than members, others' rows come together at those that hold one.
    hit = float(np.interp(np.clip(held, 1, problem.num_experts), np.arange(problem.num_experts + 1), problem.hit))
    batches = work.training.micro_batches
    slower = problem.slower_bytes_per_s
    row_bytes = wire.row_there_bytes + wire.row_back_bytes
    rows = problem.num_inside * work.training.tokens * max(members - 1, 0.0) * hit
    rate = float(slower.min())
    busiest = max(held / rate, (num_groups - 1) * float((problem.homes / slower).max())) if num_groups > 1 else 0.0
    gather_s = busiest * (wire.expert_bytes + wire.expert_gradient_bytes) / 2
    latency = problem.median_latency_s * 5 * batches * (members > 1)
    hidden = min(gather_s, problem.beside_s) + min(gather_s, 2 * problem.beside_s)
    return batches * rows * row_bytes / rate + 2 * gather_s - hidden + latency


def _exchange_members(apart: FloatArray, label: IntArray, num_groups: int) -> None:
    """Swap two sites of different groups while the sum of distances inside groups falls."""
    size = len(apart)
    for _ in range(4 * size):
        member = np.zeros((size, num_groups))
        member[np.arange(size), label] = 1.0
        to_group = apart @ member
        own = to_group[np.arange(size), label]
        gain = own[:, None] + own[None, :] - to_group[:, label] - to_group[:, label].T + 2 * apart
        gain[label[:, None] == label[None, :]] = 0.0
        a, b = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[a, b] <= 1e-12 * (own.sum() + 1e-300):
            return
        label[a], label[b] = label[b], label[a]


def groups_of(label: Sequence[int] | IntArray) -> Groups:
    """From a group number per site."""
    members: dict[int, list[int]] = {}
    for d, number in enumerate(label):
        members.setdefault(int(number), []).append(d)
    return tuple(tuple(group) for group in members.values())


@dataclass(frozen=True)
class Share:
    """How the members of a group share the experts."""

    power: float = 0.0
    """In proportion to a member's access rate to this power."""
    holders: int = 0
    """Only so many members, the fastest, hold any; 0 for all."""


def shares(problem: SiteProblem, members: Sequence[int], share: Share) -> IntArray:
    """How many experts each member shall hold; its rate is the slower one of its access links."""
    sites = np.asarray(members)
    rate = problem.slower_bytes_per_s[sites]
    weight = (rate / rate.max()) ** share.power
    if 0 < share.holders < len(sites):
        slow = np.lexsort((np.arange(len(sites)), -problem.homes[sites], -rate))[share.holders :]
        weight[slow] = 0.0
    exact = problem.num_experts * weight / weight.sum()
    whole = np.floor(exact + 1e-9).astype(np.int64)
    rest = problem.num_experts - int(whole.sum())
    # Ties go to members that own experts, which need no copy of those.
    order = np.lexsort((np.arange(len(sites)), -problem.homes[sites], -np.round(exact - whole, 9)))
    whole[order[:rest]] += 1
    return np.asarray(whole)


def assign(problem: SiteProblem, members: Sequence[int], targets: IntArray) -> IntArray:
    """[E]: each expert's holder among ``members``, ``targets`` experts each: own ones first, the others dealt out so
    that every member gets them evenly from all places inside the homes' sites."""
    row = np.full(problem.num_experts, -1, dtype=np.int64)
    room = np.array(targets, dtype=np.int64)
    for position, site in enumerate(members):
        if problem.homes[site]:
            own = np.flatnonzero(problem.home_site == site)[: room[position]]
            row[own] = site
            room[position] -= len(own)
    by_place = problem.experts_by_place
    row[by_place[row[by_place] < 0]] = np.asarray(members, dtype=np.int64)[_dealt(tuple(room.tolist()))]
    return row


def shared_table(problem: SiteProblem, groups: Groups, share: Share) -> IntArray:
    """[D, E]: every group's members share the experts."""
    table = np.empty((problem.num_sites, problem.num_experts), dtype=np.int64)
    for members in groups:
        table[list(members)] = assign(problem, members, shares(problem, members, share))
    return table


@lru_cache(maxsize=4096)
def _dealt(counts: tuple[int, ...]) -> IntArray:
    """[sum of ``counts``]: which of so many takes the next one, if each shall take as many as its count, evenly in turn."""
    taker = np.repeat(np.arange(len(counts)), counts)
    turn = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count] or [np.zeros(0)])
    dealt: IntArray = taker[np.lexsort((taker, turn))]
    return dealt
