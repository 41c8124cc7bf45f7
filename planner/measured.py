"""Plans for experts whose popularity was measured: every layer gets the configuration that is fastest for its own experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Codecs
from hybridep.errors import InfeasibleError
from hybridep.homes import homes_text
from hybridep.placement import home_blocks
from hybridep.plan import LayerGroup, Plan, Schedule, SolverReport, Status
from hybridep.provenance import provenance
from hybridep.recompute import Recompute
from hybridep.shares import spread
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import elapsed_s
from planner.domains import joined
from planner.memory import TOLERANCE
from planner.plans import predict, seconds
from planner.problem import TIE, Problem, build_problem, ways_again
from planner.solve import PROVEN_GAP, gap, missing_memory

_STARTS = 4
"""Configurations that fit in all layers, from which layers are changed one by one where memory is short."""
_MOST_FIGURES = 2**23
"""Of memory (layers, configurations, ranks), above which they are not: that takes minutes."""
_FREE = 1e-9
"""Share of a rank's memory that counts as none."""
_DIGITS = 12
"""Of what places have of all choices, to which they are compared."""


def plans_measured(
    cluster: Cluster,
    workload: Workload,
    popularity: Sequence[tuple[float, ...]],
    count: int = 1,
    *,
    schedule: Schedule | None = None,
    codecs: Mapping[str, Codecs] | None = None,
    free_homes: bool = False,
    home: IntArray | None = None,
) -> list[Plan]:
    """At most ``count`` plans of equal domains per level, the fastest first, for experts of this ``popularity`` ([layers][E]
    shares). The first chooses for each MoE layer anew, the others have one configuration in all layers, and no solver's report.
    ``codecs`` by level name, exact where absent. ``free_homes``: layers may also spread popular experts over sites and ranks;
    ``home``: where experts live ([layers, E] ranks).

    Times add up over layers, so the fastest of each layer together are the fastest plan, if they fit the memory. If not, layers
    have what saves most for the memory it takes, from a configuration that fits in all layers on, and the gap to the former is
    reported. Raises InfeasibleError.
    """
    asked_s = elapsed_s()
    make = partial(build_problem, cluster, workload, schedule or Schedule(), codecs=codecs)
    blocks = home_blocks(cluster, workload.model.num_experts)
    homes = [[blocks] * len(popularity) if home is None else list(home)]
    if free_homes and home is None and np.ptp(cluster.home_weights) == 0:
        homes.append([balanced_homes(cluster, np.asarray(shares), blocks) for shares in popularity])

    def problems(recompute: tuple[Recompute, ...]) -> list[list[Problem]]:
        return [
            [make(shares, recompute=recompute, home=own) for shares, own in zip(popularity, each, strict=True)] for each in homes
        ]

    nothing, *ways = ways_again(workload.model)
    kept = problems(nothing)
    found, errors = list[list[Plan]](), list[InfeasibleError]()
    # Where some layer is short of memory, layers may compute again in all ways but the first, which is a part of others.
    is_short = any(problem.is_short_of_memory for each in kept for problem in each)
    for way in ways if is_short else [nothing]:
        try:
            found.append(_by_layer(problems(way) if is_short else kept, homes, popularity, count))
        except InfeasibleError as error:
            errors.append(error)
    if not found:
        raise errors[-1]  # of what needs least memory
    first, *others = min(found, key=lambda plans: plans[0].predicted.step)
    step_s = first.predicted.step
    # Of plans that compute nothing again, nothing is faster than what keeps all.
    least_s = [min(float(problem.layer_s.min()) for problem in same) for same in zip(*kept, strict=True)]
    bound_s = min(kept[0][0].fixed_s + sum(least_s), step_s)
    report = SolverReport(
        status=Status.OPTIMAL if gap(step_s, bound_s) <= PROVEN_GAP else Status.FEASIBLE,
        solver="by layer",
        objective=seconds(step_s),
        bound=seconds(bound_s),
        gap=gap(step_s, bound_s),
        solve=seconds(elapsed_s() - asked_s),
    )
    return [first.model_copy(update={"solver": report}), *others]


def balanced_homes(cluster: Cluster, shares: FloatArray, home: IntArray, site: IntArray | None = None) -> IntArray:
    """[E] ranks: as many experts on each as with ``home`` ([E]), of which popular ones (by their ``shares``, [E]) are spread over
    sites, or live at these (``site``, [E]), and over each site's ranks. Who lives where it did, as far as spreading brings
    nothing."""
    inside = cluster.ranks_per_site
    room = np.bincount(home, minlength=cluster.num_gpus).reshape(-1, inside)
    if site is None:
        site = _more_even(home // inside, spread(shares, room.sum(axis=1), np.arange(len(room))), shares)
    found = np.empty_like(home)
    for one in np.unique(site).tolist():
        own = np.flatnonzero(site == one)
        found[own] = one * inside + spread(shares[own], room[one], np.zeros(inside, dtype=np.int64))
        if (home[own] // inside == one).all():
            found[own] = _more_even(home[own], found[own], shares[own])
    return found


def _more_even(before: IntArray, after: IntArray, shares: FloatArray) -> IntArray:
    """``after`` where its fullest place, or with equals the next one, has less of the ``shares``; else ``before`` ([N] places
    each)."""
    fullest = [np.sort(np.bincount(places, weights=shares))[::-1].round(_DIGITS).tolist() for places in (before, after)]
    return after if fullest[1] < fullest[0] else before


def _by_layer(
    problems: Sequence[Sequence[Problem]],
    homes: Sequence[Sequence[IntArray]],
    popularity: Sequence[tuple[float, ...]],
    count: int,
) -> list[Plan]:
    """As `plans_measured`, of problems that may compute the same again, [homes][layers], and without a report."""

    # Layers differ in time and memory, not in which configurations there are: those follow from counts of experts.
    def of_all(figures: Callable[[Problem], FloatArray]) -> FloatArray:
        """[layers, homes and candidates, ...]"""
        return np.concatenate([[figures(problem) for problem in each] for each in problems], axis=1)

    layer_s = of_all(lambda problem: problem.layer_s)
    first = problems[0][0]
    memory = _Memory(
        of_all(lambda problem: problem.lasting_bytes),
        of_all(lambda problem: problem.passing_bytes),
        first.fixed_lasting_bytes,
        first.fixed_passing_bytes,
        first.capacity_bytes * (1 + TOLERANCE),
    )

    def group_of(layer: int, chosen: int) -> LayerGroup:
        which, candidate = divmod(chosen, len(first.candidates))
        made = first.candidates[candidate].group(layer, 1)
        return made.model_copy(update={"homes": homes_text(first.cluster, homes[which][layer])})

    def made_of(chosen: Sequence[int]) -> Plan:
        made = Plan(
            cluster=first.cluster,
            workload=first.workload,
            layers=joined([group_of(layer, one) for layer, one in enumerate(chosen)]),
            codecs=first.codecs,
            popularity=tuple(popularity),
            schedule=first.schedule,
            provenance=provenance(),
        )
        return made.model_copy(update={"prediction": predict(made)})

    best = [int(np.argmax(times <= times.min() * (1 + TIE))) for times in layer_s]
    by_time = np.argsort(layer_s.sum(axis=0), kind="stable").tolist()
    alike = [each for c in by_time if memory.fits(each := [c] * len(popularity))]
    if not memory.fits(best):
        if not alike:
            raise InfeasibleError(missing_memory(first))
        best = min((_filled(each, layer_s, memory) for each in _starts(alike, memory)), key=lambda each: _sum_s(layer_s, each))
    return [made_of(best), *map(made_of, [each for each in alike if each != best][: count - 1])]


class _Memory(NamedTuple):
    """Bytes of ranks: [layers, candidates, G] of each layer, and [G]."""

    lasting: FloatArray
    passing: FloatArray
    fixed_lasting: FloatArray
    fixed_passing: FloatArray
    capacity: FloatArray

    def used(self, chosen: Sequence[int]) -> FloatArray:
        """[G]: share of its memory that each rank needs."""
        layers = np.arange(len(chosen))
        most = np.maximum(self.passing[layers, chosen].max(axis=0), self.fixed_passing)
        return np.asarray((self.fixed_lasting + self.lasting[layers, chosen].sum(axis=0) + most) / self.capacity)

    def fits(self, chosen: Sequence[int]) -> bool:
        """Every rank has room."""
        return bool((self.used(chosen) <= 1).all())

    def used_with(self, chosen: Sequence[int], layer: int, others: IntArray) -> FloatArray:
        """[others, G]: the same with each of these candidates in one layer."""
        rows = np.delete(np.arange(len(chosen)), layer)
        picked = np.delete(np.asarray(chosen), layer)
        lasting = self.fixed_lasting + self.lasting[rows, picked].sum(axis=0) + self.lasting[layer, others]
        passing = np.maximum(self.passing[rows, picked].max(axis=0, initial=0.0), self.fixed_passing)
        return np.asarray((lasting + np.maximum(passing, self.passing[layer, others])) / self.capacity)


def _sum_s(layer_s: FloatArray, chosen: Sequence[int]) -> float:
    return float(layer_s[np.arange(len(chosen)), chosen].sum())


def _starts(alike: Sequence[list[int]], memory: _Memory) -> list[list[int]]:
    """The fastest of the configurations that fit in all layers, and what needs least memory."""
    if memory.lasting.size > _MOST_FIGURES:
        return [alike[0]]
    return [*alike[:_STARTS], min(alike, key=lambda each: float(memory.used(each).max()))]


def _filled(start: Sequence[int], layer_s: FloatArray, memory: _Memory) -> list[int]:
    """From ``start``, which fits, on layer by layer what saves most time for the memory that it takes, as long as that fits."""
    chosen = list(start)
    while memory.lasting.size <= _MOST_FIGURES:
        now, found = float(memory.used(chosen).max()), list[tuple[float, int, int]]()
        for layer, candidate in enumerate(chosen):
            faster = np.flatnonzero(layer_s[layer] < layer_s[layer, candidate] * (1 - TIE))
            used = memory.used_with(chosen, layer, faster).max(axis=1)
            saved_s = layer_s[layer, candidate] - layer_s[layer, faster]
            worth = np.where(used <= 1, saved_s / np.maximum(used - now, _FREE), -1.0)
            if faster.size and worth.max() > 0:
                found.append((-float(worth.max()), layer, int(faster[worth.argmax()])))
        if not found:
            break
        _, layer, candidate = min(found)
        chosen[layer] = candidate
    return chosen
