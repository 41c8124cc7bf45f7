"""The bound of one box as a linear program over pairs of sites, where none are taken together (else ``planner.sites.pooled_lp``).

Copies leave their homes, and arrive at holders, within the gather's time, which with the latency of the farthest costs what it
exceeds the computation it runs beside. Each site finds every expert at sites that hold it, itself among them; what it finds
elsewhere keeps links busy as the box's chords say, and nobody serves more than fits through its links in whole rows
(``planner.sites.capacity``). z[g, h] copies are held at h, and x[d, g, h] experts are served there for
tokens of d. Among few sites experts are told apart by their homes g; else there is one group of all.

Every plan of the box is a point of the program that costs no more: x and z are its own numbers, times its own or less.

All boxes' programs have the same variables and rows, also of what a box leaves nothing of: so multipliers of one box prove
something about others, and ``Shape`` is made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
from planner.sites.pooled_lp import pooled_program
from planner.sites.relaxation import Limits, Relaxation

MOST_VARIABLES = 600
"""With homes told apart; larger programs take a solver longer than halving boxes is worth."""
FOUND = "found"
"""Rows whose right sides change from box to box, beside those of ``planner.sites.layer_lp``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """What the programs of all boxes of one residency have in common."""

    told_apart: bool
    """By homes."""
    sites: IntArray
    """With experts at home."""
    member: FloatArray
    """[groups, D]: one where sites have experts of a group at home."""
    at_home: FloatArray
    """[groups, D]: experts of a group at home there."""
    away: tuple[IntArray, IntArray, IntArray]
    """(d, g, h) of the first variables: what site d finds at another one, h."""
    own: tuple[IntArray, IntArray]
    """(g, d) of those after these: what it serves itself."""
    copied: tuple[IntArray, IntArray]
    """(g, h) of those after these, copies. Then come the times, and what stays unserved."""
    times: Times
    frame: Frame


def box_program(relaxation: Relaxation, box: Box) -> BoxProgram | None:
    """Minimises seconds of one layer, but for the latency of token exchanges. None when sites cannot hold what they must."""
    limits = relaxation.limits(box)
    return programs(relaxation, box, limits) if limits.possible(relaxation.classes) else None


def programs(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> BoxProgram:
    """The same of boxes that are possible, one or several."""
    return (pooled_program if relaxation.classes.merged else pair_program)(relaxation, box, limits)


def pair_program(relaxation: Relaxation, box: Box | Boxes, limits: Limits) -> BoxProgram:
    """Where no sites are taken together."""
    classes, lead = relaxation.classes, limits.most_held.shape[:-1]
    shape = _shape(relaxation, box.residency, MOST_VARIABLES)
    slope, at_none = serving_lines(relaxation, box, limits)
    right, rows = np.tile(shape.frame.right, (*lead, 1)), shape.frame.rows
    right[..., rows[MOST_HELD]] = limits.most_held - classes.homes
    right[..., rows[LEAST_HELD]] = classes.homes - np.minimum(limits.least_held, limits.most_held)
    right[..., rows[SERVED]] = (at_none + slope * classes.homes[:, None]).swapaxes(-1, -2).reshape(*lead, -1)
    if shape.told_apart:
        right[..., rows[FOUND]] = limits.most_found[..., classes.others > 0]
        right[..., rows[UPLOADS]] = limits.uploads[..., shape.sites]
    else:
        right[..., rows[UPLOADS]] = limits.uploads.sum(axis=-1, keepdims=True)
    right[..., rows[COPIES]] = copies_right(relaxation, box)
    unit_rows = relaxation.unit_rows(limits)
    return BoxProgram(
        frame=shape.frame,
        numbers=np.concatenate([np.ones((*lead, 1)), *(one.reshape(*lead, -1) for one in (unit_rows, slope))], axis=-1),
        right=right,
        bounds=_bounds(relaxation, box, shape, limits),
    )


def _bounds(relaxation: Relaxation, box: Box | Boxes, shape: Shape, limits: Limits) -> FloatArray:
    """[..., variables, 2]."""
    classes, lead = relaxation.classes, limits.most_held.shape[:-1]
    sent = shape.member @ (limits.copies * classes.others).swapaxes(-1, -2)
    copies = np.minimum(sent, (limits.most_held - classes.homes)[..., None, :])
    holdable = shape.at_home + copies
    (d, g, h), (own_g, own_d), (zg, zh) = shape.away, shape.own, shape.copied
    bounds, first, second = np.tile(shape.frame.bounds, (*lead, 1, 1)), len(d), len(d) + len(own_d)
    bounds[..., :first, 1] = np.minimum(limits.most_found[..., d, h], holdable[..., g, h])
    bounds[..., first:second, 1] = holdable[..., own_g, own_d]
    bounds[..., second : shape.times[0], 1] = copies[..., zg, zh]
    bound_times(relaxation, box, shape.times, bounds)
    return bounds


@lru_cache(maxsize=4)
def _shape(relaxation: Relaxation, residency: Residency, most_variables: int) -> Shape:
    """Variables and rows, and what no box changes in them."""
    problem, classes = relaxation.problem, relaxation.classes
    size, num_lines = len(classes.count), len(SLOPES)
    sites = np.flatnonzero(classes.homes)
    told_apart = len(sites) * size * size <= most_variables
    # Groups g of homes: what of them is at home somewhere.
    group = np.searchsorted(sites, np.arange(size)) if told_apart else np.zeros(size, dtype=np.int64)
    groups = len(sites) if told_apart else 1
    at_home = np.zeros((groups, size))
    at_home[group[sites], sites] = classes.homes[sites]
    owned = classes.homes[sites] if told_apart else np.array([float(problem.num_experts)])
    d, g, h = np.nonzero(np.repeat(classes.others[:, None, :], groups, axis=1))
    own_g, own_d = np.nonzero(np.ones((groups, size)))
    away, num = np.arange(len(d)), len(d) + len(own_d)
    all_d, all_g, all_h = np.concatenate([d, own_d]), np.concatenate([g, own_g]), np.concatenate([h, own_d])
    zg, zh = np.nonzero(owned[:, None] > at_home)
    z = np.full((groups, size), -1)
    held = z[zg, zh] = num + np.arange(len(zg))
    times = times_from(num + len(zg))
    forward, back, compute, gather, give_back = times[:5]
    unserved = times[-1] + 1
    variables = unserved + size * groups
    rows, every = Rows(), np.arange(size)
    # Numbers of a box: one, then rows of an expert by pair of sites, then slopes of lines above what a site can serve.
    unit = 1 + d * size + h

    # No more copies are held than can be, nor fewer than must be.
    rows.add(zh, held, 1.0, np.zeros(size), name=MOST_HELD)
    least = np.concatenate([zh, every]), np.concatenate([held, unserved + every * groups])
    rows.add(*least, -1.0, np.zeros(size), name=LEAST_HELD)
    # Served only what is held, and no more than chords reckon with.
    coupled = np.flatnonzero(z[all_g, all_h] >= 0)
    order = np.arange(len(coupled))
    rows.add(
        np.concatenate([order, order]),
        np.concatenate([coupled, z[all_g[coupled], all_h[coupled]]]),
        np.repeat([1.0, -1.0], len(coupled)),
        at_home[all_g[coupled], all_h[coupled]],
    )
    joined, pair = np.unique(d * size + h, return_inverse=True)
    if told_apart:
        rows.add(pair, away, 1.0, np.zeros(len(joined)), name=FOUND)

    # Token exchanges and computation: each link's time is at most that of the busiest.
    up, down = classes.up_bytes_per_s, classes.down_bytes_per_s
    pair_rate = classes.pair_bytes_per_s
    cost_forward, cost_back, cost_compute = relaxation.budgets_s

    def busiest(
        row: IntArray, variable: IntArray, seconds: FloatArray, maximum: int, count: int, scale: IntArray | int = 0
    ) -> None:
        rows.add(
            np.concatenate([row, np.arange(count)]),
            np.concatenate([variable, np.full(count, maximum)]),
            np.concatenate([seconds, -np.ones(count)]),
            np.zeros(count),
            scale=np.concatenate([np.broadcast_to(scale, len(row)), np.zeros(count, dtype=np.int64)]),
        )

    busiest(d, away, cost_forward / up[d], forward, size, unit)
    busiest(h, away, cost_forward / down[h], forward, size, unit)
    busiest(h, away, cost_back / up[h], back, size, unit)
    busiest(d, away, cost_back / down[d], back, size, unit)
    work_s = cost_compute * relaxation.expert_s
    busiest(all_h, np.arange(num), work_s[all_h], compute, size)
    if pair_rate is not None:
        busiest(pair, away, cost_forward / pair_rate[d, h], forward, len(joined), unit)
        busiest(pair, away, cost_back / pair_rate[h, d], back, len(joined), unit)

    # Rows come whole, so sites can serve so many experts for others' tokens only, the more the more they hold: line by line.
    line = size * np.arange(num_lines)[:, None]
    rows.add(
        np.concatenate([(line + h).ravel(), (line + zh).ravel()]),
        np.concatenate([np.tile(away, num_lines), np.tile(held, num_lines)]),
        np.concatenate([np.ones(num_lines * len(d)), -np.ones(num_lines * len(zh))]),
        np.zeros(num_lines * size),
        scale=np.concatenate(
            [np.zeros(num_lines * len(d), dtype=np.int64), (1 + size**2 + zh * num_lines + np.arange(num_lines)[:, None]).ravel()]
        ),
        name=SERVED,
    )

    def shared(
        src: IntArray, dst: IntArray, variable: IntArray, unit_bytes: float, maximum: int, scale: IntArray | None = None
    ) -> None:
        """The same of trunks, which know sites: only where each is a class."""
        if problem.cluster.trunks and pair_rate is not None:
            crossed = problem.trunk_s_per_byte[:, src * size + dst].tocoo()
            scaled = 0 if scale is None else scale[crossed.col]
            row, column = crossed.row.astype(np.int64), variable[crossed.col]
            busiest(row, column, crossed.data * unit_bytes, maximum, crossed.shape[0], scaled)

    shared(d, h, away, cost_forward, forward, unit)
    shared(h, d, away, cost_back, back, unit)

    # Copies leave and arrive within the gather's time, their gradients within the return's.
    weight, weight_back = float(problem.wire.expert_bytes), float(problem.wire.expert_gradient_bytes)
    busiest(zh, held, weight / down[zh], gather, size)
    busiest(zh, held, weight_back / up[zh], give_back, size)
    if told_apart:
        home = sites[zg]
        rows.add(zg, held, 1.0, np.zeros(groups), name=UPLOADS)
        busiest(home, held, weight / up[home], gather, size)
        busiest(home, held, weight_back / down[home], give_back, size)
        if pair_rate is not None:
            order = np.arange(len(held))
            busiest(order, held, weight / pair_rate[home, zh], gather, len(held))
            busiest(order, held, weight_back / pair_rate[zh, home], give_back, len(held))
        shared(home, zh, held, weight, gather)
        shared(zh, home, held, weight_back, give_back)
    else:
        none = np.zeros(len(held), dtype=np.int64)
        rows.add(none, held, 1.0, np.zeros(1), name=UPLOADS)
        busiest(none, held, np.full(len(held), weight / up[sites].sum()), gather, 1)
        busiest(none, held, np.full(len(held), weight_back / down[sites].sum()), give_back, 1)
    add_copies(relaxation, residency, times, rows)

    bounds, costs = np.zeros((variables, 2)), np.zeros(variables)
    costs[spent(times)] = 1.0
    costs[unserved:], bounds[unserved:, 1] = unserved_s(relaxation), np.tile(owned, size)
    each = np.arange(size * groups)
    row = np.concatenate([all_d * groups + all_g, each])
    column = np.concatenate([np.arange(num), unserved + each])
    return Shape(
        told_apart=told_apart,
        sites=sites,
        member=(at_home > 0).astype(np.float64),
        at_home=at_home,
        away=(d, g, h),
        own=(own_g, own_d),
        copied=(zg, zh),
        times=times,
        frame=Frame(
            inequality=rows.template(variables),
            right=np.concatenate(rows.right),
            rows=rows.names,
            equality=coo_array((np.ones(len(row)), (row, column)), shape=(size * groups, variables)).tocsr(),
            total=np.tile(owned, size),
            costs=costs,
            bounds=bounds,
        ),
    )
