"""Experts travel to the tokens: copies are gathered level by level, their gradients return on the mirrored tree.

A gather runs outermost level first, so an expert crosses the slowest link once per datacenter and fans out inside.
Gradients go the same way back and are summed at every stage. Transfers run on one background thread, in the order in
which blocks ask for them, which is the same on all ranks; so they never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from hybridep.placement import Move, Placement
from hybridep.plan import Residency
from hybridep.traffic import Op
from runtime.codecs.messages import Message, joined, room, tensor_of
from runtime.copy_codecs import CopyCodecs
from runtime.mesh import Mesh
from runtime.transport import Transport
from runtime.worker import Worker


class CopyStream:
    """The thread on which copies and their gradients travel, in the order given, the same on all ranks; without overlap its
    work is done at once by the caller.

    With ``prefetch`` (plan.Schedule) it works beside token exchanges too and gives way to them. That cannot end in ranks that
    wait in a circle: a rank in a token exchange has done all work on copies that a rank behind it may wait for.
    """

    def __init__(self, *, overlap: bool, prefetch: int = 0) -> None:
        self.prefetch = prefetch
        self._worker = Worker("copies") if overlap else None
        self._last: Future[Tensor | None] | None = None

    def submit(self, work: Callable[[], Tensor | None]) -> Future[Tensor | None]:
        """Queue ``work`` behind everything submitted before."""
        if self._worker is not None:
            self._last = self._worker.submit(work)
            return self._last
        done: Future[Tensor | None] = Future()
        done.set_result(work())
        return done

    def drain(self) -> None:
        """Wait for everything submitted: the next exchange of tokens then has the links to itself."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End the thread after the work that it has."""
        if self._worker is not None:
            self._worker.close()


class ExpertExchange:
    """Copies of one layer's experts on one rank.

    ``home_nP`` are the rank's own experts, ``copies_mP`` those of others, in the order of arrival so that every message
    lands in its final place. ``held`` gives the expert id of each row of both, home first.
    """

    def __init__(
        self,
        mesh: Mesh,
        placement: Placement,
        transport: Transport,
        stream: CopyStream,
        *,
        home_nP: Tensor,
        residency: Residency,
    ) -> None:
        self._mesh, self._stream = mesh, stream
        self._exchange = transport.exchange_in_background if stream.prefetch else transport.exchange
        self._home, self._residency = home_nP, residency
        self._sends = [m for m in placement.moves if m.src == mesh.rank]
        self._receives = [m for m in placement.moves if m.dst == mesh.rank]
        own = [expert for expert in range(placement.num_experts) if placement.home[expert] == mesh.rank]
        self.held = tuple(own) + tuple(expert for move in self._receives for expert in move.experts)
        self._row = {expert: row for row, expert in enumerate(self.held)}
        self._num_home = len(own)
        self._num_copies = len(self.held) - len(own)
        self._copies = home_nP.new_empty(self._num_copies, home_nP.shape[1])
        self.codecs = CopyCodecs(mesh, self._exchange, placement, home_nP.detach())
        self._gradient: Tensor | None = None
        self._gathering: Future[Tensor | None] | None = None
        self._returning: Future[Tensor | None] | None = None
        self._present = False
        self._is_due = self._renew_shared = False
        self.last_micro_batch = True
        """Set by the trainer before each micro-batch: with step residency, gradients return after the last one."""
        if residency is Residency.MICROBATCH:
            self._free()

    # --- forward ---------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Let the copies set out, unless they are here or on their way."""
        if self._present or self._gathering is not None or not (self._sends or self._receives):
            return
        if self._residency is Residency.MICROBATCH:
            self._copies.untyped_storage().resize_(self._num_copies * self._home.shape[1] * self._home.element_size())
        self._gathering = self._stream.submit(self._gather)

    def copies(self) -> Tensor:
        """[m, P]: wait until the copies are here. The tensor is filled anew behind autograd's back at each gather."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.result()
            self._gathering = None
        self._present = True
        return self._copies

    def release(self) -> None:
        """A block's forward or backward has used the copies: with microbatch residency their memory is given back."""
        if self._residency is Residency.MICROBATCH:
            self._present = False
            self._free()

    def expire(self) -> None:
        """The optimizer will change the experts: copies must be gathered again."""
        self._present = False

    @property
    def prefetch(self) -> int:
        """How many blocks ahead copies set out (``plan.Schedule``)."""
        return self._stream.prefetch

    def _free(self) -> None:
        self._copies.untyped_storage().resize_(0)

    def _rows(self, level: int) -> list[tuple[Move, Tensor]]:
        """Where the experts that arrive at ``level`` lie in the copies, by move."""
        found, first = [], 0
        for move in self._receives:
            if move.level == level:
                found.append((move, self._copies.data[first : first + len(move.experts)]))
            first += len(move.experts)
        return found

    def _levels(self) -> list[int]:
        return sorted({move.level for move in (*self._sends, *self._receives)})

    def _stored(self, expert: int, home: Tensor) -> Tensor:
        """[P]: an expert that this rank holds, or the copy of it."""
        row = self._row[expert]
        return home[row] if row < self._num_home else self._copies.data[row - self._num_home]

    def _gather(self) -> None:
        home = self._home.detach()
        for level in self._levels():
            outgoing, arriving = [m for m in self._sends if m.level == level], self._rows(level)
            coder = self.codecs.experts[level]
            sends: dict[int, Message]
            receives: dict[int, Message]
            if coder is None:
                sends = {m.dst: torch.stack([self._stored(e, home) for e in m.experts]) for m in outgoing}
                receives = {move.src: rows for move, rows in arriving}
            else:
                agreed, most = coder.message_bytes, coder.most_bytes
                coded = {e: coder.encode(e, self._stored(e, home)) for e in sorted({e for m in outgoing for e in m.experts})}
                sends = {m.dst: joined([coded[expert] for expert in m.experts], agreed) for m in outgoing}
                receives = {move.src: room(len(rows), agreed, most, self._mesh.device) for move, rows in arriving}
            self._exchange(sends, receives, self._mesh.label(Op.EXPERT_GATHER, level))
            if coder is not None:
                for move, rows in arriving:
                    messages = coder.apart(tensor_of(receives[move.src]), len(rows))
                    for message, row in zip(messages, rows, strict=True):
                        coder.decode(message.to(row.device), row)

    # --- backward --------------------------------------------------------------------------------------------------

    def return_gradient(self, gradient_mP: Tensor) -> None:
        """Take over the copies' gradient of one micro-batch; send it home when it is complete."""
        if self._residency is Residency.MICROBATCH:
            self.finish_return()
        if self._sends or self._receives:
            if self._gradient is None:
                adds_up = self._residency is Residency.STEP
                self._gradient = gradient_mP.to(self._mesh.gradient_dtype) if adds_up else gradient_mP
            else:
                self._gradient += gradient_mP
            self._is_due = self._residency is Residency.MICROBATCH or self.last_micro_batch
        # All ranks take part, those without copies too.
        self._renew_shared = self.codecs.shared is not None and self.last_micro_batch
        self._is_due |= self._renew_shared
        if self.prefetch:
            self.start_return()

    def start_return(self) -> None:
        """Let a complete gradient set out for the homes."""
        if self._is_due:
            self._is_due = False
            self._returning = self._stream.submit(self._return)

    def wait_for_returns(self) -> None:
        """Wait for the gradients of the blocks above: they travel beside attention only, never beside tokens."""
        self._stream.drain()

    def finish_return(self) -> None:
        """Wait for a return under way, or due, and add what came to the home experts' gradient."""
        self.start_return()
        if self._returning is None:
            return
        arrived = self._returning.result()
        self._returning = None
        if arrived is not None:
            assert self._home.grad is not None
            self._home.grad += arrived

    def _return(self) -> Tensor | None:
        home = self._return_copies() if self._gradient is not None else None
        if self._renew_shared:
            self._renew_shared = False
            self.codecs.renew_shared()
        return home

    def _return_copies(self) -> Tensor | None:
        copies = self._gradient
        assert copies is not None
        self._gradient = None
        home = torch.zeros_like(self._home, memory_format=torch.contiguous_format).detach()
        width = home.shape[1]
        for level in reversed(self._levels()):
            coder = self.codecs.gradients[level]
            sends, receives, first = dict[int, Message](), dict[int, Message](), 0
            agreed, most = (0, 0) if coder is None else (f(width, home.dtype) for f in (coder.message_bytes, coder.most_bytes))
            for move in self._receives:
                if move.level == level:
                    rows = copies[first : first + len(move.experts)].to(home.dtype)
                    if coder is None:
                        sends[move.src] = rows
                    else:
                        coded = [coder.encode(expert, row) for expert, row in zip(move.experts, rows, strict=True)]
                        sends[move.src] = joined(coded, agreed)
                first += len(move.experts)
            outgoing = [move for move in self._sends if move.level == level]
            for move in outgoing:
                number = len(move.experts)
                empty = coder is None
                receives[move.dst] = home.new_empty(number, width) if empty else room(number, agreed, most, home.device)
            self._exchange(sends, receives, self._mesh.label(Op.GRADIENT_RETURN, level))
            for move in outgoing:
                arrived = tensor_of(receives[move.dst])
                parts = arrived if coder is None else coder.apart(arrived, len(move.experts), width, home.dtype)
                for expert, gradient in zip(move.experts, parts, strict=True):
                    row = self._row[expert]
                    target = home[row] if row < self._num_home else copies[row - self._num_home]
                    target += gradient if coder is None else coder.decode(gradient.to(home.device), width, home.dtype)
        return home if self._num_home else None

    # --- codecs ----------------------------------------------------------------------------------------------------

    def prime(self, expert_P: Callable[[int], Tensor]) -> None:
        """Give both ends of coded copies the same beginning: ``expert_P`` is what an expert, at home anywhere, is by now."""
        self.codecs.prime(expert_P)
        if self.codecs.keep_copies:
            for row, expert in enumerate(self.held[self._num_home :]):
                self._copies.data[row] = expert_P(expert)

    def codec_state(self) -> dict[str, Tensor]:
        """What codecs need beside the weights to go on as if nothing had happened; empty without them."""
        return self.codecs.state() | ({"copies": self._copies.data} if self.codecs.keep_copies else {})

    def load_codec_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``codec_state`` gave."""
        self.codecs.load(state)
        if self.codecs.keep_copies:
            self._copies.data.copy_(state["copies"])
