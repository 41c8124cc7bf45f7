"""The one seam under all exchanges between ranks: point-to-point messages over the process group.

All receives are posted first, then the messages leave one after the other, to the next higher rank first, wrapping
around. Ranks that differ at one level thereby form a shift: in the first turn everyone sends to its right neighbour, in
the next to the one after, so that no two of them send to the same site at once. The next message starts when the last
one is handed to the kernel, not when everybody is done: uneven messages do not wait for each other. Of a long message
one piece leaves per turn, or a site could be left with one large message to a busy peer at the end.

A send is done when the kernel has taken the bytes, so ``runtime.sockets`` lets it take little: else the order above would hold
in this process only. Measured with 4 sites x 2 ranks and TCP (Reno) at 50 and 200 Mbit/s, all ranks on 2 cores, as time over
bytes / rate of the busiest link, where 1.046 is the TCP/IP and Ethernet headers: 1.06 to 1.10 (experiments/link-use). Without
the limit 1.11 to 1.13; everything posted at once 1.04 to 1.31; a barrier between turns 1.03 to 1.10 for even but 1.21 to 1.51
for uneven messages. Smaller exchanges are ruled by the few milliseconds that a wake-up takes there.
Sending before the receives are posted halves the speed, because gloo keeps a message back until
the other side has announced its receive.

A level may have several streams: TCP connections per pair of ranks, each with a process group of its own, because one connection
has at most a window of bytes under way per round trip. Pieces take turns on them and as many are under way at once.

Background exchanges (copies that are needed later, checkpoints' files) leave in small pieces, each only while no other exchange
of this rank has messages to send at the same level, for as long as a transfer may take. A rank that has sent its tokens and waits
for others' is no reason to wait: where sites differ, that is most of the time. Waiting until no tokens come either was no faster
in the lab, nor were pieces to all peers at once.

Where ``runtime.device_links`` has a label, its messages go from GPU to GPU over NCCL instead, all at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from hybridep.errors import TransportError
from runtime import staging
from runtime.channels import Channel, Channels, stream_groups
from runtime.codecs.messages import Message, agreed_bytes, tensor_of
from runtime.device_links import DeviceLinks

_SHORTEST_WAIT_S = 1e-3
_PIECE_BYTES = 256 << 10
_SHORT_BYTES = 1 << 10
"""What fits into a packet leaves at once: it takes no time on a link, so it need not wait for its turn."""
_BACKGROUND_PATIENCE = 1.25
"""A background exchange waits longer than the timeout: the one that it gave way to must fail first, for it names the cause."""


class Urgency:
    """Which levels' links exchanges that are not in the background are sending over, on this rank; transports that share links
    share it."""

    def __init__(self, patience_s: float) -> None:
        """``patience_s``: so long at most an exchange in the background is kept back."""
        self.patience_s = patience_s
        self.sending: Counter[str] = Counter()
        """Exchanges by level."""
        self._calm = threading.Condition()
        self._closed = False

    @contextmanager
    def urgently(self, level: str) -> Iterator[None]:
        """What is sent meanwhile has the level's links."""
        with self._calm:
            self.sending[level] += 1
        try:
            yield
        finally:
            with self._calm:
                self.sending[level] -= 1
                self._calm.notify_all()

    def give_way(self, level: str, until_s: float) -> bool:
        """Wait until nothing urgent is sent there, or for that time (``time.perf_counter``); False when it was closed."""
        with self._calm:
            self._calm.wait_for(lambda: self._closed or not self.sending[level], timeout=max(until_s - time.perf_counter(), 0.0))
            return not self._closed

    def close(self) -> None:
        """Nobody waits any more."""
        with self._calm:
            self._closed = True
            self._calm.notify_all()


class Transport:
    """Exchanges between global ranks of the default process group, each complete or failed within ``timeout_s``.

    Any number of exchanges may be under way, from several threads. Of two that run under one label, every pair of ranks
    must start its messages in the same order; under different labels the order is free.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        on_span: Callable[[str, float, float], None] | None = None,
        streams: Mapping[str, int] | None = None,
        device_links: DeviceLinks | None = None,
        groups: Sequence[dist.ProcessGroup] = (),
        names: Sequence[int] = (),
        numbers: Mapping[str, int] | None = None,
        urgency: Urgency | None = None,
    ) -> None:
        """``streams``: level (what follows the ``@`` of a label) -> connections per pair of ranks, one where absent. With more
        than one all ranks must make their transports in the same order. ``groups``: connections in place of the default process
        group's, all of them for every level. ``names``: what errors call each rank; its own number where absent. ``numbers``: see
        ``Channels``. ``urgency``: of other transports that use the same links."""
        self.timeout_s = timeout_s
        self._device_links = device_links
        if groups:
            self._channels = Channels(groups, {}, least=len(groups), numbers=numbers)
        else:
            self._channels = Channels(stream_groups(max((streams or {}).values(), default=1)), streams or {}, numbers=numbers)
        self.sent_bytes: Counter[tuple[str, int]] = Counter()
        """Payload bytes handed over so far, by (label, peer)."""
        self._on_span = on_span  # called with (label, start, end), both by time.perf_counter, in seconds
        group = groups[0] if groups else dist.group.WORLD
        assert group is not None
        self._rank, self._num_ranks = group.rank(), group.size()
        self._names = names or range(self._num_ranks)
        self._lock = threading.Lock()
        self._urgency = urgency or Urgency(timeout_s)

    def exchange(self, sends: Mapping[int, Message], receives: Mapping[int, Message], label: str) -> None:
        """Send ``sends[peer]`` to and fill ``receives[peer]`` from each peer (a global rank, never one's own).

        Tensors are contiguous, of any type and shape, on any device (messages pass through host memory); both ends know the
        size, or, of an open message, the least size and the room there is for it. A message of no bytes is not sent.
        Raises :class:`TransportError` naming this rank, the peer, the label and the seconds waited, if the peer is gone
        or the timeout passes. The process group is of no use after that.
        """
        self.post(receives, label).exchange(sends)

    def exchange_in_background(self, sends: Mapping[int, Message], receives: Mapping[int, Message], label: str) -> None:
        """As :meth:`exchange`, but whenever an exchange that is not in the background is sending at the same level (what follows
        the ``@`` of its label) on this rank, this one's next piece waits. Both ends must call it so. Between GPUs of a site,
        where links are no bottleneck, it is like any other."""
        self.post_in_background(receives, label).exchange(sends)

    def close(self) -> None:
        """End background exchanges at their next piece; what they wait for in the network ends with its timeout."""
        self._urgency.close()

    def post(self, receives: Mapping[int, Message], label: str) -> Posted:
        """The receives of an exchange alone, announced to the peers; what is returned does the rest. A message leaves when its
        receive has been announced at its sender, so on a long link a receive that is posted at the last moment costs a round
        trip where one that is posted half a round trip before costs half of one."""
        if self._device_links is not None and label in self._device_links:
            return Posted(
                partial(self._begin_on_device, self._device_links, {p: tensor_of(m) for p, m in receives.items()}, label)
            )
        return self._post(receives, label, background=False)

    def post_in_background(self, receives: Mapping[int, Message], label: str) -> Posted:
        """As :meth:`post`, of an exchange in the background."""
        if self._device_links is not None and label in self._device_links:
            return self.post(receives, label)
        return self._post(receives, label, background=True)

    def _post(self, receives: Mapping[int, Message], label: str, *, background: bool) -> Posted:
        now, channel = _Naming(self._names, self._rank, label), self._channels.of(label)
        rooms = {peer: staging.Incoming(tensor_of(message)) for peer, message in receives.items()}
        incoming: list[tuple[int, dist.Work]] = []
        with self._lock, now:
            now.doing = "receive from"
            for now.peer, room in rooms.items():
                for piece in channel.pieces(room.host, _PIECE_BYTES, agreed_bytes(receives[now.peer])):
                    group, tag = channel.come(now.peer)
                    incoming.append((now.peer, group.recv([piece], now.peer, tag)))
        return Posted(partial(self._begin, channel, tuple(rooms.values()), incoming, background))

    def _begin_on_device(
        self, links: DeviceLinks, receives: Mapping[int, Tensor], label: str, sends: Mapping[int, Message]
    ) -> Callable[[], None]:
        """Queue all messages on the device; what is returned waits for them. None is open: plans have such between sites only."""
        now = _Naming(self._names, self._rank, label)
        now.doing, now.peer = "exchange with", " or ".join(str(self._names[peer]) for peer in sorted({*receives, *sends}))
        with now:
            leaving = {peer: tensor_of(message) for peer, message in sends.items()}
            with self._lock:
                for peer, tensor in leaving.items():
                    self.sent_bytes[label, peer] += tensor.nbytes
            # Without the lock: to start may take until the peer starts, too.
            works = links.start(leaving, receives, label)

        def finish() -> None:
            with now:
                links.wait(works)
            if self._on_span is not None:
                self._on_span(label, now.start, time.perf_counter())

        return finish

    def _begin(
        self,
        channel: Channel,
        rooms: Sequence[staging.Incoming],
        incoming: Sequence[tuple[int, dist.Work]],
        background: bool,
        sends: Mapping[int, Message],
    ) -> Callable[[], None]:
        """Number the messages to send; what is returned sends them, then waits for everything."""
        label = channel.label
        now = _Naming(self._names, self._rank, label)
        start_s = now.start
        outgoing: list[tuple[int, Tensor, dist.ProcessGroup, int]] = []
        with self._lock:
            for peer, piece in channel.in_turn(sends, self._distance, _PIECE_BYTES):
                outgoing.append((peer, piece, *channel.to(peer)))
                self.sent_bytes[label, peer] += piece.nbytes

        def finish() -> None:
            leaving = deque[tuple[int, Tensor, dist.Work]]()
            until_s = time.perf_counter() + self._urgency.patience_s

            def wait(work: dist.Work) -> None:
                if background:
                    # It may take as long as others need: what counts is that pieces come.
                    now.start = time.perf_counter()
                self._wait(work, now.start, _BACKGROUND_PATIENCE if background else 1.0)

            def let_go(most: int) -> None:
                while len(leaving) > most:
                    now.peer, _, work = leaving.popleft()
                    wait(work)

            with now:
                now.doing = "send to"
                with nullcontext() if background else self._urgency.urgently(channel.level):
                    for peer, message, group, tag in outgoing:
                        if message.nbytes > _SHORT_BYTES:
                            let_go(channel.streams - 1)
                        if background:
                            self._give_way(label, until_s)
                        held = staging.outgoing(message)
                        now.peer = peer
                        leaving.append((peer, held, group.send([held], peer, tag)))
                    let_go(0)
                now.doing = "receive from"
                for now.peer, work in incoming:
                    wait(work)
            for room in rooms:
                room.deliver()
            if self._on_span is not None:
                self._on_span(label, start_s, time.perf_counter())

        return finish

    def _give_way(self, label: str, until_s: float) -> None:
        # Of exchanges waited for one that takes too long fails first; many in a row must not keep this one back for ever.
        if not self._urgency.give_way(self._channels.of(label).level, until_s):
            raise TransportError(f"rank {self._names[self._rank]}", f"closed during {label!r}")

    def _distance(self, peer: int) -> int:
        return (peer - self._rank) % self._num_ranks

    def _wait(self, work: dist.Work, start: float, patience: float = 1.0) -> None:
        # Once per message and never again: gloo would wait for a second message that does not come.
        left_s = start + patience * self.timeout_s - time.perf_counter()
        work.wait(timedelta(seconds=max(left_s, _SHORTEST_WAIT_S)))


@dataclass(frozen=True, eq=False, slots=True)
class Posted:
    """An exchange whose receives are announced. Those of one label must begin in the order in which they were posted."""

    begin: Callable[[Mapping[int, Message]], Callable[[], None]]
    """Number the messages to send; what is returned sends them, and waits until everything has arrived."""

    def exchange(self, sends: Mapping[int, Message]) -> None:
        """Send, and wait until everything has arrived; as :meth:`Transport.exchange`."""
        self.begin(sends)()


class _Naming:
    """Turns what gloo raises inside into an error that says who waited for whom, in which exchange, and how long."""

    __slots__ = ("_label", "_names", "_rank", "doing", "peer", "start")

    def __init__(self, names: Sequence[int], rank: int, label: str) -> None:
        self._names, self._rank, self._label, self.start = names, rank, label, time.perf_counter()
        self.doing = ""
        self.peer: int | str = rank

    def __enter__(self) -> _Naming:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError):
            waited_s = time.perf_counter() - self.start
            peer = self._names[self.peer] if isinstance(self.peer, int) else self.peer
            raise TransportError(
                f"rank {peer}",
                f"rank {self._names[self._rank]} could not {self.doing} it in {self._label!r}, {waited_s:.1f} s after start: "
                f"{_reason(error)}",
            ) from error


def _reason(error: RuntimeError) -> str:
    """Of an error of gloo's, which begins with the place in its code and may end with advice to read logs."""
    line = (str(error).splitlines() or ["no reason given"])[0].removeprefix("[").split("] ", 1)[-1]
    return line.partition(". This is typically")[0]
