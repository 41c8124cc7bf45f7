"""Sum of the dense gradients over all ranks: reduce-scatter innermost level first, all-gather outermost first.

Only a 1/(GPUs per DC) share of the gradient crosses a datacenter's border per GPU. Every element is summed on exactly one
rank, in the order of coordinates, so all ranks end with the same bits. Between workers of the outermost level the sums go back;
inside them each rank has updated the weights of its part by then, and it is these that are gathered. On a level with a gradient
codec each rank's parts are coded on their way to the sums, and so are sums on their way back, but not weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hybridep.traffic import DENSE, DENSE_PIECE, Op, split_sizes
from runtime.codecs import GradientCoder, gradient_coder
from runtime.codecs.messages import Message, message_of, room, tensor_of
from runtime.mesh import Mesh
from runtime.optimizer import set_gradient

Exchange = Callable[[Mapping[int, Message], Mapping[int, Message], str], None]
"""``Transport.exchange``."""


class DenseReduce:
    """Sums over all ranks, level by level; what gradient codecs keep between steps belongs to it. A rank's part is what it has
    after a reduce-scatter over all levels but the outermost."""

    def __init__(
        self,
        mesh: Mesh,
        exchange: Exchange,
        *,
        ops: tuple[Op, Op] = DENSE,
        coded: bool = True,
        wire: torch.dtype | None = None,
    ) -> None:
        """``wire``: element type on links, the one of the mesh where absent."""
        self._mesh, self._send, self._ops = mesh, exchange, ops
        self.piece = DENSE_PIECE
        self._wire = wire or mesh.dtype
        self.coders = [gradient_coder(codecs, self._wire) if coded else None for codecs in mesh.plan.level_codecs]

    def __call__(self, flat_D: Tensor) -> None:
        """Replace [D] by its sum over all ranks, in place."""
        self.reduce(flat_D)
        self.gather(flat_D)

    def reduce(self, flat_D: Tensor) -> None:
        """Replace this rank's part of [D] by its sum over all ranks; the rest is left in no useful state."""
        for level in reversed(self._inside):
            flat_D = self._reduce_scatter(level, flat_D)
        if self._mesh.sizes[0] > 1:
            self._reduce_scatter(0, flat_D)
            self._all_gather(0, flat_D, self.coders[0])

    def gather(self, flat_D: Tensor) -> None:
        """Replace other ranks' parts of [D] by what they have there, inside each worker of the outermost level."""
        # Each is a view of the one before, so what is gathered ends up in ``flat_D`` itself.
        views = [flat_D]
        for level in reversed(self._inside):
            views.append(views[-1][self._own(level, len(views[-1]))])
        for level in self._inside:
            views.pop()
            self._all_gather(level, views[-1], None)

    def part(self, length: int) -> slice:
        """This rank's part of [length]."""
        part = slice(0, length)
        for level in reversed(self._inside):
            own = self._own(level, part.stop - part.start)
            part = slice(part.start + own.start, part.start + own.stop)
        return part

    @property
    def _inside(self) -> list[int]:
        return [level for level, size in enumerate(self._mesh.sizes) if level > 0 and size > 1]

    def _own(self, level: int, length: int) -> slice:
        sizes, own = split_sizes(length, self._mesh.sizes[level]), self._mesh.location[level]
        first = sum(sizes[:own])
        return slice(first, first + sizes[own])

    def _reduce_scatter(self, level: int, shard: Tensor) -> Tensor:
        parts = self._parts(level, shard)
        own, coder = self._mesh.location[level], self.coders[level]
        if coder is not None:
            self._sum_coded(level, parts, coder)
            return parts[own]
        # All that exchange parts here have as many of them, and so as many rounds.
        piece = self.piece if level > 0 else max(len(shard), 1)
        for first in range(0, max(map(len, parts)), piece):
            self._sum(level, [part[first : first + piece] for part in parts])
        return parts[own]

    def _sum(self, level: int, parts: Sequence[Tensor]) -> None:
        own = self._mesh.location[level]
        mine = parts[own]
        arrived = {c: torch.empty_like(mine, dtype=self._wire) for c in range(len(parts)) if c != own and len(mine)}
        sends = {c: part.to(self._wire) for c, part in self._others(level, parts).items()}
        self._exchange(self._ops[0], level, sends, arrived)
        first, *others = [mine if c == own else arrived.get(c, mine) for c in range(len(parts))]
        total = first.to(mine.dtype)
        for value in others if len(mine) else ():
            total += value
        if total is not mine:
            mine.copy_(total)

    def _sum_coded(self, level: int, parts: Sequence[Tensor], coder: GradientCoder) -> None:
        own = self._mesh.location[level]
        sends = {
            c: message_of(coder.encode(f"part{c}", part.to(self._wire)), coder.message_bytes(len(part), self._wire))
            for c, part in self._others(level, parts).items()
        }
        total = torch.zeros_like(parts[own])
        arrived = self._coded(self._ops[0], level, sends, dict.fromkeys(range(len(parts)), total), coder)
        for c in range(len(parts)):
            if c == own:
                total += parts[own]
            elif c in arrived:
                total += coder.decode(arrived[c], len(total), self._wire)
        parts[own].copy_(total)

    def _all_gather(self, level: int, shard: Tensor, coder: GradientCoder | None) -> None:
        parts = self._parts(level, shard)
        own = self._mesh.location[level]
        mine, others = parts[own], [c for c in range(len(parts)) if c != own]
        if coder is None:
            # Where the wire is narrower the owner keeps what the others get, too.
            mine.copy_(sent := mine.to(self._wire))
            coming = self._others(level, parts)
            if sent is not mine:
                coming = {c: torch.empty_like(part, dtype=self._wire) for c, part in coming.items()}
            self._exchange(self._ops[1], level, dict.fromkeys(others, sent) if len(mine) else {}, coming)
            for c, arrived in coming.items():
                parts[c].copy_(arrived)
            return
        sends = dict[int, Message]()
        if len(mine):
            # The owner keeps what the others get: all ranks go on with the same bits.
            message = coder.encode("sum", mine.to(self._wire))
            mine.copy_(coder.decode(message, len(mine), self._wire))
            sends = dict.fromkeys(others, message_of(message, coder.message_bytes(len(mine), self._wire)))
        for c, arrived in self._coded(self._ops[1], level, sends, dict(enumerate(parts)), coder).items():
            parts[c].copy_(coder.decode(arrived, len(parts[c]), self._wire))

    def _parts(self, level: int, shard: Tensor) -> tuple[Tensor, ...]:
        return torch.split(shard, split_sizes(len(shard), self._mesh.sizes[level]))

    def _others(self, level: int, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        return {c: part for c, part in enumerate(parts) if c != self._mesh.location[level] and len(part)}

    def _coded(
        self, op: Op, level: int, sends: Mapping[int, Message], like: Mapping[int, Tensor], coder: GradientCoder
    ) -> dict[int, Tensor]:
        """The messages that arrive, by coordinate, for as many elements as ``like`` has."""
        wire = self._wire
        receives = {
            c: room(1, coder.message_bytes(len(one), wire), coder.most_bytes(len(one), wire), one.device)
            for c, one in like.items()
            if c != self._mesh.location[level] and len(one)
        }
        self._exchange(op, level, sends, receives)
        return {c: coder.apart(tensor_of(one), 1, len(like[c]), wire)[0].to(like[c].device) for c, one in receives.items()}

    def _exchange(self, op: Op, level: int, sends: Mapping[int, Message], receives: Mapping[int, Message]) -> None:
        peer = self._mesh.peer
        self._send(
            {peer(level, c): message for c, message in sends.items()},
            {peer(level, c): buffer for c, buffer in receives.items()},
            self._mesh.label(op, level),
        )


def flat_gradients(parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> Tensor:
    """[D] zeros of which each ``grad`` becomes a view, to stay: backward adds into it, and the sum over ranks needs no copy."""
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        set_gradient(parameter, part.view_as(parameter))
    return flat
