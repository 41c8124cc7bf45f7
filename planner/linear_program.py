"""Linear programs, solved by HiGHS. Bounds make thousands, and ``scipy.optimize.linprog`` takes twice as long for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from scipy.sparse import csr_array, vstack

from hybridep.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearSolution:
    """Of minimise c x with A x <= b, F x = g, l <= x <= u."""

    x: FloatArray
    inequality: FloatArray
    """[rows of A]: by how much the least value falls with each of b, at least zero."""
    equality: FloatArray
    """[rows of F]: by how much it rises with each of g."""


def minimise(
    costs: FloatArray,
    at_most: Any,
    right: FloatArray,
    equal: Any,
    total: FloatArray,
    bounds: FloatArray | None = None,
    *,
    presolve: bool = True,
) -> LinearSolution | None:
    """The least ``costs`` x with ``at_most`` x <= ``right``, ``equal`` x = ``total`` (matrices, dense or sparse) and x within
    ``bounds`` ([variables, 2]; else at least zero). None when there is no x, no least one, or the solver fails."""
    both = vstack([csr_array(at_most), csr_array(equal)], format="csr")
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(costs), both.shape[0]
    program.col_cost_ = costs
    program.col_lower_ = np.zeros(len(costs)) if bounds is None else bounds[:, 0]
    program.col_upper_ = np.full(len(costs), highspy.kHighsInf) if bounds is None else bounds[:, 1]
    program.row_lower_ = np.concatenate([np.full(len(right), -highspy.kHighsInf), total])
    program.row_upper_ = np.concatenate([right, total])
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = both.indptr, both.indices, both.data
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("threads", 1), ("presolve", "on" if presolve else "off")):
        solver.setOptionValue(option, value)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = solver.getSolution()
    prices = np.array(solution.row_dual)
    return LinearSolution(
        x=np.array(solution.col_value),
        inequality=np.maximum(-prices[: len(right)], 0.0),
        equality=prices[len(right) :],
    )
