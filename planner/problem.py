"""The planning problem as plain numbers: how many layers use which configuration, under memory, for the shortest step.

All MoE layers have the same shape, so a plan is a number of layers per candidate configuration. Times add up over layers
(``planner.cost``); so does memory, but for what only one layer holds at a time, of which the largest counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Codecs, level_codecs
from hybridep.gating import gating
from hybridep.placement import LevelChoice, place
from hybridep.plan import LayerGroup, Objective, Residency, Schedule
from hybridep.recompute import ALL, Recompute
from hybridep.topology import Cluster
from hybridep.workload import Model, Workload
from planner.cost import block_times, fixed_cost, layer_coding, layer_cost, layer_traffic
from planner.domains import all_choices, layer_group
from planner.exchange import ExchangeTimes
from planner.goal import FASTEST, Goal
from planner.memory import TOLERANCE, fixed_memory, layer_load, layer_memory
from planner.price import egress_usd, step_usd

MAX_COPY_STEPS = 4
"""Migration ratios tried per domain size: numbers of experts of the fullest home, evenly spread."""

TIE = 1e-9
"""Step times that differ by less, relatively, are equal; fewer copies win."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration that any MoE layer may use."""

    choices: dict[str, LevelChoice]
    """By level name."""
    residency: Residency
    recompute: Recompute = Recompute.NOTHING
    num_copies: int
    """Over all ranks, one layer."""
    layer_s: float
    """One layer's share of a step."""
    layer_usd: float = 0.0
    """What that share costs."""
    chain_s: float
    """Its computation and token exchanges alone: no schedule hides them."""
    link_s: float
    """The busiest link's bytes over its bandwidth."""
    lasting_bytes: FloatArray
    """[G], held for all such layers at the same time."""
    passing_bytes: FloatArray
    """[G], held while one such layer is computed."""

    @property
    def preference(self) -> tuple[object, ...]:
        """Among equals the smallest is chosen: fewer copies, then smaller domains, then less migration."""
        sizes = tuple(choice.domain_size for choice in self.choices.values())
        ratios = tuple(choice.migration_ratio for choice in self.choices.values())
        return self.num_copies, sizes, ratios, self.residency is Residency.MICROBATCH, self.recompute.value

    def group(self, first: int, count: int) -> LayerGroup:
        """So many layers of a plan."""
        return layer_group(first, count, self.choices, self.residency, recompute=self.recompute)

    @property
    def label(self) -> str:
        """``domains dc 2, gpu 8 (dc: 0.5 copied), copies per step``."""
        sizes = ", ".join(f"{name} {choice.domain_size}" for name, choice in self.choices.items())
        partial = [
            f"{name}: {choice.migration_ratio:g} copied" for name, choice in self.choices.items() if choice.migration_ratio < 1
        ]
        note = " (" + ", ".join(partial) + ")" if partial else ""
        again = f", {self.recompute.phrase}" if self.recompute else ""
        return f"domains {sizes}{note}, copies per {self.residency.value}{again}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Choose the number of layers of each candidate."""

    cluster: Cluster
    workload: Workload
    schedule: Schedule
    codecs: dict[str, Codecs]
    """By level name, exact where absent."""
    num_layers: int
    candidates: tuple[Candidate, ...]
    """In order of preference."""
    fixed_s: float
    """Step time outside the MoE layers."""
    fixed_lasting_bytes: FloatArray
    """[G]."""
    fixed_passing_bytes: FloatArray
    """[G]: what another part of the step holds for a moment; counts only where it exceeds that of every layer."""
    capacity_bytes: FloatArray
    """[G]."""
    recompute: tuple[Recompute, ...] = (Recompute.NOTHING,)
    """What candidates compute again: one of ``ways_again``."""
    fixed_usd: float = 0.0
    """What a step outside the MoE layers costs."""
    goal: Goal = FASTEST

    @cached_property
    def layer_s(self) -> FloatArray:
        """[C]."""
        return np.array([candidate.layer_s for candidate in self.candidates])

    @cached_property
    def layer_usd(self) -> FloatArray:
        """[C]."""
        return np.array([candidate.layer_usd for candidate in self.candidates])

    @property
    def layer_value(self) -> FloatArray:
        """[C]: what the goal makes small, in seconds or dollars."""
        return self.layer_usd if self.goal.objective is Objective.DOLLARS else self.layer_s

    @property
    def fixed_value(self) -> float:
        """Outside the MoE layers."""
        return self.goal.value(self.fixed_s, self.fixed_usd)

    @cached_property
    def floors_s(self) -> FloatArray:
        """[C]: with one configuration in all layers no schedule is faster."""
        chain_s = np.array([candidate.chain_s for candidate in self.candidates])
        link_s = np.array([candidate.link_s for candidate in self.candidates])
        return np.asarray(np.maximum(self.fixed_s + self.num_layers * chain_s, self.num_layers * link_s))

    @cached_property
    def lasting_bytes(self) -> FloatArray:
        """[C, G]."""
        return np.array([candidate.lasting_bytes for candidate in self.candidates])

    @cached_property
    def passing_bytes(self) -> FloatArray:
        """[C, G]."""
        return np.array([candidate.passing_bytes for candidate in self.candidates])

    def objective_s(self, counts: Sequence[int]) -> float:
        """Step time with ``counts[c]`` layers of candidate c."""
        return self.fixed_s + float(np.dot(np.asarray(counts, dtype=np.float64), self.layer_s))

    def price_usd(self, counts: Sequence[int]) -> float:
        """What that step costs."""
        return self.fixed_usd + float(np.dot(np.asarray(counts, dtype=np.float64), self.layer_usd))

    def value(self, counts: Sequence[int]) -> float:
        """What the goal makes small."""
        return self.goal.value(self.objective_s(counts), self.price_usd(counts))

    def affords(self, counts: Sequence[int]) -> bool:
        """The step costs no more than the budget."""
        return self.goal.overdraft(self.price_usd(counts)) == 0

    def memory_bytes(self, counts: Sequence[int]) -> FloatArray:
        """[G]: what each rank needs."""
        number = np.asarray(counts, dtype=np.float64)
        passing = np.vstack([self.fixed_passing_bytes, self.passing_bytes[number > 0]]).max(axis=0)
        return np.asarray(self.fixed_lasting_bytes + number @ self.lasting_bytes + passing)

    def fits(self, counts: Sequence[int]) -> bool:
        """Every rank has room."""
        return self.has_room(self.memory_bytes(counts))

    def has_room(self, used_bytes: FloatArray) -> bool:
        """[G] bytes fit every rank."""
        return bool((used_bytes <= self.capacity_bytes * (1 + TOLERANCE)).all())

    def uniform(self, candidate: int) -> tuple[int, ...]:
        """All layers use one candidate."""
        return tuple(self.num_layers if c == candidate else 0 for c in range(len(self.candidates)))

    @property
    def is_short_of_memory(self) -> bool:
        """Some configuration is better than the best that fits, and does not."""
        best, values = self.best_uniform(), self.layer_value
        better = values < (np.inf if best is None else values[best] * (1 - TIE))
        return any(not self.fits(self.uniform(c)) for c in np.flatnonzero(better).tolist())

    def best_uniform(self) -> int | None:
        """The best candidate that fits, and the budget allows, when all layers use it; of equal ones the preferred; None when
        there is none."""
        good = [c for c in range(len(self.candidates)) if self.fits(self.uniform(c)) and self.affords(self.uniform(c))]
        if not good:
            return None
        values = self.layer_value
        return next(c for c in good if values[c] <= values[good].min() * (1 + TIE))

    def undominated(self) -> list[int]:
        """Candidates that can be part of a best plan: no other is at least as fast (and cheap, where that counts) and needs at
        most as much memory on every rank (of two equal ones the preferred stays)."""
        prices = [self.layer_usd] if self.goal.needs_prices else []
        needs = np.column_stack([self.layer_s, *prices, self.lasting_bytes, self.passing_bytes])
        scale = np.maximum(needs.max(axis=0), 1e-300)
        needs = np.unique(np.round(needs / scale, 12), axis=1)
        kept = []
        for c, own in enumerate(needs):
            no_worse = (needs <= own).all(axis=1)
            better = no_worse & (needs < own).any(axis=1)
            equal = no_worse & ~better
            if not better.any() and not equal[:c].any():
                kept.append(c)
        return kept


def build_problem(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    popularity: tuple[float, ...] | None = None,
    codecs: Mapping[str, Codecs] | None = None,
    goal: Goal = FASTEST,
    *,
    recompute: tuple[Recompute, ...] | None = None,
    home: IntArray | None = None,
) -> Problem:
    """All candidates of a cluster and workload with their times and memory, for a layer whose experts have this popularity (all
    alike where it is not given). ``codecs`` by level name, exact where absent. ``recompute``: one of ``ways_again``; that with
    the best configuration for all layers, if nothing is said. ``home``: where experts live ([E] ranks), in place of blocks, which
    `Candidate.group` does not know."""
    problems = build_problems(cluster, workload, schedule, popularity, codecs, goal, recompute=recompute, home=home)

    def value(problem: Problem) -> float:
        best = problem.best_uniform()
        return np.inf if best is None else problem.value(problem.uniform(best))

    return min(problems[::-1], key=value)


def build_problems(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    popularity: tuple[float, ...] | None = None,
    codecs: Mapping[str, Codecs] | None = None,
    goal: Goal = FASTEST,
    *,
    recompute: tuple[Recompute, ...] | None = None,
    home: IntArray | None = None,
) -> list[Problem]:
    """One problem, or one for each way in which layers may compute again where memory is short: the best plan is that of one of
    them."""
    make = partial(_problem, cluster, workload, schedule, popularity, codecs, goal, home)
    if recompute is not None:
        return [make(recompute)]
    first, *others = ways_again(workload.model)
    kept = make(first)
    return [make(one) for one in others] if kept.is_short_of_memory else [kept]


def ways_again(model: Model) -> tuple[tuple[Recompute, ...], ...]:
    """What layers may compute again: nothing, or else the layers of a plan may be of several kinds. Layers without experts do as
    the first one with experts, so where there are any these are either all kinds that keep attention's activations, or all
    others."""
    kept, again = (Recompute.NOTHING, Recompute.EXPERTS), (Recompute.ATTENTION, ALL)
    return ((Recompute.NOTHING,), kept, again) if model.num_dense_layers else ((Recompute.NOTHING,), (*kept, *again))


def _problem(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    popularity: tuple[float, ...] | None,
    codecs: Mapping[str, Codecs] | None,
    goal: Goal,
    own: IntArray | None,
    recompute: tuple[Recompute, ...],
) -> Problem:
    coded = level_codecs([level.name for level in cluster.levels], codecs or {})
    residencies = (Residency.STEP,) if any(one.experts.is_change for one in coded) else tuple(Residency)
    network = ExchangeTimes(cluster=cluster, streams=schedule.streams)
    experts = workload.model.num_experts
    expected = gating(workload, popularity, cluster)
    candidates = []
    home = place(cluster, experts, {}, home=own)
    home_experts = home.num_at_home * workload.model.num_moe_layers
    dense = recompute[0]
    fixed = {one: fixed_memory(cluster, workload, home_experts, coded, dense=dense, some=one) for one in recompute}
    for choices in all_choices(cluster, experts, MAX_COPY_STEPS):
        placement = place(cluster, experts, choices, hotness=popularity, home=own)
        traffic = layer_traffic(placement, workload, expected, coded, schedule.chunks)
        copies = int(placement.holds.sum()) - experts
        coding_s = layer_coding(cluster.gpu, placement, workload, expected, coded)
        times = block_times(network, workload, placement, expected, traffic, coding_s, schedule.chunks)
        chunks = schedule.chunks
        loads = {
            residency: layer_load(placement, workload, expected, traffic, residency, coded)
            for residency in (residencies if copies else (Residency.STEP,))
        }
        for residency, again in product(loads, recompute):
            cost = layer_cost(network, workload, replace(times, recompute=again), traffic, residency, schedule)
            layer_usd = step_usd(cluster.rent_usd_per_s, egress_usd(cluster, cost.link_bytes), cost.total_s)
            memory = layer_memory(loads[residency], workload, chunks=chunks, recompute=again)
            candidates.append(
                Candidate(
                    choices=choices,
                    residency=residency,
                    recompute=again,
                    num_copies=copies,
                    layer_s=cost.total_s,
                    layer_usd=layer_usd,
                    chain_s=cost.chain_s,
                    link_s=network.transfer_s(cost.link_bytes),
                    lasting_bytes=memory.lasting_bytes,
                    passing_bytes=np.maximum(memory.passing_bytes, fixed[again].passing_bytes),
                )
            )
    outside = fixed_cost(network, workload, home, home_experts, coded, dense)
    return Problem(
        cluster=cluster,
        workload=workload,
        schedule=schedule,
        codecs=dict(codecs or {}),
        num_layers=workload.model.num_moe_layers,
        recompute=recompute,
        candidates=tuple(sorted(candidates, key=lambda candidate: candidate.preference)),
        fixed_s=outside.total_s,
        fixed_lasting_bytes=fixed[dense].lasting_bytes,
        fixed_passing_bytes=fixed[dense].passing_bytes,
        capacity_bytes=cluster.of_ranks(lambda gpu: gpu.memory),
        fixed_usd=step_usd(cluster.rent_usd_per_s, egress_usd(cluster, outside.link_bytes), outside.total_s),
        goal=goal,
    )
