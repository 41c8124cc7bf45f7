"""``planner.cost`` and ``planner.memory`` for whole plans of many ranks, from arrays over sites: the same, link by link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.plan import LayerGroup, Plan
from hybridep.traffic import add_between_sites
from planner.cost import Cost, StepCost, combine
from planner.exchange import ExchangeTimes
from planner.layer_times import layer_times
from planner.memory import (
    BUFFERS,
    DENSE,
    LayerMemory,
    MemoryUse,
    fixed_lasting,
    total_memory,
    unsent_dense_bytes,
)
from planner.sites.cost import block_times, bytes_between, fixed_cost, layer_memory, moved_in_a_step
from planner.sites.exchange import Exchange, LayerExchanges, layer_exchanges
from planner.sites.problem import Inside, SiteProblem, site_problem
from planner.sites.reductions import dense_exchanges


def evaluate_sites(plan: Plan) -> tuple[StepCost, MemoryUse] | None:
    """Cost and memory of a plan; None where it needs arrays over ranks (partial domains inside sites, homes that differ by layer,
    measured popularity, copies that set out ahead of their blocks)."""
    if plan.popularity or plan.schedule.prefetch or (home := home_of(plan)) is None:
        return None
    plain = site_problem(plan.cluster, plan.workload, plan.schedule, codecs=plan.codecs, home=home)
    costs: list[tuple[int, Cost]] = []
    memories: list[tuple[int, LayerMemory]] = []
    for _, num_layers, group, placement, _ in plan.placed:
        inside = inside_of(plan, group)
        if inside is None:
            return None
        problem = replace(plain, recompute=group.recompute)
        layer = layer_exchanges(problem, placement.serve[0], inside)
        costs.append((num_layers, _layer_cost(problem, layer, group)))
        memories.append((num_layers, _flat(layer_memory(problem, layer, group.residency))))
    dense, some = (replace(plain, recompute=one) for one in (plan.dense_recompute, plan.recomputes))
    cost = combine(ExchangeTimes(cluster=plan.cluster), _fixed_cost(dense), costs)
    return cost, total_memory(plan.cluster, _fixed_memory(dense, some), memories)


def home_of(plan: Plan) -> IntArray | None:
    """[E]: the rank that owns each expert, in all layers; None where they differ, or are not in the order of ranks."""
    first, *others = (placement.home for placement in plan.placements)
    alike = (np.diff(first) >= 0).all() and all(np.array_equal(first, other) for other in others)
    return first if alike else None


def inside_of(plan: Plan, group: LayerGroup) -> tuple[Inside, ...] | None:
    """Who holds a site's experts inside it, level by level; None where some of a home's are copied and others are not, or domains
    are a part of a level."""
    nearest, exact = nearest_inside(plan, group)
    return nearest if exact else None


def nearest_inside(plan: Plan, group: LayerGroup) -> tuple[tuple[Inside, ...], bool]:
    """The same, and whether it is so at all levels; where it is not, as if one worker held each expert."""
    found, exact = [], True
    for level in plan.cluster.levels[1:]:
        size, ratio = group.domains.get(level.name, 1), group.migration.get(level.name, 1.0)
        by_all = level.size == 1 or (size == level.size and ratio == 1)
        found.append(Inside.ALL if by_all else Inside.ONE)
        exact &= by_all or size == 1 or ratio == 0
    return tuple(found), exact


def _layer_cost(problem: SiteProblem, layer: LayerExchanges, group: LayerGroup) -> Cost:
    batches = problem.workload.training.micro_batches
    block = block_times(problem, layer)
    times = layer_times(block, batches, group.residency, problem.schedule)
    moved = list(moved_in_a_step(problem, layer, group.residency))
    return Cost(
        parts_s=times.parts_s,
        hidden_s=times.hidden_s,
        link_bytes=_link_bytes(problem, moved),
        wan_bytes=bytes_between(moved),
        compute_s=batches * block.compute_s,
    )


def _fixed_cost(problem: SiteProblem) -> Cost:
    fixed = fixed_cost(problem)
    moved = [(one, 1.0) for exchanges in dense_exchanges(problem) for one in exchanges]
    return Cost(
        parts_s=dict(fixed.parts_s),
        hidden_s={},
        link_bytes=_link_bytes(problem, moved),
        wan_bytes=fixed.wan_bytes,
        compute_s=fixed.compute_s,
    )


def _link_bytes(problem: SiteProblem, moved: Iterable[tuple[Exchange, float]]) -> FloatArray:
    """[number of links], as in ``Cluster.link_table``, of (exchange, bytes per unit) pairs."""
    cluster, size = problem.cluster, problem.num_sites
    loads = np.zeros(len(cluster.link_table))
    access = loads[: 2 * size]
    between = np.zeros((size, size)) if cluster.links or cluster.trunks else None
    for exchange, unit_bytes in moved:
        if exchange.level == 0:
            access[::2] += exchange.out.sum(axis=1) * unit_bytes
            access[1::2] += exchange.into.sum(axis=1) * unit_bytes
            if between is not None:
                between += exchange.pairs * unit_bytes
        for level, (number, _) in enumerate(problem.inner_links, start=1):
            if level >= exchange.level:
                first, last = cluster.up_link(level, 0), cluster.up_link(level, 0) + 2 * size * number
                out, into = exchange.of_workers(number)
                loads[first:last:2] += out.ravel() * unit_bytes
                loads[first + 1 : last : 2] += into.ravel() * unit_bytes
    if between is not None:
        add_between_sites(cluster, loads, between)
    return loads


def _fixed_memory(problem: SiteProblem, some: SiteProblem) -> LayerMemory:
    """``some``: where all layers compute again what some do."""
    at_home = np.bincount(problem.home, minlength=problem.cluster.num_gpus).astype(np.int64) * problem.num_layers
    buffers = fixed_cost(some).passing_bytes.ravel()
    share = np.repeat(problem.compute.share[:, 0], problem.num_inside)
    lasting = fixed_lasting(problem.workload, share, at_home, problem.cluster.sizes, problem.recompute)
    lasting[DENSE] = lasting[DENSE] + unsent_dense_bytes(problem.cluster, problem.workload, problem.codecs)
    return LayerMemory(lasting=lasting, passing={BUFFERS: buffers})


def _flat(memory: LayerMemory) -> LayerMemory:
    """[D, n] -> [G]."""
    lasting, passing = ({name: value.ravel() for name, value in part.items()} for part in (memory.lasting, memory.passing))
    return LayerMemory(lasting=lasting, passing=passing)
