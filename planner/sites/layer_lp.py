"""What all linear programs of boxes know about the times of a layer: token exchanges, computation, gathers and returns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.plan import Residency
from hybridep.traffic import gathers_and_returns
from planner.sites.boxes import Box, Boxes
from planner.sites.linear import Rows
from planner.sites.relaxation import Relaxation

MOST_HELD, LEAST_HELD, UPLOADS, SERVED, COPIES = "most held", "least held", "uploads", "served", "copies"
"""Rows whose right sides change from box to box; the last ones say what gathers and returns cost beyond the computation beside
them."""


class Times(NamedTuple):
    """Variables, seconds of one layer."""

    forward: int
    """Of rows, dispatch and combine backward."""
    back: int
    """Combine and dispatch backward."""
    compute: int
    gather: int
    """One, latency apart."""
    give_back: int
    """One return of gradients, likewise."""
    gather_cost: int
    """All gathers, as far as nothing hides them."""
    return_cost: int


def times_from(first: int) -> Times:
    """So many variables from this one on."""
    return Times(*range(first, first + len(Times._fields)))


def add_copies(relaxation: Relaxation, residency: Residency, times: Times, rows: Rows) -> None:
    """``COPIES``, without their right sides."""
    gathers, returns, hidden = _moves(relaxation, residency)
    gather, cost, give_back, return_cost = times.gather, times.gather_cost, times.give_back, times.return_cost
    columns = np.array([gather, cost, gather, cost, give_back, return_cost])
    factors = np.array([gathers - hidden, -1.0, gathers, -1.0, returns, -1.0])
    rows.add(np.array([0, 0, 1, 1, 2, 2]), columns, factors, np.zeros(3), name=COPIES)


def copies_right(relaxation: Relaxation, box: Box | Boxes) -> FloatArray:
    """[..., 3]: right sides of ``COPIES``."""
    gathers, returns, hidden = _moves(relaxation, box.residency)
    (latency_s, latency_back_s), beside = _latencies_s(relaxation, box), relaxation.problem.beside_s
    early, late = -(gathers - hidden) * latency_s, hidden * beside - gathers * latency_s
    return np.stack([early, late, returns * (2 * beside - latency_back_s)], axis=-1)


def bound_times(relaxation: Relaxation, box: Box | Boxes, times: Times, bounds: FloatArray) -> None:
    """Sets the bounds ([..., variables, 2]) of ``times``."""
    cost_forward, cost_back, cost_compute = relaxation.budgets_s
    gathers, returns, _ = _moves(relaxation, box.residency)
    latency_s, latency_back_s = _latencies_s(relaxation, box)
    problem = relaxation.problem
    most_s, least_s = float(relaxation.expert_s.max()) * problem.num_sites * problem.num_experts, problem.least_expert_s
    ends: tuple[tuple[int, float | FloatArray, float | FloatArray], ...] = (
        (times.forward, cost_forward * box.forward_s[0], cost_forward * box.forward_s[1]),
        (times.back, cost_back * box.back_s[0], cost_back * box.back_s[1]),
        (times.compute, cost_compute * least_s, cost_compute * (least_s + most_s)),
        (times.gather, *box.gather_s),
        (times.give_back, *box.return_s),
        (times.gather_cost, 0.0, gathers * (box.gather_s[1] + latency_s)),
        (times.return_cost, 0.0, returns * (box.return_s[1] + latency_back_s)),
    )
    for time, least, most in ends:
        bounds[..., time, 0], bounds[..., time, 1] = least, most


def spent(times: Times) -> list[int]:
    """Variables that make up what a layer takes."""
    return [times.forward, times.back, times.compute, times.gather_cost, times.return_cost]


def unserved_s(relaxation: Relaxation) -> float:
    """Price of an expert that a site does not find, which no plan would pay: empty boxes shall have a bound, too."""
    return 20 * relaxation.full_gather_cost_s


def _moves(relaxation: Relaxation, residency: Residency) -> tuple[int, int, int]:
    """Gathers and returns of a layer, and how many of the gathers have something to run beside."""
    batches = relaxation.problem.workload.training.micro_batches
    gathers, returns = gathers_and_returns(residency, batches)
    return gathers, returns, min(gathers, batches)


def _latencies_s(relaxation: Relaxation, box: Box | Boxes) -> tuple[float, float] | tuple[FloatArray, FloatArray]:
    return relaxation.copy_latencies_s(box) if isinstance(box, Boxes) else relaxation.copy_latency_s(box)
