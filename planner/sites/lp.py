"""The bound of one box as a linear program.

Copies leave their homes, and arrive at holders, within the gather's time, which with the latency of the farthest costs what it
exceeds the computation it runs beside. Each site finds every expert at sites that hold it, itself among them; what it finds
elsewhere keeps links busy as the box's chords say, and nobody serves more than fits through its links in whole rows
(``planner.sites.capacity``). z[g, h] copies are held at h, and x[d, g, h] experts are served there for
tokens of d. Among few sites that differ, experts are told apart by their homes g; else there is one group of all.

Every plan of the box is a point of the program that costs no more: x and z are its own numbers (among merged sites their means,
which keep every inequality, since all are linear), times its own or less.

All boxes' programs have the same variables and rows, also of what a box leaves nothing of: so multipliers of one box prove
something about others, and ``Shape`` is made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.sparse import coo_array

from hybridep.placement import IntArray
from hybridep.plan import Residency
from hybridep.traffic import FloatArray, gathers_and_returns
from planner.sites.boxes import Box
from planner.sites.capacity import SLOPES, serving_lines
from planner.sites.linear import BoxProgram, Rows, Template
from planner.sites.relaxation import Limits, Relaxation

MOST_VARIABLES = 600
"""With homes told apart; larger programs take a solver longer than halving boxes is worth."""
MOST_HELD, LEAST_HELD, FOUND, SERVED, UPLOADS, COPIES = "most held", "least held", "found", "served", "uploads", "copies"
"""Rows whose right sides change from box to box."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """What the programs of all boxes of one residency have in common."""

    told_apart: bool
    """By homes."""
    sites: IntArray
    """Classes with experts at home."""
    group: IntArray
    """[C]: g of the experts at home there."""
    at_home: FloatArray
    """[groups, C]: experts of a group at home there."""
    away: tuple[IntArray, IntArray, IntArray]
    """(d, g, h) of the first variables: what a site of class d finds at all other sites of class h."""
    own: tuple[IntArray, IntArray]
    """(g, d) of those after these: what it serves itself."""
    copied: tuple[IntArray, IntArray]
    """(g, h) of those after these, copies. Then come the times, and what stays unserved."""
    times: IntArray
    """Forward, back, compute, gather, return, and what the last two cost."""
    inequality: Template
    right: FloatArray
    """[rows]: zero where a box gives it."""
    rows: dict[str, slice]
    """Those, by name."""
    equality: Any
    """Sparse [groups x C, variables]."""
    total: FloatArray
    """[groups x C]: experts of each group, which each site must find."""
    costs: FloatArray
    """[variables]."""
    bounds: FloatArray
    """[variables, 2]: zero where a box gives them."""


def box_program(relaxation: Relaxation, box: Box) -> BoxProgram | None:
    """Minimises seconds of one layer, but for the latency of token exchanges. None when sites cannot hold what they must."""
    classes, limits = relaxation.classes, relaxation.limits(box)
    if not limits.possible(classes):
        return None
    shape = _shape(relaxation, box.residency, MOST_VARIABLES)
    slope, at_none = serving_lines(relaxation, box, limits)
    right, rows = shape.right.copy(), shape.rows
    most_held, least_held = classes.mean(limits.most_held), classes.mean(limits.least_held)
    right[rows[MOST_HELD]] = most_held - classes.homes
    right[rows[LEAST_HELD]] = classes.homes - np.minimum(least_held, most_held)
    right[rows[SERVED]] = (at_none + slope * classes.homes[:, None]).T.ravel()
    if shape.told_apart:
        right[rows[FOUND]] = limits.most_found[classes.others > 0]
        right[rows[UPLOADS]] = limits.uploads[shape.sites]
    else:
        right[rows[UPLOADS]] = float(limits.uploads @ classes.kinds.count)
    gathers, returns, hidden = _moves(relaxation, box.residency)
    (latency_s, latency_back_s), beside = relaxation.copy_latency_s(box), relaxation.problem.beside_s
    right[rows[COPIES]] = (
        -(gathers - hidden) * latency_s,
        hidden * beside - gathers * latency_s,
        returns * (2 * beside - latency_back_s),
    )
    return BoxProgram(
        costs=shape.costs,
        inequality=shape.inequality.matrix(np.concatenate([[1.0], relaxation.unit_rows(limits).ravel(), slope.ravel()])),
        right=right,
        equality=shape.equality,
        total=shape.total,
        bounds=_bounds(relaxation, box, shape, limits),
    )


def _moves(relaxation: Relaxation, residency: Residency) -> tuple[int, int, int]:
    """Gathers and returns of a layer, and how many of the gathers have something to run beside."""
    batches = relaxation.problem.workload.training.micro_batches
    gathers, returns = gathers_and_returns(residency, batches)
    return gathers, returns, min(gathers, batches)


def _bounds(relaxation: Relaxation, box: Box, shape: Shape, limits: Limits) -> FloatArray:
    """[variables, 2]."""
    classes = relaxation.classes
    most_copies = classes.mean(limits.copies).T * classes.others.T
    copies = np.zeros_like(shape.at_home)
    np.add.at(copies, shape.group[shape.sites], most_copies[shape.sites])
    copies = np.minimum(copies, classes.mean(limits.most_held) - classes.homes)
    holdable = shape.at_home + copies
    (d, g, h), (own_g, own_d) = shape.away, shape.own
    found = np.minimum(classes.mean(limits.most_found)[d, h], holdable[g, h]) * classes.others[d, h]
    bounds, first, second = shape.bounds.copy(), len(d), len(d) + len(own_d)
    bounds[:first, 1] = found
    bounds[first:second, 1] = holdable[own_g, own_d]
    bounds[second : shape.times[0], 1] = copies[shape.copied]
    forward, back, _, gather, give_back, gather_cost, return_cost = shape.times
    cost_forward, cost_back, _ = relaxation.budgets_s
    gathers, returns, _ = _moves(relaxation, box.residency)
    latency_s, latency_back_s = relaxation.copy_latency_s(box)
    bounds[forward], bounds[back] = cost_forward * np.array(box.forward_s), cost_back * np.array(box.back_s)
    bounds[gather], bounds[give_back] = box.gather_s, box.return_s
    bounds[gather_cost, 1] = gathers * (box.gather_s[1] + latency_s)
    bounds[return_cost, 1] = returns * (box.return_s[1] + latency_back_s)
    return bounds


@lru_cache(maxsize=4)
def _shape(relaxation: Relaxation, residency: Residency, most_variables: int) -> Shape:
    """Variables and rows, and what no box changes in them."""
    problem, classes = relaxation.problem, relaxation.classes
    size, num_lines = len(classes.count), len(SLOPES)
    sites = np.flatnonzero(classes.homes)
    told_apart = not classes.merged and len(sites) * size * size <= most_variables
    # Groups g of homes: what of them is at home somewhere.
    group = np.searchsorted(sites, np.arange(size)) if told_apart else np.zeros(size, dtype=np.int64)
    groups = len(sites) if told_apart else 1
    at_home = np.zeros((groups, size))
    at_home[group[sites], sites] = classes.homes[sites]
    owned = classes.homes[sites] if told_apart else np.array([float(problem.num_experts)])
    d, g, h = np.nonzero(np.repeat(classes.others[:, None, :], groups, axis=1))
    own_g, own_d = np.nonzero(np.ones((groups, size)))
    away, num = np.arange(len(d)), len(d) + len(own_d)
    many = np.concatenate([classes.others[d, h], np.ones(len(own_d))])
    all_d, all_g, all_h = np.concatenate([d, own_d]), np.concatenate([g, own_g]), np.concatenate([h, own_d])
    zg, zh = np.nonzero(owned[:, None] > at_home)
    z = np.full((groups, size), -1)
    held = z[zg, zh] = num + np.arange(len(zg))
    times = num + len(zg) + np.arange(7)
    forward, back, compute, gather, give_back, gather_cost, return_cost = times.tolist()
    unserved = return_cost + 1
    variables = unserved + size * groups
    rows, every = Rows(), np.arange(size)
    # Numbers of a box: one, then rows of an expert by pair of classes, then slopes of lines above what a site can serve.
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
        np.concatenate([np.ones(len(coupled)), -many[coupled]]),
        many[coupled] * at_home[all_g[coupled], all_h[coupled]],
    )
    joined, pair = np.unique(d * size + h, return_inverse=True)
    if told_apart:
        rows.add(pair, away, 1.0, np.zeros(len(joined)), name=FOUND)

    # Token exchanges and computation: each link's time is at most that of the busiest.
    up, down = classes.mean(classes.kinds.up_bytes_per_s), classes.mean(classes.kinds.down_bytes_per_s)
    pair_rate = classes.pair_bytes_per_s
    crowd = classes.count[d] / classes.count[h]
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
    busiest(h, away, cost_forward * crowd / down[h], forward, size, unit)
    busiest(h, away, cost_back * crowd / up[h], back, size, unit)
    busiest(d, away, cost_back / down[d], back, size, unit)
    work_s = cost_compute * relaxation.expert_s
    busiest(all_h, np.arange(num), work_s[all_h] * np.concatenate([crowd, np.ones(len(own_d))]), compute, size)
    if pair_rate is not None:
        busiest(pair, away, cost_forward / pair_rate[d, h], forward, len(joined), unit)
        busiest(pair, away, cost_back / pair_rate[h, d], back, len(joined), unit)

    # Rows come whole, so sites can serve so many experts for others' tokens only, the more the more they hold: line by line.
    line = size * np.arange(num_lines)[:, None]
    rows.add(
        np.concatenate([(line + h).ravel(), (line + zh).ravel()]),
        np.concatenate([np.tile(away, num_lines), np.tile(held, num_lines)]),
        np.concatenate([np.tile(crowd, num_lines), -np.ones(num_lines * len(zh))]),
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
        none, owners = np.zeros(len(held), dtype=np.int64), classes.count[sites]
        rows.add(none, held, classes.count[zh], np.zeros(1), name=UPLOADS)
        busiest(none, held, classes.count[zh] * weight / float(up[sites] @ owners), gather, 1)
        busiest(none, held, classes.count[zh] * weight_back / float(down[sites] @ owners), give_back, 1)

    # What copies cost beyond the computation beside them.
    gathers, returns, hidden = _moves(relaxation, residency)
    columns = np.array([gather, gather_cost, gather, gather_cost, give_back, return_cost])
    factors = np.array([gathers - hidden, -1.0, gathers, -1.0, returns, -1.0])
    rows.add(np.array([0, 0, 1, 1, 2, 2]), columns, factors, np.zeros(3), name=COPIES)

    bounds, costs = np.zeros((variables, 2)), np.zeros(variables)
    bounds[compute, 0] = cost_compute * problem.least_expert_s
    bounds[compute, 1] = float(work_s.max()) * problem.num_sites * problem.num_experts + bounds[compute, 0]
    costs[[forward, back, compute, gather_cost, return_cost]] = 1.0
    # Empty boxes shall have a bound too: experts may stay unserved, at a price no plan would pay.
    bounds[unserved:, 1] = np.tile(owned, size)
    costs[unserved:] = 20 * relaxation.full_gather_cost_s
    each = np.arange(size * groups)
    row = np.concatenate([all_d * groups + all_g, each])
    column = np.concatenate([np.arange(num), unserved + each])
    return Shape(
        told_apart=told_apart,
        sites=sites,
        group=group,
        at_home=at_home,
        away=(d, g, h),
        own=(own_g, own_d),
        copied=(zg, zh),
        times=times,
        inequality=rows.template(variables),
        right=np.concatenate(rows.right),
        rows=rows.names,
        equality=coo_array((np.ones(len(row)), (row, column)), shape=(size * groups, variables)).tocsr(),
        total=np.tile(owned, size),
        costs=costs,
        bounds=bounds,
    )
