"""Experts' homes where links are fast: what a home sends to all others, and takes back, passes its site's links.

Homes in even blocks give some sites one expert more than others by their place in the cluster file, or one where others have
none; so the slowest may be who everybody waits for. Rules may keep copies of these from some sites, or forbid any plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.placement import homes_of
from hybridep.shares import apportion
from planner.constraints import permissions
from planner.sites.others import other_plan
from planner.sites.problem import SiteProblem
from planner.sites.solution import Wishes, solve_sites

MANY = 64
"""Among more sites the best plans are like none of the simple ones, so only searches tell homes apart."""
_COMPARED = ("ep", "full_gather", "rank_order_domains", "dt_fm")
"""Planners by whose best plan homes are compared, before anything is searched for."""
_CLEARLY = 0.005
"""Share of the step that other homes must save."""
_LOOKS = 0.2
"""Share of the time for short searches with one set of homes after the other, all together."""
_CHEAP = 1.01
"""Homes at what costs no more than so many times what is cheapest."""
_EVEN = 1e-3
"""What counts beside the busiest link when homes are chosen for gathers: the root of all links' mean squares, by so much."""


def with_better_homes(problem: SiteProblem, wishes: Wishes) -> tuple[SiteProblem, Wishes]:
    """The problem with the homes that it has, or with one of ``with_faster_homes``, whichever short searches prefer, from whose
    table the next one begins."""
    others = with_faster_homes(problem)
    if not others:
        return problem, wishes
    look_s = _LOOKS * wishes.time_limit_s / (1 + len(others))
    look = replace(wishes, time_limit_s=look_s, paced_by_s=look_s, keep=1, report=None, proven=False)
    best = min((solve_sites(one, look) for one in (problem, *others)), key=lambda found: found.found.rank)
    return best.problem, replace(wishes, seeds=(*wishes.seeds, best.found.table))


def with_possible_homes(problem: SiteProblem) -> SiteProblem | None:
    """A problem whose rules clash with homes, by rates, at sites each of which may be home to all experts; None where there are
    none, or sites have ``experts`` of their own."""
    possible = _possible_sites(problem)
    if np.ptp(problem.cluster.home_weights) > 0 or not possible.any():
        return None
    [found] = _moved(problem, [by_rate(problem.num_experts, _rates(problem) * possible)])
    return found


def _possible_sites(problem: SiteProblem) -> BoolArray:
    """[D]: whether rules can be kept with all experts at home there."""
    cluster, experts = problem.cluster, problem.num_experts
    rules = () if problem.constraints is None else problem.constraints.rules
    _, first, alike = np.unique(permissions(cluster, experts, rules).copy, axis=1, return_index=True, return_inverse=True)
    homes = (np.full(experts, site * cluster.ranks_per_site) for site in first)
    return np.array([permissions(cluster, experts, rules, home).possible for home in homes])[alike.reshape(-1)]


def with_faster_homes(problem: SiteProblem) -> list[SiteProblem]:
    """The problem with homes by how fast links are: so that the busiest home has least to carry for each of its experts, or in
    proportion, if simple plans are better so; so that all sites have all experts soonest, also from where rules let all have
    copies alone; and by rates where copies cost least. Each only if simple plans are clearly better than as it is (or fit where
    none does); among more than ``MANY`` sites without asking these, and for gathers only where pairs have links of their own.
    None where sites have ``experts`` of their own, or nothing tells them apart, and for one site."""
    rules, experts = problem.permissions, problem.num_experts
    alike = problem.equal_sites and rules is None and not problem.goal.needs_prices
    if np.ptp(problem.cluster.home_weights) > 0 or problem.num_sites < 2 or alike:
        return []
    rates, few = _rates(problem), problem.num_sites <= MANY
    for_gathers = few or problem.pair_bytes_per_s is not None
    others = _moved(problem, [by_rate(experts, rates), *([apportion(experts, rates)] if few else [])])
    others = [min(others, key=_simple_rank)] if few and others else others
    if for_gathers:
        others += _moved(problem, [gathered_soonest(problem)])
    reached = np.ones(problem.num_sites, dtype=np.bool_) if rules is None else np.asarray(rules.copy.all(axis=0))
    if reached.any() and not reached.all():
        others += _moved(problem, [gathered_soonest(problem, reached) if for_gathers else by_rate(experts, rates * reached)])
    if problem.goal.needs_prices and (copies_usd := _copies_usd(problem)) is not None:
        others += _moved(problem, [by_rate(experts, rates * (copies_usd <= _CHEAP * copies_usd.min()))])
    others = list({one.home.tobytes(): one for one in others if (one.home != problem.home).any()}.values())
    if not few:
        return others
    missing, least_s = _simple_rank(problem)
    return [one for one in others if _simple_rank(one) < (missing, least_s * (1 - _CLEARLY))]


def _moved(problem: SiteProblem, many: Sequence[IntArray]) -> list[SiteProblem]:
    """With so many experts ([D]) at home at each site, but where rules then clash."""
    made = [replace(problem, home=homes_of(numbers, problem.cluster.sizes)) for numbers in many]
    rules, experts = () if problem.constraints is None else problem.constraints.rules, problem.num_experts
    return [one for one in made if permissions(one.cluster, experts, rules, one.home).possible]


def _copies_usd(problem: SiteProblem) -> FloatArray | None:
    """[D]: what all others' copies of an expert at home there cost, and their gradients; None without prices of bytes."""
    prices, wire = problem.egress_usd_per_byte, problem.wire
    if prices is None:
        return None
    prices = np.where(np.eye(len(prices), dtype=np.bool_), 0.0, prices)
    return np.asarray(prices.sum(axis=1) * wire.expert_bytes + prices.sum(axis=0) * wire.expert_gradient_bytes)


def _simple_rank(problem: SiteProblem) -> tuple[int, float]:
    """Of the best simple plan."""
    return min(other_plan(problem, name).rank for name in _COMPARED)


def by_rate(experts: int, rates: FloatArray) -> IntArray:
    """[D]: so many experts at sites with these ``rates``, so that the least rate for each expert is as large as it can be."""
    numbers = np.zeros(len(rates), dtype=np.int64)
    for _ in range(experts):
        numbers[(rates / (numbers + 1)).argmax()] += 1
    return numbers


def gathered_soonest(problem: SiteProblem, among: BoolArray | None = None) -> IntArray:
    """[D]: experts at each site, or each of some (``among``, [D]), so that to gather all everywhere, and to return gradients,
    takes least: from numbers by rates on by moving single ones, as long as that helps."""
    size, experts, pairs = problem.num_sites, problem.num_experts, problem.path_bytes_per_s
    slowest = [np.zeros(size)] * 2 if pairs is None else [(1 / pairs).max(axis=axis) for axis in (1, 0)]
    up_s, down_s = 1 / problem.up_bytes_per_s, 1 / problem.down_bytes_per_s
    out_s, back_s = (np.maximum((size - 1) * one, pair) for one, pair in zip((up_s, down_s), slowest, strict=True))
    gather, give_back = problem.wire.expert_bytes, problem.wire.expert_gradient_bytes
    at_home_s = np.stack([out_s * gather, back_s * give_back])
    elsewhere_s = np.stack([down_s * gather, up_s * give_back])
    farthest_s = np.stack([problem.latency_s.max(axis=axis) for axis in (1, 0)])

    def seconds(numbers: IntArray) -> FloatArray:
        """[...] of [..., D] experts at each site."""
        own = numbers[..., None, :]
        busy = np.concatenate([own * at_home_s, (experts - own) * elsewhere_s], axis=-1)
        longest = busy.max(axis=-1) + (farthest_s * (own > 0)).max(axis=-1)
        return np.asarray((longest + _EVEN * np.sqrt((busy**2).mean(axis=-1))).sum(axis=-1))

    # By rates, at all sites or at the fastest only; or where latency rules at one.
    among = np.ones(size, dtype=np.bool_) if among is None else among
    rates, one = among / at_home_s.sum(axis=0), np.eye(size, dtype=np.int64)
    fastest = np.sort(rates[among])[::-1][1:experts]
    starts = np.array([by_rate(experts, np.where(rates >= least, rates, 0.0)) for least in (0.0, *fastest)])
    starts = np.concatenate([starts, experts * one[among]])
    starts_s = seconds(starts)
    numbers, least_s = starts[starts_s.argmin()], float(starts_s.min())
    while True:
        # From what is longest busy, or farthest, to any site; and from any to what is busy longest with what it lacks.
        busiest = np.concatenate([numbers * at_home_s, farthest_s * (numbers > 0)]).argmax(axis=1)
        lacking = ((experts - numbers) * elsewhere_s).argmax(axis=1)
        moved = np.concatenate([numbers - one[busiest][:, None] + one, numbers - one + one[lacking][:, None]]).reshape(-1, size)
        moved = moved[(moved >= 0).all(axis=1) & (moved[:, ~among] == 0).all(axis=1)]
        moved_s = seconds(moved)
        best = int(moved_s.argmin())
        if moved_s[best] >= least_s * (1 - 1e-9):
            return np.asarray(numbers)
        numbers, least_s = moved[best], float(moved_s[best])


def _rates(problem: SiteProblem) -> FloatArray:
    """[D] bytes/s: what each site can send to others, or take from them, whichever is less."""
    up, down, pairs = problem.up_bytes_per_s, problem.down_bytes_per_s, problem.pair_bytes_per_s
    if pairs is not None:
        between = np.where(np.eye(problem.num_sites, dtype=np.bool_), 0.0, pairs)
        up, down = np.minimum(up, between.sum(axis=1)), np.minimum(down, between.sum(axis=0))
    return np.asarray(np.minimum(up, down), dtype=np.float64)
