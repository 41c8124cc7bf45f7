"""Dispatch and combine between ranks that see each other's memory (GPUs under one NVLink domain): no message, no copy
beside the one into the destination, no wait on the host.

Every rank owns a buffer with one region per source. A source pushes its rows into its region at each destination, once
per destination however many of its experts are there; partial sums wait in the destination's own buffer until the source
pulls and adds them. Backward mirrors both. Regions hold ``tokens`` rows, so nothing can overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.kernels.errors import KernelInputError
from runtime.kernels.launch import Peers, ceil_div, require, worst_case_rows
from runtime.kernels.reference import Route
from runtime.kernels.tokens import TokenKernels

_ALIGNED = 256


class SharedMemory(Protocol):
    """One buffer per rank, all of the same size and readable and writable by every rank's kernels."""

    rank: int
    local: Tensor
    """[bytes] uint8: this rank's own."""
    addresses: Sequence[int]
    """Where each rank's buffer begins, as this process sees it."""

    def barrier(self) -> None:
        """Work that any rank queued before its barrier is complete before work that any rank queues after it."""


class SymmetricMemory:
    """Shared memory of the CUDA devices of a process group, through torch's symmetric memory."""

    def __init__(self, num_bytes: int, group: torch.distributed.ProcessGroup, device: torch.device) -> None:
        # An interface that torch still calls private is loaded only where it is used.
        import torch.distributed._symmetric_memory as symmetric

        self.local = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self.local, group)
        self.rank = int(self._handle.rank)
        offset = int(getattr(self._handle, "offset", 0))
        self.addresses = [int(address) + offset for address in self._handle.buffer_ptrs]

    def barrier(self) -> None:
        """On the current stream; the host does not wait."""
        self._handle.barrier(channel=0)


class ExpertRows(NamedTuple):
    """Rows of all ranks in the order of this rank's experts, and the way back."""

    x: Tensor
    """[R, H]: expert e's rows are ``local.offsets[e]`` and on."""
    weights: Tensor
    """[ranks * tokens, K] gate weights of the rows that arrived."""
    local: Route
    """From rows that arrived to rows of experts; ``status`` says whether all had room."""
    away: Route
    """From this rank's tokens to their places at the ranks."""


class PeerDomain:
    """The exchange of one rank; all ranks call the same methods in the same order."""

    @staticmethod
    def bytes_needed(*, ranks: int, tokens: int, hidden: int, top_k: int, dtype: torch.dtype) -> int:
        """Size of each rank's buffer."""
        return _layout(ranks, tokens, hidden, top_k, dtype)[1]

    def __init__(
        self, kernels: TokenKernels, memory: SharedMemory, *, tokens: int, hidden: int, top_k: int, dtype: torch.dtype
    ) -> None:
        """``tokens``: most rows that a rank sends at a time. Raises KernelInputError for a buffer that is too small."""
        ranks = len(memory.addresses)
        layout, needed = _layout(ranks, tokens, hidden, top_k, dtype)
        if memory.local.numel() < needed:
            raise KernelInputError("PeerDomain", "memory", f"has {memory.local.numel()} bytes, must have {needed}")
        self.kernels, self.memory, self.ranks, self.tokens = kernels, memory, ranks, tokens
        device = memory.local.device
        self._mine: dict[str, Tensor] = {}
        self._peers: dict[str, Peers] = {}
        for name, (begin, shape, part_dtype) in layout.items():
            size = shape[0] * shape[1] * part_dtype.itemsize
            self._mine[name] = memory.local[begin : begin + size].view(part_dtype).view(shape)
            addresses = torch.tensor([address + begin for address in memory.addresses], dtype=torch.int64, device=device)
            self._peers[name] = Peers(addresses=addresses, rows=shape[0], alignment=16)
        own = torch.arange(ranks, dtype=torch.int32, device=device) * ranks + memory.rank
        none = torch.zeros(1, dtype=torch.int32, device=device)
        self._count_route = Route(own[:, None].contiguous(), none, torch.zeros(2, dtype=torch.int32, device=device), none)

    def dispatch(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        rank_of: Tensor,
        place_of: Tensor,
        num_places: int,
        *,
        multiple: int = 1,
        capacity: int | None = None,
    ) -> ExpertRows:
        """Rows ``x`` [N, H] with ``weights`` and ``ids`` [N, K] to the ranks that serve them, and there to their experts.

        ``rank_of`` [E] int32: the rank that serves an expert, -1 for none here; ``place_of`` [E] int32: an expert's place
        among this rank's ``num_places``, -1 for another rank's. Groups are padded to ``multiple``; R is ``capacity``, or room
        for any routing. Differentiable in ``x`` and ``weights``.
        """
        if len(ids) > self.tokens:
            raise KernelInputError("PeerDomain", "ids", f"has {len(ids)} rows, the domain was made for {self.tokens}")
        if capacity is None:
            capacity = worst_case_rows(self.ranks * self.tokens * ids.shape[1], num_places, multiple)
        where = _Where(rank_of, place_of, num_places, multiple, capacity)
        rows, row_weights, *routes = _PeerDispatch.apply(x, weights, ids, where, self)  # type: ignore[no-untyped-call]
        return ExpertRows(rows, row_weights, Route(*routes[:4]), Route(*routes[4:]))

    def combine(self, y: Tensor, rows: ExpertRows, *, multiple: int = 1) -> Tensor:
        """[N, H]: each token's weighted sum over ``y`` [R, H], the experts' outputs for ``rows`` at all ranks. Sums are made at
        the serving rank and added at the token's. Differentiable in ``y`` and in ``rows.weights``."""
        result: Tensor = _PeerCombine.apply(y, rows.weights, rows.local, rows.away, multiple, self)  # type: ignore[no-untyped-call]
        return result

    def push(self, x: Tensor, away: Route) -> Tensor:
        """Rows into the peers' buffers; returns what lies here then, [ranks * tokens, H], until the next exchange."""
        self._require_as_made("x", x, "rows")
        self.memory.barrier()  # nobody reads what was there before
        self.kernels.dispatch(x, away, 0, peers=self._peers["rows"])
        self.memory.barrier()
        return self._mine["rows"]

    def push_routing(self, weights: Tensor, ids: Tensor, rank_of: Tensor, away: Route) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, weights, rows per source) that travel beside the next ``push``; readable after it."""
        mine, peers = self._mine, self._peers
        self._require_as_made("weights", weights, "weights")
        self._require_as_made("ids", ids, "ids")
        self.memory.barrier()
        self.kernels.carry(ids, weights, rank_of, away.slot, 0, peers=(peers["ids"], peers["weights"]))
        self.kernels.dispatch(away.counts[:, None], self._count_route, 0, peers=peers["counts"])
        return mine["ids"], mine["weights"], mine["counts"].flatten()

    def _require_as_made(self, name: str, tensor: Tensor, part: str) -> None:
        """Raises KernelInputError for rows that are no such as peers' buffers have room for."""
        room = self._mine[part]
        require("PeerDomain", name, tensor, (room.dtype,), (None, room.shape[1]), room.device)

    @property
    def results(self) -> Tensor:
        """[ranks * tokens, H]: where this rank leaves what the sources ``pull``."""
        return self._mine["results"]

    def pull(self, away: Route) -> Tensor:
        """[N, H]: the sum of the rows that wait in the peers' results."""
        self.memory.barrier()
        out = self.kernels.combine(self._mine["results"], away.slot, peers=self._peers["results"])
        self.memory.barrier()  # results may be written again
        return out

    def pull_weights(self, grad_weights: Tensor, ids: Tensor, rank_of: Tensor, away: Route) -> Tensor:
        """[N, K]: gradients of the weights, of which each rank brings those of the rows that it served."""
        self._mine["weights"].copy_(grad_weights)
        self.memory.barrier()
        out = self.kernels.carry_back(self._mine["weights"], ids, rank_of, away.slot, peers=self._peers["weights"])
        self.memory.barrier()
        return out


class _Where(NamedTuple):
    """Which rank and place serves an expert, and how rows are laid out there."""

    rank_of: Tensor
    place_of: Tensor
    num_places: int
    multiple: int
    capacity: int


class _PeerDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, where: _Where, domain: PeerDomain) -> tuple[Tensor, ...]:
        kernels, region = domain.kernels, domain.ranks * domain.tokens
        first = domain.memory.rank * domain.tokens
        away = kernels.route(
            ids, where.rank_of, domain.ranks, capacity=domain.tokens, stride=region, first=first, deduplicate=True
        )
        row_ids, row_weights, counts = domain.push_routing(weights.contiguous(), ids, where.rank_of, away)
        arrived = domain.push(x.contiguous(), away)
        local = kernels.route(
            row_ids,
            where.place_of,
            where.num_places,
            multiple=where.multiple,
            capacity=where.capacity,
            source_counts=counts,
            source_rows=domain.tokens,
        )
        rows = kernels.dispatch(arrived, local, where.capacity, multiple=where.multiple)
        # The buffer's own weights do not outlive the next exchange; regions hold nothing past their source's last row.
        row_weights = torch.where(local.slot >= 0, row_weights, 0)
        ctx.domain, ctx.local, ctx.away = domain, local, away
        ctx.save_for_backward(ids, where.rank_of)
        ctx.mark_non_differentiable(*local, *away)
        return rows, row_weights, *local, *away

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ids, rank_of = ctx.saved_tensors
        domain: PeerDomain = ctx.domain
        domain.kernels.combine(gradients[0].contiguous(), ctx.local.slot, out=domain.results)
        grad_x = domain.pull(ctx.away)
        return grad_x, domain.pull_weights(gradients[1], ids, rank_of, ctx.away), None, None, None


class _PeerCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, local: Route, away: Route, multiple: int, domain: PeerDomain) -> Tensor:
        ctx.domain, ctx.local, ctx.away, ctx.multiple = domain, local, away, multiple
        y = y.contiguous()
        ctx.save_for_backward(y, weights)
        # Sums are made where the sources read them.
        domain.kernels.combine(y, local.slot, weights, out=domain.results)
        return domain.pull(away)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, weights = ctx.saved_tensors
        arrived = ctx.domain.push(gradients[0].contiguous(), ctx.away)
        grads = ctx.domain.kernels.combine_backward(arrived, y, ctx.local, weights, multiple=ctx.multiple)
        return *grads, None, None, None, None


def _layout(
    ranks: int, tokens: int, hidden: int, top_k: int, dtype: torch.dtype
) -> tuple[dict[str, tuple[int, tuple[int, int], torch.dtype]], int]:
    """(part -> (first byte, shape, element type), bytes in all)."""
    rows = ranks * tokens
    parts = {
        "rows": ((rows, hidden), dtype),
        "results": ((rows, hidden), dtype),
        "ids": ((rows, top_k), torch.int32),
        "weights": ((rows, top_k), dtype),
        "counts": ((ranks, 1), torch.int32),
    }
    layout, begin = {}, 0
    for name, (shape, part_dtype) in parts.items():
        layout[name] = (begin, shape, part_dtype)
        begin += ceil_div(shape[0] * shape[1] * part_dtype.itemsize, _ALIGNED) * _ALIGNED
    return layout, begin
