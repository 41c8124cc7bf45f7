"""Who holds which expert and who computes it for whom: the meaning of a plan, as tables that every other part reads.

A token of the rank at location ``x`` that chose expert ``e`` is served by the rank at
``(serve[0][x_0, e], ..., serve[L-1][x_{L-1}, e])``; it goes there one level at a time, outermost first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from hybridep.arrays import BoolArray, IntArray
from hybridep.errors import PlacementError
from hybridep.shares import apportion
from hybridep.topology import Cluster


@dataclass(frozen=True, kw_only=True)
class LevelChoice:
    """One level's expert domain: its size, and the share of each home's experts that its members copy (hottest first)."""

    domain_size: int = 1
    migration_ratio: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Move:
    """Experts that one rank sends to another when copies are gathered (and gets gradients back for)."""

    level: int
    src: int
    dst: int
    experts: tuple[int, ...]


def expert_homes(num_experts: int, num_gpus: int) -> IntArray:
    """[E]: the rank that owns each expert: contiguous blocks whose sizes differ by at most one; where there are fewer
    experts than ranks, the homes are spread evenly."""
    return np.arange(num_experts, dtype=np.int64) * num_gpus // num_experts


@lru_cache(maxsize=64)
def divisors(size: int) -> tuple[int, ...]:
    """Domain sizes of a level of ``size`` workers, ascending."""
    return tuple(d for d in range(1, size + 1) if size % d == 0)


def home_blocks(cluster: Cluster, num_experts: int) -> IntArray:
    """[E]: the rank that owns each expert, as many at each site as ``Site.experts`` says, site after site: contiguous blocks
    where every rank has one, else spread over ranks of all places (`_spread`)."""
    weights = cluster.home_weights
    if np.ptp(weights) > 0:
        numbers = apportion(num_experts, weights)
    elif num_experts >= cluster.num_gpus:
        return expert_homes(num_experts, cluster.num_gpus)
    else:
        numbers = np.bincount(expert_homes(num_experts, cluster.sizes[0]), minlength=cluster.sizes[0])
    return homes_of(numbers, cluster.sizes)


def homes_of(numbers: IntArray, sizes: tuple[int, ...]) -> IntArray:
    """[E]: the same where sites have so many experts, at levels of these ``sizes``, sites first."""
    inside = math.prod(sizes[1:])
    if min(numbers[numbers > 0]) < inside:
        return _spread(tuple(numbers.tolist()), sizes).copy()
    return np.concatenate([dc * inside + expert_homes(int(number), inside) for dc, number in enumerate(numbers) if number])


@lru_cache(maxsize=8)
def _spread(numbers: tuple[int, ...], sizes: tuple[int, ...]) -> IntArray:
    """[E], in the order of ranks: who owns each expert where sites have so many, at levels of these ``sizes``, sites first: as
    many on each worker, and in whatever domains sites or other workers are, as many at each place inside them. So copies are
    spread over ranks, too: those at one place in their nodes would be, and be computed, on one rank."""
    sites = np.repeat(np.arange(len(numbers)), numbers)
    ranks = np.zeros(len(sites), dtype=np.int64)
    used: dict[tuple[int, ...], IntArray] = {}
    for expert, site in enumerate(sites.tolist()):
        place = [site]
        for level, size in enumerate(sizes[1:], start=1):
            # Experts by coordinate at this level: of this worker, of domains that it may be in, small ones first, and of all.
            keys = [(level, *place)]
            for outer in reversed(range(level)):
                for domain in divisors(sizes[outer])[1:]:
                    keys.append((level, outer, domain, *place[:outer], place[outer] // domain, *place[outer + 1 :]))
            counts = [used.setdefault(key, np.zeros(size, dtype=np.int64)) for key in (*keys, (level,))]
            chosen = int(np.lexsort(counts[::-1])[0])
            for count in counts:
                count[chosen] += 1
            place.append(chosen)
            ranks[expert] = ranks[expert] * size + chosen
    return np.sort(sites * math.prod(sizes[1:]) + ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Serving tables of one group of layers on one cluster."""

    sizes: tuple[int, ...]
    home: IntArray
    """[E]: global rank of each expert's master weights and optimizer state."""
    serve: tuple[IntArray, ...]
    """Per level l: [SF_l, E], the coordinate at level l where an expert is computed for tokens of coordinate x_l."""

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.home)

    @property
    def num_gpus(self) -> int:
        """G."""
        return math.prod(self.sizes)

    @cached_property
    def num_at_home(self) -> IntArray:
        """[G]: experts that live on each rank."""
        return np.bincount(self.home, minlength=self.num_gpus).astype(np.int64)

    @cached_property
    def home_coordinates(self) -> IntArray:
        """[L, E]: the location of each expert's home."""
        return np.stack(np.unravel_index(self.home, self.sizes)).astype(np.int64)

    @cached_property
    def coordinates(self) -> IntArray:
        """[G, L]: the location of each rank."""
        return np.stack(np.unravel_index(np.arange(self.num_gpus), self.sizes), axis=1).astype(np.int64)

    @cached_property
    def holds_at(self) -> tuple[BoolArray, ...]:
        """Per level: [SF_l, E], true where that coordinate is a holder (the home's own, or one that serves somebody)."""
        tables = []
        for level, serve in enumerate(self.serve):
            table = np.zeros(serve.shape, dtype=np.bool_)
            experts = np.arange(self.num_experts)
            table[self.home_coordinates[level], experts] = True
            table[serve, experts[None, :]] = True
            tables.append(table)
        return tuple(tables)

    @cached_property
    def holds(self) -> BoolArray:
        """[G, E]: true where a rank has the expert's weights during a step."""
        held = np.ones((self.num_gpus, self.num_experts), dtype=np.bool_)
        for level, table in enumerate(self.holds_at):
            held &= table[self.coordinates[:, level]]
        return held

    @cached_property
    def serving_rank(self) -> IntArray:
        """[G, E]: the rank that computes expert e for tokens of each rank."""
        return self.reached(len(self.serve))

    def reached(self, num_hops: int) -> IntArray:
        """[G, E]: where tokens of each rank for expert e are after so many hops."""
        ranks = np.zeros((self.num_gpus, self.num_experts), dtype=np.int64)
        for level, serve in enumerate(self.serve):
            own = self.coordinates[:, level]
            ranks = ranks * self.sizes[level] + (serve[own] if level < num_hops else own[:, None])
        return ranks

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All transfers of one gather, outermost level first, then by source and destination. At a level, the ranks that
        hold an expert after the outer levels (at the home's inner coordinates) send it to the level's other holders."""
        moves = []
        strides = [math.prod(self.sizes[level + 1 :]) for level in range(len(self.sizes))]
        reached = np.zeros((self.num_gpus, self.num_experts), dtype=np.bool_)
        reached[self.home, np.arange(self.num_experts)] = True
        for level, table in enumerate(self.holds_at):
            sent = reached.copy()
            for src in np.flatnonzero(reached.any(axis=1)):
                own = self.coordinates[src, level]
                for coordinate in range(self.sizes[level]):
                    experts = np.flatnonzero(reached[src] & table[coordinate])
                    if coordinate == own or not len(experts):
                        continue
                    dst = int(src + (coordinate - own) * strides[level])
                    sent[dst, experts] = True
                    moves.append(Move(level=level, src=int(src), dst=dst, experts=tuple(int(e) for e in experts)))
            reached = sent
        return tuple(moves)

    @property
    def num_moved(self) -> tuple[IntArray, ...]:
        """Per level: [G, SF_l], how many experts each rank sends to each coordinate in one gather; the sizes of ``moves``
        without listing them."""
        return tuple(moved for moved, _ in self._moved)

    @property
    def num_sent(self) -> tuple[IntArray, ...]:
        """Per level: [G], how many different experts each rank sends in one gather."""
        return tuple(sent for _, sent in self._moved)

    @cached_property
    def _moved(self) -> tuple[tuple[IntArray, IntArray], ...]:
        """Per level (``num_moved``, ``num_sent``)."""
        shape = (*self.sizes, self.num_experts)
        reached = np.zeros((self.num_gpus, self.num_experts), dtype=np.bool_)
        reached[self.home, np.arange(self.num_experts)] = True
        counts = []
        for level, table in enumerate(self.holds_at):
            sent = (reached.astype(np.float64) @ table.T.astype(np.float64)).astype(np.int64)
            sent[np.arange(self.num_gpus), self.coordinates[:, level]] = 0
            elsewhere = table.sum(axis=0) > table[self.coordinates[:, level]]
            counts.append((sent, (reached & elsewhere).sum(axis=1)))
            anywhere = reached.reshape(shape).any(axis=level, keepdims=True)
            reached = np.broadcast_to(anywhere, shape).reshape(reached.shape) & table[self.coordinates[:, level]]
        return tuple(counts)

    @cached_property
    def token_links(self) -> tuple[BoolArray, ...]:
        """Per level: [SF_l, SF_l], true where ranks of the first coordinate may send tokens to the second, another one."""
        links = []
        for serve in self.serve:
            joined = np.zeros((len(serve), len(serve)), dtype=np.bool_)
            joined[np.arange(len(serve))[:, None], serve] = True
            np.fill_diagonal(joined, False)
            links.append(joined)
        return tuple(links)

    def token_peers(self, rank: int, level: int) -> tuple[int, ...]:
        """Coordinates at ``level``, other than its own, that may get tokens from ``rank`` at that hop."""
        return tuple(int(c) for c in np.flatnonzero(self.token_links[level][self.coordinates[rank, level]]))

    def token_sources(self, rank: int, level: int) -> tuple[int, ...]:
        """Coordinates at ``level`` whose ranks may send tokens to ``rank`` at that hop."""
        return tuple(int(x) for x in np.flatnonzero(self.token_links[level][:, self.coordinates[rank, level]]))


def place(
    cluster: Cluster,
    num_experts: int,
    choices: Mapping[str, LevelChoice],
    *,
    hotness: Sequence[float] | None = None,
    outer: IntArray | None = None,
    home: IntArray | None = None,
) -> Placement:
    """Expert domains per level as serving tables (HybridEP, Algorithm 1, generalised to partial migration).

    ``choices`` maps level names to choices; a level that is absent has domains of one worker (plain expert parallelism).
    ``hotness`` orders each home's experts for partial migration (highest first; by index when absent).
    ``outer`` ([SF_0, E], see ``hybridep.serving``) takes the place of the outermost level's domains.
    ``home`` ([E] ranks, see ``hybridep.homes``) takes the place of ``home_blocks``.
    Raises PlacementError for an unknown level, a size that does not divide, a ratio outside [0, 1], or a level given twice.
    """
    names = [level.name for level in cluster.levels]
    for name in choices:
        if name not in names:
            raise PlacementError(f"domains: no level {name!r} in cluster {cluster.name}; it has {', '.join(names)}")
    if outer is not None and names[0] in choices:
        raise PlacementError(f"domains.{names[0]}: the plan gives a serving table for this level; leave its domain size out")
    if home is None:
        home = home_blocks(cluster, num_experts)
    home_coordinates = np.stack(np.unravel_index(home, cluster.sizes))
    order = np.argsort(-np.asarray(hotness if hotness is not None else np.zeros(num_experts)), kind="stable")
    place_at_home = np.empty(num_experts, dtype=np.int64)
    num_at_home = np.bincount(home, minlength=cluster.num_gpus)
    by_home = order[np.argsort(home[order], kind="stable")]
    place_at_home[by_home] = np.arange(num_experts) - (np.cumsum(num_at_home) - num_at_home)[home[by_home]]
    serve = []
    for level, name in enumerate(names):
        if level == 0 and outer is not None:
            serve.append(outer)
            continue
        choice, size = choices.get(name, LevelChoice()), cluster.sizes[level]
        if choice.domain_size < 1 or size % choice.domain_size:
            possible = ", ".join(map(str, divisors(size)))
            raise PlacementError(f"domains.{name}: size {choice.domain_size} must divide the level's size {size}; use {possible}")
        if not 0 <= choice.migration_ratio <= 1:
            raise PlacementError(f"migration.{name}: ratio {choice.migration_ratio} must lie between 0 and 1")
        num_copied = np.floor(choice.migration_ratio * num_at_home[home] + 0.5)
        copied = place_at_home < num_copied
        own = np.arange(size)[:, None]
        h = home_coordinates[level][None, :]
        same_offset = h // choice.domain_size * choice.domain_size + own % choice.domain_size
        serve.append(np.where(copied[None, :], same_offset, np.broadcast_to(h, same_offset.shape)).astype(np.int64))
    return Placement(sizes=cluster.sizes, home=home, serve=tuple(serve))
