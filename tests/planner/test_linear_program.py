"""Linear programs: the same least values and prices as another way to the solver says."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_array

from planner.linear_program import minimise


@pytest.mark.parametrize("presolve", [True, False])
def test_as_scipy_finds_it(presolve: bool) -> None:
    solved = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        variables, rows, equals = (int(number) for number in rng.integers((3, 1, 1), (12, 10, 3)))
        costs, at_most, equal = rng.random(variables), rng.normal(size=(rows, variables)), rng.random((equals, variables))
        right, total = rng.normal(size=rows), rng.random(equals)
        bounds = np.stack([np.zeros(variables), rng.uniform(0.5, 3.0, variables)], axis=1)
        found = minimise(costs, csr_array(at_most), right, equal, total, bounds, presolve=presolve)
        other = linprog(costs, at_most, right, equal, total, bounds.tolist(), method="highs")
        assert (found is None) == (other.status != 0)
        if found is None:
            continue
        solved += 1
        least = costs @ found.x
        assert least == pytest.approx(other.fun, rel=1e-7, abs=1e-9)
        assert (at_most @ found.x <= right + 1e-6).all()
        assert equal @ found.x == pytest.approx(total, abs=1e-6)
        # Its prices prove the least value: every variable at the end that its reduced cost says.
        reduced = costs + at_most.T @ found.inequality - equal.T @ found.equality
        proven = (
            total @ found.equality - right @ found.inequality + np.minimum(reduced * bounds[:, 0], reduced * bounds[:, 1]).sum()
        )
        assert (found.inequality >= 0).all()
        assert proven == pytest.approx(least, rel=1e-7, abs=1e-9)
    assert 10 < solved < 40


def test_without_bounds_variables_are_at_least_zero() -> None:
    found = minimise(np.array([1.0, 2.0]), np.array([[-1.0, -1.0]]), np.array([-3.0]), np.array([[1.0, -1.0]]), np.array([1.0]))
    assert found is not None and found.x == pytest.approx([2.0, 1.0])
    nothing_least = minimise(np.array([-1.0, 0.0]), np.array([[0.0, 1.0]]), np.ones(1), np.zeros((1, 2)), np.zeros(1))
    assert nothing_least is None
