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

from hybridep.arrays import FloatArray, IntArray
from hybridep.plan import Residency
from planner.sites.boxes import Box, Boxes
from planner.sites.capacity import SLOPES, serving_lines
from planner.sites.layer_lp import (
    COPIES,
    LEAST_HELD,
    MOST_HELD,
    SERVED,
    UPLOADS,
    Times,
    add_copies,
    bound_times,
    copies_right,
    spent,
    times_from,
    unserved_s,
)
from planner.sites.linear import BoxProgram, Frame, Rows
from planner.sites.relaxation import Limits, Relaxation
from planner.sites.visits import in_small_visits, large_visits, row_budgets, slowest_homes

LARGE = 1 / 4, 1 / 2
"""Shares of all experts: visits that find fewer than the first are small, each of the others begins a further size."""
GROUPS = 4
"""Of experts, by how fast their homes send copies."""
PRICES = np.array([0.0, 0.5, 0.8, 1.0, 1.1, 1.3])
"""Of a visit, in experts of the smallest one of its size: slopes of lines above what is found beside such visits."""
MOST_VISITS = 8
"""Up to so many visits are counted one by one."""
COPY_SERVES = "a copy serves"
MUST_VISIT, MADE, RECEIVED, FOUND_BESIDE, SERVED_BESIDE = "must visit", "made", "received", "found beside", "served beside"
"""Rows whose right sides change from box to box, beside those of ``planner.sites.layer_lp``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variables:
    """Of C classes, G groups of experts, and V + 1 sizes of visits, of which the first are small."""

    held: IntArray
    """[C, G]: copies."""
    own: IntArray
    """[C, G]: experts that a site's tokens find there."""
    unserved: IntArray
    """[C, G]: and those that they find nowhere."""
    found: IntArray
    """[V + 1, C, G]: those that they find in visits."""
    served: IntArray
    """[V + 1, C, G]: the same at holders."""
    rows_sent: IntArray
    """[C]: of a token of the site with fewest, by a site."""
    rows_received: IntArray
    """[C]."""
    made: IntArray
    """[V, C]: visits that a site makes."""
    received: IntArray
    """[V, C]: visits that it receives."""
    times: Times

    @property
    def number(self) -> int:
        """Of all."""
        return self.times[-1] + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers:
    """Which of a box's numbers entries are multiplied by; the first is one."""

    chords: IntArray
    """[2, 3, V + 1, C]: ``_chords`` of who visits, and of holders."""
    received: IntArray
    """[V, C]: visits of a size, or larger, that a holder receives at most."""
    slopes: IntArray
    """[C, slopes]: of lines above what a site can serve."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """What the programs of all boxes of one residency have in common."""

    at_home: FloatArray
    """[C, G]: experts of a group at home there."""
    group: IntArray
    """[K]: of the experts at home there."""
    experts: FloatArray
    """[G]."""
    sizes: IntArray
    """[V]: experts of the smallest visits that are not small, size by size."""
    has: Variables
    frame: Frame


def pooled_program(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> BoxProgram:
    """Minimises seconds of one layer, but for the latency of token exchanges; of boxes that are possible."""
    classes, lead, hit = relaxation.classes, limits.most_held.shape[:-1], relaxation.hit
    shape = pooled_shape(relaxation, box.residency)
    right, rows, kinds = np.tile(shape.frame.right, (*lead, 1)), shape.frame.rows, classes.kinds
    sizes = shape.sizes[:, None]
    sent, room = row_budgets(relaxation, box)
    made, received = large_visits(relaxation, limits, sent, room, sizes)
    slope, at_none = serving_lines(relaxation, box, limits)
    most_held, least_held = classes.mean(limits.most_held), classes.mean(limits.least_held)
    most_received = classes.largest(received)
    uploads, is_home = limits.uploads * kinds.count, kinds.homes > 0
    of_group = (shape.group[is_home, None] == np.arange(len(shape.experts))).astype(np.float64)
    below = in_small_visits(relaxation, sent[..., None, :], sizes)
    must = (below < relaxation.problem.num_experts - limits.most_held[..., None, :]).astype(np.float64)

    def set_right(name: str, values: FloatArray) -> None:
        right[..., rows[name]] = values.reshape(*lead, -1)

    set_right(MOST_HELD, most_held - classes.homes)
    set_right(LEAST_HELD, classes.homes - np.minimum(least_held, most_held))
    set_right(UPLOADS, uploads[..., is_home] @ of_group)
    set_right(SERVED, at_none + slope * classes.homes[:, None])
    set_right(COPY_SERVES, most_received[..., None] * shape.at_home)
    set_right(MUST_VISIT, -classes.mean(must))
    set_right(MADE, classes.mean(made))
    set_right(RECEIVED, classes.mean(received))
    set_right(FOUND_BESIDE, classes.mean(_beside(relaxation, sent, made, sizes), axis=-2))
    set_right(SERVED_BESIDE, classes.mean(_beside(relaxation, room, received, sizes), axis=-2))
    set_right(COPIES, copies_right(relaxation, box))
    found = classes.largest(limits.most_found, axis=-2)
    chords = [_chords(hit, most, shape.sizes) for most in (found.max(axis=-1), found.max(axis=-2))]
    numbers = [np.ones((*lead, 1)), *(one.reshape(*lead, -1) for one in (*chords, most_received, slope))]
    bounds = _bounds(relaxation, box, shape, most_held)
    return BoxProgram(frame=shape.frame, numbers=np.concatenate(numbers, axis=-1), right=right, bounds=bounds)


def _chords(hit: FloatArray, most: FloatArray, sizes: IntArray) -> FloatArray:
    """[..., 3, V + 1, C], where at most so many experts ([..., C]) are found in one visit: rows of each expert in a visit, rows
    of a visit without any, and the most that one finds, by sizes of visits."""
    first = np.concatenate([[0], sizes])[:, None]
    last = np.concatenate([sizes - 1, [len(hit) - 1]])[:, None]
    last = np.maximum(np.minimum(most[..., None, :], last), np.maximum(first, 1)).astype(np.int64)
    wide = last > first
    each = np.where(wide, (hit[last] - hit[first]) / np.maximum(last - first, 1), 0.0)
    return np.stack([each, hit[first] - each * first, last.astype(np.float64)], axis=-3)


def _beside(relaxation: Relaxation, rows: FloatArray, most: FloatArray, sizes: IntArray) -> FloatArray:
    """[..., V, K, prices]: experts found at most in visits smaller than each size ([V, 1]), plus the price of each that is not,
    with rows for so much ([..., K]) and so many of these ([..., V, K])."""
    number, price, hit = np.arange(MOST_VISITS + 1)[:, None, None], PRICES * (sizes - 1), relaxation.hit
    beside = in_small_visits(relaxation, rows[..., None, None, :] - number * hit[sizes], sizes)
    beside = np.where(number <= most[..., None, :, :], beside, -np.inf)
    value = (beside[..., None] + number[..., None] * price[:, None, :]).max(axis=-4)
    if most.max() > MOST_VISITS:
        # Of more, rows for smaller visits are less by those of the others, and each row finds what it does in the largest.
        found = (sizes - 1) / np.maximum(hit[sizes - 1], hit[1])
        for end in (np.full(most.shape, MOST_VISITS + 1.0), most):
            line = np.maximum(rows[..., None, :] - end * hit[sizes], 0.0) * found
            line = line[..., None] + end[..., None] * price[:, None, :]
            value = np.where((most > MOST_VISITS)[..., None], np.maximum(value, line), value)
    return np.asarray(value)


def _bounds(relaxation: Relaxation, box: Box | Boxes, shape: Shape, most_held: FloatArray) -> FloatArray:
    """[..., variables, 2]."""
    bounds = np.tile(shape.frame.bounds, (*most_held.shape[:-1], 1, 1))
    copies = np.minimum(shape.experts - shape.at_home, (most_held - relaxation.classes.homes)[..., None])
    bounds[..., shape.has.held, 1], bounds[..., shape.has.own, 1] = copies, shape.at_home + copies
    bound_times(relaxation, box, shape.has.times, bounds)
    return bounds


@lru_cache(maxsize=4)
def pooled_shape(relaxation: Relaxation, residency: Residency) -> Shape:
    """Variables and rows, and what no box changes in them."""
    problem, classes, kinds = relaxation.problem, relaxation.classes, relaxation.classes.kinds
    size, others = len(classes.count), float(problem.num_sites - 1)
    sizes = np.unique([max(round(share * problem.num_experts), 1) for share in LARGE])
    group = slowest_homes(relaxation, GROUPS)
    group = np.unique(np.where(kinds.homes > 0, group, group.min()), return_inverse=True)[1]
    at_home = np.zeros((size, int(group.max()) + 1))
    np.add.at(at_home, (kinds.label, group), kinds.homes * kinds.count)
    experts = at_home.sum(axis=0)
    at_home /= classes.count[:, None]

    has, numbers, rows = _variables(size, len(experts), len(sizes)), _numbers(size, len(sizes)), Rows()
    _hold_and_serve(rows, has, numbers, at_home, others)
    _visit(rows, has, numbers, experts, sizes)
    _keep_busy(rows, has, numbers, relaxation)
    _copy(rows, has, relaxation, group)
    add_copies(relaxation, residency, has.times, rows)
    equality = _find_and_serve(has, classes.count / problem.num_sites)
    total = np.zeros(equality.shape[0])
    total[: at_home.size] = np.tile(experts, size)

    bounds, costs = np.zeros((has.number, 2)), np.zeros(has.number)
    costs[spent(has.times)] = 1.0
    costs[has.unserved], bounds[has.unserved, 1] = unserved_s(relaxation), experts
    # What a site finds at most, and rows: one for each other site and token; what comes from all others is theirs.
    tokens = relaxation.user_rows / relaxation.rows
    bounds[has.found, 1], bounds[has.served, 1] = experts, others * experts
    bounds[has.made, 1] = bounds[has.received, 1] = others
    bounds[has.rows_sent, 1], bounds[has.rows_received, 1] = others * tokens, others * tokens.max()
    return Shape(
        at_home=at_home,
        group=group,
        experts=experts,
        sizes=sizes,
        has=has,
        frame=Frame(
            inequality=rows.template(has.number),
            right=np.concatenate(rows.right),
            rows=rows.names,
            equality=equality,
            total=total,
            costs=costs,
            bounds=bounds,
        ),
    )


def _variables(size: int, groups: int, sizes: int) -> Variables:
    tables = np.arange((2 * sizes + 5) * size * groups).reshape(-1, size, groups)
    lists = tables.size + np.arange((2 * sizes + 2) * size).reshape(-1, size)
    return Variables(
        held=tables[0],
        own=tables[1],
        unserved=tables[2],
        found=tables[3 : sizes + 4],
        served=tables[sizes + 4 :],
        rows_sent=lists[0],
        rows_received=lists[1],
        made=lists[2 : sizes + 2],
        received=lists[sizes + 2 :],
        times=times_from(tables.size + lists.size),
    )


def _numbers(size: int, sizes: int) -> Numbers:
    chords = 1 + np.arange(2 * 3 * (sizes + 1) * size).reshape(2, 3, sizes + 1, size)
    received = 1 + chords.size + np.arange(sizes * size).reshape(sizes, size)
    slopes = 1 + chords.size + received.size + np.arange(size * len(SLOPES)).reshape(size, len(SLOPES))
    return Numbers(chords=chords, received=received, slopes=slopes)


def _hold_and_serve(rows: Rows, has: Variables, numbers: Numbers, at_home: FloatArray, others: float) -> None:
    """Nothing is served that is not held: to the own site, to all others, and in large visits to as many as these may be."""
    size, groups = at_home.shape
    _at_most(rows, np.zeros(size), (has.held, 1.0, 0), name=MOST_HELD)
    # What stays unserved counts as held where a site must hold so much, so that there is always a solution.
    in_place = np.concatenate([has.held, has.unserved], axis=1)
    _at_most(rows, np.zeros(size), (in_place, -1.0, 0), name=LEAST_HELD)
    held = _column(has.held)
    _at_most(rows, at_home.ravel(), (_column(has.own), 1.0, 0), (held, -1.0, 0))
    _at_most(rows, others * at_home.ravel(), (_flat(has.served), 1.0, 0), (held, -others, 0))
    for place, number in enumerate(numbers.received):
        factor = _column(np.repeat(number, groups))
        larger = _flat(has.served[place + 1 :])
        _at_most(rows, np.zeros(at_home.size), (larger, 1.0, 0), (held, -1.0, factor), name=COPY_SERVES)
    line, slopes = np.repeat(np.arange(size), len(SLOPES)), _column(numbers.slopes)
    served = _beside_each_other(has.served)
    _at_most(rows, np.zeros(len(line)), (served[line], 1.0, 0), (in_place[line], -1.0, slopes), name=SERVED)


def _visit(rows: Rows, has: Variables, numbers: Numbers, experts: FloatArray, sizes: IntArray) -> None:
    """Visits find as many experts as those of their size, and of a group no more than there are. So many are made, are received,
    and must be made; so much is found and served beside them."""
    size, groups = has.own.shape
    for (visits, parts), (_, _, most) in zip(((has.made, has.found), (has.received, has.served)), numbers.chords, strict=True):
        for visit, part, least, number in zip(visits, parts[1:], sizes, most[1:], strict=True):
            of_group = _column(np.repeat(visit, groups)), -_column(np.tile(experts, size)), 0
            _at_most(rows, np.zeros(size * groups), (_column(part), 1.0, 0), of_group)
            _at_most(rows, np.zeros(size), (part, 1.0, 0), (_column(visit), -1.0, _column(number)))
            _at_most(rows, np.zeros(size), (part, -1.0, 0), (_column(visit), float(least), 0))
    for place in range(len(sizes)):
        _at_most(rows, np.zeros(size), (has.made[place:].T, -1.0, 0), (has.unserved, -1.0, 0), name=MUST_VISIT)
    every = np.repeat(np.arange(size), len(PRICES))
    for visits, parts, most_name, name in (
        (has.made, has.found, MADE, FOUND_BESIDE),
        (has.received, has.served, RECEIVED, SERVED_BESIDE),
    ):
        for place in range(len(sizes)):
            _at_most(rows, np.zeros(size), (visits[place:].T, 1.0, 0), name=most_name)
        for place, least in enumerate(sizes):
            smaller, larger = _beside_each_other(parts[: place + 1])[every], visits[place:].T[every]
            price = _column(np.tile(PRICES * (least - 1), size))
            _at_most(rows, np.zeros(len(every)), (smaller, 1.0, 0), (larger, price, 0), name=name)


def _keep_busy(rows: Rows, has: Variables, numbers: Numbers, relaxation: Relaxation) -> None:
    """Rows that are sent and received, and how long they keep links busy; and computation."""
    classes = relaxation.classes
    size, kinds = len(classes.count), classes.kinds
    up, down = classes.mean(kinds.up_bytes_per_s), classes.mean(kinds.down_bytes_per_s)
    cost_forward, cost_back, cost_compute = relaxation.budgets_s
    sides = (
        (has.rows_sent, has.found, has.made, relaxation.user_rows / relaxation.rows, up, down),
        (has.rows_received, has.served, has.received, np.ones(size), down, up),
    )
    for (row, parts, visits, tokens, there, again), (each, whole, _) in zip(sides, numbers.chords, strict=True):
        least = _column(tokens)
        _at_most(
            rows,
            np.zeros(size),
            (_column(row), -1.0, 0),
            *((part, least, _column(number)) for part, number in zip(parts, each, strict=True)),
            *((_column(visit), least, _column(number)) for visit, number in zip(visits, whole[1:], strict=True)),
        )
        for cost, rate, time in ((cost_forward, there, has.times.forward), (cost_back, again, has.times.back)):
            seconds = _column(cost * relaxation.rows / rate)
            _at_most(rows, np.zeros(size), (_column(row), seconds, 0), (np.full((size, 1), time), -1.0, 0))
    work_s, computed = _column(cost_compute * relaxation.expert_s), np.full((size, 1), has.times.compute)
    _at_most(rows, np.zeros(size), (has.own, work_s, 0), (_beside_each_other(has.served), work_s, 0), (computed, -1.0, 0))


def _copy(rows: Rows, has: Variables, relaxation: Relaxation, group: IntArray) -> None:
    """Copies leave and arrive within the gather's time, their gradients within the return's. ``group`` is [K]."""
    classes, kinds, wire = relaxation.classes, relaxation.classes.kinds, relaxation.problem.wire
    size, groups = has.held.shape
    up, down, owned = classes.mean(kinds.up_bytes_per_s), classes.mean(kinds.down_bytes_per_s), kinds.homes > 0
    for time, each_bytes, there, again in (
        (has.times.gather, float(wire.expert_bytes), down, kinds.up_bytes_per_s),
        (has.times.give_back, float(wire.expert_gradient_bytes), up, kinds.down_bytes_per_s),
    ):
        _at_most(rows, np.zeros(size), (has.held, _column(each_bytes / there), 0), (np.full((size, 1), time), -1.0, 0))
        together = np.bincount(group[owned], weights=(again * kinds.count)[owned], minlength=groups)
        seconds = each_bytes * classes.count / together[:, None]
        _at_most(rows, np.zeros(groups), (has.held.T, seconds, 0), (np.full((groups, 1), time), -1.0, 0))
    _at_most(rows, np.zeros(groups), (has.held.T, classes.count, 0), name=UPLOADS)


def _find_and_serve(has: Variables, share: FloatArray) -> Any:
    """Sparse: each site finds all; what is found in visits is served, in as many visits and rows. ``share`` ([C]) is of sites."""
    finds = np.concatenate([_column(has.own), _column(has.unserved), _flat(has.found)], axis=1)
    equal = [(variable, np.ones(len(variable))) for variable in finds]
    pooled = [both for found, served in zip(has.found, has.served, strict=True) for both in zip(found.T, served.T, strict=True)]
    pooled += [*zip(has.made, has.received, strict=True), (has.rows_sent, has.rows_received)]
    equal += [(np.concatenate(both), np.concatenate([share, -share])) for both in pooled]
    row = np.repeat(np.arange(len(equal)), [len(variable) for variable, _ in equal])
    variable, value = (np.concatenate(parts) for parts in zip(*equal, strict=True))
    return coo_array((value, (row, variable)), shape=(len(equal), has.number)).tocsr()


def _column(values: Any) -> Any:
    return np.reshape(values, (-1, 1))


def _flat(parts: IntArray) -> IntArray:
    """[C x G, parts], given [parts, C, G]."""
    return parts.reshape(len(parts), -1).T


def _beside_each_other(parts: IntArray) -> IntArray:
    """[C, parts x G], given [parts, C, G]."""
    return np.concatenate(list(parts), axis=1)


def _at_most(rows: Rows, right: FloatArray, *terms: tuple[IntArray, Any, Any], name: str = "") -> None:
    """Row by row: variables ([rows, any]), what they are multiplied by, and which number of a box's."""
    order = np.arange(len(right))[:, None]
    row, variable, value, scale = (
        np.concatenate([np.broadcast_to(part, term[0].shape).ravel() for term, part in zip(terms, parts, strict=True)])
        for parts in ([order] * len(terms), *zip(*terms, strict=True))
    )
    rows.add(row, variable, value, right, scale=scale, name=name)
