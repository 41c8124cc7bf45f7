"""The oracle: every serving table, for tiny problems only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.plan import Objective, Residency
from hybridep.traffic import COUNT_BYTES, gathers_and_returns
from planner.activations import pre_expert_bytes, routed_bytes
from planner.memory import TOLERANCE, Ahead, lasting_copy_bytes, narrows, passing_bytes
from planner.sites.cost import cost_of, fixed_cost
from planner.sites.exchange import layer_exchanges
from planner.sites.problem import Configuration, Inside, SiteProblem

AT_ONCE = 4096
"""Tables whose costs are computed together."""


def best_table(problem: SiteProblem) -> tuple[IntArray, Configuration, float] | None:
    """(table, configuration, step's seconds, or dollars if those are the goal) of the best plan that fits and the budget allows;
    None when there is none. Looks at all D ** (D E) tables; with rules, of those that keep them."""
    best: tuple[IntArray, Configuration, float] | None = None
    for tables in _chunks(problem):
        if at_once(problem):
            found = _best_of(problem, tables)
            if found is not None and (best is None or found[2] < best[2]):
                best = found
            continue
        for table in tables:
            for inside in dict.fromkeys(one.inside for one in problem.configurations()):
                best = _better(problem, table, inside, best)
    return best


def at_once(problem: SiteProblem) -> bool:
    """Whether costs of many tables can be computed together."""
    exact = not any(one.coded for one in problem.codecs)
    return problem.num_inside == 1 and problem.schedule.chunks == 1 and exact and problem.group_of is None


def _chunks(problem: SiteProblem) -> Iterator[IntArray]:
    """[N, D, E]: all tables, some at a time."""
    size, experts = problem.num_sites, problem.num_experts
    entries = product(range(size), repeat=size * experts)
    while chunk := list(islice(entries, AT_ONCE)):
        tables = np.array(chunk, dtype=np.int64).reshape(-1, size, experts)
        if problem.permissions is not None:
            tables = tables[[problem.permissions.keeps(table) for table in tables]]
        yield tables


def _better(
    problem: SiteProblem, table: IntArray, inside: tuple[Inside, ...], best: tuple[IntArray, Configuration, float] | None
) -> tuple[IntArray, Configuration, float] | None:
    layer = layer_exchanges(problem, table, inside)
    for configuration in problem.configurations():
        if configuration.inside == inside:
            cost = cost_of(problem, layer, configuration.residency)
            value = problem.goal.value(cost.step_s, cost.step_usd)
            if (best is None or value < best[2]) and cost.fits and not problem.goal.overdraft(cost.step_usd):
                best = table, configuration, value
    return best


def _best_of(problem: SiteProblem, tables: IntArray) -> tuple[IntArray, Configuration, float] | None:
    best: tuple[IntArray, Configuration, float] | None = None
    for residency in problem.residencies if len(tables) else ():
        steps_s, memory_bytes, prices_usd = costs_at_once(problem, tables, residency)
        values = prices_usd.copy() if problem.goal.objective is Objective.DOLLARS else steps_s.copy()
        values[(memory_bytes > problem.compute.memory_bytes[:, 0] * (1 + TOLERANCE)).any(axis=1)] = np.inf
        values[[problem.goal.overdraft(float(price)) > 0 for price in prices_usd]] = np.inf
        first = int(np.argmin(values))
        if np.isfinite(values[first]) and (best is None or values[first] < best[2]):
            best = tables[first], Configuration(inside=problem.everywhere(Inside.ALL), residency=residency), float(values[first])
    return best


def costs_at_once(problem: SiteProblem, tables: IntArray, residency: Residency) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(step seconds [N], bytes of each rank [N, D], dollars [N]) of ``tables`` ([N, D, E]) on sites of one rank: the
    formulas of ``planner.cost`` written out once more, which also checks the other way of computing them."""
    work, training, each = problem.workload, problem.workload.training, problem.compute
    batches, layers, size, wire = training.micro_batches, problem.num_layers, problem.num_sites, problem.wire
    gpu = problem.cluster.gpu
    served = (tables[:, :, :, None] == np.arange(size)).sum(axis=2)  # [N, d, h]
    away = ~np.eye(size, dtype=np.bool_)
    rows = problem.tokens[:, None] * problem.hit[served] * away
    at_home = problem.home_site == np.arange(size)[:, None]  # [D, E]
    held = at_home | (tables[:, :, :, None] == np.arange(size)).any(axis=1).swapaxes(1, 2)  # [N, h, E]
    copies = np.einsum("ae,nhe->nah", at_home.astype(np.float64), held.astype(np.float64)) * away
    up, down = (np.minimum(rate, problem.inside_bytes_per_s) for rate in (problem.up_bytes_per_s, problem.down_bytes_per_s))

    def line(sent: FloatArray) -> tuple[FloatArray, FloatArray]:
        busiest = np.maximum((sent.sum(axis=2) / up).max(axis=1), (sent.sum(axis=1) / down).max(axis=1))
        if problem.pair_bytes_per_s is not None:
            busiest = np.maximum(busiest, (sent / problem.pair_bytes_per_s).max(axis=(1, 2)))
        if problem.cluster.trunks:
            busiest = np.maximum(busiest, (problem.trunk_s_per_byte @ sent.reshape(len(sent), -1).T).max(axis=0))
        busiest = np.maximum(busiest, (sent * problem.window_s_per_byte[0]).max(axis=(1, 2)))
        further = np.maximum((sent > 0).sum(axis=2).max(axis=1) - 1, 0)
        return (problem.latency_s * (sent > 0)).max(axis=(1, 2)) + further * gpu.message_overhead, busiest

    def seconds(sent: FloatArray, *units: float) -> FloatArray:
        latency, busiest = line(sent)
        return np.asarray(len(units) * latency + busiest * sum(units))

    back = rows.swapaxes(1, 2)
    exchanges = seconds(rows, wire.dispatch_row_bytes, wire.combine_row_bytes)
    exchanges = exchanges + seconds(back, wire.combine_row_bytes, wire.dispatch_gradient_row_bytes)
    exchanges = exchanges + seconds(((served > 0) & away).astype(np.float64), COUNT_BYTES)
    gather, give_back = seconds(copies, wire.expert_bytes), seconds(copies.swapaxes(1, 2), wire.expert_gradient_bytes)
    late_s = gpu.jitter * copies.any(axis=(1, 2))
    gather, give_back = gather + late_s, give_back + late_s
    gathers, returns = gathers_and_returns(residency, batches)
    beside, beside_backward = problem.beside_s, problem.beside_backward_s
    moving = gathers * gather - min(gathers, batches) * np.minimum(gather, beside)
    moving = moving + returns * (give_back - np.minimum(give_back, beside_backward))
    computed = np.einsum("d,ndh->nh", problem.rows_per_choice, served)
    alone = computed * each.expert_s_per_row[:, 0] + held.sum(axis=2) * each.expert_overhead_s[:, 0]
    waited = alone.mean(axis=1, keepdims=True) * (1 - 1 / each.sharing)
    passes = 1 + problem.recompute.backward_cost
    compute = problem.block_s + problem.block_backward_s + passes * (alone / each.sharing + waited).max(axis=1)
    steps_s = fixed_cost(problem).total_s + layers * (batches * (exchanges + compute) + moving)

    fixed = fixed_cost(problem)
    arrived = (problem.tokens[:, None] * problem.hit[served]).sum(axis=1)
    kept = (held.sum(axis=2) - at_home.sum(axis=1)).astype(np.float64)
    moved = rows.sum(axis=1) + rows.sum(axis=2)
    largest = np.maximum(moved * wire.dispatch_row_bytes, copies.sum(axis=2) * wire.expert_bytes)
    if narrows(work.training, residency):
        largest = np.maximum(largest, copies.sum(axis=1) * wire.expert_gradient_bytes)
    routed = routed_bytes(work, computed, arrived, problem.recompute)
    before = pre_expert_bytes(work, each.share[:, 0], problem.recompute)
    lasting = routed.kept + before.kept + lasting_copy_bytes(work, kept, residency)
    ahead = Ahead(rows.sum(axis=1) * wire.combine_row_bytes, rows.sum(axis=2) * wire.dispatch_gradient_row_bytes)
    homes, again = problem.at_home[:, 0], (routed.again, before.again)
    passing = passing_bytes(work, each.share[:, 0], largest, ahead, computed, kept, homes, residency, again)
    memory = fixed.lasting_bytes[:, 0] + layers * lasting + np.maximum(sum(passing.values()), fixed.passing_bytes[:, 0])

    one_way = batches * (rows * wire.row_there_bytes + COUNT_BYTES * ((served > 0) & away))
    sent = one_way + batches * back * wire.row_back_bytes
    sent = sent + gathers * wire.expert_bytes * copies + returns * wire.expert_gradient_bytes * copies.swapaxes(1, 2)
    egress = fixed.egress_usd + layers * (sent * problem.cluster.egress_usd_per_byte).sum(axis=(1, 2))
    return np.asarray(steps_s), np.asarray(memory), egress + problem.cluster.rent_usd_per_s * steps_s
