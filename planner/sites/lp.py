"""The bound of one box as a linear program, and what any dual vector proves about it.

Beside ``planner.sites.relaxation``'s row costs, the program knows the homes: x[d, a, h] experts of home site a are served
at h for tokens of d, at most the y[a, h] that h holds of them; copies y leave a, and arrive at h, within the gather's time,
which costs what it exceeds the computation it runs beside. Where that is too large a program, homes are not told apart.

``value_s`` evaluates weak duality: for minimise c x with A x <= b, F x = g, l <= x <= u, any lambda >= 0 and any nu give the
bound  nu g - lambda b + sum_j min(r_j l_j, r_j u_j)  with r = c + lambda A - nu F. The solver only proposes lambda and nu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hybridep.placement import IntArray
from hybridep.traffic import FloatArray, gathers_and_returns
from planner.sites.relaxation import Box, Relaxation

MOST_VARIABLES = 600
"""With homes told apart; larger programs take a solver longer than halving boxes is worth."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Duals:
    """What proves a bound: multipliers of the inequalities (at least zero) and of the equalities."""

    inequality: FloatArray
    equality: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class BoxProgram:
    """minimise ``costs`` x; times in seconds of one layer."""

    costs: FloatArray
    inequality: Any
    """Sparse [rows, variables]; at most ``right``."""
    right: FloatArray
    equality: Any
    """Sparse; equal to ``total``."""
    total: FloatArray
    bounds: FloatArray
    """[variables, 2], finite."""

    def value_s(self, duals: Duals) -> float:
        """A lower bound on the program, whatever the multipliers. Raises ValueError for a negative one."""
        if (duals.inequality < 0).any():
            raise ValueError("multipliers of inequalities must be at least zero")
        reduced = self.costs + self.inequality.T @ duals.inequality - self.equality.T @ duals.equality
        ends = np.minimum(reduced * self.bounds[:, 0], reduced * self.bounds[:, 1])
        return float(duals.equality @ self.total - duals.inequality @ self.right + ends.sum())

    def solve(self) -> Duals | None:
        """The best multipliers; None when the program is infeasible or the solver fails."""
        solver: Any = linprog  # its stubs know dense matrices only
        # Scaled by the cheapest variable: by the price of what stays unserved, all else would be within the solver's tolerance.
        # Its presolve takes longer than it saves here.
        unit = float(self.costs[self.costs > 0].min())
        found = solver(
            self.costs / unit,
            self.inequality,
            self.right,
            self.equality,
            self.total,
            self.bounds,
            method="highs",
            options={"presolve": False},
        )
        if found.status != 0:
            return None
        return Duals(
            inequality=np.maximum(-np.asarray(found.ineqlin.marginals), 0.0) * unit,
            equality=np.asarray(found.eqlin.marginals) * unit,
        )


class Rows:
    """Inequalities, collected block by block."""

    def __init__(self) -> None:
        self.row: list[IntArray] = []
        self.column: list[IntArray] = []
        self.value: list[FloatArray] = []
        self.right: list[FloatArray] = []
        self.count = 0

    def add(self, row: IntArray, column: IntArray, value: FloatArray | float, right: FloatArray) -> None:
        self.row.append(np.asarray(row) + self.count)
        self.column.append(np.asarray(column))
        self.value.append(np.broadcast_to(np.asarray(value, dtype=np.float64), np.shape(row)))
        self.right.append(right)
        self.count += len(right)

    def matrix(self, variables: int) -> Any:
        entries = np.concatenate(self.value), (np.concatenate(self.row), np.concatenate(self.column))
        return coo_array(entries, shape=(self.count, variables)).tocsr()


def box_program(relaxation: Relaxation, box: Box) -> BoxProgram | None:
    """None when a site cannot even hold its own experts."""
    problem, kinds, limits = relaxation.problem, relaxation.classes, relaxation.limits(box)
    size = len(kinds.count)
    weight, weight_back = float(problem.wire.expert_bytes), float(problem.wire.expert_gradient_bytes)
    if (limits.most_held < kinds.homes).any():
        return None
    sites = np.flatnonzero(kinds.homes)
    told_apart = not kinds.merged and len(sites) * size * size <= MOST_VARIABLES
    # Groups a of experts: how many they are, where they live, and where how many copies of them can be.
    if told_apart:
        owned = kinds.homes[sites]
        at_home = np.zeros((len(sites), size))
        at_home[np.arange(len(sites)), sites] = owned
        copies = limits.copies[sites] * (1 - np.eye(size)[sites])
    else:
        owned = np.array([float(problem.num_experts)])
        at_home = kinds.homes[None, :]
        copies = (limits.most_held - kinds.homes)[None, :]
    groups = len(owned)
    holdable = at_home + copies
    # x[d, a, h]: what a site of class d finds at all other sites of class h; then what it serves itself.
    near = limits.allowed * kinds.others
    d, a, h = np.nonzero((holdable[None] > 0) & (near[:, None, :] > 0))
    own_a, own_d = np.nonzero(holdable)
    away = np.arange(len(d))
    num = len(d) + len(own_d)
    many = np.concatenate([near[d, h], np.ones(len(own_d))])
    all_d, all_a, all_h = np.concatenate([d, own_d]), np.concatenate([a, own_a]), np.concatenate([h, own_d])
    ca, ch = np.nonzero(copies)
    y = num + np.arange(len(ca))
    copy_of = np.full((groups, size), -1)
    copy_of[ca, ch] = y
    first = num + len(ca)
    forward, back, compute, gather, give_back, gather_cost, return_cost = range(first, first + 7)
    unserved = first + 7
    variables = unserved + size * groups
    rows = Rows()

    # Served only what is held.
    coupled = np.flatnonzero(copies[all_a, all_h] > 0)
    order = np.arange(len(coupled))
    rows.add(
        np.concatenate([order, order]),
        np.concatenate([coupled, copy_of[all_a[coupled], all_h[coupled]]]),
        np.concatenate([np.ones(len(coupled)), -many[coupled]]),
        many[coupled] * at_home[all_a[coupled], all_h[coupled]],
    )
    rows.add(ch, y, 1.0, limits.most_held - kinds.homes)

    # Token exchanges and computation: each link's time is at most that of the busiest.
    q = relaxation.unit_seconds(limits)
    up, down, pair_rate = kinds.up_bytes_per_s, kinds.down_bytes_per_s, kinds.pair_bytes_per_s
    crowd = kinds.count[d] / kinds.count[h]
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

    def shared(src: IntArray, dst: IntArray, variable: IntArray, unit_bytes: FloatArray, maximum: int) -> None:
        """The same of trunks, which know sites: only where each is a class."""
        if problem.cluster.trunks and pair_rate is not None:
            crossed = problem.trunk_s_per_byte[:, src * size + dst].tocoo()
            seconds = crossed.data * unit_bytes[crossed.col]
            busiest(crossed.row.astype(np.int64), variable[crossed.col], seconds, maximum, crossed.shape[0])

    shared(d, h, away, cost_forward * q[d, h], forward)
    shared(h, d, away, cost_back * q[d, h], back)

    # Copies leave and arrive within the gather's time, their gradients within the return's.
    if len(ca):
        busiest(ch, y, weight / down[ch], gather, size)
        busiest(ch, y, weight_back / up[ch], give_back, size)
        if told_apart:
            home = sites[ca]
            busiest(home, y, weight / up[home], gather, size)
            busiest(home, y, weight_back / down[home], give_back, size)
            if pair_rate is not None:
                order = np.arange(len(ca))
                busiest(order, y, weight / pair_rate[home, ch], gather, len(ca))
                busiest(order, y, weight_back / pair_rate[ch, home], give_back, len(ca))
            shared(home, ch, y, np.full(len(ca), weight), gather)
            shared(ch, home, y, np.full(len(ca), weight_back), give_back)
        else:
            none = np.zeros(len(ca), dtype=np.int64)
            owners = kinds.count[sites]
            rows.add(none, y, kinds.count[ch], np.array([limits.most_copies]))
            busiest(none, y, kinds.count[ch] * weight / float(up[sites] @ owners), gather, 1)
            busiest(none, y, kinds.count[ch] * weight_back / float(down[sites] @ owners), give_back, 1)

    # What copies cost beyond the computation beside them.
    batches = problem.workload.training.micro_batches
    gathers, returns = gathers_and_returns(box.residency, batches)
    hidden = min(gathers, batches)
    zero, beside = np.zeros(2, dtype=np.int64), problem.beside_s
    rows.add(zero, np.array([gather, gather_cost]), np.array([gathers - hidden, -1.0]), np.zeros(1))
    rows.add(zero, np.array([gather, gather_cost]), np.array([gathers, -1.0]), np.array([hidden * beside]))
    rows.add(zero, np.array([give_back, return_cost]), np.array([returns, -1.0]), np.array([2 * returns * beside]))

    bounds = np.zeros((variables, 2))
    bounds[:num, 1] = many * holdable[all_a, all_h]
    bounds[num:first, 1] = copies[ca, ch]
    slowest = min(float(up.min()), float(down.min()), np.inf if pair_rate is None else float(pair_rate.min()))
    slowest = min([slowest, *(trunk.bandwidth for trunk in problem.cluster.trunks)])
    most_rows = float(relaxation.user_rows.max()) * problem.num_sites * problem.num_experts
    bounds[forward, 1], bounds[back, 1] = cost_forward * most_rows / slowest, cost_back * most_rows / slowest
    bounds[compute, 1] = float(work_s.max()) * problem.num_sites * problem.num_experts
    bounds[gather], bounds[give_back] = box.gather_s, box.return_s
    bounds[gather_cost, 1], bounds[return_cost, 1] = gathers * box.gather_s[1], returns * box.return_s[1]
    costs = np.zeros(variables)
    costs[[forward, back, compute, gather_cost, return_cost]] = 1.0
    # Empty boxes shall have a bound too: experts may stay unserved, at a price no plan would pay.
    bounds[unserved:, 1] = np.tile(owned, size)
    costs[unserved:] = 20 * relaxation.full_gather_cost_s
    each = np.arange(size * groups)
    row = np.concatenate([all_d * groups + all_a, each])
    column = np.concatenate([np.arange(num), unserved + each])
    return BoxProgram(
        costs=costs,
        inequality=rows.matrix(variables),
        right=np.concatenate(rows.right),
        equality=coo_array((np.ones(len(row)), (row, column)), shape=(size * groups, variables)).tocsr(),
        total=np.tile(owned, size),
        bounds=bounds,
    )
