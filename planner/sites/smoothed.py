"""A serving table and what its step takes, smoothed, known anew after some rows change: the guide of the local search.

It sees what sites send each other and what the busiest of them computes, in the equations of ``planner.layer_times``. Exchanges
inside sites, coding, overheads of messages and memory are left to the exact cost, which has the last word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridep.placement import IntArray
from hybridep.plan import Residency
from hybridep.traffic import FloatArray, Op, gathers_and_returns
from planner.layer_times import layer_times, timed_block
from planner.price import step_usd
from planner.sites.flows import Changed, Flow
from planner.sites.problem import SiteProblem

NOTHING_S = dict.fromkeys(Op, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A table with some rows replaced."""

    sites: IntArray
    """[k]."""
    rows: IntArray
    """[k, E]."""
    counts: IntArray
    """[k, D]: experts that each site serves for these."""
    users: IntArray
    """[D, E]: how many sites find an expert at a site."""
    served: FloatArray
    """[D]: choices that each rank of a site computes."""
    tokens: Changed
    copies: Changed
    value: float
    """Smoothed seconds of all MoE layers, or dollars."""


class Smoothed:
    """A walk's state: ``table`` and what follows from it."""

    def __init__(self, problem: SiteProblem, table: IntArray, residency: Residency) -> None:
        size, experts = problem.num_sites, np.arange(problem.num_experts)
        self.problem, self.residency, self.table = problem, residency, table.copy()
        self.is_home = np.zeros((size, problem.num_experts), dtype=np.bool_)
        self.is_home[problem.home_site, experts] = True
        self.users = np.zeros((size, problem.num_experts), dtype=np.int64)
        np.add.at(self.users, (table, experts[None, :]), 1)
        self.counts = self._counts(table)
        self.served = problem.rows_per_choice @ self.counts
        self.tokens = Flow(problem, self._rows(np.arange(size), self.counts), problem.num_inside * float(problem.tokens.mean()))
        copies = np.zeros((size, size))
        np.add.at(copies, problem.home_site, ((self.users > 0) & ~self.is_home).astype(np.float64).T)
        self.copies = Flow(problem, copies, 1.0)
        # What no table changes.
        wire, batches = problem.wire, problem.workload.training.micro_batches
        gathers, returns = gathers_and_returns(residency, batches)
        there = batches * (wire.dispatch_row_bytes + wire.combine_row_bytes)
        back = batches * (wire.combine_row_bytes + wire.dispatch_gradient_row_bytes)
        # [4]: bytes of a unit, of tokens there and back and of copies there and back, in all its repetitions.
        self.unit_bytes = np.array([there, back, gathers * wire.expert_bytes, returns * wire.expert_gradient_bytes])
        self.rent_usd_per_s = problem.cluster.rent_usd_per_s
        none = np.zeros(0, dtype=np.int64)
        self.accept(self.trial(none, table[none]))

    def trial(self, sites: IntArray, rows: IntArray) -> Trial:
        """With ``rows`` ([k, E]) in place of those of ``sites`` ([k], all different)."""
        problem, before = self.problem, self.table[sites]
        counts = self._counts(rows)
        served = self.served + problem.rows_per_choice[sites] @ (counts - self.counts[sites])
        changed = np.nonzero(before != rows)
        users = self.users.copy()
        np.subtract.at(users, (before[changed], changed[1]), 1)
        np.add.at(users, (rows[changed], changed[1]), 1)
        tokens = self.tokens.changed(sites, self._rows(sites, counts))
        copies = self._copies(users)
        smooth_s = np.concatenate([self.tokens.smooth_s(tokens), self.copies.smooth_s(copies)])
        value = self._value(smooth_s, tokens, copies, served)
        return Trial(sites=sites, rows=rows, counts=counts, users=users, served=served, tokens=tokens, copies=copies, value=value)

    def accept(self, trial: Trial) -> None:
        """Go there."""
        self.table[trial.sites], self.counts[trial.sites] = trial.rows, trial.counts
        self.users, self.served, self.value = trial.users, trial.served, trial.value
        self.tokens.accept(trial.tokens)
        self.copies.accept(trial.copies)
        # [4] as ``unit_bytes``, seconds per unit's byte.
        self.busiest_s = np.concatenate([self.tokens.busiest_s(trial.tokens), self.copies.busiest_s(trial.copies)])
        self.busiest_value = self._value(self.busiest_s, trial.tokens, trial.copies, trial.served)

    @property
    def exchanges_s(self) -> FloatArray:
        """[4]: what the busiest links take in a layer's step for tokens there and back, and for copies there and back."""
        return np.asarray(self.busiest_s * self.unit_bytes)

    def _value(self, links_s: FloatArray, tokens: Changed, copies: Changed, served: FloatArray) -> float:
        """``links_s`` is [4], as ``busiest_s``."""
        problem, wire = self.problem, self.problem.wire
        there_s, back_s, gather_s, return_s = links_s.tolist()
        (far_s, near_s), (gather_far_s, return_far_s) = tokens.latencies_s.tolist(), copies.latencies_s.tolist()
        exchanges_s = NOTHING_S | {
            Op.TOKEN_COUNTS: far_s,
            Op.TOKEN_DISPATCH: far_s + there_s * wire.dispatch_row_bytes,
            Op.COMBINE_BACKWARD: far_s + there_s * wire.combine_row_bytes,
            Op.TOKEN_COMBINE: near_s + back_s * wire.combine_row_bytes,
            Op.DISPATCH_BACKWARD: near_s + back_s * wire.dispatch_gradient_row_bytes,
            Op.EXPERT_GATHER: gather_far_s + gather_s * wire.expert_bytes,
            Op.GRADIENT_RETURN: return_far_s + return_s * wire.expert_gradient_bytes,
        }
        block = timed_block(problem.compute, served[:, None], np.zeros(1), exchanges_s, {})
        times = layer_times(block, problem.workload.training.micro_batches, self.residency, problem.schedule)
        step_s, egress_usd = problem.num_layers * times.total_s, 0.0
        if problem.egress_usd_per_byte is not None:
            egress_usd = problem.num_layers * float(np.concatenate([tokens.usd, copies.usd]) @ self.unit_bytes)
        return problem.goal.value(step_s, step_usd(self.rent_usd_per_s, egress_usd, step_s))

    def _copies(self, users: IntArray) -> Changed:
        """With other ``users``."""
        more = ((users > 0).astype(np.int64) - (self.users > 0)) * ~self.is_home
        holder, expert = np.nonzero(more)
        if len(expert) == 0:
            return self.copies.now
        homes, row = np.unique(self.problem.home_site[expert], return_inverse=True)
        units = self.copies.units[homes]
        np.add.at(units, (row, holder), more[holder, expert])
        return self.copies.changed(homes, units)

    def _counts(self, rows: IntArray) -> IntArray:
        """[k, D] of rows [k, E]."""
        size = self.problem.num_sites
        cells = np.arange(len(rows))[:, None] * size + rows
        return np.bincount(cells.ravel(), minlength=len(rows) * size).reshape(-1, size)

    def _rows(self, sites: IntArray, counts: IntArray) -> FloatArray:
        """[k, D]: rows of tokens that all ranks of each of ``sites`` send."""
        rows = (self.problem.num_inside * self.problem.tokens[sites])[:, None] * self.problem.hit[counts]
        rows[np.arange(len(sites)), sites] = 0.0
        return np.asarray(rows)
