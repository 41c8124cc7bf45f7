"""The bound of one box as a linear program where many sites are taken together: over classes of sites, not pairs of them.

Copies leave their homes, and arrive at holders, within the gather's time, which with the latency of the farthest costs what it
exceeds the computation it runs beside. Sites of a class find every expert at home or in visits to others; holders serve as much,
whoever visits whom. Visits are told apart by how much they find: P, the chance that a token needs one of n experts, is concave,
so of the visits between two sizes the largest cost least per expert, but for a price of each. Links have room for whole large
visits only, and for so many smaller ones beside them; so a copy serves few sites in large visits. Experts are told apart by how
fast their homes send copies, because those of slow homes are where it matters.

Every plan of the box is a point of the program that costs no more: its own numbers, as means of each class.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.sparse import coo_array

from hybridep.placement import IntArray
from hybridep.plan import Residency
from hybridep.traffic import FloatArray
from planner.sites.boxes import Box
from planner.sites.capacity import SLOPES, serving_lines
from planner.sites.layer_lp import COPIES, Times, add_copies, bound_times, copies_right, spent, times_from, unserved_s
from planner.sites.linear import BoxProgram, Rows, Template
from planner.sites.relaxation import Relaxation
from planner.sites.visits import in_small_visits, large_visits, row_budgets, slowest_homes

LARGE = 1 / 4, 1 / 2
"""Shares of all experts: visits that find fewer than the first are small, each of the others begins a further size."""
GROUPS = 4
"""Of experts, by how fast their homes send copies."""
PRICES = np.array([0.0, 0.5, 0.8, 1.0, 1.1, 1.3])
"""Of a visit, in experts of the smallest one of its size: slopes of lines above what is found beside such visits."""
MOST_VISITS = 8
"""Up to so many visits are counted one by one."""
MOST_HELD, LEAST_HELD, UPLOADS, SERVED, COPY_SERVES = "most held", "least held", "uploads", "served", "a copy serves"
MUST_VISIT, MADE, RECEIVED, FOUND_BESIDE, SERVED_BESIDE = "must visit", "made", "received", "found beside", "served beside"
"""Rows whose right sides change from box to box."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """What the programs of all boxes of one residency have in common; C classes, G groups of experts."""

    at_home: FloatArray
    """[C, G]: experts of a group at home there."""
    group: IntArray
    """[K]: of the experts at home there."""
    experts: FloatArray
    """[G]."""
    sizes: IntArray
    """[V]: experts of the smallest visits that are not small, size by size; together with small ones V + 1 sizes."""
    held: IntArray
    """[C, G]: variables, copies."""
    own: IntArray
    """[C, G]: what a site's tokens find there."""
    found: IntArray
    """[V + 1, C, G]: in visits of each size."""
    served: IntArray
    """[V + 1, C, G]: the same by holders."""
    times: Times
    inequality: Template
    right: FloatArray
    """[rows]: zero where a box gives it."""
    rows: dict[str, slice]
    """Those, by name."""
    equality: Any
    """Sparse."""
    total: FloatArray
    """Of equalities."""
    costs: FloatArray
    """[variables]."""
    bounds: FloatArray
    """[variables, 2]: zero where a box gives them."""


def pooled_program(relaxation: Relaxation, box: Box) -> BoxProgram | None:
    """Minimises seconds of one layer, but for the latency of token exchanges. None when sites cannot hold what they must."""
    classes, limits, hit = relaxation.classes, relaxation.limits(box), relaxation.hit
    if not limits.possible(classes):
        return None
    shape = pooled_shape(relaxation, box.residency)
    right, rows, kinds, sizes = shape.right.copy(), shape.rows, classes.kinds, shape.sizes[:, None]
    sent, room = row_budgets(relaxation, box)
    made, received = large_visits(relaxation, limits, sent, room, sizes)
    slope, at_none = serving_lines(relaxation, box, limits)
    most_held, least_held = classes.mean(limits.most_held), classes.mean(limits.least_held)
    most_received = np.stack([classes.largest(one) for one in received])
    right[rows[MOST_HELD]] = most_held - classes.homes
    right[rows[LEAST_HELD]] = classes.homes - np.minimum(least_held, most_held)
    uploads, is_home = limits.uploads * kinds.count, kinds.homes > 0
    right[rows[UPLOADS]] = np.bincount(shape.group[is_home], weights=uploads[is_home], minlength=len(shape.experts))
    right[rows[SERVED]] = (at_none + slope * classes.homes[:, None]).ravel()
    right[rows[COPY_SERVES]] = (most_received[:, :, None] * shape.at_home).ravel()
    below = in_small_visits(relaxation, sent, sizes)
    must = (below < relaxation.problem.num_experts - limits.most_held).astype(np.float64)
    right[rows[MUST_VISIT]] = -_means(relaxation, must).ravel()
    right[rows[MADE]], right[rows[RECEIVED]] = _means(relaxation, made).ravel(), _means(relaxation, received).ravel()
    right[rows[FOUND_BESIDE]] = _means(relaxation, _beside(relaxation, sent, made, sizes)).ravel()
    right[rows[SERVED_BESIDE]] = _means(relaxation, _beside(relaxation, room, received, sizes)).ravel()
    right[rows[COPIES]] = copies_right(relaxation, box)
    found = classes.largest(limits.most_found)
    chords = [_chords(hit, most, shape.sizes) for most in (found.max(axis=1), found.max(axis=0))]
    return BoxProgram(
        costs=shape.costs,
        inequality=shape.inequality.matrix(
            np.concatenate([np.ones(1), *(chord.ravel() for chord in chords), most_received.ravel(), slope.ravel()])
        ),
        right=right,
        equality=shape.equality,
        total=shape.total,
        bounds=_bounds(relaxation, box, shape, most_held),
    )


def _means(relaxation: Relaxation, values: FloatArray) -> FloatArray:
    """[V, C, ...], given [V, K, ...]."""
    return np.stack([relaxation.classes.mean(one) for one in values])


def _chords(hit: FloatArray, most: FloatArray, sizes: IntArray) -> FloatArray:
    """[3, V + 1, C], where at most so many experts ([C]) are found in one visit: rows of each expert in a visit, rows of a visit
    without any, and the most that one finds, by sizes of visits."""
    first = np.concatenate([[0], sizes])[:, None]
    last = np.concatenate([sizes - 1, [len(hit) - 1]])[:, None]
    last = np.maximum(np.minimum(most, last), np.maximum(first, 1)).astype(np.int64)
    wide = last > first
    each = np.where(wide, (hit[last] - hit[first]) / np.maximum(last - first, 1), 0.0)
    return np.stack([each, hit[first] - each * first, last.astype(np.float64)])


def _beside(relaxation: Relaxation, rows: FloatArray, most: FloatArray, sizes: IntArray) -> FloatArray:
    """[V, K, prices]: experts found at most in visits smaller than each size ([V, 1]), plus the price of each that is not, with
    rows for so much ([K]) and so many of these ([V, K])."""
    number, price, hit = np.arange(MOST_VISITS + 1)[:, None, None], PRICES * (sizes - 1), relaxation.hit
    beside = np.where(number <= most, in_small_visits(relaxation, rows - number * hit[sizes], sizes), -np.inf)
    value = (beside[..., None] + number[..., None] * price[:, None, :]).max(axis=0)
    if most.max() > MOST_VISITS:
        # Of more, rows for smaller visits are less by those of the others, and each row finds what it does in the largest.
        found = (sizes - 1) / np.maximum(hit[sizes - 1], hit[1])
        for end in (np.full(most.shape, MOST_VISITS + 1.0), most):
            line = (np.maximum(rows - end * hit[sizes], 0.0) * found)[..., None] + end[..., None] * price[:, None, :]
            value = np.where((most > MOST_VISITS)[..., None], np.maximum(value, line), value)
    return np.asarray(value)


def _bounds(relaxation: Relaxation, box: Box, shape: Shape, most_held: FloatArray) -> FloatArray:
    """[variables, 2]."""
    bounds = shape.bounds.copy()
    copies = np.minimum(shape.experts - shape.at_home, (most_held - relaxation.classes.homes)[:, None])
    bounds[shape.held, 1], bounds[shape.own, 1] = copies, shape.at_home + copies
    bound_times(relaxation, box, shape.times, bounds)
    return bounds


@lru_cache(maxsize=4)
def pooled_shape(relaxation: Relaxation, residency: Residency) -> Shape:
    """Variables and rows, and what no box changes in them."""
    problem, classes, kinds = relaxation.problem, relaxation.classes, relaxation.classes.kinds
    size, num_lines, others = len(classes.count), len(SLOPES), float(problem.num_sites - 1)
    sizes = np.unique([max(round(share * problem.num_experts), 1) for share in LARGE])
    num = len(sizes)
    group = slowest_homes(relaxation, GROUPS)
    group = np.unique(np.where(kinds.homes > 0, group, group.min()), return_inverse=True)[1]
    groups = int(group.max()) + 1
    at_home = np.zeros((size, groups))
    np.add.at(at_home, (kinds.label, group), kinds.homes * kinds.count)
    experts = at_home.sum(axis=0)
    at_home /= classes.count[:, None]

    tables = np.arange((2 * num + 5) * size * groups).reshape(-1, size, groups)
    held, own, unserved = tables[:3]
    found, served = tables[3 : num + 4], tables[num + 4 :]
    lists = tables.size + np.arange((2 * num + 2) * size).reshape(-1, size)
    rows_sent, rows_received = lists[:2]
    made, received = lists[2 : num + 2], lists[num + 2 :]
    times = times_from(tables.size + lists.size)
    variables = times[-1] + 1
    rows = Rows()

    def column(values: Any) -> Any:
        return np.reshape(values, (-1, 1))

    def flat(parts: IntArray) -> IntArray:
        """[C x G, parts]."""
        return parts.reshape(len(parts), -1).T

    def beside(parts: IntArray) -> IntArray:
        """[C, parts x G]."""
        return np.concatenate(list(parts), axis=1)

    def at_most(right: FloatArray, *terms: tuple[IntArray, Any, Any], name: str = "") -> None:
        """Row by row: variables ([rows, any]), what they are multiplied by, and which number of a box's."""
        order = np.arange(len(right))[:, None]
        row, variable, value, scale = (
            np.concatenate([np.broadcast_to(part, term[0].shape).ravel() for term, part in zip(terms, parts, strict=True)])
            for parts in ([order] * len(terms), *zip(*terms, strict=True))
        )
        rows.add(row, variable, value, right, scale=scale, name=name)

    # Numbers of a box: one; chords of users and of holders; visits of each size, or larger, that a holder receives; and slopes of
    # lines above what a site can serve.
    chords = 1 + np.arange(2 * 3 * (num + 1) * size).reshape(2, 3, num + 1, size)
    most_received = 1 + chords.size + np.arange(num * size).reshape(num, size)
    slopes = 1 + chords.size + most_received.size + np.arange(size * num_lines).reshape(size, num_lines)

    at_most(np.zeros(size), (held, 1.0, 0), name=MOST_HELD)
    # What stays unserved counts as held where a site must hold so much, so that there is always a solution.
    in_place = np.concatenate([held, unserved], axis=1)
    at_most(np.zeros(size), (in_place, -1.0, 0), name=LEAST_HELD)
    # Nothing is served that is not held: to the own site, to all others, and in large visits to as many as these may be.
    everything = np.zeros(size * groups)
    at_most(at_home.ravel(), (column(own), 1.0, 0), (column(held), -1.0, 0))
    at_most(others * at_home.ravel(), (flat(served), 1.0, 0), (column(held), -others, 0))
    for place in range(num):
        factor = column(np.repeat(most_received[place], groups))
        at_most(everything, (flat(served[place + 1 :]), 1.0, 0), (column(held), -1.0, factor), name=COPY_SERVES)
    # Visits find as many experts as those of their size, and of a group no more than there are.
    for side, (visits, parts) in enumerate(((made, found), (received, served))):
        for place, (visit, part) in enumerate(zip(visits, parts[1:], strict=True)):
            at_most(everything, (column(part), 1.0, 0), (column(np.repeat(visit, groups)), -column(np.tile(experts, size)), 0))
            at_most(np.zeros(size), (part, 1.0, 0), (column(visit), -1.0, column(chords[side, 2, place + 1])))
            at_most(np.zeros(size), (part, -1.0, 0), (column(visit), float(sizes[place]), 0))
    # So many visits are made, are received, and must be made; so much is found and served beside them.
    every, line = np.repeat(np.arange(size), len(PRICES)), np.repeat(np.arange(size), num_lines)
    for place in range(num):
        at_most(np.zeros(size), (made[place:].T, -1.0, 0), (unserved, -1.0, 0), name=MUST_VISIT)
    for visits, parts, number, name in ((made, found, MADE, FOUND_BESIDE), (received, served, RECEIVED, SERVED_BESIDE)):
        for place in range(num):
            at_most(np.zeros(size), (visits[place:].T, 1.0, 0), name=number)
        for place in range(num):
            price, smaller = np.tile(PRICES * (sizes[place] - 1), size), beside(parts[: place + 1])
            terms = (smaller[every], 1.0, 0), (visits[place:].T[every], column(price), 0)
            at_most(np.zeros(len(every)), *terms, name=name)
    all_served = beside(served)
    at_most(np.zeros(len(line)), (all_served[line], 1.0, 0), (in_place[line], -1.0, column(slopes)), name=SERVED)

    # Rows that are sent and received, and how long they keep links busy; computation.
    tokens = relaxation.user_rows / relaxation.rows
    for side, (row, parts, visits, least) in enumerate(
        ((rows_sent, found, made, tokens), (rows_received, served, received, np.ones(size)))
    ):
        each, whole, _ = chords[side]
        at_most(
            np.zeros(size),
            (column(row), -1.0, 0),
            *((part, column(least), column(number)) for part, number in zip(parts, each, strict=True)),
            *((column(visit), column(least), column(number)) for visit, number in zip(visits, whole[1:], strict=True)),
        )
    up, down = classes.mean(kinds.up_bytes_per_s), classes.mean(kinds.down_bytes_per_s)
    cost_forward, cost_back, cost_compute = relaxation.budgets_s
    for row, there, again in ((rows_sent, up, down), (rows_received, down, up)):
        for cost, rate, time in ((cost_forward, there, times.forward), (cost_back, again, times.back)):
            seconds = column(np.asarray(cost * relaxation.rows / rate))
            at_most(np.zeros(size), (column(row), seconds, 0), (np.full((size, 1), time), -1.0, 0))
    work_s = column(np.asarray(cost_compute * relaxation.expert_s))
    at_most(np.zeros(size), (own, work_s, 0), (all_served, work_s, 0), (np.full((size, 1), times.compute), -1.0, 0))

    # Copies leave and arrive within the gather's time, their gradients within the return's.
    weight, weight_back = float(problem.wire.expert_bytes), float(problem.wire.expert_gradient_bytes)
    owned = kinds.homes > 0
    for time, bytes_each, there, again in (
        (times.gather, weight, down, kinds.up_bytes_per_s),
        (times.give_back, weight_back, up, kinds.down_bytes_per_s),
    ):
        at_most(np.zeros(size), (held, column(bytes_each / there), 0), (np.full((size, 1), time), -1.0, 0))
        together = np.bincount(group[owned], weights=(again * kinds.count)[owned], minlength=groups)
        shares = bytes_each * classes.count / together[:, None]
        at_most(np.zeros(groups), (held.T, shares, 0), (np.full((groups, 1), time), -1.0, 0))
    at_most(np.zeros(groups), (held.T, classes.count, 0), name=UPLOADS)
    add_copies(relaxation, residency, times, rows)

    # Each site finds all; what is found in visits is served, visit by visit and row by row.
    share = classes.count / problem.num_sites
    finds = np.concatenate([own.reshape(-1, 1), unserved.reshape(-1, 1), flat(found)], axis=1)
    equal = [(variable, np.ones(len(variable))) for variable in finds]
    pooled = [(a, b) for one, other in zip(found, served, strict=True) for a, b in zip(one.T, other.T, strict=True)]
    pooled += [*zip(made, received, strict=True), (rows_sent, rows_received)]
    equal += [(np.concatenate(both), np.concatenate([share, -share])) for both in pooled]
    row = np.repeat(np.arange(len(equal)), [len(variable) for variable, _ in equal])
    entries = np.concatenate([value for _, value in equal]), (row, np.concatenate([variable for variable, _ in equal]))
    total = np.zeros(len(equal))
    total[: size * groups] = np.tile(experts, size)

    bounds, costs = np.zeros((variables, 2)), np.zeros(variables)
    costs[spent(times)] = 1.0
    costs[unserved], bounds[unserved, 1] = unserved_s(relaxation), experts
    # What a site finds at most, and rows: one for each other site and token; what comes from all others is theirs.
    bounds[found, 1], bounds[served, 1] = experts, others * experts
    bounds[made, 1] = bounds[received, 1] = others
    bounds[rows_sent, 1], bounds[rows_received, 1] = others * tokens, others * tokens.max()
    return Shape(
        at_home=at_home,
        group=group,
        experts=experts,
        sizes=sizes,
        held=held,
        own=own,
        found=found,
        served=served,
        times=times,
        inequality=rows.template(variables),
        right=np.concatenate(rows.right),
        rows=rows.names,
        equality=coo_array(entries, shape=(len(equal), variables)).tocsr(),
        total=total,
        costs=costs,
        bounds=bounds,
    )
