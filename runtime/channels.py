"""How the messages of one label are cut, numbered and spread over connections: alike at both ends, without asking."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.codecs.messages import Message, agreed_bytes, tensor_of
from runtime.event_threads import waiting_their_turn
from runtime.sockets import between_ranks

_NUMBER_BITS = 15
NUMBERED = 1 << 15
"""So many labels may have numbers; label bits from here on are of those without."""
_SMALLEST_PIECE_BYTES = 64 << 10
"""What is shorter stays on one stream."""

_OPEN_S = 600.0
"""For a further group's connections; ranks are there by then."""

_opened: list[dist.ProcessGroup] = []
"""The default group, and the groups of streams that were opened beside it."""


def stream_groups(number: int) -> list[dist.ProcessGroup]:
    """Process groups of all ranks, the default one first; each has connections of its own. All ranks call it in the same order
    with the same numbers."""
    global _opened
    world = dist.group.WORLD
    assert world is not None, "exchanges between ranks need a process group"
    if not _opened or _opened[0] is not world:
        _opened = [world]
    while len(_opened) < number:
        with between_ranks(), waiting_their_turn():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_OPEN_S))
        assert isinstance(group, dist.ProcessGroup)
        _opened.append(group)
    return _opened


class Channel:
    """The messages under one label. Not to be used by two threads at once."""

    def __init__(self, label: str, label_bits: int, groups: Sequence[dist.ProcessGroup]) -> None:
        self.label, self.level = label, level_of(label)
        self.streams = len(groups)
        self._groups, self._first_tag = groups, label_bits << _NUMBER_BITS
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def to(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """Connection and tag of the next piece to ``peer``, a global rank; :meth:`come` gives the same at the other end."""
        return self._next(self._sent, peer)

    def come(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """Connection and tag of the next piece from ``peer``."""
        return self._next(self._received, peer)

    def _next(self, numbers: dict[int, int], peer: int) -> tuple[dist.ProcessGroup, int]:
        number = numbers.get(peer, 0)
        numbers[peer] = number + 1
        return self._groups[number % self.streams], self._first_tag | number % (1 << _NUMBER_BITS)

    def pieces(self, tensor: Tensor, piece_bytes: int, size_bytes: int) -> list[Tensor]:
        """The tensor's bytes in views of at most ``piece_bytes``, one for each stream unless they would be too short; none for a
        tensor of no bytes. Where it is longer than the ``size_bytes`` that both ends know the last piece is longer, too: gloo
        takes a message that is shorter than the room for it."""
        if self.streams > 1:
            piece_bytes = min(piece_bytes, max(-(-size_bytes // self.streams), _SMALLEST_PIECE_BYTES))
        if size_bytes <= piece_bytes:
            return [tensor.detach()] if size_bytes else []
        message = tensor.detach().view(-1).view(torch.uint8)
        *begins, last = range(0, size_bytes, piece_bytes)
        return [*(message[begin : begin + piece_bytes] for begin in begins), message[last:]]

    def in_turn(
        self, messages: Mapping[int, Message], distance: Callable[[int], int], piece_bytes: int
    ) -> list[tuple[int, Tensor]]:
        """(peer, piece) of all messages: per turn a piece of each peer's for every stream, peers by distance."""
        queues = [
            (peer, self.pieces(tensor_of(messages[peer]), piece_bytes, agreed_bytes(messages[peer])))
            for peer in sorted(messages, key=distance)
        ]
        most, streams = max((len(pieces) for _, pieces in queues), default=0), self.streams
        return [
            (peer, piece)
            for turn in range(0, most, streams)
            for peer, pieces in queues
            for piece in pieces[turn : turn + streams]
        ]


class Channels:
    """The channel of each label."""

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        streams: Mapping[str, int],
        *,
        least: int = 1,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """``groups``: connections; ``streams``: how many of them a level uses, ``least`` where absent; ``numbers``: of labels in
        which users' names occur, the same on all ranks, so that no two meet by chance."""
        self._groups, self._streams, self._least, self._numbers = groups, streams, least, numbers or {}
        self._of: dict[str, Channel] = {}
        self._labels: dict[int, str] = {}

    def of(self, label: str) -> Channel:
        """Raises ValueError when another label in use has the same tags."""
        found = self._of.get(label)
        if found is None:
            # 31 bits is what gloo takes of a tag.
            label_bits = self._numbers.get(label, NUMBERED | zlib.crc32(label.encode()) % NUMBERED)
            other = self._labels.setdefault(label_bits, label)
            if other != label:
                raise ValueError(f"exchange labels {label!r} and {other!r} share a tag: rename one")
            groups = self._groups[: self._streams.get(level_of(label), self._least)]
            # Several threads may ask at once; all get the first one's.
            found = self._of.setdefault(label, Channel(label, label_bits, groups))
        return found


def level_of(label: str) -> str:
    """What follows the ``@`` of a label."""
    return label.rpartition("@")[2]
