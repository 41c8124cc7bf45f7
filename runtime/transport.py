"""The one seam under all exchanges between ranks: point-to-point messages over the process group.

All receives are posted first, then the messages leave one after the other, to the next higher rank first, wrapping
around. Ranks that differ at one level thereby form a shift: in the first turn everyone sends to its right neighbour, in
the next to the one after, so that no two of them send to the same site at once. The next message starts when the last
one is handed to the kernel, not when everybody is done: uneven messages do not wait for each other. Of a long message
one piece leaves per turn, or a site could be left with one large message to a busy peer at the end.

Measured with 4 sites x 1 or 2 ranks and TCP (Reno) at 100 and 200 Mbit/s, all ranks on 2 busy cores, as time over bytes /
rate of the busiest link, where 1.046 is the TCP/IP and Ethernet headers. From 1 MB per rank on, whole messages in this
order took 1.03 to 1.19, but up to 1.28 where they are large and uneven; in pieces (2 ranks, 200 Mbit/s) 1.05 to 1.12,
with pieces of 1 MiB 1.05 to 1.32; everything posted at once 1.04 to 1.31; a barrier between turns 1.03 to 1.10 for even
but 1.21 to 1.51 for uneven messages. Smaller exchanges are ruled by the few milliseconds that a wake-up takes there.
Sending before the receives are posted halves the speed, because gloo keeps a message back until
the other side has announced its receive.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hybridep.errors import TransportError
from runtime import staging

_NUMBER_BITS = 15
_LABEL_BITS = 16
_SHORTEST_WAIT_S = 1e-3
_PIECE_BYTES = 2 << 20


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

    def __init__(self, *, timeout_s: float, on_span: Callable[[str, float, float], None] | None = None) -> None:
        self.timeout_s = timeout_s
        self.sent_bytes: Counter[tuple[str, int]] = Counter()
        """Payload bytes handed over so far, by (label, peer)."""
        self._on_span = on_span  # called with (label, start, end), both by time.perf_counter, in seconds
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._messages: Counter[tuple[str, str, int]] = Counter()
        self._labels: dict[int, str] = {}
        self._lock = threading.Lock()

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> None:
        """Send ``sends[peer]`` to and fill ``receives[peer]`` from each peer (a global rank, never one's own).

        Tensors are contiguous, of any type and shape, on any device (messages pass through host memory); both ends know the
        size, and a message of no bytes is not sent.
        Raises :class:`TransportError` naming this rank, the peer, the label and the seconds waited, if the peer is gone
        or the timeout passes. The process group is of no use after that.
        """
        self._begin(sends, receives, label)()

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> Handle:
        """As :meth:`exchange`, but in the background."""
        return Handle(self._begin(sends, receives, label))

    def _begin(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], label: str) -> Callable[[], None]:
        """Post the receives; what is returned sends, then waits for everything."""
        start = time.perf_counter()
        outgoing: list[tuple[int, Tensor, int]] = []
        incoming: list[tuple[int, dist.Work | None]] = []
        arrivals = {peer: staging.Incoming(tensor) for peer, tensor in receives.items()}
        with self._lock:
            for peer, room in arrivals.items():
                for piece in _pieces(room.host):
                    tag = self._next_tag("receive", label, peer)
                    with self._naming("receive from", peer, label, start):
                        incoming.append((peer, dist.irecv(piece, peer, tag=tag)))
            queues = [(peer, _pieces(sends[peer])) for peer in sorted(sends, key=self._distance)]
            for turn in range(max((len(pieces) for _, pieces in queues), default=0)):
                for peer, pieces in queues:
                    if turn < len(pieces):
                        outgoing.append((peer, pieces[turn], self._next_tag("send", label, peer)))
                        self.sent_bytes[label, peer] += pieces[turn].numel()

        def finish() -> None:
            for peer, message, tag in outgoing:
                with self._naming("send to", peer, label, start):
                    self._wait(dist.isend(staging.outgoing(message), peer, tag=tag), start)
            for peer, work in incoming:
                with self._naming("receive from", peer, label, start):
                    self._wait(work, start)
            for room in arrivals.values():
                room.deliver()
            if self._on_span is not None:
                self._on_span(label, start, time.perf_counter())

        return finish

    def _distance(self, peer: int) -> int:
        return (peer - self._rank) % self._num_ranks

    def _wait(self, work: dist.Work | None, start: float) -> None:
        # Once per message and never again: gloo would wait for a second message that does not come.
        if work is not None:
            left_s = start + self.timeout_s - time.perf_counter()
            work.wait(timedelta(seconds=max(left_s, _SHORTEST_WAIT_S)))

    def _next_tag(self, direction: str, label: str, peer: int) -> int:
        """The same number at both ends for the n-th piece of a label between two ranks; 31 bits is what gloo takes."""
        label_bits = zlib.crc32(label.encode()) % (1 << _LABEL_BITS)
        other = self._labels.setdefault(label_bits, label)
        if other != label:
            raise ValueError(f"exchange labels {label!r} and {other!r} share a tag: rename one")
        number = self._messages[direction, label, peer] % (1 << _NUMBER_BITS)
        self._messages[direction, label, peer] += 1
        return label_bits << _NUMBER_BITS | number

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


def _pieces(tensor: Tensor) -> list[Tensor]:
    """The tensor's bytes in views of at most ``_PIECE_BYTES``; none for a tensor of no bytes."""
    if not tensor.numel():
        return []
    message = tensor.detach().view(-1).view(torch.uint8)
    return [message[begin : begin + _PIECE_BYTES] for begin in range(0, message.numel(), _PIECE_BYTES)]
