"""What a search over serving tables has evaluated: the best of them, and the best that differ, under the exact cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hybridep.arrays import IntArray
from hybridep.recompute import Recompute
from planner.clock import now_s
from planner.layer_times import BlockTimes
from planner.sites.cost import SiteCost, block_times, cost_of
from planner.sites.exchange import LayerExchanges, between_sites, with_inside
from planner.sites.problem import Configuration, Inside, SiteProblem

SHORT = 1e-3
"""Memory is short where a plan that lacks it would take less by this share."""
DIFFERENT = 0.05
"""Plans are told apart where at least this share of (site, expert) entries differ, or what is chosen beside the table."""
LARGE = 100_000
"""Entries of a table from which on those that were looked at are not remembered."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """A serving table with its best configuration that fits, or None where none does."""

    table: IntArray
    configuration: Configuration | None
    cost: SiteCost | None
    rank: tuple[int, float]
    """What the search compares: first the bytes that are missing, and what a budget is overstepped by as the same share of the
    memory; then seconds, or dollars if those are the goal."""


@dataclass(kw_only=True)
class Search:
    """State of one search."""

    problem: SiteProblem
    deadline_s: float = float("inf")
    """Of ``planner.clock``."""
    max_evaluations: int = 6000
    walks_share: float = 1.0
    """How much of a minute's moves walks make."""
    scenarios: tuple[SiteProblem, ...] = ()
    """The same sites and work with other links, of which ``quantile`` counts; the problem alone when absent."""
    quantile: float = 1.0
    keep: int = 1
    """How many plans that differ are kept in ``pool``."""
    best: Found | None = None
    pool: list[Found] = field(default_factory=list)
    """The best plans that fit and differ from every better one, best first."""
    evaluations: int = 0
    least: float = math.inf
    """Least seconds, or dollars, of all plans that were looked at and are within the budget, whether they fit or not."""
    report: Callable[[float], None] | None = None
    configurations: tuple[Configuration, ...] = ()
    _seen: dict[bytes, Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.configurations = self.configurations or self.problem.configurations()
        self.scenarios = self.scenarios or (self.problem,)

    @property
    def over(self) -> bool:
        """Time or evaluations are used up."""
        return self.evaluations >= self.max_evaluations or now_s() >= self.deadline_s

    @property
    def is_short(self) -> bool:
        """Nothing fits, or what lacks memory would be better than all that does."""
        return self.best is None or self.best.rank[0] > 0 or self.least < self.best.rank[1] * (1 - SHORT)

    def evaluate(self, table: IntArray, configuration: Configuration | None = None) -> Found:
        """Cost of a table in its best configuration, or in this one, made to keep the problem's rules first; remembers the best
        table."""
        if self.problem.permissions is not None:
            table = self.problem.permissions.repaired(table, self.problem.home_site)
        key = table.tobytes()
        if key in self._seen:
            return self._seen[key]
        self.evaluations += 1
        goal = self.problem.goal
        found: Found | None = None
        layers: dict[tuple[Inside, ...], tuple[LayerExchanges, list[BlockTimes]]] = {}
        between = between_sites(self.problem, table)
        for tried in self.configurations if configuration is None else (configuration,):
            if tried.inside not in layers:
                layer = with_inside(self.problem, between, tried.inside)
                layers[tried.inside] = layer, [block_times(one, layer) for one in self.scenarios]
            layer, times = layers[tried.inside]
            costs = [cost_of(one, layer, tried.residency, known) for one, known in zip(self.scenarios, times, strict=True)]
            cost = costs[0]
            missing = 0 if cost.fits else max(int(cost.memory_bytes - cost.capacity_bytes), 1)
            value = at_quantile([goal.value(one.step_s, one.step_usd) for one in costs], self.quantile)
            if overdraft := goal.overdraft(cost.step_usd):
                missing += math.ceil(cost.capacity_bytes * overdraft)
            else:
                self.least = min(self.least, value)
            rank = missing, value
            if found is None or rank < found.rank:
                found = Found(table=table, configuration=tried, cost=cost, rank=rank)
        assert found is not None
        if configuration is None and len(self._seen) < 20000 and table.size < LARGE:
            self._seen[key] = found
        if self.keep > 1 and found.rank[0] == 0:
            self._pool(found)
        if self.best is None or found.rank < (self.best.rank[0], self.best.rank[1] * (1 - 1e-12)):
            self.best = found
            if self.report is not None and found.rank[0] == 0:
                self.report(found.rank[1])
        return found

    def once_more(self, recompute: Recompute, count: int, apart: float) -> Search:
        """A search of its own, where all layers compute again: at most so many of the best tables that fit here, and of the best
        of all, looked at once more."""
        again = Search(
            problem=replace(self.problem, recompute=recompute),
            deadline_s=self.deadline_s,
            max_evaluations=self.max_evaluations,
            walks_share=self.walks_share,
            scenarios=tuple(replace(one, recompute=recompute) for one in self.scenarios),
            quantile=self.quantile,
            keep=self.keep,
        )
        for found in (*self.best_apart(count, apart), *self.best_apart(count, apart, by_memory=False)):
            again.evaluate(found.table)
        return again

    def best_apart(self, count: int, apart: float, *, by_memory: bool = True) -> list[Found]:
        """At most so many of the tables looked at, each of which differs from all before in this share of entries: the best first
        of those that fit (unless not ``by_memory``), and then of the others, whatever they miss. Of large tables the best
        alone."""
        chosen: list[Found] = []
        for one in sorted(
            self._seen.values() or filter(None, [self.best]),
            key=lambda found: (by_memory and found.rank[0] > 0, found.rank[1]),
        ):
            if len(chosen) < count and all(float((one.table != other.table).mean()) >= apart for other in chosen):
                chosen.append(one)
        return chosen

    def _pool(self, found: Found) -> None:
        if len(self.pool) == self.keep and found.rank >= self.pool[-1].rank:
            return
        if any(one.rank <= found.rank and alike(one, found) for one in self.pool):
            return
        self.pool = [one for one in self.pool if not alike(one, found)]
        self.pool = sorted([*self.pool, found], key=lambda one: one.rank)[: self.keep]


def alike(a: Found, b: Found) -> bool:
    """Hardly any entry differs."""
    return a.configuration == b.configuration and float((a.table != b.table).mean()) < DIFFERENT


def at_quantile(values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least this share of ``values`` does not exceed; 1 is the worst."""
    return sorted(values)[max(math.ceil(quantile * len(values) - 1e-9), 1) - 1]
