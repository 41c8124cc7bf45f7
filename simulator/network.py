"""A fluid network over the engine: flows share links max-min fairly and finish when their bytes have passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridep.arrays import FloatArray, IntArray
from simulator.columns import DONE, LATER, WAITING, FlowColumns, Int32Array, LinkColumns
from simulator.draining import COMPACT, Cargo, Clock, Tickets, Usage, activate, drain, put_on_links
from simulator.engine import LATE, Engine, Event
from simulator.errors import SimulationError
from simulator.filling import unfix
from simulator.indexing import by_priority, compress, links_that_can_fill, longest, members_by_link

OnComplete = Callable[[IntArray, IntArray], None]
"""Takes groups that are complete, and for each the position of the flow that arrived last."""

ScalarT = TypeVar("ScalarT", bound=np.generic)

_SHORT = 16
"""Rows that are fewer than this at a time, on average, are copied one by one."""

EXACT = 1e-9
"""Flows that are equal by symmetry differ by rounding; with this share of their bytes left they end together."""


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Flows to send, one row each; a row may stand for many alike, over links that stand for many alike."""

    links: IntArray | Int32Array
    """[n, longest path] link ids, -1 behind the end of a shorter path. Their order does not matter."""
    latency_s: FloatArray
    """[n]"""
    size_bytes: FloatArray
    """[n], of one of the flows."""
    weights: FloatArray | None = None
    """[n, longest path]: how many of a row's flows cross one of the links that each id stands for; 1 where omitted. A flow
    with k times the share of others is a row with the weight k and 1/k of the bytes."""
    groups: IntArray | None = None
    """[n, per flow] numbers from 0: completion is told by group; each flow is its own group where omitted."""
    limit_bytes_per_s: FloatArray | None = None
    """[n] What one flow gets at most, as a sender's window over the round trip allows; infinite for no limit."""
    priority: int = 0
    """A flow gets what flows of lower numbers leave on its links."""


@dataclass(slots=True, eq=False)
class Batch:
    """Flows that were handed to the network together."""

    serial: int
    size: int
    first_ticket: int
    on_complete: OnComplete
    untold: int
    """Groups that are not complete."""


class Network:
    """Links with capacities, and the flows on them.

    A flow occupies its links from its start until its bytes have left, and is delivered one latency later: the sender's
    link is busy at once, as with a real socket, and distance delays the arrival only. Rates are solved anew once per
    instant in which flows start or end.

    Flows of one priority share what those before leave. A link that is cut (`set_capacity` to 0) holds its flows up.

    tolerance: share of its bytes that a flow may leave out, or send beyond them, to end together with another. Every time is
    then exact for sizes that differ by at most `largest_cut` of each: no more than the tolerance, or what the clock can
    resolve. With EXACT, the least, nothing is sent beyond.
    """

    def __init__(self, engine: Engine, link_capacity_bytes_per_s: Sequence[float] | FloatArray, tolerance: float = EXACT) -> None:
        capacity = np.asarray(link_capacity_bytes_per_s, dtype=np.float64)
        bad = np.flatnonzero(~((capacity > 0) & np.isfinite(capacity)))
        if bad.size:
            raise SimulationError(
                f"link {bad[0]} has capacity {float(capacity[bad[0]])!r} bytes/s; every link needs a positive, finite one"
            )
        if not EXACT <= tolerance < 0.1:
            raise SimulationError(f"tolerance {tolerance!r} must lie between {EXACT} (exact) and 0.1")
        self._engine = engine
        self._tolerance = tolerance
        self._capacity = capacity
        num_links = capacity.size
        self._offered_bytes, self._offered_since_s = np.zeros(num_links), engine.now_s
        self._usage = Usage(*(np.zeros(num_links) for _ in Usage._fields))
        none = np.zeros(0, dtype=np.int64)
        self._tickets = Tickets(none, np.zeros(0), none, none)
        self._num_tickets = 0
        self._outstanding = 0
        self._late = tolerance if tolerance > EXACT else 0.0
        self._clock = Clock(np.zeros(1), np.zeros(1), np.full(1, self._late), np.zeros(8, dtype=np.int64))
        self._batches: dict[int, Batch] = {}
        self._num_batches = 0
        nothing = Transfers(links=np.zeros((0, 0), np.int64), latency_s=np.zeros(0), size_bytes=np.zeros(0))
        self._cargo = _cargo_of(nothing, 0)
        self._flows, self._links = _index(self._cargo, capacity, tolerance + self._late)
        self._arrivals: list[Cargo] = []
        self._event: Event | None = None

    @property
    def link_capacity_bytes_per_s(self) -> FloatArray:
        """[links]"""
        return self._capacity

    @property
    def link_bytes(self) -> FloatArray:
        """[links] Bytes of all flows started so far whose path crosses the link: exact, counted at the start."""
        return self._usage.size_bytes.copy()

    @property
    def link_busy_s(self) -> FloatArray:
        """[links] Seconds with at least one flow on the link, up to when it was last without."""
        return self._usage.busy_s.copy()

    def offered_bytes(self, until_s: float) -> FloatArray:
        """[links] What each could have carried from the start up to then, which is not before the last change of capacities."""
        return self._offered_bytes + self._capacity * (until_s - self._offered_since_s)

    @property
    def largest_cut(self) -> float:
        """Largest share of its bytes that any flow left out, or sent beyond them, so far."""
        return float(self._clock.cut[0])

    def prepare(self, transfers: Transfers, on_complete: OnComplete) -> Batch:
        """Take in flows that will be started later, all or some at a time, with `start`.

        on_complete: called with the groups that are complete at one instant, until all are.
        Raises SimulationError for unknown links, or a latency or size that is negative or not finite.
        """
        serial = self._num_batches
        cargo = _cargo_of(transfers, serial)
        num_flows = cargo.size_bytes.size
        unknown = cargo.path[(cargo.path < -1) | (cargo.path >= self._capacity.size)]
        if unknown.size:
            raise SimulationError(f"a path names link {unknown[0]}, but there are {self._capacity.size} links")
        if not (cargo.limit_bytes_per_s > 0).all():
            raise SimulationError(f"limit {float(cargo.limit_bytes_per_s.min())!r} bytes/s of a flow; it must be above 0")
        for name, values in (("latency", cargo.latency_s), ("size", cargo.size_bytes)):
            wrong = values[~(np.isfinite(values) & (values >= 0))]
            if wrong.size:
                raise SimulationError(f"{name} {float(wrong[0])!r} of a flow; it must be finite and not negative")
        num_groups = int(cargo.tickets.max(initial=-1)) + 1
        first = self._new_tickets(cargo.tickets, num_groups, serial)
        batch = Batch(serial, num_flows, first, on_complete, num_groups)
        if num_flows:
            self._num_batches += 1
            self._batches[serial] = batch
            self._arrivals.append(cargo._replace(tickets=cargo.tickets + first))
        return batch

    def start(self, batch: Batch, which: IntArray | None = None) -> None:
        """Start flows of a batch now: those at the positions `which`, or all. A flow starts once.

        A flow of no bytes, or over no links, arrives after its latency.
        """
        if not batch.size:
            return
        self._settle()
        first, last = self._first_row(batch.serial), self._first_row(batch.serial + 1)
        rows = np.arange(first, last) if which is None else first + self._cargo.position[first:last].searchsorted(which)
        told = np.empty(self._outstanding, dtype=np.int64)
        flows, links, cargo = self._flows, self._links, self._cargo
        num_told = activate(flows, links, cargo, self._usage, self._tickets, self._clock, rows, told)
        self._tell(told[:num_told])
        self._wake(self._engine.now_s)

    def send(self, transfers: Transfers, on_complete: OnComplete) -> None:
        """Start all flows now; as `prepare` and `start`."""
        self.start(self.prepare(transfers, on_complete))

    def set_capacity(self, link_capacity_bytes_per_s: FloatArray) -> None:
        """From now on links carry so much ([links]); 0 for one that is cut. Raises SimulationError for other values."""
        capacity = np.array(link_capacity_bytes_per_s, dtype=np.float64)
        if capacity.shape != self._capacity.shape or not ((capacity >= 0) & np.isfinite(capacity)).all():
            raise SimulationError(f"needs {self._capacity.size} capacities that are finite and not negative")
        self._settle()
        self._offered_bytes, self._offered_since_s = self.offered_bytes(self._engine.now_s), self._engine.now_s
        self._capacity = capacity
        self._renew_table()
        self._wake(self._engine.now_s)

    def _new_tickets(self, groups: IntArray, num_groups: int, serial: int) -> int:
        first = self._num_tickets
        self._num_tickets += num_groups
        self._outstanding += num_groups
        if self._num_tickets > self._tickets.unfinished.size:
            size = max(1024, 2 * self._num_tickets)
            self._tickets = Tickets(*(np.concatenate([old, np.zeros(size - old.size, old.dtype)]) for old in self._tickets))
        self._tickets.unfinished[first : first + num_groups] = np.bincount(groups.ravel(), minlength=num_groups)
        self._tickets.batch[first : first + num_groups] = serial
        return first

    def _settle(self) -> None:
        """Bring the clock up to the engine's, and take in the batches that came since."""
        self._clock.now_s[0] = max(self._engine.now_s, float(self._clock.now_s[0]))
        if self._arrivals:
            self._renew_table()

    def _renew_table(self) -> None:
        """Drop rows that are done, add those of new batches, and see anew which links matter."""
        old = self._flows
        unfix(old, self._links, float(self._clock.now_s[0]))
        runs = _runs(np.flatnonzero(old.status != DONE))
        status, due = _column([old.status], runs), _column([old.due], runs)
        # Of millions of rows one table at a time is enough.
        del old, self._flows, self._links
        parts, self._arrivals = [self._cargo, *self._arrivals], []
        del self._cargo
        self._cargo = _join(parts, runs)
        del parts
        self._flows, self._links = _index(self._cargo, self._capacity, self._tolerance + self._late)
        flows = self._flows
        flows.status[: status.size], flows.due[: due.size] = status, due
        self._clock.counts[:4] = (flows.status.size, 0, 1, 1)
        put_on_links(flows, self._links)

    def _first_row(self, serial: int) -> int:
        """Of a batch's flows that are not done, in the table, which has batches one after the other, and their flows in order."""
        return int(self._cargo.batch.searchsorted(serial))

    def _wake(self, time_s: float) -> None:
        """See to the flows at this time, after everything else that happens then."""
        if self._event is not None:
            self._engine.cancel(self._event)
        self._event = self._engine.at(time_s, self._advance, LATE)

    def _advance(self) -> None:
        self._event = None
        self._settle()
        why = COMPACT
        while why == COMPACT:
            told = np.empty(self._outstanding, dtype=np.int64)
            why, num_told, next_s = drain(
                self._flows,
                self._links,
                self._cargo,
                self._usage,
                self._tickets,
                self._clock,
                self._limit_s(),
                told,
            )
            self._tell(told[:num_told])
            if why == COMPACT:
                self._renew_table()
        if math.isfinite(next_s):
            self._wake(next_s)

    def _limit_s(self) -> float:
        """Nothing outside the network happens before."""
        return self._engine.next_s

    def _tell(self, told: IntArray) -> None:
        """Report tickets when they are due: one event for those of one batch and instant."""
        self._outstanding -= told.size
        if not told.size:
            return
        serials = self._tickets.batch[told]
        due_s = self._tickets.due_s[told]
        if told.size == 1:
            self._engine.at(float(due_s[0]), partial(self._report, self._batches[int(serials[0])], told))
            return
        order = np.lexsort((due_s, serials))
        told, serials, due_s = told[order], serials[order], due_s[order]
        cuts = np.flatnonzero((np.diff(serials) != 0) | (np.diff(due_s) != 0)) + 1
        for part, at in zip(np.split(told, cuts), [0, *cuts.tolist()], strict=True):
            batch = self._batches[int(serials[at])]
            self._engine.at(float(due_s[at]), partial(self._report, batch, part))

    def _report(self, batch: Batch, told: IntArray) -> None:
        batch.untold -= told.size
        if not batch.untold:
            del self._batches[batch.serial]
        batch.on_complete(told - batch.first_ticket, self._tickets.last[told])


def _cargo_of(transfers: Transfers, serial: int) -> Cargo:
    size = np.ascontiguousarray(transfers.size_bytes, dtype=np.float64)
    rows = np.arange(size.size, dtype=np.int64)
    groups = rows[:, None] if transfers.groups is None else transfers.groups
    shape = transfers.links.shape
    weights = np.zeros((0, 0)) if transfers.weights is None else np.ascontiguousarray(transfers.weights, dtype=np.float64)
    if not (len(shape) == 2 and shape[0] == len(groups) == transfers.latency_s.size == rows.size) or (
        len(weights) and weights.shape != shape
    ):
        raise SimulationError(
            f"a batch with links {shape}, weights {weights.shape}, {transfers.latency_s.size} latencies, {rows.size} sizes "
            f"and {len(groups)} groups"
        )
    if not 0 <= transfers.priority < LATER:
        raise SimulationError(f"priority {transfers.priority}; it must be from 0 to {LATER - 1}")
    unlimited = np.full(size.size, np.inf)
    return Cargo(
        path=np.ascontiguousarray(transfers.links, dtype=np.int32),
        weights=weights,
        size_bytes=size,
        latency_s=np.ascontiguousarray(transfers.latency_s, dtype=np.float64),
        limit_bytes_per_s=unlimited if transfers.limit_bytes_per_s is None else np.asarray(transfers.limit_bytes_per_s),
        priority=np.full(size.size, transfers.priority, dtype=np.int8),
        tickets=np.ascontiguousarray(groups, dtype=np.int64),
        position=rows,
        batch=np.full(rows.size, serial, dtype=np.int64),
    )


def _runs(rows: IntArray) -> list[slice | IntArray]:
    """What to index a column by for these rows, which are in order: those that follow each other at a time, since copying them
    together is several times as fast."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    if cuts.size * _SHORT > rows.size:
        return [rows]
    ends = [0, *cuts.tolist(), rows.size] if rows.size else [0]
    return [slice(int(rows[begin]), int(rows[end - 1]) + 1) for begin, end in pairwise(ends)]


def _column(parts: Sequence[NDArray[ScalarT]], runs: Sequence[slice | IntArray]) -> NDArray[ScalarT]:
    """The runs of the first part, and all of the others."""
    return np.concatenate([parts[0][:0], *(parts[0][run] for run in runs), *parts[1:]])


def _join(parts: list[Cargo], runs: Sequence[slice | IntArray]) -> Cargo:
    """One table of the first part's runs and of all other parts, as wide as the widest."""
    if not runs and len(parts) > 1:
        parts, runs = parts[1:], [slice(None)]
        if len(parts) == 1:
            return parts[0]
    width = max(part.path.shape[1] for part in parts)
    per_flow = max(part.tickets.shape[1] for part in parts)
    if len({part.tickets.shape[1] for part in parts}) > 1:
        raise SimulationError(f"batches in flight with different numbers of groups per flow, up to {per_flow}")
    weights = np.zeros((0, 0))
    if any(len(part.weights) for part in parts):
        some = [part.weights if len(part.weights) else np.ones(part.path.shape) for part in parts]
        weights = _column([_wide(one, width, 1.0) for one in some], runs)
    path = _column([_wide(part.path, width, -1) for part in parts], runs)
    rest = {
        name: _column([getattr(part, name) for part in parts], runs) for name in Cargo._fields if name not in ("path", "weights")
    }
    return Cargo(path=path, weights=weights, **rest)


def _wide(table: NDArray[ScalarT], width: int, value: float) -> NDArray[ScalarT]:
    return table if table.shape[1] == width else np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=value)


def _with_limits(cargo: Cargo, capacity: FloatArray) -> tuple[Int32Array, FloatArray, FloatArray]:
    """Paths and weights with each flow's own limit as one more link, and the capacities with these limits behind them."""
    limited = np.flatnonzero(np.isfinite(cargo.limit_bytes_per_s))
    if not limited.size:
        return cargo.path, cargo.weights, capacity
    limits, which = np.unique(cargo.limit_bytes_per_s[limited], return_inverse=True)
    num_flows, width = cargo.path.shape
    paths = np.full((num_flows, width + 1), -1, dtype=np.int32)
    paths[:, :width] = cargo.path
    paths[limited, (cargo.path[limited] >= 0).sum(axis=1)] = capacity.size + which
    weights = cargo.weights
    if len(weights):
        weights = np.pad(weights, ((0, 0), (0, 1)), constant_values=1.0)
        weights[limited, (cargo.path[limited] >= 0).sum(axis=1)] = 1.0
    return paths, weights, np.concatenate([capacity, limits])


def _index(cargo: Cargo, capacity: FloatArray, spare: float) -> tuple[FlowColumns, LinkColumns]:
    """Tables for the filling: paths over the links that can be full, and the flows on each of these. spare: share of a flow's
    bytes that may be left when it ends."""
    num_shared = capacity.size
    all_paths, all_weights, capacity = _with_limits(cargo, capacity)
    first, members = members_by_link(all_paths, capacity.size)
    can_fill = links_that_can_fill(all_paths, all_weights, first, members, capacity, num_shared) == 1
    kept = np.flatnonzero(can_fill)
    num_flows, num_links = cargo.size_bytes.size, kept.size
    # Paths are the cargo's own where nothing is left out; they are not written to.
    paths, weights = all_paths, all_weights
    if num_links < capacity.size:
        local = np.full(capacity.size, -1, dtype=np.int32)
        local[kept] = np.arange(num_links)
        paths = np.full((num_flows, longest(all_paths, local)), -1, dtype=np.int32)
        weights = np.ones(paths.shape) if len(all_weights) else np.zeros((0, 0))
        compress(all_paths, all_weights, local, paths, weights)
    priority, above = np.zeros(num_links, dtype=np.int8), np.zeros(0, dtype=np.int32)
    if num_flows and cargo.priority.min() < cargo.priority.max():
        paths = paths.copy()
        priority, link_of, above = by_priority(paths, cargo.priority, num_links)
        kept, num_links = kept[link_of], priority.size
        first, members = members_by_link(paths, num_links)
    elif paths is not all_paths:
        number = np.diff(first)
        members, first = members[np.repeat(can_fill, number)], np.concatenate([first[:1], number[kept].cumsum()])
    is_limit = (kept >= num_shared).astype(np.int8)
    above[is_limit[: above.size] == 1] = -1  # a limit is of each flow, there is nothing to leave
    flows = FlowColumns(
        links=paths,
        weights=weights,
        places=np.zeros(paths.shape, dtype=np.int32),
        status=np.full(num_flows, WAITING, dtype=np.int8),
        due=np.zeros(num_flows),
        spare_bytes=spare * cargo.size_bytes,
        full_link=np.full(num_flows, -1, dtype=np.int32),
    )
    links = LinkColumns(
        capacity=capacity[kept],
        priority=priority,
        above=above,
        is_limit=is_limit if is_limit.any() else is_limit[:0],
        first=first,
        num_members=np.zeros(num_links, dtype=np.int64),
        num_fixed=np.zeros(num_links, dtype=np.int64),
        members=members,
        fixed_by=np.zeros(members.size, dtype=np.uint32),
        weights=np.ones(members.size if len(weights) else 0),
        load=np.zeros(num_links),
        level=np.full(num_links, np.inf),
        served=np.zeros(num_links),
        since_s=np.zeros(num_links),
        least_due=np.full(num_links, np.inf),
        least_early=np.full(num_links, np.inf),
        soonest_s=np.full(num_links, np.inf),
        order=np.arange(num_links, dtype=np.int32),
        position=np.arange(num_links, dtype=np.int32),
        changed=np.zeros(num_links, dtype=np.int8),
    )
    return flows, links
