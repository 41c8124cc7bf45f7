"""The one seam under all exchanges between ranks: point-to-point messages over the process group.

All receives are posted first, then the messages leave one after the other, to the next higher rank first, wrapping
around. Ranks that differ at one level thereby form a shift: in the first turn everyone sends to its right neighbour, in
the next to the one after, so that no two of them send to the same site at once. The next message starts when the last
one is handed to the kernel, not when everybody is done: uneven messages do not wait for each other. Of a long message
one piece leaves per turn, or a site could be left with one large message to a busy peer at the end.

A send is done when the kernel has taken the bytes, so ``runtime.sockets`` lets it take little: else the order above would hold
in this process only. Measured with 4 sites x 2 ranks and TCP (Reno) at 50 and 200 Mbit/s, all ranks on 2 cores, as time over
bytes / rate of the busiest link, where 1.046 is the TCP/IP and Ethernet headers: 1.08 to 1.11 (experiments/link-use). Without
the limit 1.11 to 1.13; everything posted at once 1.04 to 1.31; a barrier between turns 1.03 to 1.10 for even but 1.21 to 1.51
for uneven messages. Smaller exchanges are ruled by the few milliseconds that a wake-up takes there.
Sending before the receives are posted halves the speed, because gloo keeps a message back until
the other side has announced its receive.

A level may have several streams: TCP connections per pair of ranks, each with a process group of its own, because one connection
has at most a window of bytes under way per round trip. Pieces take turns on them and as many are under way at once.

Background exchanges (copies that are needed later) leave in small pieces, each only while no other exchange of this rank runs at
the same level; and a receiver posts few pieces ahead, so that little of them lies in sockets and queues when tokens come.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hybridep.errors import TransportError
from runtime import staging
from runtime.sockets import keeping_little_unsent

_NUMBER_BITS = 15
_LABEL_BITS = 16
_SHORTEST_WAIT_S = 1e-3
_PIECE_BYTES = 256 << 10
_SMALLEST_PIECE_BYTES = 64 << 10
"""What is shorter stays on one stream."""
_BACKGROUND_PIECE_BYTES = 256 << 10
_BACKGROUND_WINDOW = 2
"""Pieces that a receiver of a background exchange posts ahead, per peer and stream."""
_BACKGROUND_PATIENCE = 1.25
"""A background exchange waits longer than the timeout: the one that it gave way to must fail first, for it names the cause."""


_opened: tuple[dist.ProcessGroup | None, list[dist.ProcessGroup | None]] = (None, [None])
"""The default group, and the groups of streams that were opened beside it."""


def stream_groups(number: int) -> list[dist.ProcessGroup | None]:
    """Process groups of all ranks, the default one first; each has connections of its own. All ranks call it in the same order
    with the same numbers."""
    global _opened
    if _opened[0] is not dist.group.WORLD:
        _opened = dist.group.WORLD, [None]
    groups = _opened[1]
    while len(groups) < number:
        with keeping_little_unsent():
            groups.append(dist.new_group(backend="gloo"))
    return groups


class Handle:
    """An exchange under way; its tensors must stay untouched until :meth:`wait` returns."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._finish()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Return when all messages are sent and received; raises :class:`TransportError` as :meth:`Transport.exchange`."""
        self._thread.join()
        if self._error is not None:
            raise self._error


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
    ) -> None:
        """``streams``: level (what follows the ``@`` of a label) -> connections per pair of ranks, one where absent. With more
        than one all ranks must make their transports in the same order."""
        self.timeout_s = timeout_s
        self._streams = dict(streams or {})
        self._groups = stream_groups(max(self._streams.values(), default=1))
        self.sent_bytes: Counter[tuple[str, int]] = Counter()
        """Payload bytes handed over so far, by (label, peer)."""
        self._on_span = on_span  # called with (label, start, end), both by time.perf_counter, in seconds
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._messages: Counter[tuple[str, str, int]] = Counter()
        self._labels: dict[int, str] = {}
        self._lock = threading.Lock()
        self._urgent: Counter[str] = Counter()
        self._calm = threading.Condition()
        self._closed = False

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> None:
        """Send ``sends[peer]`` to and fill ``receives[peer]`` from each peer (a global rank, never one's own).

        Tensors are contiguous, of any type and shape, on any device (messages pass through host memory); both ends know the
        size, and a message of no bytes is not sent.
        Raises :class:`TransportError` naming this rank, the peer, the label and the seconds waited, if the peer is gone
        or the timeout passes. The process group is of no use after that.
        """
        self._begin(sends, receives, label)()

    def exchange_in_background(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> None:
        """As :meth:`exchange`, but whenever an exchange that is not in the background runs at the same level (what follows
        the ``@`` of its label) on this rank, this one's next piece waits. Both ends must call it so."""
        start = time.perf_counter()
        rooms = {peer: staging.Incoming(tensor) for peer, tensor in receives.items()}
        arrivals = Handle(lambda: self._receive_pieces({peer: room.host for peer, room in rooms.items()}, label))
        for peer, piece in _in_turn(sends, self._distance, _BACKGROUND_PIECE_BYTES, self._num_streams(label)):
            self._give_way(label)
            with self._lock:
                tag, group = self._next_tag("send", label, peer)
                self.sent_bytes[label, peer] += piece.numel()
            begin = time.perf_counter()
            with self._naming("send to", peer, label, begin):
                self._wait(dist.isend(staging.outgoing(piece), peer, group, tag), begin, _BACKGROUND_PATIENCE)
        arrivals.wait()
        for room in rooms.values():
            room.deliver()
        if self._on_span is not None:
            self._on_span(label, start, time.perf_counter())

    def close(self) -> None:
        """End background exchanges at their next piece; what they wait for in the network ends with its timeout."""
        with self._calm:
            self._closed = True
            self._calm.notify_all()

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> Handle:
        """As :meth:`exchange`, but in the background."""
        return Handle(self._begin(sends, receives, label))

    def _begin(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> Callable[[], None]:
        """Post the receives; what is returned sends, then waits for everything."""
        start, streams = time.perf_counter(), self._num_streams(label)
        outgoing: list[tuple[int, Tensor, int, dist.ProcessGroup | None]] = []
        incoming: list[tuple[int, dist.Work | None]] = []
        arrivals = {peer: staging.Incoming(tensor) for peer, tensor in receives.items()}
        with self._lock:
            for peer, room in arrivals.items():
                for piece in _pieces(room.host, _PIECE_BYTES, streams):
                    tag, group = self._next_tag("receive", label, peer)
                    with self._naming("receive from", peer, label, start):
                        incoming.append((peer, dist.irecv(piece, peer, group, tag)))
            for peer, piece in _in_turn(sends, self._distance, _PIECE_BYTES, streams):
                outgoing.append((peer, piece, *self._next_tag("send", label, peer)))
                self.sent_bytes[label, peer] += piece.numel()

        def finish() -> None:
            leaving: deque[tuple[int, Tensor, dist.Work | None]] = deque()

            def let_go(most: int) -> None:
                while len(leaving) > most:
                    peer, _, work = leaving.popleft()
                    with self._naming("send to", peer, label, start):
                        self._wait(work, start)

            with self._urgently(label):
                for peer, message, tag, group in outgoing:
                    let_go(streams - 1)
                    held = staging.outgoing(message)
                    with self._naming("send to", peer, label, start):
                        leaving.append((peer, held, dist.isend(held, peer, group, tag)))
                let_go(0)
                for peer, work in incoming:
                    with self._naming("receive from", peer, label, start):
                        self._wait(work, start)
            for room in arrivals.values():
                room.deliver()
            if self._on_span is not None:
                self._on_span(label, start, time.perf_counter())

        return finish

    def _receive_pieces(self, receives: Mapping[int, Tensor], label: str) -> None:
        """A few pieces per peer are announced at a time; what arrives makes room for the next."""
        streams = self._num_streams(label)
        queue = _in_turn(receives, lambda peer: -self._distance(peer) % self._num_ranks, _BACKGROUND_PIECE_BYTES, streams)
        ahead: dict[int, deque[tuple[Tensor, int, dist.ProcessGroup | None]]] = {peer: deque() for peer in receives}
        with self._lock:
            for peer, piece in queue:
                ahead[peer].append((piece, *self._next_tag("receive", label, peer)))
        posted: dict[int, deque[dist.Work | None]] = {peer: deque() for peer in receives}

        def post(peer: int) -> None:
            if ahead[peer]:
                piece, tag, group = ahead[peer].popleft()
                posted[peer].append(dist.irecv(piece, peer, group, tag))

        for peer in receives:
            for _ in range(_BACKGROUND_WINDOW * streams):
                with self._naming("receive from", peer, label, time.perf_counter()):
                    post(peer)
        for peer, _ in queue:
            begin = time.perf_counter()
            with self._naming("receive from", peer, label, begin):
                self._wait(posted[peer].popleft(), begin, _BACKGROUND_PATIENCE)
                post(peer)

    @contextmanager
    def _urgently(self, label: str) -> Iterator[None]:
        """Background exchanges at this level give way meanwhile."""
        level = _level(label)
        with self._calm:
            self._urgent[level] += 1
        try:
            yield
        finally:
            with self._calm:
                self._urgent[level] -= 1
                self._calm.notify_all()

    def _give_way(self, label: str) -> None:
        with self._calm:
            # Without a timeout of its own: the exchanges waited for have theirs.
            self._calm.wait_for(lambda: self._closed or not self._urgent[_level(label)])
            if self._closed:
                raise TransportError(f"rank {self._rank}", f"closed during {label!r}")

    def _distance(self, peer: int) -> int:
        return (peer - self._rank) % self._num_ranks

    def _wait(self, work: dist.Work | None, start: float, patience: float = 1.0) -> None:
        # Once per message and never again: gloo would wait for a second message that does not come.
        if work is not None:
            left_s = start + patience * self.timeout_s - time.perf_counter()
            work.wait(timedelta(seconds=max(left_s, _SHORTEST_WAIT_S)))

    def _num_streams(self, label: str) -> int:
        return self._streams.get(_level(label), 1)

    def _next_tag(self, direction: str, label: str, peer: int) -> tuple[int, dist.ProcessGroup | None]:
        """The same number and stream at both ends for the n-th piece of a label between two ranks; 31 bits is what gloo takes."""
        label_bits = zlib.crc32(label.encode()) % (1 << _LABEL_BITS)
        other = self._labels.setdefault(label_bits, label)
        if other != label:
            raise ValueError(f"exchange labels {label!r} and {other!r} share a tag: rename one")
        number = self._messages[direction, label, peer] % (1 << _NUMBER_BITS)
        self._messages[direction, label, peer] += 1
        stream = self._messages[direction, label, peer] % self._num_streams(label)
        return label_bits << _NUMBER_BITS | number, self._groups[stream]

    @contextmanager
    def _naming(self, what: str, peer: int, label: str, start: float) -> Iterator[None]:
        """Turn what gloo raises into an error that says who waited for whom, in which exchange, and how long."""
        try:
            yield
        except RuntimeError as error:
            waited_s = time.perf_counter() - start
            reason = (str(error).splitlines() or ["no reason given"])[0].removeprefix("[").split("] ", 1)[-1]
            raise TransportError(
                f"rank {peer}", f"rank {self._rank} could not {what} it in {label!r}, {waited_s:.1f} s after start: {reason}"
            ) from error


def _level(label: str) -> str:
    return label.rpartition("@")[2]


def _in_turn(
    messages: Mapping[int, Tensor], distance: Callable[[int], int], piece_bytes: int, streams: int
) -> list[tuple[int, Tensor]]:
    """(peer, piece) of all messages: per turn a piece of each peer's for every stream, peers by distance."""
    queues = [(peer, _pieces(messages[peer], piece_bytes, streams)) for peer in sorted(messages, key=distance)]
    most = max((len(pieces) for _, pieces in queues), default=0)
    return [
        (peer, piece) for turn in range(0, most, streams) for peer, pieces in queues for piece in pieces[turn : turn + streams]
    ]


def _pieces(tensor: Tensor, piece_bytes: int, streams: int) -> list[Tensor]:
    """The tensor's bytes in views of at most ``piece_bytes``, one for each stream unless they would be too short; none for a
    tensor of no bytes."""
    if not tensor.numel():
        return []
    message = tensor.detach().view(-1).view(torch.uint8)
    if streams > 1:
        piece_bytes = min(piece_bytes, max(-(-message.numel() // streams), _SMALLEST_PIECE_BYTES))
    return [message[begin : begin + piece_bytes] for begin in range(0, message.numel(), piece_bytes)]
