"""Pipelines that a search of small steps does not reach: random changes of one, by what sketches say of them, of which some that
make it slower are taken as long as it is warm (simulated annealing)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.clock import now_s
from planner.evaluate import MOST_RANKS
from planner.sites.grouping import Groups
from planner.stages.batches import number_about, numbers_about, unevenness
from planner.stages.candidates import AHEAD, Candidates

_STEPS = 1000
"""Changes that are looked at, at most."""
_OTHER_NUMBER = 0.1
"""Share of the changes that join two stages, or split one."""
WARMTHS = (0.02, 0.1)
"""Shares by which a change may make a step longer at first, about; it falls to nothing. The first finds the best near a pipeline
more often, the second what is farther away."""


class Sketch(NamedTuple):
    """A pipeline but for what is inside its stages."""

    path: Groups
    layers: tuple[int, ...]
    micro_batches: int
    ahead: int


def wander(
    candidates: Candidates, start: Sketch, number: int, rng: np.random.Generator, until_s: float, warmth: float = WARMTHS[0]
) -> list[Sketch]:
    """The best of what was met from ``start`` on, each with other sites in its stages or other micro-batches, the best first: at
    most ``number``, the start left out. Ends at ``until_s`` (``planner.clock``) at the latest."""
    if len(start.path) < 2:
        return []
    at, at_s = start, candidates.sketch_s(*start)
    met: dict[tuple[Groups, int], tuple[float, Sketch]] = {(at.path, at.micro_batches): (at_s, at)}
    for step in range(_STEPS):
        if now_s() > until_s:
            break
        new = _changed(candidates, at, rng)
        if new is None:
            continue
        new = new._replace(path=candidates.kinds.settled(new.path))
        new_s = candidates.sketch_s(*new)
        if new_s < at_s * (1 + warmth * (1 - step / _STEPS) * rng.exponential()):
            at, at_s = new, new_s
            key = at.path, at.micro_batches
            met[key] = min(met.get(key, (at_s, at)), (at_s, at))
    return [one for _, one in sorted(met.values()) if one != start][:number]


def _changed(candidates: Candidates, one: Sketch, rng: np.random.Generator) -> Sketch | None:
    """With other layers, sites, order, micro-batches or another depth, or a stage more or less unless their number is given; None
    where that is not possible."""
    stages, kind = len(one.path), rng.random()
    if candidates.wishes.stages is None and rng.random() < _OTHER_NUMBER:
        return _split(candidates, one, rng) if rng.random() < 0.5 else _joined(candidates, one, rng)
    stage, other = rng.choice(stages, size=2, replace=False).tolist()
    if kind < 0.3:
        least = 1 + candidates.workload.model.num_dense_layers * (stage == 0)
        if one.layers[stage] <= least:
            return None
        moved = [number - (place == stage) + (place == other) for place, number in enumerate(one.layers)]
        return one._replace(layers=tuple(moved))
    if kind < 0.7:
        return _with_sites(candidates, one, stage, other, rng)
    first, last = min(stage, other), max(stage, other) + 1
    if kind < 0.85:
        turned = (*range(first), *reversed(range(first, last)), *range(last, stages))
        path, layers = tuple(one.path[place] for place in turned), tuple(one.layers[place] for place in turned)
        return None if layers[0] <= candidates.workload.model.num_dense_layers else one._replace(path=path, layers=layers)
    if kind < 0.95:
        possible = unevenness(candidates.workload, candidates.cluster, one.path)
        return one._replace(micro_batches=int(rng.choice(numbers_about(possible, stages))))
    return one._replace(ahead=int(rng.choice(AHEAD)))


def _split(candidates: Candidates, one: Sketch, rng: np.random.Generator) -> Sketch | None:
    """A stage becomes two, each with some of its sites and about as large a part of its layers."""
    stage = int(rng.integers(len(one.path)))
    group, layers, least = one.path[stage], one.layers[stage], 1 + candidates.workload.model.num_dense_layers * (stage == 0)
    if len(group) < 2 or layers < least + 1:
        return None
    mixed, number = rng.permutation(group).tolist(), int(rng.integers(1, len(group)))
    first = min(max(round(layers * number / len(group)), least), layers - 1)
    parts = [tuple(sorted(mixed[:number])), tuple(sorted(mixed[number:]))]
    path = (*one.path[:stage], *parts, *one.path[stage + 1 :])
    return _with_path(candidates, one, path, (*one.layers[:stage], first, layers - first, *one.layers[stage + 1 :]))


def _joined(candidates: Candidates, one: Sketch, rng: np.random.Generator) -> Sketch | None:
    """Two stages next to each other become one."""
    stage = int(rng.integers(len(one.path) - 1))
    sites = tuple(sorted((*one.path[stage], *one.path[stage + 1])))
    if len(one.path) == 2 or len(sites) * candidates.cluster.ranks_per_site > MOST_RANKS:
        return None
    path, layers = (*one.path[:stage], sites, *one.path[stage + 2 :]), one.layers[stage] + one.layers[stage + 1]
    return _with_path(candidates, one, path, (*one.layers[:stage], layers, *one.layers[stage + 2 :]))


def _with_path(candidates: Candidates, one: Sketch, path: Groups, layers: tuple[int, ...]) -> Sketch | None:
    """With these sites and layers, in about as many micro-batches."""
    possible = unevenness(candidates.workload, candidates.cluster, path)
    if not possible or not all(map(candidates.rules.possible, path)):
        return None
    return one._replace(path=path, layers=layers, micro_batches=number_about(possible, one.micro_batches))


def _with_sites(candidates: Candidates, one: Sketch, stage: int, other: int, rng: np.random.Generator) -> Sketch | None:
    """A site of one stage goes to another, or two change places."""
    mine, theirs = list(one.path[stage]), list(one.path[other])
    site = int(rng.choice(mine))
    mine.remove(site)
    if not mine or rng.random() < 0.5:
        back = int(rng.choice(theirs))
        theirs.remove(back)
        mine.append(back)
    theirs.append(site)
    changed = {stage: tuple(sorted(mine)), other: tuple(sorted(theirs))}
    return _with_path(candidates, one, tuple(changed.get(place, group) for place, group in enumerate(one.path)), one.layers)
