"""The time of a step whose copies set out ahead of their blocks and give way to tokens (``plan.Schedule.prefetch``).

Two streams on the slowest rank. The main one is a chain: computation, and token exchanges, which take the time that they take
alone. The other is a queue of copies and of their gradients; its first exchange moves while the main stream computes, and while
tokens travel with what these leave free of each link. Where the main stream needs a copy that is not there, it waits: only
that shows. So the step is found by walking along the chain once. Where all workers are alike it is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridep.arrays import FloatArray
from hybridep.plan import Residency
from hybridep.traffic import MOVES, SHARED, Op, OpLevel, Traffic
from planner.exchange import ExchangeTimes

_FULL = 1e-9
"""Share of a link below which nothing is left of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfer:
    """One exchange that has the links to itself."""

    op: Op
    latency_s: float
    """After the last byte has left; the links are free then."""
    busy_s: float
    """The busiest link's bytes over its bandwidth; or what windows make of it, where that is longer."""
    link_s: FloatArray
    """[links]: of every link."""
    windows_s: float = 0.0
    """What windows make of it, whatever the links."""
    encode_s: float = 0.0
    """Before the first byte leaves."""
    decode_s: float = 0.0
    """After the last one has arrived."""

    def pace_beside(self, urgent: Transfer) -> float:
        """Share of its own speed that this one reaches with what ``urgent`` leaves free."""
        used = self.link_s > 0
        free = 1.0 - urgent.link_s[used] / urgent.busy_s
        if (free < _FULL).any():
            return 0.0
        return self.busy_s / max(float((self.link_s[used] / free).max()), self.windows_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """One MoE layer in one micro-batch."""

    residency: Residency
    pre_expert_s: float
    """With the block's overhead; forward."""
    pre_expert_backward_s: float
    expert_s: float
    expert_backward_s: float
    transfers: dict[OpLevel, Transfer]
    """Those that move anything."""
    gather_coding_s: float = 0.0
    """What coding and decoding its copies takes from computation."""
    return_coding_s: float = 0.0
    """And their gradients."""

    def hops(self, op: Op, *, inwards: bool) -> list[Transfer]:
        """Of one kind, by level, outermost or innermost first."""
        levels = sorted((level for kind, level in self.transfers if kind is op), reverse=not inwards)
        return [self.transfers[OpLevel(op, level)] for level in levels]


def block_transfers(
    network: ExchangeTimes, traffic: Traffic, coding_s: Mapping[OpLevel, tuple[float, float]] | None = None
) -> dict[OpLevel, Transfer]:
    """Of ``planner.cost.layer_traffic`` and ``planner.cost.layer_coding``."""
    found = {}
    for key, sent in traffic.items():
        if sent.any():
            link_s = network.loads_bytes({key: sent}) / network.bandwidths_bytes_per_s
            latency_s, windows_s = network.latency_s(key, sent), network.windows_s(key.level, sent)
            encode_s, decode_s = (coding_s or {}).get(key, (0.0, 0.0))
            found[key] = Transfer(
                op=key.op,
                latency_s=latency_s,
                busy_s=max(float(link_s.max()), windows_s),
                link_s=link_s,
                windows_s=windows_s,
                encode_s=encode_s,
                decode_s=decode_s,
            )
    return found


@dataclass(slots=True, eq=False)
class _Hop:
    """An exchange in the queue."""

    transfer: Transfer
    left_s: float
    """Of its busy time, at full pace."""
    arrives_s: float
    """Left of its latency, and of decoding, once that is over. What is left of encoding is such a hop of its own."""

    @property
    def is_done(self) -> bool:
        return self.left_s <= 0.0 and self.arrives_s <= 0.0


@dataclass(kw_only=True, eq=False)
class Walk:
    """The two streams at one moment of the chain."""

    exposed_s: dict[Op, float] = field(default_factory=lambda: dict.fromkeys(MOVES, 0.0))
    """Seconds that the main stream waited, by what travelled meanwhile."""
    queue: deque[_Hop] = field(default_factory=deque)
    _paces: dict[tuple[int, int], float] = field(default_factory=dict)

    def enqueue(self, transfers: Sequence[Transfer]) -> _Hop | None:
        """Returns the last."""
        hops = [
            hop
            for transfer in transfers
            for hop in (
                _Hop(transfer, 0.0, transfer.encode_s),
                _Hop(transfer, transfer.busy_s, transfer.latency_s + transfer.decode_s),
            )
        ]
        self.queue.extend(hops)
        return hops[-1] if hops else None

    def run(self, seconds: float, urgent: Transfer | None = None) -> None:
        """The main stream computes for so long, or its tokens use the links."""
        while seconds > 0.0 and self.queue:
            hop = self.queue[0]
            if hop.left_s > 0.0:
                pace = 1.0 if urgent is None else self._pace(hop.transfer, urgent)
                if pace * seconds < hop.left_s:
                    hop.left_s -= pace * seconds
                    return
                seconds -= hop.left_s / pace
                hop.left_s = 0.0
            passed = min(seconds, hop.arrives_s)
            hop.arrives_s -= passed
            seconds -= passed
            if hop.is_done:
                self.queue.popleft()

    def tokens(self, transfers: Sequence[Transfer]) -> None:
        """The main stream exchanges tokens."""
        for transfer in transfers:
            self.run(transfer.encode_s)
            self.run(transfer.busy_s, transfer)
            self.run(transfer.latency_s + transfer.decode_s)

    def wait(self, last: _Hop | None) -> None:
        """The main stream needs what the queue holds up to and with ``last``."""
        while last is not None and not last.is_done:
            hop = self.queue.popleft()
            self.exposed_s[hop.transfer.op] += hop.left_s + hop.arrives_s
            hop.left_s = hop.arrives_s = 0.0

    def wait_for_all(self) -> None:
        """The step ends."""
        if self.queue:
            self.wait(self.queue[-1])

    def _pace(self, transfer: Transfer, urgent: Transfer) -> float:
        key = id(transfer), id(urgent)
        if key not in self._paces:
            self._paces[key] = transfer.pace_beside(urgent)
        return self._paces[key]


def exposed_s(
    blocks: Sequence[Block], *, depth: int, micro_batches: int, head_s: float, head_again_s: float = 0.0
) -> dict[Op, float]:
    """Seconds of one step in which computation and tokens wait for each of ``MOVES``. ``blocks`` has one entry per MoE layer, in
    order; ``head_s`` is the forward of what lies outside them, of which backward computes ``head_again_s`` a second time."""
    walk = Walk()
    if all(block.residency is Residency.STEP for block in blocks):
        # Between the first micro-batch, which awaits all copies, and the last one nothing is copied.
        micro_batches = min(micro_batches, 2)
    for batch in range(micro_batches):
        _forward(walk, blocks, depth, is_first=batch == 0)
        walk.run(head_s)
        _backward(walk, blocks, depth, 2 * head_s, is_last=batch == micro_batches - 1)
        walk.run(head_again_s)
    walk.wait_for_all()
    return walk.exposed_s


def _forward(walk: Walk, blocks: Sequence[Block], depth: int, *, is_first: bool) -> None:
    gathers: dict[int, _Hop | None] = {}
    for here, block in enumerate(blocks):
        for layer in range(here, min(here + depth + 1, len(blocks))):
            if layer not in gathers and (is_first or blocks[layer].residency is Residency.MICROBATCH):
                gathers[layer] = walk.enqueue(blocks[layer].hops(Op.EXPERT_GATHER, inwards=True))
        if is_first or block.residency is Residency.MICROBATCH:
            walk.run(block.gather_coding_s)
        walk.run(block.pre_expert_s)
        # Level by level: how many rows follow, then the rows.
        for level in sorted({level for _, level in block.transfers}):
            steps = (OpLevel(op, level) for op in (Op.TOKEN_COUNTS, Op.TOKEN_DISPATCH))
            walk.tokens([block.transfers[step] for step in steps if step in block.transfers])
        walk.wait(gathers.get(here))
        walk.run(block.expert_s)
        walk.tokens(block.hops(Op.TOKEN_COMBINE, inwards=False))


def _backward(walk: Walk, blocks: Sequence[Block], depth: int, head_backward_s: float, *, is_last: bool) -> None:
    gathers: dict[int, _Hop | None] = {}
    returns: dict[int, _Hop | None] = {}
    top = len(blocks) - 1

    def gather(down_to: int, up_to: int) -> None:
        for layer in range(up_to, max(down_to, 0) - 1, -1):
            if layer not in gathers and blocks[layer].residency is Residency.MICROBATCH:
                gathers[layer] = walk.enqueue(blocks[layer].hops(Op.EXPERT_GATHER, inwards=True))

    gather(top - depth + 1, top)
    walk.run(head_backward_s)
    for here in range(top, -1, -1):
        block = blocks[here]
        each_time = block.residency is Residency.MICROBATCH
        gather(here - depth, here)
        walk.run(block.gather_coding_s if each_time else 0.0)
        walk.tokens(block.hops(Op.COMBINE_BACKWARD, inwards=True))
        walk.wait(gathers.get(here))
        above = here + depth + 1
        if above <= top and blocks[above].residency is Residency.MICROBATCH:
            walk.wait(returns.get(above))
        walk.run(block.expert_backward_s)
        if each_time or is_last:
            returned = block.hops(Op.GRADIENT_RETURN, inwards=False)
            if is_last:
                returned += block.hops(SHARED[0], inwards=False) + block.hops(SHARED[1], inwards=True)
            returns[here] = walk.enqueue(returned)
        walk.tokens(block.hops(Op.DISPATCH_BACKWARD, inwards=False))
        if each_time or is_last:
            walk.run(block.return_coding_s)
        walk.run(block.pre_expert_backward_s)
