"""Tokens travel to the experts and back, one level of the hierarchy per hop.

At hop l a row goes, once per distinct destination coordinate however many of its experts are served there, to the rank
that differs from its present one only in its coordinate at level l. Partial sums of the experts' outputs come back over
the same hops in reverse and are added at each. Backward mirrors both. Contributions are always added in the order of
coordinates, so a run is reproducible bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridep.placement import Placement
from hybridep.traffic import Op
from runtime.codecs import row_coder
from runtime.codecs.messages import Message
from runtime.mesh import Mesh
from runtime.transport import Posted, Transport

NO_EXPERT = -1
"""Id of a slot whose expert is served elsewhere."""


class Counts(NamedTuple):
    """How many rows come with the next dispatch over one hop."""

    came_C: Tensor
    """int64; from each coordinate, once the exchange is over."""
    posted: Posted


class _Coming(NamedTuple):
    """Messages that are awaited from the other coordinates of a level."""

    beside: Sequence[tuple[torch.dtype, int]]
    """Type and width of a message's blocks beside the rows."""
    buffers: dict[int, Message]
    whole_NH: Tensor | None
    """All rows, of which the buffers are parts, where messages need not be taken apart."""
    posted: Posted


@dataclass(frozen=True, kw_only=True)
class Hop:
    """What one hop did, as the ways back need it. Lists are indexed by coordinate at the hop's level."""

    level: int
    num_rows: int
    """N before the hop."""
    rows_M: Tensor
    """int64 row numbers that went to each coordinate, own coordinate included, one after the other."""
    sent: tuple[int, ...]
    """Rows that went to each coordinate."""
    received: tuple[int, ...]
    """Rows that came from each coordinate, own coordinate included; they lie one after the other: N' after the hop."""
    coming: dict[Op, _Coming] = field(default_factory=dict)
    """Messages that the peers know to be awaited, by kind of transfer."""


class Dispatcher:
    """Dispatch and combine of one rank under one placement. Stateless between calls.

    What comes is announced to its senders an exchange ahead, where its size is known by then (all but the rows of a dispatch):
    on a long link that saves half a round trip per exchange (``transport.Transport.post``).

    On a level with a token codec, hidden vectors and partial sums, and the gradients of both, travel coded and are decoded
    on arrival; gate weights and ids are exact, and so are rows that stay (``hybridep.coding`` counts what is coded).
    """

    def __init__(self, mesh: Mesh, placement: Placement, transport: Transport) -> None:
        self.mesh, self.transport = mesh, transport
        self._levels = [level for level, size in enumerate(mesh.sizes) if size > 1]
        self._coders = [row_coder(codecs.tokens) for codecs in mesh.plan.level_codecs]
        self._served_at = []
        self._peers: list[tuple[int, ...]] = []
        self._sources: list[tuple[int, ...]] = []
        self._coordinates = [torch.arange(size, device=mesh.device)[:, None, None] for size in mesh.sizes]
        for level, own in enumerate(mesh.location):
            # One more place at the end, where id -1 finds it: nowhere.
            self._served_at.append(F.pad(torch.from_numpy(placement.serve[level][own].copy()), (0, 1), value=-1).to(mesh.device))
            self._peers.append(placement.token_peers(mesh.rank, level))
            self._sources.append(placement.token_sources(mesh.rank, level))

    def announce_counts(self) -> list[Counts]:
        """Of the next dispatch, one for each of its hops."""
        announced = []
        for level in self._levels:
            came_C = torch.zeros(self.mesh.sizes[level], dtype=torch.int64)
            receives = {self.mesh.peer(level, c): came_C[c : c + 1] for c in self._sources[level]}
            announced.append(Counts(came_C, self.transport.post(receives, self.mesh.label(Op.TOKEN_COUNTS, level))))
        return announced

    def announce_backward(self, hops: Sequence[Hop], x_NH: Tensor, weights_NK: Tensor) -> None:
        """Of the way back of a combine and of a dispatch over ``hops``, whose rows and weights are like these."""
        beside = [(weights_NK.dtype, weights_NK.shape[1])]
        for hop in hops:
            hop.coming[Op.COMBINE_BACKWARD] = self._announce(hop.level, Op.COMBINE_BACKWARD, hop.received, x_NH, [])
            hop.coming[Op.DISPATCH_BACKWARD] = self._announce(hop.level, Op.DISPATCH_BACKWARD, hop.sent, x_NH, beside)

    def dispatch(
        self, x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor, announced: Sequence[Counts] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, list[Hop]]:
        """Rows at the ranks that serve them: (hidden [N', H], weights [N', K], ids [N', K], hops to ``combine`` over).

        In what arrives, id -1 marks slots that other ranks serve. ``announced``: the counts, where they are.
        """
        hops: list[Hop] = []
        ids_NK = ids_NK.to(torch.int32)
        for level, counts in zip(self._levels, announced or self.announce_counts(), strict=True):
            hop, mask_MK = self._route(level, x_NH, ids_NK, counts)
            ids_MK = torch.where(mask_MK, ids_NK.index_select(0, hop.rows_M), NO_EXPERT)
            x_NH, weights_NK, ids_NK = _DispatchHop.apply(  # type: ignore[no-untyped-call]
                x_NH, weights_NK, ids_MK, mask_MK, hop, self
            )
            hops.append(hop)
        return x_NH, weights_NK, ids_NK, hops

    def combine(self, y_NH: Tensor, hops: Sequence[Hop]) -> Tensor:
        """Partial sums back to where the rows came from: [N of the first hop, H]."""
        for hop in reversed(hops):
            y_NH = _CombineHop.apply(y_NH, hop, self)  # type: ignore[no-untyped-call]
        return y_NH

    def combine_backward(self, gradient_NH: Tensor, hops: Sequence[Hop]) -> Tensor:
        """What ``combine`` does backward: gradients of its result to where its rows came from."""
        for hop in hops:
            [gradient_NH] = self.forth(hop, Op.COMBINE_BACKWARD, gradient_NH)
        return gradient_NH

    def dispatch_backward(self, x_NH: Tensor, weights_NK: Tensor, hops: Sequence[Hop]) -> tuple[Tensor, Tensor]:
        """What ``dispatch`` does backward: gradients of rows and weights back to where they came from."""
        for hop in reversed(hops):
            # Slots that another rank serves have no gradient here, so adding whole rows of weight gradients is right.
            x_NH, weights_NK = self.back(hop, Op.DISPATCH_BACKWARD, x_NH, (weights_NK,))
        return x_NH, weights_NK

    def _route(self, level: int, x_NH: Tensor, ids_NK: Tensor, counts: Counts) -> tuple[Hop, Tensor]:
        """Which rows go where; exchanges the counts, and announces what the combine will bring. The mask [M, K] marks the slots
        that go with a row."""
        own = self.mesh.location[level]
        mask_CNK = self._served_at[level][ids_NK] == self._coordinates[level]
        goes_CN = mask_CNK.any(dim=2)
        coordinate_M, rows_M = goes_CN.nonzero(as_tuple=True)
        counts_C, came_C = goes_CN.sum(dim=1).cpu(), counts.came_C
        sent = tuple(counts_C.tolist())
        coming = {Op.TOKEN_COMBINE: self._announce(level, Op.TOKEN_COMBINE, sent, x_NH.detach(), [])}
        counts.posted.exchange({self.mesh.peer(level, c): counts_C[c : c + 1] for c in self._peers[level]})
        came_C[own] = counts_C[own]
        received = tuple(came_C.tolist())
        hop = Hop(level=level, num_rows=len(ids_NK), rows_M=rows_M, sent=sent, received=received, coming=coming)
        return hop, mask_CNK[coordinate_M, rows_M]

    def forth(self, hop: Hop, op: Op, x_NH: Tensor, beside: Sequence[Tensor] = ()) -> list[Tensor]:
        """Send rows of ``x``, and with them those of ``beside`` [M, *], along the hop; returns the arrived blocks in order. One
        message per peer: its blocks one after the other."""
        own, coder = self.mesh.location[hop.level], self._coders[hop.level]
        leaving = [c for c, number in enumerate(hop.sent) if c != own and number]
        parts = [block.split_with_sizes(hop.sent) for block in (x_NH.index_select(0, hop.rows_M), *beside)]
        # Each row once, however many ranks it goes to; unless that would code more rows than leave.
        if sum(hop.sent[c] for c in leaving) > len(x_NH):
            once, rows = coder.encode(x_NH), hop.rows_M.split_with_sizes(hop.sent)
            coded = {c: once.take(rows[c]) for c in leaving}
        else:
            coded = {c: coder.encode(parts[0][c]) for c in leaving}
        sends = {c: coder.message(coded[c], [part[c] for part in parts[1:]], x_NH) for c in leaving}
        return self._exchange(hop, op, sends, [part[own] for part in parts], hop.received)

    def back(self, hop: Hop, op: Op, x_NH: Tensor, beside: Sequence[Tensor] = ()) -> list[Tensor]:
        """The reverse of ``forth``: rows [N', *] return to their origin and are added there: [N, *]."""
        own, coder = self.mesh.location[hop.level], self._coders[hop.level]
        parts = [block.split_with_sizes(hop.received) for block in (x_NH, *beside)]
        sends = {
            c: coder.message(coder.encode(parts[0][c]), [part[c] for part in parts[1:]], x_NH)
            for c, number in enumerate(hop.received)
            if c != own and number
        }
        arrived = self._exchange(hop, op, sends, [part[own] for part in parts], hop.sent)
        sums = [block.new_zeros(hop.num_rows, block.shape[1]) for block in arrived]
        # One coordinate's rows are all different: on a GPU, too, the order of the additions is that of coordinates.
        rows = hop.rows_M.split_with_sizes(hop.sent)
        for total, block in zip(sums, arrived, strict=True):
            for rows_m, part in zip(rows, block.split_with_sizes(hop.sent), strict=True):
                total.index_add_(0, rows_m, part)
        return sums

    def _announce(
        self, level: int, op: Op, expected: Sequence[int], x_NH: Tensor, beside: Sequence[tuple[torch.dtype, int]]
    ) -> _Coming:
        """``expected`` rows from each coordinate, as those of ``x`` and, by type and width, what travels ``beside`` them."""
        own, hidden, dtype = self.mesh.location[level], x_NH.shape[1], x_NH.dtype
        coder, coming = self._coders[level], [c for c, rows in enumerate(expected) if c != own and rows]
        whole_NH, buffers = None, dict[int, Message]()
        if [*coder.blocks(hidden, dtype), *beside] == [(dtype, hidden)]:
            # Nothing to take apart: every message lands where it belongs.
            whole_NH = x_NH.new_empty(sum(expected), hidden)
            parts = whole_NH.split_with_sizes(list(expected))
            buffers |= {c: parts[c] for c in coming}
        else:
            buffers |= {c: coder.room(expected[c], beside, x_NH) for c in coming}
        receives = {self.mesh.peer(level, c): buffer for c, buffer in buffers.items()}
        return _Coming(beside, buffers, whole_NH, self.transport.post(receives, self.mesh.label(op, level)))

    def _exchange(
        self, hop: Hop, op: Op, sends: Mapping[int, Message], stay: Sequence[Tensor], expected: Sequence[int]
    ) -> list[Tensor]:
        """The blocks that come with ``expected`` rows from each coordinate, one after the other; ``stay`` are the own ones."""
        level, own, coder = hop.level, self.mesh.location[hop.level], self._coders[hop.level]
        beside = [(block.dtype, block.shape[1]) for block in stay[1:]]
        coming = hop.coming.pop(op, None) or self._announce(level, op, expected, stay[0], beside)
        coming.posted.exchange({self.mesh.peer(level, c): message for c, message in sends.items()})
        if coming.whole_NH is not None:
            coming.whole_NH.split_with_sizes(list(expected))[own].copy_(stay[0])
            return [coming.whole_NH]
        arrived = []
        for c in sorted([*coming.buffers, own]):
            arrived.append(stay if c == own else coder.rows_of(coming.buffers[c], expected[c], coming.beside, stay[0]))
        return [torch.cat(blocks) for blocks in zip(*arrived, strict=True)]


class _DispatchHop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, weights_NK: Tensor, ids_MK: Tensor, mask_MK: Tensor, hop: Hop, dispatcher: Dispatcher
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.hop, ctx.dispatcher = hop, dispatcher
        weights_MK = weights_NK.index_select(0, hop.rows_M) * mask_MK
        x, weights, arrived_ids = dispatcher.forth(hop, Op.TOKEN_DISPATCH, x_NH, (weights_MK, ids_MK))
        ctx.mark_non_differentiable(arrived_ids)
        return x, weights, arrived_ids

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = ctx.dispatcher.dispatch_backward(gradients[0], gradients[1], [ctx.hop])
        return x, weights, None, None, None, None


class _CombineHop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, hop: Hop, dispatcher: Dispatcher) -> Tensor:
        ctx.hop, ctx.dispatcher = hop, dispatcher
        return dispatcher.back(hop, Op.TOKEN_COMBINE, y_NH)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.dispatcher.combine_backward(gradients[0], [ctx.hop]), None, None
