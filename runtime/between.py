"""What a rank of a pipeline exchanges with other stages: activations forward, their gradients back, over connections of its own.

Messages leave on threads of their own, one after the other in each direction, while the rank computes on; what is to come is
announced some micro-batches ahead, so that it can travel meanwhile, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from hybridep.codecs import TokenCodec
from hybridep.errors import TransportError
from hybridep.pipeline import ACTIVATIONS, GRADIENTS, Ways
from hybridep.shares import first_sequence
from runtime.codecs import row_coder
from runtime.codecs.messages import Message
from runtime.event_threads import waiting_their_turn
from runtime.mesh import Mesh, close_process_group, first_line, open_process_group
from runtime.sockets import between_ranks
from runtime.transport import Posted, Transport, Urgency
from runtime.worker import Worker

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch._C._distributed_c10d import Store

_PATIENCE = 4
"""For each stage, as many times as long as a run allows an exchange: what comes from another stage waits for all their passes."""


class Coming(NamedTuple):
    """One micro-batch's rows, announced to their senders."""

    messages: dict[int, Message]
    """By sender: [B', S, H], or bytes where they travel coded."""
    rows: Tensor | None
    """[B, S, H], of which the messages are parts; None where they travel coded."""
    posted: Posted


@contextmanager
def process_groups(mesh: Mesh, store: Store, timeout_s: float) -> Iterator[list[dist.ProcessGroup]]:
    """Joins the stage's ranks in the default process group, and all ranks of the run in groups for what passes between stages: as
    many as there are streams between sites, none without a pipeline. Raises TransportError when some rank does not come."""
    own = store if mesh.pipeline is None else PrefixStore(f"stage{mesh.stage}", store)
    open_process_group(own, rank=mesh.rank, world_size=mesh.world_size, timeout_s=timeout_s)
    try:
        streams = mesh.plan.schedule.streams.get(mesh.plan.cluster.levels[0].name, 1)
        yield [_group(mesh, store, number, timeout_s) for number in range(streams if mesh.pipeline is not None else 0)]
    finally:
        close_process_group()


def _group(mesh: Mesh, store: Store, number: int, timeout_s: float) -> dist.ProcessGroup:
    size = mesh.whole.cluster.num_gpus
    try:
        with between_ranks(), waiting_their_turn():
            prefixed = PrefixStore(f"between{number}", store)
            return dist.ProcessGroupGloo(prefixed, mesh.run_rank, size, timedelta(seconds=timeout_s))  # type: ignore[return-value]
    except RuntimeError as error:
        raise TransportError(
            f"process group of {size} ranks", f"rank {mesh.run_rank} could not join: {first_line(error)}"
        ) from None


def between_transport(
    mesh: Mesh,
    groups: Sequence[dist.ProcessGroup],
    timeout_s: float,
    on_span: Callable[[str, float, float], None],
    urgency: Urgency,
) -> Transport:
    """Between all ranks of the run. A message waits for other stages' passes, so its timeout is longer than an exchange's."""
    numbers = {f"{name}@{mesh.plan.cluster.levels[0].name}": number for number, name in enumerate((ACTIVATIONS, GRADIENTS))}
    patience_s = timeout_s * _PATIENCE * mesh.num_stages
    return Transport(timeout_s=patience_s, on_span=on_span, groups=groups, numbers=numbers, urgency=urgency)


class Neighbours:
    """The stages before and after, seen from one rank."""

    def __init__(self, mesh: Mesh, transport: Transport) -> None:
        pipeline = mesh.pipeline
        assert pipeline is not None
        training = mesh.plan.workload.training
        level, codec = pipeline.cluster.levels[0].name, pipeline.activation_codec
        self._coder = None if codec is TokenCodec.EXACT else row_coder(codec)
        shape = (training.sequence_length, mesh.plan.workload.model.hidden_size)
        self._empty = torch.empty(0, *shape, dtype=mesh.dtype, device=mesh.device)
        self._number = int(pipeline.sequences(mesh.stage)[mesh.rank])
        self._transport = transport
        before = pipeline.ways(mesh.stage - 1) if mesh.stage > 0 else None
        after = pipeline.ways(mesh.stage) if mesh.stage < mesh.num_stages - 1 else None
        first = first_sequence(mesh.plan.cluster, mesh.plan.workload, mesh.rank)
        self.before = _parts(before, mesh.run_rank, first, mine_is_source=False)
        self.after = _parts(after, mesh.run_rank, first, mine_is_source=True)
        self._labels = {name: f"{name}@{level}" for name in (ACTIVATIONS, GRADIENTS)}
        self._senders = {name: Worker(name) for name in (ACTIVATIONS, GRADIENTS)}
        self._sent: list[Future[None]] = []
        self._coming: dict[str, deque[Coming]] = {ACTIVATIONS: deque(), GRADIENTS: deque()}
        self._expected = dict.fromkeys(self._coming, 0)
        self._micro_batches, self._window = training.micro_batches, pipeline.ahead + 1

    def begin(self, names: Sequence[str] = (ACTIVATIONS, GRADIENTS)) -> None:
        """A step begins: the peers hear that its first micro-batches are awaited, of these kinds."""
        self._expected = {name: self._micro_batches if name in names and self._peers(name) else 0 for name in self._coming}
        for name in names:
            for _ in range(self._window):
                self._announce(name)

    def receive(self, name: str) -> Tensor:
        """[B, S, H]: the next micro-batch's activations from the stage before, or gradients from the one after."""
        coming = self._coming[name].popleft()
        coming.posted.exchange({})
        rows = coming.rows
        if rows is None:
            rows = self._rows()
            for peer, part in self._peers(name).items():
                rows[part] = self._decoded(coming.messages[peer], rows[part])
        # Before the next ones have room: this one's messages may go.
        del coming
        self._announce(name)
        return rows

    def _rows(self) -> Tensor:
        return self._empty.new_empty(self._number, *self._empty.shape[1:])

    def _peers(self, name: str) -> dict[int, slice]:
        """From whom they come."""
        return self.before if name == ACTIVATIONS else self.after

    def _announce(self, name: str) -> None:
        if self._expected[name]:
            self._expected[name] -= 1
            # Decoded rows have room only once they are there, which is what plans count.
            rows = self._rows() if self._coder is None else None
            receives = {
                peer: self._room(part.stop - part.start) if rows is None else rows[part]
                for peer, part in self._peers(name).items()
            }
            self._coming[name].append(Coming(receives, rows, self._transport.post(receives, self._labels[name])))

    def _room(self, sequences: int) -> Message:
        """For a coded message with so many."""
        assert self._coder is not None
        return self._coder.room(sequences * self._empty.shape[1], (), self._empty)

    def _coded(self, rows: Tensor) -> Message:
        """The message."""
        if self._coder is None:
            return rows.contiguous()
        return self._coder.message(self._coder.encode(rows.reshape(-1, rows.shape[-1])), (), rows)

    def _decoded(self, message: Message, like: Tensor) -> Tensor:
        """Rows [B', S, H] of a coded message."""
        assert self._coder is not None
        return self._coder.rows_of(message, like[..., 0].numel(), (), like)[0].view_as(like)

    def send(self, name: str, rows: Tensor) -> None:
        """Activations [B, S, H] to the stage after, or gradients to the one before; they leave while this returns."""
        parts = self.after if name == ACTIVATIONS else self.before
        messages = {peer: self._coded(rows[part]) for peer, part in parts.items()}
        label = self._labels[name]
        self._sent.append(self._senders[name].submit(lambda: self._transport.exchange(messages, {}, label)))

    def finish(self) -> None:
        """Wait until all has left; raises TransportError where it could not."""
        for sent in self._sent:
            sent.result()
        self._sent.clear()

    def close(self) -> None:
        """End the threads."""
        for sender in self._senders.values():
            sender.close()


def _parts(ways: Ways | None, rank: int, first: int, *, mine_is_source: bool) -> dict[int, slice]:
    """Other rank -> which of this rank's sequences it shares."""
    if ways is None:
        return {}
    mine, others = (ways.source, ways.destination) if mine_is_source else (ways.destination, ways.source)
    return {
        int(other): slice(int(begin) - first, int(begin + number) - first)
        for own, other, begin, number in zip(mine, others, ways.first, ways.number, strict=True)
        if own == rank
    }
