"""Local search: moves on groups of sites, then on the serving table itself."""

from __future__ import annotations

import numpy as np

from hybridep.placement import IntArray
from planner.sites.grouping import Groups, Share, groups_of, shared_table
from planner.sites.search import Search

KICKS = 8
"""How often the search leaves a plan that no move improves, by a few moves taken whatever they cost."""


def improve_groups(search: Search, groups: Groups, share: Share, rng: np.random.Generator) -> None:
    """Move a site to another group, or swap two, while it helps."""
    problem = search.problem
    size = problem.num_sites
    label = np.empty(size, dtype=np.int64)
    for number, members in enumerate(groups):
        label[list(members)] = number

    def value(labels: IntArray) -> tuple[int, float]:
        return search.evaluate(shared_table(problem, groups_of(labels), share)).rank

    here = value(label)
    patience = 0
    while patience < 8 * size and not search.over:
        trial = label.copy()
        if rng.random() < 0.5:
            trial[rng.integers(size)] = rng.integers(label.max() + 2)
        else:
            a, b = rng.integers(size, size=2)
            trial[a], trial[b] = label[b], label[a]
        there = value(trial)
        patience = 0 if there < here else patience + 1
        if there <= here:
            label, here = trial, there


def improve_table(search: Search, table: IntArray, rng: np.random.Generator) -> None:
    """Moves on the table itself: some experts of a group get another holder, a site joins another group's row, a site
    serves some experts itself, or a holder is relieved; kept while none makes it worse. Where nothing helps any more, from
    the best table with a few moves taken blindly."""
    size, experts = search.problem.num_sites, search.problem.num_experts
    _descend(search, table, rng, 150 * size)
    for kick in range(KICKS):
        if search.over or search.best is None:
            return
        table = search.best.table
        for _ in range(2 + kick % 3):
            table = _moved(table, rng, size, experts)
        _descend(search, table, rng, 30 * size)


def _descend(search: Search, table: IntArray, rng: np.random.Generator, patience: int) -> None:
    size, experts = search.problem.num_sites, search.problem.num_experts
    here = search.evaluate(table).rank
    idle = 0
    while idle < patience and not search.over:
        trial = _moved(table, rng, size, experts)
        there = search.evaluate(trial).rank
        idle = 0 if there < (here[0], here[1] * (1 - 1e-6)) else idle + 1
        if there <= here:
            table, here = trial, there


def _moved(table: IntArray, rng: np.random.Generator, size: int, experts: int) -> IntArray:
    trial = table.copy()
    d = int(rng.integers(size))
    alike = np.flatnonzero((table == table[d]).all(axis=1)) if rng.random() < 0.7 else np.array([d])
    kind = rng.random()
    if kind < 0.15:
        trial[alike] = table[rng.integers(size)]
        return trial
    holder = table[d, rng.integers(experts)]
    own = np.flatnonzero(table[d] == holder)
    count = len(own) if kind < 0.35 else int(rng.integers(1, max(2, len(own) // 2 + 1)))
    some = rng.choice(own, size=count, replace=False)
    if kind < 0.5:
        trial[np.ix_(alike, some)] = d
    elif kind < 0.6:
        trial[np.ix_(alike, some)] = rng.choice(table[d], size=count)
    else:
        trial[np.ix_(alike, some)] = rng.integers(size)
    return trial
