"""Linear programs as bounds, and what any dual vector proves about them.

``value_s`` evaluates weak duality: for minimise c x with A x <= b, F x = g, l <= x <= u, any lambda >= 0 and any nu give the
bound  nu g - lambda b + sum_j min(r_j l_j, r_j u_j)  with r = c + lambda A - nu F. The solver only proposes lambda and nu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from scipy.sparse import coo_array, csr_array

from hybridep.arrays import BoolArray, FloatArray, IntArray
from planner.linear_program import minimise


@dataclass(frozen=True, kw_only=True, eq=False)
class Duals:
    """What proves a bound: multipliers of the inequalities (at least zero) and of the equalities."""

    inequality: FloatArray
    equality: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Template:
    """A sparse matrix but for numbers by which its entries are multiplied; the first of them is one."""

    pattern: Any
    """Sparse."""
    value: FloatArray
    """[entries], as ``pattern`` orders them."""
    scale: IntArray
    """[entries]: which number."""

    def matrix(self, numbers: FloatArray) -> Any:
        pattern = self.pattern
        return csr_array((self.value * numbers[self.scale], pattern.indices, pattern.indptr), shape=pattern.shape)

    @cached_property
    def row(self) -> IntArray:
        """[entries]."""
        return np.repeat(np.arange(self.pattern.shape[0]), np.diff(self.pattern.indptr))

    @cached_property
    def pairs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Of a column and a number in it, ascending: (column, number), [P] each, and which of them each entry belongs to."""
        both, pair = np.unique(self.pattern.indices * (int(self.scale.max()) + 1) + self.scale, return_inverse=True)
        column, number = np.divmod(both, int(self.scale.max()) + 1)
        return column, number, pair

    def weighted(self, rows: FloatArray) -> FloatArray:
        """[P]: sums of the entries of each of ``pairs``, times their rows' weights."""
        weights = self.value * rows[self.row]
        return np.bincount(self.pairs[2], weights=weights, minlength=len(self.pairs[0])).astype(np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Frame:
    """What the programs of all boxes have in common."""

    inequality: Template
    right: FloatArray
    """[rows]: zero where a box gives it."""
    rows: dict[str, slice]
    """Those, by name."""
    equality: Any
    """Sparse; equal to ``total``."""
    total: FloatArray
    """Of equalities."""
    costs: FloatArray
    """[variables]."""
    bounds: FloatArray
    """[variables, 2]: zero where a box gives them."""

    @cached_property
    def scaled(self) -> tuple[BoolArray, IntArray, IntArray]:
        """Which of the template's pairs ([P]) have numbers of a box's; the columns with such, and where in these pairs each of
        them begins."""
        column, number, _ = self.inequality.pairs
        columns, first = np.unique(column[number > 0], return_index=True)
        return number > 0, columns, first


@dataclass(frozen=True, kw_only=True, eq=False)
class BoxProgram:
    """minimise the costs of x, in seconds of one layer: of one box, or with a first axis of several, which are only valued."""

    frame: Frame
    numbers: FloatArray
    """Of the frame's template."""
    right: FloatArray
    """[rows]."""
    bounds: FloatArray
    """[variables, 2], finite."""

    @cached_property
    def inequality(self) -> Any:
        """Sparse [rows, variables]; at most ``right``."""
        return self.frame.inequality.matrix(self.numbers)

    def values_s(self, many: Sequence[Duals]) -> FloatArray:
        """The same of many at once, [..., multipliers]."""
        prices = [_prices(self.frame, one) for one in many]
        own, columns, first = self.frame.scaled
        fixed, scaled = np.stack([one.fixed for one in prices]), np.stack([one.scaled for one in prices])
        scaled = scaled * self.numbers[..., None, self.frame.inequality.pairs[1][own]]
        reduced = np.broadcast_to(fixed, (*scaled.shape[:-1], fixed.shape[-1])).copy()
        reduced[..., columns] += np.add.reduceat(scaled, first, axis=-1)
        # A variable is at its upper bound where that is cheaper, else at its lower one.
        low, wide = self.bounds[..., 0, None], self.bounds[..., 1, None] - self.bounds[..., 0, None]
        ends = (reduced @ low + np.minimum(reduced, 0.0) @ wide)[..., 0]
        right = self.right @ np.stack([one.inequality for one in many], axis=1)
        return np.asarray(np.array([one.total for one in prices]) - right + ends)

    def solve(self) -> Duals | None:
        """The best multipliers; None when the program is infeasible or the solver fails."""
        costs, equality = self.frame.costs, self.frame.equality
        # Scaled by the cheapest variable: by the price of what stays unserved, all else would be within the solver's tolerance.
        # Its presolve takes longer than it saves here, but for variables that must be zero and rows that bounds keep anyway.
        unit = float(costs[costs > 0].min())
        free = np.flatnonzero(self.bounds.any(axis=1))
        low, high = self.bounds.T
        most = self.inequality.maximum(0) @ high + self.inequality.minimum(0) @ low
        needed = np.flatnonzero(most > self.right)
        found = minimise(
            costs[free] / unit,
            self.inequality[needed][:, free],
            self.right[needed],
            equality[:, free],
            self.frame.total,
            self.bounds[free],
            presolve=False,
        )
        if found is None:
            return None
        inequality = np.zeros(len(self.right))
        inequality[needed] = found.inequality * unit
        return Duals(inequality=inequality, equality=found.equality * unit)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Prices:
    """What multipliers say of all boxes' programs alike."""

    fixed: FloatArray
    """[variables]: reduced costs, but for entries with numbers of a box's."""
    scaled: FloatArray
    """Of those, by ``Frame.scaled``."""
    total: float
    """nu g."""


@lru_cache(maxsize=64)
def _prices(frame: Frame, duals: Duals) -> _Prices:
    if (duals.inequality < 0).any():
        raise ValueError("multipliers of inequalities must be at least zero")
    own, weighted = frame.scaled[0], frame.inequality.weighted(duals.inequality)
    fixed = frame.costs - frame.equality.T @ duals.equality
    fixed[frame.inequality.pairs[0][~own]] += weighted[~own]
    return _Prices(fixed=fixed, scaled=weighted[own], total=float(frame.total @ duals.equality))


class Rows:
    """Inequalities, collected block by block."""

    def __init__(self) -> None:
        self.row: list[IntArray] = []
        self.column: list[IntArray] = []
        self.value: list[FloatArray] = []
        self.scale: list[IntArray] = []
        self.right: list[FloatArray] = []
        self.names: dict[str, slice] = {}
        self.count = 0

    def add(
        self,
        row: IntArray,
        column: IntArray,
        value: FloatArray | float,
        right: FloatArray,
        *,
        scale: IntArray | int = 0,
        name: str = "",
    ) -> None:
        """``scale`` tells which number of a ``template`` entries are multiplied by; rows are found again by ``name``. Blocks of
        one name follow each other."""
        self.row.append(np.asarray(row) + self.count)
        self.column.append(np.asarray(column))
        self.value.append(np.broadcast_to(np.asarray(value, dtype=np.float64), np.shape(row)))
        self.scale.append(np.broadcast_to(np.asarray(scale), np.shape(row)))
        self.right.append(right)
        if name:
            first = self.names.get(name, slice(self.count, self.count))
            assert first.stop == self.count, f"rows called {name} are apart"
            self.names[name] = slice(first.start, self.count + len(right))
        self.count += len(right)

    def template(self, variables: int) -> Template:
        row, column = np.concatenate(self.row), np.concatenate(self.column)
        pattern = coo_array((np.arange(len(row)), (row, column)), shape=(self.count, variables)).tocsr()
        order = pattern.data
        assert len(order) == len(row), "an entry is given twice"
        return Template(pattern=pattern, value=np.concatenate(self.value)[order], scale=np.concatenate(self.scale)[order])
