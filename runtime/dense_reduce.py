"""Sum of the dense gradients over all ranks: reduce-scatter innermost level first, all-gather outermost first.

Only a 1/(GPUs per DC) share of the gradient crosses a datacenter's border per GPU. Every element is summed on exactly one
rank, in the order of coordinates, so all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridep.traffic import Op, split_sizes
from runtime.mesh import Mesh
from runtime.transport import Transport


def all_reduce(mesh: Mesh, transport: Transport, flat_D: Tensor) -> None:
    """Replace [D] by its sum over all ranks, in place."""
    levels = [level for level, size in enumerate(mesh.sizes) if size > 1]
    shards = [flat_D]
    for level in reversed(levels):
        shards.append(_reduce_scatter(mesh, transport, level, shards[-1]))
    # Each shard is a view of the one before, so the gathered sums end up in ``flat_D`` itself.
    for level in levels:
        shards.pop()
        _all_gather(mesh, transport, level, shards[-1])


def _reduce_scatter(mesh: Mesh, transport: Transport, level: int, shard: Tensor) -> Tensor:
    own, size = mesh.location[level], mesh.sizes[level]
    parts = torch.split(shard, split_sizes(len(shard), size))
    others = [c for c in range(size) if c != own]
    arrived = {c: torch.empty_like(parts[own]) for c in others}
    transport.exchange(
        {mesh.peer(level, c): parts[c] for c in others},
        {mesh.peer(level, c): arrived[c] for c in others},
        mesh.label(Op.DENSE_REDUCE_SCATTER, level),
    )
    total = torch.zeros_like(parts[own])
    for c in range(size):
        total += parts[own] if c == own else arrived[c]
    parts[own].copy_(total)
    return parts[own]


def _all_gather(mesh: Mesh, transport: Transport, level: int, shard: Tensor) -> None:
    own, size = mesh.location[level], mesh.sizes[level]
    parts = torch.split(shard, split_sizes(len(shard), size))
    others = [c for c in range(size) if c != own]
    transport.exchange(
        {mesh.peer(level, c): parts[own] for c in others},
        {mesh.peer(level, c): parts[c] for c in others},
        mesh.label(Op.DENSE_ALL_GATHER, level),
    )


def flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """[D] zeros of which each ``grad`` becomes a view, to stay: backward adds into it, and the sum over ranks needs no copy."""
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
