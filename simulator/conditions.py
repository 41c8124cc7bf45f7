"""What a step meets besides its plan: links that change or are cut, slow workers, and what a transport gets of a link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.special import ndtri

from hybridep.arrays import FloatArray, IntArray
from hybridep.config import Duration, Size, Strict, read_csv
from hybridep.errors import ConfigError, UserError
from hybridep.sites import is_called
from hybridep.topology import Cluster
from hybridep.units import Dimension, exact, format_seconds

_MOST_FACTOR = 1e6
_LEAST_PERIOD_S = 1e-4
"""A step is simulated anew from each change on: shorter ones would take longer than any step is worth."""


class _Lasting(Strict):
    """Something that lasts for some time."""

    start: Duration = 0.0
    end: Duration | None = None

    @model_validator(mode="after")
    def _consistent(self) -> _Lasting:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"end: {self.end} s is not after start, {self.start} s")
        return self

    @property
    def end_s(self) -> float:
        """Infinite where it lasts."""
        return math.inf if self.end is None else self.end


class LinkChange(_Lasting):
    """Links that carry a part of their bandwidth for some time. Changes that meet multiply."""

    links: str
    """Pattern of link names: ``tokyo up``, ``tokyo *``, ``* -> tokyo``, ``*``."""
    factor: float = Field(ge=0, le=_MOST_FACTOR)
    """0 for a link that is cut."""


class LinkJitter(Strict):
    """Links whose bandwidth is drawn anew every period: exp(-|normal x spread|) of what they have."""

    links: str = "*"
    spread: float = Field(gt=0, le=3)
    period: Duration = Field(ge=_LEAST_PERIOD_S)


class Straggler(_Lasting):
    """A worker whose GPUs compute slower, in the steps that begin meanwhile."""

    worker: str
    """Name of a rank, or of what holds it: ``tokyo``, ``tokyo/gpu3``; also of a site with several pods."""
    slowdown: float = Field(ge=1)


class Conditions(Strict):
    """All of these together; times count from the start of the run. The same seed gives the same draws."""

    goodput: float = Field(default=1.0, gt=0, le=1)
    """Share of a link's bandwidth that is left for payload; 0.955 for TCP or RDMA headers and pauses."""
    window: Size | None = None
    """In place of what the cluster's levels say one connection may have under way, at all of them."""
    streams: int | None = Field(default=None, ge=1)
    """Connections per pair of ranks at all levels, in place of the plan's. A transfer gets at most its windows per round trip."""
    changes: tuple[LinkChange, ...] = ()
    trace: Path | None = None
    """A CSV with the columns seconds,links,factor: from then on these links have this factor."""
    jitter: tuple[LinkJitter, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    compute_jitter: float = Field(default=0.0, ge=0, le=1)
    """Spread of each computation's time: exp(normal x this), drawn for every rank and computation alone."""
    seed: int = Field(default=0, ge=0)

    @property
    def of_links(self) -> bool:
        """Whether some links fare differently from others."""
        return bool(self.all_changes or self.jitter)

    @property
    def settled(self) -> Conditions:
        """Without what varies."""
        return self.model_copy(update={"changes": (), "trace": None, "jitter": (), "compute_jitter": 0.0})

    def require(self, cluster: Cluster, link_names: Sequence[str] | None = None) -> None:
        """Raises UserError for links (the cluster's own unless named) and workers that are not there (a run may lose them later),
        and for connections that nothing limits."""
        if self.streams is not None and np.isinf(self.under_way_bytes(cluster, {})).all():
            raise UserError(
                f"conditions.streams: {self.streams} connections carry what one does without a window; give conditions.window, "
                f"or a level of {cluster.name} a window, or leave it out"
            )
        links = link_names or [link.name for link in cluster.link_table]
        patterns = [
            *(("changes", change.links) for change in self.changes),
            *((f"trace {self.trace}", change.links) for change in self.all_changes[len(self.changes) :]),
            *(("jitter", jitter.links) for jitter in self.jitter),
        ]
        # A trace has rows by the thousand, of a few patterns.
        for key, pattern in dict.fromkeys(patterns):
            if not _matching(links, pattern).size:
                raise UserError(f"{key}: no link is named {pattern!r}; names are like {links[0]!r} and {links[-1]!r}")
        names = {name for of_rank in _worker_names(cluster) for name in of_rank} if self.stragglers else set()
        for straggler in self.stragglers:
            if straggler.worker not in names:
                raise UserError(f"stragglers: no worker {straggler.worker!r}; names are like {min(names)!r} and {max(names)!r}")

    def from_s(self, end_s: float, begins_s: Sequence[float]) -> list[str]:
        """In words, what begins then or later, and who is slow while no step begins (all steps' ``begins_s``); rows of a trace,
        which may be of any length, aside."""
        changes = [
            f"{change.links!r} changes at {format_seconds(change.start)}" for change in self.changes if change.start >= end_s
        ]
        return changes + [
            f"{one.worker} is slow from {format_seconds(one.start)} on" + (", within a step" if one.start < end_s else "")
            for one in self.stragglers
            if not any(one.start <= begin_s < one.end_s for begin_s in begins_s)
        ]

    @cached_property
    def all_changes(self) -> tuple[LinkChange, ...]:
        """Those of the trace too. Raises ConfigError for a bad one."""
        return self.changes if self.trace is None else (*self.changes, *read_trace(self.trace))

    def under_way_bytes(self, cluster: Cluster, streams: Mapping[str, int]) -> FloatArray:
        """[levels]: what two ranks that differ there may have under way, with a plan's ``streams``; infinite for no limit."""
        levels = cluster.levels
        if self.window is not None:
            levels = tuple(level.model_copy(update={"window": self.window}) for level in levels)
        if self.streams is not None:
            streams = dict.fromkeys((level.name for level in levels), self.streams)
        return np.array([level.under_way_bytes(streams) for level in levels])

    def slowdown(self, cluster: Cluster, now_s: float) -> FloatArray:
        """[ranks]: factor on the time of computations in a step that begins now."""
        factor = np.ones(cluster.num_gpus)
        if not self.stragglers:
            return factor
        names = _worker_names(cluster)
        for straggler in self.stragglers:
            inside = [any(name == straggler.worker for name in of_rank) for of_rank in names]
            if straggler.start <= now_s < straggler.end_s:
                factor[inside] *= straggler.slowdown
        return factor


class LinkFactors:
    """The part of its bandwidth that each link has, over time."""

    def __init__(self, conditions: Conditions, link_names: Sequence[str]) -> None:
        self._names = link_names
        self._seed = conditions.seed
        self._goodput = conditions.goodput
        changes = conditions.all_changes
        self._called = {pattern: _matching(link_names, pattern) for pattern in dict.fromkeys(change.links for change in changes)}
        self._changes = [(change, self._called[change.links]) for change in changes]
        self._jitter = [(jitter, _matching(link_names, jitter.links)) for jitter in conditions.jitter]
        self._num_links = len(link_names)
        names = link_names if conditions.jitter else ()
        self._keys = np.array([int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) for name in names], dtype=np.uint64)
        """[links]: what each draws by, the same whatever other links there are."""
        ends = {change.end_s for change in changes if math.isfinite(change.end_s)}
        self._times_s = sorted({change.start for change in changes} | ends)

    @property
    def traits(self) -> IntArray:
        """[links]: equal for links that always have the same factor."""
        traits = np.zeros(self._num_links, dtype=np.int64)
        for links in self._called.values():
            mine = np.zeros(self._num_links, dtype=np.int64)
            mine[links] = 1
            traits = np.unique(2 * traits + mine, return_inverse=True)[1].astype(np.int64)
        for _, links in self._jitter:
            traits[links] = self._num_links + links
        return traits

    @property
    def settled_s(self) -> float:
        """From then on links that are cut stay so, and no others are."""
        return max(self._times_s, default=0.0)

    def cuts(self, now_s: float) -> list[str]:
        """In words, which links are cut now, by which change."""
        found = []
        for change, links in self._changes:
            if change.factor == 0 and change.start <= now_s < change.end_s:
                names = ", ".join(self._names[link] for link in links[:3]) + (
                    f" and {links.size - 3} more" if links.size > 3 else ""
                )
                until = "on" if math.isinf(change.end_s) else f"to {format_seconds(change.end_s)}"
                found.append(f"{names} (links {change.links!r} have factor 0 from {format_seconds(change.start)} {until})")
        return found

    def at(self, now_s: float) -> FloatArray:
        """[links]"""
        factor = np.full(self._num_links, self._goodput)
        for change, links in self._changes:
            if change.start <= now_s < change.end_s:
                factor[links] *= change.factor
        for number, (jitter, links) in enumerate(self._jitter):
            key = np.random.SeedSequence([self._seed, number, _period(now_s, jitter.period)]).generate_state(1, np.uint64)
            factor[links] *= np.exp(-np.abs(jitter.spread * _normal(self._keys[links] ^ key)))
        return factor

    def next_s(self, now_s: float) -> float:
        """When something changes after now; infinite for never."""
        later = [time_s for time_s in self._times_s if time_s > now_s]
        periods = [(_period(now_s, jitter.period) + 1) * jitter.period for jitter, _ in self._jitter]
        return min([*later[:1], *periods], default=math.inf)


def read_trace(path: Path) -> list[LinkChange]:
    """The rows of a trace, each up to the next one of the same links. Raises ConfigError with the line."""
    of_links: dict[str, list[tuple[float, float]]] = {}
    for line, row in read_csv(path, ("seconds", "links", "factor")):
        try:
            start_s, factor, links = float(row["seconds"]), float(row["factor"]), row["links"].strip()
            if not links:
                raise ValueError(links)
        except ValueError:
            raise ConfigError(f"{path}:{line}", "seconds,links,factor", "must be a number, a pattern and a number") from None
        earlier = of_links.setdefault(links, [])
        if not (math.isfinite(start_s) and 0 <= factor <= _MOST_FACTOR) or start_s < (earlier[-1][0] if earlier else 0.0):
            raise ConfigError(
                f"{path}:{line}", "seconds,factor", f"{start_s}, {factor}: times must rise, factors be at least zero"
            )
        earlier.append((start_s, factor))
    changes = []
    for links, points in of_links.items():
        ends = [*(start_s for start_s, _ in points[1:]), None]
        for (start_s, factor), end_s in zip(points, ends, strict=True):
            if end_s is None or end_s > start_s:
                lasts = {"start": exact(start_s, Dimension.TIME)}
                if end_s is not None:
                    lasts["end"] = exact(end_s, Dimension.TIME)
                changes.append(LinkChange.model_validate({"links": links, "factor": factor, **lasts}))
    return changes


def _period(now_s: float, period_s: float) -> int:
    """Which period it is now, counted from 0; one begins at exactly its number times its length."""
    nearest = round(now_s / period_s)
    return nearest if nearest * period_s <= now_s else nearest - 1


def _normal(keys: NDArray[np.uint64]) -> FloatArray:
    """[keys]: a draw from the standard normal distribution by each key (SplitMix64's output function; Steele et al., 2014)."""
    mixed = keys
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray(ndtri(((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53))


def _matching(names: Sequence[str], pattern: str) -> IntArray:
    return np.flatnonzero([is_called(name, pattern) for name in names])


def _worker_names(cluster: Cluster) -> list[list[str]]:
    """Of each rank: its workers, outermost first, and last itself; before them the site whose pod the outermost is."""
    locations = [cluster.location(rank) for rank in range(cluster.num_gpus)]
    return [
        [*cluster.site_labels(at[0])[1:], *(cluster.worker_name(at[: depth + 1]) for depth in range(len(at)))] for at in locations
    ]
