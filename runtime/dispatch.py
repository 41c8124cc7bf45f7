"""Tokens travel to the experts and back, one level of the hierarchy per hop.

At hop l a row goes, once per distinct destination coordinate however many of its experts are served there, to the rank
that differs from its present one only in its coordinate at level l. Partial sums of the experts' outputs come back over
the same hops in reverse and are added at each. Backward mirrors both. Contributions are always added in the order of
coordinates, so a run is reproducible bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridep.placement import Placement
from hybridep.traffic import Op
from runtime.codecs import RowCoder, row_coder
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
    sent: tuple[Tensor, ...]
    """int64 row numbers that went to each coordinate, own coordinate included."""
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
        for level, own in enumerate(mesh.location):
            self._served_at.append(torch.from_numpy(placement.serve[level][own].copy()).to(mesh.device))
            self._peers.append(placement.token_peers(mesh.rank, level))
            self._sources.append(placement.token_sources(mesh.rank, level))

    def dispatch(self, x_NH: Tensor, weights_NK: Tensor, ids_NK: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Hop]]:
        """Rows at the ranks that serve them: (hidden [N', H], weights [N', K], ids [N', K], hops to ``combine`` over).

        In what arrives, id -1 marks slots that other ranks serve.
        """
        hops: list[Hop] = []
        ids_NK = ids_NK.to(torch.int32)
        for level in self._levels:
            hop, masks = self._route(level, ids_NK)
            ids = [torch.where(mask, ids_NK[rows], NO_EXPERT) for rows, mask in zip(hop.sent, masks, strict=True)]
            x_NH, weights_NK, ids_NK = _DispatchHop.apply(  # type: ignore[no-untyped-call]
                x_NH, weights_NK, ids, masks, hop, self
            )
            hops.append(hop)
        return x_NH, weights_NK, ids_NK, hops

    def combine(self, y_NH: Tensor, hops: Sequence[Hop]) -> Tensor:
        """Partial sums back to where the rows came from: [N of the first hop, H]."""
        for hop in reversed(hops):
            y_NH = _CombineHop.apply(y_NH, hop, self)  # type: ignore[no-untyped-call]
        return y_NH

    def _route(self, level: int, ids_NK: Tensor) -> tuple[Hop, list[Tensor]]:
        """Which rows go where; exchanges the counts. Masks [n_c, K] mark the slots that each coordinate gets."""
        size, own = self.mesh.sizes[level], self.mesh.location[level]
        goes_to = torch.where(ids_NK >= 0, self._served_at[level][ids_NK.long().clamp(min=0)], -1)
        sent, masks = [], []
        for coordinate in range(size):
            mask = goes_to == coordinate
            rows = mask.any(dim=1).nonzero().squeeze(1)
            sent.append(rows)
            masks.append(mask[rows])
        counts = {source: torch.zeros(1, dtype=torch.int64) for source in self._sources[level]}
        self.transport.exchange(
            {self.mesh.peer(level, c): torch.tensor([len(sent[c])]) for c in self._peers[level]},
            {self.mesh.peer(level, c): count for c, count in counts.items()},
            self.mesh.label(Op.TOKEN_COUNTS, level),
        )
        received = tuple(len(sent[own]) if c == own else int(counts[c]) if c in counts else 0 for c in range(size))
        return Hop(level=level, num_rows=len(ids_NK), sent=tuple(sent), received=received), masks

    def forth(self, hop: Hop, op: Op, x_NH: Tensor, beside: Callable[[int], list[Tensor]] = lambda _: []) -> list[Tensor]:
        """Send rows of ``x``, and ``beside(c)`` (blocks [n_c, *] for coordinate c), along the hop; returns the arrived blocks
        in order. One message per peer: its blocks one after the other."""
        own, coder = self.mesh.location[hop.level], self._coders[hop.level]
        leaving = {c: rows for c, rows in enumerate(hop.sent) if c != own and len(rows)}
        # Each row once, however many ranks it goes to; unless that would code more rows than leave.
        once = coder.encode(x_NH) if sum(map(len, leaving.values())) > len(x_NH) else None
        sends = {
            c: pack([*(coder.encode(x_NH[rows]) if once is None else [block[rows] for block in once]), *beside(c)])
            for c, rows in leaving.items()
        }
        stay = beside(own)
        messages = self._exchange(hop, op, sends, hop.received, _blocks(coder, x_NH, stay))
        arrived = []
        for c, number in enumerate(hop.received):
            if c == own:
                arrived.append([x_NH[hop.sent[own]], *stay])
            elif number:
                arrived.append(_read(messages[c], number, coder, x_NH, stay))
        return [torch.cat(blocks) for blocks in zip(*arrived, strict=True)]

    def back(self, hop: Hop, op: Op, x_NH: Tensor, beside: Sequence[Tensor] = ()) -> list[Tensor]:
        """The reverse of ``forth``: rows [N', *] return to their origin and are added there: [N, *]."""
        own, coder = self.mesh.location[hop.level], self._coders[hop.level]
        parts = [torch.split(block, list(hop.received)) for block in (x_NH, *beside)]
        sends = {
            c: pack([*coder.encode(parts[0][c]), *(part[c] for part in parts[1:])])
            for c, number in enumerate(hop.received)
            if c != own and number
        }
        messages = self._exchange(hop, op, sends, [len(rows) for rows in hop.sent], _blocks(coder, x_NH, beside))
        stay = [part[own] for part in parts]
        sums = [block.new_zeros(hop.num_rows, block.shape[1]) for block in (x_NH, *beside)]
        for c, rows in enumerate(hop.sent):
            if len(rows):
                arrived = stay if c == own else _read(messages[c], len(rows), coder, x_NH, beside)
                for total, block in zip(sums, arrived, strict=True):
                    total.index_add_(0, rows, block)
        return sums

    def _exchange(
        self, hop: Hop, op: Op, sends: Mapping[int, Tensor], expected: Sequence[int], blocks: Sequence[tuple[torch.dtype, int]]
    ) -> dict[int, Tensor]:
        """The messages that arrive, by coordinate; ``expected`` rows from each."""
        own, peer = self.mesh.location[hop.level], self.mesh.peer
        row_bytes = sum(dtype.itemsize * width for dtype, width in blocks)
        buffers = {
            c: torch.empty(rows * row_bytes, dtype=torch.uint8, device=self.mesh.device)
            for c, rows in enumerate(expected)
            if c != own and rows
        }
        self.transport.exchange(
            {peer(hop.level, c): message for c, message in sends.items()},
            {peer(hop.level, c): buffer for c, buffer in buffers.items()},
            self.mesh.label(op, hop.level),
        )
        return buffers


class _DispatchHop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, weights_NK: Tensor, ids: list[Tensor], masks: list[Tensor], hop: Hop, dispatcher: Dispatcher
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.hop, ctx.dispatcher = hop, dispatcher

        def beside(c: int) -> list[Tensor]:
            return [weights_NK[hop.sent[c]] * masks[c], ids[c]]

        x, weights, arrived_ids = dispatcher.forth(hop, Op.TOKEN_DISPATCH, x_NH, beside)
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


def _blocks(coder: RowCoder, x_NH: Tensor, beside: Sequence[Tensor]) -> list[tuple[torch.dtype, int]]:
    """Type and width of the blocks of a message."""
    return coder.blocks(x_NH.shape[1], x_NH.dtype) + [(block.dtype, block.shape[1]) for block in beside]


def _read(message: Tensor, number: int, coder: RowCoder, x_NH: Tensor, beside: Sequence[Tensor]) -> list[Tensor]:
    """[number, H] decoded rows, and what came beside them."""
    shapes = _blocks(coder, x_NH, beside)
    parts = unpack(message, [(dtype, number * width) for dtype, width in shapes])
    blocks = [part.view(number, -1) for part in parts]
    coded = len(blocks) - len(beside)
    return [coder.decode(blocks[:coded], x_NH.shape[1], x_NH.dtype), *blocks[coded:]]
