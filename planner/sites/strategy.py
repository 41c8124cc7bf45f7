"""Which serving tables are tried, and in which order: token groups and hubs, then local search from the best of them.

Deterministic: a fixed seed, and limits that count evaluations; a deadline only ever cuts the search short.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hybridep.placement import divisors
from hybridep.plan import Residency
from planner.sites.grouping import (
    MANY,
    Groups,
    Share,
    distance,
    estimate_s,
    even_groups,
    grown_groups,
    nearest_groups,
    shared_table,
)
from planner.sites.hubs import HubPlan, best_hubs, hub_table, served_table
from planner.sites.others import full_gather, rank_order_domains
from planner.sites.problem import SiteProblem
from planner.sites.relief import relieved_table
from planner.sites.search import Found, Search
from planner.sites.spread import Spread, best_spreads, equal_spread, own_counts, spread_table

SHARES = (Share(), Share(power=0.5), Share(power=1.0), Share(holders=1), Share(holders=2))
"""Ways for the members of a group to share the experts."""
FEWER_USERS = 0.85
"""How much fewer users each hub is given in the next attempt, at least one."""
SPREADS = 3
"""Ways to leave experts out that are tried with so many users: estimates are right about the order to a percent."""
OWN_SHARES, FOR_MEMORY = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5), 0.85
"""How long hubs' links may take for copies, over what the slowest hub's take for all that it does not leave out, while users hold
the rest; and down to where that is tried for hubs' memory alone."""
APART = 0.15
"""Walks begin at the best tables that differ from each other in this share of their entries."""
MENDING = 0.25
"""Evaluations to make tables fit, over those of the search before walks."""
MOST_SITES, MOST_EQUAL = 384, 64
"""With more sites, or more equal ones, walks gain nothing in the time there is, and the bound needs it."""
LEAST_ROUND, MOST_ROUNDS = 0.375, 3
"""Walks begin again from the same tables with other random moves, as often as each round has this share of a minute's moves or
more: where luck decides, two rounds end better than one that is twice as long."""
LIKELY = 4
"""Among many sites, numbers of groups that are tried: those of the best estimates."""


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


def begin(search: Search) -> None:
    """Domains in rank order, hubs and groups."""
    problem = search.problem
    large = is_large(problem)
    for table in rank_order_domains(problem) if problem.equal_sites or not large else full_gather(problem):
        search.evaluate(table)
    # Hubs first among many sites, where the time may be over before all groups are tried.
    hubs_are_best = large and not problem.equal_sites and try_best_hubs(search)
    if problem.equal_sites and not search.over and (spread := equal_spread(problem)) is not None:
        search.evaluate(spread_table(problem, spread))
    counts = group_counts(problem.num_sites)
    if large:
        counts = sorted(sorted(counts, key=lambda count: estimate_s(problem, count))[:LIKELY])
    for groups, share in group_starts(problem, counts, SHARES[:1] if problem.equal_sites or hubs_are_best else SHARES):
        if search.over:
            break
        search.evaluate(shared_table(problem, groups, share))
    if not large and not problem.equal_sites:
        try_best_hubs(search)
    if large and not problem.equal_sites and not hubs_are_best:
        _try_hubs(search)


def walk(search: Search) -> None:
    """Walks from the best tables that were looked at."""
    problem = search.problem
    from planner.sites.walks import fitting, helped, improve_tables, pace_of  # numba takes a while to import

    mending = round(MENDING * search.max_evaluations * min(search.walks_share, 1.0))
    search.max_evaluations, pace = sys.maxsize, pace_of(problem)  # walks end by themselves
    rounds = int(np.clip(search.walks_share / LEAST_ROUND, 1, MOST_ROUNDS))
    # However short the time, tables are costed twice.
    moves = max(round(pace.moves * min(search.walks_share / rounds, 1.0)), min(2 * pace.stretch, pace.moves))
    rng = np.random.default_rng(0)
    tables = fitting(search, search.best_apart(pace.walks, APART), mending, rng)
    for _ in range(rounds):
        improve_tables(search, tables, moves, rng)
        if search.best is None or not helped(tables[0], search.best):
            break


def is_large(problem: SiteProblem) -> bool:
    """Too many sites to try everything: hubs are the first thing to try where only access links limit."""
    return problem.num_sites > (MANY if problem.pair_bytes_per_s is None else MOST_SITES)


def walks_help(problem: SiteProblem) -> bool:
    """Whether there are few enough sites."""
    return problem.num_sites <= (MOST_EQUAL if problem.equal_sites else MOST_SITES)


def try_best_hubs(search: Search) -> bool:
    """The best hubs for the links alone, then with ever fewer users each, until memory lets copies stay and fewer do not help;
    each with everything, without what users find elsewhere, and without what users hold themselves. True if one of these is best
    then, and its copies stay."""
    problem = search.problem
    ranks: dict[int, tuple[int, float]] = {}

    def attempt(most_users: int, plan: HubPlan | None = None) -> Found | None:
        # Whatever the time limit, one plan is looked at: finding hubs among many sites may take all of a short one.
        late = search.over and search.best is not None
        if most_users < 1 or most_users in ranks or late:
            return None
        plan = plan or best_hubs(problem, most_users)
        if plan is None:
            return None
        tables = [search.evaluate(served_table(problem, plan)), *_leaving_out(search, plan, most_users)]
        found = min(tables, key=lambda one: one.rank)
        ranks[most_users] = found.rank
        return found

    most = problem.num_sites
    plan = best_hubs(problem, most)
    while plan is not None and most > 1:
        most = min(int(plan.rooms.max()), most - 1, int(most * FEWER_USERS) if ranks else most)
        # No hub of the first has more users than that.
        found = attempt(most, None if ranks else plan)
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
    return _copies_stay(found)


def _leaving_out(search: Search, plan: HubPlan, most_users: int) -> list[Found]:
    """The likeliest ways to leave experts out, and the best of them with what users hold themselves."""
    made: list[tuple[Found, Spread]] = []
    for spread in [] if search.over else best_spreads(search.problem, plan, most_users)[:SPREADS]:
        made.append((_spread_over(search, spread, 1.0), spread))
        # Where memory is too short even for copies that do not stay, others like it need not be tried.
        if search.over or made[-1][0].rank[0] > 0:
            break
    if not made:
        return []
    # Where copies stay with none of them, the one that would be fastest if they did.
    best = min(made, key=lambda one: one[0].rank)
    best = best if _copies_stay(best[0]) else made[0]
    return [*(found for found, _ in made), *([_with_own(search, *best)] if best[0].rank[0] == 0 else [])]


def _spread_over(search: Search, spread: Spread, share: float) -> Found:
    """With what users hold themselves so that hubs' links take this share of the time for copies."""
    own = own_counts(search.problem, spread, share)
    table = spread_table(search.problem, spread, own=own)
    relieved = relieved_table(search.problem, spread, table, own)
    return search.evaluate(table if relieved is None else relieved)


def _with_own(search: Search, found: Found, spread: Spread) -> Found:
    """Users hold ever more themselves as long as that helps; or, where memory lets no copies stay, until it does."""
    for share in OWN_SHARES:
        stays = _copies_stay(found)
        if search.over or (share < FOR_MEMORY and not stays):
            break
        made = _spread_over(search, spread, share)
        if stays and made.rank >= found.rank:
            break
        found = min(found, made, key=lambda one: one.rank)
    return found


def _copies_stay(found: Found) -> bool:
    return found.rank[0] == 0 and found.configuration is not None and found.configuration.residency is Residency.STEP


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
