"""Programs of operations over ranks, each a computation or an exchange, run with per-rank dependencies only.

A rank enters an operation when it has finished all operations that this one comes after; no rank waits for ranks that
it does not exchange with. A flow starts once both its ends have entered the exchange (a message of any size moves
only when its receive is posted), and a rank leaves the exchange when all its sends and receives are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from hybridep.arrays import BoolArray, FloatArray, IntArray
from simulator.engine import Engine
from simulator.errors import SimulationError, StuckError
from simulator.network import Batch, Network, Transfers
from simulator.turns import Turns


@dataclass(frozen=True, kw_only=True)
class Flows:
    """The transfers of one exchange, one row per transfer, [n] each; transfers of no bytes are left out beforehand."""

    source: IntArray
    destination: IntArray
    transfers: Transfers
    """Over which links, and how much."""

    @cached_property
    def by_rank(self) -> tuple[Transfers, IntArray]:
        """The same, each transfer in the groups of its two ends; and the rank of each group."""
        ends = np.stack([self.source, self.destination], axis=1)
        ranks, groups = np.unique(ends, return_inverse=True)
        return replace(self.transfers, groups=groups.reshape(ends.shape).astype(np.int64)), ranks


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One step of the program for all ranks."""

    label: str
    """Kind of operation; results are summed over operations with the same label."""
    after: tuple[int, ...]
    """Operations, by position, that a rank must have finished before it enters this one."""
    seconds: FloatArray | None = None
    """[ranks] of a computation."""
    flows: Flows | None = None
    """Of an exchange."""
    level: int | None = None
    """Of the hierarchy, between whose workers an exchange runs; only shown."""
    beside: bool = False
    """A computation beside the rank's own chain; only shown."""
    priority: int = 0
    """An exchange gets what those of lower numbers leave on the links."""
    ranks: BoolArray | None = None
    """[ranks] that take part; None for all. The others are never in it, and nothing of theirs waits for it."""
    pause: bool = False
    """A computation that takes no processor."""
    name: str = ""
    """Where in the step ("layer 3, micro-batch 0"); only shown."""


@dataclass(kw_only=True)
class Program:
    """Operations in the order in which they were added; an operation can only come after earlier ones."""

    num_ranks: int
    processors: int | None = None
    """That all ranks share, taking turns; None where each has its own."""
    operations: list[Operation] = field(default_factory=list)

    def compute(
        self,
        label: str,
        seconds: FloatArray,
        after: Sequence[int],
        name: str = "",
        *,
        beside: bool = False,
        ranks: BoolArray | None = None,
        pause: bool = False,
    ) -> int:
        """Add a computation of `seconds` [ranks]; return its position."""
        if seconds.shape != (self.num_ranks,) or not (np.isfinite(seconds).all() and (seconds >= 0).all()):
            raise SimulationError(f"{label} {name}: needs {self.num_ranks} finite durations that are not negative")
        made = Operation(label=label, after=tuple(after), seconds=seconds, name=name, beside=beside, ranks=ranks, pause=pause)
        return self._add(made)

    def exchange(
        self,
        label: str,
        flows: Flows,
        after: Sequence[int],
        name: str = "",
        *,
        level: int | None = None,
        priority: int = 0,
        ranks: BoolArray | None = None,
    ) -> int:
        """Add an exchange, between no others than those `ranks`; return its position."""
        made = Operation(label=label, after=tuple(after), flows=flows, level=level, name=name, priority=priority, ranks=ranks)
        return self._add(made)

    def _add(self, operation: Operation) -> int:
        position = len(self.operations)
        for earlier in operation.after:
            if not 0 <= earlier < position:
                raise SimulationError(
                    f"{operation.label} {operation.name}: comes after operation {earlier}, of {position} so far"
                )
        self.operations.append(operation)
        return position


@dataclass(frozen=True, kw_only=True)
class Execution:
    """When each rank was in each operation."""

    start_s: FloatArray
    """[operations, ranks]: when the rank entered, its dependencies finished; 0 where it takes no part."""
    end_s: FloatArray
    """[operations, ranks]: when the rank left."""
    gate: IntArray
    """[operations, ranks]: whom the rank waited for. Of the transfer that completed last for it in an exchange, the end
    that entered later (the transfer began then); the rank itself in a computation."""

    @property
    def makespan_s(self) -> float:
        """When the last rank finished."""
        return float(self.end_s.max(initial=0.0))


Changes = Iterator[tuple[float, FloatArray, bool]]
"""When, in rising order, links get other capacities, which ([links], as `Network.set_capacity`), and whether a link that is cut
then may carry something again later. May go on for ever."""

Progress = Callable[[float], None]
"""Takes the share of all ranks' operations that is done, whenever it is a thousandth more."""


def execute(
    program: Program, engine: Engine, network: Network, changes: Changes | None = None, progress: Progress | None = None
) -> Execution:
    """Run a program from the engine's present to its end; links change until then. Raises StuckError when it cannot end."""
    return _Executor(program, engine, network, iter(()) if changes is None else changes, progress).run()


_AHEAD, _FEW_FLOWS = 64, 4000
"""The next operations of which exchanges are prepared together, and flows of these in all, at most."""


@dataclass(slots=True)
class _Exchange:
    """An exchange in progress."""

    batch: Batch
    entered: BoolArray
    """[ranks]"""
    idle: BoolArray
    """[ranks]: neither sends nor receives."""
    waiting: IntArray
    """Flows, by position, that have not started."""
    ranks_inside: int


class _Executor:
    def __init__(self, program: Program, engine: Engine, network: Network, changes: Changes, progress: Progress | None) -> None:
        self._changes = changes
        self._progress = progress
        self._told = 0
        """Thousandths, of `progress`."""
        self._may_mend = True
        self._operations = program.operations
        self._num_ranks = program.num_ranks
        self._engine = engine
        self._network = network
        self._turns = Turns(engine, program.processors) if program.processors else None
        shape = (len(self._operations), self._num_ranks)
        self._start_s = np.zeros(shape)
        self._end_s = np.zeros(shape)
        self._gate = np.tile(np.arange(self._num_ranks), (shape[0], 1))
        self._waits_for = np.zeros(shape, dtype=np.int32)
        self._followers: list[list[int]] = [[] for _ in self._operations]
        self._unfinished = 0
        for position, operation in enumerate(self._operations):
            for earlier in set(operation.after):
                others = self._operations[earlier].ranks
                self._waits_for[position] += 1 if others is None else others
                self._followers[earlier].append(position)
            self._unfinished += self._num_ranks if operation.ranks is None else int(operation.ranks.sum())
        self._in_all = self._unfinished
        self._exchanges: dict[int, _Exchange] = {}
        self._is_prepared = np.zeros(shape[0], dtype=np.bool_)

    def run(self) -> Execution:
        for position, operation in enumerate(self._operations):
            at_once = self._waits_for[position] == 0
            ranks = np.flatnonzero(at_once if operation.ranks is None else at_once & operation.ranks)
            if ranks.size:
                self._enter(position, ranks)
        self._await_change()
        self._engine.run()
        if self._unfinished:
            raise StuckError(f"{self._unfinished} rank operations never ran: an exchange waits for itself or for a cut link")
        return Execution(start_s=self._start_s, end_s=self._end_s, gate=self._gate)

    def _tell(self, progress: Progress) -> None:
        done = 1 - self._unfinished / self._in_all
        if int(1000 * done) > self._told:
            self._told = int(1000 * done)
            progress(done)

    def _await_change(self) -> None:
        change = next(self._changes, None)
        if change is not None:
            self._engine.at(change[0], partial(self._change, *change[1:]))

    def _change(self, capacity: FloatArray, may_mend: bool) -> None:
        # Where no transfer moves and no rank computes, only links that are cut no longer bring it on.
        is_stuck = math.isinf(self._engine.next_s) and not self._may_mend
        if self._unfinished and not is_stuck:
            self._may_mend = may_mend
            self._network.set_capacity(capacity)
            self._await_change()

    def _enter(self, position: int, ranks: IntArray) -> None:
        self._start_s[position, ranks] = self._engine.now_s
        operation = self._operations[position]
        if operation.seconds is not None:
            seconds = operation.seconds[ranks]
            if self._turns is not None and not operation.pause:
                for rank, duration_s in zip(ranks.tolist(), seconds.tolist(), strict=True):
                    done = partial(self._leave, position, np.array([rank]))
                    self._turns.compute(rank, duration_s, done, beside=operation.beside)
                return
            for duration_s in sorted(set(seconds.tolist())):
                # Through the queue even when it takes no time: a chain of such operations must not recurse.
                self._engine.after(duration_s, partial(self._leave, position, ranks[seconds == duration_s]))
        elif operation.flows is not None:
            self._enter_exchange(position, operation.flows, ranks)

    def _enter_exchange(self, position: int, flows: Flows, ranks: IntArray) -> None:
        if position not in self._exchanges:
            self._prepare(position)
        exchange = self._exchanges[position]
        exchange.entered[ranks] = True
        idle = ranks[exchange.idle[ranks]]
        if idle.size:
            self._engine.after(0.0, partial(self._leave_exchange, position, idle))
        waiting = exchange.waiting
        ready = exchange.entered[flows.source[waiting]] & exchange.entered[flows.destination[waiting]]
        if ready.any():
            self._network.start(exchange.batch, waiting[ready])
            exchange.waiting = waiting[~ready]

    def _prepare(self, first: int) -> None:
        """An exchange, and those of few flows that follow it in the program: the network takes in many batches at a time about as
        fast as one."""
        flows_in_all = 0
        for position in range(first, min(first + _AHEAD, len(self._operations))):
            operation = self._operations[position]
            flows = operation.flows
            if flows is None or position in self._exchanges or self._is_prepared[position]:
                continue
            flows_in_all += flows.source.size
            if position > first and flows_in_all > _FEW_FLOWS:
                break
            self._is_prepared[position] = True
            transfers, members = flows.by_rank
            transfers = replace(transfers, priority=operation.priority)
            exchange = self._exchanges[position] = _Exchange(
                batch=self._network.prepare(transfers, partial(self._arrived, position, flows, members)),
                entered=np.zeros(self._num_ranks, dtype=np.bool_),
                idle=np.ones(self._num_ranks, dtype=np.bool_),
                waiting=np.arange(flows.source.size),
                ranks_inside=self._num_ranks if operation.ranks is None else int(operation.ranks.sum()),
            )
            exchange.idle[members] = False

    def _arrived(self, position: int, flows: Flows, members: IntArray, groups: IntArray, last: IntArray) -> None:
        """Some ranks have sent and received all."""
        ranks = members[groups]
        source, destination = flows.source[last], flows.destination[last]
        entered_s = self._start_s[position]
        self._gate[position, ranks] = np.where(entered_s[source] >= entered_s[destination], source, destination)
        self._leave_exchange(position, ranks)

    def _leave_exchange(self, position: int, ranks: IntArray) -> None:
        exchange = self._exchanges[position]
        exchange.ranks_inside -= ranks.size
        if not exchange.ranks_inside:
            del self._exchanges[position]
        self._leave(position, ranks)

    def _leave(self, position: int, ranks: IntArray) -> None:
        self._end_s[position, ranks] = self._engine.now_s
        self._unfinished -= ranks.size
        if self._progress is not None:
            self._tell(self._progress)
        for follower in self._followers[position]:
            waits_for = self._waits_for[follower]
            waits_for[ranks] -= 1
            ready = ranks[waits_for[ranks] == 0]
            takes_part = self._operations[follower].ranks
            if takes_part is not None:
                ready = ready[takes_part[ready]]
            if ready.size:
                self._enter(follower, ready)
