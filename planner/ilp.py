"""The planning problem as an integer program: a knapsack over layers with several choices each.

    minimise    sum_c layer[c] n_c                                                seconds, or dollars
    subject to  sum_c n_c = number of layers
                n_c <= number of layers * u_c                                     candidate c is in use
                passing[r] >= passing[c, r] u_c                                   largest of the layers in use
                fixed[r] + sum_c lasting[c, r] n_c + passing[r] <= capacity       on every rank r
                fixed + sum_c price[c] n_c <= budget                              where there is one

with n integer and u binary. Bytes are in units of the rank's capacity, prices in units of the budget and the objective in units
of the best candidate's, so that the solvers' absolute tolerances mean the same for every problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from planner.goal import WITHIN
from planner.memory import TOLERANCE
from planner.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model ready for a solver."""

    model: Any
    """pulp.LpProblem."""
    numbers: dict[int, Any]
    """Candidate -> its variable n_c; dominated candidates have none."""
    scale: float
    """Seconds or dollars of one unit of the objective, to which ``Problem.fixed_value`` is to be added."""


def build_program(problem: Problem) -> Program:
    """Pure: nothing is solved, and equal problems give equal models."""
    used = problem.undominated()
    values = problem.layer_value
    scale = float(values.min()) or 1.0
    model = pulp.LpProblem("layers", pulp.LpMinimize)
    numbers = {c: model.add_variable(f"n{c}", 0, problem.num_layers, pulp.LpInteger) for c in used}
    in_use = {c: model.add_variable(f"u{c}", cat=pulp.LpBinary) for c in used}
    model += pulp.lpSum(values[c] / scale * numbers[c] for c in used)
    model += pulp.lpSum(numbers.values()) == problem.num_layers, "layers"
    for c in used:
        model += numbers[c] <= problem.num_layers * in_use[c], f"use{c}"
    budget = problem.goal.budget_usd
    if budget is not None:
        price = pulp.lpSum(problem.layer_usd[c] / budget * numbers[c] for c in used)
        model += price <= 1 + WITHIN / 2 - problem.fixed_usd / budget, "budget"
    for r, (fixed, fixed_passing, lasting, passing) in enumerate(_memory_rows(problem, used)):
        largest = model.add_variable(f"passing{r}", fixed_passing)
        for c, own in zip(used, passing, strict=True):
            if own > fixed_passing:
                model += largest >= own * in_use[c], f"passing{r}_{c}"
        total = pulp.lpSum(own * numbers[c] for c, own in zip(used, lasting, strict=True))
        # In the middle of the tolerance: solvers overstep by less than the other half.
        model += total + largest <= 1 + TOLERANCE / 2 - fixed, f"memory{r}"
    return Program(model=model, numbers=numbers, scale=scale)


def _memory_rows(problem: Problem, used: list[int]) -> list[tuple[float, float, list[float], list[float]]]:
    """(fixed, fixed passing, lasting per candidate, passing per candidate) of every rank that no other one needs as much as of
    everything, and more of something."""
    columns = [
        problem.fixed_lasting_bytes,
        problem.fixed_passing_bytes,
        *problem.lasting_bytes[used],
        *problem.passing_bytes[used],
    ]
    rows = np.unique(np.round(np.column_stack(columns) / problem.capacity_bytes[:, None], 12), axis=0)
    # In ascending order: only rows below need as much.
    rows = np.stack([row for place, row in enumerate(rows) if not (rows[place + 1 :] >= row).all(axis=1).any()])
    split = 2 + len(used)
    return [(float(row[0]), float(row[1]), row[2:split].tolist(), row[split:].tolist()) for row in rows]
