"""Which sites make a stage together, and in what order stages follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.topology import Cluster
from planner.sites.grouping import Groups, grown_groups, nearest_groups

_STARTS = 4
"""Stages with which a path is begun."""
_ROUNDS = 50
"""Improvements of a path; none was seen to need as many."""


def way_s_per_byte(cluster: Cluster) -> FloatArray:
    """[D, D]: seconds per byte from one site to another, over their access links and their own link; trunks left out."""
    (up, down), pair = cluster.access_bytes_per_s, cluster.pair_bytes_per_s
    access = np.minimum(up[:, None], down)
    return np.asarray(1 / (access if pair is None else np.minimum(access, pair)))


def groupings(cluster: Cluster, stages: int, batch_bytes: float) -> Iterator[Groups]:
    """Sites in so many groups, near ones together: of nearly equal size, as they grow together, in the cluster's order, and with
    the farthest site by itself; and groups whose links are about as fast. ``batch_bytes``: what all ranks of a stage pass on with
    one micro-batch."""
    size = cluster.sizes[0]
    seen = set()
    apart = np.zeros((size, size))
    if size > 1:
        one_way_s = way_s_per_byte(cluster) * batch_bytes * stages / size + cluster.site_latency_s
        apart = one_way_s + one_way_s.T
        np.fill_diagonal(apart, 0.0)
    in_order = tuple(tuple(int(site) for site in part) for part in np.array_split(np.arange(size), stages))
    near = nearest_groups(apart, stages)
    grown = grown_groups(apart, stages) if size > stages > 1 else near
    for found in (near, grown, in_order, _one_by_itself(apart, stages), _as_fast(cluster, stages)):
        key = tuple(sorted(found))
        if len(found) == stages and key not in seen:
            seen.add(key)
            yield found


def _as_fast(cluster: Cluster, stages: int) -> Groups:
    """Groups whose access links together are about as fast: a few sites with fast ones, or many with slow ones."""
    rates = cluster.access_bytes_per_s.min(axis=0)
    order = np.argsort(-rates, kind="stable")
    middle = np.cumsum(rates[order]) - rates[order] / 2
    group = (middle / rates.sum() * stages).astype(np.int64)
    return tuple(tuple(sorted(order[group == number].tolist())) for number in np.unique(group))


def _one_by_itself(apart: FloatArray, stages: int) -> Groups:
    """The site that is farthest from the others makes a stage, the rest the other ones, near ones together."""
    if stages < 2:
        return ()
    far = int(apart.sum(axis=1).argmax())
    rest = np.delete(np.arange(len(apart)), far)
    return ((far,), *(tuple(rest[list(group)].tolist()) for group in nearest_groups(apart[np.ix_(rest, rest)], stages - 1)))


def ordered(
    cluster: Cluster, groups: Groups, batch_bytes: float, micro_batches: int, pace_s: float, apart: BoolArray | None = None
) -> list[Groups]:
    """The groups on short paths: what every micro-batch takes on the slowest step, then all of it with its latencies, which the
    first one takes and the last. Once as if every micro-batch waited for latencies, too, and once as if none did.
    ``pace_s``: what a micro-batch takes in the slowest stage, below which no step counts. ``apart`` ([D, D]): sites between which
    nothing may pass, as far as there are other ways."""
    if len(groups) < 3:
        return [groups]
    busy_s, way_s = steps_s(cluster, groups, batch_bytes)
    if apart is not None and apart.any():
        # The fewer of them the better, whatever the others take.
        barred = barred_steps(groups, apart, cluster.token_weights)
        busy_s, way_s = (each_s + barred * (each_s.sum() + pace_s) for each_s in (busy_s, way_s))
    starts = np.argsort(-way_s.sum(axis=1), kind="stable")[:_STARTS]
    found = []
    for each_s in (busy_s, way_s):

        def lengths_s(paths: IntArray, each_s: FloatArray = each_s) -> FloatArray:
            ends = paths[:, :-1], paths[:, 1:]
            every_s = np.maximum(each_s[ends].max(axis=1), pace_s)
            return np.asarray((micro_batches - 1) * every_s + 2 * way_s[ends].sum(axis=1))

        best = min(
            (_improved(_nearest(way_s, int(start)), lengths_s) for start in starts),
            key=lambda path: float(lengths_s(np.array([path]))[0]),
        )
        found.append(tuple(groups[stage] for stage in best))
    return found[:1] if found[0] == found[1] else found


def steps_s(cluster: Cluster, groups: Groups, batch_bytes: float) -> tuple[FloatArray, FloatArray]:
    """[groups, groups] each: seconds for which one micro-batch keeps the links between two groups busy, there or back, whichever
    is longer; and seconds until it has arrived."""
    per_byte, latency_s = way_s_per_byte(cluster), cluster.site_latency_s
    number, weights = len(groups), cluster.token_weights
    busy_s, way_s = np.zeros((number, number)), np.zeros((number, number))
    for a in range(number):
        for b in range(a):
            one, other, part = facing(groups[a], groups[b], weights)
            there, back = (per_byte[ends] * part * batch_bytes for ends in ((one, other), (other, one)))
            busy_s[a, b] = busy_s[b, a] = max(there.max(), back.max())
            way_s[a, b] = way_s[b, a] = max((there + latency_s[one, other]).max(), (back + latency_s[other, one]).max())
    return busy_s, way_s


def barred_steps(groups: Groups, apart: BoolArray, weights: FloatArray) -> BoolArray:
    """[groups, groups]: whether something would pass between two groups where nothing may. ``weights`` as for ``facing``."""
    number = len(groups)
    found = np.zeros((number, number), dtype=np.bool_)
    for a in range(number):
        for b in range(a):
            one, other, _ = facing(groups[a], groups[b], weights)
            found[a, b] = found[b, a] = apart[one, other].any()
    return found


def facing(one: Sequence[int], other: Sequence[int], weights: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Sites of two stages that share sequences, and the share of a micro-batch that each pair has. ``weights`` [D]: how much each
    site takes against others of its stage."""
    both = [np.asarray(sorted(each)) for each in (one, other)]
    every = [np.concatenate([[0.0], np.cumsum(weights[sites])]) / weights[sites].sum() for sites in both]
    ends = np.unique(np.concatenate(every).round(12))
    middle = (ends[:-1] + ends[1:]) / 2
    places = [sites[np.searchsorted(own, middle, side="right") - 1] for sites, own in zip(both, every, strict=True)]
    return places[0], places[1], np.diff(ends)


def _nearest(step_s: FloatArray, start: int) -> list[int]:
    """A path from ``start`` that goes on to the nearest that is left."""
    path, left = [start], set(range(len(step_s))) - {start}
    while left:
        path.append(min(left, key=lambda stage: (step_s[path[-1], stage], stage)))
        left.remove(path[-1])
    return path


def _improved(path: list[int], lengths_s: Callable[[IntArray], FloatArray]) -> list[int]:
    """Parts of the path turned round, and single stages moved, while that makes it shorter. ``lengths_s``: of paths in rows."""
    best_s = float(lengths_s(np.array([path]))[0])
    for _ in range(_ROUNDS):
        others = np.array(list(_changes(path)))
        found_s = lengths_s(others)
        first = int(found_s.argmin())
        if found_s[first] >= best_s * (1 - 1e-9):
            break
        best_s, path = float(found_s[first]), others[first].tolist()
    return path


def _changes(path: list[int]) -> Iterator[list[int]]:
    size = len(path)
    for first in range(size - 1):
        for last in range(first + 1, size):
            yield [*path[:first], *path[first : last + 1][::-1], *path[last + 1 :]]
    for place in range(size):
        rest = [*path[:place], *path[place + 1 :]]
        for to in range(size):
            if to != place:
                yield [*rest[:to], path[place], *rest[to:]]
