"""Other planners under one signature: (problem) -> serving table, as far as their ideas reach across sites.

Each is the named system's placement idea in this project's terms, with the best configuration inside sites that fits, so
that what is compared is who serves whom. Routing is uniform here, so ideas that live from skew (FasterMoE, EPLB) have
little to work with; they are kept because users ask for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from heapq import heapreplace

import numpy as np

from hybridep.arrays import IntArray
from hybridep.errors import UserError
from hybridep.placement import divisors
from planner.paper import best_share, domain_of_share
from planner.sites.grouping import Groups, Share, assign, distance, groups_of, shares
from planner.sites.problem import SiteProblem
from planner.sites.search import Found, Search

Planner = Callable[[SiteProblem], list[IntArray]]
"""Tables that the planner would choose among by its own lights; the fastest that fits counts."""

_GENERATIONS = 400
"""Swaps of two sites that ``dt_fm`` tries for each number of groups."""


def expert_parallelism(problem: SiteProblem) -> list[IntArray]:
    """Every token travels."""
    return [np.tile(problem.home_site, (problem.num_sites, 1))]


def full_gather(problem: SiteProblem) -> list[IntArray]:
    """Every expert travels."""
    return [np.tile(np.arange(problem.num_sites)[:, None], (1, problem.num_experts))]


def rank_order_domains(problem: SiteProblem) -> list[IntArray]:
    """Topology-blind: the best domain size that divides, sites in the order of their ranks."""
    return [_domain_table(problem, np.arange(problem.num_sites), size) for size in divisors(problem.num_sites)]


def paper_closed_form(problem: SiteProblem) -> list[IntArray]:
    """HybridEP, Eq. 12: the domain size from the mean bandwidth, one p for all, forward only."""
    work, size = problem.workload, problem.num_sites
    rate = float(problem.slower_bytes_per_s.mean())
    if problem.pair_bytes_per_s is not None:
        rate = min(rate, float(problem.pair_bytes_per_s[~np.eye(size, dtype=np.bool_)].mean()))
    share = best_share(
        data_bytes=problem.num_inside * work.training.tokens * work.model.top_k * problem.wire.combine_row_bytes,
        expert_bytes=problem.wire.expert_bytes * problem.num_experts / size,
        num_gpus=size,
        bandwidth_bytes_per_s=rate,
        pre_expert_s=problem.beside_s,
    )
    return [_domain_table(problem, np.arange(size), domain_of_share(size, share))]


def faster_moe(problem: SiteProblem) -> list[IntArray]:
    """FasterMoE: expert parallelism, with the hottest experts copied everywhere, as many as its latency model likes."""
    home = expert_parallelism(problem)[0]
    here = np.arange(problem.num_sites)[:, None]
    experts = np.arange(problem.num_experts)[None, :]
    counts = sorted({0, *(round(problem.num_experts * step / 16) for step in range(17))})
    return [np.where(experts < count, here, home) for count in counts]


def smart_moe(problem: SiteProblem) -> list[IntArray]:
    """SmartMoE-like: equal slots per site (1.5 times and twice its share), filled greedily to balance the load; tokens go to the
    copy at home where there is one, else to the least loaded holder, whatever the distance."""
    return [_greedy_copies(problem, slots) for slots in _slot_counts(problem)[-2:]]


def eplb(problem: SiteProblem) -> list[IntArray]:
    """DeepSeek EPLB: redundant experts so that every site holds equally many, packed by load, no network term."""
    return [_greedy_copies(problem, slots) for slots in _slot_counts(problem)[:1]]


def dt_fm(problem: SiteProblem) -> list[IntArray]:
    """DT-FM: sites divided into groups by a search over swaps that only looks at the network (Yuan et al., 2022), for
    every number of groups that divides the sites; experts spread evenly inside a group."""
    tables = []
    for groups in _near_groups(distance(problem).tobytes(), problem.num_sites):
        table = np.empty((problem.num_sites, problem.num_experts), dtype=np.int64)
        for members in groups:
            table[list(members)] = assign(problem, members, shares(problem, members, Share()))
        tables.append(table)
    return tables


@lru_cache(maxsize=4)
def _near_groups(distances: bytes, size: int) -> tuple[Groups, ...]:
    """Of ``dt_fm``, which homes do not change: of sites so far from each other ([D, D] numbers)."""
    apart, found = np.frombuffer(distances).reshape(size, size), []
    for count in divisors(size):
        rng = np.random.default_rng(count)
        label = np.arange(size) * count // size
        best = _communication(apart, label)
        for _ in range(_GENERATIONS if 1 < count < size else 0):
            a, b = rng.integers(size, size=2)
            trial = label.copy()
            trial[a], trial[b] = label[b], label[a]
            if (value := _communication(apart, trial)) < best:
                label, best = trial, value
        found.append(groups_of(label))
    return tuple(found)


OTHERS: dict[str, Planner] = {
    "ep": expert_parallelism,
    "full_gather": full_gather,
    "rank_order_domains": rank_order_domains,
    "paper_closed_form": paper_closed_form,
    "faster_moe": faster_moe,
    "smart_moe": smart_moe,
    "eplb": eplb,
    "dt_fm": dt_fm,
}


def other_plan(problem: SiteProblem, name: str) -> Found:
    """The named planner's table in its best configuration (``rank[0]`` is zero when it fits). Raises UserError."""
    if name not in OTHERS:
        raise UserError(f"planner {name!r} is unknown; there are {', '.join(OTHERS)}")
    search = Search(problem=problem)
    for table in OTHERS[name](problem):
        search.evaluate(np.ascontiguousarray(table, dtype=np.int64))
    assert search.best is not None
    return search.best


def _domain_table(problem: SiteProblem, order: IntArray, size: int) -> IntArray:
    """Domains of ``size`` consecutive sites of ``order``; other domains are reached at the same offset."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    target = place[problem.home_site][None, :] // size * size + place[:, None] % size
    return np.asarray(order[target])


def _slot_counts(problem: SiteProblem) -> list[int]:
    """Experts per site: what it takes to be equal, then 1.5 and 2 times that."""
    least = max(-(-problem.num_experts // problem.num_sites), int(problem.homes.max()))
    return sorted({min(problem.num_experts, int(np.ceil(least * factor))) for factor in (1.0, 1.5, 2.0)}) or [least]


def _greedy_copies(problem: SiteProblem, slots: int) -> IntArray:
    """[D, E]: homes, then copies of the expert with most load per copy to the site with most room."""
    size, experts = problem.num_sites, problem.num_experts
    held = np.zeros((size, experts), dtype=np.bool_)
    held[problem.home_site, np.arange(experts)] = True
    room, fewest = slots - held.sum(axis=1), [(1, expert) for expert in range(experts)]
    while True:
        copies, expert = fewest[0]
        sites = np.where(~held[:, expert], room, -1)
        site = int(np.argmax(sites))
        if sites[site] <= 0:
            break
        heapreplace(fewest, (copies + 1, expert))
        held[site, expert] = True
        room[site] -= 1
    table = np.empty((size, experts), dtype=np.int64)
    load = np.zeros(size)
    for expert in range(experts):
        holders = np.flatnonzero(held[:, expert])
        for site in range(size):
            target = site if held[site, expert] else int(holders[np.argmin(load[holders])])
            table[site, expert] = target
            load[target] += 1
    return table


def _communication(apart: np.ndarray, label: IntArray) -> float:
    """The slowest pair inside any group, then the mean, as a tie-break."""
    inside = label[:, None] == label[None, :]
    return float((apart * inside).max() + 1e-3 * (apart * inside).sum() / max(int(inside.sum()), 1))
