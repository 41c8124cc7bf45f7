"""A fluid network over the engine: flows share links max-min fairly and finish when their bytes have passed."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import numpy.typing as npt

from simulator.engine import LATE, Engine, Event
from simulator.errors import SimulationError
from simulator.flow import FloatArray, IntArray, max_min_rates
from simulator.flow_compiled import Fill, Solver, compiled_fill

BoolArray = npt.NDArray[np.bool_]
OnComplete = Callable[[IntArray], None]
_Solution = tuple[FloatArray, BoolArray]
"""Rates of the active paths, and which links they use."""

_EARLY = 1e-9
"""A flow may end early by this share of its own duration, together with one that ends: rounding would otherwise split
flows that are equal by symmetry into as many events."""

_CACHED_SOLUTIONS = 1024

_COMPILE_AFTER = 100
"""Solutions that were not found again before the compiled solver is loaded, which takes about a second."""


@dataclass(slots=True)
class _Flows:
    """Columns of the flows in the network. A flow that is done keeps its row, with no count and bytes that never end,
    until rows are dropped together."""

    path: IntArray
    left_bytes: FloatArray
    count: FloatArray
    start_s: FloatArray
    batch: IntArray
    index: IntArray
    """Position in the batch it was started with."""

    def select(self, which: IntArray | BoolArray) -> _Flows:
        return _Flows(*(getattr(self, name)[which] for name in _COLUMNS))

    @staticmethod
    def join(parts: Sequence[_Flows]) -> _Flows:
        return _Flows(*(np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS))


_COLUMNS = tuple(column.name for column in fields(_Flows))


def _new_flows(path: IntArray, size_bytes: FloatArray, count: FloatArray, start_s: float, batch: int) -> _Flows:
    rows = np.arange(path.size, dtype=np.int64)
    return _Flows(path, size_bytes.copy(), count.copy(), np.full(path.size, start_s), np.full_like(rows, batch), rows)


class Network:
    """Links with capacities, and the flows on them.

    A flow occupies its links from its start until its bytes have left, and is delivered one latency later: the sender's
    link is busy at once, as with a real socket, and distance delays the arrival only. Rates are solved anew once per
    instant in which flows start or end. A solution depends on nothing but how many flows are on each path, so solutions
    are kept and found again when a later layer puts the same flows on the network; where that fails too often, the
    compiled solver takes over.
    """

    def __init__(self, engine: Engine, link_capacity_bytes_per_s: Sequence[float] | FloatArray) -> None:
        capacity = np.asarray(link_capacity_bytes_per_s, dtype=np.float64)
        bad = np.flatnonzero(~((capacity > 0) & np.isfinite(capacity)))
        if bad.size:
            raise SimulationError(
                f"link {bad[0]} has capacity {float(capacity[bad[0]])!r} bytes/s; every link needs a positive, finite one"
            )
        self._engine = engine
        self._capacity = capacity
        self._path_links = np.full((0, 0), -1, dtype=np.int64)
        self._path_latency_s = np.zeros(0)
        self._path_ids: dict[tuple[tuple[int, ...], float], int] = {}
        none = np.zeros(0)
        self._flows = _new_flows(none.astype(np.int64), none, none, 0.0, 0)
        self._num_moving = 0
        self._rate_bytes_per_s = none
        self._end_s = none
        self._solver: Solver | None = None
        self._arrivals: list[_Flows] = []
        self._callbacks: dict[int, OnComplete] = {}
        self._undelivered: dict[int, int] = {}
        self._num_batches = 0
        self._settled_s = 0.0
        self._link_bytes = np.zeros(capacity.size)
        self._link_busy_s = np.zeros(capacity.size)
        self._link_used = np.zeros(capacity.size, dtype=np.bool_)
        self._solve_event: Event | None = None
        self._finish_event: Event | None = None
        self._solutions: OrderedDict[bytes, _Solution] = OrderedDict()
        self._num_solved = 0
        self._fill: Fill | None = None

    @property
    def link_capacity_bytes_per_s(self) -> FloatArray:
        """[links]"""
        return self._capacity

    @property
    def link_bytes(self) -> FloatArray:
        """[links] Bytes of all flows started so far whose path crosses the link: exact, counted at the start."""
        return self._link_bytes.copy()

    @property
    def link_busy_s(self) -> FloatArray:
        """[links] Seconds with at least one flow on the link, up to the last start or end of a flow."""
        return self._link_busy_s.copy()

    def path(self, links: Sequence[int], latency_s: float) -> int:
        """The id of a path over these links, in order; the same links and latency give the same id.

        Raises SimulationError for an unknown link or a latency that is negative or not finite.
        """
        key = (tuple(links), latency_s)
        known = self._path_ids.get(key)
        if known is not None:
            return known
        for link in links:
            if not 0 <= link < self._capacity.size:
                raise SimulationError(f"path {key[0]} names link {link}, but there are {self._capacity.size} links")
        if not (math.isfinite(latency_s) and latency_s >= 0):
            raise SimulationError(f"path {key[0]} has latency {latency_s!r} s; it must be finite and not negative")
        path = len(self._path_ids)
        self._path_ids[key] = path
        rows, width = self._path_links.shape
        if path >= rows or len(key[0]) > width:
            grown = np.full((max(16, 2 * rows, path + 1), max(width, len(key[0]))), -1, dtype=np.int64)
            grown[:rows, :width] = self._path_links
            self._path_links = grown
            self._path_latency_s = np.append(self._path_latency_s, np.zeros(grown.shape[0] - rows))
        self._path_links[path, : len(key[0])] = key[0]
        self._path_latency_s[path] = latency_s
        return path

    def start(
        self,
        paths: Sequence[int] | IntArray,
        sizes_bytes: Sequence[float] | FloatArray,
        on_complete: OnComplete,
        counts: Sequence[float] | FloatArray | None = None,
    ) -> None:
        """Start a batch of flows now.

        paths: [n] ids from `path`. sizes_bytes: [n]. counts: [n], how many identical flows each row stands for (1).
        on_complete: called with the rows (positions in this batch) that arrive at one instant, until all have.
        A flow of no bytes, or over no links, arrives after its latency.
        """
        path = np.asarray(paths, dtype=np.int64)
        size = np.asarray(sizes_bytes, dtype=np.float64)
        count = np.ones(path.size) if counts is None else np.asarray(counts, dtype=np.float64)
        if not (path.shape == size.shape == count.shape and path.ndim == 1):
            raise SimulationError(f"a batch with {path.shape} paths, {size.shape} sizes and {count.shape} counts")
        if path.size == 0:
            return
        if not (np.isfinite(size).all() and (size >= 0).all() and (count >= 1).all()):
            raise SimulationError("flow sizes must be finite and not negative, counts at least 1")
        batch = self._num_batches
        self._num_batches += 1
        self._callbacks[batch] = on_complete
        self._undelivered[batch] = path.size
        links = self._path_links[path]
        on_link = links >= 0
        passed = np.broadcast_to((size * count)[:, None], links.shape)
        self._link_bytes += np.bincount(links[on_link], weights=passed[on_link], minlength=self._capacity.size)
        new = _new_flows(path, size, count, self._engine.now_s, batch)
        moving = (size > 0) & on_link.any(axis=1)
        if not moving.all():
            self._deliver(new.select(~moving))
            new = new.select(moving)
        if new.path.size:
            self._arrivals.append(new)
            self._solve_later()

    def _solve_later(self) -> None:
        # LATE: whatever else starts or ends at this instant shares the one solution.
        if self._solve_event is None:
            self._solve_event = self._engine.after(0.0, self._solve, LATE)

    def _settle(self) -> None:
        """Bring the flows' remaining bytes up to the clock."""
        elapsed_s = self._engine.now_s - self._settled_s
        self._settled_s = self._engine.now_s
        if elapsed_s > 0 and self._num_moving:
            self._flows.left_bytes -= self._rate_bytes_per_s * elapsed_s
            self._link_busy_s[self._link_used] += elapsed_s

    def _update_rows(self) -> None:
        """Take in new flows, and drop the rows of those that are done once they are the majority."""
        flows = self._flows
        keep_all = self._num_moving * 2 >= flows.path.size
        if keep_all and not self._arrivals:
            return
        if not keep_all:
            flows = flows.select(flows.count > 0)
        self._num_moving += sum(part.path.size for part in self._arrivals)
        self._flows = _Flows.join([flows, *self._arrivals])
        self._arrivals = []
        self._rate_bytes_per_s = np.ones(self._flows.path.size)
        self._solver = None

    def _solve(self) -> None:
        """Give every flow its rate and wait for the first to finish."""
        self._solve_event = None
        self._settle()
        self._update_rows()
        if self._finish_event is not None:
            self._engine.cancel(self._finish_event)
            self._finish_event = None
        if not self._num_moving:
            return
        if self._fill is None:
            self._solve_by_path()
        else:
            if self._solver is None:
                links = self._path_links[self._flows.path]
                self._solver = Solver(self._fill, self._capacity, links, self._flows.count)
            self._rate_bytes_per_s = self._solver.solve()
            self._link_used = self._solver.used
        # Rounding can leave a little less than nothing.
        self._end_s = np.maximum(self._flows.left_bytes, 0.0) / self._rate_bytes_per_s
        self._end_s += self._engine.now_s
        self._finish_event = self._engine.at(float(self._end_s.min()), self._finish)

    def _solve_by_path(self) -> None:
        """Solve for the number of flows on each path, or find the solution of an earlier time."""
        flows = self._flows
        per_path = np.bincount(flows.path, weights=flows.count).astype(np.float64, copy=False)
        active = np.flatnonzero(per_path)
        counts = per_path[active]
        key = active.tobytes() + counts.tobytes()
        solution = self._solutions.get(key)
        if solution is None:
            links = self._path_links[active]
            used = np.zeros(self._capacity.size, dtype=np.bool_)
            used[links[links >= 0]] = True
            solution = max_min_rates(self._capacity, links, counts), used
            self._solutions[key] = solution
            if len(self._solutions) > _CACHED_SOLUTIONS:
                self._solutions.popitem(last=False)
            self._num_solved += 1
            if self._num_solved == _COMPILE_AFTER:
                self._fill = compiled_fill()
        rates, used = solution
        per_path[:] = 1.0
        per_path[active] = rates
        self._rate_bytes_per_s = per_path[flows.path]
        self._link_used = used

    def _finish(self) -> None:
        """Take out the flows that are done: at least the one this event was set for, so that rounding cannot stall."""
        self._finish_event = None
        self._settle()
        flows, now_s = self._flows, self._engine.now_s
        clock_step_s = math.ulp(now_s)
        near = np.flatnonzero(self._end_s <= now_s * (1.0 + _EARLY) + clock_step_s)
        slack_s = np.maximum(_EARLY * (now_s - flows.start_s[near]), clock_step_s)
        done = near[self._end_s[near] <= now_s + slack_s]
        gone = flows.select(done)
        flows.count[done] = 0.0
        flows.left_bytes[done] = np.inf
        self._num_moving -= done.size
        if self._solver is not None:
            self._solver.remove(done)
        self._deliver(gone)
        self._solve_later()

    def _deliver(self, flows: _Flows) -> None:
        """Report flows whose bytes have left, one latency from now; one event for those of equal latency and batch."""
        latency_s = self._path_latency_s[flows.path]
        if flows.path.size == 1:
            self._engine.after(float(latency_s[0]), partial(self._report, int(flows.batch[0]), flows.index))
            return
        for batch in np.unique(flows.batch).tolist():
            of_batch = flows.batch == batch
            for delay_s in np.unique(latency_s[of_batch]).tolist():
                rows = flows.index[of_batch & (latency_s == delay_s)]
                self._engine.after(delay_s, partial(self._report, batch, rows))

    def _report(self, batch: int, rows: IntArray) -> None:
        on_complete = self._callbacks[batch]
        self._undelivered[batch] -= rows.size
        if not self._undelivered[batch]:
            del self._callbacks[batch], self._undelivered[batch]
        on_complete(rows)
