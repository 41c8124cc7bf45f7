"""Tokens travel to the experts and back, one level of the hierarchy per hop.

At hop l a row goes, once per distinct destination coordinate however many of its experts are served there, to the rank
that differs from its present one only in its coordinate at level l. Partial sums of the experts' outputs come back over
the same hops in reverse and are added at each. Backward mirrors both. Contributions are always added in the order of
coordinates, so a run is reproducible bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridep.placement import Placement
from hybridep.traffic import Op
from runtime.codecs import row_coder
from runtime.codecs.messages import pack, unpack
from runtime.mesh import Mesh
from runtime.transport import Transport

NO_EXPERT = -1
"""Id of a slot whose expert is served elsewhere."""


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


class Dispatcher:
    """Dispatch and combine of one rank under one placement. Stateless between calls.

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

    def dispatch(self, x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Hop]]:
        """Rows at the ranks that serve them: (hidden [N', H], weights [N', K], ids [N', K], hops to ``combine`` over).

        In what arrives, id -1 marks slots that other ranks serve.
        """
        hops: list[Hop] = []
        ids_NK = ids_NK.to(torch.int32)
        for level in self._levels:
            hop, mask_MK = self._route(level, ids_NK)
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

    def _route(self, level: int, ids_NK: Tensor) -> tuple[Hop, Tensor]:
        """Which rows go where; exchanges the counts. The mask [M, K] marks the slots that go with a row."""
        size, own = self.mesh.sizes[level], self.mesh.location[level]
        mask_CNK = self._served_at[level][ids_NK] == self._coordinates[level]
        goes_CN = mask_CNK.any(dim=2)
        coordinate_M, rows_M = goes_CN.nonzero(as_tuple=True)
        counts_C, came_C = goes_CN.sum(dim=1).cpu(), torch.zeros(size, dtype=torch.int64)
        self.transport.exchange(
            {self.mesh.peer(level, c): counts_C[c : c + 1] for c in self._peers[level]},
            {self.mesh.peer(level, c): came_C[c : c + 1] for c in self._sources[level]},
            self.mesh.label(Op.TOKEN_COUNTS, level),
        )
        came_C[own] = counts_C[own]
        sent, received = tuple(counts_C.tolist()), tuple(came_C.tolist())
        hop = Hop(level=level, num_rows=len(ids_NK), rows_M=rows_M, sent=sent, received=received)
        return hop, mask_CNK[coordinate_M, rows_M]

    def forth(self, hop: Hop, op: Op, x_NH: Tensor, beside: Sequence[Tensor] = ()) -> list[Tensor]:
        """Send rows of ``x``, and with them those of ``beside`` [M, *], along the hop; returns the arrived blocks in order. One
        message per peer: its blocks one after the other."""
        own, coder = self.mesh.location[hop.level], self._coders[hop.level]
        leaving = [c for c, number in enumerate(hop.sent) if c != own and number]
        parts = [block.split_with_sizes(hop.sent) for block in (x_NH.index_select(0, hop.rows_M), *beside)]
        # Each row once, however many ranks it goes to; unless that would code more rows than leave.
        if sum(hop.sent[c] for c in leaving) > len(x_NH):
            once = [block.index_select(0, hop.rows_M).split_with_sizes(hop.sent) for block in coder.encode(x_NH)]
            coded = {c: [part[c] for part in once] for c in leaving}
        else:
            coded = {c: coder.encode(parts[0][c]) for c in leaving}
        sends = {c: _message([*coded[c], *(part[c] for part in parts[1:])]) for c in leaving}
        return self._exchange(hop, op, sends, [part[own] for part in parts], hop.received)

    def back(self, hop: Hop, op: Op, x_NH: Tensor, beside: Sequence[Tensor] = ()) -> list[Tensor]:
        """The reverse of ``forth``: rows [N', *] return to their origin and are added there: [N, *]."""
        own, coder = self.mesh.location[hop.level], self._coders[hop.level]
        parts = [block.split_with_sizes(hop.received) for block in (x_NH, *beside)]
        sends = {
            c: _message([*coder.encode(parts[0][c]), *(part[c] for part in parts[1:])])
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

    def _exchange(
        self, hop: Hop, op: Op, sends: Mapping[int, Tensor], stay: Sequence[Tensor], expected: Sequence[int]
    ) -> list[Tensor]:
        """The blocks that come with ``expected`` rows from each coordinate, one after the other; ``stay`` are the own ones."""
        level, own, coder = hop.level, self.mesh.location[hop.level], self._coders[hop.level]
        hidden, dtype = stay[0].shape[1], stay[0].dtype
        shapes = coder.blocks(hidden, dtype) + [(block.dtype, block.shape[1]) for block in stay[1:]]
        coming = [c for c, rows in enumerate(expected) if c != own and rows]
        in_place = shapes == [(dtype, hidden)]
        if in_place:
            # Nothing to take apart: every message lands where it belongs.
            x_NH = stay[0].new_empty(sum(expected), hidden)
            parts = x_NH.split_with_sizes(expected)
            parts[own].copy_(stay[0])
            buffers = {c: parts[c] for c in coming}
        else:
            row_bytes = sum(dtype.itemsize * width for dtype, width in shapes)
            buffers = {c: stay[0].new_empty(expected[c] * row_bytes, dtype=torch.uint8) for c in coming}
        peer = self.mesh.peer
        self.transport.exchange(
            {peer(level, c): message for c, message in sends.items()},
            {peer(level, c): buffer for c, buffer in buffers.items()},
            self.mesh.label(op, level),
        )
        if in_place:
            return [x_NH]
        coded = len(shapes) - len(stay) + 1
        arrived = []
        for c in sorted([*coming, own]):
            if c == own:
                arrived.append(stay)
                continue
            blocks = [part.view(expected[c], -1) for part in unpack(buffers[c], [(d, expected[c] * w) for d, w in shapes])]
            arrived.append([coder.decode(blocks[:coded], hidden, dtype), *blocks[coded:]])
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
        # Slots that another rank serves have no gradient here, so adding whole rows of weight gradients is right.
        x, weights = ctx.dispatcher.back(ctx.hop, Op.DISPATCH_BACKWARD, gradients[0], gradients[1:2])
        return x, weights, None, None, None, None


class _CombineHop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, hop: Hop, dispatcher: Dispatcher) -> Tensor:
        ctx.hop, ctx.dispatcher = hop, dispatcher
        return dispatcher.back(hop, Op.TOKEN_COMBINE, y_NH)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [y] = ctx.dispatcher.forth(ctx.hop, Op.COMBINE_BACKWARD, gradients[0])
        return y, None, None


def _message(blocks: Sequence[Tensor]) -> Tensor:
    """The blocks' elements, one block after the other; a single block as it is."""
    return pack(blocks) if len(blocks) > 1 else blocks[0].contiguous()
