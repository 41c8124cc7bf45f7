"""The plan: serving tables from token groups, improved by local search under the exact cost.

Deterministic: a fixed seed, and limits that count evaluations; a deadline only ever cuts the search short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridep.placement import IntArray
from hybridep.plan import Residency
from planner.clock import now_s
from planner.cost import BlockTimes
from planner.domains import divisors
from planner.sites.cost import SiteCost, block_times, cost_of
from planner.sites.exchange import LayerExchanges, between_sites, with_inside
from planner.sites.grouping import (
    MANY,
    Groups,
    Share,
    assign,
    distance,
    estimate_s,
    even_groups,
    groups_of,
    grown_groups,
    nearest_groups,
    shares,
)
from planner.sites.hubs import best_hubs, hub_table, served_table
from planner.sites.problem import Configuration, Inside, SiteProblem
from planner.sites.spread import best_spread, equal_spread, spread_table

SHARES = (Share(), Share(power=0.5), Share(power=1.0), Share(holders=1), Share(holders=2))
"""Ways for the members of a group to share the experts."""


FEWER_USERS = 0.85
"""How much fewer users each hub is given in the next attempt, at least one."""
LIKELY = 4
"""Among many sites, numbers of groups that are tried: those of the best estimates."""


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
    scenarios: tuple[SiteProblem, ...] = ()
    """The same sites and work with other links, of which ``quantile`` counts; the problem alone when absent."""
    quantile: float = 1.0
    keep: int = 1
    """How many plans that differ are kept in ``pool``."""
    best: Found | None = None
    pool: list[Found] = field(default_factory=list)
    """The best plans that fit and differ from every better one, best first."""
    evaluations: int = 0
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

    def evaluate(self, table: IntArray) -> Found:
        """Cost of a table in its best configuration, made to keep the problem's rules first; remembers the best table."""
        if self.problem.permissions is not None:
            table = self.problem.permissions.repaired(table, self.problem.home_site)
        key = table.tobytes()
        if key in self._seen:
            return self._seen[key]
        self.evaluations += 1
        goal = self.problem.goal
        found: Found | None = None
        layers: dict[Inside, tuple[LayerExchanges, list[BlockTimes]]] = {}
        between = between_sites(self.problem, table)
        for configuration in self.configurations:
            if configuration.inside not in layers:
                layer = with_inside(self.problem, between, configuration.inside)
                layers[configuration.inside] = layer, [block_times(one, layer) for one in self.scenarios]
            layer, times = layers[configuration.inside]
            costs = [
                cost_of(one, layer, configuration.residency, known) for one, known in zip(self.scenarios, times, strict=True)
            ]
            cost = costs[0]
            missing = 0 if cost.fits else max(int(cost.memory_bytes - cost.capacity_bytes), 1)
            if overdraft := goal.overdraft(cost.step_usd):
                missing += math.ceil(cost.capacity_bytes * overdraft)
            rank = missing, at_quantile([goal.value(one.step_s, one.step_usd) for one in costs], self.quantile)
            if found is None or rank < found.rank:
                found = Found(table=table, configuration=configuration, cost=cost, rank=rank)
        assert found is not None
        if len(self._seen) < 20000 and table.size < 100000:
            self._seen[key] = found
        if self.keep > 1 and found.rank[0] == 0:
            self._pool(found)
        if self.best is None or found.rank < (self.best.rank[0], self.best.rank[1] * (1 - 1e-12)):
            self.best = found
            if self.report is not None and found.rank[0] == 0:
                self.report(found.rank[1])
        return found

    def _pool(self, found: Found) -> None:
        if len(self.pool) == self.keep and found.rank >= self.pool[-1].rank:
            return
        if any(one.rank <= found.rank and alike(one, found) for one in self.pool):
            return
        self.pool = [one for one in self.pool if not alike(one, found)]
        self.pool = sorted([*self.pool, found], key=lambda one: one.rank)[: self.keep]


DIFFERENT = 0.05
"""Plans are told apart where at least this share of (site, expert) entries differ, or what is chosen beside the table."""


def alike(a: Found, b: Found) -> bool:
    """Hardly any entry differs."""
    return a.configuration == b.configuration and float((a.table != b.table).mean()) < DIFFERENT


def at_quantile(values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least this share of ``values`` does not exceed; 1 is the worst."""
    return sorted(values)[max(math.ceil(quantile * len(values) - 1e-9), 1) - 1]


def starts(problem: SiteProblem) -> Iterator[tuple[str, IntArray]]:
    """Named tables that need no search: expert parallelism, full gather, and the paper's domains in rank order."""
    size = problem.num_sites
    sites = np.arange(size)[:, None]
    for domain in divisors(size):
        home = problem.home_site[None, :]
        yield f"domains of {domain} in rank order", home // domain * domain + sites % domain


def group_starts(problem: SiteProblem, counts: Iterable[int], sharing: Sequence[Share]) -> Iterator[tuple[Groups, Share]]:
    """Groups of near sites, or of equal strength, of every number of groups in ``counts``, and how members share."""
    apart = [] if problem.pair_bytes_per_s is None else [distance(problem), problem.latency_s + problem.latency_s.T]
    has_pods = any(site.part_of is not None for site in problem.cluster.sites)
    for count in counts:
        made = [even_groups(problem, count), *(nearest_groups(one, count) for one in apart)]
        if has_pods:
            made.append(grown_groups(distance(problem), count))
        for groups in dict.fromkeys(made):
            for share in sharing:
                yield groups, share


def group_counts(size: int) -> list[int]:
    """Numbers of groups worth a try: all up to 16, then ever sparser."""
    few = {*range(1, min(size, 16) + 1), *(round(16 * 1.25**i) for i in range(1, 40))}
    return sorted((few | {count for count in divisors(size) if count >= size // 16}) & set(range(1, size + 1)))


def run(search: Search, *, seed: int = 0) -> None:
    """All starts, then local search from the best ones."""
    problem = search.problem
    large = problem.num_sites > MANY
    if not large:
        for _, table in starts(problem):
            search.evaluate(np.ascontiguousarray(table))
    # Hubs first among many sites, where the time may be over before all groups are tried.
    hubs_are_best = large and not problem.equal_sites and try_best_hubs(search)
    if problem.equal_sites and not search.over and (spread := equal_spread(problem)) is not None:
        search.evaluate(spread_table(problem, spread))
    tried: list[tuple[tuple[int, float], Groups, Share]] = []
    seen: set[tuple[Groups, Share]] = set()
    counts = group_counts(problem.num_sites)
    if large:
        counts = sorted(sorted(counts, key=lambda count: estimate_s(problem, count))[:LIKELY])
    for groups, share in group_starts(problem, counts, SHARES[:1] if problem.equal_sites or hubs_are_best else SHARES):
        if search.over:
            return
        if (groups, share) not in seen:
            seen.add((groups, share))
            table = table_of(problem, groups, {members: shares(problem, members, share) for members in groups})
            tried.append((search.evaluate(table).rank, groups, share))
    if not large and not problem.equal_sites:
        try_best_hubs(search)
    if large and not problem.equal_sites and not hubs_are_best:
        _try_hubs(search)
    tried.sort(key=lambda entry: entry[0])
    if large and (problem.equal_sites or hubs_are_best):
        return  # a single move hardly changes the step of many sites, and takes as long to cost as all of them
    rng = np.random.default_rng(seed)
    budget = search.max_evaluations
    for rank, (_, groups, share) in enumerate(tried[:3]):
        search.max_evaluations = search.evaluations + (budget - search.evaluations) // (8 - 2 * rank)
        improve_groups(search, groups, share, rng)
    search.max_evaluations = budget
    if search.best is not None:
        improve_table(search, search.best.table, rng)


def try_best_hubs(search: Search) -> bool:
    """The best hubs for the links alone, then with ever fewer users each, until memory lets copies stay and fewer do not help;
    each with everything, and without what users find elsewhere. True if one of these is best then, and its copies stay."""
    problem = search.problem
    ranks: dict[int, tuple[int, float]] = {}

    def attempt(most_users: int) -> Found | None:
        # Whatever the time limit, one plan is looked at: finding hubs among many sites may take all of a short one.
        late = search.over and search.best is not None
        plan = best_hubs(problem, most_users) if most_users > 0 and most_users not in ranks and not late else None
        if plan is None:
            return None
        found = search.evaluate(served_table(problem, plan))
        if not search.over and (spread := best_spread(problem, plan)).left_out.any():
            found = min(found, search.evaluate(spread_table(problem, spread)), key=lambda one: one.rank)
        ranks[most_users] = found.rank
        return found

    most = problem.num_sites
    plan = best_hubs(problem, most)
    while plan is not None and most > 1:
        most = min(int(plan.rooms.max()), most - 1, int(most * FEWER_USERS) if ranks else most)
        found = attempt(most)
        if found is None or found.configuration is None:
            break
        if found.rank > min(ranks.values()) and found.configuration.residency is Residency.STEP:
            break
    if ranks:
        best = min(ranks, key=lambda users: ranks[users])
        attempt(best + 1)
        attempt(best - 1)
    found = search.best
    if not ranks or found is None or found.configuration is None or found.rank > min(ranks.values()):
        return False
    return found.rank[0] == 0 and found.configuration.residency is Residency.STEP


def _try_hubs(search: Search) -> None:
    """Ever more hubs of one site, then near the best number, then as many hubs of two sites that share the experts."""
    size = search.problem.num_sites
    ranks: dict[tuple[int, int], tuple[int, float]] = {}

    def attempt(count: float, team: int) -> None:
        key = max(2, round(count)), team
        if key not in ranks and key[0] * team <= size and not search.over:
            ranks[key] = search.evaluate(hub_table(search.problem, *key)).rank

    for step in range(2, 12):
        attempt(size * 2.0 ** (-step / 2), 1)
    for stride in (2**0.25, 2**0.125, 2**0.0625):
        if ranks:
            middle = min(ranks, key=lambda key: ranks[key])[0]
            attempt(middle * stride, 1)
            attempt(middle / stride, 1)
    if ranks:
        middle = min(ranks, key=lambda key: ranks[key])[0]
        attempt(middle / 2, 2)
        attempt(middle, 2)


def table_of(problem: SiteProblem, groups: Groups, targets: dict[tuple[int, ...], IntArray]) -> IntArray:
    """[D, E] for groups and the number of experts that each member holds."""
    table = np.empty((problem.num_sites, problem.num_experts), dtype=np.int64)
    for members in groups:
        table[list(members)] = assign(problem, members, targets[members])
    return table


def improve_groups(search: Search, groups: Groups, share: Share, rng: np.random.Generator) -> None:
    """Move a site to another group, or swap two, while it helps."""
    problem = search.problem
    size = problem.num_sites
    label = np.empty(size, dtype=np.int64)
    for number, members in enumerate(groups):
        label[list(members)] = number

    def value(labels: IntArray) -> tuple[int, float]:
        made = groups_of(labels)
        return search.evaluate(table_of(problem, made, {m: shares(problem, m, share) for m in made})).rank

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


KICKS = 8
"""How often the search leaves a plan that no move improves, by a few moves taken whatever they cost."""


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
