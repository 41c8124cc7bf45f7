"""The bound of one box as a linear program.

Copies leave their homes, and arrive at holders, within the gather's time, which with the latency of the farthest costs what it
exceeds the computation it runs beside. Each site finds every expert at sites that hold it, itself among them; what it finds
elsewhere keeps links busy as the box's chords say, and nobody serves more than fits through its links in whole rows
(``planner.sites.capacity``). z[g, h] copies are held at h, and x[d, g, h] experts are served there for
tokens of d. Among few sites that differ, experts are told apart by their homes g; else there is one group of all.

Every plan of the box is a point of the program that costs no more: x and z are its own numbers (among merged sites their means,
which keep every inequality, since all are linear), times its own or less.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array

from hybridep.placement import IntArray
from hybridep.traffic import FloatArray, gathers_and_returns
from planner.sites.boxes import Box
from planner.sites.capacity import serving_lines
from planner.sites.linear import BoxProgram, Rows
from planner.sites.relaxation import Relaxation

MOST_VARIABLES = 600
"""With homes told apart; larger programs take a solver longer than halving boxes is worth."""


def box_program(relaxation: Relaxation, box: Box) -> BoxProgram | None:
    """Minimises seconds of one layer, but for the latency of token exchanges. None when sites cannot hold what they must."""
    problem, classes, limits = relaxation.problem, relaxation.classes, relaxation.limits(box)
    size = len(classes.count)
    if not limits.possible(classes):
        return None
    sites = np.flatnonzero(classes.homes)
    told_apart = not classes.merged and len(sites) * size * size <= MOST_VARIABLES
    most_held, least_held = classes.mean(limits.most_held), classes.mean(limits.least_held)
    most_found = classes.mean(limits.most_found)
    most_copies = classes.mean(limits.copies).T * classes.others.T
    # Groups g of homes: what of them is at home somewhere, and of how many there can be copies.
    group = np.searchsorted(sites, np.arange(size)) if told_apart else np.zeros(size, dtype=np.int64)
    groups = len(sites) if told_apart else 1
    at_home = np.zeros((groups, size))
    at_home[group[sites], sites] = classes.homes[sites]
    copies = np.zeros((groups, size))
    np.add.at(copies, group[sites], most_copies[sites])
    copies = np.minimum(copies, most_held - classes.homes)
    owned = classes.homes[sites] if told_apart else np.array([float(problem.num_experts)])
    holdable = at_home + copies
    # x[d, g, h]: what a site of class d finds at all other sites of class h; then what it serves itself. What a box leaves
    # nothing of is there, too: so multipliers of one box prove something about others.
    d, g, h = np.nonzero(np.repeat(classes.others[:, None, :], groups, axis=1))
    own_g, own_d = np.nonzero(np.ones((groups, size)))
    away, num = np.arange(len(d)), len(d) + len(own_d)
    many = np.concatenate([classes.others[d, h], np.ones(len(own_d))])
    all_d, all_g, all_h = np.concatenate([d, own_d]), np.concatenate([g, own_g]), np.concatenate([h, own_d])
    most_x = np.concatenate([np.minimum(most_found[d, h], holdable[g, h]), holdable[own_g, own_d]]) * many
    zg, zh = np.nonzero(owned[:, None] > at_home)
    z = np.full((groups, size), -1)
    held = z[zg, zh] = num + np.arange(len(zg))
    first = num + len(zg)
    forward, back, compute, gather, give_back, gather_cost, return_cost = range(first, first + 7)
    unserved = first + 7
    variables = unserved + size * groups
    rows = Rows()

    def at_most(row: IntArray, column: IntArray, value: FloatArray | float, right: FloatArray) -> None:
        if len(right):
            rows.add(row, column, value, right)

    # No more copies are held than can be, nor fewer than must be.
    at_most(zh, held, 1.0, most_held - classes.homes)
    every = np.arange(size)
    least = np.minimum(least_held, most_held) - classes.homes
    at_most(np.concatenate([zh, every]), np.concatenate([held, unserved + every * groups]), -1.0, -least)
    # Served only what is held, and no more than chords reckon with.
    coupled = np.flatnonzero(z[all_g, all_h] >= 0)
    order = np.arange(len(coupled))
    at_most(
        np.concatenate([order, order]),
        np.concatenate([coupled, z[all_g[coupled], all_h[coupled]]]),
        np.concatenate([np.ones(len(coupled)), -many[coupled]]),
        many[coupled] * at_home[all_g[coupled], all_h[coupled]],
    )
    if told_apart and len(away):
        pairs, row = np.unique(d * size + h, return_inverse=True)
        at_most(row, away, 1.0, (most_found * classes.others).ravel()[pairs])

    # Token exchanges and computation: each link's time is at most that of the busiest.
    q = relaxation.unit_rows(limits)
    up, down = classes.mean(classes.kinds.up_bytes_per_s), classes.mean(classes.kinds.down_bytes_per_s)
    pair_rate = classes.pair_bytes_per_s
    crowd = classes.count[d] / classes.count[h]
    cost_forward, cost_back, cost_compute = relaxation.budgets_s

    def busiest(row: IntArray, variable: IntArray, seconds: FloatArray, maximum: int, count: int) -> None:
        rows.add(
            np.concatenate([row, np.arange(count)]),
            np.concatenate([variable, np.full(count, maximum)]),
            np.concatenate([seconds, -np.ones(count)]),
            np.zeros(count),
        )

    busiest(d, away, cost_forward * q[d, h] / up[d], forward, size)
    busiest(h, away, cost_forward * q[d, h] * crowd / down[h], forward, size)
    busiest(h, away, cost_back * q[d, h] * crowd / up[h], back, size)
    busiest(d, away, cost_back * q[d, h] / down[d], back, size)
    work_s = cost_compute * relaxation.expert_s
    busiest(all_h, np.arange(num), work_s[all_h] * np.concatenate([crowd, np.ones(len(own_d))]), compute, size)
    if pair_rate is not None and len(away):
        joined, row = np.unique(d * size + h, return_inverse=True)
        busiest(row, away, cost_forward * q[d, h] / pair_rate[d, h], forward, len(joined))
        busiest(row, away, cost_back * q[d, h] / pair_rate[h, d], back, len(joined))

    # Rows come whole, so sites can serve so many experts for others' tokens only, the more the more they hold.
    slope, at_none = serving_lines(relaxation, box, limits)
    for slopes, most in zip(slope.T, at_none.T, strict=True):
        at_most(
            np.concatenate([h, zh]),
            np.concatenate([away, held]),
            np.concatenate([crowd, -slopes[zh]]),
            most + slopes * classes.homes,
        )

    def shared(src: IntArray, dst: IntArray, variable: IntArray, unit_bytes: FloatArray, maximum: int) -> None:
        """The same of trunks, which know sites: only where each is a class."""
        if problem.cluster.trunks and pair_rate is not None:
            crossed = problem.trunk_s_per_byte[:, src * size + dst].tocoo()
            seconds = crossed.data * unit_bytes[crossed.col]
            busiest(crossed.row.astype(np.int64), variable[crossed.col], seconds, maximum, crossed.shape[0])

    shared(d, h, away, cost_forward * q[d, h], forward)
    shared(h, d, away, cost_back * q[d, h], back)

    # Copies leave and arrive within the gather's time, their gradients within the return's.
    weight, weight_back = float(problem.wire.expert_bytes), float(problem.wire.expert_gradient_bytes)
    busiest(zh, held, weight / down[zh], gather, size)
    busiest(zh, held, weight_back / up[zh], give_back, size)
    if told_apart:
        home = sites[zg]
        at_most(home, held, 1.0, limits.uploads)
        busiest(home, held, weight / up[home], gather, size)
        busiest(home, held, weight_back / down[home], give_back, size)
        if pair_rate is not None:
            order = np.arange(len(held))
            busiest(order, held, weight / pair_rate[home, zh], gather, len(held))
            busiest(order, held, weight_back / pair_rate[zh, home], give_back, len(held))
        shared(home, zh, held, np.full(len(held), weight), gather)
        shared(zh, home, held, np.full(len(held), weight_back), give_back)
    else:
        none, owners = np.zeros(len(held), dtype=np.int64), classes.count[sites]
        at_most(none, held, classes.count[zh], np.array([float(limits.uploads @ classes.kinds.count)]))
        busiest(none, held, classes.count[zh] * weight / float(up[sites] @ owners), gather, 1)
        busiest(none, held, classes.count[zh] * weight_back / float(down[sites] @ owners), give_back, 1)

    # What copies cost beyond the computation beside them.
    batches = problem.workload.training.micro_batches
    gathers, returns = gathers_and_returns(box.residency, batches)
    hidden = min(gathers, batches)
    latency_s, latency_back_s = relaxation.copy_latency_s(box)
    zero, one, beside = np.zeros(2, dtype=np.int64), np.ones(1), problem.beside_s
    costed = np.array([gather, gather_cost]), np.array([give_back, return_cost])
    rows.add(zero, costed[0], np.array([gathers - hidden, -1.0]), one * -(gathers - hidden) * latency_s)
    rows.add(zero, costed[0], np.array([gathers, -1.0]), one * (hidden * beside - gathers * latency_s))
    rows.add(zero, costed[1], np.array([returns, -1.0]), one * returns * (2 * beside - latency_back_s))

    bounds = np.zeros((variables, 2))
    bounds[:num, 1] = most_x
    bounds[held, 1] = copies[zg, zh]
    bounds[forward], bounds[back] = cost_forward * np.array(box.forward_s), cost_back * np.array(box.back_s)
    bounds[compute, 0] = cost_compute * problem.least_expert_s
    bounds[compute, 1] = float(work_s.max()) * problem.num_sites * problem.num_experts + bounds[compute, 0]
    bounds[gather], bounds[give_back] = box.gather_s, box.return_s
    bounds[gather_cost, 1] = gathers * (box.gather_s[1] + latency_s)
    bounds[return_cost, 1] = returns * (box.return_s[1] + latency_back_s)
    costs = np.zeros(variables)
    costs[[forward, back, compute, gather_cost, return_cost]] = 1.0
    # Empty boxes shall have a bound too: experts may stay unserved, at a price no plan would pay.
    bounds[unserved:, 1] = np.tile(owned, size)
    costs[unserved:] = 20 * relaxation.full_gather_cost_s
    each = np.arange(size * groups)
    row = np.concatenate([all_d * groups + all_g, each])
    column = np.concatenate([np.arange(num), unserved + each])
    return BoxProgram(
        costs=costs,
        inequality=rows.matrix(variables),
        right=np.concatenate(rows.right),
        equality=coo_array((np.ones(len(row)), (row, column)), shape=(size * groups, variables)).tocsr(),
        total=np.tile(owned, size),
        bounds=bounds,
    )
