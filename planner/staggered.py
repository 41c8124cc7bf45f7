"""A step in which a rank goes on as soon as its own transfers are done.

``planner.cost`` adds up what the slowest rank or the busiest link takes in each operation, as if all ranks entered every one
together: a sum can be minimised and bounded. In fact ranks wait only for those that they exchange with. So here the step is
walked through with a moment for every rank, in (max, +) algebra: a transfer begins when both its ends are there, and takes its
latency and the time in which its links, shared evenly by all that the exchange sends over them, carry its bytes. It is never
longer than the sum, equal to it where all ranks do the same, and closer to what links do where sites differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from hybridep.arrays import FloatArray, IntArray
from hybridep.coding import Coding, copy_coding, dense_coding, token_coding
from hybridep.plan import PlacedLayers, Plan, Residency
from hybridep.topology import Cluster
from hybridep.traffic import (
    Op,
    OpLevel,
    Traffic,
    copy_traffic,
    dense_traffic,
    expected_rows,
    is_late,
    link_bytes,
    served_copies,
    token_traffic,
)
from planner.compute import compute_of_ranks
from planner.cost import StepCost, coded_ranks_s
from planner.exchange import ExchangeTimes

_ALIKE = 1e-12
"""Ranks that grew by the same time up to this share of it grow so again."""

_Exchanged = Callable[[FloatArray], FloatArray]
"""[G] when ranks enter an exchange -> [G] when they are done."""

_FORWARD, _BACKWARD = (Op.TOKEN_DISPATCH, Op.TOKEN_COMBINE), (Op.COMBINE_BACKWARD, Op.DISPATCH_BACKWARD)

_AT_LAST = {Op.GRADIENT_RETURN, Op.SHARED_REDUCE_SCATTER, Op.SHARED_ALL_GATHER}
"""What only the last backward of a step does, or does for copies of a step."""

_NOTHING: tuple[FloatArray, FloatArray] = np.zeros(1), np.zeros(1)


class Pairs(NamedTuple):
    """The transfers of one exchange, [n] each."""

    source: IntArray
    destination: IntArray
    seconds: FloatArray
    """From when both ends are there."""

    def ends(self, ready_s: FloatArray) -> FloatArray:
        """[G]: when each rank is done with all its own, entered at ``ready_s`` [G]."""
        end_s = np.maximum(ready_s[self.source], ready_s[self.destination]) + self.seconds
        done_s = ready_s.copy()
        np.maximum.at(done_s, self.source, end_s)
        np.maximum.at(done_s, self.destination, end_s)
        return done_s


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    """One MoE layer in one micro-batch."""

    residency: Residency
    expert_s: FloatArray
    """[G]: of one part, where tokens travel in parts; so are their exchanges."""
    backward_cost: int
    """Of the experts, in forwards of theirs."""
    pre_expert_backward_s: FloatArray
    """[G]."""
    exchanges: Exchanges
    between: Mapping[Op, Between]
    """Between sites, where that was asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchanges:
    """Of one layer, or of the dense gradients."""

    pairs: Mapping[OpLevel, Pairs]
    coding_s: Mapping[OpLevel, tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    """[G] each: before and after; absent where it takes no time."""

    def hops(self, op: Op, ready_s: FloatArray, *, inwards: bool) -> FloatArray:
        """[G]: when each rank is done with one kind, level by level, outermost or innermost first."""
        for level in sorted({level for kind, level in self.pairs if kind is op}, reverse=not inwards):
            ready_s = self.hop(OpLevel(op, level), ready_s)
        return ready_s

    def hop(self, key: OpLevel, ready_s: FloatArray) -> FloatArray:
        """The same at one level."""
        if key not in self.pairs:
            return ready_s
        before_s, after_s = self.coding_s.get(key, _NOTHING)
        return self.pairs[key].ends(ready_s + before_s) + after_s

    def coding_of(self, op: Op) -> FloatArray | float:
        """[G]: both together, over all levels."""
        return sum((before_s + after_s for key, (before_s, after_s) in self.coding_s.items() if key.op is op), start=np.zeros(1))


def staggered_s(plan: Plan, cost: StepCost) -> float:
    """Seconds of one step of ``plan``, whose ``planner.cost`` is ``cost``; what its links and its computation need at least.
    Copies do not set out ahead of their blocks (ValueError)."""
    if plan.schedule.prefetch:
        raise ValueError("copies that set out ahead of their blocks are walked by planner.ahead")
    # On one link transfers of neighbouring exchanges may meet, which the walk does not see.
    return min(max(_Walk(plan).step_s(), cost.bound_s), cost.step_s)


class Between(NamedTuple):
    """What is exchanged between sites in one go."""

    seconds: float
    """Of the busiest link in each exchange, one after the other."""
    links: tuple[tuple[int, float, int], ...]
    """Number of a link in the cluster's table; seconds for which all of it keeps the link busy; messages at a time."""


NO_EXCHANGE = Between(0.0, ())


class PassTimes(NamedTuple):
    """What one pipeline stage takes by itself, each until its last rank is done."""

    gather_s: float
    """For copies of a step, as far as they show in the first forward."""
    forward_s: float
    """Of one micro-batch."""
    backward_s: float
    return_s: float
    """For copies' gradients of a step, as far as they show in the last backward."""
    after_s: float
    """Dense gradients and optimizer."""
    computing: float = 1.0
    """Share of a pass in which its ranks compute."""
    layers: int = 1
    """MoE layers, through which a pass goes one after the other."""
    early_s: float = 0.0
    """For copies of a step when nothing runs beside them."""
    late_s: float = 0.0
    """For their gradients, likewise."""
    forward: Between = NO_EXCHANGE
    backward: Between = NO_EXCHANGE
    gathered: Between = NO_EXCHANGE
    """In a step beside its passes: copies that stay for it, then their gradients, and dense gradients."""
    returned: Between = NO_EXCHANGE
    dense: Between = NO_EXCHANGE

    def busy_s(self, micro_batches: int) -> float:
        """All of a step, without a pause."""
        return self.gather_s + micro_batches * (self.forward_s + self.backward_s) + self.return_s + self.after_s


class Dense(NamedTuple):
    """How dense gradients are reduced, whatever the experts' placement."""

    exchanges: Exchanges
    between: tuple[Between, ...]
    """Between sites, of each kind."""


def dense_of(plan: Plan) -> Dense:
    """Of a pipeline stage."""
    return _Walk(plan, shares_links=True).dense


def pass_times(plan: Plan, dense: Dense | None = None) -> PassTimes:
    """Of a plan without copies that set out ahead of their blocks (ValueError). ``dense``: of any on these sites, likewise."""
    if plan.schedule.prefetch:
        raise ValueError("stages do not let copies set out ahead of their blocks")
    return _Walk(plan, shares_links=True, dense=dense).pass_times()


class _Walk:
    def __init__(self, plan: Plan, *, shares_links: bool = False, dense: Dense | None = None) -> None:
        """``shares_links``: what crosses each link between sites is wanted, too."""
        if dense is not None:
            self.dense = dense
        self._shares_links = shares_links and plan.cluster.sizes[0] > 1
        self._plan, self._compute = plan, compute_of_ranks(plan.cluster, plan.workload)
        self._pre_expert_s = self._compute.others_s
        self._head_s = self._compute.head_s + self._compute.pass_overhead_s
        self._head_backward_s = 2 * self._head_s + self._compute.head_again_s(plan.dense_recompute)
        self._network = ExchangeTimes(cluster=plan.cluster, streams=plan.schedule.streams)

    @cached_property
    def _groups(self) -> list[tuple[int, _Layer]]:
        return [(layers.num_layers, self._layer(layers)) for layers in self._plan.placed]

    def _between(self, ops: tuple[Op, ...], residency: Residency | None = None) -> Between:
        """Of all layers, or of those with such copies."""
        plan, seconds = self._plan, 0.0
        held_s, messages = np.zeros(len(plan.cluster.link_table)), np.zeros(len(plan.cluster.link_table), dtype=np.int64)
        for count, layer in self._groups:
            if residency in (None, layer.residency):
                for op in ops:
                    one = layer.between.get(op, NO_EXCHANGE)
                    seconds += count * one.seconds
                    for link, link_s, number in one.links:
                        held_s[link] += count * link_s
                        messages[link] = max(messages[link], number)
        used = np.flatnonzero(held_s)
        return Between(seconds, tuple((int(link), float(held_s[link]), int(messages[link])) for link in used))

    def _once(self, op: Op, sent: FloatArray | None) -> Between:
        """Of one exchange between sites."""
        cluster = self._plan.cluster
        if sent is None or not sent.any():
            return NO_EXCHANGE
        held_s = link_bytes(cluster, {OpLevel(op, 0): sent}) / self._network.bandwidths_bytes_per_s
        messages = link_bytes(cluster, {OpLevel(op, 0): (sent > 0).astype(np.float64)})
        used = np.flatnonzero(cluster.outer_links & (held_s > 0))
        links = tuple((int(link), float(held_s[link]), math.ceil(messages[link])) for link in used)
        return Between(float(held_s[used].max(initial=0.0)), links)

    def pass_times(self) -> PassTimes:
        plan = self._plan
        start_s = np.zeros(plan.cluster.num_gpus)

        def forward(*, is_first: bool) -> FloatArray:
            ready_s = start_s
            for count, layer in self._groups:
                ready_s = _repeated(count, ready_s, partial(self._forward, layer, is_first=is_first))
            return ready_s + self._head_s

        def backward(ready_s: FloatArray, *, is_last: bool) -> FloatArray:
            ready_s = ready_s + self._head_backward_s
            for count, layer in reversed(self._groups):
                ready_s = _repeated(count, ready_s, partial(self._backward, layer, is_last=is_last))
            return ready_s

        forward_s = float((there := forward(is_first=False)).max())
        backward_s = float((done := backward(there, is_last=False)).max()) - forward_s
        ops = {key.op for _, layer in self._groups for key in layer.exchanges.pairs}
        first_s = float(forward(is_first=True).max()) if Op.EXPERT_GATHER in ops else forward_s
        last_s = float(backward(there, is_last=True).max()) - forward_s if ops & _AT_LAST else backward_s
        blocks_s = [
            count * (self._pre_expert_s + layer.pre_expert_backward_s + (1 + layer.backward_cost) * layer.expert_s)
            for count, layer in self._groups
        ]
        compute_s = float((sum(blocks_s, start=np.zeros(1)) + self._head_s + self._head_backward_s).max())
        return PassTimes(
            computing=min(compute_s / (forward_s + backward_s), 1.0),
            gather_s=max(first_s - forward_s, 0.0),
            forward_s=forward_s,
            backward_s=backward_s,
            return_s=max(last_s - backward_s, 0.0),
            after_s=float(self._after(done).max() - done.max()),
            layers=plan.workload.model.num_moe_layers,
            early_s=float(self._copies(Op.EXPERT_GATHER, start_s).max()),
            late_s=float(self._copies(Op.GRADIENT_RETURN, start_s).max()),
            forward=_joined(self._between(_FORWARD), self._between((Op.EXPERT_GATHER,), Residency.MICROBATCH)),
            backward=_joined(
                self._between(_BACKWARD), self._between((Op.EXPERT_GATHER, Op.GRADIENT_RETURN), Residency.MICROBATCH)
            ),
            gathered=self._between((Op.EXPERT_GATHER,), Residency.STEP),
            returned=self._between((Op.GRADIENT_RETURN,), Residency.STEP),
            dense=_joined(*self.dense.between),
        )

    def _copies(self, op: Op, ready_s: FloatArray) -> FloatArray:
        """[G]: when each rank has all copies of a step, or has given back their gradients, one layer after the other."""
        for count, layer in self._groups:
            if layer.residency is Residency.STEP:
                once = partial(layer.exchanges.hops, op, inwards=op is Op.EXPERT_GATHER)
                ready_s = _repeated(count, ready_s, once)
        return ready_s

    def step_s(self) -> float:
        ready_s, number = np.zeros(self._plan.cluster.num_gpus), self._plan.workload.training.micro_batches
        ready_s = self._micro_batch(ready_s, is_first=True, is_last=number == 1)
        if number > 1:
            ready_s = _repeated(number - 2, ready_s, partial(self._micro_batch, is_first=False, is_last=False))
            ready_s = self._micro_batch(ready_s, is_first=False, is_last=True)
        return float(self._after(ready_s).max())

    def _micro_batch(self, ready_s: FloatArray, *, is_first: bool, is_last: bool) -> FloatArray:
        for count, layer in self._groups:
            ready_s = _repeated(count, ready_s, partial(self._forward, layer, is_first=is_first))
        ready_s = ready_s + self._head_s + self._head_backward_s
        for count, layer in reversed(self._groups):
            ready_s = _repeated(count, ready_s, partial(self._backward, layer, is_last=is_last))
        return ready_s

    @cached_property
    def dense(self) -> Dense:
        plan = self._plan
        traffic = dense_traffic(plan.placements[0], plan.workload, plan.level_codecs)
        coding = dense_coding(plan.cluster.sizes, plan.workload, plan.level_codecs)
        between = (self._once(key.op, sent) for key, sent in traffic.items() if self._shares_links and key.level == 0)
        return Dense(self._exchanges(traffic, coding), tuple(between))

    def _after(self, ready_s: FloatArray) -> FloatArray:
        """[G]: when each rank has reduced the dense gradients, made the optimizer's step, and got the others' weights."""
        plan, dense = self._plan, self.dense.exchanges
        ready_s = dense.hops(Op.DENSE_REDUCE_SCATTER, ready_s, inwards=False)
        ready_s = dense.hop(OpLevel(Op.DENSE_ALL_GATHER, 0), ready_s) + self._compute.optimizer_s(plan.home_experts)
        for level in range(1, len(plan.cluster.sizes)):
            ready_s = dense.hop(OpLevel(Op.DENSE_ALL_GATHER, level), ready_s)
        return ready_s

    def _forward(self, layer: _Layer, ready_s: FloatArray, *, is_first: bool) -> FloatArray:
        exchanges, gathered_s, begin_s = layer.exchanges, ready_s, ready_s
        if is_first or layer.residency is Residency.MICROBATCH:
            gathered_s = exchanges.hops(Op.EXPERT_GATHER, ready_s, inwards=True)
            begin_s = ready_s + exchanges.coding_of(Op.EXPERT_GATHER) if self._plan.schedule.overlap else gathered_s

        def dispatched_s(ready_s: FloatArray) -> FloatArray:
            for level in range(len(self._plan.cluster.sizes)):
                for op in (Op.TOKEN_COUNTS, Op.TOKEN_DISPATCH):
                    ready_s = exchanges.hop(OpLevel(op, level), ready_s)
            return ready_s

        ready_s = np.maximum(begin_s + self._pre_expert_s, gathered_s)
        combined_s = partial(exchanges.hops, Op.TOKEN_COMBINE, inwards=False)
        return self._through_experts(ready_s, dispatched_s, layer.expert_s, combined_s)

    def _through_experts(self, ready_s: FloatArray, out: _Exchanged, expert_s: FloatArray, back: _Exchanged) -> FloatArray:
        """[G]: when each rank has what comes back for its tokens, part by part: all go out before any comes back."""
        computed_s, results_s = ready_s, []
        for _ in range(self._plan.schedule.chunks):
            ready_s = out(ready_s)
            computed_s = np.maximum(computed_s, ready_s) + expert_s
            results_s.append(computed_s)
        for result_s in results_s:
            ready_s = back(np.maximum(ready_s, result_s))
        return ready_s

    def _backward(self, layer: _Layer, ready_s: FloatArray, *, is_last: bool) -> FloatArray:
        exchanges, each_time = layer.exchanges, layer.residency is Residency.MICROBATCH
        if each_time:
            # It shares the links with the combine's gradients, so nothing of it is hidden.
            ready_s = exchanges.hops(Op.EXPERT_GATHER, ready_s, inwards=True)
        out = partial(exchanges.hops, Op.COMBINE_BACKWARD, inwards=True)
        back = partial(exchanges.hops, Op.DISPATCH_BACKWARD, inwards=False)
        ready_s = self._through_experts(ready_s, out, layer.backward_cost * layer.expert_s, back)
        returned_s, begin_s = ready_s, ready_s
        if each_time or is_last:
            returned_s = exchanges.hops(Op.GRADIENT_RETURN, ready_s, inwards=False)
            if is_last:
                returned_s = exchanges.hops(Op.SHARED_REDUCE_SCATTER, returned_s, inwards=False)
                returned_s = exchanges.hops(Op.SHARED_ALL_GATHER, returned_s, inwards=True)
            begin_s = ready_s + exchanges.coding_of(Op.GRADIENT_RETURN) if self._plan.schedule.overlap else returned_s
        return np.maximum(begin_s + layer.pre_expert_backward_s, returned_s)

    def _layer(self, layers: PlacedLayers) -> _Layer:
        placement, workload, gating, codecs = layers.placement, self._plan.workload, layers.gating, self._plan.level_codecs
        chunks = self._plan.schedule.chunks
        rows = [one / chunks for one in expected_rows(placement, gating)]
        served, held = served_copies(placement, gating).sum(axis=1), placement.holds.sum(axis=1)
        traffic = token_traffic(placement, workload, rows, codecs) | copy_traffic(placement, workload, codecs)
        between = {key.op: self._once(key.op, sent) for key, sent in traffic.items() if self._shares_links and key.level == 0}
        coding = token_coding(placement, workload, rows, codecs, gating) | copy_coding(placement, workload, codecs)
        return _Layer(
            residency=layers.group.residency,
            backward_cost=layers.group.recompute.backward_cost,
            pre_expert_backward_s=2 * self._pre_expert_s + self._compute.again_s(layers.group.recompute),
            expert_s=self._compute.expert_s(served / chunks, held),
            exchanges=self._exchanges(traffic, coding),
            between=between,
        )

    def _exchanges(self, traffic: Traffic, coding: Coding) -> Exchanges:
        pairs: dict[OpLevel, Pairs] = {}
        for key, sent in traffic.items():
            # Backward sends again what forward did.
            same = (one for one in pairs if one.level == key.level and is_late(one) == is_late(key))
            twin = next((one for one in same if traffic[one] is sent or np.array_equal(traffic[one], sent)), None)
            if twin is not None or sent.any():
                pairs[key] = pairs_of(self._network, key, sent) if twin is None else pairs[twin]
        return Exchanges(pairs=pairs, coding_s=coded_ranks_s(self._plan.cluster.gpu, coding, self._plan.level_codecs))


def _joined(*parts: Between) -> Between:
    """One after the other."""
    links: dict[int, tuple[float, int]] = {}
    for part in parts:
        for link, held_s, messages in part.links:
            before_s, before = links.get(link, (0.0, 0))
            links[link] = before_s + held_s, max(before, messages)
    return Between(sum(part.seconds for part in parts), tuple((link, *links[link]) for link in sorted(links)))


def pairs_of(network: ExchangeTimes, key: OpLevel, sent: FloatArray) -> Pairs:
    """Each pair's time when all transfers of one exchange (``sent`` [G, SF_l]) begin together and every link is shared evenly
    by those that it still has to carry: the longest that one of the pair's links takes, or its windows; and its latency."""
    cluster = network.cluster
    source, coordinate = np.nonzero(sent)
    size_bytes = sent[source, coordinate]
    destination = source + (coordinate - cluster.coordinates[source, key.level]) * cluster.stride(key.level)
    sites = source // cluster.ranks_per_site, destination // cluster.ranks_per_site
    window_s_per_byte = network.window_s_per_byte[key.level]
    busy_s: FloatArray = size_bytes * (window_s_per_byte[sites] if window_s_per_byte.ndim else float(window_s_per_byte))
    for link, transfer, share in crossed(cluster, key.level, source, destination):
        needs_s = _evenly_shared_s(link, size_bytes[transfer], share, network.bandwidths_bytes_per_s)
        np.maximum.at(busy_s, transfer, needs_s)
    messages = np.bincount(source, minlength=cluster.num_gpus)
    further_s = (messages[source] - 1) * cluster.gpu.message_overhead
    late_s = cluster.gpu.jitter if is_late(key) else 0.0
    latency_s = cluster.site_latency_s[sites] if key.level == 0 else cluster.levels[key.level].latency
    return Pairs(source, destination, latency_s + further_s + late_s + busy_s)


def crossed(
    cluster: Cluster, level: int, source: IntArray, destination: IntArray
) -> Iterator[tuple[IntArray, IntArray, FloatArray]]:
    """(link, transfer, share of its bytes) of all that transfers cross, each kind of link by itself."""
    every, whole = np.arange(source.size), np.ones(source.size)
    for depth in range(level, len(cluster.sizes)):
        inner = cluster.stride(depth)
        yield cluster.up_link(depth, 0) + 2 * (source // inner), every, whole
        yield cluster.down_link(depth, 0) + 2 * (destination // inner), every, whole
    if level > 0:
        return
    size = cluster.sizes[0]
    first, second = source // cluster.ranks_per_site, destination // cluster.ranks_per_site
    if cluster.links:
        yield cluster.pair_link(first, second), every, whole
    if cluster.trunks:
        crossing = cluster.trunk_shares[:, first * size + second].tocoo()
        yield cluster.pair_links.stop + crossing.row.astype(np.int64), crossing.col.astype(np.int64), crossing.data


def _evenly_shared_s(link: IntArray, size_bytes: FloatArray, share: FloatArray, bandwidths_bytes_per_s: FloatArray) -> FloatArray:
    """[n]: when a transfer of ``size_bytes``, of which a ``share`` crosses a ``link``, is done there, if it and all others on it
    begin together and move equally fast: those that are smaller have moved whole, the larger as much as itself."""
    order = np.lexsort((size_bytes, link))
    link, size_bytes, share = link[order], size_bytes[order], share[order]
    carried_bytes, begun = np.cumsum(size_bytes * share), np.cumsum(share)
    first, last = np.searchsorted(link, link), np.searchsorted(link, link, side="right") - 1
    smaller_bytes = carried_bytes - (carried_bytes - size_bytes * share)[first]
    moved_bytes = smaller_bytes + size_bytes * (begun[last] - begun)
    done_s = np.empty(link.size)
    done_s[order] = moved_bytes / bandwidths_bytes_per_s[link]
    return done_s


def _repeated(count: int, ready_s: FloatArray, once: Callable[[FloatArray], FloatArray]) -> FloatArray:
    """``once`` applied ``count`` times. It adds and takes maxima only, so ranks that have all grown by one time go on so."""
    for done in range(1, count + 1):
        before_s, ready_s = ready_s, once(ready_s)
        grown_s = ready_s - before_s
        if grown_s.max() - grown_s.min() <= _ALIKE * ready_s.max():
            return ready_s + (count - done) * float(grown_s.mean())
    return ready_s
